"""Which steps are captured, which graphs are kept, and when they are dropped; without a device."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from srtrl.engine.buckets import BucketPlanner, StepShape
from srtrl.engine.device_step import StepTensors
from srtrl.engine.graphs import CudaCapturer, EagerSteps, GraphedSteps, addresses


def shape_of(num_rows: int) -> StepShape:
    planner = BucketPlanner(
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        page_size=16,
        max_positions=500,
        max_draft_nodes=16,
        num_multiprocessors=8,
        deterministic=False,
        rows_at_once=64,
    )
    return planner.shape(np.ones(num_rows, np.int64), num_logits=num_rows, table_width=4, depth=0)


@dataclass
class FakeStep:
    """All of a step that graphs look at."""

    shape: StepShape


def step_of(num_rows: int, **changes: Any) -> StepTensors:
    return cast(StepTensors, FakeStep(replace(shape_of(num_rows), **changes)))


@dataclass
class FakeCapturer:
    """Calls what is captured, and logs what is done."""

    log: list[object] = field(default_factory=list)

    def start_over(self) -> None:
        self.log.append("start over")

    def capture(self, compute: Callable[[], None]) -> "FakeGraph":
        compute()
        return FakeGraph(self.log)


@dataclass
class FakeGraph:
    """Logs its replays."""

    log: list[object]

    def replay(self) -> None:
        self.log.append("replay")


@pytest.fixture
def capturer() -> FakeCapturer:
    return FakeCapturer()


def graphs_of(capturer: FakeCapturer, max_graphs: int) -> GraphedSteps:
    return GraphedSteps(lambda step: capturer.log.append(step.shape.num_rows), capturer, max_graphs=max_graphs)


def test_a_shape_is_captured_when_it_comes_again_and_replayed_from_then_on(capturer: FakeCapturer) -> None:
    graphs = graphs_of(capturer, 4)
    prepared = [graphs.run(step_of(num_rows)) for num_rows in (2, 4, 2, 4, 2, 4)]
    assert capturer.log == [2, 4, "start over", 2, "replay", 4, "replay", "replay", "replay"]
    assert prepared == [False, False, False, False, True, True]
    assert len(graphs) == 2


def test_the_graph_that_was_not_used_for_longest_is_dropped(capturer: FakeCapturer) -> None:
    graphs = graphs_of(capturer, 2)
    for num_rows in (1, 2, 4):
        graphs.run(step_of(num_rows))
    capturer.log.clear()
    prepared = [graphs.run(step_of(num_rows)) for num_rows in (1, 2, 1, 4, 1, 2)]
    captured = [entry for entry in capturer.log if isinstance(entry, int)]
    assert captured == [1, 2, 4, 2]
    assert prepared == [False, False, True, False, True, False], "a graph that was dropped is captured anew"
    assert len(graphs) == 2


def test_graphs_that_share_no_pool_begin_a_new_one(capturer: FakeCapturer) -> None:
    graphs = graphs_of(capturer, 1)
    for num_rows in (1, 2):
        graphs.run(step_of(num_rows))
    capturer.log.clear()
    graphs.run(step_of(1))
    graphs.run(step_of(2))  # the only graph goes first, and its pool with it
    graphs.drop()
    assert len(graphs) == 0
    graphs.run(step_of(2))
    assert capturer.log == ["start over", 1, "replay", "start over", 2, "replay", "start over", 2, "replay"]


def test_large_steps_run_without_a_graph(capturer: FakeCapturer) -> None:
    graphs = graphs_of(capturer, 4)
    assert [graphs.run(step_of(2100)) for _ in range(3)] == [False, True, True]
    assert capturer.log == [2304] * 3
    assert len(graphs) == 0


def test_eager_steps_are_computed_each_time() -> None:
    log: list[int] = []
    eager = EagerSteps(lambda step: log.append(step.shape.num_rows))
    assert not eager.run(step_of(2)), "the first step of a shape may compile"
    eager.drop()
    assert eager.run(step_of(2))
    assert log == [2, 2]


def test_addresses_change_when_a_tensor_moves_and_not_when_it_is_written() -> None:
    tensor = torch.zeros(8)
    before = addresses([tensor, tensor[4:]])
    tensor.add_(1)
    assert addresses([tensor, tensor[4:]]) == before
    assert addresses([tensor.clone(), tensor[4:]]) != before


class BrokenCapture:
    """Stands for `torch.cuda.graph`: what was broken while it captured cannot be ended."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")


def fail(error: RuntimeError, *, is_capturing: bool) -> FakeGraph:
    with BrokenCapture() if is_capturing else nullcontext():
        raise error


@pytest.mark.parametrize("is_capturing", [False, True])
def test_without_memory_for_a_graph_steps_go_on_without_graphs(capturer: FakeCapturer, is_capturing: bool) -> None:
    graphs = graphs_of(capturer, 4)
    for num_rows in (1, 2, 1):
        graphs.run(step_of(num_rows))
    capturer.log.clear()
    error = torch.OutOfMemoryError("CUDA out of memory")
    capturer.capture = lambda compute: fail(error, is_capturing=is_capturing)  # type: ignore[method-assign]
    with pytest.warns(UserWarning, match="rollout.cuda_graphs"):
        assert not graphs.run(step_of(2))
    assert graphs.run(step_of(2))
    for num_rows in (1, 4):
        graphs.run(step_of(num_rows))
    assert capturer.log == [2, 2, 1, 4]
    assert len(graphs) == 0


@pytest.mark.parametrize("is_capturing", [False, True])
def test_other_errors_of_a_capture_are_not_hidden(capturer: FakeCapturer, is_capturing: bool) -> None:
    graphs = graphs_of(capturer, 4)
    graphs.run(step_of(2))
    error = RuntimeError("CUDA error: an illegal memory access was encountered")
    capturer.capture = lambda compute: fail(error, is_capturing=is_capturing)  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="previous error" if is_capturing else "illegal"):
        graphs.run(step_of(2))


class FakeCuda:
    """As much of `torch.cuda` as `CudaCapturer` calls; logs what waits for what."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.current = "current"

    def make_stream(self, name: str) -> Any:
        return SimpleNamespace(name=name, wait_stream=lambda other: self.log.append(f"{name} behind {other.name}"))

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
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "stream", fake.stream)
    monkeypatch.setattr(torch.cuda, "graph", fake.graph)
    return fake


def test_the_first_capture_warms_the_side_stream_up(cuda: FakeCuda) -> None:
    capturer = CudaCapturer(torch.device("cuda"))
    streams: list[str] = []
    for _ in range(2):
        capturer.capture(lambda: streams.append(cuda.current))
    assert streams == ["side", "side", "side"]
    assert cuda.log == ["side behind current", "current behind side"]


@pytest.mark.parametrize("fails_at", [1, 2])
def test_work_goes_on_in_order_on_the_current_stream_when_a_capture_fails(cuda: FakeCuda, fails_at: int) -> None:
    num_calls = 0

    def compute() -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == fails_at:
            raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(RuntimeError):
        CudaCapturer(torch.device("cuda")).capture(compute)
    assert cuda.current == "current"
    assert cuda.log == ["side behind current", "current behind side"]
