"""SuffixDecoding: one trie of all responses and one of each sample's own text; the better of two guesses is drafted.

After G. Oliaro et al. 2024, "SuffixDecoding: Extreme Speculative Decoding for Emerging AI Applications": a global tree
of earlier responses, a tree of the request's prompt and output, and of their speculations the one whose scores sum to
more. Here both are suffix automata, which match at any depth.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from pydantic import Field

from srtrl.drafters.base import DrafterBase
from srtrl.drafters.draft_tree import DraftTrees
from srtrl.drafters.prompt_tries import PromptKey, PromptTries, key_of
from srtrl.drafters.rollout_cache import TOKEN_BYTES, RolloutCache, RolloutCaches
from srtrl.drafters.token_trie import DraftRule, TokenTrie, extend_batch, propose_batch
from srtrl.recipe_base import Section
from srtrl.types import Completion, Request

ALL_PROMPTS: tuple[int, ...] = ()
"""The global trie is that of a prompt without tokens."""


class SuffixOptions(Section):
    """Options of the drafter `suffix`."""

    min_score: float = Field(default=0.1, ge=0, lt=1)
    """Nodes that are less likely to be accepted are not proposed (the authors' setting)."""
    max_tokens: int = Field(default=1_000_000, ge=64)
    """Most tokens in the global trie (some 150 bytes each); a larger one is rebuilt from the newest responses."""


class Drafter(DrafterBase):
    """See `srtrl.drafters.base.DrafterBase`."""

    Options = SuffixOptions
    options: SuffixOptions
    has_kernels = True

    def __init__(self, options: Section | None = None) -> None:
        super().__init__(options)
        max_tokens = self.options.max_tokens
        self._caches = RolloutCaches(
            max_rollouts=max_tokens, max_bytes=2 * TOKEN_BYTES * max_tokens, file_stem="responses"
        )
        self._global = PromptTries(self._history, online=False, max_trie_tokens=max_tokens, max_bytes=1 << 62)
        self._purposes: set[str] = set()
        self._own: dict[int, tuple[TokenTrie, int]] = {}
        self._waiting: dict[int, tuple[int, ...]] = {}  # prompts of samples that have not drafted yet
        self._rule = DraftRule(name="suffix", min_score=self.options.min_score)

    def cache(self, purpose: str) -> RolloutCache:
        """Return the responses that the global trie is built from, all of them under the prompt `ALL_PROMPTS`."""
        return self._caches.of(purpose)

    def start(self, sequence_id: int, request: Request) -> None:
        """Register a sample; its own trie is made when it first drafts."""
        purpose, _ = key_of(request)
        key = (purpose, ALL_PROMPTS)
        if purpose not in self._purposes:
            self._purposes.add(purpose)
            self._global.keep(key)
        self._global.start(sequence_id, request, key)
        self._waiting[sequence_id] = request.prompt_token_ids

    def propose(self, sequence_ids: Sequence[int], max_nodes: Sequence[int]) -> DraftTrees:
        """Draft from both tries, and take for each sequence the draft with the larger sum of scores."""
        tries, cursors = self._both(sequence_ids)
        trees = propose_batch(tries, cursors, [*max_nodes, *max_nodes], self._rule)
        sums = np.concatenate([[0.0], np.cumsum(trees.scores, dtype=np.float64)])
        from_all, from_own = np.diff(sums[trees.offsets]).reshape(2, len(sequence_ids))
        chosen = np.arange(len(sequence_ids)) + np.where(from_own > from_all, len(sequence_ids), 0)
        sizes = trees.sizes[chosen]
        offsets = np.concatenate([[0], np.cumsum(sizes)])
        nodes = np.arange(offsets[-1]) + np.repeat(trees.offsets[chosen] - offsets[:-1], sizes)
        return DraftTrees(
            token_ids=trees.token_ids[nodes],
            parents=trees.parents[nodes],
            scores=trees.scores[nodes],
            offsets=offsets,
        )

    def observe(self, sequence_ids: Sequence[int], token_ids: Sequence[Sequence[int]]) -> None:
        """Committed tokens enter the samples' own tries, and are followed in the global one."""
        own = self._own_of(sequence_ids)
        self._global.extend(sequence_ids, token_ids)
        extend_batch([trie for trie, _ in own], [cursor for _, cursor in own], token_ids)

    def finish(self, sequence_id: int, completion: Completion | None) -> None:
        """A completed response enters the global trie; the sample's own trie goes."""
        sample = self._global.finish(sequence_id, completion)
        self._own.pop(sequence_id, None)
        self._waiting.pop(sequence_id, None)
        if completion is not None and not sample.request.is_run_ahead:
            key = sample.prompt.key
            self._caches.of(key[0]).add(ALL_PROMPTS, completion.token_ids)
            self._global.insert(key, [completion.token_ids])

    def take_metrics(self) -> dict[str, float]:
        """Sizes of the responses that are kept and of all tries, and what was dropped."""
        metrics = self._caches.take_metrics()
        metrics["engine/cache_bytes"] += self._global.num_bytes + sum(trie.num_bytes for trie, _ in self._own.values())
        return metrics

    def save(self, folder: Path) -> None:
        """Write the responses."""
        self._caches.save(folder)

    def load(self, folder: Path) -> None:
        """Read the responses; raises ValueError naming a damaged file."""
        assert not self._global.samples, "no sample may be live"
        self._caches.load(folder)
        self._global.clear()
        self._purposes.clear()

    def _history(self, key: PromptKey) -> list[npt.NDArray[np.int32]]:
        return self._caches.of(key[0]).rollouts(ALL_PROMPTS)

    def _own_of(self, sequence_ids: Sequence[int]) -> list[tuple[TokenTrie, int]]:
        """The samples' own tries, made where there are none yet."""
        new = [sequence_id for sequence_id in sequence_ids if sequence_id in self._waiting]
        if new:
            tries = [TokenTrie() for _ in new]
            cursors = [trie.start() for trie in tries]
            extend_batch(tries, cursors, [self._waiting.pop(sequence_id) for sequence_id in new])
            self._own.update(zip(new, zip(tries, cursors, strict=True), strict=True))
        return [self._own[sequence_id] for sequence_id in sequence_ids]

    def _both(self, sequence_ids: Sequence[int]) -> tuple[list[TokenTrie], list[int]]:
        """Tries and cursors: those of the global trie, then those of the samples' own."""
        tries, cursors = self._global.cursors(sequence_ids)
        own = self._own_of(sequence_ids)
        return tries + [trie for trie, _ in own], cursors + [cursor for _, cursor in own]
