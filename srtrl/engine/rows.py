"""The rows of a decode step: which tokens the forward pass computes, where their KV goes, and what each row sees."""

from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np
import numpy.typing as npt

from srtrl.drafters.draft_tree import DraftTrees
from srtrl.engine.sequence import PrefillChunk, Sequence
from srtrl.engine.tree_rows import node_depths, node_rows, place_nodes
from srtrl.model.paged_attention import Int32Array, PagedRows


class PageTables:
    """`pad_tables` for one step after the other: only the rows of sequences whose pages have changed are written anew.

    A sequence gets another array with other pages (`PageHolder`), so the same array means the same pages.
    """

    def __init__(self) -> None:
        self._tables: list[Int32Array | None] = []
        self._padded = np.zeros((0, 0), np.int32)

    def pad(self, page_tables: SequenceOf[Int32Array]) -> Int32Array:
        """See `pad_tables`; valid until the next call."""
        num_tables, width = len(page_tables), max(map(len, page_tables))
        if num_tables > len(self._padded) or width > self._padded.shape[1]:
            self._padded = np.zeros((num_tables, 2 * width), np.int32)
            self._tables = [None] * num_tables
        for row, table in enumerate(page_tables):
            if table is not self._tables[row]:
                self._tables[row] = table
                self._padded[row, : len(table)] = table
                self._padded[row, len(table) :] = 0
        return self._padded[:num_tables, :width]


def build_rows(
    decodes: SequenceOf[Sequence],
    trees: DraftTrees,
    prefills: SequenceOf[PrefillChunk],
    page_size: int,
    kept_tables: PageTables | None = None,
) -> tuple[Int32Array, PagedRows]:
    """Lay out the step's rows: for each decoding sequence its root and its nodes, then the prefill chunks.

    The i-th node of a tree writes its KV i + 1 positions behind the root, whatever its depth; `ModelRunner.commit`
    moves the accepted ones to where their depth belongs. With `kept_tables` the page tables are a view of these.

    Returns:
        Token ids [N], and what the attention plan needs.
    """
    assert len(decodes) == len(trees)
    holders = [*decodes, *(chunk.holder for chunk in prefills)]
    sizes = np.array([chunk.count for chunk in prefills], np.int64)
    counts = np.concatenate([1 + trees.sizes, sizes])
    starts = np.array([len(s.token_ids) - 1 for s in decodes] + [chunk.start for chunk in prefills], np.int32)
    first_rows = np.cumsum(counts) - counts
    pad = pad_tables if kept_tables is None else kept_tables.pad
    page_tables = pad([holder.page_table for holder in holders])
    row_tables = np.repeat(np.arange(len(holders), dtype=np.int32), counts)  # [N]
    num_rows = len(row_tables)
    write_positions = np.arange(num_rows, dtype=np.int32) + (starts - first_rows.astype(np.int32))[row_tables]  # [N]
    depths = node_depths(trees)
    rows = PagedRows(
        positions=write_positions.astype(np.int64),
        write_slots=slots_of(page_tables, row_tables, write_positions, page_size),
        page_tables=page_tables,
        row_tables=row_tables,
        context_lengths=write_positions + np.int32(1),
        path_slots=np.zeros((num_rows, depths.max(initial=0)), np.int32),
        path_lengths=np.zeros(num_rows, np.int32),
    )
    place_nodes(
        trees.parents,
        trees.offsets,
        depths,
        rows.write_slots,
        rows.positions,
        rows.context_lengths,
        rows.path_slots,
        rows.path_lengths,
    )
    token_ids = np.empty(num_rows, np.int32)
    token_ids[first_rows[: len(decodes)]] = [sequence.token_ids[-1] for sequence in decodes]
    token_ids[node_rows(trees)] = trees.token_ids
    for chunk, first in zip(prefills, first_rows[len(decodes) :].tolist(), strict=True):
        token_ids[first : first + chunk.count] = chunk.holder.token_ids[chunk.start : chunk.start + chunk.count]
    return token_ids, rows


def pad_tables(page_tables: SequenceOf[Int32Array]) -> Int32Array:
    """Page tables of various lengths as one array [B, longest], padded with 0."""
    lengths = np.array([len(table) for table in page_tables])
    padded = np.zeros((len(page_tables), lengths.max()), np.int32)
    padded[np.arange(padded.shape[1]) < lengths[:, None]] = np.concatenate(page_tables)
    return padded


def slots_of(page_tables: Int32Array, owners: npt.NDArray[Any], positions: npt.NDArray[Any], size: int) -> Int32Array:
    """Slots of the cache, [M], of `positions` [M] of the sequences whose rows of `page_tables` are `owners` [M]."""
    slots: Int32Array = (page_tables[owners, positions // size] * size + positions % size).astype(np.int32)
    return slots


def dummy_rows(num_rows: int, context_tokens: int, num_sequences: int, num_pages: int, page_size: int) -> PagedRows:
    """Rows for a forward pass that is only timed: roots with siblings below them, in sequences of equal context.

    Each sequence has pages of its own, as far as `num_pages` go; then they are taken once more.
    """
    owners = np.arange(num_rows) * num_sequences // num_rows  # [N], in order
    places = np.arange(num_rows) - np.searchsorted(owners, owners)  # 0 for a root
    pages_each = -(-(context_tokens + int(places.max())) // page_size)
    pages = np.arange(num_sequences * pages_each, dtype=np.int32) % np.int32(num_pages)
    page_tables = pages.reshape(num_sequences, pages_each)
    write_slots = slots_of(page_tables, owners, context_tokens - 1 + places, page_size)
    depths = np.minimum(places, 1)
    return PagedRows(
        positions=context_tokens - 1 + depths,
        write_slots=write_slots,
        page_tables=page_tables,
        row_tables=owners.astype(np.int32),
        context_lengths=np.full(num_rows, context_tokens, np.int32),
        path_slots=write_slots[:, None],
        path_lengths=depths.astype(np.int32),
    )
