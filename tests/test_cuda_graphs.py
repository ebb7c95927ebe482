"""Which steps are captured, which graphs are kept, and when they are dropped; without a device."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from srtrl.engine.cuda_graphs import StepGraphs

DEVICE = torch.device("cuda")


class Steps(StepGraphs):
    """Runs steps with graphs, and logs what is computed, captured and replayed."""

    def __init__(self, device: torch.device | None = DEVICE, max_graphs: int = 4) -> None:
        super().__init__(device, max_graphs=max_graphs)
        self.log: list[object] = []
        self.error: RuntimeError | None = None

    def capture(self, compute: Callable[[], None]) -> Callable[[], None]:
        if self.error is not None:
            raise self.error
        compute()
        return lambda: self.log.append("replay")

    def run_all(self, *keys: int, can_capture: bool = True) -> list[bool]:
        return [self.run(key, partial(self.log.append, key), can_capture=can_capture) for key in keys]


def test_a_shape_is_captured_when_it_comes_again_and_replayed_from_then_on() -> None:
    steps = Steps()
    assert steps.run_all(2, 4, 2, 4, 2, 4) == [False, False, False, False, True, True]
    assert steps.log == [2, 4, 2, "replay", 4, "replay", "replay", "replay"]
    steps.drop()
    assert steps.run_all(2, 2) == [False, True]


def test_the_graph_that_was_used_least_recently_goes_first() -> None:
    steps = Steps(max_graphs=2)
    steps.run_all(1, 2, 4)
    steps.log.clear()
    assert steps.run_all(1, 2, 1, 4, 1, 2) == [False, False, True, False, True, False]
    assert [entry for entry in steps.log if isinstance(entry, int)] == [1, 2, 4, 2]
    assert len(steps) == 2


def test_steps_that_are_not_worth_a_graph_and_those_without_graphs_are_computed_each_time() -> None:
    steps, without = Steps(), Steps(None)
    assert steps.run_all(9, 9, 9, can_capture=False) == [False, True, True]
    assert without.run_all(8, 8, 8) == [False, True, True]
    assert (steps.log, without.log) == ([9, 9, 9], [8, 8, 8])
    assert len(steps) == len(without) == 0


def test_a_capture_that_fails_leaves_no_graph() -> None:
    steps = Steps()
    steps.run_all(1, 2, 1)
    steps.error = torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(torch.OutOfMemoryError):
        steps.run_all(2)
    assert steps.run_all(1) == [True]
    assert len(steps) == 1


class FakeCuda:
    """As much of `torch.cuda` as a capture calls; logs what waits for what."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.pools: list[object] = []
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
    def graph(self, graph: object, *, pool: object, stream: Any, **_: object) -> Iterator[None]:
        """As torch's: it goes back to the stream before only if all went well."""
        before, self.current = self.current, stream.name
        self.pools.append(pool)
        yield
        self.current = before


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: fake.make_stream("side"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: fake.make_stream(fake.current))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: None))
    monkeypatch.setattr(torch.cuda, "stream", fake.stream)
    monkeypatch.setattr(torch.cuda, "graph", fake.graph)
    return fake


def test_a_pool_whose_last_graph_is_gone_is_not_used_again(cuda: FakeCuda) -> None:
    graphs = StepGraphs(DEVICE, max_graphs=2)
    for key in (1, 1, 2, 2, 3, 3):
        graphs.run(key, lambda: None)
    graphs.drop()
    graphs.run(3, lambda: None)
    first, second, third, fourth = cuda.pools
    assert first is second is third
    assert fourth is not third


@pytest.mark.parametrize("fails_at", [1, 2])
def test_the_current_stream_is_in_order_when_a_capture_fails(cuda: FakeCuda, fails_at: int) -> None:
    calls = iter(range(1, 9))

    def compute() -> None:
        if next(calls) == fails_at:
            raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        StepGraphs(DEVICE).capture(compute)
    assert cuda.current == "current"
    assert cuda.log == ["side after current", "current after side"]
