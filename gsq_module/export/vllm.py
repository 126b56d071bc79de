"""vLLM's rules for a `pack-quantized` checkpoint, from names and schemes alone; vLLM itself is not needed.

Read in vLLM's sources, paths below vllm/model_executor: layers/quantization/compressed_tensors/utils.py (ignore lists,
targets, fused layers), .../schemes/compressed_tensors_wNa16.py (bit widths), .../compressed_tensors_embedding.py,
kernels/linear/mixed_precision/marlin.py and humming.py (group sizes, compute capability), models/registry.py (classes),
models/qwen3_5.py (fused projections); and docs/CONFIG.md of the Humming kernels for their group sizes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from compressed_tensors.quantization import QuantizationScheme, QuantizationStrategy, QuantizationType

FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_b", "in_proj_a"),
)
"""Linears that become one layer when they have the same parent. Its parts must share a scheme, or all be ignored."""

CLASSES = {
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "GemmaForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "Gemma3ForConditionalGeneration",
    "Phi3ForCausalLM",
}
"""Classes that were looked up in its registry; it has many more."""

WRAPPER_PREFIXES = (
    ("model.visual.", "visual."),
    ("model.language_model.", "language_model.model."),
    ("lm_head.", "language_model.lm_head."),
)
"""How the Qwen3.5 wrapper renames the checkpoint's modules, and with them targets and ignore list."""

WITHOUT_PACKED_EMBEDDING = {"Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"}
"""Classes that create their embedding in float whatever the configuration says (vLLM's issue 54304)."""

MARLIN_BITS = (4, 8)
MARLIN_GROUPS = (32, 64, 128)
EMBEDDING_BITS = (2, 4, 8)
"""Widths of which a whole number fits a word: the embedding's lookup reads no code from two words."""
MARLIN = "Marlin kernels (CUDA, compute capability 7.5 or newer)"
HUMMING = "Humming kernels (CUDA, compute capability 7.5 or newer; a package beside vLLM)"


SHOWN = 6
"""Layers that a message names before it only counts."""


def split_fused(packed: Mapping[str, object], in_float: Iterable[str]) -> list[str]:
    """Fused layers that vLLM refuses, a text for all that are refused alike.

    Args:
        packed: Scheme by module path; two parts may be fused where these are equal.
        in_float: Paths of the linears in float.
    """
    refused: dict[str, list[str]] = {}
    in_float = dict.fromkeys(in_float)
    for parent in dict.fromkeys(name.rpartition(".")[0] for name in [*packed, *in_float]):
        for leaves in FUSED:
            kept = [leaf for leaf in leaves if f"{parent}.{leaf}" in in_float]
            schemes = [packed[name] for leaf in leaves if (name := f"{parent}.{leaf}") in packed]
            one_layer = f"{', '.join(leaves[:-1])} and {leaves[-1]} are one layer there, but"
            if kept and schemes:
                what = f"{one_layer} {', '.join(kept)} {'stays' if len(kept) == 1 else 'stay'} in float, the rest not"
                refused.setdefault(what, []).append(parent)
            elif any(scheme != schemes[0] for scheme in schemes):
                refused.setdefault(f"{one_layer} differ in bits or group size", []).append(parent)
    return [problem for what, parents in refused.items() for problem in listed(what, parents)]


def kernel_of(bits: int, group_size: int | None) -> tuple[str | None, str | None]:
    """What computes with symmetric integers of a width and group size: `(kernels it needs, None)` or `(None, problem)`.

    Args:
        bits: As stored.
        group_size: Input columns a scale; None or -1 for one scale a row.
    """
    by_row = group_size is None or group_size == -1
    if not 2 <= bits <= 8:
        return None, f"{bits} bits: 2 to 8 are taken"
    if bits in MARLIN_BITS and (by_row or group_size in MARLIN_GROUPS):
        return MARLIN, None
    # 8 would do with one of the two kinds of instructions, but not on Hopper.
    if group_size is not None and not by_row and (group_size < 16 or group_size & (group_size - 1)):
        return None, f"group size {group_size} at {bits} bits: powers of two from 16 on are taken"
    return HUMMING, None


def scheme_problems(schemes: Sequence[QuantizationScheme]) -> tuple[list[str], list[str]]:
    """Problems of config groups, and the kernels they need."""
    problems, needs = [], []
    for scheme in schemes:
        weights = scheme.weights
        if weights is None or scheme.input_activations is not None:
            problems.append(f"the group of {scheme.targets} is not of weights alone")
        elif weights.type != QuantizationType.INT or not weights.symmetric or weights.dynamic:
            problems.append(f"the group of {scheme.targets} has no static symmetric integers")
        elif weights.strategy not in (QuantizationStrategy.GROUP, QuantizationStrategy.CHANNEL):
            problems.append(
                f"the group of {scheme.targets} has strategy {weights.strategy}; group and channel are taken"
            )
        else:
            kernel, problem = kernel_of(weights.num_bits, weights.group_size)
            problems += [problem] if problem else []
            needs += [f"{weights.num_bits} bits need {kernel}"] if kernel else []
    return list(dict.fromkeys(problems)), list(dict.fromkeys(needs))


def layer_problems(
    packed: Mapping[str, QuantizationScheme | None],
    in_float: Sequence[str],
    groups: Sequence[QuantizationScheme],
    ignore: Sequence[str],
    embedding: str,
    head: str | None,
) -> list[str]:
    """Layers that vLLM would create in another form than the one they are stored in.

    Args:
        packed: Scheme by module path of everything that is packed; None where no config group is for it.
        in_float: Paths of the linears in float; all that the checkpoint holds, MTP layers as well.
        groups: All config groups.
        ignore: Of the quantization_config.
        embedding: Path of the embedding.
        head: Path of the head; None where there is none.
    """
    wrapped = embedding.startswith("model.language_model.")
    ignored = [_renamed(pattern, wrapped) for pattern in ignore]
    targets = [_renamed(target, wrapped) for group in groups for target in group.targets]

    def matches(name: str, patterns: Sequence[str], class_name: str = "") -> bool:
        name = _renamed(f"{name}.", wrapped)[:-1]  # prefixes end with a dot, which the path of the head has not
        named = any(re.match(p[3:], name) if p.startswith("re:") else p == name for p in patterns)
        # Class names are compared without case, and by parts.
        return named or any(p.lower() in class_name.lower() for p in patterns if not p.startswith("re:"))

    problems = listed("packed, but on the ignore list", [name for name in packed if matches(name, ignored)])
    none = [name for name in packed if packed[name] is None and name not in (head, embedding)]
    problems += listed("packed, but no target is for them", [name for name in none if not matches(name, ignored)])
    # A head or an embedding that no target names is created in float; any other linear is taken to be packed.
    loose = [name for name in in_float if name not in (head, embedding) and not matches(name, ignored)]
    problems += listed("in float, but not on the ignore list", loose)
    if head is not None and head in packed and not matches(head, targets, "ParallelLMHead"):
        problems.append(f"{head} is packed, but no target names it: the class Linear does not mean a head there")
    named = head is not None and head in in_float and matches(head, targets, "ParallelLMHead")
    if head is not None and named and not matches(head, ignored):
        problems.append(f"{head} is in float, but a target names it and the ignore list does not")
    if embedding in packed:
        scheme = packed[embedding]
        weights = None if scheme is None else scheme.weights
        if not matches(embedding, targets, "VocabParallelEmbedding"):
            problems.append(f"{embedding} is packed, but no target names it")
        if weights is not None and weights.num_bits not in EMBEDDING_BITS:
            problems.append(f"{embedding} has {weights.num_bits} bits: embeddings of 2, 4 and 8 are taken")
    return problems + split_fused(packed, in_float)


def _renamed(name: str, wrapped: bool) -> str:
    if wrapped:
        for ours, theirs in WRAPPER_PREFIXES:
            if name.startswith(ours):
                return theirs + name.removeprefix(ours)
    return name


def listed(what: str, names: Sequence[str]) -> list[str]:
    """A problem with the layers it is about; none without any."""
    if not names:
        return []
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return [f"{what}: {', '.join(names[:SHOWN])}{more}"]
