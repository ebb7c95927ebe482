"""Coupled run-ahead: samples that were decoded early on the very rng_keys that later samples have.

The noise is the same and the policy nearly so, so that Gumbel-max repeats most of the text. A sample therefore first
follows its own run-ahead: the next chunk of it is drafted as a chain, with a confidence a token that is learned from
outcomes. After a mismatch it is silent until the texts meet again, and the run-ahead serves in the trie like any
other text.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from srtrl.drafters.coupled_kernel import merge_chains
from srtrl.drafters.draft_tree import DraftTrees
from srtrl.drafters.prompt_tries import PromptKey

NUM_ANCHOR_TOKENS = 8
"""Texts meet again where this many tokens in a row are equal."""
WINDOW = 64
"""How far from where it is expected the meeting place is looked for, in tokens to each side."""
_ITEM_BYTES = array("i").itemsize


@dataclass(slots=True)
class _RunAhead:
    """The text of a sample that was decoded early."""

    tokens: list[int]
    num_updates: int = 0
    """Policy updates since it was made."""


@dataclass(slots=True)
class _Confidence:
    """Learned chance that the next token of a text that is followed is the right one."""

    right: float
    """Tokens that were, with the weight of the prior guess."""
    wrong: float
    """Tokens that were not."""

    @property
    def chance(self) -> float:
        return self.right / (self.right + self.wrong)

    def add(self, num_right: int, num_wrong: int) -> None:
        self.right += num_right
        self.wrong += num_wrong
        if self.right + self.wrong > 20_000:  # the policy moves: old outcomes fade
            self.right /= 2
            self.wrong /= 2


@dataclass(slots=True)
class _Follower:
    """A sample and the run-ahead on its RNG key."""

    text: list[int]
    anchor: int | None = 0
    """Where in `text` the sample's next token is expected; None after a mismatch."""
    num_emitted: int = 0
    shift: int = 0
    """`anchor` less `num_emitted`, when it was last anchored: not 0 where text was left out or put in."""
    had_mismatch: bool = False
    raw: bytes = field(init=False)
    """The text as bytes, which are searched fast."""

    def __post_init__(self) -> None:
        self.raw = array("i", self.text).tobytes()


class RunAheads:
    """What was decoded early, by rng_key, and the samples that follow it now."""

    def __init__(self) -> None:
        self._texts: dict[PromptKey, dict[int, _RunAhead]] = {}  # by prompt and rng_key
        self._followers: dict[int, _Follower] = {}
        # The noise of a token is keyed by its position: shifted, the texts share no noise.
        self._in_phase = _Confidence(9.0, 1.0)
        self._shifted = _Confidence(6.0, 4.0)
        self._num_made = 0
        """Tokens of run-aheads that ended since the last `take_metrics`."""
        self._num_used = 0
        self._num_followed = 0
        self._num_reanchored = 0
        self._num_first_runs = 0
        self._first_run_tokens = 0

    @property
    def has_followers(self) -> bool:
        """Whether a sample follows a text."""
        return bool(self._followers)

    def keep(self, key: PromptKey, rng_key: int, tokens: list[int]) -> None:
        """Remember what a run-ahead decoded; of two on an RNG key the longer."""
        self._num_made += len(tokens)
        texts = self._texts.setdefault(key, {})
        known = texts.get(rng_key)
        if known is None or len(tokens) >= len(known.tokens):
            texts[rng_key] = _RunAhead(tokens)

    def texts(self, key: PromptKey) -> list[npt.NDArray[np.int32]]:
        """Return all remembered texts of a prompt."""
        return [np.array(run_ahead.tokens, np.int32) for run_ahead in self._texts.get(key, {}).values()]

    def on_policy_update(self) -> None:
        """Forget what the second update finds: the step that it was made for has passed."""
        for key, texts in list(self._texts.items()):
            for run_ahead in texts.values():
                run_ahead.num_updates += 1
            self.forget(key, [rng_key for rng_key, run_ahead in texts.items() if run_ahead.num_updates >= 2])

    def start(self, sequence_id: int, key: PromptKey, rng_key: int) -> None:
        """Let a sample follow the run-ahead of its RNG key, if there is one."""
        run_ahead = self._texts.get(key, {}).get(rng_key)
        if run_ahead is not None and run_ahead.tokens:
            self._followers[sequence_id] = _Follower(run_ahead.tokens)
            self._num_followed += 1

    def finish(self, sequence_id: int, key: PromptKey, rng_key: int, response: Sequence[int] | None) -> None:
        """Forget a sample, and its run-ahead if it came to its end: then `response` is all of it."""
        follower = self._followers.get(sequence_id)
        if follower is not None:
            if response is not None and len(response) > follower.num_emitted:
                self.observe(sequence_id, response[follower.num_emitted :], response)
            if not follower.had_mismatch:
                self._end_first_run(follower)
            del self._followers[sequence_id]
        if response is not None:
            self.forget(key, [rng_key])

    def forget(self, key: PromptKey, rng_keys: Sequence[int]) -> None:
        """Forget what was decoded on some rng_keys, if anything was."""
        texts = self._texts.get(key)
        if texts is None:
            return
        for rng_key in rng_keys:
            texts.pop(rng_key, None)
        if not texts:
            del self._texts[key]

    def add_chains(self, trees: DraftTrees, sequence_ids: Sequence[int], max_nodes: Sequence[int]) -> DraftTrees:
        """Merge the next chunk of each followed text into the sample's tree, best nodes first, within `max_nodes`."""
        if not self._followers:
            return trees
        chains: list[Sequence[int]] = []
        chances = np.zeros(len(sequence_ids))
        for index, (sequence_id, most) in enumerate(zip(sequence_ids, max_nodes, strict=True)):
            follower = self._followers.get(sequence_id)
            chain: Sequence[int] = ()
            if follower is not None and follower.anchor is not None:
                chain = follower.text[follower.anchor : follower.anchor + most]
                chances[index] = self._confidence(follower).chance
            chains.append(chain)
        ends = np.cumsum([0, *map(len, chains)])
        if not ends[-1]:
            return trees
        tokens = np.fromiter((token for chain in chains for token in chain), np.int32, int(ends[-1]))
        token_ids, parents, scores, offsets = merge_chains(
            trees.token_ids,
            trees.parents,
            trees.scores,
            trees.offsets,
            tokens,
            ends,
            chances,
            np.asarray(max_nodes, np.int64),
        )
        return DraftTrees(token_ids=token_ids, parents=parents, scores=scores, offsets=offsets)

    def observe(self, sequence_id: int, tokens: Sequence[int], response: Sequence[int]) -> None:
        """Tokens that were committed to a sample; `response` is all of it, they included."""
        follower = self._followers.get(sequence_id)
        if follower is None:
            return
        start = follower.num_emitted
        follower.num_emitted += len(tokens)
        if follower.anchor is not None:
            self._compare(follower, start, tokens)
        if follower.anchor is None:
            self._reanchor(follower, response)

    def take_metrics(self) -> dict[str, float]:
        """Metrics since the last call; none where nothing ran ahead."""
        metrics: dict[str, float] = {}
        if self._num_made or self._num_followed or self._texts:
            metrics = {
                "engine/run_ahead_tokens_made": self._num_made,
                "engine/run_ahead_tokens_used": self._num_used,
                "engine/run_ahead_followed": self._num_followed,
                "engine/run_ahead_reanchored": self._num_reanchored,
                "engine/run_ahead_confidence": self._in_phase.chance,
            }
        if self._num_first_runs:
            metrics["engine/run_ahead_first_mismatch"] = self._first_run_tokens / self._num_first_runs
        self._num_made = self._num_used = self._num_followed = self._num_reanchored = 0
        self._num_first_runs = self._first_run_tokens = 0
        return metrics

    def _compare(self, follower: _Follower, start: int, tokens: Sequence[int]) -> None:
        """Hold the text that is followed against the tokens that came at `start`."""
        assert follower.anchor is not None
        expected = follower.text[follower.anchor : follower.anchor + len(tokens)]
        num_right = len(expected)
        if list(tokens) != expected:
            pairs = enumerate(zip(tokens, expected, strict=False))
            num_right = next((at for at, (token, guess) in pairs if token != guess), num_right)
        is_mismatch = num_right < len(expected)
        self._confidence(follower).add(num_right, int(is_mismatch))
        self._num_used += min(num_right, len(tokens) - 1)  # the last token of a step is no accepted draft
        follower.anchor += num_right
        if not is_mismatch:
            return
        follower.shift = follower.anchor - (start + num_right)
        if not follower.had_mismatch:
            follower.had_mismatch = True
            self._end_first_run(follower)
        follower.anchor = None

    def _reanchor(self, follower: _Follower, response: Sequence[int]) -> None:
        """Look for the last tokens of the response near the place where the run-ahead should have them."""
        if len(response) < NUM_ANCHOR_TOKENS:
            return
        needle = array("i", response[-NUM_ANCHOR_TOKENS:]).tobytes()
        expected = follower.num_emitted + follower.shift - NUM_ANCHOR_TOKENS
        places = [
            _find(follower.raw, needle, max(0, expected), expected + WINDOW),
            _find_last(follower.raw, needle, max(0, expected - WINDOW), expected),
        ]
        found = [place for place in places if place is not None]
        if found:
            nearest = min(found, key=lambda place: abs(place - expected))
            follower.anchor = nearest + NUM_ANCHOR_TOKENS
            follower.shift = follower.anchor - follower.num_emitted
            self._num_reanchored += 1

    def _confidence(self, follower: _Follower) -> _Confidence:
        return self._shifted if follower.shift else self._in_phase

    def _end_first_run(self, follower: _Follower) -> None:
        if follower.num_emitted:
            self._num_first_runs += 1
            self._first_run_tokens += follower.anchor or 0


def _find(raw: bytes, needle: bytes, first: int, last: int) -> int | None:
    """The first token index from `first` to `last` where the tokens of `needle` begin."""
    end = (last * _ITEM_BYTES) + len(needle)
    at = raw.find(needle, first * _ITEM_BYTES, end)
    while at >= 0 and at % _ITEM_BYTES:  # bytes that are equal across the border of two tokens
        at = raw.find(needle, at + 1, end)
    return at // _ITEM_BYTES if at >= 0 else None


def _find_last(raw: bytes, needle: bytes, first: int, last: int) -> int | None:
    """The last token index from `first` to `last` where the tokens of `needle` begin."""
    if last < first:
        return None
    end = (last * _ITEM_BYTES) + len(needle)
    at = raw.rfind(needle, first * _ITEM_BYTES, end)
    while at >= 0 and at % _ITEM_BYTES:
        end = at + len(needle) - 1
        at = raw.rfind(needle, first * _ITEM_BYTES, end)
    return at // _ITEM_BYTES if at >= 0 else None
