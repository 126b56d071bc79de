"""Whether packed tensors have the shapes that `num_bits` and `group_size` of config.json give them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from compressed_tensors.compressors import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationScheme, QuantizationStrategy

from gsq_module.export.vllm import listed
from gsq_module.streaming.checkpoint import Checkpoint
from gsq_module.streaming.config_file import CONFIG_FILE

EXPORT_AGAIN = "write the export again: recipes/run.py export --config RECIPE"


@dataclass(frozen=True)
class Misfit:
    """A packed module whose tensors are not as its config group says.

    Attributes:
        module: Its path.
        group: Name of the config group.
        key: `num_bits` or `group_size`; empty where tensors are missing.
        value: What the group says.
        fitting: Values that fit what is stored; none where the tensors themselves are damaged.
        found: The tensor and its shape, or what is missing.
    """

    module: str
    group: str
    key: str
    value: int | None
    fitting: tuple[int, ...]
    found: str


def find_misfits(
    checkpoint: Checkpoint, groups: Mapping[str, QuantizationScheme], scheme_of: Mapping[str, QuantizationScheme | None]
) -> list[Misfit]:
    """Compare the shapes of all packed modules with their config groups. No codes are read.

    Args:
        checkpoint: The tensors as they are stored.
        groups: Config groups by name.
        scheme_of: Of `groups`, that of each packed module; modules with None are left out.
    """
    names = {id(scheme): name for name, scheme in groups.items()}
    return [
        misfit
        for module, scheme in scheme_of.items()
        if scheme is not None
        for misfit in _misfits_of(checkpoint, module, names[id(scheme)], scheme)
    ]


def misfit_problems(
    directory: Path, misfits: Sequence[Misfit], scheme_of: Mapping[str, QuantizationScheme | None]
) -> list[str]:
    """The misfits as texts, those that are alike in one: key, value, what would be right, next step.

    Args:
        directory: The checkpoint folder.
        misfits: As found.
        scheme_of: As for `find_misfits`.
    """
    sizes = Counter(id(scheme) for scheme in scheme_of.values())
    alike: dict[tuple, list[Misfit]] = {}
    for misfit in misfits:
        alike.setdefault((misfit.group, misfit.key, misfit.value, misfit.fitting), []).append(misfit)
    problems = []
    for (group, key, value, fitting), members in alike.items():
        right = " or ".join(map(str, fitting))
        setting = f"config_groups.{group}.weights.{key}"
        if not key:
            what, remedy = "packed, but not all of their tensors are there", EXPORT_AGAIN
        elif not fitting:
            what, remedy = f"no {key} fits the tensors, {setting}={value} neither", EXPORT_AGAIN
        else:
            what = f"{setting}={value} in {directory / CONFIG_FILE}, but stored with {key} {right}"
            if len(members) == sizes[id(scheme_of[members[0].module])]:
                remedy = f"set {setting} to {right}, or {EXPORT_AGAIN}"
            else:
                remedy = f"give these layers a config group of their own with {key} {right}, or {EXPORT_AGAIN}"
        (text,) = listed(what, [f"{member.module} ({member.found})" for member in members])
        problems.append(f"{text}. Next: {remedy}")
    return problems


def _misfits_of(checkpoint: Checkpoint, module: str, group: str, scheme: QuantizationScheme) -> list[Misfit]:
    weights = scheme.weights
    tensors = [f"{module}.{part}" for part in PackedQuantizationCompressor.compression_param_names(scheme)]
    lacking = [name for name in tensors if name not in checkpoint]
    if lacking:
        return [Misfit(module, group, "", None, (), f"lacks {', '.join(lacking)}")]
    shape = checkpoint.tensor(f"{module}.weight_shape").tolist()
    rows, columns = shape if len(shape) == 2 else (-1, -1)
    packed, scale = (checkpoint.shape(f"{module}.{part}") for part in ("weight_packed", "weight_scale"))
    found = []

    def words(bits: int) -> tuple[int, int]:
        return rows, math.ceil(columns * bits / 32)

    bits = weights.num_bits if weights is not None else 0
    if packed != words(bits):
        fitting = tuple(other for other in range(1, 9) if packed == words(other))
        text = f"weight_packed is {list(packed)}, not {list(words(bits))}"
        found.append(Misfit(module, group, "num_bits", bits, fitting, text))
    if weights is None or weights.strategy not in (QuantizationStrategy.GROUP, QuantizationStrategy.CHANNEL):
        return found
    size = weights.group_size if weights.group_size and weights.group_size > 0 else columns
    if columns % size or scale != (rows, columns // size):
        count = scale[1] if len(scale) == 2 and scale[0] == rows else 0
        fitting = (columns // count,) if count and columns % count == 0 else ()
        text = f"weight_scale is {list(scale)}, not {[rows, columns // size]}"
        found.append(Misfit(module, group, "group_size", weights.group_size, fitting, text))
    return found
