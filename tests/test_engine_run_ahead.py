"""Run-aheads in the real decoder: the completions are the same bits, and the run-aheads say what samples would."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import pytest
import torch
from engine_cases import decode, options, outputs, requests_for, tiny_policy

from srtrl.drafters.base import DrafterBase
from srtrl.drafters.draft_tree import DraftTrees
from srtrl.drafters.none import Drafter
from srtrl.drafters.srt import Drafter as SrtDrafter
from srtrl.engine.engine import Engine
from srtrl.engine.page_pool import PagePool
from srtrl.engine.scheduler import Scheduler
from srtrl.engine.sequence import PromptPages, ScheduledStep
from srtrl.engine.sequence import Sequence as Sample
from srtrl.engine.speculation import MAX_ROWS, UNLIMITED, Speculation
from srtrl.engine.step_cost import StepCost
from srtrl.types import Completion, Request


class Listener(Drafter):
    """Checks that it hears of each sample once, from start to finish; keeps what run-aheads said by rng_key."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, Request] = {}
        self.said: dict[int, list[int]] = {}

    def start(self, sequence_id: int, request: Request) -> None:
        assert sequence_id not in self.live
        self.live[sequence_id] = request
        if request.is_run_ahead:
            assert request.rng_key not in self.said
            self.said[request.rng_key] = []

    def observe(self, sequence_ids: Sequence[int], token_ids: Sequence[Sequence[int]]) -> None:
        for sequence_id, tokens in zip(sequence_ids, token_ids, strict=True):
            if self.live[sequence_id].is_run_ahead:
                self.said[self.live[sequence_id].rng_key] += tokens

    def finish(self, sequence_id: int, completion: Completion | None) -> None:
        request = self.live.pop(sequence_id)
        assert (completion is None) == request.is_run_ahead


@pytest.mark.parametrize(("slots", "num_pages"), [(4, None), (7, 14), (16, None), (64, 40)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_run_aheads_change_no_bit_and_are_the_samples_they_stand_for(
    dtype: torch.dtype, slots: int, num_pages: int | None
) -> None:
    policy = tiny_policy(dtype)
    requests = requests_for()
    expected = outputs(decode(Engine(policy, options(slots=1)), requests))
    coming, further = requests_for(seed=5), requests_for(seed=6)
    ahead = [replace(request, is_run_ahead=True) for request in coming]
    ahead += [replace(request, is_run_ahead=True, ends_with_prompt=True) for request in further]
    listener = Listener()
    engine = Engine(
        policy,
        options(slots=slots, num_pages=num_pages, run_ahead_max_slowdown=float("inf")),
        drafter=listener,
    )
    completions = {
        (completion.request.draw_index, completion.request.sample_index): completion
        for completion in engine.generate(requests, run_ahead=ahead)
    }
    assert outputs(completions) == expected
    assert not listener.live
    assert engine.pool.num_used == 0
    assert any(listener.said.values())
    later = [*coming, *(replace(request, draw_index=10 + request.draw_index) for request in further)]
    truth = {c.request.rng_key: c.token_ids for c in decode(Engine(policy, options(slots=1)), later).values()}
    for rng_key, said in listener.said.items():
        assert said == truth[rng_key][: len(said)]


def test_with_a_fixed_budget_the_run_aheads_have_the_cost_measured() -> None:
    engine = Engine(tiny_policy(torch.float32), options(slots=4, draft_budget=2), drafter=SrtDrafter())
    list(engine.generate(requests_for()))
    assert not engine.speculation.cost.is_known
    list(engine.generate(requests_for(), run_ahead=[replace(one, is_run_ahead=True) for one in requests_for(seed=5)]))
    assert engine.speculation.cost.is_known


def speculation_of(
    drafter: DrafterBase, points: Sequence[tuple[int, float]], max_slowdown: Literal["auto"] | float = "auto"
) -> Speculation:
    return Speculation(
        drafter,
        vocab_size=10,
        draft_budget="auto",
        max_draft_nodes=8,
        run_ahead_max_slowdown=max_slowdown,
        num_slots=5,
        cost=StepCost.from_points(points),
    )


class NeverAsked(DrafterBase):
    """Has nothing to say."""

    def propose(self, sequence_ids: Sequence[int], max_nodes: Sequence[int]) -> DraftTrees:
        raise AssertionError("asked for drafts that nobody wants")


def test_a_step_of_run_aheads_alone_asks_for_no_drafts() -> None:
    """The primaries' prompts may still be on their way."""
    (request,) = requests_for([(1, 2)], num_samples=1)
    ahead = Sample(
        token_ids=[1, 2], sequence_id=0, request=replace(request, is_run_ahead=True), prompt=PromptPages([1, 2])
    )
    speculation = speculation_of(NeverAsked(), ((1, 1.0), (100, 1.0)))
    scheduler = Scheduler(PagePool(4, 4), num_slots=2, prefill_chunk_tokens=4)
    draft = speculation.draft(ScheduledStep(decodes=[ahead], num_primaries=0), scheduler)
    assert not draft.was_asked
    assert draft.verified.num_nodes == 0


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
    assert speculation_of(SrtDrafter(), points, max_slowdown).wants_run_aheads() == expected
    assert not speculation_of(NeverAsked(), points, max_slowdown).wants_run_aheads(), "it does not use them"


@pytest.mark.parametrize(
    ("points", "max_slowdown", "expected"),
    [
        # A row as dear as a token: what is decoded ahead costs as much now as it saves later.
        (((1, 1.0), (1000, 1000.0)), "auto", 0),
        (((1, 1.0), (1000, 1000.0)), 0.5, 2),
        # 10 rows are free; a token saves half of a tenth of 1.0, and the next row costs 0.03.
        (((1, 1.0), (10, 1.0), (100, 3.7)), "auto", 7),
        (((1, 1.0), (10, 1.0), (100, 3.7)), 0.0, 6),
        (((1, 1.0), (10, 1.0), (100, 3.7)), 0.5, 22),
        (((1, 1.0), (1000, 1.0)), "auto", MAX_ROWS),
        (((1, 1.0), (1000, 1.0)), float("inf"), UNLIMITED),
    ],
)
def test_run_aheads_have_the_rows_that_pay(
    points: tuple[tuple[int, float], ...], max_slowdown: Literal["auto"] | float, expected: int
) -> None:
    speculation = speculation_of(Drafter(), points, max_slowdown)
    assert speculation.max_run_ahead_rows() == (UNLIMITED if expected == UNLIMITED else 0), "no step yet"
    speculation._num_rows = 4
    assert speculation.max_run_ahead_rows() == expected
