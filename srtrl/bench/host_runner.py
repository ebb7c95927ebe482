"""A runner whose steps cost nothing: the staging buffers of a device, and no device."""

from collections.abc import Sequence

import numpy as np
import torch

from srtrl.engine.rows import BITS_PER_WORD, Int32Array, Int64Array, StepInputs, StepLayout, StepSize
from srtrl.engine.runner import RowFilters, SampledRows
from srtrl.model.transformer import Transformer

ROWS_PER_TILE = 8
TABLE_TOKENS = 8192
"""Page tables are made for this many positions, or for the longest sequence where that is longer."""


class HostRunner:
    """`srtrl.engine.runner.Runner` that does what a CUDA runner does on the host, but for calling CUDA.

    It finds the padded layout of a step, keeps its views, and copies what comes back and what is moved. `launch` does
    nothing and all sampled tokens are 0: the engine's trace replaces them.
    """

    is_asynchronous = True
    was_prepared = True
    wait_seconds = 0.0

    def __init__(self, policy: Transformer, *, page_size: int, max_draft_nodes: int, max_sequence_tokens: int) -> None:
        """`policy` may be on the device `meta`: its weights are not read."""
        self.model = policy
        self.num_pages = 0
        self.page_bytes = 1
        self._num_words = max(1, -(-max_draft_nodes // BITS_PER_WORD))
        self._table_width = -(-max(TABLE_TOKENS, max_sequence_tokens + max_draft_nodes + 1) // page_size)
        self._buffer: Int32Array = np.zeros(1 << 20, np.int32)
        self._inputs: dict[StepLayout, StepInputs] = {}
        self._token_ids: Int32Array = np.zeros(4096, np.int32)
        self._logprobs = np.zeros(4096, np.float32)

    def row_edges(self, max_rows: int) -> list[int]:
        """See `Runner`."""
        edges = [1]
        while edges[-1] < max_rows:
            edges.append(padded_rows(edges[-1] + 1))
        return edges

    def allocate_pages(self, num_pages: int) -> None:
        """See `Runner`."""
        self.num_pages = num_pages

    def release_pages(self) -> None:
        """See `Runner`."""
        self.num_pages = 0

    def refresh_weights(self) -> None:
        """See `Runner`."""

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """See `Runner`; makes the two tensors of indices."""
        torch.tensor(sources), torch.tensor(targets)

    def inputs_for(self, size: StepSize) -> StepInputs:
        """See `Runner`."""
        num_tiles = int((-(-size.rows_per_sequence // ROWS_PER_TILE)).sum())
        layout = StepLayout(
            num_rows=padded_rows(size.num_rows),
            num_sampled=padded_rows(max(1, size.num_sampled)),
            num_words=self._num_words,
            num_tiles=padded_rows(num_tiles),
            table_width=self._table_width,
            num_tables=padded_rows(len(size.rows_per_sequence)),
        )
        inputs = self._inputs.get(layout)
        if inputs is None:
            if layout.num_elements > len(self._buffer):
                self._inputs.clear()
                self._buffer = np.zeros(2 * layout.num_elements, np.int32)
            inputs = self._inputs[layout] = StepInputs.of(self._buffer, layout, ROWS_PER_TILE)
        return inputs

    def launch(self, inputs: StepInputs, filters: RowFilters | None) -> None:
        """See `Runner`."""
        if inputs.layout.num_sampled > len(self._token_ids):
            self._token_ids = np.zeros(inputs.layout.num_sampled, np.int32)
            self._logprobs = np.zeros(inputs.layout.num_sampled, np.float32)

    def wait(self, num_sampled: int) -> SampledRows:
        """See `Runner`."""
        return SampledRows(token_ids=self._token_ids[:num_sampled].copy(), logprobs=self._logprobs[:num_sampled].copy())

    def move_kv(self, sources: Int32Array, targets: Int32Array, starts: Int64Array) -> None:
        """See `Runner`; copies the indices into the staging buffer."""
        start = 0
        for array in (starts, sources, targets):
            self._buffer[start : start + len(array)] = array
            start += len(array)

    def time_step(self, num_rows: int, context_tokens: int) -> float:
        """See `Runner`."""
        return 0.0


def padded_rows(num_rows: int) -> int:
    """The bucket of a row count: 1, 2, 4, 8, 16, 24, ..., 128, 144, ...: an eighth apart at most."""
    if num_rows <= 8:
        return 1 << (num_rows - 1).bit_length()
    step = max(8, 1 << max((num_rows - 1).bit_length() - 4, 0))
    return -(-num_rows // step) * step
