"""Shared by the tests of Triton kernels: their device, and patches that make the interpreter compute as one."""

import importlib
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

KERNEL_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""Without a CUDA device kernels run under Triton's interpreter (see `conftest.py`): keep shapes tiny."""


def _fix_bfloat16_of_the_interpreter(interpreter: Any) -> None:
    """It truncates to bfloat16 where devices round, and multiplies matrices of bfloat16 as if they were integers."""
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


def _speed_up_the_interpreter(interpreter: Any) -> None:
    """It looks for what it must replace in Triton's language at each call within a kernel: half of the time of a test.

    The launch has done so for the kernel's own module; what is replaced for another one stays replaced.
    """
    prepared = set()

    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        if self.fn.__module__ not in prepared:
            prepared.add(self.fn.__module__)
            interpreter._patch_lang(self.fn)
        return self.rewrite()(*arguments, **options)

    interpreter.InterpretedFunction.__call__ = call


if KERNEL_DEVICE == "cpu" and find_spec("triton") is not None:
    _interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    _fix_bfloat16_of_the_interpreter(_interpreter)
    _speed_up_the_interpreter(_interpreter)
