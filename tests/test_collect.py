"""Rollouts come back in data order, whatever the order in which the decoder finishes them."""

import random
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, cast

import pytest
from transformers import PreTrainedTokenizerBase

from srtrl.engine.engine import Engine
from srtrl.engine.sampling import make_rng_key
from srtrl.rollout.collect import Collector, CollectProgress, StageTimer, collect_rollouts, response_text
from srtrl.rollout.run_ahead import run_ahead_requests
from srtrl.tasks.grading import Grader
from srtrl.trainer.warm_start import train_tokenizer
from srtrl.types import Completion, FinishReason, Grade, Prompt, Request, RolloutGroup, SamplingParams


class _FakeEngine:
    """Finishes requests in a random order; the response spells (prompt, sample) in bytes."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, finish_seed: int) -> None:
        self.tokenizer = tokenizer
        self.finish_seed = finish_seed
        self.requests: list[Request] = []
        self.run_ahead: list[Request] = []
        self.leaks_run_aheads = False

    def generate(self, requests: Iterable[Request], *, run_ahead: Iterable[Request] = ()) -> Iterator[Completion]:
        self.requests, self.run_ahead = list(requests), list(run_ahead)
        finished = self.requests + (self.run_ahead if self.leaks_run_aheads else [])
        random.Random(self.finish_seed).shuffle(finished)
        for request in finished:
            text = f"{request.prompt_id}/{request.sample_index}STOP and more"
            token_ids = self.tokenizer.encode(text, add_special_tokens=False)
            yield Completion(
                request=request,
                token_ids=[*token_ids, 0],
                rollout_logprobs=[-0.5] * (len(token_ids) + 1),
                finish_reason="stop",
                policy_version=3,
            )


class _FakeGrader:
    """The reward is the sample number that the graded text ends in; a ticket is a place in `submitted`."""

    def __init__(self) -> None:
        self.submitted: list[tuple[Prompt, str, FinishReason, int]] = []

    def submit(self, prompt: Prompt, text: str, finish_reason: FinishReason, num_tokens: int) -> int:
        self.submitted.append((prompt, text, finish_reason, num_tokens))
        return len(self.submitted) - 1

    def collect(self, tickets: list[int]) -> list[Grade]:
        return [
            Grade(reward=float(self.submitted[ticket][1].rsplit("/")[-1]), parts={}, outcome="correct")
            for ticket in tickets
        ]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return train_tokenizer([], 257)


def prompts(tokenizer: PreTrainedTokenizerBase, count: int) -> list[Prompt]:
    return [
        Prompt(prompt_id=f"p{i}", text=f"p{i}", token_ids=tuple(tokenizer.encode(f"p{i}")), answer="")
        for i in range(count)
    ]


def collect(
    tokenizer: PreTrainedTokenizerBase, engine: _FakeEngine, draws: list[tuple[int, Prompt]], **options: Any
) -> list[RolloutGroup]:
    run_ahead = options.pop("run_ahead", ())
    collector = Collector(
        cast(Grader, options.pop("grader", _FakeGrader())),
        tokenizer,
        num_samples=3,
        sampling=SamplingParams(max_new_tokens=40, end_token_ids=(0,), stop_strings=("STOP",)),
        seed=11,
        purpose="train",
        **options,
    )
    return collect_rollouts(cast(Engine, engine), collector, draws, run_ahead=run_ahead)


def test_order_is_data_order_whatever_finishes_first(tokenizer: PreTrainedTokenizerBase) -> None:
    problems = prompts(tokenizer, 4)
    draws = [(2, problems[1]), (0, problems[3]), (1, problems[1]), (7, problems[0])]  # p1 is drawn twice
    results = [collect(tokenizer, _FakeEngine(tokenizer, finish_seed), draws) for finish_seed in range(5)]
    for groups in results:
        assert groups == results[0]
        assert [group.draw_index for group in groups] == [0, 1, 2, 7]
        assert [group.prompt.prompt_id for group in groups] == ["p3", "p1", "p1", "p0"]
        for group in groups:
            assert [rollout.sample_index for rollout in group.rollouts] == [0, 1, 2]
            # each sample kept its own text and its own grade
            assert [rollout.text for rollout in group.rollouts] == [f"{group.prompt.prompt_id}/{i}" for i in range(3)]
            assert [rollout.grade.reward for rollout in group.rollouts] == [0.0, 1.0, 2.0]


def test_every_sample_has_its_own_stream(tokenizer: PreTrainedTokenizerBase) -> None:
    engine = _FakeEngine(tokenizer, 0)
    problem = prompts(tokenizer, 1)[0]
    collect(tokenizer, engine, [(0, problem), (1, problem)])
    rng_keys = {(r.draw_index, r.sample_index): r.rng_key for r in engine.requests}
    assert len(set(rng_keys.values())) == 6  # two draws of one prompt are two draws
    assert rng_keys[1, 2] == make_rng_key(11, "train", 1, 2)


def test_run_aheads_reach_the_engine_and_never_come_back(tokenizer: PreTrainedTokenizerBase) -> None:
    draws = list(enumerate(prompts(tokenizer, 2)))
    coming = [(draw, prompt) for draw, (_, prompt) in enumerate(draws[::-1], 2)]
    options: dict[str, Any] = {"num_samples": 3, "sampling": SamplingParams(max_new_tokens=40), "seed": 11}
    engine = _FakeEngine(tokenizer, 2)
    alone = collect(tokenizer, engine, draws)
    ahead = run_ahead_requests(coming, **options)
    assert collect(tokenizer, engine, draws, run_ahead=ahead) == alone
    assert engine.run_ahead == ahead
    engine.leaks_run_aheads = True
    with pytest.raises(AssertionError, match="never be learned from"):
        collect(tokenizer, engine, draws, run_ahead=ahead)
    unmarked = [replace(request, is_run_ahead=False) for request in ahead]
    with pytest.raises(AssertionError, match="among the run-aheads"):
        collect(tokenizer, engine, draws, run_ahead=unmarked)
    of_this_step = run_ahead_requests(draws, **options)
    with pytest.raises(AssertionError, match="rng_key of a sample"):
        collect(tokenizer, engine, draws, run_ahead=of_this_step)


def test_grader_gets_the_cut_text_and_the_whole_length(tokenizer: PreTrainedTokenizerBase) -> None:
    grader = _FakeGrader()
    problem = prompts(tokenizer, 1)[0]
    groups = collect(tokenizer, _FakeEngine(tokenizer, 1), [(0, problem)], grader=grader)
    num_tokens = len(b"p0/0STOP and more") + 1  # a token a byte, and the end token
    assert {submitted[1:] for submitted in grader.submitted} == {(f"p0/{i}", "stop", num_tokens) for i in range(3)}
    assert all(len(rollout.token_ids) == num_tokens for rollout in groups[0].rollouts)
    assert all(rollout.policy_version == 3 for rollout in groups[0].rollouts)


def test_progress_and_stages(tokenizer: PreTrainedTokenizerBase) -> None:
    seen: list[CollectProgress] = []
    timer = StageTimer()
    draws = list(enumerate(prompts(tokenizer, 2)))
    collect(tokenizer, _FakeEngine(tokenizer, 3), draws, on_progress=seen.append, timer=timer)
    assert [progress.num_done for progress in seen] == [1, 2, 3, 4, 5, 6]
    assert seen[-1].num_total == 6
    assert seen[-1].num_tokens == 6 * (len("p0/0STOP and more") + 1)
    assert set(timer.take()) == {"rollout", "grading"}
    assert timer.take() == {}


def test_response_text_is_cut_at_the_first_stop_string(tokenizer: PreTrainedTokenizerBase) -> None:
    token_ids = [*tokenizer.encode("one END two STOP three"), 0]
    assert response_text(tokenizer, token_ids, ()) == "one END two STOP three"  # without the end token
    assert response_text(tokenizer, token_ids, ("STOP", "END")) == "one "
    assert response_text(tokenizer, token_ids, ("absent",)) == "one END two STOP three"
