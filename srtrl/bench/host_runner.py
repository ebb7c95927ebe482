"""A runner whose steps cost nothing: the staging buffers of a device, and no device."""

import numpy as np
import torch

from srtrl.engine.cuda_shapes import H200_MULTIPROCESSORS, ShapePlanner, row_edges
from srtrl.engine.options import EngineOptions
from srtrl.engine.rows import Int32Array, StepInputs, StepShape, StepSize
from srtrl.engine.runner import RowFilters, Runner, SampledRows
from srtrl.model.transformer import Transformer


class HostRunner(Runner):
    """`Runner` that does what a CUDA runner does on the host, but for calling CUDA.

    It finds the shape of a step by the same planner, keeps its views, and copies what comes back and what is moved.
    `launch` does nothing and all sampled tokens are 0: the engine's trace replaces them.
    """

    is_asynchronous = True
    page_bytes = 1

    def __init__(self, policy: Transformer, options: EngineOptions, max_sequence_tokens: int) -> None:
        """`policy` may be on the device `meta`, as its pages then are: its weights are not read."""
        super().__init__(policy, options)
        self._planner = ShapePlanner(policy.config, options, max_sequence_tokens, H200_MULTIPROCESSORS)
        largest = self._planner.largest()
        self._buffer: Int32Array = np.zeros(largest.num_elements, np.int32)
        self._inputs: dict[StepShape, StepInputs] = {}
        self._token_ids: Int32Array = np.zeros(largest.num_sampled, np.int32)
        self._logprobs = np.zeros(largest.num_sampled, np.float32)

    def row_edges(self, max_rows: int) -> list[int]:
        """See `Runner`."""
        return row_edges(max_rows)

    def inputs_for(self, size: StepSize) -> StepInputs:
        """See `Runner`."""
        shape = self._planner.shape(size)
        inputs = self._inputs.get(shape)
        if inputs is None:
            inputs = self._inputs[shape] = StepInputs.of(self._buffer, shape)
        return inputs

    def launch(self, inputs: StepInputs, filters: RowFilters | None) -> None:
        """See `Runner`."""

    def copy_pages(self, sources: list[int], targets: list[int]) -> None:
        """See `Runner`; makes the two tensors of indices."""
        torch.tensor(sources), torch.tensor(targets)

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
