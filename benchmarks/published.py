"""The published algorithm (arXiv 2604.18556) as a full refinement of a unit, in the place of the product's.

An own plain statement of it: the logits of all candidates are autograd parameters, every microbatch draws Gumbel noise
and builds the soft weight inside autograd, Lion steps on logits and scales. Data, targets, initial codes and the
measurements on hard codes are the product's, and so is the rule that a unit which got worse keeps its start.
"""

from __future__ import annotations

import math
import time
from itertools import islice

import torch
from logit_space import Lion, gumbel_like, logit_parameter, soft_weight
from torch import Tensor, nn

from gsq_module.module import DTYPES, GSQModule, UnitProblem
from gsq_module.quantization.grid import Grid, QuantizedWeight
from gsq_module.quantization.relaxation import hard_codes
from gsq_module.quantization.training_ops import squared_error
from gsq_module.recipe_run import Run
from gsq_module.refinement import Outcome
from gsq_module.streaming.activations import UnitSamples


class LogitWeight:
    """One linear's logits and scales.

    Args:
        name: Module path, of which the initial noise is drawn.
        start: Initial codes and scales, on the device.
        grid: Of the codes.
        recipe: Initial noise, logit dtype, seed.
    """

    def __init__(self, name: str, start: QuantizedWeight, grid: Grid, recipe: GSQModule) -> None:
        dtype = DTYPES[recipe.refinement.logit_dtype]
        self.logits = logit_parameter(name, start, grid, recipe.refinement, dtype, recipe.seed)
        self.scales = nn.Parameter(start.scales.float().clone())  # the start is kept where it is better
        self._start, self._grid = start, grid
        self._first = grid.first_candidate(start.codes)
        steps = torch.arange(grid.num_candidates, dtype=dtype, device=start.codes.device).view(-1, 1, 1) * grid.step
        self._values = steps + self._first.to(dtype) if grid.is_windowed else steps + grid.low

    def sample(self, temperature: float, logit_scale: float) -> Tensor:
        """A relaxed weight `[out_features, in_features]` with noise of its own."""
        noise = gumbel_like(self.logits)
        return soft_weight(self.logits, self.scales, self._values, noise, temperature, logit_scale)

    @torch.no_grad()
    def harden(self) -> QuantizedWeight:
        codes = hard_codes(self.logits, self._first, self._grid)
        return QuantizedWeight(codes, self.scales.to(self._start.scales.dtype)).to("cpu")


class PublishedRefiner:
    """What `BlockLoop.run` calls with each unit.

    Args:
        run: For its recipe, data and device.
    """

    def __init__(self, run: Run) -> None:
        self.recipe, self.data, self.device = run.recipe, run.data, run.device

    def __call__(self, problem: UnitProblem, train: UnitSamples, validation: UnitSamples) -> Outcome:
        """As `UnitRefiner`."""
        self.data.bind(train, validation)
        self.recipe.bind(problem, 0)
        try:
            return self._refine(problem)
        finally:
            self.recipe.release()

    def _refine(self, problem: UnitProblem) -> Outcome:
        began = time.perf_counter()
        measure = self.recipe.hard_error
        initial_error = measure(problem.initial, self.data.val_dataloader(), self.device)
        if problem.total_steps == 0:  # a unit that the recipe does not refine
            return Outcome(problem.initial, initial_error, None, 0.0, 0, time.perf_counter() - began)
        refined = self._fit(problem)
        refined_error = measure(refined, self.data.val_dataloader(), self.device)
        changed = sum(int((refined[name].codes != start.codes).sum()) for name, start in problem.initial.items())
        total = sum(start.codes.numel() for start in problem.initial.values())
        better = math.isfinite(refined_error) and refined_error < initial_error
        return Outcome(
            refined if better else problem.initial,
            initial_error,
            refined_error,
            changed / total if better else 0.0,
            problem.total_steps,
            time.perf_counter() - began,
        )

    def _fit(self, problem: UnitProblem) -> dict[str, QuantizedWeight]:
        settings = self.recipe.refinement
        weights = {
            name: LogitWeight(name, start.to(self.device), self.recipe.grid, self.recipe)
            for name, start in problem.initial.items()
        }
        names = {id(parameter): name for name, parameter in problem.student.named_parameters()}
        places = {name: names[id(parameter)] for name, parameter in problem.weights.items()}
        decayed = {"params": [weight.logits for weight in weights.values()], "weight_decay": settings.weight_decay}
        others = {"params": [weight.scales for weight in weights.values()], "weight_decay": 0.0}
        optimizer = Lion([decayed | {"lr": settings.lr}, others | {"lr": settings.scale_lr}], settings.betas)
        microbatches = self._microbatches()
        count = self.data.accumulate_grad_batches(1)
        for step in range(problem.total_steps):
            progress = step / max(1, problem.total_steps - 1)
            cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
            fraction = settings.final_lr_fraction + (1.0 - settings.final_lr_fraction) * cosine
            for group, lr in zip(optimizer.param_groups, (settings.lr, settings.scale_lr), strict=True):
                group["lr"] = lr * fraction
            temperature, logit_scale = (
                begin + (end - begin) * progress for begin, end in (settings.temperature, settings.logit_scale)
            )
            optimizer.zero_grad()
            for batch in islice(microbatches, count):
                inputs, targets, *importance = problem.prepare(tuple(part.to(self.device) for part in batch))
                dtype = next(iter(problem.weights.values())).dtype
                soft = {
                    places[name]: weight.sample(temperature, logit_scale).to(dtype) for name, weight in weights.items()
                }
                output = torch.func.functional_call(problem.student, soft, (inputs.to(dtype),))
                loss = squared_error(output, targets, *importance) / (problem.target_power * count)
                loss.backward()
            optimizer.step()
        return {name: weight.harden() for name, weight in weights.items()}

    def _microbatches(self):
        """Those of one epoch after the other."""
        loader = self.data.train_dataloader()
        while True:
            yield from loader
