"""How functions are compiled that only Numba kernels call: without the wrappers by which Python would call them.

These are half of the time that it takes to compile a function of many arrays. The kernel that calls such a function has
it in its own file of the cache.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import numba

Function = TypeVar("Function", bound=Callable[..., Any])

OPTIONS: Any = {"nogil": True, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
UNCOUNTED: Any = {**OPTIONS, "_nrt": False}
"""Without Numba's runtime, which counts the references to arrays by an atomic instruction at each use: that took two
thirds of a draft's time. Such a function can make no array."""


def inner(function: Function) -> Function:
    """A function that only kernels call, and that makes no array."""
    compiled: Function = numba.njit(**UNCOUNTED)(function)
    return compiled


def inlined(function: Function) -> Function:
    """The same; LLVM puts it into its callers."""
    compiled: Function = numba.njit(forceinline=True, **UNCOUNTED)(function)
    return compiled


def makes_arrays(function: Function) -> Function:
    """A function that only kernels call, of those that make an array or return a view of one."""
    compiled: Function = numba.njit(**OPTIONS)(function)
    return compiled
