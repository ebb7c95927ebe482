"""The fixed sizes that decode steps take on a CUDA device: rows, tiles and page tables rounded up to a bucket.

A captured graph runs one shape only, and a step costs what its shape costs, real rows or padding. So there are few
shapes, and each is little larger than what it is for. Pure arithmetic on the host; nothing here looks at a device.
"""

from typing import NamedTuple

import numpy as np
import torch

from srtrl.cuda.tiles import DeviceLimits, choose_block_m, choose_num_splits, programs_per_device
from srtrl.engine.draft_budget import MAX_ROWS
from srtrl.engine.rows import Fields, StepShape, StepSize, num_ancestor_words
from srtrl.engine.runner import EngineOptions
from srtrl.model.transformer import ModelConfig

MAX_GRAPH_ROWS = 2048
"""Larger steps are not captured: they keep the device busy for longer than it takes to launch them."""

MAX_SAMPLED_PROMPT_ROWS = 128
"""With no more prompt rows than this all rows of a step are sampled, though those of prompts need no token: fewer
shapes are worth more than the time of their logits."""

MIN_TABLE_TOKENS = 8192
"""Page tables are not made for fewer positions than this, if there are sequences as long: so narrow a table (2 KiB a
sequence with pages of 16) is copied in no time, and one width serves a whole rollout."""


class LaunchShape(NamedTuple):
    """Sizes of a step, padding included, and how the kernels are launched over it."""

    step: StepShape
    num_tiles: int
    """M."""
    rows_per_tile: int = 1
    """Rows of a sequence that share one tile of the attention kernel."""
    block_m: int = 16
    """Query rows of that kernel's matrix products: a tile's rows times the query heads of a key-value head, padded."""
    num_splits: int = 1
    """Parts into which that kernel splits the keys of a tile."""

    @property
    def graph_key(self) -> "LaunchShape":
        """Steps with the same key launch the same kernels over the same addresses."""
        return self._replace(step=self.step._replace(num_tables=0))

    def fields(self) -> Fields:
        """What a step copies to the device: `TiledRows.tiles` and `split_keys`, moves of KV, and `StepInputs`."""
        return {
            "tiles": (np.int32, (self.num_tiles, 4)),
            "split_keys": (np.int32, (1,)),
            "num_moves": (np.int32, (1,)),
            "moves": (np.int32, (MAX_ROWS, 3)),
            **self.step.fields(),
        }


class ShapePlanner:
    """Finds the shape of a step."""

    def __init__(
        self,
        config: ModelConfig,
        options: EngineOptions,
        max_sequence_tokens: int,
        *,
        dtype: torch.dtype,
        device: DeviceLimits,
    ) -> None:
        """For a model in `dtype` whose sequences have at most `max_sequence_tokens`, draft nodes not counted."""
        self.page_size = options.page_size
        self.num_words = num_ancestor_words(options.max_draft_nodes)
        self.max_positions = max_sequence_tokens + options.max_draft_nodes + 1
        """Largest number of positions of a sequence, draft nodes included."""
        self.max_table_width = -(-self.max_positions // options.page_size)
        self.group = config.num_attention_heads // config.num_key_value_heads
        """Query heads of one key-value head."""
        self._num_kv_heads = config.num_key_value_heads
        self._head_dim = config.head_dim
        self._dtype = dtype
        self._device = device
        self._max_tables = 2 * options.slots  # a sample may have a chunk and decode in the same step
        drafts = MAX_ROWS if options.draft_budget == "auto" else options.slots * options.draft_budget
        self._max_rows = options.slots + options.prefill_chunk_tokens + max(MAX_ROWS, drafts)

    def largest(self) -> LaunchShape:
        """A shape that no step exceeds in any of its sizes."""
        rows = padded_rows(self._max_rows)
        step = StepShape(
            num_rows=rows,
            num_sampled=rows,
            num_words=self.num_words,
            table_width=self.max_table_width,
            num_tables=padded_rows(self._max_tables),
        )
        return LaunchShape(step, num_tiles=rows)

    def shape(self, size: StepSize) -> LaunchShape:
        """The bucket of a step."""
        assert size.max_keys <= self.max_positions
        rows_per_sequence = size.rows_per_sequence
        num_sequences, num_real = len(rows_per_sequence), size.num_rows
        assert num_real <= self._max_rows
        assert num_sequences <= self._max_tables
        num_rows = padded_rows(num_real)
        num_sampled = size.num_sampled
        if num_sampled:
            samples_all = num_real - num_sampled <= MAX_SAMPLED_PROMPT_ROWS
            num_sampled = num_rows if samples_all else padded_rows(num_sampled)
        block_m = choose_block_m(rows_per_sequence=num_real / num_sequences, group=self.group, head_dim=self._head_dim)
        rows_per_tile = block_m // self.group
        num_tiles = padded_tiles(int((-(-rows_per_sequence // rows_per_tile)).sum()), num_rows)
        programs_at_once = programs_per_device(
            block_m=block_m, head_dim=self._head_dim, dtype=self._dtype, device=self._device
        )
        table_width = padded_width(size.max_pages, self.max_table_width, -(-MIN_TABLE_TOKENS // self.page_size))
        step = StepShape(
            num_rows=num_rows,
            num_sampled=num_sampled,
            num_words=self.num_words,
            table_width=table_width,
            num_tables=padded_rows(num_sequences),
        )
        return LaunchShape(
            step,
            num_tiles=num_tiles,
            rows_per_tile=rows_per_tile,
            block_m=block_m,
            num_splits=choose_num_splits(
                num_programs=num_tiles * self._num_kv_heads,
                programs_at_once=programs_at_once,
                block_m=block_m,
                max_keys=size.max_keys,
                mean_keys=float(size.num_keys.mean()),
                padded_keys=table_width * self.page_size,
            ),
        )


def padded_rows(num_rows: int) -> int:
    """The bucket of a row count: 1, 2, 4, 8, 16, 24, ..., 128, 144, ..., 256, 288, ...: an eighth apart at most."""
    assert num_rows > 0
    if num_rows <= 8:
        return 1 << (num_rows - 1).bit_length()
    step = max(8, 1 << max((num_rows - 1).bit_length() - 4, 0))
    return -(-num_rows // step) * step


def row_edges(max_rows: int) -> list[int]:
    """Ascending row counts at which a bucket ends, up to at least `max_rows`: where the cost of a step rises."""
    edges = [1]
    while edges[-1] < max_rows:
        edges.append(padded_rows(edges[-1] + 1))
    return edges


def padded_tiles(num_tiles: int, num_rows: int) -> int:
    """The bucket of a tile count: `num_rows` (as many as there can be), 3/4 of it, half, 3/8, a quarter, ...

    Keys are split by it, so padding leaves a third of the device idle at most where sequences are of one length.
    """
    assert num_tiles <= num_rows
    while num_rows > 1 and -(-num_rows // 2) >= num_tiles:
        num_rows = -(-num_rows // 2)
    three_quarters = -(-3 * num_rows // 4)
    return three_quarters if three_quarters >= num_tiles else num_rows


def padded_width(table_width: int, largest: int, least: int) -> int:
    """The bucket of the width of a page table: `largest`, a quarter of it, a sixteenth, ..., no less than needed.

    Nor less than `least`, unless `largest` is.
    """
    width = max(largest, table_width)
    while -(-width // 4) >= max(table_width, least):
        width = -(-width // 4)
    return width
