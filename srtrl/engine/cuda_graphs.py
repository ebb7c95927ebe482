"""A decode step launched kernel by kernel, or replayed as a captured CUDA graph.

A decode step of a small batch is some hundred kernels of a few microseconds each, less than the host needs to launch
them. A graph launches them all at once. It repeats the very calls that were captured, so everything they read or write
must stay where it was: `StepGraphs.drop` is called whenever something has moved.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Protocol

import torch

MAX_GRAPHS = 512
"""Each takes about a MiB beside the memory that all of them share."""

Compute = Callable[[], None]
"""Launches the kernels of a step; does not wait."""


class Capturer(Protocol):
    """Makes graphs that share their memory."""

    def capture(self, compute: Compute) -> Compute:
        """Capture what `compute` launches, whose kernels are compiled already; returns what replays it.

        `compute` may be called twice.
        """

    def start_over(self) -> None:
        """No graph is left: the next ones need share no memory with earlier ones."""


class StepGraphs:
    """Captures a graph of each kind of step when it comes for the second time, and replays it from then on.

    The first time its kernels are launched one by one, and compiled if need be; many a kind never comes again. When
    there are too many graphs, the one that was used least recently is dropped.
    """

    def __init__(self, capturer: Capturer | None, *, max_graphs: int = MAX_GRAPHS) -> None:
        """Without `capturer` (on a CPU, or `rollout.cuda_graphs: false`) steps are always launched kernel by kernel."""
        assert max_graphs > 0
        self._capturer = capturer
        self._max_graphs = max_graphs
        self._graphs: OrderedDict[Hashable, Compute] = OrderedDict()
        self._known: set[Hashable] = set()

    def __len__(self) -> int:
        """Graphs that are kept."""
        return len(self._graphs)

    def run(self, key: Hashable, compute: Compute, *, can_capture: bool = True) -> bool:
        """Compute a step; does not wait.

        Args:
            key: Steps of one key launch the same kernels over the same addresses.
            compute: Launches them.
            can_capture: False for steps that are not worth a graph.

        Returns:
            Whether that was all: no kernel was compiled for it, and no graph captured.
        """
        graph = self._graphs.get(key)
        if graph is not None:
            self._graphs.move_to_end(key)
            graph()
            return True
        is_known = key in self._known
        if is_known and can_capture and self._capturer is not None:
            while len(self._graphs) >= self._max_graphs:
                self._graphs.popitem(last=False)
            if not self._graphs:
                self._capturer.start_over()
            graph = self._graphs[key] = self._capturer.capture(compute)  # the kernels do not run meanwhile
            graph()
            return False
        compute()
        self._known.add(key)
        return is_known

    def drop(self) -> None:
        """Forget all graphs: weights, cache or buffers have moved."""
        self._graphs.clear()


class CudaCapturer:
    """Captures with `torch.cuda.CUDAGraph`.

    All graphs take their intermediate tensors from one pool. They may overwrite each other's, for steps run one after
    the other, and what outlives a step lies elsewhere.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self._has_handles = False

    def capture(self, compute: Compute) -> Compute:
        """See `Capturer`. The first time `compute` is called once more: libraries make handles for the stream."""
        if not self._has_handles:
            current = torch.cuda.current_stream(self._device)
            self._stream.wait_stream(current)
            try:
                with torch.cuda.stream(self._stream):
                    compute()
            finally:  # also what was queued before an error may still write where the current stream writes next
                current.wait_stream(self._stream)
            self._has_handles = True
        graph = torch.cuda.CUDAGraph()
        # The outer `with`: where ending the capture fails, torch's own does not go back to the current stream.
        # thread_local: what other threads do with CUDA meanwhile is not part of the capture and does not break it.
        with (
            torch.cuda.stream(self._stream),
            torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
        ):
            compute()
        return graph.replay

    def start_over(self) -> None:
        """See `Capturer`. A pool whose last graph is gone must not be used again."""
        self._pool = torch.cuda.graph_pool_handle()


def was_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, or did so before: then ending the capture it broke fails with an error of its own."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, torch.OutOfMemoryError):
        found = found.__context__
    return found is not None
