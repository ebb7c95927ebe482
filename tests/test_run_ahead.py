"""Which samples run ahead, in which order, and in how many rows; `test_scheduler.py` has slots and pages."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from engine_cases import requests_for
from tiny_run import make_recipe

from srtrl import build, ranks
from srtrl.drafters.none import Drafter as NoDrafter
from srtrl.engine.batch import Batch
from srtrl.engine.draft_budget import MAX_ROWS, StepCost
from srtrl.engine.page_pool import PagePool
from srtrl.features.run_ahead import RunAhead
from srtrl.types import Request


def run_ahead(cost: StepCost | None = None, max_slowdown: float = 0.03) -> RunAhead:
    return RunAhead(Batch(4, 64, PagePool(100, 4), 0), cost or StepCost(), NoDrafter(), max_slowdown=max_slowdown)


def test_run_aheads_have_the_rows_that_are_nearly_free() -> None:
    dear, level = ((1, 1.0), (1000, 1000.0)), ((1, 1.0), (10, 1.0), (100, 3.7))
    cases: list[tuple[tuple[tuple[int, float], ...], float, int]] = [
        (dear, 0.03, 0),  # a row as dear as a token
        (((8, 1.0), (16, 2.0), (1000, 125.0)), 0.03, 4),  # a bucket's padding
        (dear, 16.0, 64),
        (level, 0.03, 7),
        (level, 0.5, 22),
    ]
    for points, slowdown, rows in cases:
        background = run_ahead(StepCost(points=points), slowdown)
        assert background.max_rows(4, is_alone=False) == rows
        assert background.max_rows(0, is_alone=False) == 0, "no step yet"
        assert background.max_rows(4, is_alone=True) == MAX_ROWS
    assert run_ahead(StepCost(range(8, 2056, 8))).max_rows(4, is_alone=False) == 0, "no cost yet"


def test_each_draw_runs_ahead_once_in_a_rollout() -> None:
    background = run_ahead()
    chosen = [list(background.choose(range(*draws))) for draws in ((4, 8), (5, 9), (5, 7), (9, 10))]
    assert chosen == [[4, 5, 6, 7], [8], [], [9]]
    background.clear()
    assert list(background.choose(range(5, 9))) == [5, 6, 7, 8]


def queued(background: RunAhead) -> list[Request]:
    return list(background._line.values())


def test_run_aheads_wait_breadth_first_end_after_a_turn_and_each_rank_begins_with_others() -> None:
    requests = [replace(one, has_turns=True) for one in requests_for(((1,), (2,)), num_samples=2)]
    first = [requests[number] for number in (0, 2, 1, 3)]
    for rank, order in ((0, [0, 2, 1, 3]), (1, [1, 3, 0, 2])):
        with ranks.use(rank, 2):
            background = run_ahead()
            background.add(requests)
        assert queued(background) == [replace(first[number], has_turns=False) for number in order]
    background = run_ahead()
    background.add(requests)
    assert [one.rng_key for one in queued(background)] == [one.rng_key for one in first]
    assert background.cancel(first[0].rng_key) == {}
    assert len(queued(background)) == 3
    with pytest.raises(AssertionError, match="two run-aheads have the same RNG key"):
        background.add(requests)


@pytest.mark.parametrize(
    ("changes", "runs_ahead"),
    [
        ({}, True),
        ({"rollout__draft_budget": 8}, True),
        ({"rollout__draft_budget": 0}, False),
        ({"rollout__drafter": "ngram"}, False),
        ({"rollout__drafter": "none"}, False),
        ({"rollout__run_ahead_max_slowdown": None}, False),
    ],
)
def test_there_are_run_aheads_where_drafts_come_from_them_and_they_are_allowed(
    changes: dict[str, Any], runs_ahead: bool, tmp_path: Path
) -> None:
    recipe = make_recipe(Path("none"), tmp_path, **changes)
    assert isinstance(
        build.build_background(recipe, build.build_drafter(recipe)), partial if runs_ahead else type(None)
    )
