"""The runner of `srtrl bench host`: a CUDA runner whose device takes all calls and does nothing."""

import torch

from srtrl.engine.cuda_runner import CudaRunner, PinnedCopy
from srtrl.engine.rows import StepInputs, StepSize
from srtrl.engine.runner import EngineOptions
from srtrl.model.transformer import Transformer


class HostRunner(CudaRunner):
    """`CudaRunner` on the device `meta`: steps take no time, and their results are zeros, for `TraceRunner` to replace.

    What it does on the host is that of a real one, but for the driver's own time to queue copies and a graph.
    """

    def __init__(
        self, policy: Transformer, options: EngineOptions, max_sequence_tokens: int, row_counts: list[int]
    ) -> None:
        """The rows of each step are appended to `row_counts`."""
        super().__init__(policy, options, max_sequence_tokens)
        self._results = PinnedCopy(self._results.host.numel(), torch.device("cpu"))  # what can be copied back
        self._row_counts = row_counts
        self.compute = lambda step: None

    def inputs_for(self, size: StepSize) -> StepInputs:
        """See `Runner`."""
        self._row_counts.append(size.num_rows)
        return super().inputs_for(size)

    def time_step(self, num_rows: int, context_tokens: int, num_sequences: int) -> float:
        """See `Runner`."""
        return 0.0
