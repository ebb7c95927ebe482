"""`repeatable: true`: two runs on one CUDA device give the same bits (docs/exactness.md).

What depends on time is refused where the recipe is read (`REPEATABLE` in `srtrl/recipe/conflicts.py`). What is left is
torch's: sums whose order would be that in which threads come. Nothing here is needed on a CPU.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import deterministic

from srtrl.ranks import refuse_ranks

MEMORY: Any = deterministic  # whose property mypy does not see

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
WORKSPACES = (":4096:8", ":16:8")
"""Values of this environment variable with which a product has the same bits each time; torch accepts no others."""


def fix_workspace() -> None:
    """Fix the workspaces of cuBLAS, before the first product: for the rest of this process, which reads them once.

    Raises:
        ValueError: there are several ranks, or this process has used CUDA with other workspaces.
    """
    refuse_ranks("repeatable: true on CUDA (samples go to the rank that is free first)")
    found = os.environ.get(WORKSPACE)
    if found is None and not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found = os.environ[WORKSPACE] = WORKSPACES[0]
    if found not in WORKSPACES:
        raise ValueError(
            f"repeatable: the environment variable {WORKSPACE} must be {WORKSPACES[0]} before this process uses CUDA, "
            f"found {found or 'nothing'}: set it before the program starts"
        )


@contextmanager
def fixed_order() -> Iterator[None]:
    """Inside the `with` block torch, and the backward pass of FlashAttention, sum in a fixed order.

    An operation that cannot raises RuntimeError, which names it: srtrl has none, a loss of a user may.
    """
    was_on = torch.are_deterministic_algorithms_enabled()
    only_warned = torch.is_deterministic_algorithms_warn_only_enabled()
    filled = MEMORY.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    MEMORY.fill_uninitialized_memory = False  # takes time; nothing reads what nothing has written
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_on, warn_only=only_warned)
        MEMORY.fill_uninitialized_memory = filled
