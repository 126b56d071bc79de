"""A callback for rehearsals: what each rank's device held at most in each stage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from gsq_module import ranks
from gsq_module.memory.stages import Stage, StageListener
from gsq_module.memory.statistics import DeviceMemory


class RankPeaks(Callback, StageListener):
    """Writes `rank<N>.json`, anew after every stage: a run that fails later leaves what it has measured.

    Args:
        directory: Folder of the files.
    """

    def __init__(self, directory: str) -> None:
        self.directory = Path(directory)
        self.stages: list[dict[str, Any]] = []

    @override
    def on_stage_end(self, stage: Stage, seconds: float, memory: DeviceMemory | None) -> None:
        row: dict[str, Any] = {"stage": stage.name, "block": stage.block, "unit": stage.unit, "failed": stage.failed}
        if memory is not None:
            row |= {
                "allocated": memory.peak_allocated,
                "reserved": memory.peak_reserved,
                "device_used": memory.device_total - memory.margin,
            }
        self.stages.append(row)
        self.directory.mkdir(parents=True, exist_ok=True)
        (self.directory / f"rank{ranks.rank()}.json").write_text(json.dumps(self.stages))
