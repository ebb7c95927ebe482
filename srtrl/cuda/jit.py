"""`triton.jit` with a type, and how a kernel begins while the one before it ends (programmatic dependent launch).

Triton's decorator has no type, and an untyped one would leave what it decorates unchecked.
"""

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

jit: Callable[[Callable[..., Any]], Any] = triton.jit
"""Compile a kernel, or a function that kernels call; see `triton.jit`."""


def _overlaps() -> bool:
    return not triton.knobs.runtime.interpret and bool(cuda_capability_geq(9) and not cuda_capability_geq(12))


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
    return {"launch_pdl": True} if can_overlap() else {}
