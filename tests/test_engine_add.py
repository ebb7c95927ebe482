"""Requests that come while others decode: the same bits as when all come at once, and nothing is left behind."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from engine_cases import PROMPTS, Listener, decode, options, outputs, requests_for, tiny_policy

from srtrl.drafters.srt import Drafter as SrtDrafter
from srtrl.engine.engine import Engine
from srtrl.model.transformer import Transformer
from srtrl.types import Completion, Request

Outputs = dict[tuple[int, int], tuple[list[int], list[float], str]]


@pytest.fixture(scope="module")
def policy() -> Transformer:
    return tiny_policy()


@pytest.fixture(scope="module")
def expected(policy: Transformer) -> Outputs:
    return outputs(decode(Engine(policy, options(slots=1)), requests_for()))


def run(engine: Engine, first: list[Request], before_step: Callable[[], None], **more: object) -> Outputs:
    """Generate, with pages checked before every step; completions by (draw, sample)."""

    def check_and_call() -> None:
        engine.scheduler.check_integrity()
        before_step()

    completions: dict[tuple[int, int], Completion] = {}
    for completion in engine.generate(first, before_step=check_and_call, **more):  # type: ignore[arg-type]
        key = (completion.request.draw_index, completion.request.sample_index)
        assert key not in completions
        completions[key] = completion
    assert not engine.has_work
    assert engine.pool.num_used == 0
    return outputs(completions)


@pytest.mark.parametrize(("slots", "num_pages"), [(1, None), (4, 14), (16, None), (64, 40)])
@pytest.mark.parametrize("seed", range(3))
def test_samples_that_come_late_are_the_same(
    policy: Transformer, expected: Outputs, slots: int, num_pages: int | None, seed: int
) -> None:
    generator = random.Random(seed)
    late = requests_for()
    generator.shuffle(late)
    first = [late.pop() for _ in range(generator.randrange(3))]
    drafter = SrtDrafter()
    engine = Engine(policy, options(slots=slots, num_pages=num_pages), drafter=drafter)

    def before_step() -> None:
        while late and (generator.random() < 0.15 or not engine.has_work):
            engine.add(late.pop())

    assert run(engine, first, before_step) == expected
    assert late == []
    if num_pages == 14:
        assert engine.take_metrics()["engine/preemptions"] > 0


def test_a_consumer_adds_between_two_completions_the_last_one_included(policy: Transformer, expected: Outputs) -> None:
    late = requests_for()
    engine = Engine(policy, options(slots=3))
    completions: dict[tuple[int, int], Completion] = {}
    for completion in engine.generate([late.pop()]):
        completions[completion.request.draw_index, completion.request.sample_index] = completion
        if late:  # each time nothing else is decoding: this completion was the last
            assert not engine.has_work
            engine.add(late.pop())
    assert outputs(completions) == expected


def test_before_step_is_called_until_nothing_is_left(policy: Transformer) -> None:
    engine = Engine(policy, options())
    had_work: list[bool] = []
    assert list(engine.generate([], before_step=lambda: had_work.append(engine.has_work))) == []
    assert had_work == [False]
    had_work.clear()
    (asked,) = requests_for(PROMPTS[:1], num_samples=1, max_new_tokens=3, temperature=0)
    list(engine.generate([asked], before_step=lambda: had_work.append(engine.has_work)))
    assert had_work == [*[True] * engine.stats.num_steps, False]


def test_a_request_that_cannot_be_decoded_stops_the_rollout_and_leaves_nothing(policy: Transformer) -> None:
    engine = Engine(policy, options())
    bad = replace(requests_for()[0], prompt_token_ids=())
    with pytest.raises(ValueError, match="the prompt is empty"):
        list(engine.generate(requests_for(), before_step=lambda: engine.add(bad)))
    assert engine.pool.num_used == 0
    assert not engine.has_work


@pytest.mark.parametrize(("slots", "num_pages"), [(5, None), (12, 40), (64, None)])
def test_a_sample_ends_its_run_ahead_and_finds_what_it_said(
    policy: Transformer, expected: Outputs, slots: int, num_pages: int | None
) -> None:
    requests = requests_for()
    first, late = requests[:3], requests[3:]
    listener = Listener()
    engine = Engine(
        policy, options(slots=slots, num_pages=num_pages, run_ahead_max_slowdown=float("inf")), drafter=listener
    )

    def before_step() -> None:
        if late and (engine.stats.num_steps % 4 == 3 or not engine.has_work):
            engine.add(late.pop(0))

    ahead = [replace(request, is_run_ahead=True) for request in late]
    assert run(engine, first, before_step, run_ahead=ahead) == expected
    assert listener.live == {}
    assert sum(map(bool, listener.said_before.values())) >= 3
    truth = {request.rng_key: expected[request.draw_index, request.sample_index][0] for request in requests}
    for rng_key, said in listener.said.items():
        assert said == truth[rng_key][: len(said)]


def test_a_sample_follows_the_text_of_its_run_ahead(policy: Transformer, expected: Outputs) -> None:
    """Same policy, same rng_key: what was decoded ahead is right to the last token, and verified in few steps."""
    samples = sorted(requests_for(PROMPTS[:2]), key=lambda one: -len(expected[one.draw_index, one.sample_index][0]))
    first, second = samples[:1], samples[1]
    engine = Engine(
        policy, options(slots=8, draft_budget=16, run_ahead_max_slowdown=float("inf")), drafter=SrtDrafter()
    )

    def before_step() -> None:
        if not engine.has_work and second not in added:
            added.append(second)
            engine.take_metrics()
            engine.add(second)

    added: list[Request] = []
    found = run(engine, first, before_step, run_ahead=[replace(second, is_run_ahead=True)])
    assert found == {key: expected[key] for key in found}
    metrics = engine.take_metrics()
    num_tokens = len(found[second.draw_index, second.sample_index][0])
    assert metrics["engine/run_ahead_followed"] == 1
    assert metrics["engine/decode_steps"] <= num_tokens / 2
