"""Launch sizes of the tree attention of a decode step on a CUDA device: arithmetic on the host, without Triton.

Rows are grouped in *tiles*: up to R rows of one sequence, whose query heads together fill one block of
the kernel (`triton_attention.py`), so that the sequence's keys are read once for all of them. Long contexts are split:
several programs share the keys of a tile. How many is part of a captured graph, so it depends on padded sizes only; the
keys of one split are read from the device.

What the kernel reads is `paged_attention.TreeRows`; the reference in plain PyTorch is `ReferencePlan` there.
"""

import torch

KEY_BLOCK = 64
"""Keys that the kernel reads at once; blocks begin at multiples of it."""

MAX_BLOCK_BYTES = 32 * 1024
"""Of a block of keys and one of values: 64 of each for bfloat16 heads of 128."""

MIN_SPLIT_KEYS = 2 * KEY_BLOCK
"""No split is meant to be shorter: a block costs less than the start of a program and its combination."""

MAX_NUM_SPLITS = 64

LARGEST_BLOCK_M = 64
WIDE_BLOCK_M = 32
"""The same for heads of more than 128 numbers: with 64 lanes these would need more shared memory than Ampere has."""


def choose_block_m(*, rows_per_sequence: float, group: int, head_dim: int) -> int:
    """Height of a block, a power of two: 16, 32 or 64, more only where the heads of one row need it.

    A sequence's keys are read once per tile, so a tile should hold all rows of a usual sequence (`rows_per_sequence`,
    on average); but one row alone pads up to the 16 that a tensor core takes anyway. `group` is H / K.
    """
    block_m = max(16, next_power_of_two(group))
    while block_m < (LARGEST_BLOCK_M if head_dim <= 128 else WIDE_BLOCK_M) and block_m // group < rows_per_sequence:
        block_m *= 2
    return block_m


def programs_per_device(block_m: int, num_multiprocessors: int) -> int:
    """Number of programs of the attention that are meant to run at the same time.

    A program of four warps keeps one block of keys and values on its way (32 KiB for bfloat16 heads of 128). As
    compiled for Hopper it takes 43 KiB of shared memory and up to 152 registers a thread with 16 lanes: three or four
    fit on a multiprocessor, and with three there is always more on the way than bandwidth times latency (4.8 TB/s x
    1 us / 132: 36 KiB). With 32 or 64 lanes it takes up to 99 KiB and 250 registers: two fit.
    """
    return (3 if block_m <= 16 else 2) * num_multiprocessors


def choose_num_splits(
    *, num_tiles: int, num_kv_heads: int, block_m: int, max_keys: int, num_multiprocessors: int
) -> int:
    """As many splits as fill the device once, for that one wave reads all keys together; 1 where tiles alone do it.

    `max_keys` is the largest number of keys that a row of this padded step may ever see.
    """
    wanted = programs_per_device(block_m, num_multiprocessors) // max(1, num_tiles * num_kv_heads)
    return max(1, min(wanted, -(-max_keys // MIN_SPLIT_KEYS), MAX_NUM_SPLITS))


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

    def __init__(self, *, num_lanes: int, head_dim: int, device: torch.device | str) -> None:
        """Allocate for `num_lanes` partial results of one query head over one split; see `lanes_for`."""
        self.means = torch.zeros(num_lanes, head_dim, dtype=torch.float32, device=device)
        """Weighted mean of the values of one split."""
        self.log_weights = torch.zeros(num_lanes, dtype=torch.float32, device=device)
        """Base-2 logarithm of its sum of weights."""

    @staticmethod
    def lanes_for(*, group: int, num_multiprocessors: int) -> int:
        """Lanes that no launch with splits exceeds: `choose_num_splits` makes no more programs than run together."""
        block_m = max(LARGEST_BLOCK_M, next_power_of_two(group))
        return max(programs_per_device(block, num_multiprocessors) * block for block in (16, block_m))
