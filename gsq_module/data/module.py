"""The data module: text into token rows once, then loaders over the samples of whichever unit is being refined."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch
from jsonargparse.typing import NonNegativeInt, PositiveInt
from lightning.pytorch import LightningDataModule
from torch import Tensor
from typing_extensions import override

from gsq_module import ranks
from gsq_module.data.loader import MicrobatchLoader, UnitData
from gsq_module.data.packing import pack
from gsq_module.data.sampler import MicrobatchSampler
from gsq_module.data.sources import TextSource
from gsq_module.problems import raise_collected

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_EVALUATION_SEED = 0
"""Evaluation takes the same rows in every run: figures of runs with different `seed` can be compared."""

_FORWARD_TOKENS = 4096
"""Tokens that pass through a block at once where nothing else is asked for."""


class CalibrationData(LightningDataModule):
    """The text a model is quantized with, and the texts it is measured on.

    Tokens are packed into sequences without padding. Training, validation and GPTQ sequences never overlap. Loaders run
    without worker processes, and there is no key for them: samples are already in memory, and workers would only
    copy them through /dev/shm, which is tiny in many containers ("Bus error").

    Args:
        calibration: Text to calibrate and refine on.
        evaluation: Held-out texts by name, for perplexities; the first is the headline figure.
        seq_len: Tokens of a calibration sequence.
        train_samples: Sequences that every unit is refined on. Host memory for hidden states grows with it.
        validation_samples: Sequences that decide whether a refined unit is better than its start.
        gptq_samples: Sequences that the Hessians of the initial codes are gathered on.
        evaluation_samples: Sequences of each evaluation text.
        evaluation_seq_len: Tokens of an evaluation sequence (default: `seq_len`). Perplexities of different lengths
            cannot be compared.
        batch_size: Sequences of an optimizer step, over all devices and accumulated microbatches. Changes the result.
        microbatch_size: Sequences one device holds at once (default: its whole share of the batch). Changes only memory
            and speed. Lower it when memory runs out.
        forward_batch_size: Sequences that pass through a block at once outside refinement (default: as many as make
            4096 tokens, at least one). Changes only memory and speed.
        seed: Of the choice and order of calibration sequences. Evaluation sequences do not depend on it.
        pin_memory: Copy hidden states between host memory and CUDA devices through a few page-locked buffers of one
            batch. Turn it off where the host refuses them, as WSL2 may ("CUDA error: invalid argument"): copies then
            wait for the device. Without CUDA it has no effect.

    Attributes:
        train: int64 `[train_samples, seq_len]`, once `tokenize` has run; so are the next three.
        validation: int64 `[validation_samples, seq_len]`.
        gptq: int64 `[gptq_samples, seq_len]`.
        evaluation_tokens: int64 `[evaluation_samples, evaluation_seq_len]` by name, in the order of `evaluation`.
    """

    train: Tensor
    validation: Tensor
    gptq: Tensor
    evaluation_tokens: dict[str, Tensor]

    def __init__(
        self,
        calibration: TextSource,
        evaluation: dict[str, TextSource],
        seq_len: PositiveInt = 2048,
        train_samples: PositiveInt = 1024,
        validation_samples: PositiveInt = 32,
        gptq_samples: PositiveInt = 128,
        evaluation_samples: PositiveInt = 64,
        evaluation_seq_len: PositiveInt | None = None,
        batch_size: PositiveInt = 16,
        microbatch_size: PositiveInt | None = None,
        forward_batch_size: PositiveInt | None = None,
        seed: NonNegativeInt = 0,
        pin_memory: bool = True,
    ) -> None:
        super().__init__()
        self.calibration = calibration
        self.evaluation = evaluation
        self.seq_len = seq_len
        self.train_samples = train_samples
        self.validation_samples = validation_samples
        self.gptq_samples = gptq_samples
        self.evaluation_samples = evaluation_samples
        self.evaluation_seq_len = evaluation_seq_len or seq_len
        self.batch_size = batch_size
        self.microbatch_size = microbatch_size
        self.forward_batch_size = forward_batch_size
        self.seed = seed
        self.pin_memory = pin_memory
        self._bound: tuple[UnitData, UnitData] | None = None

    def check(self, texts: bool = True) -> None:
        """Look for everything that would make `tokenize` or training fail, before anything heavy is loaded.

        Args:
            texts: Whether to look at the sources of text too.

        Raises:
            ValueError: Lists all problems.
        """
        problems: list[str] = []
        sources = {"data.calibration": self.calibration}
        sources |= {f"data.evaluation.{name}": source for name, source in self.evaluation.items()}
        for key, source in sources.items() if texts else ():
            with _noting(problems, key):
                source.check()
        if not self.evaluation:
            problems.append("data.evaluation: {} names no text; give at least one, the first is the headline figure")
        if self.evaluation_seq_len < 2:
            problems.append(
                f"data.evaluation_seq_len: {self.evaluation_seq_len} leaves no token to predict; 2 is the least"
            )
        if self.batch_size > self.train_samples:
            problems.append(
                f"data.batch_size: {self.batch_size} is more than data.train_samples={self.train_samples}, "
                "so that no optimizer step could be made; lower it or raise train_samples"
            )
        if self.microbatch_size is not None and self.batch_size % self.microbatch_size:
            problems.append(
                f"data.batch_size: {self.batch_size} is not a multiple of data.microbatch_size={self.microbatch_size}; "
                f"microbatch_size could be {_one_of(_divisors(self.batch_size))}"
            )
        raise_collected(problems)

    def check_ranks(self, world_size: int) -> list[str]:
        """What keeps the samples from being shared by so many devices; empty where nothing does."""
        return [
            f"data.{key}: {count} samples cannot be shared by {world_size} devices. Set it to {world_size} or more"
            for key, count in (("validation_samples", self.validation_samples), ("gptq_samples", self.gptq_samples))
            if count < world_size
        ]

    def tokenize(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Read the texts and fill `train`, `validation`, `gptq` and `evaluation_tokens`.

        Args:
            tokenizer: The model's.

        Raises:
            ValueError: Texts are empty, too short, or cannot be read; lists all of them.
        """
        problems: list[str] = []
        wanted = (
            f"data.calibration (train_samples={self.train_samples}, validation_samples={self.validation_samples}, "
            f"gptq_samples={self.gptq_samples}, seq_len={self.seq_len})"
        )
        with _noting(problems, wanted):
            self._tokenize_calibration(tokenizer)
        try:
            self.tokenize_evaluation(tokenizer)
        except ValueError as error:
            problems.append(str(error))
        raise_collected(problems)

    def tokenize_evaluation(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Read the evaluation texts alone and fill `evaluation_tokens`.

        Raises:
            ValueError: As `tokenize`.
        """
        problems: list[str] = []
        self.evaluation_tokens = {}
        for name, source in self.evaluation.items():
            wanted = (
                f"data.evaluation.{name} (evaluation_samples={self.evaluation_samples}, "
                f"evaluation_seq_len={self.evaluation_seq_len})"
            )
            with _noting(problems, wanted):
                self.evaluation_tokens[name] = _rows(
                    source, tokenizer, self.evaluation_seq_len, self.evaluation_samples, _EVALUATION_SEED
                )
        raise_collected(problems)

    def _tokenize_calibration(self, tokenizer: PreTrainedTokenizerBase) -> None:
        total = self.validation_samples + self.gptq_samples + self.train_samples
        rows = _rows(self.calibration, tokenizer, self.seq_len, total, self.seed)
        # Validation is cut off before the rows are mixed, so that training shares at most one document with it.
        # The few rows of GPTQ are drawn from all the others, so that they come from as many documents as possible.
        self.validation = rows[: self.validation_samples]
        others = rows[self.validation_samples :]
        others = others[torch.from_numpy(np.random.default_rng(self.seed).permutation(len(others)))]
        self.gptq = others[: self.gptq_samples]
        self.train = others[self.gptq_samples :]

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of an epoch; samples that fill no batch are left out of it."""
        return self.train_samples // self.batch_size

    def accumulate_grad_batches(self, world_size: int) -> int:
        """Microbatches a device accumulates in one optimizer step.

        Args:
            world_size: Devices that share a batch.

        Raises:
            ValueError: `batch_size` cannot be shared evenly.
        """
        rows_at_once = (self.microbatch_size or 1) * world_size
        if self.batch_size % rows_at_once:
            times = f"data.microbatch_size={self.microbatch_size} x " if self.microbatch_size else ""
            lower, upper = (
                self.batch_size // rows_at_once * rows_at_once,
                -(-self.batch_size // rows_at_once) * rows_at_once,
            )
            remedy = f"Set batch_size to {f'{lower} or {upper}' if lower else upper}"
            if self.microbatch_size and self.batch_size % world_size == 0:
                remedy += f", or microbatch_size to {_one_of(_divisors(self.batch_size // world_size))}"
            raise ValueError(
                f"data.batch_size: {self.batch_size} is not a multiple of {times}{world_size} devices. {remedy}"
            )
        return self.batch_size // (self._microbatch_size(world_size) * world_size)

    def microbatch_sizes(self, rank: int = 0, world_size: int = 1) -> set[int]:
        """Sizes of the microbatches that the loaders yield to one of `world_size` devices."""
        size = self._microbatch_size(world_size)
        validation = MicrobatchSampler(
            self.validation_samples, self.batch_size, size, self.seed, rank, world_size, False
        )
        return {size} | {len(rows) for rows in validation}

    def sequences_at_once(self, seq_len: int) -> int:
        """Sequences of this length that pass through a block at once outside refinement."""
        return self.forward_batch_size or max(1, _FORWARD_TOKENS // seq_len)

    def bind(self, train: UnitData, validation: UnitData) -> None:
        """Set what the loaders of the next fit read."""
        self._bound = (train, validation)

    @override
    def train_dataloader(self) -> MicrobatchLoader:
        assert self._bound is not None, "bind() comes before fit"
        return self._loader(self._bound[0], shuffle=True)

    @override
    def val_dataloader(self) -> MicrobatchLoader:
        assert self._bound is not None, "bind() comes before fit"
        return self._loader(self._bound[1], shuffle=False)

    def _loader(self, data: UnitData, shuffle: bool) -> MicrobatchLoader:
        world_size = ranks.world_size()
        self.accumulate_grad_batches(world_size)
        order = MicrobatchSampler(
            num_samples=len(data),
            batch_size=self.batch_size,
            microbatch_size=self._microbatch_size(world_size),
            seed=self.seed,
            rank=ranks.rank(),
            world_size=world_size,
            shuffle=shuffle,
        )
        return MicrobatchLoader(data, order)

    def _microbatch_size(self, world_size: int) -> int:
        return self.microbatch_size or self.batch_size // world_size


def _rows(
    source: TextSource, tokenizer: PreTrainedTokenizerBase, seq_len: int, num_sequences: int, seed: int
) -> Tensor:
    return pack(source.documents(tokenizer), tokenizer, seq_len, num_sequences, None if source.streams else seed)


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _one_of(numbers: list[int]) -> str:
    return " or ".join(map(str, numbers))


@contextmanager
def _noting(problems: list[str], key: str) -> Iterator[None]:
    """Append what a user can mend to `problems`; let everything else through."""
    try:
        yield
    except (ValueError, OSError) as error:
        problems.append(f"{key}: {error}")
