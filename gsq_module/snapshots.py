"""Hidden states before a block, kept on disk, so that a resumed run need not pass through all finished blocks again."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gsq_module import ranks
from gsq_module.atomic import remove_leftovers, write_atomically, write_parts_atomically
from gsq_module.fingerprint import data_identity
from gsq_module.streaming.activations import batches
from gsq_module.unit_shards import as_bytes

logger = logging.getLogger(__name__)

CHUNK_BYTES = 64 * 2**20


class Snapshots:
    """Snapshots of one pass over the blocks: two files a rank, the states and what they are; the newest is kept.

    One is used only where it is whole (checksum), was made of the same rows by the same number of ranks, in the same
    dtype, and behind the very units that are on disk. Anything else is as if there were none.

    Args:
        folder: Of this pass.
        every: Blocks between two snapshots; None makes no new ones.
        tokens: Calibration rows of this rank.
    """

    def __init__(self, folder: Path, every: int | None, tokens: Tensor) -> None:
        self.folder = folder
        self.every = every
        self._rows = data_identity(tokens)

    def is_due(self, block: int) -> bool:
        """Whether to make one before this block."""
        return self.every is not None and block % self.every == 0

    def save(self, streams: Sequence[Tensor], block: int, basis: str) -> None:
        """Keep the streams as they are before a block. All ranks call it.

        Args:
            streams: Hidden states `[num_samples, seq_len, hidden_size]`.
            block: Index of the block.
            basis: Hash of the units that they have passed through.

        Raises:
            StorageError: The disk is full; the snapshot before stays.
        """
        path = self._path(block)
        digest = hashlib.sha256()

        def contents() -> Iterator[memoryview]:
            for part in _parts(streams):
                content = as_bytes(part.cpu())
                digest.update(content)
                yield content

        write_parts_atomically(path, contents(), sum(stream.nbytes for stream in streams))
        about = self._about(streams, block, basis) | {"sha256": digest.hexdigest()}
        write_atomically(path.with_suffix(".json"), json.dumps(about).encode())
        ranks.barrier()  # before that, another rank may have only the older one
        for older in self._own():
            if older != path:
                self._remove(older)

    def restore(self, streams: Sequence[Tensor], at_most: int, basis: Callable[[int], str]) -> int | None:
        """Fill the streams from the newest snapshot that serves. All ranks call it, and use the same one.

        Args:
            streams: As in `save`; what is in them is lost, also where nothing is found.
            at_most: Index of the first block that is not finished.
            basis: Gives the hash of the finished units before a block.

        Returns:
            The block that comes next; None where no snapshot serves.
        """
        remove_leftovers(self.folder)
        found = {block for path in self._own() if (block := self._block(path, streams, at_most, basis)) is not None}
        for block in sorted(set.intersection(*ranks.gather(found)), reverse=True):
            if all(ranks.gather(self._read(streams, self._path(block)))):
                return block
        return None

    def clear(self) -> None:
        """Remove this rank's."""
        for path in self._own():
            self._remove(path)

    def _path(self, block: int) -> Path:
        return self.folder / f"block_{block:04d}.rank{ranks.rank()}of{ranks.world_size()}.bin"

    def _own(self) -> list[Path]:
        return sorted(self.folder.glob(f"block_*.rank{ranks.rank()}of{ranks.world_size()}.bin"))

    @staticmethod
    def _remove(path: Path) -> None:
        path.with_suffix(".json").unlink(missing_ok=True)
        path.unlink(missing_ok=True)

    def _about(self, streams: Sequence[Tensor], block: int, basis: str) -> dict[str, Any]:
        kinds = [[str(stream.dtype), *stream.shape] for stream in streams]
        return {"block": block, "basis": basis, "rows": self._rows, "streams": kinds}

    def _block(self, path: Path, streams: Sequence[Tensor], at_most: int, basis: Callable[[int], str]) -> int | None:
        """The block of a snapshot that serves, as far as can be told without reading it."""
        about = _read_json(path.with_suffix(".json"))
        block = about.get("block")
        if not isinstance(block, int) or not 0 < block <= at_most or path != self._path(block):
            return None
        about.pop("sha256", None)
        return block if about == self._about(streams, block, basis(block)) else None

    def _read(self, streams: Sequence[Tensor], path: Path) -> bool:
        """Fill the streams; whether the file is whole."""
        digest = hashlib.sha256()
        try:
            with open(path, "rb") as file:
                for part in _parts(streams):
                    content = bytearray(part.nbytes)
                    if file.readinto(content) != len(content):
                        break
                    digest.update(content)
                    part.copy_(torch.frombuffer(content, dtype=torch.uint8).view(part.dtype).view(part.shape))
                whole = digest.hexdigest() == _read_json(path.with_suffix(".json")).get("sha256") and not file.read(1)
        except OSError:
            whole = False
        if not whole:
            logger.warning("%s is damaged: the hidden states are computed again", path)
        return whole


def _parts(streams: Sequence[Tensor]) -> Iterator[Tensor]:
    """The streams a few samples at a time."""
    for stream in streams:
        for rows in batches(len(stream), max(1, CHUNK_BYTES // max(1, stream[:1].nbytes))):
            yield stream[rows]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
