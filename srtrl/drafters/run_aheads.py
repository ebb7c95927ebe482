"""Samples that were decoded early on the very RNG keys that later samples have, and those that follow them now.

The noise is the same and the policy nearly so, so that Gumbel-max repeats much of the text. A sample therefore follows
its own run-ahead up to the first difference: the next tokens of it are drafted as a chain.
"""

import numba
import numpy as np
import numpy.typing as npt

from srtrl.drafters.base import Int32Array, Int64Array, RunAheadTexts
from srtrl.drafters.draft_tree import DraftTrees, ranges
from srtrl.drafters.prompt_tries import PromptKey
from srtrl.types import Request

NOT_FOLLOWING, RECORDING = -1, -2
"""In place of a position: the slot follows nothing; it is a run-ahead, and its tokens are kept."""
PRIOR_CORRECT, PRIOR_INCORRECT = 9.0, 1.0
"""Guess at the chance of the next token of a run-ahead, as outcomes."""
MAX_OUTCOMES = 20_000
"""With more, old outcomes lose half of their weight: the policy moves."""


class RunAheads:
    """What was decoded early, by prompt and RNG key, and how far the slots have followed it."""

    def __init__(self) -> None:
        self._texts: list[dict[PromptKey, dict[int, Int32Array]]] = [{}, {}]
        """Made before the last policy update, and since: of each prompt, by RNG key."""
        self._requests: dict[int, tuple[PromptKey, Request]] = {}
        """Of the live slots."""
        self._slot_texts = np.zeros((0, 0), np.int32)
        """[slots, capacity], of a run-ahead what it has decoded, else what the slot follows."""
        self._lengths = np.zeros(0, np.int64)
        """[slots]."""
        self._positions = np.zeros(0, np.int64)
        """[slots], where in the text the next token is, or one of the constants above."""
        self._outcomes = np.array([PRIOR_CORRECT, PRIOR_INCORRECT])
        """Tokens of run-aheads that were correct, and that were not."""
        self._num_made = self._num_followed = self._num_used = 0

    @property
    def chance(self) -> float:
        """Learned chance that the next token of a run-ahead is correct."""
        return float(self._outcomes[0] / self._outcomes.sum())

    @property
    def newest(self) -> RunAheadTexts:
        """What was made since the last policy update."""
        return self._texts[1]

    def learn(self, texts: RunAheadTexts) -> None:
        """Remember what other ranks have made since the last policy update; of two texts on one key the longer one."""
        for key, made in texts.items():
            known = self._texts[1].setdefault(key, {})
            known |= {rng_key: text for rng_key, text in made.items() if len(text) > len(known.get(rng_key, ()))}

    def texts(self, key: PromptKey) -> list[Int32Array]:
        """Return all remembered texts of a prompt."""
        return [text for made in self._texts for text in made.get(key, {}).values()]

    def start(self, slot: int, key: PromptKey, request: Request) -> None:
        """Begin to record a run-ahead, or to follow the one on the sample's RNG key if there is one."""
        found = [made[key][request.rng_key] for made in self._texts if request.rng_key in made.get(key, {})]
        is_first_turn = request.turn == 0  # where a run-ahead has ended
        text = found[0] if found and is_first_turn and not request.is_run_ahead else np.zeros(0, np.int32)
        self._requests[slot] = key, request
        self._resize(slot, len(text))
        self._slot_texts[slot, : len(text)] = text
        self._lengths[slot] = len(text)
        self._positions[slot] = RECORDING if request.is_run_ahead else 0 if len(text) else NOT_FOLLOWING
        self._num_followed += len(text) > 0

    def observe(self, slots: Int64Array, token_ids: Int32Array, offsets: Int64Array) -> None:
        """Compare committed tokens with what their slots follow, or record them."""
        if (self._positions[slots] == NOT_FOLLOWING).all():
            return
        self._resize(0, int((self._lengths[slots] + np.diff(offsets)).max()))
        self._num_used += _observe(
            self._slot_texts, self._lengths, self._positions, self._outcomes, slots, token_ids, offsets
        )
        if self._outcomes.sum() > MAX_OUTCOMES:
            self._outcomes /= 2

    def finish(self, slot: int, *, is_complete: bool) -> None:
        """Remember what a run-ahead decoded; forget what a completed sample followed."""
        key, request = self._requests.pop(slot)
        if request.is_run_ahead:
            text = self._slot_texts[slot, : self._lengths[slot]].copy()
            self._num_made += len(text)
            self._texts[1].setdefault(key, {})[request.rng_key] = text
        elif is_complete:
            for made in self._texts:
                made.get(key, {}).pop(request.rng_key, None)
        self._positions[slot] = NOT_FOLLOWING

    def on_policy_update(self) -> None:
        """Forget what was made before the last update: the step that it was made for has passed."""
        self._texts = [self._texts[1], {}]

    def followers(self, slots: Int64Array) -> Int64Array:
        """Indices of those of `slots` [B] that follow a run-ahead which has tokens left."""
        positions = self._positions[slots]
        return np.flatnonzero((positions >= 0) & (positions < self._lengths[slots]))

    def chains(self, slots: Int64Array, max_nodes: Int64Array, min_score: float) -> DraftTrees:
        """The next tokens of what each of `slots` [B] follows: at most `max_nodes` [B], none with a lower score."""
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
    """Take in the tokens of a step; returns how many were accepted drafts: all correct ones but each slot's last."""
    num_used = 0
    for row in range(len(slots)):
        slot = slots[row]
        for i in range(offsets[row], offsets[row + 1]):
            if positions[slot] == RECORDING:
                texts[slot, lengths[slot]] = token_ids[i]
                lengths[slot] += 1
            elif 0 <= positions[slot] < lengths[slot]:
                if texts[slot, positions[slot]] == token_ids[i]:
                    positions[slot] += 1
                    outcomes[0] += 1
                    num_used += i + 1 < offsets[row + 1]
                else:
                    positions[slot] = NOT_FOLLOWING
                    outcomes[1] += 1
    return num_used
