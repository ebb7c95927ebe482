"""Rollouts come back in data order, whatever finishes first; a dynamic batch is the shortest prefix that suffices."""

import random
from collections.abc import Sequence
from typing import Any, cast
from unittest.mock import Mock, call

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_cases import FakeEngine, FakeGrader, make_collector, prompt_of
from transformers import PreTrainedTokenizerBase

from srtrl.engine.engine import Engine
from srtrl.metrics import StageTimer
from srtrl.model.noise import make_rng_key
from srtrl.rollout.collect import FixedDraws, collect_rollouts
from srtrl.rollout.dynamic_sampling import DrawsUntilFull
from srtrl.rollout.turns import response_text
from srtrl.types import Prompt, RolloutGroup
from srtrl.warm_start.training import train_tokenizer

DRAWS = [(2, prompt_of(1)), (0, prompt_of(3)), (1, prompt_of(1)), (7, prompt_of(0))]  # prompt 1 is drawn twice


def sample_number(prompt: Prompt, text: str) -> float:
    return float(text.rpartition("/")[-1])


COLLECTOR = make_collector(FakeGrader(sample_number, random.Random(0)))
"""For the requests that it makes."""


def collect(engine: FakeEngine, grader: FakeGrader, **options: Any) -> list[RolloutGroup]:
    collector = make_collector(grader, **options)
    return collect_rollouts(cast(Engine, engine), collector, FixedDraws(DRAWS))


def test_order_is_data_order_whatever_finishes_first() -> None:
    results = []
    for seed in range(5):
        progress = Mock()
        timer = StageTimer()
        grader = FakeGrader(sample_number, random.Random(seed), waits=True)
        engine = FakeEngine(seed)
        results.append(collect(engine, grader, on_progress=progress, timer=timer))
        assert progress.call_args_list == [call(n, 8) for n in range(1, 9)]
        assert set(timer.take()) == {"rollout", "grading"}
        # the grader gets the text up to the stop string, and the number of all tokens
        expected = {(f"{draw}/{sample}", "stop", 3) for draw, _ in DRAWS for sample in range(2)}
        assert {submitted[1:] for submitted in grader.submitted} == expected
        assert grader.batches == [8]
        rng_keys = {(one.draw_index, one.sample_index): one.rng_key for one in engine.added}
        assert rng_keys == {(d, s): make_rng_key(11, "train", d, s) for d, _ in DRAWS for s in range(2)}
    for groups in results:
        assert repr(groups) == repr(results[0])  # arrays have no `==` for all of them
        found = [(group.draw_index, group.prompt.prompt_id) for group in groups]
        assert found == [(0, "3"), (1, "1"), (2, "1"), (7, "0")]
        for group in groups:  # each sample has its own text and its own grade
            samples = [(one.sample_index, one.text, one.grade.reward, one.policy_version) for one in group.rollouts]
            assert samples == [(i, f"{group.draw_index}/{i}", float(i), 3) for i in range(2)]


def test_response_text_is_cut_at_the_first_stop_string() -> None:
    tokenizer: PreTrainedTokenizerBase = train_tokenizer([], 257)
    token_ids = [*tokenizer.encode("one END two STOP three"), 0]
    assert response_text(tokenizer, token_ids, ()) == "one END two STOP three"  # without the end token
    assert response_text(tokenizer, token_ids, ("STOP", "END")) == "one "
    assert response_text(tokenizer, token_ids, ("absent",)) == "one END two STOP three"


def test_a_stage_inside_another_pauses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([1.0, 2.0, 5.0, 11.0, 20.0, 21.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    timer = StageTimer()
    with timer.stage("rollout"), timer.stage("grading"):  # 1 to 2 and 5 to 11; 2 to 5
        pass
    with pytest.raises(KeyError), timer.stage("grading"):  # 20 to 21
        raise KeyError
    assert timer.take() == {"rollout": 7.0, "grading": 4.0}
    assert timer.take() == {}


# --- Dynamic sampling ------------------------------------------------------------------------------------------------

NUM_SAMPLES = 2
FIRST_DRAW = 5


class Case:
    """One batch over fakes; `pattern` says which draws the filters keep, from FIRST_DRAW on."""

    def __init__(self, pattern: Sequence[bool], limits: dict[str, int], seed: int) -> None:
        self.pattern = pattern
        self.limits = limits
        self.engine = FakeEngine(seed)
        self.grader = FakeGrader(
            lambda prompt, _: float(pattern[int(prompt.prompt_id) - FIRST_DRAW]), random.Random(seed + 1)
        )
        self.undecided: set[int] = set()
        self.max_open = 0
        self.coming: list[int] = []

    def opened(self, draws: range) -> None:
        """Called as draws are opened: what is open now?"""
        self.undecided |= set(draws)
        self.max_open = max(self.max_open, len(self.undecided))
        self.coming.append(draws.stop)
        self.engine.early += COLLECTOR.requests([(draws.stop, prompt_of(draws.stop))])

    def keeps(self, group: RolloutGroup) -> bool:
        self.undecided.remove(group.draw_index)
        return group.rollouts[0].grade.reward > 0

    def run(self) -> tuple[list[RolloutGroup], list[RolloutGroup]]:
        collector = make_collector(self.grader)
        draws = DrawsUntilFull(prompt_of, first_draw=FIRST_DRAW, **self.limits, keeps=self.keeps, on_open=self.opened)
        groups = collect_rollouts(cast(Engine, self.engine), collector, draws)
        return groups, draws.kept_groups(groups)


def shortest_prefix(pattern: Sequence[bool], limits: dict[str, int]) -> list[bool]:
    """The definition, without any engine: go through the draws one by one until the batch is full."""
    prefix: list[bool] = []
    while sum(prefix) < limits["num_prompts"] and len(prefix) < limits["max_draws"]:
        prefix.append(pattern[len(prefix)])
    return prefix


@settings(deadline=None)  # the machine may be busy
@given(data=st.data())
def test_the_batch_is_the_shortest_prefix_that_fills_it(data: st.DataObject) -> None:
    num_prompts = data.draw(st.integers(1, 6), "num_prompts")
    limits = {"num_prompts": num_prompts, "max_draws": data.draw(st.integers(num_prompts, 25), "max_draws")}
    pattern = data.draw(st.lists(st.booleans(), min_size=25, max_size=25), "kept")
    prefix = shortest_prefix(pattern, limits)
    draws = list(range(FIRST_DRAW, FIRST_DRAW + len(prefix)))
    for seed in data.draw(st.lists(st.integers(0, 10**6), min_size=2, max_size=2), "timing"):
        case = Case(pattern, limits, seed)
        groups, kept_groups = case.run()
        assert [group.draw_index for group in groups] == draws
        assert [group.draw_index for group in kept_groups] == [d for d, kept in zip(draws, prefix, strict=True) if kept]
        for group in groups:
            assert group.prompt == prompt_of(group.draw_index)
            assert [(r.draw_index, r.sample_index) for r in group.rollouts] == [(group.draw_index, i) for i in (0, 1)]
            assert [r.text for r in group.rollouts] == [f"{group.draw_index}/{i}" for i in (0, 1)]
        assert case.max_open == num_prompts  # all of a batch at once
        assert sorted(request.draw_index for request in case.engine.added) == sorted(draws * NUM_SAMPLES)
        assert case.grader.batches == [NUM_SAMPLES] * len(draws)  # each group by itself
        assert case.undecided == set()
        left = {request.draw_index for request in case.engine.early}
        assert left == {draw for draw in case.coming if draw not in draws}  # opened draws end theirs
