"""One log of all sessions: rows are added, none twice, and what a killed process left half is dropped."""

from __future__ import annotations

from pathlib import Path

from lightning.pytorch.loggers import Logger

from gsq_module.metrics_log import RunCSVLogger, log_once, read_rows


class Spy(Logger):
    """Keeps what it is told, as W&B would."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []

    name = version = "spy"  # type: ignore[assignment]

    def log_hyperparams(self, params, *args, **kwargs) -> None:
        pass

    def log_metrics(self, metrics, step=None) -> None:
        self.rows.append((step, dict(metrics)))


def session(folder: Path, *rows: tuple[int, dict[str, float]]) -> Spy:
    """Log rows in a process of its own, as it were; it is killed behind the last one."""
    loggers = [RunCSVLogger(str(folder)), Spy()]
    log_once(loggers)
    for step, metrics in rows:
        for logger in loggers:
            logger.log_metrics(metrics=metrics, step=step)
    return loggers[1]


def loss(value: float) -> dict[str, float]:
    return {"train/error": value, "epoch": 0}


def test_a_resumed_session_goes_on_without_a_lost_or_doubled_row(tmp_path: Path) -> None:
    first = session(tmp_path, (0, loss(0.5)), (1, loss(0.4)), (1, {"unit/block": 0.0}))
    second = session(tmp_path, (1, loss(0.4)), (1, {"unit/block": 0.0}), (2, loss(0.3)), (2, {"unit/block": 1.0}))
    rows = read_rows(tmp_path / "metrics" / "version_0" / "metrics.csv")
    assert [(row["step"], row.get("train/error"), row.get("unit/block")) for row in rows] == [
        (0, 0.5, None),
        (1, 0.4, None),
        (1, None, 0.0),
        (2, 0.3, None),
        (2, None, 1.0),
    ]
    assert [row["step"] for row in rows] == [step for step, _ in first.rows + second.rows]


def test_a_retry_logs_its_steps_once(tmp_path: Path) -> None:
    spy = session(tmp_path, (0, loss(0.5)), (1, loss(0.4)), (0, loss(0.5)), (1, loss(0.4)), (2, loss(0.3)))
    assert [step for step, _ in spy.rows] == [0, 1, 2]


def test_the_last_session_has_the_final_word(tmp_path: Path) -> None:
    session(tmp_path, (0, loss(0.5)), (1, {"perplexity/held_out/quantized": 30.0}))
    spy = session(tmp_path, (1, {"perplexity/held_out/quantized": 20.0}))
    (last,) = [
        row for row in read_rows(tmp_path / "metrics/version_0/metrics.csv") if len(row) == 2 and "epoch" not in row
    ]
    assert last == {"perplexity/held_out/quantized": 20.0, "step": 1}
    assert len(spy.rows) == 1


def test_half_a_row_is_dropped_and_logged_again(tmp_path: Path) -> None:
    session(tmp_path, (0, loss(0.5)), (1, loss(0.25)))
    file = tmp_path / "metrics" / "version_0" / "metrics.csv"
    file.write_bytes(file.read_bytes()[:-4])
    spy = session(tmp_path, (0, loss(0.5)), (1, loss(0.25)))
    assert [row["train/error"] for row in read_rows(file)] == [0.5, 0.25]
    assert [step for step, _ in spy.rows] == [1]
    for damage in (b"", b"\xff\xfe\0\0", b"step\n"):
        file.write_bytes(damage)
        session(tmp_path, (0, loss(0.5)))
        assert [row["train/error"] for row in read_rows(file)] == [0.5]
