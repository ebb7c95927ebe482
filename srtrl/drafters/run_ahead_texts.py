"""Texts of run-aheads: samples of the next step that were decoded early, on the RNG keys that the samples will have.

The noise is the same and the policy nearly so, so that Gumbel-max repeats much of the text. A sample therefore follows
its own run-ahead up to the first difference: the next tokens of it are drafted as a chain.
"""

import numba
import numpy as np
import numpy.typing as npt

from srtrl.drafters.base import Int32Array, Int64Array, PromptKey, TextsByKey
from srtrl.drafters.draft_tree import DraftTrees, ranges
from srtrl.types import Completion, Request

NOT_FOLLOWING = -1
"""In place of a position: the slot follows nothing."""
PRIOR_CORRECT, PRIOR_INCORRECT = 9.0, 1.0
"""Guess at the chance of the next token of a run-ahead, as outcomes. Always counted: the chance stays below 1."""
MAX_OUTCOMES = 20_000
"""With more, old outcomes lose half of their weight: the policy moves."""


class RunAheadTexts:
    """Texts of run-aheads by prompt and RNG key, and the slots' positions in the texts that they follow."""

    def __init__(self) -> None:
        self._texts: list[dict[PromptKey, dict[int, Int32Array]]] = [{}, {}]
        """Made in the last step, and in this one: of each prompt, by RNG key."""
        self._slot_texts = np.zeros((0, 0), np.int32)
        """[slots, capacity], the text that each slot follows."""
        self._lengths = np.zeros(0, np.int64)
        """[slots]."""
        self._positions = np.zeros(0, np.int64)
        """[slots], where in the text the next token is, or `NOT_FOLLOWING`."""
        self._outcomes = np.zeros(2)
        """Tokens of run-aheads that were correct, and that were not."""
        self._num_made = self._num_followed = self._num_used = 0

    @property
    def chance(self) -> float:
        """Learned chance that the next token of a run-ahead is correct."""
        correct, incorrect = self._outcomes
        return float((correct + PRIOR_CORRECT) / (correct + incorrect + PRIOR_CORRECT + PRIOR_INCORRECT))

    @property
    def newest(self) -> TextsByKey:
        """Texts that were made in this step."""
        return self._texts[1]

    def learn(self, texts: TextsByKey) -> None:
        """Store texts of this step from other ranks; of two texts on the same key the longer one."""
        for key, made in texts.items():
            stored = self._texts[1].setdefault(key, {})
            stored |= {rng_key: text for rng_key, text in made.items() if len(text) > len(stored.get(rng_key, ()))}

    def texts(self, key: PromptKey) -> list[Int32Array]:
        """Return all remembered texts of a prompt."""
        return [text for made in self._texts for text in made.get(key, {}).values()]

    def start(self, slot: int, key: PromptKey, request: Request) -> None:
        """A sample follows the run-ahead on its RNG key, if there is one."""
        texts = [made[key][request.rng_key] for made in self._texts if request.rng_key in made.get(key, {})]
        is_first_turn = request.text_start == 0  # where a run-ahead has ended
        text = texts[0] if texts and is_first_turn and not request.is_run_ahead else np.zeros(0, np.int32)
        self._resize(slot, len(text))
        self._slot_texts[slot, : len(text)] = text
        self._lengths[slot] = len(text)
        self._positions[slot] = 0 if len(text) else NOT_FOLLOWING
        self._num_followed += len(text) > 0

    def observe(self, slots: Int64Array, token_ids: Int32Array, offsets: Int64Array) -> None:
        """Compare committed tokens with the texts that their slots follow."""
        if (self._positions[slots] == NOT_FOLLOWING).all():
            return
        self._num_used += _observe(
            self._slot_texts, self._lengths, self._positions, self._outcomes, slots, token_ids, offsets
        )
        if self._outcomes.sum() > MAX_OUTCOMES:
            self._outcomes /= 2

    def finish(self, key: PromptKey, completion: Completion) -> None:
        """Remember the tokens of a run-ahead; forget the text that a completed sample followed."""
        rng_key = completion.request.rng_key
        if completion.request.is_run_ahead:
            self._num_made += len(completion.response.token_ids)
            self._texts[1].setdefault(key, {})[rng_key] = completion.response.token_ids
        else:
            for made in self._texts:
                made.get(key, {}).pop(rng_key, None)

    def end_step(self) -> None:
        """Forget what was made in the last step: the samples that it was made for are complete."""
        self._texts = [self._texts[1], {}]

    def followers(self, slots: Int64Array) -> Int64Array:
        """Indices of those of `slots` [B] that follow a run-ahead which has tokens left."""
        positions = self._positions[slots]
        return np.flatnonzero((positions >= 0) & (positions < self._lengths[slots]))

    def chains(self, slots: Int64Array, max_nodes: Int64Array, min_score: float) -> DraftTrees:
        """The next tokens of the texts that `slots` [B] follow: at most `max_nodes` [B], none with a lower score."""
        longest = int(np.log(max(min_score, 1e-6)) / np.log(self.chance))
        starts = self._positions[slots]
        sizes = np.minimum(np.minimum(self._lengths[slots] - starts, max_nodes), longest)
        offsets = np.zeros(len(slots) + 1, np.int64)
        offsets[1:] = sizes.cumsum()
        depths = ranges(np.zeros_like(sizes), sizes)
        return DraftTrees(
            token_ids=self._slot_texts[np.repeat(slots, sizes), ranges(starts, sizes)],
            parents=(depths - 1).astype(np.int32),
            scores=(self.chance ** (depths + 1)).astype(np.float32),
            offsets=offsets,
        )

    def take_metrics(self) -> dict[str, float]:
        """Metrics since the last call; none where nothing ran ahead."""
        metrics: dict[str, float] = {}
        if self._num_made or self._num_followed or any(self._texts):
            metrics = {
                "engine/run_ahead_tokens_made": self._num_made,
                "engine/run_ahead_tokens_used": self._num_used,
                "engine/run_ahead_followed": self._num_followed,
                "engine/run_ahead_confidence": self.chance,
            }
        self._num_made = self._num_followed = self._num_used = 0
        return metrics

    def _resize(self, slot: int, length: int) -> None:
        """Have room for a slot and for a text."""
        rows, columns = self._slot_texts.shape
        more_rows = max(0, slot + 1 - rows)
        more_columns = max(length, 2 * columns) - columns if length > columns else 0
        if more_rows or more_columns:
            self._slot_texts = np.pad(self._slot_texts, ((0, more_rows), (0, more_columns)))
            self._lengths = np.pad(self._lengths, (0, more_rows))
            self._positions = np.pad(self._positions, (0, more_rows), constant_values=NOT_FOLLOWING)


@numba.njit(cache=True, nogil=True)
def _observe(
    texts: Int32Array,
    lengths: Int64Array,
    positions: Int64Array,
    outcomes: npt.NDArray[np.float64],
    slots: Int64Array,
    token_ids: Int32Array,
    offsets: Int64Array,
) -> int:
    """Follow the tokens of a step; returns the number of accepted drafts: all correct tokens but each slot's last."""
    num_used = 0
    for row in range(len(slots)):
        slot = slots[row]
        for i in range(offsets[row], offsets[row + 1]):
            if 0 <= positions[slot] < lengths[slot]:
                if texts[slot, positions[slot]] == token_ids[i]:
                    positions[slot] += 1
                    outcomes[0] += 1
                    num_used += i + 1 < offsets[row + 1]
                else:
                    positions[slot] = NOT_FOLLOWING
                    outcomes[1] += 1
    return num_used
