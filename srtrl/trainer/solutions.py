"""Worked solutions as training sequences, for the warm start."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from srtrl.trainer.data_order import DataOrder
from srtrl.types import Prompt, TrainSequence

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from srtrl.tasks.base import Task


def solution_sequence(task: Task, tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> TrainSequence:
    """Prompt, solution and end token; the solution is tokenised alone, so that the boundary is the one that RL sees.

    The fields that only RL reads are zero.

    Raises:
        ValueError: the task has no solution for this prompt.
    """
    assert tokenizer.eos_token_id is not None, "refused by SolutionStream"
    solution_ids = tokenizer.encode(task.solution(prompt), add_special_tokens=False)
    token_ids = np.array([*prompt.token_ids, *solution_ids, tokenizer.eos_token_id], np.int64)
    zeros = np.zeros(len(solution_ids) + 1, np.float32)
    return TrainSequence(
        token_ids=token_ids,
        num_prompt_tokens=len(prompt.token_ids),
        draw_index=0,
        rollout_logprobs=zeros,
        advantages=zeros,
    )


class SolutionStream:
    """The endless stream of solutions of the task's first `num_problems` training problems, in the seeded data order.

    A solution that no rollout could produce, for it has more than `max_new_tokens` tokens, is left out and counted.
    """

    def __init__(
        self,
        task: Task,
        tokenizer: PreTrainedTokenizerBase,
        *,
        num_problems: int,
        max_new_tokens: int,
        seed: int,
        noise: float = 0.0,
    ) -> None:
        if tokenizer.eos_token_id is None:
            raise ValueError("the tokenizer has no end token (eos_token), so that none could be learned")
        self._task = task
        self._tokenizer = tokenizer
        self._order = DataOrder(num_problems, seed)
        self._max_new_tokens = max_new_tokens
        self._noise = noise
        self._random = np.random.default_rng((seed, 0x501))
        self._position = 0
        self._pending: TrainSequence | None = None
        self.num_overlong = 0
        """Draws left out so far."""

    def batch(self, num_tokens: int) -> list[TrainSequence]:
        """The next sequences that fit in `num_tokens` packed tokens; at least one.

        Raises:
            ValueError: a problem has no solution, or all of them are too long.
        """
        sequences: list[TrainSequence] = []
        used = 0
        while True:
            sequence = self._pending if self._pending is not None else self._next()
            self._pending = None
            if sequences and used + len(sequence.token_ids) > num_tokens:
                self._pending = sequence
                return sequences
            sequences.append(sequence)
            used += len(sequence.token_ids)

    def _next(self) -> TrainSequence:
        for _ in range(self._order.num_prompts):
            (index,) = self._order.draws(self._position, 1)
            self._position += 1
            sequence = solution_sequence(self._task, self._tokenizer, self._task.train_prompts[index])
            if len(sequence.advantages) <= self._max_new_tokens:
                self._spoil(sequence)
                return sequence
            self.num_overlong += 1
        raise ValueError(f"every solution is longer than rollout.max_new_tokens ({self._max_new_tokens}): raise it")

    def _spoil(self, sequence: TrainSequence) -> None:
        """Replace the recipe's share of the solution's tokens by uniformly random ones, in place."""
        if self._noise:
            solution = sequence.token_ids[sequence.num_prompt_tokens :]
            chosen = self._random.random(len(solution)) < self._noise
            solution[chosen] = self._random.integers(0, len(self._tokenizer), int(chosen.sum()))
