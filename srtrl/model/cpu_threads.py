"""One thread count for torch and for the Numba kernels."""

import logging
import os
import sys

import numba

logger = logging.getLogger(__name__)

WORK_PER_THREAD = 100_000
"""Multiply-adds that are worth a thread: some tens of microseconds."""


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def set_cpu_threads(num_threads: int | None = None) -> None:
    """Let torch and Numba's kernels use `num_threads`, at most one for each core (by default torch's current number).

    The first parallel call of Numba sets OpenMP's thread count, and with it torch's, to the number of cores: torch
    would give other bits after it than before, and run slowly on a busy machine. So that call is made here, and
    torch's count set after it.
    """
    import torch

    count = num_threads or torch.get_num_threads()
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
