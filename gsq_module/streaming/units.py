"""The units of a block: the linears refined together, found by structure, and how the block adds their output.

A decoder block is read as `hidden = residual + branch` in each of its two halves. `branch` is the unit's output,
through a post-norm where there is one (Gemma); `residual` is the input of the norm before the unit. Both are found by
watching which tensors pass between the block's children, and checked on real hidden states.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gsq_module.problems import NumericalError, UserError
from gsq_module.quantization.hessian import numerical_advice
from gsq_module.streaming.calls import BlockCall, first_output

UNIT_CHILDREN = {
    "attention": ("self_attn", "linear_attn", "attention", "self_attention", "attn", "mixer", "temporal_block"),
    "mlp": ("mlp", "feed_forward", "ffn", "block_sparse_moe"),
}
"""Names that transformers' models give a block's token mixer and its feed-forward part."""


@dataclass
class Unit:
    """One unit of one block.

    Attributes:
        kind: `attention` or `mlp`.
        name: Module path in the model, e.g. `model.layers.3.mlp`.
        module: The block's child.
        linears: Layers to quantize, by path below the unit.
        pre_norm: The norm whose output the unit takes; None where it takes the residual itself.
        post_norm: The module that its output goes through before it is added; None where there is none.
        ends_block: Whether residual + branch of this unit is the block's result.
    """

    kind: str
    name: str
    module: nn.Module
    linears: dict[str, nn.Linear]
    pre_norm: nn.Module | None = None
    post_norm: nn.Module | None = None
    ends_block: bool = False

    def full_name(self, linear: str) -> str:
        """Module path of one of the linears in the model."""
        return f"{self.name}.{linear}" if linear else self.name


def find_unit(block: nn.Module, block_name: str, kind: str, ignore: Sequence[str]) -> Unit:
    """The unit of a block, not yet traced.

    Args:
        block: A decoder block, on any device, meta included.
        block_name: Its module path.
        kind: `attention` or `mlp`.
        ignore: Glob patterns on full module paths of linears that stay in float.

    Raises:
        ValueError: The block has no such child, its weights are no linear layers (fused experts, say), or `ignore`
            names all of them.
    """
    children = dict(block.named_children())
    child = next((name for name in UNIT_CHILDREN[kind] if name in children), None)
    if child is None:
        raise ValueError(
            f"model.units: {block_name} has no {kind} part under a known name ({', '.join(UNIT_CHILDREN[kind])}); "
            f"its children are {', '.join(children) or 'none'}"
        )
    name = f"{block_name}.{child}"
    linears = {path: module for path, module in children[child].named_modules() if isinstance(module, nn.Linear)}
    fused = [path for path, parameter in children[child].named_parameters() if is_fused(parameter)]
    if not linears or fused:
        raise ValueError(
            f"model.units: {name} keeps weights outside nn.Linear ({', '.join(fused) or 'no linear layer at all'}): "
            f"fused experts are not quantized. Leave {kind!r} out of model.units"
        )
    chosen = {
        path: linear
        for path, linear in linears.items()
        if not any(fnmatch.fnmatchcase(f"{name}.{path}", pattern) for pattern in ignore)
    }
    if not chosen:
        raise ValueError(
            f"model.ignore: {list(ignore)} names every linear of {name} ({', '.join(linears)}). "
            f"Leave {kind!r} out of model.units, or ignore less"
        )
    return Unit(kind, name, children[child], chosen)


def is_fused(parameter: nn.Parameter) -> bool:
    """Whether a parameter is a stack of matrices, such as the weights of all experts of a layer."""
    return parameter.ndim == 3 and parameter.shape[-1] > 1 and parameter.shape[-2] > 1


def indivisible_linears(unit: Unit, group_size: int) -> list[str]:
    """Linears of the unit whose inputs are no whole number of groups, as `name [out, in]`."""
    return [
        f"{unit.full_name(path)} [{linear.out_features}, {linear.in_features}]"
        for path, linear in unit.linears.items()
        if linear.in_features % group_size
    ]


@contextmanager
def hooks(handles: list[Any]) -> Iterator[None]:
    """Remove forward hooks at the end, whatever happens."""
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def trace_units(block: nn.Module, call: BlockCall, hidden: Tensor, units: Sequence[Unit], check: bool = True) -> None:
    """Find each unit's `pre_norm`, `post_norm` and `ends_block`; check that the block adds residual and branch.

    Args:
        block: Loaded block.
        call: Its call for the batch shape of `hidden`.
        hidden: Probe input `[batch, seq_len, hidden_size]`.
        units: Units to fill in.
        check: Whether tensors have data to look at; without, `ends_block` is not found and nothing is checked.

    Raises:
        UserError: The sum is not found in the block: targets from the original stream cannot be built.
        NumericalError: Its hidden states are not finite.
    """
    inputs: dict[nn.Module, Tensor] = {}
    outputs: dict[nn.Module, Tensor] = {}

    def watch(module: nn.Module, args: tuple, kwargs: dict, result: Any) -> None:
        inputs[module] = BlockCall.record(args, kwargs)[1]
        outputs[module] = first_output(result)

    with hooks([child.register_forward_hook(watch, with_kwargs=True) for child in block.children()]):
        result = call(block, hidden)
    for unit in units:
        unit.pre_norm = next((m for m, out in outputs.items() if out is inputs[unit.module]), None)
        unit.post_norm = next((m for m, taken in inputs.items() if taken is outputs[unit.module]), None)
        if not check:
            continue
        branch = outputs[unit.post_norm or unit.module]
        total = inputs[unit.pre_norm or unit.module] + branch
        unit.ends_block = _differ_little(total, result, branch)
        # Where another half follows, one of the block's children takes the sum.
        if not unit.ends_block and not any(_differ_little(total, taken, branch) for taken in inputs.values()):
            bad = result[~torch.isfinite(result)]
            if len(bad):
                raise NumericalError(
                    f"{unit.name}: the hidden states behind its block are not finite ({len(bad)} of {result.numel()} "
                    f"numbers; the first is {float(bad[0])}): {numerical_advice(result.dtype)}"
                )
            raise UserError(
                f"{unit.name}: its block does not add the unit's output to the residual stream in a way known here; "
                "use --model.target original_unit"
            )


def _differ_little(total: Tensor, known: Tensor, branch: Tensor) -> bool:
    """Whether two hidden states differ by much less than a unit adds, however small that is beside the residual."""
    if total.shape != known.shape:
        return False
    # In float32, where the norm of half-precision states does not overflow, and without copies in it.
    dtype = torch.promote_types(total.dtype, torch.float32)
    difference, size = (torch.linalg.vector_norm(values, dtype=dtype) for values in (total - known, branch))
    return bool(difference <= 1e-2 * size)


class _StopBlockError(Exception):
    """Ends a block's forward once what was asked for is caught."""


@dataclass
class Caught:
    """What one pass through a block showed of a unit. Tensors are `[batch, seq_len, hidden_size]`.

    Attributes:
        call: How the block calls the unit.
        inputs: Its hidden input.
        residual: What its branch is added to.
        branch: Its output, through the post-norm; None if the pass was stopped before.
    """

    call: BlockCall | None = None
    inputs: Tensor = field(default_factory=lambda: torch.empty(0))
    residual: Tensor = field(default_factory=lambda: torch.empty(0))
    branch: Tensor | None = None


@torch.no_grad()
def catch(block: nn.Module, call: BlockCall, hidden: Tensor, unit: Unit, with_branch: bool) -> Caught:
    """Run a block on `hidden` up to a unit's input, or through its branch, and return what passed."""
    caught = Caught()

    def before_norm(module: nn.Module, args: tuple, kwargs: dict) -> None:
        caught.residual = BlockCall.record(args, kwargs)[1]

    def before_unit(module: nn.Module, args: tuple, kwargs: dict) -> None:
        caught.call, caught.inputs = BlockCall.record(args, kwargs)
        if unit.pre_norm is None:
            caught.residual = caught.inputs
        if not with_branch:
            raise _StopBlockError

    def after_branch(module: nn.Module, args: tuple, result: Any) -> None:
        caught.branch = first_output(result)
        raise _StopBlockError

    handles = [unit.module.register_forward_pre_hook(before_unit, with_kwargs=True)]
    if unit.pre_norm is not None:
        handles.append(unit.pre_norm.register_forward_pre_hook(before_norm, with_kwargs=True))
    if with_branch:
        handles.append((unit.post_norm or unit.module).register_forward_hook(after_branch))
    with hooks(handles):
        try:
            call(block, hidden)
        except _StopBlockError:
            return caught
    raise AssertionError(f"{unit.name} was not called by its block")


@torch.no_grad()
def catch_sums(block: nn.Module, call: BlockCall, hidden: Tensor, units: Sequence[Unit]) -> tuple[Tensor, list[Tensor]]:
    """Run a block on `hidden`; return its result and, for each traced unit, residual + branch."""
    residuals: dict[str, Tensor] = {}
    sums: dict[str, Tensor] = {}

    def before(unit: Unit):
        def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
            residuals[unit.kind] = BlockCall.record(args, kwargs)[1]

        return hook

    def after(unit: Unit):
        def hook(module: nn.Module, args: tuple, result: Any) -> None:
            sums[unit.kind] = residuals.pop(unit.kind) + first_output(result)

        return hook

    handles = []
    for unit in units:
        start, end = unit.pre_norm or unit.module, unit.post_norm or unit.module
        handles += [
            start.register_forward_pre_hook(before(unit), with_kwargs=True),
            end.register_forward_hook(after(unit)),
        ]
    with hooks(handles):
        result = call(block, hidden)
    return result, [sums[unit.kind] for unit in units]


class Branch(nn.Module):
    """A unit as a module of its own: hidden input -> what is added to the residual stream.

    Args:
        unit: Traced unit.
        calls: How the block calls it, by batch size.
    """

    def __init__(self, unit: Unit, calls: dict[int, BlockCall]) -> None:
        super().__init__()
        self.unit = unit.module
        self.post_norm = unit.post_norm
        self.calls = calls

    def forward(self, inputs: Tensor) -> Tensor:
        """`[batch, seq_len, hidden_size]` -> the same shape."""
        branch = self.calls[inputs.shape[0]](self.unit, inputs)
        return branch if self.post_norm is None else first_output(self.post_norm(branch))
