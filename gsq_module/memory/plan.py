"""The memory plan: what each stage of a run will hold at its highest, from sizes alone.

Every term is a formula (stage_formulas.py), named after what it counts. Only the working sets of a block's and a unit's
forward and backward passes come from outside (planning.py runs them on tensors without data). Bytes throughout.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from gsq_module.memory.stage_formulas import MIB, StageFormulas, StagePlan

CONTEXT_BYTES = 520 * MIB
"""CUDA context of a process that has done nothing yet."""
LIBRARY_BYTES = 420 * MIB
"""What kernels and libraries (cuBLAS, cuSOLVER, Triton) add to it by the end of the first unit. Both were measured on
an H200 by benchmarks/memory.py (device memory in use less what the allocator holds); smaller GPUs take less."""
NCCL_BYTES = 840 * MIB
"""NCCL's buffers of one rank as it sets itself up, none of the recipe's `nccl` keys set: measured between two H200s by
benchmarks/nccl_memory.py; on PCIe cards 0.5-0.7 GiB (field-notes.md)."""
FRAGMENT_FRACTION = {True: 0.03, False: 0.14}
"""What the caching allocator reserves beyond what it hands out, of the peak, with expandable segments and without: on
an H200 0.02 in a refinement, and 0.14 at the wall (docs/memory.md)."""
ANOTHER = "(another result, so another run_dir)"


@dataclass(frozen=True)
class MemoryPlan(StageFormulas):
    """Predicted peaks of a run on one rank.

    Attributes:
        job: Sizes of the run.
        blocks: Its kinds of block.
    """

    stages: tuple[StagePlan, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "stages", tuple(self._stages()))

    def predicted(self, stage: str, block: int | None, unit: str | None) -> int | None:
        """Peak allocated bytes of a stage on this rank's device; None where the plan does not know it."""
        first = next((kind.indices[0] for kind in self.blocks if block in kind.indices), None)
        for plan in self.stages:
            if plan.stage == stage and plan.block in (None, first) and plan.unit in (None, unit):
                return plan.allocated
        return None

    def by_stage(self) -> dict[str, int]:
        """Highest peak by the stage's name, over blocks and units."""
        names = dict.fromkeys(plan.stage for plan in self.stages)
        return {name: max(plan.allocated for plan in self.stages if plan.stage == name) for name in names}

    @property
    def tightest(self) -> StagePlan:
        return max(self.stages, key=lambda plan: plan.allocated)

    def device_bytes(self, allocated: int) -> int:
        """What the device must have free for a peak of allocated bytes: context, NCCL and fragments included."""
        return int(allocated * (1 + FRAGMENT_FRACTION[self.job.expandable_segments])) + self.overhead

    @property
    def overhead(self) -> int:
        """Bytes of the device that a rank takes beside its tensors."""
        return CONTEXT_BYTES + LIBRARY_BYTES + (NCCL_BYTES if self.job.world_size > 1 else 0)

    @property
    def needed(self) -> int:
        """Free bytes of the device that the run needs."""
        return self.device_bytes(self.tightest.allocated)

    @property
    def host_bytes(self) -> int:
        """Peak host memory of this rank beside Python, torch and CUDA: stores, the largest block as read, codes."""
        block = max(kind.nbytes for kind in self.blocks)
        codes = 2 * max(unit.weights for kind in self.blocks for unit in kind.units)
        stores = self._stored("memory") + self._kept("memory")
        pinned = 5 * self._hidden(max(self.job.forward_batch, self.job.microbatch) * self.job.seq_len)
        # codes, packed ones, and the file of them
        outer = max((part.weights + 2 * part.packed_bytes for part in self.job.outer), default=0)
        return block + codes + stores + pinned + max(self.job.vocabulary_bytes, self.job.head_bytes) + outer

    @property
    def checkpoint_bytes(self) -> int:
        """Weights of the exported checkpoint."""
        outer = sum(part.copies * part.packed_bytes for part in self.job.outer)
        return self._packed_blocks + outer + self.job.float_bytes

    @property
    def _packed_blocks(self) -> int:
        weights = sum(unit.weights * len(kind.indices) for kind in self.blocks for unit in kind.units)
        return weights * self.job.storage_bits // 8 + weights // self.job.group_size * 2

    @property
    def disk_bytes(self) -> int:
        """Disk of the run directory: units (refined, initial, scales trained), export, all ranks' hidden states."""
        outer = sum(part.packed_bytes for part in self.job.outer)
        sets = 2 if self.job.measure_initial else 1
        tuned = self._packed_blocks if self.job.final_pass else 0
        stored = self.job.world_size * (self._stored("disk") + self._kept("disk"))
        return sets * (self._packed_blocks + outer) + tuned + self.checkpoint_bytes + stored

    def remedies(self, stage: str) -> list[tuple[str, int]]:
        """Changes of the recipe that lower a stage's peak, and the bytes each saves, in order of gain."""
        now = max((plan.allocated for plan in self.stages if plan.stage == stage), default=0)
        found = []
        for text, changed in self._changes():
            then = max((plan.allocated for plan in changed.stages if plan.stage == stage), default=0)
            if then < now:
                found.append((text, now - then))
        return sorted(found, key=lambda remedy: -remedy[1])

    def _changes(self) -> Iterator[tuple[str, MemoryPlan]]:
        job = self.job
        if job.microbatch > 1:
            yield "--data.microbatch_size 1", self.changed(microbatch=1)
        if job.forward_batch > 1:
            yield "--data.forward_batch_size 1", self.changed(forward_batch=1)
        if "device" in (job.store, job.evaluation_store):
            yield "--model.store memory", self.changed(store="memory", evaluation_store="memory")
        if job.cached and job.original_stream:
            yield "--model.targets recomputed", self.changed(cached=False)
        if not job.cached and not job.original_stream:
            yield "--model.targets cached", self.changed(cached=True)
        if job.logit_itemsize > 2:
            yield f"--model.refinement.logit_dtype bfloat16 {ANOTHER}", self.changed(logit_itemsize=2)
        if job.gptq:
            yield f"--model.initializer rtn {ANOTHER}", self.changed(gptq=False)
        if job.final_pass:
            yield "--model.final_pass.epochs 0 (another result)", self.changed(final_pass=False)
        if job.reload:
            yield "--reload_max_gib 0", self.changed(reload=False)
        if job.strategy == "ddp":
            yield "--trainer.strategy sharded", self.changed(strategy="sharded")
        if job.candidates > 4:
            yield f"--model.bits 2 {ANOTHER}", self.changed(candidates=4, windowed=False)

    def changed(self, **changes: Any) -> MemoryPlan:
        """The plan of a changed job; working sets are in proportion to the sequences they are for."""
        job = replace(self.job, **changes)
        training, forward = job.microbatch / self.job.microbatch, job.forward_batch / self.job.forward_batch
        blocks = tuple(
            replace(
                kind,
                forward=int(kind.forward * forward),
                units=tuple(
                    replace(
                        unit,
                        capture=int(unit.capture * forward),
                        training=int(unit.training * training),
                        validation=int(unit.validation * training),
                    )
                    for unit in kind.units
                ),
            )
            for kind in self.blocks
        )
        return MemoryPlan(job, blocks)
