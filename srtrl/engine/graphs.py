"""How a step is run on the device: launched kernel by kernel, or as a captured CUDA graph of its shape.

A decode step of a small batch is some hundred kernels of a few microseconds each, less than the host needs to launch
them. A graph launches them all at once. It repeats the very calls that were captured, so everything they read or
write must stay where it was: `addresses` are compared whenever something may have moved.
"""

import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from srtrl.engine.buckets import StepShape
from srtrl.engine.device_step import StepTensors

MAX_GRAPHS = 512
"""Most graphs that are kept; each takes a MiB or so beside the memory that all of them share."""

Compute = Callable[[StepTensors], None]


class Replayable(Protocol):
    """A captured step."""

    def replay(self) -> None:
        """Do once more what was captured; does not wait."""


class StepExecutor(Protocol):
    """Runs steps whose inputs are on the device, or on the way to it in the same stream."""

    def run(self, step: StepTensors) -> bool:
        """Compute the step; does not wait.

        Returns:
            Whether that was all: no kernel was compiled for it, and no graph captured.
        """

    def drop(self) -> None:
        """Forget what depends on addresses: weights, cache or buffers have moved."""


class EagerSteps:
    """Launches each kernel by itself."""

    def __init__(self, compute: Compute) -> None:
        self._compute = compute
        self._shapes: set[StepShape] = set()

    def run(self, step: StepTensors) -> bool:
        """See `StepExecutor`."""
        is_known = self.knows(step.shape)
        self._compute(step)
        self._shapes.add(step.shape)
        return is_known

    def knows(self, shape: StepShape) -> bool:
        """Whether a step of this shape was run."""
        return shape in self._shapes

    def drop(self) -> None:
        """See `StepExecutor`: kernels depend on none."""


class GraphedSteps:
    """Captures a graph of each shape when it comes for the second time, and replays it from then on.

    The first time its kernels are launched one by one, and compiled if need be; many a shape never comes again. Shapes
    that are not worth a graph (`StepShape.can_be_captured`) always run like this. When there are too many graphs, the
    one that was used least recently is dropped.
    """

    def __init__(self, compute: Compute, capturer: "Capturer", *, max_graphs: int = MAX_GRAPHS) -> None:
        assert max_graphs > 0
        self._eager = EagerSteps(compute)
        self._compute = compute
        self._capturer = capturer
        self._max_graphs = max_graphs
        self._graphs: OrderedDict[StepShape, Replayable] = OrderedDict()
        self._has_memory = True

    def __len__(self) -> int:
        """Graphs that are kept."""
        return len(self._graphs)

    def run(self, step: StepTensors) -> bool:
        """See `StepExecutor`."""
        graph = self._graphs.get(step.shape)
        if graph is not None:
            self._graphs.move_to_end(step.shape)
            graph.replay()
            return True
        if not (step.shape.can_be_captured and self._has_memory and self._eager.knows(step.shape)):
            return self._eager.run(step)
        graph = self._capture(step)
        if graph is None:
            self._eager.run(step)
        else:
            graph.replay()
        return False

    def _capture(self, step: StepTensors) -> Replayable | None:
        """Capture the step, whose kernels do not run while that is done; None where memory does not suffice."""
        while len(self._graphs) >= self._max_graphs:
            self._graphs.popitem(last=False)
        if not self._graphs:
            self._capturer.start_over()
        try:
            graph = self._graphs[step.shape] = self._capturer.capture(lambda: self._compute(step))
        except RuntimeError as error:
            if not was_out_of_memory(error):
                raise
            self._has_memory = False
            self.drop()
            warnings.warn(
                "the device's memory ran out while a CUDA graph was captured: from now on the decoder launches its "
                "kernels one by one, which is slower for small batches. Lower rollout.kv_memory_share (or "
                "rollout.kv_memory_gib), or set rollout.cuda_graphs: false to be spared the try",
                stacklevel=2,
            )
            return None
        return graph

    def drop(self) -> None:
        """See `StepExecutor`."""
        self._graphs.clear()


class Capturer(Protocol):
    """Makes graphs that share their memory."""

    def capture(self, compute: Callable[[], None]) -> Replayable:
        """Capture what `compute` launches, whose kernels are compiled; it may be called twice."""

    def start_over(self) -> None:
        """No graph is left: the next ones need share no memory with earlier ones."""


class CudaCapturer:
    """Captures with `torch.cuda.CUDAGraph`.

    All graphs take their intermediate tensors from one pool. They may overwrite each other's, for steps run one after
    the other, and what outlives a step lies in a `StepMemory`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self._has_handles = False

    def capture(self, compute: Callable[[], None]) -> Replayable:
        """See `Capturer`. The first time `compute` is called once more: libraries make handles for the stream."""
        if not self._has_handles:
            with self._on_side_stream():
                compute()
            self._has_handles = True
        graph = torch.cuda.CUDAGraph()
        # The outer `with`: where ending the capture fails, torch's own does not go back to the current stream.
        # thread_local: what other threads do with CUDA meanwhile is not part of the capture and does not break it.
        with (
            torch.cuda.stream(self._stream),
            torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
        ):
            compute()
        return graph

    def start_over(self) -> None:
        """See `Capturer`. A pool whose last graph is gone must not be used again."""
        self._pool = torch.cuda.graph_pool_handle()

    @contextmanager
    def _on_side_stream(self) -> Iterator[None]:
        """The side stream runs behind what is queued on the current one, and the current one goes on behind it."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:  # also what was queued before an error may still write where the current stream writes next
            current.wait_stream(self._stream)


def was_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, or did so before: then ending the capture it broke fails with an error of its own."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, torch.OutOfMemoryError):
        found = found.__context__
    return found is not None


def addresses(tensors: list[torch.Tensor]) -> tuple[int, ...]:
    """Where tensors lie: equal as long as none has moved."""
    return tuple(tensor.data_ptr() for tensor in tensors)
