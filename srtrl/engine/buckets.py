"""The fixed shapes that decode steps take on a CUDA device: rows, tiles and page tables rounded up to a bucket.

A captured graph runs one shape only, and a step costs what its shape costs, real rows or padding. So there are few
shapes, and each is little larger than what it is for. Pure arithmetic on the host; nothing here looks at a device.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from srtrl.model.attention_backends import BackendChoice
from srtrl.model.device_plan import AttentionLaunch, choose_block_m, choose_num_splits
from srtrl.model.device_rows import RowSizes, count_tiles, count_words

ROWS_AT_ONCE = 64
"""Deterministic mode: matrix products are done so many rows at a time, always, so that cuBLAS takes one kernel for
them (which it chooses by the shape). Rows are padded to a multiple of it."""

MAX_GRAPH_ROWS = 2048
"""Larger steps are not captured: they keep the device busy for longer than it takes to launch them."""

MAX_SAMPLED_PROMPT_ROWS = 128
"""With no more prompt rows than this all rows of a step are sampled, though those of prompts need no token: fewer
shapes are worth more than the time of their logits."""

LEAST_TABLE_TOKENS = 8192
"""Page tables are not made for fewer positions than this, if there are sequences as long: so narrow a table (2 KiB a
sequence with pages of 16) is copied in no time, and one width serves a whole rollout."""


@dataclass(kw_only=True, slots=True, frozen=True)
class StepShape:
    """Everything that the kernels of a step are launched by; steps of one shape can share a graph."""

    num_rows: int
    """N, padding included."""
    num_logits: int
    """So many rows, the first ones, have logits and are sampled; 0 where only prompts are computed."""
    num_tiles: int
    """M, padding included."""
    table_width: int
    """P, pages of a page table."""
    depth: int
    """D, draft nodes on a branch; 0 outside deterministic mode."""
    num_words: int
    """W, words of ancestor bits; 0 in deterministic mode."""
    launch: AttentionLaunch

    @property
    def can_be_captured(self) -> bool:
        """Whether the step is worth a graph."""
        return self.num_rows <= MAX_GRAPH_ROWS

    def num_tables(self, num_real: int) -> int:
        """Page tables of a step with `num_real` sequences and chunks; another library's attention reads one a row."""
        return num_real if self.launch.backend is None else self.num_rows

    def sizes(self, num_tables: int) -> RowSizes:
        """Sizes of the row arrays of a step with so many page tables (`num_tables`): no address depends on them."""
        return RowSizes(
            num_rows=self.num_rows,
            num_tables=num_tables,
            table_width=self.table_width,
            depth=self.depth,
            num_words=self.num_words,
            num_tiles=self.num_tiles,
        )


@dataclass(kw_only=True, slots=True, frozen=True)
class BucketPlanner:
    """Finds the shape of a step."""

    num_heads: int
    """H."""
    num_kv_heads: int
    """K."""
    head_dim: int
    """E."""
    page_size: int
    max_positions: int
    """Most positions of a sequence, draft nodes included."""
    max_draft_nodes: int
    """Most draft nodes of one sequence in one step."""
    num_multiprocessors: int
    """Of the device."""
    deterministic: bool
    rows_at_once: int
    """See `ROWS_AT_ONCE`; for deterministic mode."""
    backends: BackendChoice = field(default_factory=BackendChoice)
    """What attends in steps of one row a sequence."""

    @property
    def group(self) -> int:
        """G, query heads of one key-value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def row_multiple(self) -> int:
        """All row counts are multiples of this."""
        return self.rows_at_once if self.deterministic else 1

    @property
    def max_table_width(self) -> int:
        """Pages of the longest sequence."""
        return -(-self.max_positions // self.page_size)

    def row_edges(self, max_rows: int) -> list[int]:
        """Ascending row counts at which a bucket ends, up to at least `max_rows`: where the cost of a step rises."""
        edges = [self.row_multiple]
        while edges[-1] < max_rows:
            edges.append(padded_rows(edges[-1] + 1, self.row_multiple))
        return edges

    def shape(self, rows_per_sequence: npt.NDArray[Any], *, num_logits: int, table_width: int, depth: int) -> StepShape:
        """Return the bucket of a step.

        Args:
            rows_per_sequence: [B], rows of each decoding sequence, root included, and of each prefill chunk.
            num_logits: How many of the rows, the first ones, are sampled.
            table_width: Most pages of a sequence.
            depth: Of the deepest draft node.
        """
        num_real = int(rows_per_sequence.sum())
        num_rows = padded_rows(num_real, self.row_multiple)
        if num_logits:
            samples_all = num_real - num_logits <= MAX_SAMPLED_PROMPT_ROWS
            num_logits = num_rows if samples_all else min(padded_rows(num_logits, self.row_multiple), num_rows)
        block_m = choose_block_m(
            rows_per_sequence=num_real / len(rows_per_sequence),
            group=self.group,
            head_dim=self.head_dim,
            deterministic=self.deterministic,
        )
        num_tiles = padded_tiles(count_tiles(rows_per_sequence, block_m // self.group), num_rows)
        table_width = padded_width(table_width, self.max_table_width, -(-LEAST_TABLE_TOKENS // self.page_size))
        num_splits = choose_num_splits(
            num_tiles=num_tiles,
            num_kv_heads=self.num_kv_heads,
            block_m=block_m,
            max_keys=table_width * self.page_size,
            num_multiprocessors=self.num_multiprocessors,
            deterministic=self.deterministic,
        )
        is_plain = not self.deterministic and int(rows_per_sequence.max()) == 1
        return StepShape(
            num_rows=num_rows,
            num_logits=num_logits,
            num_tiles=num_tiles,
            table_width=table_width,
            depth=padded_depth(depth) if self.deterministic else 0,
            num_words=0 if self.deterministic else count_words(self.max_draft_nodes),
            launch=AttentionLaunch(
                block_m=block_m,
                num_splits=num_splits,
                deterministic=self.deterministic,
                backend=self.backends.backend_for(num_rows) if is_plain else None,
            ),
        )


def padded_rows(num_rows: int, multiple: int = 1) -> int:
    """The bucket of a row count: 1, 2, 4, 8, 16, 24, ..., 128, 144, 160, ..., 256, 288, ...: an eighth apart at most.

    `multiple` is a power of two, of which all buckets are multiples.
    """
    assert num_rows > 0
    if multiple == 1 and num_rows <= 8:
        return 1 << (num_rows - 1).bit_length()
    step = max(8, multiple, 1 << max((num_rows - 1).bit_length() - 4, 0))
    return -(-num_rows // step) * step


def padded_tiles(num_tiles: int, num_rows: int) -> int:
    """The bucket of a tile count: `num_rows` (as many as there can be), 3/4 of it, half, 3/8, a quarter, ...

    Keys are split by it, so padding leaves a third of the chip idle at most.
    """
    assert num_tiles <= num_rows
    while num_rows > 1 and -(-num_rows // 2) >= num_tiles:
        num_rows = -(-num_rows // 2)
    three_quarters = -(-3 * num_rows // 4)
    return three_quarters if three_quarters >= num_tiles else num_rows


def padded_width(table_width: int, most: int, least: int) -> int:
    """The bucket of the width of a page table: `most`, a quarter of it, a sixteenth, ..., no less than needed.

    Nor less than `least`, unless `most` is.
    """
    width = max(most, table_width)
    while -(-width // 4) >= max(table_width, least):
        width = -(-width // 4)
    return width


def padded_depth(depth: int) -> int:
    """The bucket of the depth of draft trees: 8, 32, 128, ..."""
    padded = 8
    while padded < depth:
        padded *= 4
    return padded


def longest_keys(rows_per_sequence: npt.NDArray[Any], context_lengths: npt.NDArray[np.int32]) -> int:
    """Most positions, in the order of its pages, that a sequence of the step has, those of its drafts included.

    `rows_per_sequence` [B] as in `BucketPlanner.shape`; `context_lengths` [N real] as in `PagedRows`.
    """
    firsts = np.cumsum(rows_per_sequence) - rows_per_sequence
    return int((context_lengths[firsts] + rows_per_sequence).max()) - 1
