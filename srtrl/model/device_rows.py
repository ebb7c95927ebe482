"""The rows of a decode step as a CUDA device reads them: fixed shapes, padding included, in one int32 buffer.

The host fills a pinned twin of the buffer from `PagedRows` (`fill_rows`) and copies it in one go; a captured graph
always finds its inputs at the same addresses. Rows are grouped in *tiles*: up to R rows of one sequence, whose query
heads together fill one block of the attention kernel, so that the sequence's keys are read once for all of them.

The i-th node of a draft tree has its key i + 1 positions behind its root's (that is where `engine.rows` puts it), so
its ancestors are bits: bit i % 32 of word i // 32 for the i-th node. Letters: see `srtrl/types.py`; P pages of a
table, D depth of the deepest node, W words of ancestor bits, M tiles.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from srtrl.model.paged_attention import Int32Array, PagedRows

BITS_PER_WORD = 32

ALIGNMENT = 32
"""Elements: each array begins at a multiple of 128 bytes, so that a kernel is compiled for one alignment only."""

Array = npt.NDArray[Any]


@dataclass(kw_only=True, slots=True, frozen=True)
class RowSizes:
    """How much one set of static arrays holds; nothing of a step may exceed it."""

    num_rows: int
    """N."""
    num_tables: int
    """B, page tables: decoding sequences and prefill chunks."""
    table_width: int
    """P."""
    depth: int
    """D; 0 where the attention is not deterministic: paths are then not filled in."""
    num_words: int
    """W; 0 where the attention is deterministic: ancestor bits are then not filled in."""
    num_tiles: int
    """M."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each field of `DeviceRows`."""
        return {
            "positions": (self.num_rows,),
            "write_slots": (self.num_rows,),
            "context_lengths": (self.num_rows,),
            "path_lengths": (self.num_rows,),
            "path_slots": (self.num_rows, self.depth),
            "ancestors": (self.num_rows, self.num_words),
            "tiles": (self.num_tiles, 4),
            "split_keys": (1,),
            # Last, so that no other address depends on how many sequences a step has.
            "page_tables": (self.num_tables, self.table_width),
        }

    @property
    def num_elements(self) -> int:
        """Length of the int32 buffer that holds all arrays, a multiple of `ALIGNMENT`."""
        return sum(_aligned(shape) for shape in self.shapes().values())


@dataclass(kw_only=True, slots=True, frozen=True)
class DeviceRows:
    """What `PagedRows` says, in static int32 tensors; on the host as well, as the buffer that is copied."""

    positions: Tensor
    """[N], rotary positions; 0 for padding."""
    write_slots: Tensor
    """[N], where the row's own key and value go; -1 for padding: nothing is written."""
    context_lengths: Tensor
    """[N], committed positions the row sees; 0 for padding."""
    path_lengths: Tensor
    """[N], draft nodes the row sees, itself included; 0 for a root, a prompt row and padding."""
    path_slots: Tensor
    """[N, D], slots of those nodes by depth. Read by deterministic attention only; so are the lengths."""
    ancestors: Tensor
    """[N, W], those nodes as bits: node i of the tree is bit i % 32 of word i // 32. Not read when deterministic."""
    page_tables: Tensor
    """[B, P], pages of each sequence by position; 0 behind the last."""
    tiles: Tensor
    """[M, 4]: the tile's first row; how many rows; their row of `page_tables`; and how many positions, in the order of
    the pages, they see at most. Zeros for padding."""
    split_keys: Tensor
    """[1], keys of one split of the attention; see `device_plan.choose_split_keys`."""

    @property
    def num_tiles(self) -> int:
        """M, padding included."""
        return len(self.tiles)


def view_rows(buffer: Tensor, sizes: RowSizes) -> DeviceRows:
    """The arrays as views of `buffer`, int32 of at least `sizes.num_elements`; one layout for host and device."""
    assert buffer.dtype == torch.int32
    assert buffer.numel() >= sizes.num_elements, (buffer.numel(), sizes)
    views = {}
    offset = 0
    for name, shape in sizes.shapes().items():
        views[name] = buffer[offset : offset + int(np.prod(shape))].view(shape)
        offset += _aligned(shape)
    return DeviceRows(**views)


def _aligned(shape: tuple[int, ...]) -> int:
    return -(-int(np.prod(shape)) // ALIGNMENT) * ALIGNMENT


def fill_rows(host: DeviceRows, rows: PagedRows, *, rows_per_tile: int, split_keys: int) -> None:
    """Write `rows` and their tiles into `host`, padding where they end; every array is filled anew.

    Args:
        host: Views of a buffer on the host, large enough (asserted).
        rows: Rows of the step; those of one sequence adjacent, root or first prompt token first.
        rows_per_tile: R, `AttentionLaunch.rows_per_tile`.
        split_keys: See `device_plan.choose_split_keys`.
    """
    fill_row_arrays(row_arrays(host), rows, rows_per_tile=rows_per_tile, split_keys=split_keys)


def row_arrays(host: DeviceRows) -> dict[str, Array]:
    """The tensors of `host` as arrays, by the name of their field."""
    return {field.name: getattr(host, field.name).numpy() for field in fields(DeviceRows)}


def fill_row_arrays(arrays: Mapping[str, Array], rows: PagedRows, *, rows_per_tile: int, split_keys: int) -> None:
    """See `fill_rows`; for `row_arrays` that are kept, as making them takes as long as filling them."""
    num_rows = len(rows.positions)
    for name in ("positions", "write_slots", "context_lengths", "path_lengths"):
        arrays[name][:num_rows] = getattr(rows, name)
        arrays[name][num_rows:] = -1 if name == "write_slots" else 0
    _fill_corner(arrays["page_tables"], rows.page_tables)
    if arrays["path_slots"].shape[1]:
        _fill_corner(arrays["path_slots"], rows.path_slots)
    else:
        assert arrays["ancestors"].shape[1] or not rows.path_lengths.any(), "neither paths nor ancestor bits fit"
    if arrays["ancestors"].shape[1]:
        _fill_ancestors(rows.row_tables, rows.write_slots, rows.path_slots, rows.path_lengths, arrays["ancestors"])
    num_tiles = _fill_tiles(rows.row_tables, rows.context_lengths, rows_per_tile, arrays["tiles"])
    arrays["tiles"][num_tiles:] = 0
    arrays["split_keys"][0] = split_keys


def _fill_corner(target: Int32Array, source: Int32Array) -> None:
    """`source` in the upper left corner, 0 in the rest. It may be wider than the target: then all that is cut is 0."""
    num_rows, width = len(source), min(source.shape[1], target.shape[1])
    assert num_rows <= len(target), (source.shape, target.shape)
    assert not source[:, width:].any(), f"{source.shape[1]} columns do not fit in {target.shape[1]}"
    target[:num_rows, :width] = source[:, :width]
    target[:num_rows, width:] = 0
    target[num_rows:] = 0


@dataclass(kw_only=True, slots=True, frozen=True)
class Tiles:
    """The columns of `DeviceRows.tiles`, [M] int32 each."""

    tile_rows: Int32Array
    tile_counts: Int32Array
    tile_tables: Int32Array
    tile_keys: Int32Array


def count_tiles(rows_per_sequence: npt.NDArray[Any], rows_per_tile: int) -> int:
    """How many tiles `make_tiles` makes of sequences (or prefill chunks) of so many rows each, [B]."""
    return int((-(-rows_per_sequence // rows_per_tile)).sum())


def make_tiles(row_tables: Int32Array, context_lengths: Int32Array, rows_per_tile: int) -> Tiles:
    """Cut the rows of each sequence into tiles of `rows_per_tile`.

    The rows of a sequence are adjacent and write to adjacent positions: the first is a root or prompt token, which sees
    its own position last; so the last row of a tile writes as many positions behind it as there are rows between.
    """
    tiles = np.empty((len(row_tables), 4), np.int32)
    num_tiles = _fill_tiles(row_tables, context_lengths, rows_per_tile, tiles)
    tile_rows, tile_counts, tile_tables, tile_keys = tiles[:num_tiles].T
    return Tiles(tile_rows=tile_rows, tile_counts=tile_counts, tile_tables=tile_tables, tile_keys=tile_keys)


@numba.njit(cache=True, nogil=True)
def _fill_tiles(row_tables: Array, context_lengths: Array, rows_per_tile: int, tiles: Array) -> int:
    num_rows = len(row_tables)
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


def count_words(most_nodes: int) -> int:
    """W for trees of up to so many nodes; at least 1."""
    return max(1, -(-most_nodes // BITS_PER_WORD))


def ancestor_bits(rows: PagedRows, num_words: int) -> Int32Array:
    """[N, W]: the draft nodes that each row sees, as bits of their index in the tree; see `DeviceRows.ancestors`."""
    words = np.empty((len(rows.positions), num_words), np.int32)
    _fill_ancestors(rows.row_tables, rows.write_slots, rows.path_slots, rows.path_lengths, words)
    return words


@numba.njit(cache=True, nogil=True)
def _fill_ancestors(
    row_tables: Array, write_slots: Array, path_slots: Array, path_lengths: Array, words: Array
) -> None:
    """Set a node's bit and its parent's: the row before it that writes to its path's last slot but one."""
    words[:] = 0
    first = 0
    for row in range(len(row_tables)):
        if row == 0 or row_tables[row] != row_tables[row - 1]:
            first = row
        depth = path_lengths[row]
        if depth == 0:
            continue
        if depth > 1:
            parent = row - 1
            while parent > first and write_slots[parent] != path_slots[row, depth - 2]:
                parent -= 1
            assert parent > first
            words[row] = words[parent]
        node = row - first - 1
        assert node < 32 * words.shape[1]
        # The sign bit is the 32nd: a shift in int64 wraps into int32 as the bits demand.
        words[row, node // 32] |= np.int32(np.int64(1) << np.int64(node % 32))
