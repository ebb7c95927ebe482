"""SuffixDecoding: one trie of all responses and one of each sample's own text; the better of two guesses is drafted.

After G. Oliaro et al. 2024, "SuffixDecoding: Extreme Speculative Decoding for Emerging AI Applications": a global tree
of earlier responses, a tree of the request's prompt and output, and of their speculations the one whose scores sum to
more. Here both are suffix automata, which match at any depth.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from pydantic import Field

from srtrl.drafters.base import DrafterBase, Int32Array, Int64Array, end_to_end, run_warm_up
from srtrl.drafters.draft_tree import DraftTrees
from srtrl.drafters.prompt_tries import key_of, newest
from srtrl.drafters.rollout_cache import ROLLOUT_BYTES, TOKEN_BYTES, RolloutCache, RolloutCaches
from srtrl.drafters.suffix_automaton import START_TOKEN
from srtrl.drafters.token_trie import TokenTrie, TrieCursors, insert_texts
from srtrl.drafters.trie_draft import SUFFIX, TrieDrafts
from srtrl.recipe import Section
from srtrl.types import Completion, Request

ALL_PROMPTS: tuple[int, ...] = ()
"""The responses are kept as those of a prompt without tokens."""


class SuffixOptions(Section):
    """Options of the drafter `suffix`."""

    min_score: float = Field(default=0.1, ge=0, lt=1)
    """Nodes that are less likely to be accepted are not proposed (the authors' setting)."""
    max_tokens: int = Field(default=1_000_000, ge=64)
    """Maximum number of tokens in the global trie (some 100 bytes each); a full one is built again from the newest
    responses, after the policy update."""


class Drafter(DrafterBase):
    """See `srtrl.drafters.base.DrafterBase`."""

    Options = SuffixOptions
    options: SuffixOptions

    def __init__(self, options: Section | None = None) -> None:
        super().__init__(options)
        self.caches = RolloutCaches(
            max_rollouts=self.options.max_tokens,
            max_bytes=(TOKEN_BYTES + ROLLOUT_BYTES) * self.options.max_tokens,
            file_stem="responses",
        )
        self._global: dict[str, TokenTrie] = {}
        """Of all responses, for each purpose."""
        self._in_global = TrieCursors()
        self._in_own = TrieCursors()
        self._drafts = TrieDrafts()

    def cache(self, purpose: str) -> RolloutCache:
        """Return the responses that the global trie is built from, all of them under the prompt `ALL_PROMPTS`."""
        return self.caches.of(purpose)

    def start(self, slots: Int64Array, requests: Sequence[Request]) -> None:
        """Give each sample a trie of its own, with its prompt, and a cursor in the global one."""
        starts = np.full(len(slots), START_TOKEN, np.int32), np.arange(len(slots) + 1)
        tries = [self._trie_of(key_of(request)[0]) for request in requests]
        self._in_global.start(slots, tries, inserts=False)
        self._in_global.extend(slots, *starts)
        self._in_own.start(slots, [TokenTrie() for _ in requests], inserts=True)
        self._in_own.extend(slots, *starts)
        self._in_own.extend(slots, *end_to_end([request.prompt_token_ids for request in requests]))

    def propose(self, slots: Int64Array, max_nodes: Int64Array) -> DraftTrees:
        """Draft from both tries, and take for each slot the draft with the larger sum of scores."""
        both = [
            self._drafts.propose(cursors, slots, max_nodes, SUFFIX, self.options.min_score)
            for cursors in (self._in_global, self._in_own)
        ]
        sums = [np.concatenate([[0.0], trees.scores.cumsum(dtype=np.float64)])[trees.offsets] for trees in both]
        is_own = np.diff(sums[1]) > np.diff(sums[0])
        return both[0].replace(np.flatnonzero(is_own), both[1].take(np.flatnonzero(is_own)))

    def observe(self, slots: Int64Array, token_ids: Int32Array, offsets: Int64Array) -> None:
        """Committed tokens enter the samples' own tries, and are followed in the global one."""
        self._in_global.extend(slots, token_ids, offsets)
        self._in_own.extend(slots, token_ids, offsets)

    def finish(self, slots: Sequence[int], completions: Sequence[Completion | None]) -> None:
        """Completed responses enter the global trie; the samples' own tries go."""
        self._in_global.stop(slots)
        self._in_own.stop(slots)
        self.learn([completion for completion in completions if completion is not None])

    def learn(self, completions: Sequence[Completion]) -> None:
        """Completed responses enter the global trie."""
        for completion in completions:
            purpose, text = key_of(completion.request)[0], np.array(completion.token_ids, np.int32)
            trie = self._trie_of(purpose)
            self.caches.of(purpose).add(ALL_PROMPTS, text)
            trie.insert(text)
            self._in_global.refresh(trie)

    def on_policy_update(self) -> None:
        """Drop full tries that no sample follows: they are built again."""
        self._global = {
            purpose: trie
            for purpose, trie in self._global.items()
            if trie.num_tokens < self.options.max_tokens or any(trie is other for other in self._in_global.tries)
        }

    def warm_up(self) -> None:
        """Compile the kernels."""
        run_warm_up(type(self)(self.options))

    def take_metrics(self) -> dict[str, float]:
        """Sizes of the responses that are kept and of all tries, and what was dropped."""
        metrics = self.caches.take_metrics()
        tries = [*self._global.values(), *(trie for trie in self._in_own.tries if trie is not None)]
        metrics["engine/cache_bytes"] += sum(trie.num_bytes for trie in tries)
        return metrics

    def save(self, folder: Path) -> None:
        """Write the responses."""
        self.caches.save(folder)

    def load(self, folder: Path) -> None:
        """Read the responses; raises ValueError naming a damaged file."""
        self.caches.load(folder)
        self._global = {}

    def _trie_of(self, purpose: str) -> TokenTrie:
        """The global trie of a purpose, built from the newest responses if there is none."""
        if purpose not in self._global:
            texts = newest(self.caches.of(purpose).rollouts(ALL_PROMPTS), self.options.max_tokens // 2)
            trie = TokenTrie(expected_tokens=sum(map(len, texts)), max_tokens=self.options.max_tokens)
            insert_texts([trie], [texts])
            self._global[purpose] = trie
        return self._global[purpose]
