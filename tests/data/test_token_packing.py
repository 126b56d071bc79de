from __future__ import annotations

import logging

import pytest
import torch

from gsq_module.data.packing import pack


def words(*numbers: int) -> str:
    return " ".join(f"w{n}" for n in numbers)


def test_documents_are_joined_by_the_end_token_and_cut(tokenizer):
    rows = pack([words(2, 3), words(4, 5, 6), words(7)], tokenizer, seq_len=4, num_sequences=2, seed=None)
    assert rows.dtype == torch.int64
    assert rows.tolist() == [[2, 3, 0, 4], [5, 6, 0, 7]]


def test_a_document_of_exactly_one_row_is_enough(tokenizer):
    assert pack([words(2, 3, 4)], tokenizer, 3, 1, seed=0).tolist() == [[2, 3, 4]]


def test_documents_all_shorter_than_a_row_are_packed(tokenizer):
    rows = pack([words(n) for n in range(2, 22)], tokenizer, seq_len=10, num_sequences=4, seed=None)
    assert rows.flatten().tolist() == [token for n in range(2, 22) for token in (n, 0)]


@pytest.mark.parametrize("seed", [None, 0])
def test_too_little_text_says_how_much_there_is_and_ends(tokenizer, seed):
    with pytest.raises(ValueError, match=r"5 tokens.*1 sequences of 4; 2 sequences need 8"):
        pack([words(2, 3), words(4)], tokenizer, 4, 2, seed)


@pytest.mark.parametrize("documents", [[], ["", " \n "]])
def test_no_text_is_an_error(tokenizer, documents):
    with pytest.raises(ValueError, match="too little text: 0 tokens"):
        pack(documents, tokenizer, 4, 1, seed=0)


def test_empty_documents_leave_no_end_tokens(tokenizer):
    assert pack([words(2), "", words(3)], tokenizer, 4, 1, seed=None).tolist() == [[2, 0, 3, 0]]


def test_an_outlier_becomes_many_rows(tokenizer):
    outlier = [2 + n % 4000 for n in range(40_000)]
    rows = pack([words(*outlier)], tokenizer, seq_len=100, num_sequences=400, seed=0)
    assert rows.flatten().tolist() == outlier


def test_a_list_of_end_tokens_means_its_first(tokenizer, monkeypatch):
    monkeypatch.setattr(type(tokenizer), "eos_token_id", property(lambda self: [9, 8]), raising=False)
    assert tokenizer.pad_token_id is None
    assert pack([words(2), words(3)], tokenizer, 3, 1, seed=None).tolist() == [[2, 9, 3]]


def test_a_tokenizer_without_end_token_is_refused(tokenizer):
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="no end-of-text token"):
        pack([words(2)], tokenizer, 1, 1, seed=None)


def test_special_tokens_of_the_tokenizer_are_not_added(tokenizer):
    from tokenizers.processors import TemplateProcessing

    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<unk> $A", special_tokens=[("<unk>", 1)])
    assert tokenizer("w2")["input_ids"] == [1, 2]
    assert pack([words(2), words(3)], tokenizer, 3, 1, seed=None).tolist() == [[2, 0, 3]]


def test_the_seed_decides_the_order_of_documents(tokenizer):
    documents = [words(n) for n in range(2, 102)]
    first, again, other = (pack(documents, tokenizer, 10, 20, seed) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert sorted(first.flatten().tolist()) == sorted(other.flatten().tolist())


def test_a_stream_is_read_only_as_far_as_needed(tokenizer):
    def endless():
        for n in range(2, 100):
            assert n < 8, "read on although there was enough"
            yield words(n)

    assert pack(endless(), tokenizer, 4, 3, seed=None).shape == (3, 4)


def test_documents_longer_than_the_context_cause_no_warning(tokenizer, caplog):
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    try:
        pack([words(*range(2, 50))], tokenizer, 10, 4, seed=0)
        assert not caplog.records
        tokenizer(words(*range(2, 50)))  # the warning this is about exists, and is left alone for others
        assert "longer than the specified maximum" in caplog.text
    finally:
        logger.removeHandler(caplog.handler)
