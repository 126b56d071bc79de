"""Which engines can load an exported folder, and why not: their rules against what is stored, layers named.

transformers and compressed-tensors are asked themselves (module tree, matching of names, decompression); vLLM's rules
are those of export/vllm.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from compressed_tensors.compressors import PackedQuantizationCompressor
from compressed_tensors.quantization import DEFAULT_QUANTIZATION_METHOD, QuantizationConfig, QuantizationScheme
from compressed_tensors.utils.match import is_match, match_targets
from torch import Tensor, nn

from gsq_module.export import vllm
from gsq_module.export.packing import PACK_FORMAT, unpack
from gsq_module.export.reader import parse_quantization, stored_quantization
from gsq_module.export.shapes import Misfit, find_misfits, misfit_problems
from gsq_module.export.vllm import listed
from gsq_module.quantization.grid import QuantizedWeight
from gsq_module.streaming.checkpoint import Checkpoint
from gsq_module.streaming.config_file import CONFIG_FILE, read_config
from gsq_module.streaming.tree import causal_lm_names, meta_model

ROWS = 4096
"""Rows of a weight that are decompressed at once."""


@dataclass
class Verdict:
    """What one engine makes of a folder.

    Attributes:
        engine: Its name.
        problems: Why it cannot load the folder; empty where it can.
        notes: What it needs for that, and what could not be checked here.
    """

    engine: str
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def loads(self) -> bool:
        return not self.problems


@dataclass
class _Export:
    """A quantized folder, read.

    Attributes:
        packed: Scheme that the library gives each packed module; None where it gives none.
        in_float: Linears in float: those of the module tree, then those that only the checkpoint holds.
        targeted: Linears and embeddings in float that the library takes to be packed.
        misfits: Packed modules whose tensors are not of the shapes that their scheme gives them.
        renamed: Module paths in AutoModelForCausalLM's class, where that is another one.
    """

    config: dict[str, Any]
    quantization: QuantizationConfig
    checkpoint: Checkpoint
    tree: Any
    packed: dict[str, QuantizationScheme | None] = field(default_factory=dict)
    in_float: list[str] = field(default_factory=list)
    targeted: list[str] = field(default_factory=list)
    misfits: list[Misfit] = field(default_factory=list)
    renamed: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        modules = dict(self.tree.named_modules())
        self.renamed = causal_lm_names(self.tree)
        for name in self.checkpoint.names():
            path = name.removesuffix(".weight_packed")
            if path != name:
                self.packed[path] = self.scheme_of(path, modules.get(path))
        self.misfits = find_misfits(self.checkpoint, self.quantization.config_groups, self.packed)
        embedding, head = self.tree.get_input_embeddings(), self.tree.get_output_embeddings()
        for path, module in modules.items():
            if not isinstance(module, (nn.Linear, nn.Embedding)) or path in self.packed:
                continue
            if isinstance(module, nn.Linear) and f"{path}.weight" in self.checkpoint:
                self.in_float.append(path)
            # A tied head is whatever its embedding is.
            is_tied = module is head and module.weight is embedding.weight and f"{path}.weight" not in self.checkpoint
            if self.scheme_of(path, module) is not None and not is_tied:
                self.targeted.append(path)
        known = set(self.tree.state_dict())
        for name in self.checkpoint.names():
            path = name.removesuffix(".weight")
            if path != name and name not in known and len(self.checkpoint.shape(name)) == 2:
                self.in_float.append(path)

    def scheme_of(self, path: str, module: nn.Module | None) -> QuantizationScheme | None:
        """The scheme by the library's own matching. A module that only the checkpoint has is taken to be a linear."""
        if module is None:
            with torch.device("meta"):
                module = nn.Linear(1, 1)
        by_target = {target: scheme for scheme in self.groups for target in scheme.targets}
        found = match_targets(path, module, by_target)
        return by_target[found[0]] if found and not is_match(path, module, self.quantization.ignore or []) else None

    @property
    def misfit_problems(self) -> list[str]:
        """No engine reads tensors of other shapes than it is told."""
        return misfit_problems(self.checkpoint.directory, self.misfits, self.packed)

    @property
    def groups(self) -> list[QuantizationScheme]:
        return list(self.quantization.config_groups.values())


def check_engines(folder: Path) -> list[Verdict]:
    """Check an exported folder against the rules of transformers, compressed-tensors and vLLM.

    Args:
        folder: Checkpoint with a quantization_config, any number of config groups.

    Returns:
        A verdict an engine. One tensor of each kind (scheme and layer type) is read.

    Raises:
        ValueError: The folder is no quantized checkpoint in the format of compressed-tensors.
        FileNotFoundError: Files are missing.
    """
    config = read_config(folder)
    found = stored_quantization(folder)
    if found is None or found.get("quant_method") != DEFAULT_QUANTIZATION_METHOD or found.get("format") != PACK_FORMAT:
        raise ValueError(
            f"{folder}: what is checked is an export ({DEFAULT_QUANTIZATION_METHOD}, format {PACK_FORMAT}); its "
            f"{CONFIG_FILE} has {'no quantization_config' if found is None else found.get('quant_method')}. "
            "Name an exported folder: --checkpoint FOLDER"
        )
    quantization = parse_quantization(folder, found)
    checkpoint = Checkpoint(folder)
    try:
        export = _Export(config, quantization, checkpoint, meta_model(folder))
    except ValueError as error:
        names = ("transformers", "compressed-tensors", "vLLM")
        return [Verdict(name, [f"its layers cannot be told: {error}"]) for name in names]
    return [_transformers(export), _compressed_tensors(export), _vllm(export)]


def as_lines(verdicts: Sequence[Verdict]) -> list[str]:
    """A line an engine, and one more a problem."""
    lines = []
    for verdict in verdicts:
        notes = f" ({'; '.join(verdict.notes)})" if verdict.notes else ""
        lines.append(f"{verdict.engine}: {'can load it' if verdict.loads else 'cannot load it'}{notes}")
        lines += [f"  {problem}" for problem in verdict.problems]
    return lines


def _transformers(export: _Export) -> Verdict:
    verdict = Verdict(f"transformers {transformers.__version__}", export.misfit_problems)
    stray = [name for name, scheme in export.packed.items() if scheme is None and _has(export.tree, name)]
    verdict.problems += listed("packed, but taken to be in float (ignore list, targets)", stray)
    verdict.problems += listed("in float, but taken to be packed (not on the ignore list)", export.targeted)
    keys = set(export.tree.state_dict())
    if getattr(export.tree.config.get_text_config(), "tie_word_embeddings", False):
        keys -= set(getattr(export.tree, "_tied_weights_keys", None) or ())
    lost = [k for k in sorted(keys) if k not in export.checkpoint and k.removesuffix(".weight") not in export.packed]
    verdict.problems += listed("not in the folder", lost)
    # The same layer must be seen alike under both names.
    named = [
        other
        for name, other in export.renamed.items()
        if (name in export.packed or f"{name}.weight" in export.checkpoint)
        and (export.scheme_of(other, export.tree.get_submodule(name)) is None) != (export.packed.get(name) is None)
    ]
    verdict.problems += listed("read wrongly by AutoModelForCausalLM, whose class names layers in another way", named)
    return verdict


def _compressed_tensors(export: _Export) -> Verdict:
    verdict = Verdict("compressed-tensors", export.misfit_problems)
    misfits = {misfit.module for misfit in export.misfits}
    differing, checked = [], set()
    for name, scheme in export.packed.items():
        if scheme is None or name in misfits:
            continue
        kind = (export.groups.index(scheme), name.rpartition(".")[2])
        if kind not in checked:
            checked.add(kind)
            if not _decompresses_alike(export.checkpoint, name, scheme):
                differing.append(name)
    none = [name for name, scheme in export.packed.items() if scheme is None]
    verdict.problems += listed("packed, but no config group is for them", none)
    verdict.problems += listed("decompressed to other weights than code x scale", differing)
    verdict.notes.append(f"decompression bit for bit code x scale, one layer of each of {len(checked)} kinds")
    return verdict


def _vllm(export: _Export) -> Verdict:
    verdict = Verdict("vLLM")
    verdict.problems, verdict.notes = vllm.scheme_problems(export.groups)
    verdict.problems += export.misfit_problems
    modules = {id(module): path for path, module in export.tree.named_modules()}
    embedding = modules[id(export.tree.get_input_embeddings())]
    head = modules.get(id(export.tree.get_output_embeddings()))
    packed, ignore = export.packed, export.quantization.ignore or []
    verdict.problems += vllm.layer_problems(packed, export.in_float, export.groups, ignore, embedding, head)
    if head not in packed and embedding in packed and head not in export.in_float:
        verdict.notes.append("head and packed embedding are one tensor, which only newer versions compute logits from")
    architecture = (export.config.get("architectures") or ["?"])[0]
    if embedding in packed and architecture in vllm.WITHOUT_PACKED_EMBEDDING:
        verdict.problems.append(f"{embedding} is packed, which its class {architecture} does not load (issue 54304)")
    if architecture not in vllm.CLASSES:
        verdict.notes.append(f"whether it knows the class {architecture} is not known here")
    verdict.notes.append("its rules checked, vLLM itself not run")
    return verdict


def _decompresses_alike(checkpoint: Checkpoint, name: str, scheme: QuantizationScheme) -> bool:
    """Whether the library's decompression of a module is our code x scale, bit for bit."""
    assert scheme.weights is not None
    parts = PackedQuantizationCompressor.compression_param_names(scheme)
    tensors = {part: checkpoint.tensor(f"{name}.{part}") for part in parts}
    rows, columns = tensors["weight_shape"].tolist()
    for start in range(0, rows, ROWS):
        part = {kind: value[start : start + ROWS] for kind, value in tensors.items() if kind != "weight_shape"}
        part["weight_shape"] = torch.tensor([len(part["weight_packed"]), columns])
        codes = _stored_codes(part["weight_packed"], scheme.weights.num_bits, columns)
        if not torch.equal(unpack(part, scheme), QuantizedWeight(codes, part["weight_scale"]).dequantize()):
            return False
    return True


def _stored_codes(packed: Tensor, bits: int, columns: int) -> Tensor:
    """Codes int8 `[rows, columns]` of words int32 `[rows, words]`, by the format's definition alone: a row is one
    string of bits, least significant first, and holds code + 2^(bits - 1)."""
    stream = np.unpackbits(packed.contiguous().numpy().view(np.uint8), axis=1, bitorder="little")[:, : columns * bits]
    stored = np.packbits(stream.reshape(-1, bits), axis=1, bitorder="little")
    return torch.from_numpy(stored.astype(np.int16) - (1 << (bits - 1))).to(torch.int8).view(len(packed), columns)


def _has(tree: nn.Module, path: str) -> bool:
    return any(name == path for name, _ in tree.named_modules())
