"""A decode step launched kernel by kernel, or replayed as a captured CUDA graph.

A decode step of a small batch is some hundred kernels of a few microseconds each, less than the host needs to launch
them. A graph launches them all at once. It repeats the very calls that were captured, so everything they read or write
must stay where it was: `StepGraphs.drop` is called whenever something has moved.
"""

import gc
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch

SPARE_BYTES = 2**30
"""Free memory before a capture: during one the allocator cannot give cached memory back to the device."""

Compute = Callable[[], None]
"""Launches the kernels of a step; does not wait."""


class StepGraphs:
    """Captures a graph of each kind of step, and replays it from then on.

    The first time a kind comes, its kernels are launched one by one, and compiled if need be; many a kind never comes
    again, so it is captured the second time, unless `prepare` has done so before. Each graph takes about a MiB beside
    the memory that all of them share. All graphs take their intermediate tensors from one pool: they may overwrite each
    other's, for steps run one after the other, and what outlives a step lies elsewhere.
    """

    def __init__(self, device: torch.device | None) -> None:
        """Without a device (on a CPU, or `rollout.cuda_graphs: false`) steps are always launched kernel by kernel."""
        self._device = device
        self._graphs: dict[Hashable, Compute] = {}
        self._known: set[Hashable] = set()
        self._stream: torch.cuda.Stream | None = None
        self._pool: Any = None
        """Memory pool of all graphs that are kept."""

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
            graph()
            return True
        is_known = key in self._known
        if is_known and can_capture and self._device is not None:
            is_computed = self._open_stream(compute)
            graph = self._graphs[key] = self.capture(compute)  # the kernels do not run meanwhile
            if not is_computed:  # a step moves KV: twice would be wrong
                graph()
            return False
        compute()
        self._known.add(key)
        return is_known

    def prepare(self, steps: Mapping[Hashable, Compute]) -> None:
        """Capture the graphs of these kinds, in this order; a kind that is new is computed once before."""
        for key, compute in steps.items():
            if key not in self._known:
                if not self._open_stream(compute):
                    compute()
                self._known.add(key)
            self._graphs[key] = self.capture(compute)

    def drop(self) -> None:
        """Forget all graphs: weights or pages have moved."""
        self._graphs.clear()

    def _open_stream(self, compute: Compute) -> bool:
        """Before the first capture: make its stream, and compute the step there, so that libraries make their handles.

        Returns:
            Whether the step is computed now.
        """
        if self._stream is not None:
            return False
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                compute()
        finally:  # also what was queued before an error may still write where the current stream writes next
            current.wait_stream(self._stream)
        return True

    def capture(self, compute: Compute) -> Compute:
        """Capture what `compute` launches, whose kernels are compiled already; returns what replays it.

        Not by `torch.cuda.graph`, which waits for the device and gives the allocator's cached memory back, that of the
        update among it: with some 60 captures in a first rollout that is seconds.
        """
        if not self._graphs:  # a pool whose last graph is gone must not be used again
            self._pool = torch.cuda.graph_pool_handle()
        if torch.cuda.mem_get_info(self._device)[0] < SPARE_BYTES:
            torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        with _no_collection(), torch.cuda.stream(self._stream):
            # thread_local: what other threads do with CUDA meanwhile is not part of the capture and does not break it.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                compute()
            except BaseException:
                with suppress(RuntimeError):  # that the capture has failed: what follows says why
                    graph.capture_end()
                raise
            graph.capture_end()
        return graph.replay


@contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage is collected: a kernel that is unloaded by it breaks a capture."""
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_enabled:
            gc.enable()
