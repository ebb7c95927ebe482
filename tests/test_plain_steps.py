"""Decode steps without drafts are counted beside those with drafts: against rollouts that have none."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from engine_cases import PROMPTS, FakeDrafter, Letters, decode, options, requests_for, tiny_policy
from test_turns import converse, turn_options, turn_requests
from tiny_run import make_recipe, train

from srtrl.drafters.srt import Drafter as SrtDrafter
from srtrl.engine.batch import PromptPages, Sample
from srtrl.engine.draft_budget import StepCost
from srtrl.engine.engine import Engine
from srtrl.engine.plain_steps import PlainSteps
from srtrl.features.run_ahead import RunAhead
from srtrl.metrics import read_metrics
from srtrl.model.transformer import Transformer

STEPS, WITHOUT, SAVED = "engine/decode_steps", "engine/steps_without_drafts", "engine/saved_seconds"


@pytest.fixture(scope="module")
def model() -> Transformer:
    return tiny_policy()


@pytest.mark.parametrize("chunk", [7, 1000])
def test_where_each_sample_has_a_slot_the_steps_are_those_of_a_rollout_without_drafts(
    model: Transformer, chunk: int
) -> None:
    plain = Engine(model, options(slots=16, prefill_chunk_tokens=chunk))
    truth = decode(plain, requests_for())
    expected = plain.take_metrics()
    assert expected[WITHOUT] == expected[STEPS]
    assert SAVED not in expected
    drafter = FakeDrafter(truth, accuracy=0.9)
    cost = StepCost(points=((1, 1.0), (2048, 1.0)))  # further rows are free
    engine = Engine(model, options(slots=16, prefill_chunk_tokens=chunk, draft_budget=8), drafter=drafter, cost=cost)
    for _ in range(2):
        decode(engine, requests_for())
        found = engine.take_metrics()
        assert found[WITHOUT] == expected[STEPS] > found[STEPS]
        assert 0 < found[WITHOUT] - found[STEPS] - found[SAVED] < 1, "but for the measured seconds of drafting"


def test_rows_that_are_not_free_may_make_drafts_a_loss(model: Transformer) -> None:
    truth = decode(Engine(model, options(slots=16)), requests_for())
    cost = StepCost(points=((1, 1.0), (2048, 2048.0)))
    drafter = FakeDrafter(truth, accuracy=0.2)
    engine = Engine(model, options(slots=16, draft_budget=8), drafter=drafter, cost=cost)
    decode(engine, requests_for())
    metrics = engine.take_metrics()
    assert metrics[WITHOUT] > metrics[STEPS]
    # A row for each token without drafts; with them also for each node that is not accepted.
    num_rows = metrics["engine/verified_per_decode_step"] * metrics["engine/tokens"]
    num_rows /= metrics["engine/tokens_per_decode_step"]
    assert metrics[SAVED] < 0
    assert metrics[SAVED] == pytest.approx(metrics["engine/tokens"] - num_rows, abs=1)


@pytest.mark.parametrize("delays", [None, 3])
@pytest.mark.parametrize(("slots", "num_pages"), [(1, None), (3, None), (4, 12), (16, None)])
def test_a_rollout_without_drafts_is_counted_as_it_is(
    model: Transformer, slots: int, num_pages: int | None, delays: int | None
) -> None:
    """With preemption and turns, in any order of waits."""
    engine = Engine(model, options(slots=slots, num_pages=num_pages and num_pages + 6), tokenizer=Letters())
    decode(engine, requests_for())
    talking = Engine(model, turn_options(slots=slots, num_pages=num_pages and 2 * num_pages), tokenizer=Letters())
    converse(talking, turn_requests(), None if delays is None else np.random.default_rng(delays))
    for one in (engine, talking):
        metrics = one.take_metrics()
        assert metrics[WITHOUT] == metrics[STEPS]
        assert (metrics["engine/preemptions"] > 0) == (num_pages is not None)


def test_turns_of_a_sample_follow_each_other(model: Transformer) -> None:
    sizes = turn_options(slots=16, prefill_chunk_tokens=1000)  # what tools say never waits for other prompts
    plain = Engine(model, sizes, tokenizer=Letters())
    converse(plain, turn_requests())
    expected = plain.take_metrics()[STEPS]
    engine = Engine(model, sizes, tokenizer=Letters(), drafter=SrtDrafter())
    for _ in range(2):
        converse(engine, turn_requests())
        metrics = engine.take_metrics()
        assert metrics[WITHOUT] == expected > metrics[STEPS]
        engine.end_step(has_new_weights=False)


def test_a_training_run_counts_what_the_same_run_without_drafts_takes(policy: Path, tmp_path: Path) -> None:
    """With run-aheads; the second epoch begins in the third step."""
    forced = {"rollout__draft_budget": 8, "rollout__run_ahead_max_slowdown": 1e9}
    steps = []
    for name, changes in (("srt", forced), ("none", {"rollout__drafter": "none"})):
        recipe = make_recipe(policy, tmp_path / name, rollout__slots=40, **changes)
        steps.append([row for row in read_metrics(train(recipe).folder / "metrics.jsonl") if row["step"] > 0])
    for drafted, plain in zip(*steps, strict=True):
        assert drafted[WITHOUT] == plain[STEPS] == plain[WITHOUT]
        assert SAVED in drafted
        assert SAVED not in plain
    assert steps[0][-1][STEPS] < steps[1][-1][STEPS]


def test_run_aheads_are_a_price_and_steps_of_them_alone_do_not_count(model: Transformer) -> None:
    sample, *others = requests_for()
    cost = StepCost(points=((1, 1.0), (2048, 2048.0)))
    background = partial(RunAhead, max_slowdown=10.0)
    engine = Engine(model, options(), drafter=FakeDrafter(), cost=cost, background=background)
    num_steps = 0

    def before_step() -> bool:
        nonlocal num_steps
        num_steps += 1
        return num_steps < 60

    decode(engine, [sample], run_ahead=others, before_step=before_step)
    metrics = engine.take_metrics()
    plain = Engine(model, options())
    decode(plain, [sample])
    assert metrics[WITHOUT] == metrics[STEPS] == plain.take_metrics()[STEPS] < num_steps - 1
    assert -metrics["engine/background_rows"] < metrics[SAVED] < 0


def test_with_fewer_slots_than_samples_the_next_sample_takes_the_slot_that_is_free_first() -> None:
    """Two slots; without drafts the stays of 6, 2, 3 and 1 tokens end at 6, 2, 5 and 6."""

    def one(slot: int, rng_key: int) -> Sample:
        request = replace(requests_for(PROMPTS[:1])[0], rng_key=rng_key)
        return Sample(request, PromptPages(np.array([1], np.int32)), slot=slot)

    plain = PlainSteps(2)
    plain.start([one(0, 0), one(1, 1)])
    plain.add_step(np.array([0, 1]), np.array([6, 1]), 5)
    plain.end([0])
    plain.start([one(0, 2)])
    plain.add_step(np.array([0, 1]), np.array([3, 1]), 2)
    plain.end([0, 1])
    plain.start([one(1, 3)])
    plain.add_step(np.array([1]), np.array([1]), 0)
    plain.end([1])
    assert plain.take()[0] == 6
    assert plain.take()[0] == 0


@pytest.mark.parametrize(("of_step", "of_row"), [(0.5, 0.0), (0.0, 0.25), (0.5, 0.25)])
def test_seconds_are_those_of_a_step_and_of_a_row_that_fit_the_measured_steps(of_step: float, of_row: float) -> None:
    """One sample of seven tokens: in steps of 1, 4 and 5 rows, without drafts in seven of one row."""
    plain = PlainSteps(1)
    for num_prompt_rows in (0, 30, 2):
        plain.start([Sample(requests_for(PROMPTS[:1])[0], PromptPages(np.array([1], np.int32)), slot=0)])
        for num_new, num_rows in ((1, 1), (4, 4), (2, 5)):
            plain.add_step(np.array([0]), np.array([num_new]), num_rows - 1)
            plain.add_seconds(num_rows, num_prompt_rows, of_step + of_row * num_rows + 0.1 * num_prompt_rows)
        plain.end([0])
        num_steps, saved = plain.take()
        assert num_steps == 7
        assert saved == pytest.approx(of_step * (7 - 3) + of_row * (7 - 10))
