"""Lightning callbacks of a run. They hear of the stages outside `Trainer.fit` too, through `StageListener`."""

from callbacks.allocator_stats import AllocatorStats
from callbacks.empty_cache import EmptyCache
from callbacks.oom_report import OOMReport
from callbacks.progress import RunProgress

__all__ = ["AllocatorStats", "EmptyCache", "OOMReport", "RunProgress"]
