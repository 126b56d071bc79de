"""What each stage of a run holds on the device at its highest, a formula a term.

What no formula knows is in the constants below, each with where it was measured. Bytes throughout.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gsq_module.memory.sizes import (
    HEAD_TOKENS,
    HEAD_WEIGHTS,
    PLACED_ROWS,
    ROW_CHUNK_WEIGHTS,
    BlockShape,
    Job,
    OuterShape,
    UnitShape,
)

MIB = 2**20

CUBLAS_BYTES = 64 * MIB
"""Workspaces that cuBLAS and cuBLASLt keep in torch's allocator, once a matrix product has run."""
CHUNK_BYTES = 64 * MIB
"""A temporary of a row chunk (relaxation.MAX_TEMPORARY_BYTES)."""
SETUP_CHUNKS, EAGER_CHUNKS = 4, 7
"""How many of them there are at once while logits are set up, and in an eager optimizer step."""
ROW_CHUNK_BYTES = 15
"""What a weight of a row chunk of embedding or head takes at once: while it is rounded, in its own dtype and three
times in float32. Measured on an H200: 14.0 with and without GPTQ, at 4 and 8 bits."""
LOGIT_TOKENS = 512
"""Positions whose logits the final pass compares at once (scale_tuning.LOGIT_TOKENS)."""
FLOAT32 = 4

Terms = dict[str, int]


@dataclass(frozen=True)
class StagePlan:
    """A stage's predicted peak.

    Attributes:
        stage: Its name, as the StageClock has it.
        block: Index of the first block it is meant for, None outside the block loop.
        unit: Kind of the unit, None where the stage is the whole block's.
        terms: Bytes on the device by what they are for, at the highest moment.
    """

    stage: str
    block: int | None
    unit: str | None
    terms: Terms

    @property
    def allocated(self) -> int:
        """Peak bytes of tensors."""
        return sum(self.terms.values())


@dataclass(frozen=True)
class StageFormulas:
    """The stages of a run on one rank.

    Attributes:
        job: Sizes of the run.
        blocks: Its kinds of block.
    """

    job: Job
    blocks: tuple[BlockShape, ...]

    def _stages(self) -> Iterator[StagePlan]:
        job = self.job
        forward_tokens = job.forward_batch * job.seq_len
        hidden = self._hidden(forward_tokens)
        # in int8, as dequantized, and as one factor of that
        placed = {"dequantized rows": PLACED_ROWS * job.hidden_size * (1 + 2 * job.itemsize)} if job.outer else {}
        for part in job.outer:
            if part.kind == "embedding" or not job.gptq:
                yield StagePlan(part.kind, None, None, self._row_chunk(part))
        yield StagePlan(
            "embed", None, None,
            placed | {"embedding": job.vocabulary_bytes, "hidden states": 3 * hidden, "stores": self._on_device()},
        )  # fmt: skip
        for kind in self.blocks:
            yield from self._block_stages(kind, hidden, forward_tokens)
        for part in job.outer:
            if part.kind == "head" and job.gptq:
                yield StagePlan("head", None, None, self._head(part, hidden))
        if job.final_pass:
            yield StagePlan("final_pass", None, None, self._final_pass())
        largest = max(self.blocks, key=lambda kind: kind.nbytes + kind.forward)
        evaluation = job.evaluation_seq_len / job.seq_len
        tokens = min(HEAD_TOKENS, job.evaluation_seq_len)
        rows = min(job.vocabulary, max(1, HEAD_WEIGHTS // job.hidden_size))
        heads = {"head": job.head_bytes * rows // job.vocabulary}
        if any(part.kind == "head" or part.copies > 1 for part in job.outer):
            heads["original head"] = heads["head"]
        pieces = [
            {"block": largest.nbytes, "working set": int(largest.forward * min(1.0, evaluation)), "hidden": 4 * hidden},
            # in float32: logits of both models, and a temporary
            heads | {"logits": 3 * FLOAT32 * tokens * rows, "cuBLAS": CUBLAS_BYTES},
            heads | placed | {"cuBLAS": CUBLAS_BYTES},
            placed | {"embedding": job.vocabulary_bytes, "hidden states": 3 * hidden},
        ]
        stored = {"stores": self.evaluation_store_bytes if job.evaluation_store == "device" else 0}
        yield StagePlan("evaluate", None, None, stored | self._highest(pieces))
        if job.reload:
            logits = 2 * FLOAT32 * job.evaluation_seq_len * job.vocabulary
            yield StagePlan("reload", None, None, {"model": job.model_bytes, "logits": logits, "cuBLAS": CUBLAS_BYTES})

    def _block_stages(self, kind: BlockShape, hidden: int, forward_tokens: int) -> Iterator[StagePlan]:
        job, index = self.job, kind.indices[0]
        resident = {
            "block": kind.nbytes, "calls": kind.calls, "stores": self._on_device(), "cuBLAS": CUBLAS_BYTES
        }  # fmt: skip
        # One batch at work, the next one on its way.
        reading = 0 if job.store == "device" else 2 * hidden
        passing = resident | {"working set": kind.forward, "batches under way": reading + hidden}
        if job.original_stream:
            yield StagePlan("original", index, None, passing)
        for unit in kind.units:
            scales = 2 * FLOAT32 * unit.weights // job.group_size
            hessians = sum(FLOAT32 * n * n for n in unit.hessians) if job.gptq else 0
            # goal, residual, target and its square
            targets = 4 * FLOAT32 * forward_tokens * job.hidden_size
            # The pass for the targets ends before the unit, and its working set with it; the Hessians' writes nothing.
            pieces = [
                resident | {"batches under way": reading + hidden, "targets": targets},
                resident | {"batches under way": reading, "working set": unit.capture, "Hessians": hessians},
            ]
            yield StagePlan("capture", index, unit.kind, self._highest(pieces))
            yield StagePlan("initialize", index, unit.kind, resident | self._solve(unit))
            microbatch = self._hidden(job.microbatch * job.seq_len)
            copies = 2 if job.store == "device" else 4
            share = job.world_size if job.strategy == "sharded" else 1
            state = {
                "logits and momentum": 2 * job.candidates * job.logit_itemsize * unit.weights // share,
                "candidates": unit.weights // share if job.windowed else 0,
                "scales": scales // share,
            }
            gradient = {"gradient": job.itemsize * unit.weights}
            frozen = {} if job.cached or job.original_stream else {"original unit": unit.nbytes}
            batch = {"microbatches": copies * microbatch}
            chunk = min(CHUNK_BYTES, FLOAT32 * job.candidates * unit.largest)
            pieces = [
                state | gradient | batch | {"working set": unit.training},
                # the first sample is drawn, or hard weights are made
                state | {"codes": unit.largest, "row chunks": SETUP_CHUNKS * chunk},
                {"hard weights": unit.largest * (1 + 2 * job.itemsize), "working set": unit.validation} | batch,
            ]
            if not job.fused:
                pieces.append(state | gradient | {"row chunks": EAGER_CHUNKS * chunk})
            yield StagePlan("refine", index, unit.kind, resident | frozen | self._highest(pieces))
        yield StagePlan("propagate", index, None, passing)

    def both_models(self, nbytes: int, weights: int) -> Terms:
        """Original and quantized model as the final pass holds them, or a part of them.

        Args:
            nbytes: Weights in the compute dtype.
            weights: How many of them are quantized.
        """
        job = self.job
        return {
            "original model": nbytes,
            "codes": weights,
            "rest in float": nbytes - job.itemsize * weights,
            # scale, gain, its gradient, Adam's two moments
            "scales": weights // job.group_size * (job.itemsize + 4 * FLOAT32),
        }

    def _final_pass(self) -> Terms:
        """Both models whole; of the quantized one a dense block at a time, and what one microbatch needs."""
        job = self.job
        weights = sum(unit.weights * len(kind.indices) for kind in self.blocks for unit in kind.units)
        dense = max(sum(unit.weights for unit in kind.units) for kind in self.blocks)
        tokens = job.microbatch * job.seq_len
        forward = max(kind.forward for kind in self.blocks) * job.microbatch // job.forward_batch
        blocks = sum(len(kind.indices) for kind in self.blocks)
        return self.both_models(job.whole_bytes, weights) | {
            "dense block and its gradients": 2 * job.itemsize * dense,
            "hidden states": (blocks + 1) * self._hidden(tokens),
            "working set": 2 * forward,
            "logits": 3 * job.itemsize * tokens * job.vocabulary
            + 4 * FLOAT32 * min(tokens, LOGIT_TOKENS) * job.vocabulary,
            "cuBLAS": CUBLAS_BYTES,
        }

    def _row_chunk(self, part: OuterShape) -> Terms:
        """Rows of embedding or head under way on this rank, and the codes of all ranks."""
        ranks = self.job.world_size
        chunk = min(ROW_CHUNK_WEIGHTS, -(-part.rows // ranks) * part.columns)
        return {"rows": ROW_CHUNK_BYTES * chunk, "gathered codes": (ranks + 1) * chunk if ranks > 1 else 0}

    def _head(self, part: OuterShape, hidden: int) -> Terms:
        """The highest moment of GPTQ on the head, and of the way there."""
        square = FLOAT32 * part.columns**2
        stored = {"stores": self._on_device(), "cuBLAS": CUBLAS_BYTES}
        pieces = [
            {"hidden states": 5 * hidden, "Hessians": square},
            {"Hessians": square, "factorization": 2 * square},
            {"Hessians": square, "factor": square} | self._row_chunk(part),
        ]
        if self.job.float_blocks:
            pieces += [
                {
                    "block": kind.nbytes,
                    "calls": kind.calls,
                    "working set": kind.forward,
                    "batches under way": 3 * hidden,
                }
                for kind in self.blocks
            ]
        return stored | self._highest(pieces)

    def _solve(self, unit: UnitShape) -> Terms:
        """The highest moment of a unit's initial codes, one linear after the other; finished codes go to the host."""
        job = self.job
        waiting = list(unit.hessians)
        pieces: list[Terms] = []
        for position, (rows, cols) in enumerate(unit.linears):
            # Each rank solves its own rows.
            size, square = -(-rows // job.world_size) * cols, FLOAT32 * cols * cols
            if not job.gptq:
                # float32 copy; the rounded codes in float32 and, at the end, in int8
                pieces.append({"weight": FLOAT32 * size, "codes in float32": 2 * FLOAT32 * size})
                continue
            # One that linears share goes when the last of them has read it.
            if cols in waiting and all(other != cols for _, other in unit.linears[position + 1 :]):
                waiting.remove(cols)
            hessians = {"Hessians": sum(FLOAT32 * n * n for n in waiting)}
            pieces.append(hessians | {"factorization": 2 * square})
            pieces.append(hessians | {"factor": square, "weight": FLOAT32 * size, "codes": size})
        return self._highest(pieces)

    def _hidden(self, tokens: int) -> int:
        return tokens * self.job.hidden_size * self.job.itemsize

    @property
    def store_bytes(self) -> int:
        """Hidden states of this rank's samples: the quantized stream; inputs and targets or the residual; goals."""
        job = self.job
        samples = -(-job.samples // job.world_size)
        units = max(len(kind.units) for kind in self.blocks)
        count = (3 if job.cached else 2) + (units if job.original_stream else 0)
        return count * samples * job.seq_len * job.hidden_size * job.store_itemsize

    @property
    def evaluation_store_bytes(self) -> int:
        """Hidden states of this rank's share of all evaluation texts."""
        samples = -(-self.job.evaluation_samples // self.job.world_size)
        return self._hidden(samples * self.job.evaluation_seq_len)

    def _stored(self, place: str) -> int:
        """Hidden states in one place; those of evaluation and of calibration are never there together."""
        job = self.job
        return max(
            self.store_bytes if job.store == place else 0,
            self.evaluation_store_bytes if job.evaluation_store == place else 0,
        )

    def _kept(self, place: str) -> int:
        """The original's hidden states, kept through the run for others to be compared with; never on the device."""
        kept_in = "memory" if self.job.evaluation_store == "device" else self.job.evaluation_store
        return self.evaluation_store_bytes if kept_in == place else 0

    def _on_device(self) -> int:
        return self.store_bytes if self.job.store == "device" else 0

    @staticmethod
    def _highest(pieces: list[Terms]) -> Terms:
        return max(pieces, key=lambda terms: sum(terms.values()))
