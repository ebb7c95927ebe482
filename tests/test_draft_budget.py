"""Draft control: costs, the choice of nodes against brute force, and the gate."""

from collections.abc import Callable
from dataclasses import replace
from itertools import groupby, product

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from runner_cases import random_tree

from srtrl.drafters.draft_tree import DraftTrees
from srtrl.engine.draft_budget import (
    CHECK_EVERY,
    MAX_ROWS,
    DraftControl,
    DraftGate,
    StepCost,
    choose_nodes,
    cut_trees,
)
from srtrl.types import Purpose

FloatArray = npt.NDArray[np.float64]
EDGES = range(8, MAX_ROWS + 8, 8)


def padded(rows: int) -> int:
    """Rows up to the next multiple of 8."""
    return -(-rows // 8) * 8


def probed(seconds: Callable[[int], float], num_slots: int = 64) -> StepCost:
    cost = StepCost(EDGES)
    cost.probe(seconds, num_slots=num_slots)
    return cost


def chains(scores: FloatArray) -> DraftTrees:
    """[B, D] scores of chains."""
    batch, depth = scores.shape
    return DraftTrees(
        token_ids=np.tile(np.arange(depth, dtype=np.int32), batch),
        parents=np.tile(np.arange(-1, depth - 1, dtype=np.int32), batch),
        scores=scores.astype(np.float32).ravel(),
        offsets=np.arange(batch + 1, dtype=np.int64) * depth,
    )


# StepCost


def test_a_probe_takes_doubling_row_counts_and_the_faster_of_two_steps() -> None:
    # All sizes, and up to where steps are proportional to their rows.
    for fixed, per_row, num_slots, most_probed in ((1e-3, 1e-6, 64, 2048), (0.0, 1e-4, 20, 64)):
        timed: list[int] = []

        def time_step(rows: int, timed: list[int] = timed, fixed: float = fixed, per_row: float = per_row) -> float:
            timed.append(rows)
            return (1.5 if len(timed) % 2 else 1.0) * (fixed + per_row * padded(rows))

        cost = StepCost(EDGES)
        cost.record(8, 1.0)
        assert not cost.is_known, "until it is probed"
        cost.probe(time_step, num_slots=num_slots)
        assert timed == [rows for power in range(most_probed.bit_length()) for rows in [1 << power] * 2]
        for rows in (8, 16, 64, 104, 1000, MAX_ROWS):
            assert cost.seconds(rows) == pytest.approx(fixed + per_row * rows, rel=0.01)
        assert cost.seconds(2 * MAX_ROWS) == pytest.approx(2 * cost.seconds(MAX_ROWS))


def test_stated_points_are_kept_whatever_steps_take() -> None:
    cost = StepCost(points=[(4, 1.0), (8, 2.0), (16, 2.0)])
    for _ in range(100):
        cost.record(4, 50.0)
    assert cost.is_known
    assert [cost.seconds(rows) for rows in (1, 4, 6, 8, 16, 32)] == [1, 1, 1.5, 2, 2, 2]
    assert StepCost(points=[(1, 3.0)]).seconds(10) == 30


def test_what_real_steps_take_is_learned_and_disturbed_steps_change_little() -> None:
    """Host work comes on top of what was probed; sizes that are not used follow."""
    cost = probed(lambda rows: 1e-3 + 1e-5 * padded(rows))
    random = np.random.default_rng(0)
    for step in range(600):
        for rows in (6, 13, 60):
            disturbed = 1000 if step % 160 == 80 and rows == 13 else 1
            noise = 1 + 0.05 * random.standard_normal()
            cost.record(rows, disturbed * noise * 1.5 * (1e-3 + 1e-5 * padded(rows)))
    for rows, tolerance in {8: 0.06, 16: 0.06, 64: 0.06, 32: 0.15, 256: 0.15}.items():
        assert cost.seconds(rows) == pytest.approx(1.5 * (1e-3 + 1e-5 * rows), rel=tolerance)


@given(st.lists(st.tuples(st.integers(1, MAX_ROWS + 500), st.floats(1e-6, 1e3)), min_size=1, max_size=60))
def test_cost_never_falls_with_the_rows_and_rows_within_is_its_inverse(records: list[tuple[int, float]]) -> None:
    cost = probed(lambda rows: 1e-3 + 1e-6 * rows)
    for rows, seconds in records:
        cost.record(rows, seconds)
    assert len(cost.table) == MAX_ROWS + 1
    assert (np.diff(cost.table) >= 0).all()
    assert (cost.table > 0).all()
    for rows in (1, 7, 64, MAX_ROWS - 1, MAX_ROWS, MAX_ROWS + 9):
        for slowdown in (0.0, 0.03, 0.5):
            fits = [m for m in range(MAX_ROWS - rows + 1) if cost.table[rows + m] <= (1 + slowdown) * cost.table[rows]]
            assert cost.rows_within(rows, slowdown) == max(fits, default=0)


# choose_nodes


def scored_trees(random: np.random.Generator, num_trees: int, most_nodes: int, levels: int = 0) -> DraftTrees:
    """Trees whose nodes come in order of falling score; with `levels` many scores are equal."""
    trees = []
    for _ in range(num_trees):
        size = int(random.integers(0, most_nodes + 1))
        scores = random.integers(0, levels + 1, size) / levels if levels else random.random(size)
        trees.append(replace(random_tree(random, size), scores=-np.sort(-scores).astype(np.float32)))
    return DraftTrees.of(trees)


@st.composite
def costs(draw: st.DrawFn) -> StepCost:
    """Level stretches and risers."""
    steps = draw(st.lists(st.tuples(st.integers(1, 12), st.floats(0, 1)), min_size=1, max_size=8))
    rows, seconds, points = 0, draw(st.floats(0.1, 2)), []
    for more_rows, riser in steps:
        points.append((rows + 1, seconds + riser))
        rows, seconds = rows + 1 + more_rows, seconds + riser
        points.append((rows, seconds))
    return StepCost(points=points)


@given(
    seed=st.integers(0, 2**32),
    num_trees=st.integers(1, 3),
    levels=st.sampled_from([0, 1, 2]),
    cost=costs(),
    num_other_rows=st.integers(0, 4),
    draft_seconds=st.sampled_from([0.0, 0.3]),
)
def test_the_choice_is_the_best_of_all_numbers_of_nodes(
    seed: int, num_trees: int, levels: int, cost: StepCost, num_other_rows: int, draft_seconds: float
) -> None:
    trees = scored_trees(np.random.default_rng(seed), num_trees, 6, levels)
    found, lowest = choose_nodes(trees, cost.table, num_other_rows=num_other_rows, draft_seconds=draft_seconds)
    sizes = found.tolist()

    def rate(counts: tuple[int, ...]) -> float:
        tokens = num_trees + sum(float(tree.scores[:n].sum()) for tree, n in zip(trees, counts, strict=True))
        return tokens / (cost.seconds(num_trees + num_other_rows + sum(counts)) + draft_seconds)

    everything = product(*(range(size + 1) for size in trees.sizes.tolist()))
    assert rate(tuple(sizes)) == pytest.approx(max(map(rate, everything)))
    assert lowest == min([1.0, *(tree.scores[:n].min() for tree, n in zip(trees, sizes, strict=True) if n)])


def test_a_step_has_no_more_rows_than_its_cost_is_known_for() -> None:
    table, trees = StepCost(points=[(1, 1.0), (MAX_ROWS, 1.0)]).table, chains(np.full((2, 8), 0.9))
    for num_other_rows, expected in ((MAX_ROWS - 5, 3), (MAX_ROWS, 0)):
        sizes, _ = choose_nodes(trees, table, num_other_rows=num_other_rows, draft_seconds=0.0)
        assert sizes.sum() == expected


@given(seed=st.integers(0, 2**32), num_trees=st.integers(0, 6), more=st.integers(0, 3))
def test_cut_trees_are_the_first_nodes_of_each(seed: int, num_trees: int, more: int) -> None:
    random = np.random.default_rng(seed)
    trees = scored_trees(random, num_trees, 8)
    sizes = random.integers(0, trees.sizes + 1)
    found = cut_trees(trees, sizes, num_trees + more)
    assert found.sizes.tolist() == sizes.tolist() + [0] * more
    for tree, part, size in zip(trees, found, sizes.tolist(), strict=False):
        for name in ("token_ids", "parents", "scores"):
            assert getattr(part, name).tolist() == getattr(tree, name)[:size].tolist()


# DraftGate

PAUSES = (2, 16, 32, 64, 128, 256, 512, 1024, 1024, 1024)


@pytest.mark.parametrize(
    ("gain", "stretches"),
    [
        (1.04, [length for pause in PAUSES for length in (pause, 4)]),
        (1.1, [2, 4 + CHECK_EVERY - 1, *[1, CHECK_EVERY - 1] * 20]),
    ],
    ids=["drafts never pay: pauses between trials double", "drafts pay: one step in 64 goes without"],
)
@pytest.mark.parametrize("accepted", [100, 4])
def test_steps_are_drafted_for_where_that_pays_and_a_change_is_noticed(
    gain: float, stretches: list[int], accepted: int
) -> None:
    """Never where 100 sequences get 4 tokens more by drafts, whatever the clock says."""

    def drive(num_steps: int, gain: Callable[[int], float]) -> list[bool]:
        """Which steps are drafted for, where drafts give `gain` times the tokens per second."""
        gate, drafted = DraftGate(), []
        for step in range(num_steps):
            drafted.append(wants := gate.wants_drafts)
            assert gate.wants_drafts == wants, "the question changes nothing"
            seconds = (1 + accepted / 100) / gain(step) if wants else 1.0
            gate.record(drafted=wants, num_sequences=100, num_accepted=accepted * wants, seconds=seconds)
        return drafted

    found = [len(list(steps)) for _, steps in groupby(drive(5000, lambda step: gain))]
    if accepted == 4:
        assert found[: 2 * len(PAUSES)] == [length for pause in PAUSES for length in (pause, 4)]
        return
    assert found[: len(stretches)] == stretches
    drafted = drive(3000, lambda step: 2 * gain if 500 <= step < 1500 else gain / 2)
    before, during, after = (np.mean(drafted[start:stop]) for start, stop in ((0, 500), (1100, 1500), (1520, 3000)))
    assert before < 0.1 > after
    assert during > 0.95
    assert any(drafted[1520:1600]), "pauses begin short again once drafts have paid"


# DraftControl


def control_of(cost: StepCost, fixed: int | None = None) -> DraftControl:
    return DraftControl(cost, fixed=fixed)


def fail(control: DraftControl, purpose: Purpose, num_known: int, num_sequences: int, num_steps: int) -> list[bool]:
    """A rollout of 20 samples, `num_known` with history, whose drafts all fail; returns which steps were drafted."""
    control.begin_rollout(purpose)
    for index in range(20):
        control.add_request(has_history=index < num_known)
    drafted = []
    for _ in range(num_steps):
        wants = control.max_nodes(num_sequences, 8) > 0
        drafted.append(wants)
        trees = chains(np.full((num_sequences, 2), 0.9)) if wants else DraftTrees.empty(num_sequences)
        control.record(
            trees=trees,
            num_accepted=np.zeros(num_sequences, np.int64),
            num_sequences=num_sequences,
            num_rows=num_sequences + trees.num_nodes,
            drafted=wants,
            draft_seconds=0.0,
            seconds=3.0 if wants else 1.0,
        )
    return drafted


def test_what_is_learned_is_kept_apart_by_purpose_history_and_size() -> None:
    cases: list[tuple[Purpose, int, int, bool]] = [
        ("train", 0, 32, False),
        ("train", 0, 40, False),  # the same power of two
        ("train", 1, 40, False),  # of 20: hardly a history
        ("train", 20, 32, True),
        ("train", 0, 8, True),
        ("eval", 0, 32, True),
    ]
    for purpose, num_known, num_sequences, is_new in cases:
        control = control_of(probed(lambda rows: 1.0 + rows / 1000))
        assert any(fail(control, "train", 0, 32, 300))
        found = fail(control, purpose, num_known, num_sequences, 6)
        assert found == ([False, False, True, True, True, True] if is_new else [False] * 6)
        assert not any(fail(control, "train", 0, 32, 6)), "nothing is forgotten"


def test_a_fixed_budget_is_the_first_nodes_of_each_tree_whatever_they_cost() -> None:
    for fixed in (0, 1, 3, 100):
        control = control_of(StepCost(EDGES), fixed=fixed)  # a cost that is not known
        assert control.max_nodes(12, 64) == min(fixed, 64)
        assert control.score_floor(12) == 0
        trees = scored_trees(np.random.default_rng(fixed), 12, 10)
        assert control.choose(trees, 12, 5).tolist() == trees.sizes.tolist()
    # Without sequences, or without a known cost, nothing is drafted for.
    assert control_of(probed(lambda rows: 1.0)).max_nodes(0, 8) == 0
    assert control_of(StepCost(EDGES)).max_nodes(4, 8) == 0
