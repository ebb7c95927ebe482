"""One thread count for torch and for the Numba kernels."""

import logging
import os
import sys
from pathlib import Path

import numba

logger = logging.getLogger(__name__)

WORK_PER_THREAD = 100_000
"""Multiply-adds that are worth a thread: some tens of microseconds."""
MAX_CUDA_THREADS = 8
"""The default beside a GPU: the decoder's host has no work for more."""
CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""A container's microseconds of CPU time (cgroup 2), or `max`, in each period of that many."""


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def quota_cores() -> int:
    """Cores that the container's quota pays for; a process that computes on more is stopped for the rest of a period.

    A container on a rented machine sees all cores of the host.
    """
    quota, period = CPU_QUOTA.read_text(encoding="ascii").split() if CPU_QUOTA.exists() else ("max", "1")
    return num_cores() if quota == "max" else max(1, int(quota) // int(period))


def set_cpu_threads(num_threads: int | None = None, *, device: str = "cpu") -> None:
    """Let torch and Numba's kernels use `num_threads`, at most one for each core.

    By default that is torch's current number; on a `device` cuda at most `MAX_CUDA_THREADS`, and `quota_cores`.

    The first parallel call of Numba sets OpenMP's thread count, and with it torch's, to the number of cores: torch
    would give other bits after it than before, and run slowly on a busy machine. So that call is made here, and
    torch's count set after it.
    """
    import torch

    default = torch.get_num_threads()
    if device == "cuda":
        default = min(default, MAX_CUDA_THREADS, quota_cores())
    count = num_threads or default
    if num_threads and num_threads > num_cores():
        count = num_cores()
        logger.warning("num_threads: %d is more than the cores of this process; %d are used", num_threads, count)
    numba.set_num_threads(min(count, numba.config.NUMBA_NUM_THREADS))  # type: ignore[attr-defined]
    torch.set_num_threads(count)


def use_kernel_threads(work: int) -> None:
    """Let the next Numba kernel use as many of torch's threads as its `work` (in multiply-adds) pays for.

    A thread that has little to do costs more to wake and to wait for, above all on a busy machine. Kernels compute each
    row alone, so the number of threads does not change a bit. Without torch, which takes a second to import, it is one.
    """
    limit = sys.modules["torch"].get_num_threads() if "torch" in sys.modules else 1
    limit = min(limit, numba.config.NUMBA_NUM_THREADS)  # type: ignore[attr-defined]
    count = max(1, min(limit, work // WORK_PER_THREAD))
    if count != numba.get_num_threads():  # to set it takes 10 microseconds
        numba.set_num_threads(count)
