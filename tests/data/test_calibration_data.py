from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from jsonargparse import ArgumentError, ArgumentParser
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from gsq_module.data.module import CalibrationData
from gsq_module.data.sources import PythonTopics, Speeches, TextFiles, TextSource


class Numbered(TextSource):
    """Documents of `length` words that all differ: token n of the text is the word n."""

    def __init__(self, count: int = 100, length: int = 7, first: int = 2) -> None:
        self.count, self.length, self.first = count, length, first

    def check(self) -> None:
        if not self.count:
            raise ValueError("Numbered.count: 0 documents")

    def documents(self, tokenizer: Any) -> Iterator[str]:
        for number in range(self.count):
            start = self.first + number * self.length
            yield " ".join(f"w{n}" for n in range(start, start + self.length))


class Stream(Numbered):
    streams = True


class States:
    """What a unit's samples look like to a loader; remembers what it was asked for."""

    def __init__(self, values: Tensor) -> None:
        self.values = values
        self.asked: list[list[int]] = []

    def __len__(self) -> int:
        return len(self.values)

    def batches(self, indices: Iterable[list[int]]) -> Iterator[tuple[Tensor, ...]]:
        for rows in indices:
            self.asked.append(rows)
            yield self.values[rows], 2 * self.values[rows]


def small(calibration: TextSource | None = None, **changes: Any) -> CalibrationData:
    arguments: dict[str, Any] = {
        "evaluation": {"held_out": Numbered(first=1000), "other": Numbered(first=2000)},
        "seq_len": 10,
        "train_samples": 40,
        "validation_samples": 8,
        "gptq_samples": 16,
        "evaluation_samples": 5,
        "batch_size": 8,
    }
    return CalibrationData(calibration or Numbered(), **(arguments | changes))


def tokens_of(data: CalibrationData) -> list[Tensor]:
    return [data.train, data.validation, data.gptq, *data.evaluation_tokens.values()]


def test_splits_have_their_sizes_and_share_no_row(tokenizer):
    data = small()
    data.check()
    data.tokenize(tokenizer)
    assert [tuple(part.shape) for part in tokens_of(data)] == [(40, 10), (8, 10), (16, 10), (5, 10), (5, 10)]
    assert all(part.dtype == torch.int64 for part in tokens_of(data))
    assert list(data.evaluation_tokens) == ["held_out", "other"]
    # Every word of the source is unique, so shared text would show as a shared token (0 ends documents).
    words = [set(part.flatten().tolist()) - {0} for part in (data.train, data.validation, data.gptq)]
    assert sum(map(len, words)) == len(set.union(*words))


def test_gptq_rows_come_from_all_over_the_text(tokenizer):
    data = small(Stream())  # in the order of the text
    data.tokenize(tokenizer)
    assert data.validation.max() < data.train[data.train > 0].min()
    assert data.gptq.max() - data.gptq[data.gptq > 0].min() > 300


def test_tokens_are_deterministic_by_seed(tokenizer):
    runs = [small(seed=seed) for seed in (3, 3, 4)]
    for data in runs:
        data.tokenize(tokenizer)
    first, again, other = (tokens_of(data) for data in runs)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first[:3], other[:3], strict=True))
    # Held-out figures of two seeds are measured on the same text.
    assert all(torch.equal(a, b) for a, b in zip(first[3:], other[3:], strict=True))


def test_evaluation_may_have_its_own_length(tokenizer):
    data = small(evaluation_seq_len=20)
    data.tokenize(tokenizer)
    assert data.evaluation_tokens["held_out"].shape == (5, 20)
    assert data.train.shape == (40, 10)


def test_streams_keep_their_order(tokenizer):
    data = small(evaluation={"stream": Stream(first=2)}, evaluation_samples=2)
    data.tokenize(tokenizer)
    assert data.evaluation_tokens["stream"].flatten().tolist() == [*range(2, 9), 0, *range(9, 16), 0, *range(16, 20)]


def test_too_little_text_lists_all_texts_and_their_keys(tokenizer):
    data = small(Numbered(count=10), evaluation={"a": Numbered(), "b": Numbered(count=1), "c": Numbered(count=0)})
    with pytest.raises(ValueError) as caught:
        data.tokenize(tokenizer)
    lines = str(caught.value).splitlines()
    assert len(lines) == 3
    assert "data.calibration (train_samples=40" in lines[0]
    assert "80 tokens" in lines[0]
    assert "need 640" in lines[0]
    assert "data.evaluation.b (evaluation_samples=5" in lines[1]
    assert "data.evaluation.c" in lines[2]


def test_check_collects_all_problems():
    data = small(
        TextFiles(["/no/such/file.txt"]),
        evaluation={"fine": Numbered(), "none": Numbered(count=0)},
        batch_size=48,
        microbatch_size=9,
        evaluation_seq_len=1,
    )
    with pytest.raises(ValueError) as caught:
        data.check()
    lines = str(caught.value).splitlines()
    assert [line.split(":")[0] for line in lines] == [
        "data.calibration",
        "data.evaluation.none",
        "data.evaluation_seq_len",
        "data.batch_size",
        "data.batch_size",
    ]
    assert "/no/such/file.txt" in lines[0]
    assert "more than data.train_samples=40" in lines[3]
    assert "not a multiple of data.microbatch_size=9" in lines[4]
    with pytest.raises(ValueError, match=r"data\.evaluation: .*at least one"):
        small(evaluation={}).check()


@pytest.mark.parametrize(
    ("batch", "micro", "world", "steps"),
    [(16, 16, 1, 1), (16, 2, 1, 8), (16, 2, 4, 2), (16, None, 1, 1), (16, None, 4, 1)],
)
def test_accumulation(batch, micro, world, steps):
    assert small(batch_size=batch, microbatch_size=micro).accumulate_grad_batches(world) == steps


@pytest.mark.parametrize(
    ("micro", "world", "text"),
    [
        (3, 2, r"data\.batch_size: 16 .* data\.microbatch_size=3 x 2 devices\. Set batch_size to 12 or 18, or "
               r"microbatch_size to 1 or 2 or 4 or 8"),
        (None, 3, r"data\.batch_size: 16 is not a multiple of 3 devices\. Set batch_size to 15 or 18$"),
        (4, 8, r"Set batch_size to 32, or microbatch_size to 1 or 2$"),
    ],
)  # fmt: skip
def test_accumulation_that_does_not_divide(micro, world, text):
    with pytest.raises(ValueError, match=text):
        small(batch_size=16, microbatch_size=micro).accumulate_grad_batches(world)


def test_loaders_never_have_workers():
    """Case 32: a tiny /dev/shm cannot matter where nothing is sent through it."""
    assert "num_workers" not in inspect.signature(CalibrationData.__init__).parameters
    data = small()
    data.bind(States(torch.zeros(40)), States(torch.zeros(8)))
    for loader in (data.train_dataloader(), data.val_dataloader()):
        assert not isinstance(loader, DataLoader), "see that it has no workers"


def test_loaders_pass_on_whole_microbatches():
    data = small(microbatch_size=4)
    train, validation = States(torch.arange(43.0)), States(torch.arange(6.0))
    data.bind(train, validation)
    batches = list(data.train_dataloader())
    assert len(batches) == 10
    for inputs, targets in batches:
        assert inputs.shape == (4,)
        assert torch.equal(targets, 2 * inputs)
    assert [rows.tolist() for rows, _ in data.val_dataloader()] == [[0, 1, 2], [3, 4, 5]]
    assert (len(data.train_dataloader()), len(data.val_dataloader())) == (10, 2)


def test_iterators_that_nobody_reads_are_no_epochs():
    """Lightning makes such; the order of the samples must not depend on them."""
    orders = []
    for unread in (0, 3):
        data, train = small(), States(torch.zeros(40))
        data.bind(train, States(torch.zeros(8)))
        loader = data.train_dataloader()
        for _ in range(unread):
            iter(loader)
        list(loader)
        orders.append(train.asked)
    assert orders[0] == orders[1]


@pytest.mark.parametrize(
    ("asked", "seq_len", "sequences"), [(None, 1024, 4), (None, 3000, 1), (None, 5000, 1), (3, 1024, 3)]
)
def test_sequences_that_pass_through_a_block_at_once(asked, seq_len, sequences):
    assert small(forward_batch_size=asked, microbatch_size=2).sequences_at_once(seq_len) == sequences


def test_too_few_samples_for_one_step_are_an_error_and_not_an_empty_epoch():
    data = small()
    data.bind(States(torch.zeros(7)), States(torch.zeros(8)))
    with pytest.raises(ValueError, match="7 samples do not fill one batch"):
        data.train_dataloader()


class Mean(LightningModule):
    """Learns the mean of what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.validated: list[Tensor] = []

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (self.weight - batch[0]).square().mean()

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        self.validated.append(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def test_one_trainer_fits_one_bound_data_set_after_another(tmp_path):
    data = small(microbatch_size=2)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=-1,
        max_steps=0,
        accumulate_grad_batches=data.accumulate_grad_batches(1),
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    seen = []
    for value in (1.0, 5.0):
        train, validation = States(torch.full((40,), value)), States(torch.full((8,), -value))
        data.bind(train, validation)
        module = Mean()
        trainer.fit_loop.epoch_loop.max_steps = trainer.global_step + 10  # two epochs of five steps
        trainer.fit(module, datamodule=data)
        assert module.weight.item() == pytest.approx(value)
        assert torch.equal(torch.cat(module.validated), torch.full((16,), -value))
        seen.append(train.asked)
    assert trainer.global_step == 20
    # Every fit starts again at epoch 0, so a resumed run sees the order that an uninterrupted one sees.
    assert seen[0] == seen[1]
    assert len(seen[0]) == 40
    assert seen[0][:20] != seen[0][20:]


@pytest.fixture
def parser() -> ArgumentParser:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(CalibrationData, "data")
    return parser


RECIPE = {
    "calibration": {"class_path": "gsq_module.data.sources.Speeches", "init_args": {"before": 1982}},
    "evaluation": {
        "speeches": {"class_path": "gsq_module.data.sources.Speeches", "init_args": {"since": 1982}},
        "docs": {"class_path": "gsq_module.data.sources.PythonTopics"},
    },
}


def test_a_recipe_builds_it(parser):
    config = parser.parse_object({"data": RECIPE | {"batch_size": 32}})
    data = parser.instantiate(config).data
    assert isinstance(data, CalibrationData)
    assert isinstance(data.calibration, Speeches)
    assert data.calibration.before == 1982
    assert list(data.evaluation) == ["speeches", "docs"]
    assert isinstance(data.evaluation["docs"], PythonTopics)
    assert data.batch_size == 32
    reparsed = parser.parse_string(parser.dump(config))
    assert list(parser.instantiate(reparsed).data.evaluation) == ["speeches", "docs"]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("seq_len", 0),
        ("train_samples", 0),
        ("validation_samples", -1),
        ("gptq_samples", 2.5),
        ("evaluation_samples", "many"),
        ("evaluation_seq_len", 0),
        ("batch_size", 0),
        ("microbatch_size", 0),
        ("forward_batch_size", 0),
        ("seed", -1),
        ("batchsize", 8),
        ("calibration", {"class_path": "gsq_module.data.sources.Speeches", "init_args": {"until": 1982}}),
        ("calibration", {"class_path": "torch.nn.Linear"}),
    ],
)
def test_impossible_values_are_refused_at_parse(parser, key, value):
    with pytest.raises(ArgumentError):
        parser.parse_object({"data": RECIPE | {key: value}})


def test_every_key_has_help(parser):
    text = " ".join(parser.format_help().split())
    for key in list(inspect.signature(CalibrationData.__init__).parameters)[1:]:
        documented = text.partition(f"--data.{key} ")[2]
        assert documented, key
    assert "Lower it when memory runs out." in text
    assert "Host memory for hidden states grows with it." in text
