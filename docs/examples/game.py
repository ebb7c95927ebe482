"""A game that a policy learns: two players take one to three sticks in turn, and who takes the last one wins.

    cd docs/examples
    srtrl train game.yaml

The policy begins, against an opponent without mistakes: who leaves a multiple of four each time wins. Nobody says so to
the bundled policy. It has only seen arithmetic, and most of its first moves are against the rules.
"""

import re
from typing import Any

from srtrl.environments.base import EnvironmentBase, Step, Turn
from srtrl.recipe.schema import Section
from srtrl.tasks.base import TaskBase
from srtrl.tasks.rendering import tokenise
from srtrl.types import Prompt

STARTS = [number for number in range(5, 16) if number % 4]
"""Sticks to begin with: those from which the first player can win."""
LOST = 0.2
"""Reward of a game that was lost by the rules; a won one has 1, and a move against the rules ends the game with 0."""


class Sticks(TaskBase):
    """One prompt for each start; the same for training and evaluation."""

    def __init__(self, options: Section, *, tokenizer: Any, max_prompt_tokens: int) -> None:
        prompts = [
            Prompt(prompt_id=f"sticks-{number}", text=f"{number} left.\n", token_ids=(), answer=str(number))
            for number in STARTS
        ]
        self.train_prompts = self.eval_prompts = tokenise(tokenizer, prompts)


class Opponent(EnvironmentBase):
    """Takes the policy's move, the first digit of its turn, and answers with the sticks that are left."""

    def start(self, prompt: Prompt) -> None:
        """Put the sticks on the table."""
        self.sticks = int(prompt.answer)

    def step(self, turn: Turn) -> Step:
        """Play a round."""
        digit = re.search(r"[0-9]", turn.text)
        move = int(digit[0]) if digit else 0
        if not 1 <= move <= min(3, self.sticks):
            return Step(is_done=True, stop_reason="illegal")
        self.sticks -= move
        if self.sticks == 0:
            return Step(is_done=True, reward=1.0, stop_reason="won")
        self.sticks -= self.sticks % 4 or 1
        if self.sticks == 0:
            return Step(is_done=True, reward=LOST, stop_reason="lost")
        return Step(observation=f"\n{self.sticks} left.\n")
