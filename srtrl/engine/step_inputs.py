"""The rows of a decode step: which tokens the forward pass computes, where their KV goes, what each row sees.

Rows come in this order: for each decoding sequence its root (its last committed token), then the nodes of its draft
tree; after all of these the prefill chunks. Node i of a tree writes its KV i + 1 positions after its root's, at any
depth; accepted ones are later moved to where their depth belongs. So a row's ancestors in the tree are bits: bit
i % 32 of word i // 32 for node i.

Letters: N rows, L rows that are sampled (the first ones), B sequences and chunks, W words, P pages of a page table; all
padded to the step's shape.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numba
import numpy as np
import numpy.typing as npt

from srtrl.drafters.draft_tree import ROOT, DraftTrees
from srtrl.model.kernels import inlined
from srtrl.model.paged_attention import BITS_PER_WORD

Array = npt.NDArray[Any]
Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
Fields = dict[str, tuple[type[Any], tuple[int, ...]]]
"""Dtype and shape of each array."""

NO_KV_INDEX = -1
"""KV index of a padding row: nothing is written."""


def num_ancestor_words(max_draft_nodes: int) -> int:
    """W, int32 words of a row that hold one bit for each draft node of its sequence; at least 1."""
    return max(1, -(-max_draft_nodes // BITS_PER_WORD))


class BatchArrays(NamedTuple):
    """The arrays of a batch that kernels read and write; see `Batch` for each. S slots."""

    token_ids: Int32Array
    """[S, max_tokens]."""
    logprobs: npt.NDArray[np.float32]
    """[S, max_tokens]."""
    num_tokens: Int64Array
    """[S], as all that follow unless they say so."""
    num_prompt_tokens: Int64Array
    max_tokens: Int64Array
    rng_keys: npt.NDArray[np.uint64]
    temperatures: npt.NDArray[np.float32]
    end_tokens: Int32Array
    """[S, most end tokens]."""
    page_table: Int32Array
    """[S, max_pages]."""


@dataclass(kw_only=True, frozen=True)
class StepSize:
    """The room that a step needs."""

    rows_per_sequence: Int64Array
    """[B], rows of each decoding sequence (root and nodes), then of each prefill chunk."""
    num_sampled: int
    """The first rows: those of the decoding sequences."""
    num_keys: Int64Array
    """[B], positions that each of them has in this step, its draft nodes included."""
    page_size: int

    @cached_property
    def num_rows(self) -> int:
        """Rows without padding."""
        return int(self.rows_per_sequence.sum())

    @cached_property
    def max_keys(self) -> int:
        """Positions of the longest sequence."""
        return int(self.num_keys.max())

    @cached_property
    def max_pages(self) -> int:
        """Pages of the longest sequence."""
        return -(-self.max_keys // self.page_size)


class StepShape(NamedTuple):
    """Sizes of a step's input arrays, padding included. Steps of one shape share the addresses of their inputs."""

    num_rows: int
    """N."""
    num_sampled: int
    """L; 0 where only prompts are computed."""
    num_words: int
    """W."""
    table_width: int
    """P."""
    num_tables: int
    """B. The page tables come last, so that no other address depends on it."""

    def fields(self) -> Fields:
        """Those of `StepInputs`."""
        rows, sampled = (self.num_rows,), (self.num_sampled,)
        return {
            "rng_keys": (np.int64, sampled),
            "sample_positions": (np.int32, sampled),
            "temperatures": (np.float32, sampled),
            "token_ids": (np.int32, rows),
            "positions": (np.int32, rows),
            "kv_indices": (np.int32, rows),
            "context_lengths": (np.int32, rows),
            "row_tables": (np.int32, rows),
            "ancestors": (np.int32, (self.num_rows, self.num_words)),
            "page_tables": (np.int32, (self.num_tables, self.table_width)),
        }


class StepInputs(NamedTuple):
    """A step's inputs on the host; padding rows are tokens 0 that write nothing and are sampled greedily."""

    shape: StepShape
    rng_keys: Int64Array
    """[L], the bits of the unsigned keys."""
    sample_positions: Int32Array
    """[L], index of the row's next token within the response."""
    temperatures: npt.NDArray[np.float32]
    """[L]."""
    token_ids: Int32Array
    """[N]."""
    positions: Int32Array
    """[N], rotary positions."""
    kv_indices: Int32Array
    """[N], place in the KV cache (page * page_size + offset) of the row's own key and value; `NO_KV_INDEX`: none."""
    context_lengths: Int32Array
    """[N], committed positions that the row sees: its own among them, unless it is a draft node. 0 for padding."""
    row_tables: Int32Array
    """[N], row of `page_tables`."""
    ancestors: Int32Array
    """[N, W], bits of the draft nodes that the row sees, itself included; all 0 for a root or a prompt token. The key
    of node i lies at position context_length + i of the sequence."""
    page_tables: Int32Array
    """[B, P], pages of each sequence by position; entries after the last page are not read."""


@dataclass(slots=True, frozen=True)
class PrefillChunk:
    """Positions `start` to `start + len(token_ids)` of a prompt or a preempted sample, whose KV this step computes."""

    token_ids: Int32Array
    start: int
    page_ids: Int32Array
    """Pages of the prompt or sample, by position."""
    next_token: int
    """The token after them."""


def fill_inputs(
    inputs: StepInputs,
    batch: BatchArrays,
    slots: Int64Array,
    trees: DraftTrees,
    chunks: list[PrefillChunk],
    page_size: int,
) -> None:
    """Write a step's rows into `inputs`, padding included.

    Args:
        inputs: Of a shape that has room for them.
        batch: See `Batch.arrays`.
        slots: [B decoding], rows of the batch.
        trees: One for each of `slots`.
        chunks: Prefill chunks.
        page_size: Positions of a page.
    """
    assert len(slots) == len(trees)
    row = _fill_decode_rows(inputs, batch, slots, trees.token_ids, trees.parents, trees.offsets, page_size)
    for table, chunk in enumerate(chunks, len(slots)):
        _fill_chunk(inputs, row, table, chunk, page_size)
        row += len(chunk.token_ids)
    _fill_padding(inputs, row, len(slots) + trees.num_nodes)


@inlined
def kv_index(page_table: Int32Array, slot: int, position: int, page_size: int) -> int:
    """Place in the KV cache of a position of a slot's sequence."""
    return int(page_table[slot, position // page_size] * page_size + position % page_size)


@numba.njit(cache=True, nogil=True)
def _fill_decode_rows(
    out: StepInputs,
    batch: BatchArrays,
    slots: Array,
    node_tokens: Array,
    parents: Array,
    offsets: Array,
    page_size: int,
) -> int:
    """Rows of the decoding sequences; returns their number."""
    row = 0
    for b in range(len(slots)):
        slot, num_nodes = slots[b], offsets[b + 1] - offsets[b]
        root, root_position = row, batch.num_tokens[slot] - 1
        for page in range((root_position + num_nodes) // page_size + 1):
            out.page_tables[b, page] = batch.page_table[slot, page]
        for node in range(-1, num_nodes):
            position = root_position + 1 + node  # where the row writes
            out.rng_keys[row] = np.int64(batch.rng_keys[slot])
            out.temperatures[row] = batch.temperatures[slot]
            out.kv_indices[row] = kv_index(batch.page_table, slot, position, page_size)
            out.context_lengths[row] = root_position + 1
            out.row_tables[row] = b
            for word in range(out.ancestors.shape[1]):  # assigning rows takes Numba two seconds more to compile
                out.ancestors[row, word] = 0
            if node < 0:
                out.token_ids[row] = batch.token_ids[slot, root_position]
                out.positions[row] = root_position
            else:
                parent = parents[offsets[b] + node]
                above = root + 1 + parent
                out.token_ids[row] = node_tokens[offsets[b] + node]
                out.positions[row] = out.positions[above] + 1
                if parent != ROOT:
                    for word in range(out.ancestors.shape[1]):
                        out.ancestors[row, word] = out.ancestors[above, word]
                # The sign bit is the 32nd: a shift in int64 wraps into int32 as the bits demand.
                out.ancestors[row, node // BITS_PER_WORD] |= np.int32(np.int64(1) << np.int64(node % BITS_PER_WORD))
            out.sample_positions[row] = out.positions[row] + 1 - batch.num_prompt_tokens[slot]
            row += 1
    return row


def _fill_chunk(inputs: StepInputs, row: int, table: int, chunk: PrefillChunk, page_size: int) -> None:
    """Rows of a prefill chunk, from row `row` on; its page table is the row `table`."""
    rows = slice(row, row + len(chunk.token_ids))
    positions = np.arange(chunk.start, chunk.start + len(chunk.token_ids), dtype=np.int32)
    inputs.token_ids[rows] = chunk.token_ids
    inputs.positions[rows] = positions
    inputs.kv_indices[rows] = chunk.page_ids[positions // page_size] * page_size + positions % page_size
    inputs.context_lengths[rows] = positions + 1
    inputs.row_tables[rows] = table
    inputs.ancestors[rows] = 0
    num_pages = (chunk.start + len(chunk.token_ids) - 1) // page_size + 1
    inputs.page_tables[table, :num_pages] = chunk.page_ids[:num_pages]


def _fill_padding(inputs: StepInputs, num_rows: int, num_sampled: int) -> None:
    if num_rows < inputs.shape.num_rows:
        inputs.kv_indices[num_rows:] = NO_KV_INDEX
        for array in (inputs.token_ids, inputs.positions, inputs.context_lengths, inputs.row_tables, inputs.ancestors):
            array[num_rows:] = 0
    for sampled in (inputs.rng_keys, inputs.sample_positions, inputs.temperatures):
        sampled[num_sampled:] = 0
