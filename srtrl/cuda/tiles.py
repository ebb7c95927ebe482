"""Launch sizes of the tree attention of a decode step on a CUDA device: work of the host, without Triton.

Rows are grouped in *tiles*: up to R rows of one sequence, whose query heads together fill one block of
the kernel (`attention.py`), so that the sequence's keys are read once for all of them. Long contexts are split:
several programs share the keys of a tile. How many there are at most is part of a captured graph; the keys of one
split, and so how many of them have any, are read from the device.

What the kernel reads is `TiledRows`. M tiles.
"""

import math
from dataclasses import dataclass

import numba
import numpy as np
import torch
from torch import Tensor

from srtrl.engine.step_inputs import Int32Array, StepInputs
from srtrl.model.paged_attention import TreeRows

KEY_BLOCK = 64
"""Keys that the kernel reads at once; blocks begin at multiples of it."""

MAX_BLOCK_BYTES = 32 * 1024
"""Maximum size of a block of keys and one of values: 64 of each for bfloat16 heads of 128."""

MIN_SPLIT_KEYS = 2 * KEY_BLOCK
"""No split is meant to be shorter: a block costs less than the start of a program and its combination."""

MAX_NUM_SPLITS = 32

SCRATCH_LANES = 2**17
"""Partial results that have room, of one query head over one split each: 64 MiB for heads of 128."""

REGISTERS = 65_536
"""Registers of a multiprocessor since Volta."""

NUM_THREADS = 128
"""Threads of a program: four warps."""

LARGEST_BLOCK_M = 64
WIDE_BLOCK_M = 32
"""The same for heads of more than 128 numbers: with 64 lanes these would need more shared memory than Ampere has."""


@dataclass(kw_only=True, slots=True, frozen=True)
class TiledRows(TreeRows):
    """The rows of a step for the kernel."""

    tiles: Tensor
    """[M, 4]: first row, number of rows, row of `page_tables`, and the largest number of positions that its rows see,
    draft nodes of other branches included. Those that see the most positions come first, zeros for padding last."""
    split_keys: Tensor
    """[1], see `choose_split_keys`."""


def fill_tiles(tiles: Int32Array, inputs: StepInputs, num_rows: int, rows_per_tile: int) -> None:
    """Write `TiledRows.tiles` [M, 4] of the first `num_rows` rows, up to `rows_per_tile` of one sequence in each."""
    num_tiles = _cut_rows(tiles, inputs.row_tables, inputs.context_lengths, num_rows, rows_per_tile)
    # Programs start in this order: a long one that starts last would be waited for. (Numba takes seconds to sort.)
    tiles[:num_tiles] = tiles[np.argsort(-tiles[:num_tiles, 3], kind="stable")]
    tiles[num_tiles:] = 0


@numba.njit(cache=True, nogil=True)
def _cut_rows(
    tiles: Int32Array, row_tables: Int32Array, context_lengths: Int32Array, num_rows: int, rows_per_tile: int
) -> int:
    """Cut the rows of each sequence into tiles; returns their number.

    A sequence's rows write to adjacent positions, and its first row sees its own position last: so the last row of a
    tile writes as many positions after that as there are rows between them.
    """
    tile, first = 0, 0
    while first < num_rows:
        end = first + 1
        while end < num_rows and row_tables[end] == row_tables[first]:
            end += 1
        for start in range(first, end, rows_per_tile):
            stop = min(start + rows_per_tile, end)
            assert tile < len(tiles)
            tiles[tile, 0] = start
            tiles[tile, 1] = stop - start
            tiles[tile, 2] = row_tables[first]
            tiles[tile, 3] = context_lengths[first] + (stop - 1 - first)
            tile += 1
        first = end
    return tile


def choose_block_m(*, rows_per_sequence: float, group: int, head_dim: int) -> int:
    """Height of a block, a power of two: 16, 32 or 64, more only if the heads of one row need it.

    A sequence's keys are read once per tile, so a tile should hold all rows of a usual sequence (`rows_per_sequence`,
    on average); but one row alone pads up to the 16 that a tensor core takes anyway. `group` is H / K.
    """
    block_m = max(16, next_power_of_two(group))
    while block_m < (LARGEST_BLOCK_M if head_dim <= 128 else WIDE_BLOCK_M) and block_m // group < rows_per_sequence:
        block_m *= 2
    return block_m


@dataclass(kw_only=True, frozen=True)
class DeviceLimits:
    """Limits of a device on the number of programs that run at the same time."""

    num_multiprocessors: int
    shared_bytes: int
    """Shared memory of a multiprocessor."""


H200 = DeviceLimits(num_multiprocessors=132, shared_bytes=228 * 1024)
"""As an H100 has; for shapes of steps if there is no device to ask."""


def max_registers(*, block_m: int, head_dim: int, dtype: torch.dtype) -> int:
    """Registers that a thread of the attention kernel may use, without which the assembler chooses by itself.

    With 16 lanes 168 let three programs run on a multiprocessor, and nothing is kept in memory for want of registers
    (`tests/test_triton_compile.py` reads both from the binary). All else needs more, float32 heads 255.
    """
    is_small = block_m <= 16 and head_dim in {64, 128} and dtype.itemsize == 2
    return 168 if is_small else 255


def shared_bytes(block_m: int) -> int:
    """Shared memory that a program of the attention takes at most, with heads of up to 256 numbers.

    Two blocks of keys and values, one of them on its way, and what the lanes carry along.
    """
    return {16: 42, 32: 54}.get(block_m, 90) * 1024


def programs_per_device(*, block_m: int, head_dim: int, dtype: torch.dtype, device: DeviceLimits) -> int:
    """Number of programs of the attention that run at the same time.

    Bandwidth times latency is 36 KiB on a multiprocessor of an H200 (4.8 TB/s x 1 us / 132). A program keeps one block
    of keys and values on its way, 32 KiB for bfloat16 heads of 128: so two are enough, with three there is always more.
    """
    registers = 8 * -(-max_registers(block_m=block_m, head_dim=head_dim, dtype=dtype) // 8)
    by_registers = REGISTERS // (NUM_THREADS * registers)
    by_memory = max(1, device.shared_bytes // shared_bytes(block_m))
    return min(by_registers, by_memory) * device.num_multiprocessors


def choose_num_splits(
    *, num_programs: int, programs_at_once: int, block_m: int, max_keys: int, mean_keys: float
) -> int:
    """Splits of the keys of each tile, so that programs fill the device and none is much longer than its share.

    With sequences of one length as many as fill the device once: one wave reads all keys together. If they differ,
    the longest program should take no longer than all of them together, spread over the device: splits after the end
    of a sequence cost nothing.

    Args:
        num_programs: Tiles times key-value heads.
        programs_at_once: See `programs_per_device`.
        block_m: Lanes of a program.
        max_keys: Keys of the longest sequence.
        mean_keys: Keys of a sequence on average.
    """
    wanted = programs_at_once // num_programs
    if max_keys > 1.5 * mean_keys:
        wanted = max(wanted, math.ceil(programs_at_once * max_keys / (num_programs * mean_keys)))
    by_room = SCRATCH_LANES // (num_programs * block_m)
    return max(1, min(wanted, by_room, -(-max_keys // MIN_SPLIT_KEYS), MAX_NUM_SPLITS))


def choose_split_keys(*, max_keys: int, num_splits: int) -> int:
    """Keys of one split, a multiple of `KEY_BLOCK`, in a step whose longest sequence has `max_keys` positions."""
    return max(1, -(-max_keys // (num_splits * KEY_BLOCK))) * KEY_BLOCK


def keys_at_once(head_dim: int, dtype: torch.dtype) -> int:
    """`KEY_BLOCK`, or for wide heads a half of it, ...: shared memory holds a block of keys and one of values."""
    keys = KEY_BLOCK
    while keys > 16 and 2 * keys * next_power_of_two(head_dim) * dtype.itemsize > MAX_BLOCK_BYTES:
        keys //= 2
    return keys


def next_power_of_two(number: int) -> int:
    """The smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()


class AttentionScratch:
    """Partial results of the splits: memory that all layers and all graphs share, for they run one after the other."""

    def __init__(self, head_dim: int, device: torch.device | str) -> None:
        self.means = torch.zeros(SCRATCH_LANES, head_dim, dtype=torch.float32, device=device)
        """Weighted mean of the values of one split."""
        self.log_weights = torch.zeros(SCRATCH_LANES, dtype=torch.float32, device=device)
        """Base-2 logarithm of its sum of weights."""
