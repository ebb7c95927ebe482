"""`triton.jit` with a type: Triton has none, and an untyped decorator would leave what it decorates unchecked."""

from collections.abc import Callable, Sequence
from typing import Any

import triton


def jit(function: Callable[..., Any]) -> Any:
    """Compile a kernel, or a function that kernels call; see `triton.jit`."""
    return triton.jit(function)


def jit_unspecialised(names: Sequence[str]) -> Callable[[Callable[..., Any]], Any]:
    """As `jit`; what the integers `names` are (1, or a multiple of 16) makes no other kernel, and so no other bits."""

    def decorate(function: Callable[..., Any]) -> Any:
        return triton.jit(function, do_not_specialize=list(names))

    return decorate
