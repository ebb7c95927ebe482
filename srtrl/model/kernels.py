"""How functions are compiled that only Numba kernels call: without the wrappers by which Python would call them.

These are half of the time that it takes to compile a function of many arrays. The kernel that calls such a function has
it in its own file of the cache.
"""

from typing import Any

import numba

inner: Any = numba.njit(nogil=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)
inlined: Any = numba.njit(nogil=True, no_cpython_wrapper=True, no_cfunc_wrapper=True, forceinline=True)
"""Inlined by LLVM."""
