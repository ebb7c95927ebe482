"""Which steps are captured, which graphs are kept, and when they are dropped; without a device."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from srtrl.engine.cuda_graphs import CudaCapturer, StepGraphs, was_out_of_memory


@dataclass
class FakeCapturer:
    """Calls what is captured, and logs what is done."""

    log: list[object] = field(default_factory=list)
    error: RuntimeError | None = None
    is_capturing: bool = False
    """Whether the error breaks the capture itself."""

    def start_over(self) -> None:
        self.log.append("start over")

    def capture(self, compute: Callable[[], None]) -> Callable[[], None]:
        if self.error is not None:
            with BrokenCapture() if self.is_capturing else nullcontext():
                raise self.error
        compute()
        return lambda: self.log.append("replay")


class BrokenCapture:
    """Stands for `torch.cuda.graph`: what was broken while it captured cannot be ended."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")


class Steps:
    """Runs steps with graphs, and logs their keys where they are computed."""

    def __init__(self, max_graphs: int = 4) -> None:
        self.capturer = FakeCapturer()
        self.log = self.capturer.log
        self.graphs = StepGraphs(self.capturer, max_graphs=max_graphs)

    def run(self, *keys: int, can_capture: bool = True) -> list[bool]:
        return [self.graphs.run(key, partial(self.log.append, key), can_capture=can_capture) for key in keys]


def test_a_shape_is_captured_when_it_comes_again_and_replayed_from_then_on() -> None:
    steps = Steps()
    assert steps.run(2, 4, 2, 4, 2, 4) == [False, False, False, False, True, True]
    assert steps.log == [2, 4, "start over", 2, "replay", 4, "replay", "replay", "replay"]


def test_the_graph_that_was_used_least_recently_goes_first() -> None:
    steps = Steps(max_graphs=2)
    steps.run(1, 2, 4)
    steps.log.clear()
    assert steps.run(1, 2, 1, 4, 1, 2) == [False, False, True, False, True, False]
    assert [entry for entry in steps.log if isinstance(entry, int)] == [1, 2, 4, 2]
    assert len(steps.graphs) == 2


def test_graphs_that_share_no_pool_begin_a_new_one() -> None:
    steps = Steps(max_graphs=1)
    steps.run(1, 2)
    steps.log.clear()
    steps.run(1, 2)  # the only graph goes first, and its pool with it
    steps.graphs.drop()
    assert len(steps.graphs) == 0
    steps.run(2)
    assert steps.log == ["start over", 1, "replay", "start over", 2, "replay", "start over", 2, "replay"]


def test_steps_that_are_not_worth_a_graph_and_those_without_graphs_are_computed_each_time() -> None:
    steps = Steps()
    assert steps.run(9, 9, 9, can_capture=False) == [False, True, True]
    steps.graphs = StepGraphs(None)
    assert steps.run(8, 8) == [False, True]
    assert steps.log == [9, 9, 9, 8, 8]
    assert len(steps.graphs) == 0


@pytest.mark.parametrize("is_capturing", [False, True])
@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, RuntimeError])
def test_errors_of_a_capture_are_not_hidden(kind: type[RuntimeError], is_capturing: bool) -> None:
    """And memory that ran out is told from others, also by the error with which the broken capture ends."""
    steps = Steps()
    steps.run(1, 2, 1)
    steps.capturer.error, steps.capturer.is_capturing = kind("CUDA error"), is_capturing
    with pytest.raises(RuntimeError, match="previous error" if is_capturing else "CUDA error") as caught:
        steps.run(2)
    assert was_out_of_memory(caught.value) == (kind is torch.OutOfMemoryError)
    assert steps.run(1) == [True]
    assert len(steps.graphs) == 1


class FakeCuda:
    """As much of `torch.cuda` as `CudaCapturer` calls; logs what waits for what."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.current = "current"

    def make_stream(self, name: str) -> Any:
        return SimpleNamespace(name=name, wait_stream=lambda other: self.log.append(f"{name} after {other.name}"))

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream.name
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def graph(self, graph: object, *, stream: Any, **_: object) -> Iterator[None]:
        """As torch's: it goes back to the stream before only if all went well."""
        before, self.current = self.current, stream.name
        with BrokenCapture():
            yield
        self.current = before


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: fake.make_stream("side"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: fake.make_stream(fake.current))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=None))
    monkeypatch.setattr(torch.cuda, "stream", fake.stream)
    monkeypatch.setattr(torch.cuda, "graph", fake.graph)
    return fake


def test_the_first_capture_warms_the_side_stream_up(cuda: FakeCuda) -> None:
    capturer = CudaCapturer(torch.device("cuda"))
    streams: list[str] = []
    for _ in range(2):
        capturer.capture(lambda: streams.append(cuda.current))
    assert streams == ["side", "side", "side"]
    assert cuda.log == ["side after current", "current after side"]


@pytest.mark.parametrize("fails_at", [1, 2])
def test_the_current_stream_is_in_order_when_a_capture_fails(cuda: FakeCuda, fails_at: int) -> None:
    calls = iter(range(1, 9))

    def compute() -> None:
        if next(calls) == fails_at:
            raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(RuntimeError):
        CudaCapturer(torch.device("cuda")).capture(compute)
    assert cuda.current == "current"
    assert cuda.log == ["side after current", "current after side"]
