"""One thread count for torch and for the Numba kernels."""

import numba
import torch


def set_cpu_threads(num_threads: int | None = None) -> None:
    """Let torch and Numba's kernels use `num_threads` (by default torch's present number).

    The first parallel call of Numba sets OpenMP's thread count, and with it torch's, to the number of cores: torch
    would give other bits after it than before, and run slowly on a busy machine. So that call is made here, and
    torch's count set behind it.
    """
    count = num_threads or torch.get_num_threads()
    numba.set_num_threads(min(count, numba.config.NUMBA_NUM_THREADS))  # type: ignore[attr-defined]
    torch.set_num_threads(count)
