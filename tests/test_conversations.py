"""Rollouts of several turns in training: what is learned from; that they are exact is in `test_promises.py`."""

import numpy as np
import pytest
from engine_cases import options, tiny_policy
from environment_cases import PROMPTS, TOKENIZER, Digits, collector_of, grader_of, section_of

from srtrl.engine.engine import Engine
from srtrl.environments.turns import EnvironmentTurns
from srtrl.rollout.collect import FixedDraws, collect_rollouts
from srtrl.trainer.credit import train_sequences
from srtrl.types import segment_slices


@pytest.fixture
def engine() -> Engine:
    return Engine(tiny_policy(vocab_size=290, scale=5.0), options(max_sequence_tokens=128), tokenizer=TOKENIZER)


def test_only_what_was_sampled_is_learned_from(engine: Engine) -> None:
    with EnvironmentTurns(section_of(Digits, max_turns=4), TOKENIZER) as conversations, grader_of() as grader:
        collector = collector_of(grader, conversations, 100)
        groups = collect_rollouts(engine, collector, FixedDraws(list(enumerate(PROMPTS[:5]))))
    assert engine.pool.num_used == 0
    rollouts = [one for group in groups for one in group.rollouts]
    assert {one.conversation.num_turns for one in rollouts if one.conversation} == {1, 2, 3, 4}
    for rollout, sequence in zip(rollouts, train_sequences(groups), strict=True):
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


def test_a_sample_given_up_in_the_middle_leaves_nothing(engine: Engine) -> None:
    with EnvironmentTurns(section_of(Digits), TOKENIZER) as conversations, grader_of() as grader:
        collector = collector_of(grader, conversations, 100)
        requests = [request for draw in range(3) for request in collector.open(draw, PROMPTS[draw])]
        for number, completion in enumerate(engine.generate(requests)):
            collector.receive(engine, [completion])
            if number == 3:
                break
        assert engine.pool.num_used == 0
        assert not engine.scheduler.paused
    assert not conversations.futures()
