"""Recipe keys for the device memory that NCCL takes: they become its environment variables, before it starts."""

from __future__ import annotations

import os
from dataclasses import dataclass

from jsonargparse.typing import PositiveInt


@dataclass
class NCCL:
    """Device memory of NCCL, the library through which several GPUs talk; of no effect on one GPU.

    null leaves a setting to NCCL. A variable that is set in the environment stays as it is, whatever the recipe says.
    `benchmarks/nccl_memory.py` measures what each saves on the machine at hand. Meanings and defaults are those of
    NVIDIA's documentation (user guide, "Environment Variables").

    Args:
        buffsize: NCCL_BUFFSIZE: bytes of a buffer through which two GPUs exchange data; each channel has its own. NCCL
            takes 4194304. Smaller buffers slow large messages down.
        max_ctas: NCCL_MAX_CTAS: most CUDA blocks, and so channels, of a collective. NCCL takes as many as the links'
            speed asks for; memory is in proportion to them, and on slow links few are enough.
        nvls: NCCL_NVLS_ENABLE: reductions inside NVLink switches, where there are any, which take buffers of their own.
            NCCL uses them where it can; false saves those buffers.
        cumem: NCCL_CUMEM_ENABLE: NCCL's memory from CUDA's virtual memory functions, in pages of 2 MiB. NCCL uses them
            where it can; false takes plain allocations (and turns nvls off).
    """

    buffsize: PositiveInt | None = None
    max_ctas: PositiveInt | None = None
    nvls: bool | None = None
    cumem: bool | None = None

    def variables(self) -> dict[str, str]:
        """Environment variables of the keys that are set."""
        values = {
            "NCCL_BUFFSIZE": self.buffsize,
            "NCCL_MAX_CTAS": self.max_ctas,
            "NCCL_NVLS_ENABLE": self.nvls,
            "NCCL_CUMEM_ENABLE": self.cumem,
        }
        return {name: str(int(value)) for name, value in values.items() if value is not None}

    def export(self) -> None:
        """Set the variables that the user has not; processes started later inherit them. NCCL reads them once."""
        for name, value in self.variables().items():
            os.environ.setdefault(name, value)
