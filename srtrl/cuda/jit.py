"""`triton.jit` with a type, and how a kernel begins while the one before it ends (programmatic dependent launch).

Triton's decorator has no type, and an untyped one would leave what it decorates unchecked.
"""

import ctypes
import functools
import os
from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

jit: Callable[[Callable[..., Any]], Any] = triton.jit
"""Compile a kernel, or a function that kernels call; see `triton.jit`."""


OVERLAP = "SRTRL_OVERLAP"
"""Environment variable: `0` lets each kernel begin after the one before it has ended, as on other devices."""
FIRST_DRIVER = 12030
"""Of CUDA 12.3: older ones do not keep early launches in captured graphs."""


def driver_version() -> int:
    """The CUDA version of the driver, as 12030 for 12.3; `FIRST_DRIVER` where none is there, to compile alone."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return FIRST_DRIVER
    version = ctypes.c_int()
    library.cuDriverGetVersion(ctypes.byref(version))
    return version.value


IS_ALLOWED: Any = tl.constexpr(os.environ.get(OVERLAP) != "0" and driver_version() >= FIRST_DRIVER)
"""Read once: a kernel must not find another value than the one that it was compiled with."""


def _overlaps() -> bool:
    may = bool(IS_ALLOWED) and not triton.knobs.runtime.interpret
    return may and bool(cuda_capability_geq(9) and not cuda_capability_geq(12))


can_overlap: Callable[[], Any] = triton.constexpr_function(_overlaps)
"""Whether a kernel of the device may be launched before the one before it has ended: on Hopper, and Blackwell's 10.x.

On 12.x others had invalid handles by it in graphs that were captured (sglang#18596)."""


@jit
def wait_for_inputs() -> None:
    """The first statement of each kernel that is launched with `overlap()`: nothing before it may touch memory.

    It returns when the kernel before is complete, which had waited for its own one; so all earlier ones are, and what
    they wrote is visible. Only then may the next kernel be launched, to wait in turn.
    """
    if can_overlap():
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


def overlap() -> dict[str, bool]:
    """Options of a launch, by which the kernel waits for the one before it, not the launch."""
    return {} if triton.knobs.runtime.interpret else _options(triton.runtime.driver.active.get_current_device())


@functools.cache
def _options(device: int) -> dict[str, bool]:
    """Asked once for a device: it takes microseconds of each launch."""
    return {"launch_pdl": True} if can_overlap() else {}
