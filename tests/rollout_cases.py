"""An engine that finishes samples in a random order, graders that take a random time, and graded groups."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from engine_cases import make_response

from srtrl.types import (
    Conversation,
    Grade,
    GradeOutcome,
    Prompt,
    Rollout,
    RolloutGroup,
)


def make_group(
    draw_index: int,
    outcomes: Sequence[GradeOutcome],
    *,
    rewards: Sequence[float] = (),
    lengths: Sequence[int] = (),
    cut: Sequence[int] = (),
    texts: Sequence[str] = (),
    conversations: Sequence[Conversation] = (),
) -> RolloutGroup:
    """A graded draw with a sample for each outcome.

    By default rewards are 1 for a correct sample, `lengths` of the responses 1, 2, ..., texts empty; `cut` are the
    samples that reached the maximum length; `conversations` those of samples of several turns.
    """
    prompt = Prompt(prompt_id=str(draw_index), text="p", token_ids=(3, 4), answer="")
    rng = np.random.default_rng(draw_index)
    rollouts = []
    for index, outcome in enumerate(outcomes):
        length = lengths[index] if lengths else index + 1
        reward = rewards[index] if rewards else float(outcome == "correct")
        rollouts.append(
            Rollout(
                prompt=prompt,
                draw_index=draw_index,
                sample_index=index,
                response=make_response(
                    [5] * length, (-rng.random(length)).tolist(), finish_reason="length" if index in cut else "stop"
                ),
                text=texts[index] if texts else "",
                policy_version=0,
                grade=Grade(reward=reward, parts={}, outcome=outcome),
                conversation=conversations[index] if conversations else None,
            )
        )
    return RolloutGroup(prompt=prompt, draw_index=draw_index, rollouts=rollouts)


def graded(grades: Sequence[Grade]) -> RolloutGroup:
    """A group of samples with these grades."""
    group = make_group(0, ["wrong"] * len(grades))
    rollouts = [replace(one, grade=grade) for one, grade in zip(group.rollouts, grades, strict=True)]
    return replace(group, rollouts=rollouts)
