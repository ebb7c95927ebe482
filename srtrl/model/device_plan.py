"""The decoder's attention plan on a CUDA device: static inputs, one kernel, nothing that asks the device anything.

`choose_block_m`, `choose_num_splits` and `choose_split_keys` say how the kernel is launched; they are plain functions
of what the host knows. Where a graph is captured, the first two must depend on the bucket only (they are part of the
launch); the keys of a split are read from the device.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from srtrl.model.attention_backends import PlainAttention
from srtrl.model.device_rows import BITS_PER_WORD, DeviceRows
from srtrl.model.paged_attention import KVCache

KEY_BLOCK = 64
"""Keys that the kernel takes at once; blocks begin at multiples of it."""

MAX_BLOCK_BYTES = 32 * 1024
"""Of a block of keys and one of values: 64 of each for bfloat16 heads of 128."""

FIXED_SPLIT_KEYS = 512
"""Keys of a split in deterministic mode: a row is cut at the same positions in every batch."""

MIN_SPLIT_KEYS = 2 * KEY_BLOCK
"""In free mode no split is meant to be shorter: a block costs less than the start of a program and its combination."""

MAX_NUM_SPLITS = 64
"""In free mode; bounds the scratch memory."""

LARGEST_BLOCK_M = 64
WIDE_BLOCK_M = 32
"""The same for heads of more than 128 numbers: with 64 lanes these would need more shared memory than Ampere has."""


@dataclass(kw_only=True, slots=True, frozen=True)
class AttentionLaunch:
    """How a step attends: constants of a compiled kernel and of a captured graph."""

    block_m: int
    """Query heads of all rows of a tile, padded: the height of the kernel's matrix products."""
    num_splits: int
    """Programs that share the keys of one tile and key-value head."""
    deterministic: bool
    key_block: int = KEY_BLOCK
    backend: PlainAttention | None = None
    """Another library's kernel, for a step in which every row is a sequence's only one; None: `attend_tree`."""

    def rows_per_tile(self, group: int) -> int:
        """R: rows whose `group` = H / K query heads fit in a block."""
        return self.block_m // group

    def keys_at_once(self, head_dim: int, dtype: torch.dtype) -> int:
        """`key_block`, or for wide heads a half of it, ...: shared memory holds a block of keys and one of values."""
        keys = self.key_block
        while keys > 16 and 2 * keys * _next_power_of_two(head_dim) * dtype.itemsize > MAX_BLOCK_BYTES:
            keys //= 2
        return keys


def programs_per_multiprocessor(block_m: int) -> int:
    """How many programs of the attention are meant to share a multiprocessor.

    A program of four warps keeps one block of keys and values on its way (32 KiB for bfloat16 heads of 128). As
    compiled for Hopper it takes 43 KiB of shared memory and up to 152 registers a thread with 16 lanes: three or four
    fit, and with three there is always more on the way than bandwidth times latency (4.8 TB/s x 1 us / 132: 36 KiB).
    With 32 or 64 lanes it takes up to 99 KiB and 250 registers: two fit.
    """
    return 3 if block_m <= 16 else 2


def choose_block_m(*, rows_per_sequence: float, group: int, head_dim: int, deterministic: bool) -> int:
    """Height of a block, a power of two: 16, 32 or 64, more only where the heads of one row need it.

    A sequence's keys are read once a tile, so a tile should hold all rows of a usual sequence (`rows_per_sequence`, on
    average); but one row alone pads up to the 16 that a tensor core takes anyway. In deterministic mode it must not
    depend on the step: the smallest that holds a row.
    """
    smallest = max(16, _next_power_of_two(group))
    if deterministic:
        return smallest
    block_m = smallest
    while block_m < (LARGEST_BLOCK_M if head_dim <= 128 else WIDE_BLOCK_M) and block_m // group < rows_per_sequence:
        block_m *= 2
    return block_m


def choose_num_splits(
    *, num_tiles: int, num_kv_heads: int, block_m: int, max_keys: int, num_multiprocessors: int, deterministic: bool
) -> int:
    """Programs a tile and head.

    Free: as many as fill the chip once, for that one wave reads all keys together; none where the tiles do it alone.
    Deterministic: as many as `max_keys` needs at `FIXED_SPLIT_KEYS` each, and two at least, so that it is one compiled
    kernel for all buckets; programs without keys end at once.

    Args:
        num_tiles: M of the bucket.
        num_kv_heads: K.
        block_m: See `choose_block_m`.
        max_keys: Most keys that a row of the bucket may ever see.
        num_multiprocessors: Of the device.
        deterministic: Whether the bits of a row must not depend on the batch.
    """
    if deterministic:
        return max(2, -(-max_keys // FIXED_SPLIT_KEYS))
    wanted = programs_per_multiprocessor(block_m) * num_multiprocessors // max(1, num_tiles * num_kv_heads)
    return max(1, min(wanted, -(-max_keys // MIN_SPLIT_KEYS), MAX_NUM_SPLITS))


def choose_split_keys(*, longest: int, launch: AttentionLaunch) -> int:
    """Keys of one split in a step whose longest row sees `longest` keys (the most of any tile)."""
    if launch.deterministic:
        assert longest <= launch.num_splits * FIXED_SPLIT_KEYS, (longest, launch)
        return FIXED_SPLIT_KEYS
    return max(1, -(-longest // (launch.num_splits * launch.key_block))) * launch.key_block


def _next_power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


class AttentionScratch:
    """Memory that all layers and all graphs of one engine share: steps run one after the other.

    Partial results of the splits, and the output. Rows of the output that are padding keep what an earlier step left
    there, zeros at first: always finite, never read.
    """

    def __init__(
        self,
        *,
        num_rows: int,
        num_heads: int,
        head_dim: int,
        num_lanes: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        """Allocate.

        Args:
            num_rows: Most rows of a step, padding included.
            num_heads: H.
            head_dim: E.
            num_lanes: Partial results of one query head over one split that may be on hand together, see `lanes_for`;
                with fewer than a launch wants, its tiles are done in several launches.
            dtype: Of the output.
            device: Of both.
        """
        self.out = torch.zeros(num_rows, num_heads, head_dim, dtype=dtype, device=device)
        """[N, H, E]."""
        self.means = torch.zeros(num_lanes, head_dim, dtype=torch.float32, device=device)
        """Weighted mean of the values of one split."""
        self.log_weights = torch.zeros(num_lanes, dtype=torch.float32, device=device)
        """Base-2 logarithm of its sum of weights."""

    @staticmethod
    def lanes_for(*, num_tiles: int, num_kv_heads: int, launch: AttentionLaunch) -> int:
        """Lanes that one launch over so many tiles needs; 0 where keys are not split."""
        return 0 if launch.num_splits == 1 else num_tiles * num_kv_heads * launch.num_splits * launch.block_m

    @staticmethod
    def bytes_needed(*, num_rows: int, num_heads: int, head_dim: int, num_lanes: int, dtype: torch.dtype) -> int:
        """Memory that the constructor takes."""
        return num_rows * num_heads * head_dim * dtype.itemsize + num_lanes * (head_dim + 1) * 4


class DevicePlan:
    """Plan of one decode step over static inputs (`srtrl.model.attention.AttentionPlan`); padding rows included.

    `use_kernels=False` attends in plain PyTorch, from the same inputs: the oracle, and a CPU without the interpreter.
    """

    def __init__(
        self,
        cache: KVCache,
        rows: DeviceRows,
        *,
        num_positions: int,
        launch: AttentionLaunch,
        scratch: AttentionScratch,
        rows_at_once: int | None = None,
        use_kernels: bool = True,
    ) -> None:
        self.cache = cache
        self.rows = rows
        self.num_positions = num_positions
        """More than every position of every step: fixed, for the rotary table must not move under a graph."""
        self.launch = launch
        self.scratch = scratch
        self.rows_at_once = rows_at_once
        """Matrix products are done so many rows at a time (deterministic mode); None: all at once."""
        self.use_kernels = use_kernels

    @property
    def positions(self) -> Tensor:
        """[N] int32."""
        return self.rows.positions

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store the rows' keys and values, then attend; see `AttentionPlan.attend` and `attend_stored`."""
        if self.use_kernels:
            from srtrl.model.triton_attention import store_kv

            store_kv(k, v, self.cache.kernel_keys(layer), self.cache.kernel_values(layer), self.rows.write_slots)
        else:
            store_kv_reference(
                k, v, self.cache.kernel_keys(layer), self.cache.kernel_values(layer), self.rows.write_slots
            )
        return self.attend_stored(layer, q)

    def attend_stored(self, layer: int, q: Tensor) -> Tensor:
        """Attend over keys and values that are in the cache already.

        Args:
            layer: Index of the layer.
            q: Rotated queries, [N, H, E]; the last two dimensions adjacent in memory.

        Returns:
            [N, H, E], often a view of the scratch memory: valid until the next call. Padding rows hold anything finite.
        """
        keys, values = self.cache.kernel_keys(layer), self.cache.kernel_values(layer)
        if self.launch.backend is not None:
            return self.launch.backend.attend(q, keys, values, self.rows)
        out = self.scratch.out[: len(q)]
        if self.use_kernels:
            from srtrl.model.triton_attention import attend_tree

            attend_tree(q, keys, values, self.rows, out, scratch=self.scratch, launch=self.launch)
        else:
            attend_tree_reference(q, keys, values, self.rows, out)
        return out


def store_kv_reference(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, write_slots: Tensor) -> None:
    """Keys and values of the rows, [N, K, E], into `keys` and `values` [num_pages, page_size, K, E]."""
    real = write_slots >= 0
    slots = write_slots[real].long()
    keys.flatten(0, 1)[slots] = k[real]
    values.flatten(0, 1)[slots] = v[real]


def attend_tree_reference(q: Tensor, keys: Tensor, values: Tensor, rows: DeviceRows, out: Tensor) -> None:
    """What `triton_attention.attend_tree` computes, from the same inputs, one tile at a time; softmax in float32.

    q and out [N, H, E]; keys and values of one layer, [num_pages, page_size, K, E].
    """
    page_size, num_kv_heads, head_dim = keys.shape[1:]
    deterministic = rows.ancestors.shape[1] == 0
    for first, count, table, num_keys in rows.tiles.tolist():
        for row in range(first, first + count):
            context, depth = int(rows.context_lengths[row]), int(rows.path_lengths[row])
            index = torch.arange(num_keys, device=q.device)
            slots = rows.page_tables[table, index // page_size] * page_size + index % page_size
            if deterministic:
                slots = torch.cat((slots[:context], rows.path_slots[row, :depth]))
            else:
                slots = slots[_seen_positions(rows.ancestors[row], context, num_keys)]
            row_keys, row_values = (pages.flatten(0, 1)[slots.long()].float() for pages in (keys, values))  # [n, K, E]
            grouped = q[row].float().view(num_kv_heads, -1, head_dim)  # [K, G, E]
            scores = torch.einsum("kge,nke->kgn", grouped, row_keys) * head_dim**-0.5
            out[row] = torch.einsum("kgn,nke->kge", scores.softmax(-1), row_values).flatten(0, 1).to(out.dtype)


def _seen_positions(words: Tensor, context: int, num_keys: int) -> Tensor:
    """[num_keys] bool: the committed positions, and those of the nodes whose bit is set in `words` [W]."""
    bits = np.unpackbits(words.cpu().numpy().view(np.uint8), bitorder="little")  # [32 W]
    seen = np.zeros(max(num_keys, context + len(words) * BITS_PER_WORD), np.bool_)
    seen[:context] = True
    seen[context : context + len(bits)] = bits.astype(np.bool_)
    return torch.from_numpy(seen[:num_keys]).to(words.device)
