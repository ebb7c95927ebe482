"""The arrays of a step in one flat int32 buffer, laid out alike on the host and on the device.

So a GPU gets them in a single copy, and a captured graph finds them at the same addresses.
"""

import math

import numpy as np

from srtrl.engine.step_inputs import Array, Fields, Int32Array

ALIGNMENT = 32
"""Elements: each array begins at a multiple of 128 bytes, so that a kernel is compiled for one alignment only."""


def aligned(length: int) -> int:
    """The elements that an array of this length takes up in a buffer, so that the next one begins aligned."""
    return -(-length // ALIGNMENT) * ALIGNMENT


def slices_of(fields: Fields) -> dict[str, slice]:
    """Place of each array in the buffer, in int32 elements."""
    places, offset = {}, 0
    for name, (dtype, shape) in fields.items():
        length = math.prod(shape) * np.dtype(dtype).itemsize // 4
        places[name] = slice(offset, offset + length)
        offset += aligned(length)
    return places


def num_elements(fields: Fields) -> int:
    """Length of the buffer in int32 elements."""
    return aligned(max(part.stop for part in slices_of(fields).values()))


def views_of(buffer: Int32Array, fields: Fields) -> dict[str, Array]:
    """The arrays in a buffer."""
    slices = slices_of(fields)
    return {name: buffer[slices[name]].view(dtype).reshape(size) for name, (dtype, size) in fields.items()}
