"""Which steps are captured, which graphs are kept, and when they are dropped; without a device."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from srtrl.cuda.graphs import StepGraphs

DEVICE = torch.device("cuda")


class FakeCuda:
    """As much of `torch.cuda` as a capture calls, and steps; logs what waits for what, and what runs on which stream.

    A step is a letter: "a" is computed, and "A" replayed.
    """

    def __init__(self) -> None:
        self.log: list[str] = []
        self.pools: list[object] = []
        self.current = "current"
        self.captured: list[str] | None = None
        self.free_bytes = 2**40
        self.num_left = 100
        """Computations until one fails."""
        self.is_broken = False
        """Whether the end of a capture fails, too, as after an error in it."""

    def run(self, graphs: StepGraphs, steps: str, **options: Any) -> list[bool]:
        """What `StepGraphs.run` says to each step."""
        return [graphs.run(step, partial(self.compute, step), **options) for step in steps]

    def compute(self, step: str) -> None:
        self.num_left -= 1
        if self.num_left == 0:
            raise torch.OutOfMemoryError("CUDA out of memory")
        if self.captured is None:
            self.log.append(f"run {step} on {self.current}")
        else:
            self.captured.append(step)
            self.log.append(f"record {step} on {self.current}")

    @property
    def steps(self) -> str:
        """What ran."""
        return "".join(line.split()[1] for line in self.log if line.startswith("run "))

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
        steps: list[str] = []

        def begin(*, pool: object, **_: object) -> None:
            self.pools.append(pool)
            self.captured = steps
            self.log.append(f"begin on {self.current}")

        def end() -> None:
            self.captured = None
            self.log.append("end")
            if self.is_broken:
                raise RuntimeError("operation failed due to a previous error during capture")

        def replay() -> None:
            self.log.append(f"run {''.join(steps).upper()} on {self.current}")

        return SimpleNamespace(capture_begin=begin, capture_end=end, replay=replay)


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


@pytest.mark.parametrize(
    ("device", "max_graphs", "can_capture", "asked", "prepared", "ran"),
    [
        (DEVICE, 4, True, "ababab", "....++", "abaBAB"),  # captured when a shape comes again
        (DEVICE, 2, True, "abcabacab", ".....+.+.", "abcaBACAB"),  # the least recently used goes first
        (DEVICE, 4, False, "aaa", ".++", "aaa"),  # not worth a graph
        (None, 4, True, "aaa", ".++", "aaa"),
    ],
)
def test_steps_are_computed_captured_and_replayed(
    device: torch.device | None, max_graphs: int, can_capture: bool, asked: str, prepared: str, ran: str, cuda: FakeCuda
) -> None:
    """`prepared`: + for steps for which no kernel was compiled and no graph captured."""
    graphs = StepGraphs(device, max_graphs=max_graphs)
    was_prepared = cuda.run(graphs, asked, can_capture=can_capture)
    assert was_prepared == [sign == "+" for sign in prepared]
    assert cuda.steps == ran
    assert len(graphs) == (2 if "B" in ran else 0)


def test_a_pool_whose_last_graph_is_gone_is_not_used_again(cuda: FakeCuda) -> None:
    graphs = StepGraphs(DEVICE, max_graphs=2)
    cuda.run(graphs, "aabbcc")
    graphs.drop()
    cuda.run(graphs, "c")
    first, second, third, fourth = cuda.pools
    assert first is second is third
    assert fourth is not third


def test_each_step_is_computed_once_and_memory_is_given_back_only_where_little_is_left(cuda: FakeCuda) -> None:
    """A step that moves KV must not run twice: the first capture's warm-up is the step itself.

    Nothing is computed in a capture.
    """
    graphs = StepGraphs(DEVICE)
    cuda.run(graphs, "aaab")
    first, second = (["begin on side", f"record {step} on side", "end"] for step in "ab")
    warm_up = ["side after current", "run a on side", "current after side"]
    assert cuda.log == ["run a on current", *warm_up, *first, "run A on current", "run b on current"]
    cuda.log.clear()
    cuda.free_bytes = 2**20
    cuda.run(graphs, "b")
    assert cuda.log == ["empty", *second, "run B on current"]


@pytest.mark.parametrize(
    ("fails_at", "is_broken", "num_graphs"), [(2, False, 0), (3, False, 0), (3, True, 0), (5, False, 1)]
)
def test_a_capture_that_fails_leaves_streams_and_graphs_in_order(
    cuda: FakeCuda, fails_at: int, is_broken: bool, num_graphs: int
) -> None:
    """In the warm-up of the first capture, in that capture, and in the next one.

    The error is the one in the capture, and not that the capture could not end.
    """
    graphs = StepGraphs(DEVICE)
    cuda.num_left, cuda.is_broken = fails_at, is_broken
    with pytest.raises(torch.OutOfMemoryError):
        cuda.run(graphs, "aabb")
    assert cuda.current == "current"
    assert [line for line in cuda.log if "after" in line] == ["side after current", "current after side"]
    assert cuda.log.count("begin on side") == cuda.log.count("end") == (fails_at - 1) // 2
    assert len(graphs) == num_graphs
    cuda.is_broken = False
    assert cuda.run(graphs, "a") == [num_graphs == 1]
