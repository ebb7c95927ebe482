"""The input of a reward function, and the marks for where and how it runs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import fsum
from typing import Any, TypeVar

from srtrl.types import FinishReason, Prompt, SampledTurn

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def characters(sample: "RewardInput") -> Sequence[str]:
    """The tokens of a text that no policy has sampled."""
    return sample.text


@dataclass(kw_only=True, slots=True, frozen=True)
class RewardInput:
    """One completion to be rewarded."""

    prompt: Prompt
    text: str
    """The completion without special tokens; of several turns the texts of the policy, joined by line breaks."""
    correct: bool | None = None
    """The verdict of the task's verifier; None where the task has none, and where it failed (the sample is then left
    out in any case)."""
    finish_reason: FinishReason
    num_tokens: int
    """Length of the completion, the end token included; what an environment put in does not count."""
    max_new_tokens: int
    """Limit of that length."""
    token_ids: tuple[int, ...] = ()
    """The sampled tokens, of all turns."""
    turns: tuple[SampledTurn, ...] = ()
    """The policy's turns, at least one."""
    texts_of: "Callable[[RewardInput], Sequence[str]]" = field(default=characters, repr=False, compare=False)
    """Makes `token_texts`."""

    def __post_init__(self) -> None:
        """Fill in the one turn of a sample without an environment."""
        if not self.turns:
            turn = SampledTurn(text=self.text, tokens=slice(0, self.num_tokens))
            object.__setattr__(self, "turns", (turn,))

    @property
    def token_texts(self) -> Sequence[str]:
        """Text that each sampled token adds to its turn, made anew by each access.

        Special tokens add nothing; if a character comes in pieces, the last piece adds it.
        """
        return self.texts_of(self)

    @property
    def environment_reward(self) -> float:
        """Sum of the rewards that the environment gave; 0 if there is none, NaN if it exceeded its time limit."""
        return fsum(turn.reward for turn in self.turns)

    @property
    def num_turns(self) -> int:
        """Number of turns."""
        return len(self.turns)

    def on_turns(self, values: Sequence[float]) -> list[float]:
        """A number for each sampled token, as a reward may return them: a turn's value on its last token, else 0."""
        rewards = [0.0] * self.num_tokens
        for turn, value in zip(self.turns, values, strict=True):
            rewards[turn.tokens.stop - 1] = value
        return rewards


def isolated(reward: FunctionT) -> FunctionT:
    """Mark a reward that may hang or crash: it runs in worker processes, within the recipe's `grading` limits.

    It must be a function of an importable module. A sample that exceeds a limit is retried once and then left out
    of its group; the others are not touched.
    """
    reward.isolated = True  # type: ignore[attr-defined]
    return reward


def batched(reward: FunctionT) -> FunctionT:
    """Mark a reward that takes a list of `RewardInput` and returns a list: called once for all samples of a step.

    With `rollout.dynamic_sampling` it is called once for each group, because a group's rewards decide whether it stays.
    """
    reward.batched = True  # type: ignore[attr-defined]
    return reward
