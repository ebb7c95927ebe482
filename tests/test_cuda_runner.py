"""Features of a CUDA device's runner alone: padded layouts, fixed addresses, graphs, and refused settings."""

from contextlib import nullcontext
from dataclasses import replace
from importlib import util
from typing import Literal

import numpy as np
import pytest
import torch
from fake_cuda import FakeCuda
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kernel_cases import KERNEL_DEVICE  # noqa: F401  with a GPU these tests run on it
from runner_cases import Samples, cuda_runner, random_trees, runner_policy

from srtrl import build
from srtrl.cuda import compiler, shapes
from srtrl.cuda import runner as cuda_runner_module
from srtrl.cuda.buffers import num_elements
from srtrl.cuda.runner import CudaRunner
from srtrl.cuda.shapes import MAX_SAMPLED_PROMPT_ROWS, LaunchShape, ShapePlanner, padded_rows, row_edges
from srtrl.cuda.tiles import H200
from srtrl.engine.runner import EngineOptions, RowFilters
from srtrl.engine.step_inputs import StepSize
from srtrl.model.hf_config import config_from_hf
from srtrl.model.published_shapes import SHAPES
from srtrl.model.transformer import Transformer


def planner_of(slots: int, draft_budget: int | Literal["auto"] = "auto") -> ShapePlanner:
    """Planner for Qwen2.5-1.5B."""
    config, options = config_from_hf(SHAPES["qwen2.5-1.5b"]), EngineOptions(slots=slots, draft_budget=draft_budget)
    return ShapePlanner(config, options, max_sequence_tokens=4095, dtype=torch.bfloat16, device=H200)


PLANNER = planner_of(400, 128)
GRAPH_SHAPES = ShapePlanner.graph_shapes
"""The fake device has another one."""
KNOWN = set(PLANNER.graph_shapes())


def size_of(*rows_per_sequence: int, num_sampled: int | None = None, max_keys: int = 100) -> StepSize:
    rows, num_keys = np.array(rows_per_sequence, np.int64), np.full(len(rows_per_sequence), max_keys)
    sampled = int(rows.sum()) if num_sampled is None else num_sampled
    return StepSize(rows_per_sequence=rows, num_keys=num_keys, num_sampled=sampled, page_size=16)


def test_padding_of_rows_is_bounded_and_its_edges_begin_fine_and_grow_coarser() -> None:
    edges = row_edges(2048)
    assert edges[:8] == [1, 2, 4, 8, 16, 24, 32, 40]
    assert len(edges) < 40
    for num_rows in range(1, 2049):
        padded = padded_rows(num_rows)
        assert padded == min(edge for edge in edges if edge >= num_rows)
        assert padded - num_rows < max(8, num_rows / 4)


@settings(deadline=None)
@given(
    rows=st.lists(st.integers(1, 129), min_size=1, max_size=300),
    num_chunks=st.integers(0, 3),
    max_keys=st.integers(1, 4224),
)
@example([129] * 300, 0, 4224)
def test_every_step_fits_its_layout_and_is_captured_if_that_is_known(
    rows: list[int], num_chunks: int, max_keys: int
) -> None:
    num_sampled = sum(rows[: max(0, len(rows) - num_chunks)])
    size = size_of(*rows, num_sampled=num_sampled, max_keys=max_keys)
    launch = PLANNER.shape(size)
    shape = launch.step
    assert shape.num_rows >= size.num_rows
    assert shape.num_tables >= len(rows)
    assert shape.table_width >= size.max_pages
    assert num_sampled <= shape.num_sampled <= shape.num_rows
    assert (shape.num_sampled == 0) == (num_sampled == 0)
    assert launch.num_tiles >= sum(-(-count // (launch.block_m // PLANNER.group)) for count in rows)
    if num_sampled > 0 and size.num_rows - num_sampled <= MAX_SAMPLED_PROMPT_ROWS:
        assert shape.num_sampled == shape.num_rows
    assert num_elements(launch.fields()) <= num_elements(PLANNER.largest().fields())
    assert shape.num_sampled <= PLANNER.largest().step.num_sampled
    num_drafts = num_sampled - max(0, len(rows) - num_chunks)
    assert launch.fields()["moves"][1][0] >= num_drafts, "all of them may be accepted, and move"
    assert launch.num_splits * PLANNER.split_keys(size, launch) >= max_keys
    if num_sampled > 0:  # whatever the lengths of its sequences
        is_small = size.num_rows <= 2048 and size.num_rows - num_sampled <= MAX_SAMPLED_PROMPT_ROWS
        assert launch.is_captured == (launch in KNOWN) == is_small


@pytest.fixture
def samples(device: FakeCuda) -> Samples:
    """Samples whose runner captures graphs."""
    return Samples(cuda_runner(runner_policy().to("cuda")), runner_policy())


def runner_of(samples: Samples) -> CudaRunner:
    assert isinstance(samples.runner, CudaRunner)
    return samples.runner


def test_steps_are_captured_when_the_engine_warms_up_and_again_only_where_weights_or_pages_have_moved(
    device: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They compute what single launches do, over other tokens, trees and numbers of sequences."""
    runner = cuda_runner(runner_policy().to("cuda"))
    planned = [shape for shape in GRAPH_SHAPES(runner.planner) if shape.step.num_rows == 16]
    monkeypatch.setattr(ShapePlanner, "graph_shapes", lambda _: planned)
    samples = Samples(runner, runner_policy())
    runner.warm_up(compiles=True)
    samples.prefill()
    samples.step()  # the rest of the prompts is a part of its time
    assert set(planned) == set(runner._graphs._graphs)
    num_dropped = 0
    for change in ("none", "weights in place", "weights moved", "pages moved"):
        has_moved, before = "moved" in change, len(runner._graphs)
        if change == "weights in place":
            with torch.no_grad():
                for model in (runner.model, samples.oracle):
                    model.final_norm.mul_(1.5)
        elif change == "weights moved":
            runner.model.final_norm.data = runner.model.final_norm.data.clone()
        elif change == "pages moved":
            runner.allocate_pages(runner.num_pages + 1)
            samples.prefill()
        runner.weights_changed()
        for seed, slots in ((0, [2, 0, 1]), (1, [1, 2]))[: 1 + has_moved]:
            trees = random_trees(np.random.default_rng(seed), [5, 2, 4] if len(slots) == 3 else [8, 3])
            samples.check_step(slots, trees)
            assert runner.was_prepared == (not has_moved or seed > 0), "both have one shape"
            samples.accept(slots, trees, [[]] * len(slots))
        num_dropped += before * has_moved
        assert runner.num_graphs_dropped == num_dropped, change
    assert not device.findings


def test_what_is_prepared_after_a_step_spoils_its_time_and_that_of_the_next_step(samples: Samples) -> None:
    """As a draft head is: compiled and captured in the host's time of this step and the device's of the next one."""
    runner = runner_of(samples)
    samples.prefill()
    for _ in range(3):
        samples.step()
    was_prepared = []
    for _ in range(4):
        samples.step()
        before = runner.was_prepared
        is_prepared = runner.run("guesses", lambda: (runner.hidden.mul_(1), None)[1])
        was_prepared.append((before, is_prepared, runner.was_prepared))
    new, captured, replayed, again = was_prepared
    assert new == (True, False, False)
    assert captured == (False, False, False)
    assert replayed == (False, True, False)
    assert again == (True, True, True)


def test_views_of_steps_are_kept_and_no_graph_of_large_ones(samples: Samples, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps too large for graphs are never captured."""
    monkeypatch.setattr(shapes, "MAX_GRAPH_ROWS", 8)
    runner = runner_of(samples)
    for num_rows in (1, 8, 1, 16):
        assert runner.time_step(num_rows, 9, 1) > 0
    assert [shape.step.num_rows for shape in runner._steps] == [1, 8, 16]
    assert {key.step.num_rows for key in runner._graphs._graphs if isinstance(key, LaunchShape)} == {1, 8}
    samples.prefill()
    samples.check_step()


def test_logits_go_through_small_buffers(samples: Samples, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_runner_module, "LOGITS_AT_ONCE", 4)
    monkeypatch.setattr(cuda_runner_module, "FILTERED_AT_ONCE", 3)
    samples.prefill()
    keep_all = RowFilters(top_k=np.zeros(6, np.int64), top_p=np.ones(6))
    for filters in (None, keep_all):
        samples.check_step([0, 1, 2], random_trees(np.random.default_rng(0), [3, 0, 0]), filters=filters)


def test_a_missing_triton_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Transformer(runner_policy().config, torch.float32, "meta")  # no CPU
    monkeypatch.setattr(compiler, "find_spec", lambda name: None if name == "triton" else util.find_spec(name))
    with pytest.raises(ValueError, match="pip install triton"):
        build.build_runner(policy, EngineOptions())


def test_a_window_that_a_draft_tree_may_exceed_is_refused() -> None:
    config = runner_policy().config
    narrow = replace(config, layers=(config.layers[0]._replace(window=8),))
    refused = pytest.raises(ValueError, match="window of 8 tokens must exceed the 8")
    for nodes, context in ((8, refused), (7, nullcontext())):
        with context:
            CudaRunner(Transformer(narrow, torch.float32, "cpu"), EngineOptions(max_draft_nodes=nodes), 64)


def test_a_step_without_memory_names_the_options_that_help(samples: Samples, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(step: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(runner_of(samples), "compute", fail)
    with pytest.raises(ValueError, match=r"16 rows \(16 of them sampled\).*rollout.kv_memory_gib"):
        samples.step([0, 1, 2], random_trees(np.random.default_rng(0), [8, 2, 0]))
