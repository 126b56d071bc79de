"""The report's pictures and tables as W&B shows them."""

from __future__ import annotations

from io import BytesIO

from lightning.pytorch.loggers import WandbLogger
from PIL import Image

from gsq_module.report.record import Record
from gsq_module.summary import TABLES


def log_report(logger: WandbLogger, record: Record, drawn: dict[str, bytes], step: int) -> None:
    """Log them under `report/`.

    Args:
        logger: Of the run.
        record: The finished run.
        drawn: Its pictures as PNG files by name.
        step: The Trainer's step, which only rises.
    """
    for name, content in drawn.items():
        logger.log_image(f"report/{name}", [Image.open(BytesIO(content))], step=step)
    figures = [
        [text, key.removesuffix("_by_text"), model, value]
        for _, key, _ in TABLES
        for text, values in record.summary[key].items()
        for model, value in values.items()
    ]
    logger.log_table("report/figures", ["text", "measure", "model", "value"], figures, step=step)
    columns = ["text", "prompt", "original", "quantized"]
    rows = [[row[column] for column in columns] for row in record.summary["continuations"]]
    if rows:
        logger.log_table("report/continuations", columns, rows, step=step)
