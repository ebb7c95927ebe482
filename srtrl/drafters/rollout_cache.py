"""Completed rollouts by prompt, in bounded memory: the drafters' tries are built from them.

Rollouts are plain int32 arrays (checkpoints hold these); tries are built from them for the prompts that decode.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file
from safetensors.numpy import save as to_safetensors

from srtrl.drafters.distributions import NO_DISTRIBUTIONS
from srtrl.files import write_atomic

Tokens = npt.NDArray[np.int32]

TOKEN_BYTES = 4
ROLLOUT_BYTES = 128
"""Memory of a rollout beside its tokens: the array object and its entry in a list."""
PROMPT_BYTES = 512
"""Memory of a prompt beside its tokens and rollouts: its record and its entry in the table."""
KEPT_SHARE = 0.95
"""When memory is short, rollouts are dropped until this share of it is in use, so that it is short seldom."""


class CachedRollout(NamedTuple):
    """A completed rollout."""

    tokens: Tokens
    distributions: Tokens
    """Their distributions, see `srtrl.drafters.distributions`: [tokens, SIZE], or [0, SIZE]; not in files."""

    @property
    def num_bytes(self) -> int:
        """Memory, by the constants above."""
        return ROLLOUT_BYTES + TOKEN_BYTES * len(self.tokens) + self.distributions.nbytes


class RolloutCache:
    """The newest rollouts of each prompt, at most `max_rollouts` per prompt and `max_bytes` in total.

    The key is the prompt's token ids. When memory is short, distributions are dropped first, then each prompt loses its
    oldest rollouts before any prompt is dropped, the prompt that was added to least recently first.
    """

    def __init__(self, *, max_rollouts: int, max_bytes: int) -> None:
        assert max_rollouts >= 1
        assert max_bytes >= 0
        self.max_rollouts = max_rollouts
        self.max_bytes = max_bytes
        self.num_bytes = 0
        """Memory by the constants above: 4 bytes per token, of prompts too, and an overhead per rollout and prompt."""
        self._rollouts: dict[tuple[int, ...], list[CachedRollout]] = {}
        """By prompt, the newest last; the prompt that was added to last comes last."""

    def add(
        self, prompt: tuple[int, ...], tokens: Sequence[int] | Tokens, distributions: Tokens = NO_DISTRIBUTIONS
    ) -> None:
        """Append a completed rollout of a prompt; older ones are dropped where a bound requires it.

        An empty rollout is ignored.

        An int32 array is kept as it is, and must not change any more.
        """
        rollout = CachedRollout(np.asarray(tokens, dtype=np.int32), distributions)
        if not len(rollout.tokens):
            return
        if PROMPT_BYTES + ROLLOUT_BYTES + TOKEN_BYTES * (len(prompt) + len(rollout.tokens)) > self.max_bytes:
            return  # too large for any cache of this size: keep the others
        rollouts = self._rollouts.pop(prompt, None)
        if rollouts is None:
            rollouts = []
            self.num_bytes += PROMPT_BYTES + TOKEN_BYTES * len(prompt)
        self._rollouts[prompt] = rollouts
        rollouts.append(rollout)
        self.num_bytes += rollout.num_bytes
        if len(rollouts) > self.max_rollouts:
            self.num_bytes -= rollouts.pop(0).num_bytes
        if self.num_bytes > self.max_bytes:
            self._make_room(int(KEPT_SHARE * self.max_bytes))

    def rollouts(self, prompt: tuple[int, ...]) -> list[CachedRollout]:
        """Return the prompt's rollouts, newest last; an empty list if there are none."""
        return list(self._rollouts.get(prompt, ()))

    def mean_tokens(self, prompt: tuple[int, ...]) -> float | None:
        """Mean length of the prompt's rollouts; None if there are none."""
        rollouts = self._rollouts.get(prompt)
        return sum(len(rollout.tokens) for rollout in rollouts) / len(rollouts) if rollouts else None

    def prompts(self) -> list[tuple[int, ...]]:
        """Token ids of all prompts, the least recently added to first."""
        return list(self._rollouts)

    def save(self, path: Path) -> None:
        """Write all rollouts into one file, whole or not at all. Equal contents give equal bytes.

        Prompts and rollouts lie end to end, beside their lengths and the number of rollouts of each prompt.
        """
        rollouts = [rollout.tokens for of_prompt in self._rollouts.values() for rollout in of_prompt]
        arrays: dict[str, npt.NDArray[Any]] = {
            "prompt_tokens": np.array([token for prompt in self._rollouts for token in prompt], np.int32),
            "prompt_lengths": np.array([len(prompt) for prompt in self._rollouts], np.int64),
            "rollout_counts": np.array([len(of_prompt) for of_prompt in self._rollouts.values()], np.int64),
            "rollout_tokens": np.concatenate([np.empty(0, np.int32), *rollouts]),
            "rollout_lengths": np.array([len(rollout) for rollout in rollouts], np.int64),
        }
        write_atomic(path, to_safetensors(arrays))

    def load(self, path: Path) -> None:
        """Add the rollouts of a file that `save` wrote, within this cache's bounds.

        The checkpoint that holds it has vouched for its bytes and its layout.
        """
        arrays = load_file(path)
        prompts = np.split(arrays["prompt_tokens"], np.cumsum(arrays["prompt_lengths"])[:-1])
        rollouts = iter(np.split(arrays["rollout_tokens"], np.cumsum(arrays["rollout_lengths"])[:-1]))
        for prompt, count in zip(prompts, arrays["rollout_counts"].tolist(), strict=False):  # of none: one empty part
            for _ in range(count):
                self.add(tuple(prompt.tolist()), next(rollouts).copy())

    def _make_room(self, max_bytes: int) -> None:
        """Drop distributions, then trim prompts with k rollouts to k - 1, k falling, until the rest fits."""
        for rollouts in self._rollouts.values():
            for number, rollout in enumerate(rollouts):
                if self.num_bytes > max_bytes:
                    self.num_bytes -= rollout.distributions.nbytes
                    rollouts[number] = rollout._replace(distributions=NO_DISTRIBUTIONS)
        for num_rollouts in range(self.max_rollouts, 0, -1):
            for prompt, rollouts in list(self._rollouts.items()):
                if self.num_bytes <= max_bytes:
                    return
                if len(rollouts) == num_rollouts:
                    self.num_bytes -= rollouts.pop(0).num_bytes
                    if not rollouts:
                        del self._rollouts[prompt]
                        self.num_bytes -= PROMPT_BYTES + TOKEN_BYTES * len(prompt)
