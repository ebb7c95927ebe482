"""`triton.jit` with a type: Triton's decorator has none, and an untyped one would leave what it decorates unchecked."""

from collections.abc import Callable
from typing import Any

import triton

jit: Callable[[Callable[..., Any]], Any] = triton.jit
"""Compile a kernel, or a function that kernels call; see `triton.jit`."""
