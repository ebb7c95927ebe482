"""Rollouts of several turns in training: exactness with slow tools, what is learned from, metrics, files, resume."""

from itertools import chain
from typing import Any

import numpy as np
import pytest
from engine_cases import options, tiny_policy
from environment_cases import TOKENIZER, Digits, section_of

from srtrl.drafters.base import DrafterBase
from srtrl.drafters.srt import Drafter as SrtDrafter
from srtrl.drafters.suffix import Drafter as SuffixDrafter
from srtrl.engine.engine import Engine
from srtrl.environments.turns import EnvironmentTurns
from srtrl.model.transformer import Transformer
from srtrl.recipe.schema import GradingSection, RewardSection
from srtrl.rollout.collect import Collector, Draws, FixedDraws, collect_rollouts
from srtrl.rollout.dynamic_sampling import DrawsUntilFull
from srtrl.tasks.grading import Grader
from srtrl.trainer.credit import train_sequences
from srtrl.types import Prompt, RolloutGroup, SamplingParams, segment_slices

END_TOKENS = (0, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71)


class PlainTask:
    """No verifier: rewards alone."""

    verifier = None


@pytest.fixture(scope="module")
def policy() -> Transformer:
    return tiny_policy(vocab_size=290, scale=5.0)


def grader_of() -> Grader:
    return Grader(PlainTask(), [RewardSection(name="environment")], GradingSection(), 100)  # type: ignore[arg-type]


def collector_of(grader: Grader, conversations: EnvironmentTurns) -> Collector:
    sampling = SamplingParams(max_new_tokens=100, end_token_ids=END_TOKENS)
    options: dict[str, Any] = {"seed": 3, "purpose": "train", "policy_version": 0}
    return Collector(grader, conversations, num_samples=3, sampling=sampling, **options)


def prompt_of(i: int) -> Prompt:
    return Prompt(prompt_id=str(i), text="", token_ids=(i + 1, 2 * i + 3), answer="")


def rollouts_of(
    policy: Transformer, *, is_dynamic: bool = False, drafter: DrafterBase | None = None, **changes: Any
) -> tuple[list[RolloutGroup], dict[str, float]]:
    """The same draws, with a drafter twice (the second time it knows them), with tools of random latency."""
    engine = Engine(policy, options(**({"max_sequence_tokens": 128} | changes)), tokenizer=TOKENIZER, drafter=drafter)
    dynamic: dict[str, Any] = {"first_draw": 0, "num_prompts": 3, "max_draws": 5}
    with EnvironmentTurns(section_of(Digits, max_turns=4), TOKENIZER) as conversations, grader_of() as grader:
        for _ in range(2 if drafter else 1):
            draws: Draws = FixedDraws([(i, prompt_of(i)) for i in range(5)])
            if is_dynamic:
                draws = DrawsUntilFull(prompt_of, keeps=lambda group: group.draw_index > 1, **dynamic)
            groups = collect_rollouts(engine, collector_of(grader, conversations), draws)
            assert not conversations.futures()
            assert engine.pool.num_used == 0
            assert not engine.scheduler.paused
            metrics = engine.take_metrics()
            engine.end_step(has_new_weights=True)
    return groups, metrics


def contents(groups: list[RolloutGroup]) -> list[Any]:
    """All that must not depend on timing."""
    return [
        (
            (one.draw_index, one.sample_index, one.text, one.response.finish_reason, one.grade),
            (one.response.token_ids.tolist(), one.response.rollout_logprobs.tolist()),
            one.conversation and (one.conversation.segments, one.conversation.stop_reason, one.conversation.metrics),
        )
        for one in chain.from_iterable(group.rollouts for group in groups)
    ]


@pytest.fixture(scope="module")
def truth(policy: Transformer) -> list[RolloutGroup]:
    return rollouts_of(policy, slots=1)[0]


def test_rollouts_do_not_depend_on_drafts_slots_pages_or_latency(
    policy: Transformer, truth: list[RolloutGroup]
) -> None:
    conversations = [one.conversation for group in truth for one in group.rollouts if one.conversation]
    assert len(conversations) == 15
    assert {one.num_turns for one in conversations} == {1, 2, 3, 4}
    assert {"turns", "done"} <= {one.stop_reason for one in conversations}
    ways: list[dict[str, Any]] = [
        {"drafter": SuffixDrafter(), "slots": 3},
        {"drafter": SrtDrafter(), "slots": 64, "num_pages": 60},
        {"drafter": SrtDrafter(), "is_dynamic": True},
    ]
    for changes in ways:
        found, metrics = rollouts_of(policy, **changes)
        assert contents(found) == contents(truth)
        assert metrics["engine/tokens_per_decode_step"] > 1.2


def test_only_what_was_sampled_is_learned_from(truth: list[RolloutGroup]) -> None:
    rollouts = [one for group in truth for one in group.rollouts]
    for rollout, sequence in zip(rollouts, train_sequences(truth), strict=True):
        assert rollout.conversation is not None
        parts = list(segment_slices(rollout.conversation.segments))
        response = rollout.response
        assert parts[-1][1].stop == len(response.token_ids)
        sampled = [part for kind, part in parts if kind == "model"]
        assert (sequence.token_ids[sequence.targets] == np.concatenate([response.token_ids[p] for p in sampled])).all()
        logprobs = np.concatenate([response.rollout_logprobs[part] for part in sampled])
        assert (sequence.rollout_logprobs == logprobs).all()
        assert (logprobs < 0).all()
        assert sequence.num_prompt_tokens == len(rollout.prompt.token_ids)
        assert all((response.rollout_logprobs[part] == 0).all() for kind, part in parts if kind != "model")
        reward = sum(value % 3 for _, value in rollout.conversation.metrics)
        assert rollout.grade.reward == reward


def test_a_sample_given_up_in_the_middle_leaves_nothing(policy: Transformer) -> None:
    engine = Engine(policy, options(max_sequence_tokens=128), tokenizer=TOKENIZER)
    with EnvironmentTurns(section_of(Digits), TOKENIZER) as conversations, grader_of() as grader:
        collector = collector_of(grader, conversations)
        requests = [request for i in range(3) for request in collector.open(i, prompt_of(i))]
        for number, completion in enumerate(engine.generate(requests)):
            collector.receive(completion)
            if number == 3:
                break
        assert engine.pool.num_used == 0
        assert not engine.scheduler.paused
    assert not conversations.futures()
