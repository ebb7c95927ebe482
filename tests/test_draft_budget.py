"""Draft control: costs, the choice of nodes against brute force, and the floor of scores."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from runner_cases import random_tree

from srtrl.drafters.draft_tree import DraftTrees
from srtrl.engine.draft_budget import (
    FLOOR_SHARE,
    MAX_ROWS,
    DraftControl,
    StepCost,
    choose_nodes,
    cut_trees,
)

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


@pytest.mark.parametrize("slow", [1, 4])
def test_a_probe_that_is_disturbed_at_few_rows_says_nothing_of_more(slow: int) -> None:
    """Steps of fewer rows than sequences never come, so nothing would correct them."""
    cost = StepCost([1 << power for power in range(12)])
    cost.probe(lambda rows: (20 if rows <= slow else 1) * (5e-3 + 1e-3 * rows), num_slots=8)
    for rows in (8, 16, 64):
        assert cost.seconds(rows) == pytest.approx(5e-3 + 1e-3 * rows)
    assert (np.diff(cost.table) >= 0).all()


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
)
def test_the_choice_is_the_best_of_all_numbers_of_nodes(
    seed: int, num_trees: int, levels: int, cost: StepCost, num_other_rows: int
) -> None:
    trees = scored_trees(np.random.default_rng(seed), num_trees, 6, levels)
    found, lowest = choose_nodes(trees, cost.table, num_other_rows=num_other_rows)
    sizes = found.tolist()

    def rate(counts: tuple[int, ...]) -> float:
        tokens = num_trees + sum(float(tree.scores[:n].sum()) for tree, n in zip(trees, counts, strict=True))
        return tokens / cost.seconds(num_trees + num_other_rows + sum(counts))

    everything = product(*(range(size + 1) for size in trees.sizes.tolist()))
    assert rate(tuple(sizes)) == pytest.approx(max(map(rate, everything)))
    assert lowest == min([1.0, *(tree.scores[:n].min() for tree, n in zip(trees, sizes, strict=True) if n)])


def test_a_step_has_no_more_rows_than_its_cost_is_known_for() -> None:
    table, trees = StepCost(points=[(1, 1.0), (MAX_ROWS, 1.0)]).table, chains(np.full((2, 8), 0.9))
    for num_other_rows, expected in ((MAX_ROWS - 5, 3), (MAX_ROWS, 0)):
        sizes, _ = choose_nodes(trees, table, num_other_rows=num_other_rows)
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


# DraftControl


def test_nodes_that_were_far_from_a_row_in_the_last_step_need_not_be_made() -> None:
    control = DraftControl(StepCost(points=[(1, 1.0), (4, 1.0), (5, 9.0)]), fixed=None)
    assert control.max_nodes(8) == 8
    assert control.choose(chains(np.array([[0.9, 0.5, 0.4], [0.8, 0.6, 0.1]])), 0).tolist() == [1, 1]
    assert control.score_floor == pytest.approx(FLOOR_SHARE * 0.8)
    assert control.choose(chains(np.array([[0.9], [0.8]])), 0).tolist() == [1, 1]
    assert control.score_floor == pytest.approx(FLOOR_SHARE * 0.8 / 2), "it may have hidden some that are worth a row"


def test_a_fixed_budget_is_the_first_nodes_of_each_tree_whatever_they_cost() -> None:
    for fixed in (0, 1, 3, 100):
        control = DraftControl(StepCost(EDGES), fixed=fixed)  # a cost that is not known
        assert control.max_nodes(64) == min(fixed, 64)
        trees = scored_trees(np.random.default_rng(fixed), 12, 10)
        assert control.choose(trees, 5).tolist() == trees.sizes.tolist()
        assert control.score_floor == 0
