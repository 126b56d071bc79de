from __future__ import annotations

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

VOCABULARY = {"<eos>": 0, "<unk>": 1} | {f"w{n}": n for n in range(2, 5000)}
CHAT_TEMPLATE = "{% for turn in messages %}{{ turn['role'] }}: {{ turn['content'] }}\n{% endfor %}"


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """The word `wN` is token N; the end-of-text token is 0; no padding token, no chat template; context 8."""
    words = Tokenizer(WordLevel(VOCABULARY, unk_token="<unk>"))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", unk_token="<unk>", model_max_length=8)


@pytest.fixture
def chat_tokenizer(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
