"""Which steps are captured, which graphs are kept, and when they are dropped."""

from functools import partial
from unittest.mock import Mock

import pytest
import torch
from fake_cuda import FakeCuda

from srtrl.cuda.graphs import StepGraphs

CUDA = torch.device("cuda")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real device")


class Steps:
    """Steps, each a letter; the device remembers in which order it has computed them."""

    def __init__(self, device: FakeCuda) -> None:
        self.device = device
        self.graphs = StepGraphs(CUDA)
        self.digits = torch.zeros((), dtype=torch.float64, device="cuda")
        self.num_left = 100
        """Computations until one fails."""

    def run(self, steps: str, *, can_capture: bool = True) -> str:
        """Ask for these; + for those for which no kernel was compiled and no graph captured."""
        was_prepared = (self.graphs.run(step, partial(self.compute, step), can_capture=can_capture) for step in steps)
        return "".join(".+"[prepared] for prepared in was_prepared)

    def compute(self, step: str) -> None:
        self.num_left -= 1
        if self.num_left == 0:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.device.log.append(f"{step} on {self.device.current.name}")
        self.digits.mul_(10).add_("abc".index(step) + 1)

    @property
    def done(self) -> str:
        """Results of the device so far."""
        return "".join("abc"[int(digit) - 1] for digit in f"{float(self.digits):.0f}")


def test_the_first_capture_warms_up_its_stream_and_memory_is_given_back_only_where_little_is_left(
    device: FakeCuda,
) -> None:
    steps = Steps(device)
    steps.run("aaab")
    warm_up = ["side after main", "a on side", "main after side"]
    assert device.log == ["a on main", *warm_up, "capture on side", "a on side", "b on main"]
    device.log.clear()
    device.free_bytes = 2**20
    steps.run("b")
    assert device.log == ["memory is given back", "capture on side", "b on side"]
    assert steps.done == "aaabb", "each once: a step that moves KV must not run twice"
    assert steps.run("ccab", can_capture=False) == ".+++", "not worth a graph, or captured"
    steps.graphs.drop()
    steps.run("a")
    first, second, third = device.pools
    assert first is second is not third, "a pool whose last graph is gone is not used again"
    without = StepGraphs(None)
    assert [without.run("a", Mock()) for _ in range(3)] == [False, True, True]


@pytest.mark.parametrize(
    ("fails_at", "is_broken", "num_graphs"), [(2, False, 0), (3, False, 0), (3, True, 0), (5, False, 1)]
)
def test_a_capture_that_fails_leaves_streams_and_graphs_in_order(
    device: FakeCuda, fails_at: int, is_broken: bool, num_graphs: int
) -> None:
    """In the warm-up of the first capture, in that capture, and in the next one.

    The error is the one in the capture, and not that the capture could not end.
    """
    steps = Steps(device)
    steps.num_left, device.is_broken = fails_at, is_broken
    with pytest.raises(torch.OutOfMemoryError):
        steps.run("aabb")
    assert device.capture is None
    assert device.current.name == "main"
    assert [line for line in device.log if "after" in line] == ["side after main", "main after side"]
    assert device.num_captures == (fails_at - 1) // 2
    assert len(steps.graphs) == num_graphs
    device.is_broken = False
    assert steps.run("a") == ".+"[num_graphs == 1]
