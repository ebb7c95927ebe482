"""What the tests of Triton kernels share: the device they run on, and what makes the interpreter compute as one."""

import importlib
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

KERNEL_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""Without a CUDA device kernels run under Triton's interpreter (see `conftest.py`): keep shapes tiny."""


def _fix_bfloat16_of_the_interpreter() -> None:
    """It truncates to bfloat16 where devices round, and multiplies matrices of bfloat16 as if they were integers."""
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    bfloat16, float32 = interpreter.tl.bfloat16, interpreter.tl.float32
    convert, dot = interpreter._convert_float, interpreter.InterpreterBuilder.create_dot

    def convert_rounded(numbers: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
        if (source, target) == (float32, bfloat16):
            return torch.from_numpy(np.array(numbers)).bfloat16().view(torch.uint16).numpy()
        return convert(numbers, source, target, rounding_mode)

    def dot_widened(self: Any, left: Any, right: Any, *others: Any) -> Any:
        left, right = (self.cast_impl(one, float32) if one.dtype.scalar == bfloat16 else one for one in (left, right))
        return dot(self, left, right, *others)

    interpreter._convert_float = convert_rounded
    interpreter.InterpreterBuilder.create_dot = dot_widened


if KERNEL_DEVICE == "cpu" and find_spec("triton") is not None:
    _fix_bfloat16_of_the_interpreter()
