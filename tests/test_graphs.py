"""Which steps are captured, which graphs are kept, and when they are dropped; without a device."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import pytest
import torch

from srtrl.engine.buckets import BucketPlanner, StepShape
from srtrl.engine.device_step import StepTensors
from srtrl.engine.graphs import EagerSteps, GraphedSteps, addresses


def shape_of(num_rows: int) -> StepShape:
    planner = BucketPlanner(
        num_heads=4,
        num_kv_heads=2,
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


def test_a_shape_is_captured_once_and_replayed_each_time(capturer: FakeCapturer) -> None:
    graphs = graphs_of(capturer, 4)
    for num_rows in (2, 4, 2, 4):
        graphs.run(step_of(num_rows))
    assert capturer.log == ["start over", 2, "replay", 4, "replay", "replay", "replay"]
    assert len(graphs) == 2


def test_the_graph_that_was_not_used_for_longest_is_dropped(capturer: FakeCapturer) -> None:
    graphs = graphs_of(capturer, 2)
    for num_rows in (1, 2, 1, 4, 1, 2):
        graphs.run(step_of(num_rows))
    captured = [entry for entry in capturer.log if isinstance(entry, int)]
    assert captured == [1, 2, 4, 2]
    assert len(graphs) == 2


def test_graphs_that_share_no_pool_begin_a_new_one(capturer: FakeCapturer) -> None:
    graphs = graphs_of(capturer, 1)
    graphs.run(step_of(1))
    graphs.run(step_of(2))  # the only graph goes first, and its pool with it
    graphs.drop()
    assert len(graphs) == 0
    graphs.run(step_of(2))
    assert capturer.log == ["start over", 1, "replay", "start over", 2, "replay", "start over", 2, "replay"]


def test_prompts_and_large_steps_run_without_a_graph(capturer: FakeCapturer) -> None:
    graphs = graphs_of(capturer, 4)
    graphs.run(step_of(8, num_logits=4))
    graphs.run(step_of(8, num_logits=0))
    graphs.run(step_of(1100))
    assert capturer.log == [8, 8, 1152]
    assert len(graphs) == 0


def test_eager_steps_are_computed_each_time() -> None:
    log: list[int] = []
    eager = EagerSteps(lambda step: log.append(step.shape.num_rows))
    eager.run(step_of(2))
    eager.drop()
    eager.run(step_of(2))
    assert log == [2, 2]


def test_addresses_change_when_a_tensor_moves_and_not_when_it_is_written() -> None:
    tensor = torch.zeros(8)
    before = addresses([tensor, tensor[4:]])
    tensor.add_(1)
    assert addresses([tensor, tensor[4:]]) == before
    assert addresses([tensor.clone(), tensor[4:]]) != before


def test_without_memory_for_a_graph_steps_go_on_without_graphs(capturer: FakeCapturer) -> None:
    graphs = graphs_of(capturer, 4)
    graphs.run(step_of(1))

    def fail(compute: Callable[[], None]) -> FakeGraph:
        raise torch.OutOfMemoryError("CUDA out of memory")

    capturer.capture = fail  # type: ignore[method-assign]
    with pytest.warns(UserWarning, match="rollout.cuda_graphs"):
        graphs.run(step_of(2))
    for num_rows in (1, 4):
        graphs.run(step_of(num_rows))
    assert capturer.log == ["start over", 1, "replay", 2, 1, 4]
    assert len(graphs) == 0
