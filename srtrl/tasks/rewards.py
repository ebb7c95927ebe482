r"""Rewards by name: `rewards: [{name: correct}, {name: format, weight: 0.1}]` in a recipe.

A reward takes a `RewardInput` and returns a finite number, or one for each sampled token (a single number stands on the
last); its keyword arguments are the recipe's `options`. Your own
is named `package.module:function`; it runs in the training process unless it is marked `@isolated`, and one at a time
unless it is marked `@batched` (both of `srtrl.tasks.reward_input`).
"""

import re
from math import isnan

from srtrl.tasks.final_answer import BOX
from srtrl.tasks.reward_input import RewardInput

STATED_ANSWER = re.compile(r"####\s*\S|(?i:answer)\s*:\s*\S")


def correct(sample: RewardInput, *, incorrect: float = 0.0) -> float:
    """1 where the task's verifier accepts the completion, else `incorrect`."""
    return 1.0 if sample.correct else incorrect


def environment(sample: RewardInput) -> float | list[float]:
    """The reward of each of the environment's steps, on the last token of its turn."""
    if isnan(sample.environment_reward):
        raise TimeoutError("the environment gave no answer within its timeout_seconds")
    if any(turn.reward for turn in sample.turns[:-1]):
        return sample.on_turns([turn.reward for turn in sample.turns])
    return sample.environment_reward


def format(sample: RewardInput) -> float:
    r"""1 where the completion ended by itself and its last line states the answer, else 0.

    The forms are `\boxed{...}`, `#### ...` and `Answer: ...`.
    """
    last_line = sample.text.rstrip().rpartition("\n")[2]
    _, _, boxed = last_line.partition(BOX)
    return 1.0 if sample.finish_reason == "stop" and ("}" in boxed or STATED_ANSWER.search(last_line)) else 0.0


def overlong_penalty(sample: RewardInput, *, cache_tokens: int) -> float:
    """DAPO's soft overlong punishment: 0 for a response that ends in time, falling to -1 at the length limit.

    Equation 13 of arXiv 2503.14476; `cache_tokens` is its L_cache and `rollout.max_new_tokens` its L_max.

    Args:
        sample: Its length counts, the end token included.
        cache_tokens: Number of tokens before the limit over which the value falls linearly.

    Raises:
        ValueError: no response is short enough not to be punished.
    """
    if not 1 <= cache_tokens < sample.max_new_tokens:
        limit = f"rollout.max_new_tokens - 1 ({sample.max_new_tokens - 1})"
        raise ValueError(f"cache_tokens: expected a number of tokens from 1 to {limit}, found {cache_tokens!r}")
    unpunished = sample.max_new_tokens - cache_tokens
    return min(0.0, (unpunished - sample.num_tokens) / cache_tokens)
