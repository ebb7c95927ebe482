"""Rollouts come back in data order, whatever the order in which the decoder finishes them."""

import random
from dataclasses import replace
from typing import Any, cast

import pytest
from rollout_cases import SAMPLING, FakeEngine, FakeGrader, completion_of, make_collector, prompt_of
from transformers import PreTrainedTokenizerBase

from srtrl.engine.engine import Engine
from srtrl.engine.sampling import make_rng_key
from srtrl.rollout.collect import CollectProgress, StageTimer, collect_rollouts, response_text
from srtrl.rollout.run_ahead import run_ahead_requests
from srtrl.trainer.warm_start import train_tokenizer
from srtrl.types import Prompt, Request, RolloutGroup

DRAWS = [(2, prompt_of(1)), (0, prompt_of(3)), (1, prompt_of(1)), (7, prompt_of(0))]  # prompt 1 is drawn twice


def sample_number(prompt: Prompt, text: str) -> float:
    return float(text.rpartition("/")[-1])


def collect(
    engine: FakeEngine, grader: FakeGrader | None = None, *, run_ahead: list[Request] | None = None, **options: Any
) -> list[RolloutGroup]:
    given = grader or FakeGrader(sample_number, random.Random(0), waits=True)
    collector = make_collector(given, **options)
    return collect_rollouts(cast(Engine, engine), collector, DRAWS, run_ahead=run_ahead or [])


def test_order_is_data_order_whatever_finishes_first() -> None:
    results = [collect(FakeEngine(seed)) for seed in range(5)]
    for groups in results:
        assert groups == results[0]
        assert [(group.draw_index, group.prompt.prompt_id) for group in groups] == [
            *[(0, "3"), (1, "1"), (2, "1"), (7, "0")]
        ]
        for group in groups:  # each sample has its own text and its own grade
            found = [(one.sample_index, one.text, one.grade.reward, one.policy_version) for one in group.rollouts]
            assert found == [(i, f"{group.draw_index}/{i}", float(i), 3) for i in range(2)]


def test_every_sample_has_its_own_rng_key() -> None:
    engine = FakeEngine(0)
    collect(engine)
    rng_keys = {(request.draw_index, request.sample_index): request.rng_key for request in engine.added}
    assert len(set(rng_keys.values())) == 8  # two draws of one prompt are two draws
    assert rng_keys[7, 1] == make_rng_key(11, "train", 7, 1)


def test_run_aheads_reach_the_engine_and_never_come_back() -> None:
    options: dict[str, Any] = {"num_samples": 2, "sampling": SAMPLING, "seed": 11}
    ahead = run_ahead_requests([(8, prompt_of(5)), (9, prompt_of(1))], **options)
    engine = FakeEngine(2)
    assert collect(engine, run_ahead=ahead) == collect(FakeEngine(2))
    assert engine.run_ahead == ahead
    with pytest.raises(AssertionError, match="never be learned from"):
        make_collector(FakeGrader(sample_number, random.Random(0))).receive(completion_of(ahead[0]))
    with pytest.raises(AssertionError, match="among the run-aheads"):
        collect(FakeEngine(2), run_ahead=[replace(request, is_run_ahead=False) for request in ahead])
    with pytest.raises(AssertionError, match="rng_key of a sample"):
        collect(FakeEngine(2), run_ahead=run_ahead_requests(DRAWS, **options))


def test_grader_gets_the_cut_text_and_the_whole_length() -> None:
    grader = FakeGrader(sample_number, random.Random(0), waits=True)
    collect(FakeEngine(1), grader)
    expected = {(f"{draw}/{sample}", "stop", 3) for draw, _ in DRAWS for sample in range(2)}
    assert {submitted[1:] for submitted in grader.submitted} == expected
    assert grader.batches == [8]


def test_progress_and_stages() -> None:
    seen: list[CollectProgress] = []
    timer = StageTimer()
    collect(FakeEngine(3), on_progress=seen.append, timer=timer)
    assert [(one.num_done, one.num_tokens) for one in seen] == [(n, 3 * n) for n in range(1, 9)]
    assert seen[-1].num_total == 8
    assert set(timer.take()) == {"rollout", "grading"}
    assert timer.take() == {}


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
