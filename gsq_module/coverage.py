"""What of a model is quantized, and what stays in float and why: from its geometry alone."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from torch import nn

from gsq_module.export import vllm
from gsq_module.geometry import count_blocks, find_units
from gsq_module.module import GSQModule
from gsq_module.outer import check_outer, outer_parts
from gsq_module.streaming.model import StreamedModel
from gsq_module.streaming.tree import causal_lm_names
from gsq_module.streaming.units import indivisible_linears, is_fused


@dataclass
class Coverage:
    """Parameters of a model by what becomes of them.

    Attributes:
        quantized: Module paths of the linears that are quantized, in block order; behind them embedding and head.
        quantized_parameters: Their weights.
        float_parameters: Parameters that stay in float, by reason.
        float_linears: Module paths of the linears that stay in float: the export's `ignore` list. Besides those of the
            module tree, linears that only the checkpoint has (MTP layers), and the names that linears have in the class
            that AutoModelForCausalLM builds. With a quantized embedding, those of the other embeddings too.
    """

    quantized: list[str] = field(default_factory=list)
    quantized_parameters: int = 0
    float_parameters: dict[str, int] = field(default_factory=dict)
    float_linears: list[str] = field(default_factory=list)

    @property
    def fraction(self) -> float:
        """Quantized parameters as a fraction of all, tied ones counted once."""
        return self.quantized_parameters / (self.quantized_parameters + sum(self.float_parameters.values()))


def check_geometry(model: StreamedModel, recipe: GSQModule) -> list[str]:
    """Everything about the recipe that this model's geometry refuses; empty when it fits."""
    problems: list[str] = []
    missing = model.missing_weights()
    if missing:
        stored = model.checkpoint.names()
        problems.append(
            f"model.path: {model.checkpoint.directory} lacks {len(missing)} weights that its config.json asks for: "
            f"{', '.join(missing[:6])}{' ...' if len(missing) > 6 else ''}; it has {', '.join(stored[:3])} ... . "
            "Complete it; or, where transformers converts another layout while loading (experts stored one by one), "
            "load it there and save_pretrained(..., save_original_format=False)"
        )
    indivisible: list[str] = []
    for index in range(count_blocks(model, recipe)):
        try:
            for unit in find_units(model, index, recipe):
                indivisible += indivisible_linears(unit, recipe.group_size)
        except ValueError as error:
            problems.append(str(error))
    if indivisible:
        problems.append(
            f"model.group_size={recipe.group_size} does not divide the input width of {len(indivisible)} linears: "
            f"{', '.join(indivisible[:6])}{' ...' if len(indivisible) > 6 else ''}. "
            "Choose a group_size that divides them (32, 64 and 128 are common), or keep them in float with model.ignore"
        )
    if recipe.num_blocks is not None and recipe.num_blocks > model.num_blocks:
        problems.append(f"model.num_blocks={recipe.num_blocks}: the model has {model.num_blocks} blocks")
    return problems + check_outer(model, recipe)


def serving_problems(model: StreamedModel, recipe: GSQModule) -> list[str]:
    """Why vLLM would not load the export of this recipe; no reason not to make it. Empty when nothing is known."""
    chosen = dict.fromkeys(
        unit.full_name(path)
        for index in range(count_blocks(model, recipe))
        for unit in find_units(model, index, recipe)
        for path in unit.linears
    )
    linears = [name for name, module in model.model.named_modules() if isinstance(module, nn.Linear)]
    problems = vllm.split_fused(chosen, [name for name in linears if name not in chosen])
    _, problem = vllm.kernel_of(recipe.grid.storage_bits, recipe.group_size)
    return [f"vLLM will not load the export: {text}" for text in [*problems, *([problem] if problem else [])]]


def measure_coverage(model: StreamedModel, recipe: GSQModule) -> Coverage:
    """Sort a model's parameters; weights need not be loaded."""
    coverage = Coverage()
    for index in range(count_blocks(model, recipe)):
        for unit in find_units(model, index, recipe):
            for path, linear in unit.linears.items():
                coverage.quantized.append(unit.full_name(path))
                coverage.quantized_parameters += linear.weight.numel()
    exported = set(coverage.quantized)
    layers: tuple[type[nn.Module], ...] = (nn.Linear,)
    for part in outer_parts(model, recipe):
        coverage.quantized.append(part.module)
        coverage.quantized_parameters += part.shape[0] * part.shape[1]
        exported.update(part.modules)
        if part.kind == "embedding":
            layers = (nn.Linear, nn.Embedding)  # the export names them by their class
    chosen = {f"{name}.weight" for name in coverage.quantized}
    modules = dict(model.model.named_modules())
    coverage.float_linears = [
        name for name, module in modules.items() if isinstance(module, layers) and name not in exported
    ]
    renamed = causal_lm_names(model.model)
    coverage.float_linears += [renamed[name] for name in coverage.float_linears if name in renamed]
    _add_checkpoint_only(coverage, model)
    tied = model.is_tied
    for name, parameter in model.model.named_parameters():
        if name in chosen or (tied and name == f"{model.head_path}.weight"):
            continue
        reason = _reason(name, parameter, modules[name.rpartition(".")[0]], model, recipe)
        coverage.float_parameters[reason] = coverage.float_parameters.get(reason, 0) + parameter.numel()
    return coverage


def _add_checkpoint_only(coverage: Coverage, model: StreamedModel) -> None:
    """Tensors that transformers leaves out of its module tree, such as MTP layers: they are copied as they are."""
    known = set(model.model.state_dict())
    for name in model.checkpoint.names():
        if name in known:
            continue
        shape = model.checkpoint.shape(name)
        reason = "in the checkpoint, not in transformers' model (MTP layers)"
        coverage.float_parameters[reason] = coverage.float_parameters.get(reason, 0) + math.prod(shape)
        if len(shape) == 2 and name.endswith(".weight"):
            coverage.float_linears.append(name.removesuffix(".weight"))


def _reason(name: str, parameter: nn.Parameter, owner: nn.Module, model: StreamedModel, recipe: GSQModule) -> str:
    if name == f"{model.embedding_path}.weight":
        return "embedding, tied with the head" if model.is_tied else "embedding"
    if name == f"{model.head_path}.weight":
        return "head"
    if not name.startswith(f"{model.blocks_path}."):
        return "outside the decoder blocks"
    if is_fused(parameter):
        return "fused experts"
    if not isinstance(owner, nn.Linear) or not name.endswith(".weight"):
        return "norms, biases and other small tensors"
    index = int(name.removeprefix(f"{model.blocks_path}.").partition(".")[0])
    if index >= count_blocks(model, recipe):
        return "blocks after model.num_blocks"
    unit_prefixes = [f"{unit.name}." for unit in find_units(model, index, recipe)]
    if any(name.startswith(prefix) for prefix in unit_prefixes):
        return "linears in model.ignore"
    return "linears outside model.units"
