"""The input of a reward function, and the marks for where and how it runs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from srtrl.types import FinishReason, Prompt

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


@dataclass(kw_only=True, slots=True, frozen=True)
class RewardInput:
    """One completion to be rewarded."""

    prompt: Prompt
    text: str
    """The completion without special tokens; of several turns the texts of the policy, joined by line breaks."""
    correct: bool | None
    """The verdict of the task's verifier; None where the task has none, and where it failed (the sample is then left
    out in any case)."""
    finish_reason: FinishReason
    num_tokens: int
    """Length of the completion, the end token included; what an environment put in does not count."""
    max_new_tokens: int
    """Limit of that length."""
    environment_reward: float = 0.0
    """Sum of the rewards that the environment gave; 0 where there is none, NaN where it exceeded its time limit."""
    num_turns: int = 1


def isolated(reward: FunctionT) -> FunctionT:
    """Mark a reward that may hang or crash: it runs in worker processes, within the recipe's `grading` limits.

    It must be a function of an importable module. A sample that exceeds a limit is retried once and then left out
    of its group; the others are not touched.
    """
    reward.isolated = True  # type: ignore[attr-defined]
    return reward


def batched(reward: FunctionT) -> FunctionT:
    """Mark a reward of the form `(list[RewardInput]) -> list[float]`: called once for all samples of a step.

    With `rollout.dynamic_sampling` it is called once for each group, because a group's rewards decide whether it stays.
    """
    reward.batched = True  # type: ignore[attr-defined]
    return reward
