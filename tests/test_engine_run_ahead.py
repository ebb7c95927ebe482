"""Run-aheads in the real decoder: the completions are the same bits, and the run-aheads say what samples would."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import pytest
import torch
from engine_cases import Listener, decode, options, outputs, requests_for, tiny_policy

from srtrl.drafters.base import DrafterBase, Int64Array
from srtrl.drafters.draft_tree import DraftTrees
from srtrl.engine.engine import Engine
from srtrl.types import Request


def ahead_of(requests: Sequence[Request]) -> list[Request]:
    return [replace(one, is_run_ahead=True) for one in requests]


@pytest.mark.parametrize(("slots", "num_pages"), [(4, None), (7, 14), (16, None), (64, 40)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_run_aheads_change_no_bit_and_are_the_samples_they_stand_for(
    dtype: torch.dtype, slots: int, num_pages: int | None
) -> None:
    policy = tiny_policy(dtype)
    requests = requests_for()
    expected = outputs(decode(Engine(policy, options(slots=1)), requests))
    coming = [*requests_for(seed=5), *(replace(one, draw_index=10 + one.draw_index) for one in requests_for(seed=6))]
    listener = Listener()
    unlimited = options(slots=slots, num_pages=num_pages, run_ahead_max_slowdown=float("inf"))
    engine = Engine(policy, unlimited, drafter=listener)
    completions = {
        (completion.request.draw_index, completion.request.sample_index): completion
        for completion in engine.generate(requests, run_ahead=ahead_of(coming))
    }
    assert outputs(completions) == expected
    assert not listener.live
    assert engine.pool.num_used == 0
    assert any(listener.said.values())
    truth = {c.request.rng_key: c.token_ids for c in decode(Engine(policy, options(slots=1)), coming).values()}
    for rng_key, said in listener.said.items():
        assert said == truth[rng_key][: len(said)]


@pytest.mark.parametrize(("uses_run_aheads", "max_slowdown", "expected"), [(True, 0.03, True), (False, 0.03, False)])
def test_with_a_fixed_budget_the_cost_is_measured_where_run_aheads_need_it(
    uses_run_aheads: bool, max_slowdown: float, expected: bool
) -> None:
    drafter = Listener()
    drafter.uses_run_aheads = uses_run_aheads
    settings = options(slots=4, draft_budget=2, max_sequence_tokens=48, run_ahead_max_slowdown=max_slowdown)
    engine = Engine(tiny_policy(), settings, drafter=drafter)
    list(engine.generate(requests_for(), run_ahead=ahead_of(requests_for(seed=5))))
    assert engine.control.cost.is_known == expected


class NeverAsked(DrafterBase):
    """Has nothing to say."""

    def propose(self, slots: Int64Array, max_nodes: Int64Array) -> DraftTrees:
        raise AssertionError("asked for drafts that nobody wants")


def test_a_step_of_run_aheads_alone_asks_for_no_drafts() -> None:
    """The primaries' prompts may still be on their way."""
    unlimited = options(slots=4, run_ahead_max_slowdown=float("inf"))
    engine = Engine(tiny_policy(), unlimited, drafter=NeverAsked())
    long, short = requests_for([tuple(range(20)), (5,)], num_samples=1, max_new_tokens=40)
    engine.add(long)
    engine.scheduler.add(ahead_of([short])[0])
    for _ in range(3):  # 7, 7 and 5 of the prompt's tokens
        engine.step()
    timeline = engine.take_timeline()
    assert all(step.num_primaries == 0 for step in timeline)
    assert timeline[-1].num_run_ahead == 1


@pytest.mark.parametrize(
    ("points", "max_slowdown", "expected"),
    [
        # A row as dear as a token, and a stair's padding: 7 rows beside 1 are free.
        (((1, 1.0), (1000, 1000.0)), "auto", False),
        (((8, 1.0), (16, 2.0), (1000, 125.0)), "auto", False),
        (((1, 1.0), (1000, 1000.0)), 16.0, True),
        (((1, 1.0), (1000, 1000.0)), float("inf"), True),
        (((1, 1.0), (1000, 1.0)), "auto", True),
    ],
)
def test_run_aheads_are_wanted_where_steps_have_the_rows(
    points: tuple[tuple[int, float], ...], max_slowdown: Literal["auto"] | float, expected: bool
) -> None:
    policy = tiny_policy()
    chosen = options(slots=5, draft_budget="auto", cost_points=points, run_ahead_max_slowdown=max_slowdown)
    assert Engine(policy, chosen, drafter=Listener()).wants_run_aheads() == expected
    assert not Engine(policy, chosen, drafter=NeverAsked()).wants_run_aheads(), "it does not use them"
    assert not Engine(policy, options(draft_budget=0), drafter=Listener()).wants_run_aheads(), "nothing is drafted"
