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

    def _open_stream(self, compute: Callable[[], None]) -> bool:
        return False

    def capture(self, compute: Callable[[], None]) -> Callable[[], None]:
        if self.error is not None:
            raise self.error
        compute()
        return lambda: self.log.append("r")

    def run_all(self, *keys: int, can_capture: bool = True) -> list[bool]:
        return [self.run(key, partial(self.log.append, key), can_capture=can_capture) for key in keys]


@pytest.mark.parametrize(
    ("device", "max_graphs", "can_capture", "keys", "prepared", "log"),
    [
        (DEVICE, 4, True, "242424", "....++", "242r4rrr"),  # captured when a shape comes again
        (DEVICE, 2, True, "124121412", ".....+.+.", "1241r2rr4rr2r"),  # the least recently used goes first
        (DEVICE, 4, False, "999", ".++", "999"),  # not worth a graph
        (None, 4, True, "888", ".++", "888"),
    ],
)
def test_steps_are_computed_captured_and_replayed(
    device: torch.device | None, max_graphs: int, can_capture: bool, keys: str, prepared: str, log: str
) -> None:
    """`prepared`: + for steps for which no kernel was compiled and no graph captured; `log`: keys and replays."""
    steps = Steps(device, max_graphs)
    was_prepared = steps.run_all(*map(int, keys), can_capture=can_capture)
    assert was_prepared == [sign == "+" for sign in prepared]
    assert "".join(map(str, steps.log)) == log
    assert len(steps) == (2 if "r" in log else 0)


def test_a_capture_that_fails_leaves_no_graph() -> None:
    steps = Steps()
    steps.run_all(1, 2, 1)
    steps.error = torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(torch.OutOfMemoryError):
        steps.run_all(2)
    assert steps.run_all(1) == [True]
    assert len(steps) == 1


class FakeCuda:
    """As much of `torch.cuda` as a capture calls; logs what waits for what, and on which stream a step is computed."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.pools: list[object] = []
        self.current = "current"
        self.free_bytes = 2**40

    def make_stream(self, name: str) -> Any:
        return SimpleNamespace(name=name, wait_stream=lambda other: self.log.append(f"{name} after {other.name}"))

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream.name
        try:
            yield
        finally:
            self.current = before

    def make_graph(self) -> Any:
        def begin(*, pool: object, **_: object) -> None:
            self.pools.append(pool)
            self.log.append(f"begin on {self.current}")

        return SimpleNamespace(
            capture_begin=begin,
            capture_end=lambda: self.log.append("end"),
            replay=lambda: self.log.append(f"replay on {self.current}"),
        )


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: fake.make_stream("side"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: fake.make_stream(fake.current))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", fake.make_graph)
    monkeypatch.setattr(torch.cuda, "stream", fake.stream)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (fake.free_bytes, 2**40))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: fake.log.append("empty"))
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


def test_each_step_is_computed_once_and_memory_is_given_back_only_where_little_is_left(cuda: FakeCuda) -> None:
    """A step that moves KV must not run twice: the first capture's warm-up is the step itself."""
    graphs = StepGraphs(DEVICE)

    def run(key: int) -> list[str]:
        cuda.log.clear()
        graphs.run(key, lambda: cuda.log.append(f"compute on {cuda.current}"))
        return list(cuda.log)

    capture = ["begin on side", "compute on side", "end"]  # nothing is computed meanwhile
    assert run(1) == ["compute on current"]
    assert run(1) == ["side after current", "compute on side", "current after side", *capture]
    assert run(1) == ["replay on current"]
    assert run(2) == ["compute on current"]
    cuda.free_bytes = 2**20
    assert run(2) == ["empty", *capture, "replay on current"]


@pytest.mark.parametrize("fails_at", [2, 3])
def test_the_current_stream_is_in_order_when_a_capture_fails(cuda: FakeCuda, fails_at: int) -> None:
    calls = iter(range(1, 9))

    def compute() -> None:
        if next(calls) == fails_at:
            raise torch.OutOfMemoryError("CUDA out of memory")

    graphs = StepGraphs(DEVICE)
    graphs.run(1, compute)
    with pytest.raises(torch.OutOfMemoryError):
        graphs.run(1, compute)
    assert cuda.current == "current"
    assert cuda.log[:2] == ["side after current", "current after side"]
    assert cuda.log.count("end") == fails_at - 2
    assert len(graphs) == 0
