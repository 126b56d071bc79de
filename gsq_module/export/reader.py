"""Reading an export as if it were the dense checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from compressed_tensors.compressors import PackedQuantizationCompressor
from compressed_tensors.quantization import DEFAULT_QUANTIZATION_METHOD, QuantizationConfig, QuantizationScheme
from compressed_tensors.utils.match import match_targets
from torch import Tensor, nn

from gsq_module.export.packing import PACK_FORMAT, unpack
from gsq_module.export.shapes import EXPORT_AGAIN, find_misfits, misfit_problems
from gsq_module.export.vllm import listed
from gsq_module.problems import raise_collected
from gsq_module.streaming.checkpoint import Checkpoint
from gsq_module.streaming.config_file import CONFIG_FILE, get_again, read_config
from gsq_module.streaming.tree import meta_model


class PackedCheckpoint(Checkpoint):
    """A `pack-quantized` checkpoint: `X.weight` is decompressed from `X.weight_packed` when it is asked for.

    Args:
        directory: A folder as for `Checkpoint`.
        schemes: How its packed weights are stored. Where there are several, modules are told apart as the library
            does it, by name or class, so that config.json is needed.

    Raises:
        FileNotFoundError: As `Checkpoint`.
    """

    def __init__(self, directory: str | Path, schemes: Sequence[QuantizationScheme]) -> None:
        self._schemes = schemes
        self._stored = Checkpoint(directory)
        self._packed: dict[str, list[str]] = {}  # dense name -> names of the tensors it is decompressed from
        super().__init__(directory)

    def _locate_tensors(self) -> dict[str, str]:
        stored = super()._locate_tensors()
        modules = [name.removesuffix(".weight_packed") for name in stored if name.endswith(".weight_packed")]
        self._scheme_of = match_schemes(self.directory, modules, self._schemes)
        for name in stored:
            module, _, kind = name.rpartition(".")
            if kind == "weight_packed":
                suffixes = PackedQuantizationCompressor.compression_param_names(self._scheme_of[module])
                self._packed[f"{module}.weight"] = [f"{module}.{suffix}" for suffix in suffixes]
        parts = {part for names in self._packed.values() for part in names}
        dense = {}
        for name, file in stored.items():
            if name.endswith(".weight_packed"):
                dense[name.removesuffix("_packed")] = file
            elif name not in parts:
                dense[name] = file
        return dense

    def tensor(self, name: str) -> Tensor:
        return self.tensors([name])[name]

    def tensors(self, names: Iterable[str]) -> dict[str, Tensor]:
        names = list(names)
        in_float = [name for name in names if name not in self._packed]
        parts = [part for name in names for part in self._packed.get(name, [])]
        stored = self._stored.tensors(parts)
        result = super().tensors(in_float)
        for name in names:
            if name in self._packed:
                packed = {part.rpartition(".")[2]: stored[part] for part in self._packed[name]}
                result[name] = unpack(packed, self._scheme_of[name.removesuffix(".weight")])
        return result

    def rows(self, name: str, begin: int, end: int) -> Tensor:
        return self.tensor(name)[begin:end] if name in self._packed else super().rows(name, begin, end)

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._packed:
            return super().shape(name)
        return tuple(self._stored.tensor(f"{name}_shape").tolist())

    def misfit_problems(self, groups: Mapping[str, QuantizationScheme]) -> list[str]:
        """Where packed tensors and config.json disagree.

        Args:
            groups: The schemes by the name of their config group.
        """
        return misfit_problems(self.directory, find_misfits(self._stored, groups, self._scheme_of), self._scheme_of)


def match_schemes(
    directory: Path, modules: Sequence[str], schemes: Sequence[QuantizationScheme]
) -> dict[str, QuantizationScheme]:
    """The scheme of each packed module: by the name that a scheme gives, else by its class.

    Raises:
        ValueError: Modules that no scheme names; lists them.
    """
    if len(schemes) == 1:
        return dict.fromkeys(modules, schemes[0])
    tree = dict(meta_model(directory).named_modules())
    unknown = nn.Linear(1, 1, device="meta")  # transformers' own name of it may be another
    by_target = {target: scheme for scheme in schemes for target in scheme.targets}
    matched = {name: match_targets(name, tree.get(name, unknown), by_target) for name in modules}
    strays = [name for name, targets in matched.items() if not targets]
    if strays:
        (text,) = listed(f"packed, but no config group of {directory / CONFIG_FILE} names them as targets", strays)
        raise ValueError(f"{text}. There are {', '.join(by_target)}. Next: name them there, or {EXPORT_AGAIN}")
    return {name: by_target[targets[0]] for name, targets in matched.items()}


def open_checkpoint(directory: str | Path, check_shapes: bool = True) -> Checkpoint:
    """Opens a model in float or an export of ours, whichever the folder holds.

    Args:
        directory: A folder with safetensors and a config.json.
        check_shapes: Whether to compare packed tensors with config.json.

    Returns:
        `PackedCheckpoint` where config.json names `pack-quantized` compressed tensors, else `Checkpoint`.

    Raises:
        ValueError: The checkpoint is quantized in another way, or its packed tensors have other shapes than num_bits
            and group_size of its config.json say; lists every group of layers.
        FileNotFoundError: As `Checkpoint`.
    """
    found = stored_quantization(directory)
    if found is None:
        return Checkpoint(directory)
    if found.get("quant_method") == DEFAULT_QUANTIZATION_METHOD and found.get("format") == PACK_FORMAT:
        groups = parse_quantization(directory, found).config_groups
        schemes = list(groups.values())
        if all(isinstance(scheme, QuantizationScheme) and scheme.input_activations is None for scheme in schemes):
            opened = PackedCheckpoint(directory, schemes)
            if check_shapes:
                raise_collected(opened.misfit_problems(groups))
            return opened
    groups = found.get("config_groups", {})
    raise ValueError(
        f"{directory} is quantized with quant_method {found.get('quant_method')!r}, format {found.get('format')!r}, "
        f"{len(groups)} config groups. What can be read is a model in float (no quantization_config in {CONFIG_FILE}) "
        f"or {DEFAULT_QUANTIZATION_METHOD} with format {PACK_FORMAT}, weights only."
    )


def stored_quantization(directory: str | Path) -> dict[str, Any] | None:
    """The `quantization_config` of the folder's config.json, also from its `text_config`; None for a float model.

    Raises:
        ValueError: The file is broken.
    """
    if not (Path(directory) / CONFIG_FILE).is_file():
        return None
    config = read_config(directory)
    for section in (config, config.get("text_config")):
        found = section.get("quantization_config") if isinstance(section, dict) else None
        if found and not isinstance(found, dict):
            raise ValueError(
                f"{Path(directory) / CONFIG_FILE}: quantization_config={found!r} is no JSON object. "
                f"{get_again(Path(directory))}"
            )
        if found:
            return found
    return None


def parse_quantization(directory: str | Path, found: dict[str, Any]) -> QuantizationConfig:
    """What `stored_quantization` has found, as the library reads it.

    Raises:
        ValueError: It does not; the library's reasons name keys and values.
    """
    try:
        return QuantizationConfig.model_validate(found)
    except ValueError as error:
        file = Path(directory) / CONFIG_FILE
        raise ValueError(
            f"{file}: quantization_config cannot be read: {error}\n{get_again(Path(directory))}"
        ) from error
