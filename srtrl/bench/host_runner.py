"""A runner whose steps cost nothing: the staging buffers of a device, and no device."""

from collections.abc import Sequence

import numpy as np
import torch

from srtrl.engine.cuda_layouts import H200_MULTIPROCESSORS, LayoutPlanner, StepShape, row_edges
from srtrl.engine.rows import Int32Array, StepInputs, StepSize
from srtrl.engine.runner import RowFilters, SampledRows
from srtrl.model.transformer import Transformer


class HostRunner:
    """`srtrl.engine.runner.Runner` that does what a CUDA runner does on the host, but for calling CUDA.

    It finds the layout of a step by the same planner, keeps its views, and copies what comes back and what is moved.
    `launch` does nothing and all sampled tokens are 0: the engine's trace replaces them.
    """

    is_asynchronous = True
    was_prepared = True

    def __init__(self, policy: Transformer, *, page_size: int, max_draft_nodes: int, max_sequence_tokens: int) -> None:
        """`policy` may be on the device `meta`: its weights are not read."""
        self.model = policy
        self.num_pages = 0
        self.page_bytes = 1
        self._planner = LayoutPlanner.for_model(
            policy.config,
            page_size=page_size,
            max_sequence_tokens=max_sequence_tokens,
            max_draft_nodes=max_draft_nodes,
            num_multiprocessors=H200_MULTIPROCESSORS,
        )
        self._buffer: Int32Array = np.zeros(1 << 20, np.int32)
        self._inputs: dict[StepShape, StepInputs] = {}
        self._token_ids: Int32Array = np.zeros(4096, np.int32)
        self._logprobs = np.zeros(4096, np.float32)

    def row_edges(self, max_rows: int) -> list[int]:
        """See `Runner`."""
        return row_edges(max_rows)

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
        shape = self._planner.shape(size)
        inputs = self._inputs.get(shape)
        if inputs is None:
            layout = self._planner.layout(shape)
            if layout.num_elements > len(self._buffer):
                self._inputs.clear()
                self._buffer = np.zeros(2 * layout.num_elements, np.int32)
            inputs = StepInputs.of(self._buffer, layout, shape.block_m // self._planner.group)
            self._inputs[shape] = inputs
        return inputs

    def launch(self, inputs: StepInputs, filters: RowFilters | None) -> None:
        """See `Runner`."""
        if inputs.layout.num_sampled > len(self._token_ids):
            self._token_ids = np.zeros(inputs.layout.num_sampled, np.int32)
            self._logprobs = np.zeros(inputs.layout.num_sampled, np.float32)

    def wait(self, num_sampled: int) -> SampledRows:
        """See `Runner`."""
        return SampledRows(token_ids=self._token_ids[:num_sampled].copy(), logprobs=self._logprobs[:num_sampled].copy())

    def move_kv(self, sources: Int32Array, targets: Int32Array) -> None:
        """See `Runner`; copies the indices into the staging buffer."""
        start = 0
        for array in (sources, targets):
            self._buffer[start : start + len(array)] = array
            start += len(array)

    def time_step(self, num_rows: int, context_tokens: int, num_sequences: int) -> float:
        """See `Runner`."""
        return 0.0
