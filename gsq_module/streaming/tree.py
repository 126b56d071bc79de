"""The module tree of a checkpoint, without weights: built from config.json, and searched for its decoder blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from gsq_module.streaming.config_file import CONFIG_FILE, get_again, read_config


def meta_model(directory: Path) -> nn.Module:
    """The module tree of a checkpoint folder on the meta device, in the class its config.json names.

    Raises:
        FileNotFoundError: No config.json.
        ValueError: It is broken, or transformers does not know the model's type.
    """
    file, model_type = directory / CONFIG_FILE, read_config(directory)["model_type"]
    try:
        return _build(transformers.AutoConfig.from_pretrained(directory))
    except Exception as error:  # transformers raises what it likes at a strange config
        if model_type not in transformers.CONFIG_MAPPING:
            raise ValueError(
                f"{file}: transformers {transformers.__version__} does not know model_type {model_type!r}; "
                "a newer one may: pip install --upgrade transformers"
            ) from error
        raise ValueError(
            f"{file}: transformers {transformers.__version__} makes no model of it "
            f"({type(error).__name__}: {error}). {get_again(directory)}"
        ) from error


def _build(config: Any) -> nn.Module:
    """The module tree of a configuration; on the meta device."""
    # An exported checkpoint is read dense (export/reader.py): its quantization must not shape the module tree.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    named = [getattr(transformers, name, None) for name in config.architectures or ()]
    model_class = next((cls for cls in named if cls is not None), None)
    with torch.device("meta"):
        if model_class is None or not model_class.__name__.endswith(
            ("CausalLM", "ConditionalGeneration", "LMHeadModel")
        ):
            return transformers.AutoModelForCausalLM.from_config(config)
        return model_class._from_config(config)


def causal_lm_names(model: nn.Module) -> dict[str, str]:
    """Names of the decoder's modules in the class that AutoModelForCausalLM builds, where that is another class.

    A checkpoint with a vision tower (`model.language_model.layers`) can also be loaded as its text stack alone
    (`model.layers`); what a configuration says of modules by name must hold there, too.

    Returns:
        Module path in that class by module path in `model`; empty where the classes are the same.
    """
    if not isinstance(model, transformers.PreTrainedModel):
        return {}
    try:
        with torch.device("meta"):
            other = transformers.AutoModelForCausalLM.from_config(model.config)
    except ValueError:  # no such class
        return {}
    if type(other) is type(model):
        return {}
    here, there = (find_blocks(tree).rpartition(".")[0] for tree in (model, other))
    names = {name for name, _ in other.named_modules()}
    pairs = {name: there + name.removeprefix(here) for name, _ in model.named_modules() if name.startswith(f"{here}.")}
    return {name: renamed for name, renamed in pairs.items() if renamed in names}


def find_blocks(model: Any) -> str:
    """Path of the ModuleList that holds the decoder blocks.

    Raises:
        ValueError: None, or several that cannot be told apart; the candidates are listed.
    """
    candidates = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    nested = [n for n in candidates if any(n.startswith(f"{other}.") for other in candidates)]
    outer = {name: module for name, module in candidates.items() if name not in nested}
    config: Any = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config(decoder=True)
    wanted = getattr(config, "num_hidden_layers", None)
    fitting = [name for name, module in outer.items() if wanted is None or len(module) == wanted]
    if len(fitting) > 1 and hasattr(model, "get_decoder"):
        decoder = model.get_decoder()
        inside = {id(module) for module in decoder.modules()}
        fitting = [name for name in fitting if id(outer[name]) in inside]
    if len(fitting) != 1:
        listed = ", ".join(f"{name} ({len(module)})" for name, module in candidates.items()) or "none"
        raise ValueError(
            f"cannot tell which module list holds the {wanted if wanted is not None else ''} decoder blocks of "
            f"{type(model).__name__}; module lists (lengths): {listed}"
        )
    return fitting[0]
