r"""Rewards by name: `rewards: [{name: correct}, {name: format, weight: 0.1}]` in a recipe.

A reward takes a `RewardInput` and returns a finite number. Your own is named `package.module:function`; it runs in the
training process unless it is marked `@isolated`, and one at a time unless it is marked `@batched`
(both of `srtrl.tasks.reward_input`).
"""

import re

from srtrl.tasks.reward_input import RewardInput

FINAL_ANSWER = re.compile(r"\\boxed\{.*\}|####\s*\S|(?i:answer)\s*:\s*\S")


def correct(sample: RewardInput) -> float:
    """1 where the task's verifier accepts the completion, else 0."""
    return 1.0 if sample.correct else 0.0


def format(sample: RewardInput) -> float:
    r"""1 where the completion ended by itself and its last line states the answer, else 0.

    The forms are `\boxed{...}`, `#### ...` and `Answer: ...`.
    """
    last_line = sample.text.rstrip().rpartition("\n")[2]
    return 1.0 if sample.finish_reason == "stop" and FINAL_ANSWER.search(last_line) else 0.0
