"""Draft control: costs, chosen nodes and the gate against brute force, and whole runs in a world that is known."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from srtrl.drafters.draft_tree import ROOT, DraftTree, DraftTrees
from srtrl.engine.draft_budget import (
    AUTO_SLOWDOWN,
    CHECK_EVERY,
    FLOOR_SHARE,
    MAX_ROWS,
    NEGLIGIBLE_SHARE,
    Calibration,
    DraftControl,
    DraftGate,
    StepCost,
    choose_nodes,
    cut_trees,
    slowdown_of,
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


# StepCost


def test_a_probe_takes_doubling_row_counts_and_the_faster_of_two_steps() -> None:
    timed: list[int] = []

    def time_step(rows: int) -> float:
        timed.append(rows)
        disturbed = 5.0 if len(timed) % 2 else 1.0
        return disturbed * (1e-3 + 1e-6 * padded(rows))

    cost = StepCost(EDGES)
    assert not cost.is_known
    cost.probe(time_step, num_slots=64)
    assert cost.is_known
    assert timed == [rows for power in range(12) for rows in [1 << power] * 2]
    for rows in (1, 8, 16, 64, 100, 1000, MAX_ROWS):
        assert cost.seconds(rows) == pytest.approx(1e-3 + 1e-6 * rows, rel=0.01)


def test_a_probe_ends_where_steps_become_proportional_to_their_rows() -> None:
    timed: list[int] = []

    def time_step(rows: int) -> float:
        timed.append(rows)
        return 1e-4 * padded(rows)

    cost = StepCost(EDGES)
    cost.probe(time_step, num_slots=20)
    assert max(timed) == 64
    assert cost.seconds(1024) == pytest.approx(0.1024, rel=0.01)
    assert cost.seconds(2 * MAX_ROWS) == pytest.approx(2 * cost.seconds(MAX_ROWS))


def test_stated_points_are_kept_whatever_steps_take() -> None:
    cost = StepCost(points=[(4, 1.0), (8, 2.0), (16, 2.0)])
    before = cost.table.copy()
    for _ in range(100):
        cost.record(4, 50.0)
    assert cost.is_known
    assert (cost.table == before).all()
    assert [cost.seconds(rows) for rows in (1, 4, 6, 8, 16, 32)] == [1, 1, 1.5, 2, 2, 2]
    assert StepCost(points=[(1, 3.0)]).seconds(10) == 30


def test_an_unknown_cost_stays_unknown_until_it_is_probed() -> None:
    cost = StepCost(EDGES)
    cost.record(8, 1.0)
    assert not cost.is_known


def test_what_real_steps_take_is_learned_and_sizes_that_are_not_used_follow() -> None:
    """Host work comes on top of what was probed: steps take 1.5 times as long."""
    cost = probed(lambda rows: 1e-3 + 1e-5 * padded(rows))
    random = np.random.default_rng(0)
    for _ in range(600):
        for rows in (6, 13, 60):  # in the middle of their buckets
            cost.record(rows, 1.5 * (1e-3 + 1e-5 * padded(rows)) * (1 + 0.05 * random.standard_normal()))
    for rows, tolerance in ((8, 0.06), (16, 0.06), (64, 0.06), (32, 0.15), (256, 0.15)):
        assert cost.seconds(rows) == pytest.approx(1.5 * (1e-3 + 1e-5 * rows), rel=tolerance)


def test_sizes_that_the_probe_missed_are_learned_apart() -> None:
    def true(rows: int) -> float:
        return 1e-3 + 1e-5 * padded(rows) * (1.3 if rows > 24 else 1.0) + (2e-4 if rows > 24 else 0)

    cost = probed(lambda rows: 1e-3 + 1e-5 * padded(rows))
    for _ in range(300):
        for rows in (8, 16, 24, 32, 48, 64):
            cost.record(rows, true(rows))
    for rows in (8, 24, 32, 64):
        assert cost.seconds(rows) == pytest.approx(true(rows), rel=0.04)


def test_disturbed_steps_change_little() -> None:
    cost = probed(lambda rows: 1e-3 + 1e-5 * padded(rows))
    before = cost.table.copy()
    for step in range(320):
        seconds = float(before[16])
        cost.record(16, 1000 * seconds if step % 160 == 80 else seconds)
    assert np.abs(cost.table / before - 1).max() < 0.1


@settings(deadline=None, max_examples=50)
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


# choose_nodes and Calibration


def random_trees(random: np.random.Generator, num_trees: int, most_nodes: int, levels: int = 0) -> DraftTrees:
    """Trees whose nodes come in order of falling score; with `levels` many scores are equal."""
    trees = []
    for _ in range(num_trees):
        size = int(random.integers(0, most_nodes + 1))
        scores = random.integers(0, levels + 1, size) / levels if levels else random.random(size)
        trees.append(
            DraftTree(
                token_ids=np.arange(size, dtype=np.int32),
                parents=np.array([random.integers(ROOT, node) for node in range(size)], np.int32),
                scores=-np.sort(-scores).astype(np.float32),
            )
        )
    return DraftTrees.of(trees)


def chances_of(trees: DraftTrees, ratios: FloatArray) -> list[list[float]]:
    """Of the nodes of each tree: calibrated, and falling."""
    found = []
    for tree in trees:
        chances: list[float] = []
        for score, parent in zip(tree.scores.tolist(), tree.parents.tolist(), strict=True):
            chances.append(min([1.0, score * ratios[int(parent != ROOT)], *chances[-1:]]))
        found.append(chances)
    return found


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


@settings(deadline=None, max_examples=100)
@given(
    seed=st.integers(0, 2**32),
    num_trees=st.integers(1, 3),
    levels=st.sampled_from([0, 1, 2]),
    cost=costs(),
    num_other_rows=st.integers(0, 4),
    draft_seconds=st.sampled_from([0.0, 0.3]),
    ratios=st.tuples(st.floats(0.1, 2), st.floats(0.1, 2)),
)
def test_the_choice_is_the_best_of_all_numbers_of_nodes(
    seed: int,
    num_trees: int,
    levels: int,
    cost: StepCost,
    num_other_rows: int,
    draft_seconds: float,
    ratios: tuple[float, float],
) -> None:
    trees = random_trees(np.random.default_rng(seed), num_trees, 6, levels)
    calibration = Calibration(accepted=np.array(ratios), expected=np.ones(2), score_floor=0.25)
    sizes = choose_nodes(
        trees, calibration, cost.table, num_other_rows=num_other_rows, draft_seconds=draft_seconds
    ).tolist()
    chances = chances_of(trees, calibration.ratios)

    def rate(counts: tuple[int, ...]) -> float:
        tokens = num_trees + sum(sum(of_tree[:n]) for of_tree, n in zip(chances, counts, strict=True))
        return tokens / (cost.seconds(num_trees + num_other_rows + sum(counts)) + draft_seconds)

    everything = product(*(range(size + 1) for size in trees.sizes.tolist()))
    assert rate(tuple(sizes)) == pytest.approx(max(map(rate, everything)))
    chosen = [tree.scores[:n].min() for tree, n in zip(trees, sizes, strict=True) if n]
    step_seconds = cost.seconds(num_trees + num_other_rows + sum(sizes)) + draft_seconds
    is_cheap = trees.num_nodes > 0 and draft_seconds < NEGLIGIBLE_SHARE * step_seconds
    if not trees.num_nodes or sum(sizes) == trees.num_nodes or is_cheap:
        assert calibration.score_floor == 0.125
    elif chosen:
        assert calibration.score_floor == pytest.approx(FLOOR_SHARE * min(chosen))
    else:
        assert calibration.score_floor == 0.25


@pytest.mark.parametrize(
    ("points", "scores", "other_rows", "expected"),
    [
        # One more row costs 60% more than none, but then 15 more are free: a later edge pays.
        ([(1, 1.0), (2, 1.6), (16, 1.6), (17, 9.0), (64, 9.0)], np.full((1, 30), 0.5), 0, 15),
        ([(1, 1.0), (16, 1.0), (17, 3.0), (64, 12.0)], np.full((4, 8), 0.5), 0, 12),
        ([(1, 1.0), (16, 1.0), (17, 3.0), (64, 12.0)], np.full((4, 8), 0.5), 10, 2),  # prompt rows take room
        ([(1, 1.0), (64, 1.0)], np.full((2, 8), 0.01), 0, 16),
        ([(1, 1.0), (64, 64.0)], np.full((2, 8), 0.9), 0, 0),
        ([(1, 1.0), (MAX_ROWS, 1.0)], np.full((2, 8), 0.9), MAX_ROWS - 5, 3),
        ([(1, 1.0), (MAX_ROWS, 1.0)], np.full((2, 8), 0.9), MAX_ROWS, 0),
    ],
)
def test_steps_are_filled_as_far_as_rows_pay(
    points: list[tuple[int, float]], scores: FloatArray, other_rows: int, expected: int
) -> None:
    table = StepCost(points=points).table
    found = choose_nodes(chains(scores), Calibration(), table, num_other_rows=other_rows, draft_seconds=0.0)
    assert found.sum() == expected
    assert found.max() - found.min() <= 8


def chains(scores: FloatArray) -> DraftTrees:
    """[B, D] scores of chains."""
    batch, depth = scores.shape
    return DraftTrees(
        token_ids=np.tile(np.arange(depth, dtype=np.int32), batch),
        parents=np.tile(np.arange(-1, depth - 1, dtype=np.int32), batch),
        scores=scores.astype(np.float32).ravel(),
        offsets=np.arange(batch + 1, dtype=np.int64) * depth,
    )


def test_a_straggler_gets_many_nodes_and_a_full_batch_few_and_a_slow_drafter_more() -> None:
    table = StepCost(points=[(1, 1.0), (128, 1.0), (256, 2.0), (1024, 8.0)]).table

    def nodes_each(batch: int, draft_seconds: float = 0.0) -> float:
        trees = chains(np.cumprod(np.full((batch, 32), 0.8), axis=1))
        sizes = choose_nodes(trees, Calibration(), table, num_other_rows=0, draft_seconds=draft_seconds)
        return float(sizes.mean())

    each = [nodes_each(batch) for batch in (1, 8, 64, 256)]
    assert each == sorted(each, reverse=True)
    assert each[0] > 15
    assert each[3] < 0.5
    assert nodes_each(64, draft_seconds=1.0) > nodes_each(64)


@pytest.mark.parametrize("truth", [(0.5, 0.9), (1.3, 0.4), (1.0, 1.0)])
def test_chances_become_the_true_ones(truth: tuple[float, float]) -> None:
    random = np.random.default_rng(0)
    calibration = Calibration()
    assert calibration.ratios.tolist() == [1, 1], "before any outcome scores are believed"
    first, second = 0.6, 0.3
    trees = chains(np.tile([first, second], (32, 1)))
    for _ in range(400):
        hit = random.random(32) < first * truth[0]
        deeper = hit & (random.random(32) < second * truth[1] / (first * truth[0]))
        calibration.record(trees, hit.astype(np.int64) + deeper)
    assert calibration.ratios == pytest.approx(truth, rel=0.1)
    for _ in range(200):  # what was true long ago is forgotten
        calibration.record(trees, np.zeros(32, np.int64))
    assert (calibration.ratios < 0.05).all()


@given(seed=st.integers(0, 2**32), num_trees=st.integers(0, 6), more=st.integers(0, 3))
def test_cut_trees_are_the_first_nodes_of_each(seed: int, num_trees: int, more: int) -> None:
    random = np.random.default_rng(seed)
    trees = random_trees(random, num_trees, 8)
    sizes = random.integers(0, trees.sizes + 1)
    found = cut_trees(trees, sizes, num_trees + more)
    assert found.sizes.tolist() == sizes.tolist() + [0] * more
    for tree, part, size in zip(trees, found, sizes.tolist(), strict=False):
        for name in ("token_ids", "parents", "scores"):
            assert getattr(part, name).tolist() == getattr(tree.first(size), name).tolist()


# DraftGate


def drive(gate: DraftGate, num_steps: int, gain: Callable[[int], float], *, is_late: bool = False) -> list[bool]:
    """Which steps are drafted for, where drafts give `gain` times the tokens per second.

    `is_late`: as in an engine, a step is recorded when the next one has been drafted for.
    """
    drafted: list[bool] = []
    for step in range(num_steps):
        drafted.append(gate.wants_drafts())
        for wants in drafted[-2:-1] if is_late else drafted[-1:]:
            gate.record(drafted=wants, num_tokens=100, seconds=1 / gain(step) if wants else 1.0)
    return drafted


def runs(drafted: list[bool]) -> list[tuple[bool, int]]:
    """Lengths of equal stretches."""
    found: list[tuple[bool, int]] = []
    for wants in drafted:
        count = found.pop()[1] if found and found[-1][0] == wants else 0
        found.append((wants, count + 1))
    return found


def test_where_drafts_never_pay_pauses_double_up_to_their_limit() -> None:
    pauses = [2, 16, 32, 64, 128, 256, 512, 1024, 1024, 1024]
    for late in (0, 1):
        found = runs(drive(DraftGate(), 5000, lambda step: 1.04, is_late=late == 1))
        # A late record makes each stretch one step longer, and no more.
        pairs = [pair for pause in pauses for pair in ((False, pause + late), (True, 4 + late))]
        assert found[: 2 * len(pauses)] == pairs


def test_where_drafts_pay_one_step_in_64_goes_without() -> None:
    found = runs(drive(DraftGate(), 1000, lambda step: 1.1))
    assert found[0] == (False, 2)
    assert found[1] == (True, 4 + CHECK_EVERY - 1)
    assert set(found[2:-1]) == {(False, 1), (True, CHECK_EVERY - 1)}


def test_a_gain_that_comes_or_goes_is_noticed() -> None:
    drafted = drive(DraftGate(), 3000, lambda step: 0.5 if step < 500 else 2.0 if step < 1500 else 0.5)
    assert np.mean(drafted[:500]) < 0.1
    assert np.mean(drafted[1100:1500]) > 0.95
    assert np.mean(drafted[1520:]) < 0.1
    assert any(drafted[1520:1600]), "pauses begin short again once drafts have paid"


# DraftControl


def control_of(cost: StepCost, **changes: Any) -> DraftControl:
    values: dict[str, Any] = {"fixed": None, "num_slots": 64, "max_slowdown": AUTO_SLOWDOWN}
    return DraftControl(cost, **(values | changes))


def wants_after_failures(control: DraftControl, begin: Callable[[], None], num_sequences: int) -> list[bool]:
    """Teach the class of 32 training samples without history that drafts fail; then begin something else."""
    control.begin_rollout("train")
    control.add_request(has_history=False)
    for _ in range(300):
        asked = control.max_nodes(32, 8) > 0
        control.record(
            trees=chains(np.full((32, 2), 0.9)) if asked else DraftTrees.empty(32),
            num_accepted=np.zeros(32, np.int64),
            num_sequences=32,
            num_rows=96 if asked else 32,
            drafted=asked,
            draft_seconds=0.0,
            seconds=3.0 if asked else 1.0,
        )
    begin()
    found = []
    for _ in range(6):
        found.append(control.max_nodes(num_sequences, 8) > 0)
        control.record(
            trees=DraftTrees.empty(num_sequences),
            num_accepted=np.zeros(num_sequences, np.int64),
            num_sequences=num_sequences,
            num_rows=num_sequences,
            drafted=found[-1],
            draft_seconds=0.0,
            seconds=1.0,
        )
    return found


@pytest.mark.parametrize(
    ("purpose", "num_known", "num_sequences", "is_new"),
    [
        ("train", 0, 32, False),
        ("train", 0, 40, False),  # the same power of two
        ("train", 1, 40, False),  # of 20: hardly a history
        ("train", 20, 32, True),
        ("train", 0, 8, True),
        ("eval", 0, 32, True),
        ("generate", 0, 32, True),
    ],
)
def test_what_is_learned_is_kept_apart_by_purpose_history_and_size(
    purpose: Any, num_known: int, num_sequences: int, is_new: bool
) -> None:
    control = control_of(probed(lambda rows: 1.0 + rows / 1000))

    def begin() -> None:
        control.begin_rollout(purpose)
        for index in range(20):
            control.add_request(has_history=index < num_known)

    found = wants_after_failures(control, begin, num_sequences)
    assert found == ([False, False, True, True, True, True] if is_new else [False] * 6)
    begin()
    trees = chains(np.full((num_sequences, 2), 0.02))  # too little, where the chance is known to be even lower
    ratios = control._calibration(num_sequences).ratios
    assert (ratios[0] == 1) == is_new
    assert control.choose(trees, num_sequences, 0).sum() == 0 or is_new
    control.begin_rollout("train")
    control.add_request(has_history=False)
    assert control._calibration(32).ratios[0] < 0.3, "an evaluation has erased nothing"


@pytest.mark.parametrize("fixed", [0, 1, 3, 100])
def test_a_fixed_budget_is_the_first_nodes_of_each_tree_whatever_they_cost(fixed: int) -> None:
    control = control_of(StepCost(EDGES), fixed=fixed)  # a cost that is not known
    assert control.max_nodes(12, 64) == min(fixed, 64)
    assert control.score_floor(12) == 0
    trees = random_trees(np.random.default_rng(fixed), 12, 10)
    assert control.choose(trees, 12, 5).tolist() == trees.sizes.tolist()


def test_nothing_is_asked_without_sequences_or_a_known_cost() -> None:
    assert control_of(probed(lambda rows: 1.0)).max_nodes(0, 8) == 0
    unknown = control_of(StepCost(EDGES))
    assert [unknown.max_nodes(4, 8) for _ in range(10)] == [0] * 10
    assert unknown.run_ahead_rows(4) == 0
    assert unknown.has_room_for_run_aheads()


@pytest.mark.parametrize(
    ("points", "slowdown", "rows", "has_room"),
    [
        # A row as dear as a token, and a stair's padding: what is decoded ahead costs as much now as it saves later.
        (((1, 1.0), (1000, 1000.0)), "auto", 0, False),
        (((8, 1.0), (16, 2.0), (1000, 125.0)), "auto", 4, False),
        (((1, 1.0), (1000, 1000.0)), 0.5, 2, False),
        (((1, 1.0), (1000, 1000.0)), 16.0, 64, True),
        (((1, 1.0), (10, 1.0), (100, 3.7)), "auto", 7, True),
        (((1, 1.0), (10, 1.0), (100, 3.7)), 0.0, 6, True),
        (((1, 1.0), (10, 1.0), (100, 3.7)), 0.5, 22, True),
        (((1, 1.0), (1000, 1.0)), "auto", MAX_ROWS - 4, True),
        (((1, 1.0), (1000, 1000.0)), float("inf"), MAX_ROWS, True),
    ],
)
def test_run_aheads_have_the_rows_that_are_nearly_free(
    points: tuple[tuple[int, float], ...], slowdown: Any, rows: int, has_room: bool
) -> None:
    control = control_of(StepCost(points=points), num_slots=5, max_slowdown=slowdown_of(slowdown))
    assert control.run_ahead_rows(4) == rows
    assert control.run_ahead_rows(0) == (MAX_ROWS if slowdown == float("inf") else 0), "no step yet"
    assert control.has_room_for_run_aheads() == has_room


# Whole runs


DEPTH = 12
TEMPLATE = np.array([ROOT, ROOT, 0, *range(2, DEPTH)])
"""Parents of a chain whose second node is a sibling of the first."""
LEVELS = np.array([1, 1, *range(2, DEPTH + 1)])
SIBLING = 1


@dataclass(slots=True)
class World:
    """A drafter whose scores are off in a known way, and steps of a known cost.

    In each step a sequence's draft has a quality of its own; a node is accepted with `acceptance` times its conditional
    score.
    """

    batch: int
    seconds: Callable[[int], float]
    """True cost of a step by its rows."""
    draft_seconds: float = 0.0
    quality: float = 1.0
    """Factor of the conditional scores."""
    noise: float = 0.0
    """Standard deviation of a measured step's seconds, as a share."""
    acceptance: float = 0.75
    """True chance of a node, by its conditional score."""
    spent: float = 0.0
    tokens: float = 0.0
    """Expected ones, by the true chances of what was verified: less noisy than those emitted."""
    num_drafted: int = 0
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def propose(self, most: int, floor: float) -> tuple[DraftTrees, FloatArray, FloatArray]:
        """Trees in order of falling score, whose tokens say which node of `TEMPLATE` it is.

        Also the true chance of each such node, [B, nodes], and that of a main node after its parent, [B, DEPTH].
        """
        means = self.random.beta(2, 1, (self.batch, 1))
        noise = self.random.uniform(-0.2, 0.2, (self.batch, DEPTH))
        raw = np.clip(means + noise, 0.02, 0.98)
        siblings = self.quality * (1 - raw[:, :1]) / 3
        paths = np.cumprod(self.quality * raw, axis=1)
        scores = np.concatenate([paths[:, :1], siblings, paths[:, 1:]], axis=1)  # [B, nodes]
        order = np.argsort(-scores, axis=1, kind="stable")
        parents = np.where(TEMPLATE[order] == ROOT, ROOT, np.take_along_axis(order.argsort(1), TEMPLATE[order], 1))
        ordered = np.take_along_axis(scores, order, 1)
        keep = (ordered >= floor) & (np.arange(scores.shape[1]) < most)
        trees = DraftTrees(
            token_ids=order[keep].astype(np.int32),
            parents=parents[keep].astype(np.int32),
            scores=ordered[keep].astype(np.float32),
            offsets=np.append(0, keep.sum(axis=1).cumsum()).astype(np.int64),
        )
        return trees, scores * self.acceptance**LEVELS, self.acceptance * self.quality * raw

    def step(self, control: DraftControl) -> None:
        """One step of an engine: ask, choose, emit, learn."""
        batch = self.batch
        most = control.max_nodes(batch, DEPTH + 1)
        trees, chances, conditionals = self.propose(most, control.score_floor(batch))
        if most:
            trees = cut_trees(trees, control.choose(trees, batch, 0), batch)
        owners = np.repeat(np.arange(batch), trees.sizes)
        num_main = np.bincount(owners[trees.token_ids != SIBLING], minlength=batch)
        has_sibling = np.bincount(owners[trees.token_ids == SIBLING], minlength=batch) > 0
        draws = self.random.random((batch, DEPTH))
        reached = np.cumprod(draws < conditionals, axis=1).sum(axis=1)
        by_sibling = (reached == 0) & (draws[:, 0] < conditionals[:, 0] + chances[:, SIBLING]) & has_sibling
        num_accepted = np.minimum(reached, num_main) + by_sibling
        seconds = self.seconds(batch + trees.num_nodes)
        draft_seconds = self.draft_seconds if most else 0.0
        measured = seconds * max(1 + self.noise * self.random.standard_normal(), 0.2)
        control.record(
            trees=trees,
            num_accepted=num_accepted,
            num_sequences=batch,
            num_rows=batch + trees.num_nodes,
            drafted=most > 0,
            draft_seconds=draft_seconds,
            seconds=measured + draft_seconds,
        )
        self.spent += seconds + draft_seconds
        self.tokens += batch + float(chances[owners, trees.token_ids].sum())
        self.num_drafted += most > 0

    def run(self, control: DraftControl, num_steps: int) -> float:
        """Do as many steps; returns their expected tokens per second."""
        self.spent = self.tokens = 0.0
        self.num_drafted = 0
        for _ in range(num_steps):
            self.step(control)
        return self.tokens / self.spent

    def best_fixed_rate(self) -> float:
        """Tokens per second of the best fixed number of nodes; none at all costs no drafting either."""
        wide = replace(self, batch=2000, random=np.random.default_rng(1))
        trees, chances, _ = wide.propose(DEPTH + 1, 0.0)
        in_order = chances[np.repeat(np.arange(2000), DEPTH + 1), trees.token_ids].reshape(2000, -1)
        gains = in_order.mean(axis=0).cumsum()
        rates = [self.rate_without_drafts]
        for num_nodes, gain in enumerate(gains.tolist(), 1):
            seconds = self.seconds(self.batch * (1 + num_nodes)) + self.draft_seconds
            rates.append(self.batch * (1 + gain) / seconds)
        return max(rates)

    @property
    def rate_without_drafts(self) -> float:
        """Tokens per second of steps without drafts."""
        return self.batch / self.seconds(self.batch)

    def control(self) -> DraftControl:
        """As an engine makes it: forward passes are timed, but a step has host work as well."""
        return control_of(probed(lambda rows: 0.6 * self.seconds(rows), self.batch))


COSTS: dict[str, Callable[[int], float]] = {
    "a small CPU: dear rows": lambda rows: 1e-3 + 1e-4 * padded(rows),
    "a CPU": lambda rows: 20e-3 + 5e-4 * padded(rows),
    "level, then linear": lambda rows: 2e-3 * max(1.0, rows / 256),
    "stairs": lambda rows: 1e-3 * (1 + -(-rows // 64)),
}


@pytest.mark.parametrize("name", COSTS)
@pytest.mark.parametrize("batch", [1, 2, 4, 8, 16, 32, 64, 128, 256])
def test_no_fixed_budget_is_much_better_and_none_is_hardly_better(name: str, batch: int) -> None:
    world = World(batch=batch, seconds=COSTS[name], draft_seconds=0.005 * COSTS[name](batch), noise=0.03)
    control = world.control()
    world.run(control, 150)  # costs and chances are learned
    rate = world.run(control, 400)
    assert rate > 0.95 * world.best_fixed_rate()
    assert rate > 0.97 * world.rate_without_drafts


@pytest.mark.parametrize("name", COSTS)
@pytest.mark.parametrize("batch", [1, 16, 128])
def test_where_drafts_never_pay_trying_them_costs_little(name: str, batch: int) -> None:
    """From the first step on, with drafts that are nearly always wrong and slow to make."""
    cost = COSTS[name]
    world = World(batch=batch, seconds=cost, draft_seconds=0.05 * cost(batch), quality=0.1, noise=0.03)
    assert world.run(world.control(), 400) > 0.97 * world.rate_without_drafts


@pytest.mark.parametrize("quality", [0.02, 0.3])
def test_drafts_that_come_to_pay_are_found(quality: float) -> None:
    cost = COSTS["a CPU"]
    world = World(batch=4, seconds=cost, draft_seconds=0.05 * cost(4), quality=quality)
    control = world.control()
    world.run(control, 600)
    world.quality = 1.0
    world.run(control, 1500)
    world.run(control, 100)
    assert world.num_drafted > 90
    assert world.tokens / world.spent > 0.95 * world.best_fixed_rate()


def test_a_floor_that_leaves_no_node_falls_until_it_leaves_some() -> None:
    """Scores become lower than the floor that high ones have set: the drafter must not fall silent for good."""
    control = control_of(StepCost(points=[(1, 1.0), (2, 1.0), (3, 2.0), (400, 300.0)]))
    for _ in range(2):
        control.max_nodes(1, 8)
        control.record(
            trees=DraftTrees.empty(1),
            num_accepted=np.zeros(1, np.int64),
            num_sequences=1,
            num_rows=1,
            drafted=True,
            draft_seconds=1.0,
            seconds=1.0,
        )
    assert control.choose(chains(np.array([[0.9, 0.1]])), 1, 0).tolist() == [1]
    assert control.score_floor(1) == pytest.approx(FLOOR_SHARE * 0.9)
    num_silent = 0
    while control.score_floor(1) > 0.1:
        assert control.choose(DraftTrees.empty(1), 1, 0).tolist() == [0]
        num_silent += 1
    assert num_silent <= 4
    assert control.choose(chains(np.array([[0.1]])), 1, 0).tolist() == [1]
