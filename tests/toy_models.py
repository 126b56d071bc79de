"""Tiny models: transformers families made from configs, and a hand-written decoder whose block calls vary in form."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3_5Tokenizer

from gsq_module.streaming.checkpoint import Checkpoint
from gsq_module.streaming.model import StreamedModel

VOCABULARY = 97
CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
}
QWEN_TOKENIZER = ("qwen2", "qwen3_5")
"""Model types whose tokenizer transformers makes in its own class."""
ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]
LINEAR = ["linear_attention", "full_attention", "linear_attention"]
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"sliding_window": 8}),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", {}),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", {"sliding_window": 8, "query_pre_attn_scalar": 16}),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", {"sliding_window": 8, "layer_types": ALTERNATING}),
    "qwen3_5": (
        "Qwen3_5TextConfig",
        "Qwen3_5ForCausalLM",
        {
            "layer_types": LINEAR,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        },
    ),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {"num_local_experts": 4}),
}


def family(name: str, **changes: Any) -> PreTrainedModel:
    """A model of a family with seeded weights: none is zero or one, and hidden states are of order one."""
    config_class, model_class, settings = FAMILIES[name]
    settings = SIZES | settings | changes
    if "layer_types" in settings:
        settings["layer_types"] = settings["layer_types"][: settings["num_hidden_layers"]]
    model = getattr(transformers, model_class)(getattr(transformers, config_class)(**settings)).eval()
    randomize(model)
    return model


@torch.no_grad()
def randomize(model: nn.Module, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim > 1:
            parameter.copy_(noise * parameter.shape[-1] ** -0.5)
        else:
            parameter.add_(noise * 0.05)


def tokens(rows: int, seq_len: int, seed: int = 0) -> Tensor:
    return torch.randint(VOCABULARY, (rows, seq_len), generator=torch.Generator().manual_seed(seed))


def words(count: int, seed: int) -> str:
    """Text that `tokenizer` reads as `count` tokens."""
    return " ".join(f"w{n}" for n in tokens(1, count, seed)[0].tolist())


def tokenizer() -> PreTrainedTokenizerFast:
    """The word `wN` is token N; token 0 ends a text."""
    vocabulary = {"<eos>": 0} | {f"w{n}": n for n in range(1, VOCABULARY)}
    model = Tokenizer(WordLevel(vocabulary, unk_token="<eos>"))
    model.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<eos>", unk_token="<eos>")


def qwen_tokenizer() -> Qwen3_5Tokenizer:
    """Byte-level BPE, which transformers takes for these families whatever the folder says: `w23 w4` is w 2 3 _w 4."""
    pieces = ["<|endoftext|>", *"w0123456789", "\u0120", "\u0120w"]
    return Qwen3_5Tokenizer(vocab={piece: n for n, piece in enumerate(pieces)}, merges=[("\u0120", "w")])


def save(model: PreTrainedModel, folder: Path, dtype: torch.dtype = torch.float32, **how: Any) -> Path:
    """Write a checkpoint folder with its tokenizer. The model's weights are rounded to `dtype`."""
    for parameter in model.parameters():  # not model.to(dtype): that rounds rotary frequencies as well
        parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype
    model.save_pretrained(folder, **how)
    for parameter in model.parameters():
        parameter.data = parameter.data.float()
    (qwen_tokenizer() if model.config.model_type in QWEN_TOKENIZER else tokenizer()).save_pretrained(folder)
    return folder


def open_streamed(folder: Path, dtype: torch.dtype = torch.float32) -> StreamedModel:
    return StreamedModel.from_checkpoint(Checkpoint(folder), CPU, dtype)


# --- a decoder written by hand ----------------------------------------------------------------------------------------


class ToyMixer(nn.Module):
    """Running mean of values, weighted by position: causal, and wrong where positions are lost."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.v_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.o_proj = nn.Linear(hidden_size, hidden_size, bias=False)

    def forward(self, hidden_states: Tensor, position_embeddings: Tensor) -> tuple[Tensor, None]:
        values = (self.v_proj(hidden_states) * position_embeddings).cumsum(1)
        return self.o_proj(values / torch.arange(1, values.shape[1] + 1).view(-1, 1)), None


class ToyMLP(nn.Module):
    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.up_proj = nn.Linear(hidden_size, 2 * hidden_size, bias=False)
        self.down_proj = nn.Linear(2 * hidden_size, hidden_size, bias=False)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.down_proj(torch.nn.functional.silu(self.up_proj(hidden_states)))


class ToyBlock(nn.Module):
    """A block with a switch for everything in which the blocks of families differ.

    Args:
        returns: `tensor` or `tuple`.
        parallel: Both units read the same normed input: `x + attn(n(x)) + mlp(n(x))`.
        factor: What the units' outputs are multiplied with before they are added.
    """

    def __init__(self, hidden_size: int, returns: str, parallel: bool, factor: float) -> None:
        super().__init__()
        self.returns, self.parallel, self.factor = returns, parallel, factor
        self.input_layernorm = nn.RMSNorm(hidden_size)
        self.self_attn = ToyMixer(hidden_size)
        self.post_attention_layernorm = nn.RMSNorm(hidden_size)
        self.mlp = ToyMLP(hidden_size)

    def forward(self, hidden_states: Tensor, position_embeddings: Tensor, per_layer: Tensor | None = None) -> Any:
        normed = self.input_layernorm(hidden_states)
        mixed = self.factor * self.self_attn(normed, position_embeddings)[0]
        if self.parallel:
            hidden_states = hidden_states + mixed + self.factor * self.mlp(normed)
        else:
            hidden_states = hidden_states + mixed
            hidden_states = hidden_states + self.factor * self.mlp(self.post_attention_layernorm(hidden_states))
        if per_layer is not None:
            hidden_states = hidden_states + per_layer
        return (hidden_states, None) if self.returns == "tuple" else hidden_states


class ToyDecoder(nn.Module):
    """Embedding, blocks, norm.

    Args:
        passing: How blocks get their arguments: `positional`, `keyword` (all but the hidden states), `all_keywords`.
        per_layer: Give each block a tensor that depends on the tokens.
    """

    def __init__(self, num_blocks: int, hidden_size: int, passing: str, per_layer: bool, **block: Any) -> None:
        super().__init__()
        self.passing, self.per_layer = passing, per_layer
        self.embed_tokens = nn.Embedding(VOCABULARY, hidden_size)
        self.layers = nn.ModuleList(ToyBlock(hidden_size, **block) for _ in range(num_blocks))
        self.norm = nn.RMSNorm(hidden_size)
        self.positions = Positions(hidden_size)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embed_tokens(input_ids)
        positions = self.positions(input_ids)
        for block in self.layers:
            extra = (self.embed_tokens(input_ids),) if self.per_layer else ()
            if self.passing == "positional":
                result = block(hidden, positions, *extra)
            elif self.passing == "keyword":
                result = block(hidden, position_embeddings=positions, **dict(zip(["per_layer"], extra, strict=False)))
            else:
                result = block(hidden_states=hidden, position_embeddings=positions)
            hidden = result[0] if block.returns == "tuple" else result
        return self.norm(hidden)


class Positions(nn.Module):
    """A buffer that no checkpoint holds, as the frequencies of rotary embeddings are."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.empty(hidden_size), persistent=False)
        self.reset()

    def reset(self) -> None:
        self.frequencies.copy_(torch.linspace(0.1, 3.0, len(self.frequencies)))

    def forward(self, input_ids: Tensor) -> Tensor:
        return torch.cos(torch.arange(input_ids.shape[1]).view(1, -1, 1) * self.frequencies)


class ToyModel(nn.Module):
    """What StreamedModel needs of a PreTrainedModel, and no more.

    Args:
        nested: Put the decoder under `model.language_model`, beside a vision tower with blocks of its own.
        twin: Put a second list of as many blocks beside it.
    """

    def __init__(
        self,
        nested: bool = False,
        twin: bool = False,
        num_blocks: int = 3,
        hidden_size: int = 64,
        passing: str = "keyword",
        per_layer: bool = False,
        returns: str = "tensor",
        parallel: bool = False,
        factor: float = 1.0,
    ) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_hidden_layers=num_blocks)
        decoder = ToyDecoder(
            num_blocks, hidden_size, passing, per_layer, returns=returns, parallel=parallel, factor=factor
        )
        self.model: nn.Module = decoder
        if nested:
            self.model = nn.Module()
            self.model.visual = nn.Module()
            self.model.visual.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(num_blocks + 2))
            self.model.language_model = decoder
        if twin:
            self.predictors = nn.ModuleList(nn.Linear(8, 8) for _ in range(num_blocks))
        self.lm_head = nn.Linear(hidden_size, VOCABULARY, bias=False)
        self._decoder = [decoder]  # in a list, so that it is no second child

    def get_input_embeddings(self) -> nn.Embedding:
        return self._decoder[0].embed_tokens

    def get_output_embeddings(self) -> nn.Linear:
        return self.lm_head

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Positions):
            module.reset()

    def forward(self, input_ids: Tensor, use_cache: bool) -> SimpleNamespace:
        return SimpleNamespace(logits=self.lm_head(self._decoder[0](input_ids)))


def streamed_toy(folder: Path, dtype: torch.dtype = torch.float32, **how: Any) -> tuple[StreamedModel, ToyModel]:
    """A ToyModel streamed from a checkpoint in `folder`, and the same model whole."""
    whole = ToyModel(**how).eval()
    randomize(whole)
    folder.mkdir(exist_ok=True)
    save_file(whole.state_dict(), folder / "model.safetensors")
    with torch.device("meta"):
        skeleton = ToyModel(**how)
    return StreamedModel(skeleton, Checkpoint(folder), CPU, dtype), whole.to(dtype)


@torch.no_grad()
def streamed_logits(model: StreamedModel, rows: Tensor, batch_size: int) -> Tensor:
    """What a forward pass gives, block by block."""
    from gsq_module.streaming.activations import ActivationStore, batches

    shape = (*rows.shape, model.hidden_size)
    store = ActivationStore(shape, model.dtype, "memory", CPU, Path("unused"))
    sizes = {part.stop - part.start for part in batches(len(rows), batch_size)}
    calls = {size: model.record_calls(size, rows.shape[1]) for size in sizes}
    model.embed(rows, store, batch_size)
    for index in range(model.num_blocks):
        block = model.load_block(index)
        for part in batches(len(rows), batch_size):
            hidden = store.read(part, CPU, model.dtype)
            store.write(part, calls[len(hidden)][index](block, hidden))
        model.release_block(index)
    with model.head() as head:
        return head(store.read(slice(0, len(rows)), CPU, model.dtype))
