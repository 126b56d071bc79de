"""How a model goes on from the beginnings of texts: what a user sees of it first."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from gsq_module.export.loading import load_whole

PROMPT_TOKENS, NEW_TOKENS = 24, 32
PROMPTS = 4


def choose_prompts(texts: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
    """The first tokens of the first rows of each text, as many of all texts as of each other.

    Args:
        texts: int64 `[num_samples, seq_len]` by name.

    Returns:
        Names and int64 `[prompt_length]`, all of one length.
    """
    length = min(PROMPT_TOKENS, *(max(1, tokens.shape[1] // 2) for tokens in texts.values()))
    each = max(1, PROMPTS // len(texts))
    return [(name, row[:length]) for name, tokens in texts.items() for row in tokens[:each]][:PROMPTS]


@torch.no_grad()
def continue_greedily(
    folder: Path, prompts: Tensor, tokenizer: PreTrainedTokenizerBase, device: torch.device, dtype: torch.dtype
) -> list[str]:
    """What transformers makes of the prompts, token by most likely token.

    Args:
        folder: Checkpoint folder, exported or original; loaded whole.
        prompts: int64 `[num_prompts, prompt_length]`.
        tokenizer: Turns tokens into text.
    """
    model = load_whole(folder, dtype, device)
    prompts = prompts.to(device)
    found = model.generate(
        input_ids=prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        temperature=None,
        top_p=None,
        top_k=None,
        pad_token_id=tokenizer.pad_token_id or tokenizer.eos_token_id or 0,
    )
    # Decoded with their prompts: alone, some tokenizers would leave out a space in front.
    texts, begins = (tokenizer.batch_decode(part.cpu(), skip_special_tokens=True) for part in (found, prompts))
    return [text.removeprefix(begin) for text, begin in zip(texts, begins, strict=True)]
