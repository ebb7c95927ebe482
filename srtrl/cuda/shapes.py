"""The fixed sizes that decode steps take on a CUDA device: few, and known before the first one.

A captured graph runs one shape only, and a step costs what its shape costs, real rows or padding. A shape follows from
the number of rows, rounded up by a quarter at most, and from the height of the attention's blocks: some 100 shapes in
all, which are captured when the engine warms up. Pure arithmetic on the host; nothing here looks at a device.
"""

from typing import NamedTuple

import numpy as np
import torch

from srtrl.cuda.tiles import (
    MAX_NUM_SPLITS,
    MIN_SPLIT_KEYS,
    SCRATCH_LANES,
    DeviceLimits,
    choose_block_m,
    choose_num_splits,
    choose_split_keys,
    next_power_of_two,
    programs_per_device,
)
from srtrl.engine.draft_budget import MAX_ROWS
from srtrl.engine.runner import EngineOptions
from srtrl.engine.step_inputs import Fields, StepShape, StepSize, num_ancestor_words
from srtrl.model.transformer import ModelConfig

MAX_GRAPH_ROWS = 2048
"""Larger steps are not captured: they keep the device busy for longer than it takes to launch them."""

LOGITS_AT_ONCE = 1024
"""Rows whose logits exist at the same time: with a vocabulary of 152 thousand in bfloat16 they take 0.3 GB."""

MAX_SAMPLED_PROMPT_ROWS = 128
"""With no more prompt rows than this all rows of a step are sampled, though those of prompts need no token: fewer
shapes are worth more than the time of their logits. A step with more prompt rows is not captured."""

FULL_WAVES = 2
"""Times that the programs of a step, with all of their splits, fill the device; those without keys end at once."""

MIN_TABLE_TOKENS = 8192
"""Page tables are not made for fewer positions than this, if there are sequences as long: so narrow a table (2 KiB a
sequence with pages of 16) is copied in no time, and one width serves a whole rollout."""


class LaunchShape(NamedTuple):
    """Sizes of a step, padding included, and how the kernels are launched over it."""

    step: StepShape
    num_tiles: int
    """M."""
    max_moves: int
    """Moves of KV that the step before may leave: as many as it verifies draft nodes."""
    rows_per_tile: int = 1
    """Rows of a sequence that share one tile of the attention kernel."""
    block_m: int = 16
    """Query rows of that kernel's matrix products: a tile's rows times the query heads of a key-value head, padded."""
    num_splits: int = 1
    """Parts into which that kernel splits the keys of a tile."""

    @property
    def is_captured(self) -> bool:
        """Whether steps of this shape are worth a graph."""
        return self.step.num_rows == self.step.num_sampled <= MAX_GRAPH_ROWS

    def fields(self) -> Fields:
        """Arrays that a step copies to the device: `TiledRows.tiles`, `split_keys`, moves of KV, and `StepInputs`."""
        return {
            "tiles": (np.int32, (self.num_tiles, 4)),
            "split_keys": (np.int32, (1,)),
            "num_moves": (np.int32, (1,)),
            "moves": (np.int32, (self.max_moves, 3)),
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
        self._max_moves = max(1, drafts)  # an empty array has no address
        self._max_sampled = options.slots + drafts
        self._max_rows = options.slots + options.prefill_chunk_tokens + max(MAX_ROWS, drafts)
        self.least_width = padded_width(1, self.max_table_width, -(-MIN_TABLE_TOKENS // options.page_size))

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
        return LaunchShape(step, num_tiles=rows, max_moves=self._max_moves)

    def graph_shapes(self) -> list[LaunchShape]:
        """The shapes of all steps that are captured, where page tables have their least width; the largest first."""
        most = min(MAX_GRAPH_ROWS, padded_rows(self._max_sampled + MAX_SAMPLED_PROMPT_ROWS))
        edges = [rows for rows in row_edges(most) if rows <= most]
        shapes: list[LaunchShape] = []
        for before, rows in zip([0, *edges], edges, strict=False):
            fewest = (before + 1) / min(rows, self._max_tables)  # rows of a sequence, on average
            block_m = self._block_m(fewest)
            while block_m <= self._block_m(rows):
                shapes.append(self._launch(rows, rows, block_m, self.least_width))
                block_m *= 2
        return shapes[::-1]

    def shape(self, size: StepSize) -> LaunchShape:
        """The bucket of a step."""
        assert size.max_keys <= self.max_positions
        num_sequences, num_real = len(size.rows_per_sequence), size.num_rows
        assert num_real <= self._max_rows
        assert num_sequences <= self._max_tables
        num_rows, num_sampled = padded_rows(num_real), size.num_sampled
        if num_sampled:
            samples_all = num_real - num_sampled <= MAX_SAMPLED_PROMPT_ROWS
            num_sampled = num_rows if samples_all else padded_rows(num_sampled)
        table_width = padded_width(size.max_pages, self.max_table_width, self.least_width)
        return self._launch(num_rows, num_sampled, self._block_m(num_real / num_sequences), table_width)

    def split_keys(self, size: StepSize, shape: LaunchShape) -> int:
        """Keys of one split of a step's tiles: `choose_split_keys`."""
        num_tiles = int((-(-size.rows_per_sequence // shape.rows_per_tile)).sum())
        wanted = choose_num_splits(
            num_programs=num_tiles * self._num_kv_heads,
            programs_at_once=self._programs_at_once(shape.block_m),
            block_m=shape.block_m,
            max_keys=size.max_keys,
            mean_keys=float(size.num_keys.mean()),
        )
        return choose_split_keys(max_keys=size.max_keys, num_splits=min(wanted, shape.num_splits))

    def _launch(self, num_rows: int, num_sampled: int, block_m: int, table_width: int) -> LaunchShape:
        """Shape of steps whose sequences have so many rows on average that blocks are at least `block_m` high."""
        rows_per_tile = block_m // self.group
        lower = block_m // 2 // self.group  # rows of a sequence for which lower blocks would do
        most_sequences = min(self._max_tables, num_rows // lower if block_m > self._block_m(0) else num_rows)
        num_tiles = min(num_rows, most_sequences + num_rows // rows_per_tile)
        num_programs = num_tiles * self._num_kv_heads
        filling = next_power_of_two(-(-FULL_WAVES * self._programs_at_once(block_m) // num_programs))
        by_room = SCRATCH_LANES // (num_programs * block_m)
        by_length = -(-table_width * self.page_size // MIN_SPLIT_KEYS)
        step = StepShape(
            num_rows=num_rows,
            num_sampled=num_sampled,
            num_words=self.num_words,
            table_width=table_width,
            num_tables=most_sequences,
        )
        return LaunchShape(
            step,
            num_tiles=num_tiles,
            max_moves=self._max_moves,
            rows_per_tile=rows_per_tile,
            block_m=block_m,
            num_splits=max(1, min(filling, by_room, by_length, MAX_NUM_SPLITS)),
        )

    def _block_m(self, rows_per_sequence: float) -> int:
        return choose_block_m(rows_per_sequence=rows_per_sequence, group=self.group, head_dim=self._head_dim)

    def _programs_at_once(self, block_m: int) -> int:
        return programs_per_device(block_m=block_m, head_dim=self._head_dim, dtype=self._dtype, device=self._device)


def padded_rows(num_rows: int) -> int:
    """The bucket of a row count: 1, 2, 4, 8, 16, 24, ..., 64, 80, ..., 128, 160, ...: a quarter apart at most."""
    assert num_rows > 0
    if num_rows <= 8:
        return 1 << (num_rows - 1).bit_length()
    step = max(8, 1 << max((num_rows - 1).bit_length() - 3, 0))
    return -(-num_rows // step) * step


def row_edges(max_rows: int) -> list[int]:
    """Ascending row counts at which a bucket ends, up to at least `max_rows`: where the cost of a step rises."""
    edges = [1]
    while edges[-1] < max_rows:
        edges.append(padded_rows(edges[-1] + 1))
    return edges


def padded_width(table_width: int, largest: int, least: int) -> int:
    """The bucket of the width of a page table: `largest`, a quarter of it, a sixteenth, ..., no less than needed.

    Nor less than `least`, unless `largest` is.
    """
    width = max(largest, table_width)
    while width > 1 and -(-width // 4) >= max(table_width, least):
        width = -(-width // 4)
    return width
