"""Documents into rows of exactly `seq_len` tokens: joined by end-of-text tokens and cut, never padded."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def pack(
    documents: Iterable[str],
    tokenizer: PreTrainedTokenizerBase,
    seq_len: int,
    num_sequences: int,
    seed: int | None,
) -> Tensor:
    """Tokenize documents, end each with the end-of-text token, and cut the whole into rows.

    Rows begin where the previous one ends, so a long document fills many rows and a row holds many short documents.
    No other special token is added. Documents are read only until there are enough tokens; empty ones are skipped.

    Args:
        documents: The text. Held in memory as a whole if it is to be shuffled.
        tokenizer: Needs an end-of-text token; a padding token is not used.
        seq_len: Tokens a row.
        num_sequences: Rows.
        seed: Shuffles the documents. None keeps their order, for streams whose end is far away.

    Returns:
        int64 `[num_sequences, seq_len]`.

    Raises:
        ValueError: Too little text, or the tokenizer has no end-of-text token.
    """
    assert seq_len > 0
    assert num_sequences > 0
    end = _end_of_text(tokenizer)
    if seed is not None:
        documents = list(documents)
        random.Random(seed).shuffle(documents)
    needed = num_sequences * seq_len
    pieces: list[Tensor] = []
    count = 0
    for document in documents:
        # verbose=False: a document longer than the model's context is no fault here, it is cut into rows.
        tokens = tokenizer(document, add_special_tokens=False, verbose=False)["input_ids"]
        if not tokens:
            continue
        pieces.append(torch.tensor([*tokens, end], dtype=torch.int64))
        count += len(pieces[-1])
        if count >= needed:
            break
    if count < needed:
        raise ValueError(
            f"too little text: {count:,} tokens, enough for {count // seq_len} sequences of {seq_len}; "
            f"{num_sequences} sequences need {needed:,}. Ask for fewer or shorter sequences, or give more text"
        )
    return torch.cat(pieces)[:needed].view(num_sequences, seq_len)


def _end_of_text(tokenizer: PreTrainedTokenizerBase) -> int:
    token = tokenizer.eos_token_id
    if isinstance(token, (list, tuple)):
        token = token[0] if token else None
    if token is None:
        raise ValueError(
            "the model's tokenizer has no end-of-text token (eos_token) to put between documents. "
            "Next: add eos_token to the model folder's tokenizer_config.json"
        )
    return int(token)
