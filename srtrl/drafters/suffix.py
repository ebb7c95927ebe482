"""SuffixDecoding: texts of all responses and each sample's own text; the best of many guesses is drafted.

After G. Oliaro et al. 2024, "SuffixDecoding: Extreme Speculative Decoding for Emerging AI Applications": each suffix of
the sample's text that has occurred, in the responses of any prompt or in its own prompt and text, gives a draft whose
scores are shares of the occurrences; the draft with the largest sum of scores is taken. Here an occurrence is one of
the newest places of `srtrl.drafters.texts`. It is a baseline for `srt`, and takes milliseconds of Python.
"""

import heapq
from collections.abc import Iterator, Sequence

import numpy as np
from pydantic import Field

from srtrl.drafters.base import DrafterBase, Int32Array, Int64Array, end_to_end
from srtrl.drafters.draft_tree import EMPTY_TREE, ROOT, DraftTree, DraftTrees
from srtrl.drafters.rollout_cache import RolloutCache
from srtrl.drafters.texts import MAX_MATCH, START_TOKEN, TextStore
from srtrl.recipe.schema import Section
from srtrl.types import Completion, Request

MAX_TREE, NODES_PER_MATCH = 48, 4
"""Largest draft, and nodes of a draft for each token of its suffix."""
MAX_ROLLOUTS, MAX_BYTES = 1024, 1 << 28
"""Responses of a prompt, and bytes of all of them, that are kept; the newest stay."""


class SuffixOptions(Section):
    """Options of this drafter."""

    min_score: float = Field(default=0.1, ge=0, lt=1)
    """Nodes that are less likely to be accepted are not proposed (the authors' setting)."""


class Drafter(DrafterBase):
    """See `srtrl.drafters.base.DrafterBase`. A slot has two texts: its response, and with the prompt before it."""

    Options = SuffixOptions
    options: SuffixOptions

    def __init__(self, options: Section | None = None) -> None:
        super().__init__(options)
        self._caches: dict[str, RolloutCache] = {}
        """Responses, for each purpose."""
        self._begin_step()

    def _begin_step(self) -> None:
        self._store = TextStore()
        self._numbers: dict[str, int] = {}
        """Numbers of the purposes whose responses are in the store."""
        self._num_texts = 0

    def start(self, slots: Int64Array, requests: Sequence[Request]) -> None:
        """Begin both texts of each sample; before a purpose's first one all of its responses are inserted."""
        for slot, request in zip(slots.tolist(), requests, strict=True):
            self._insert(2 * slot + 1, self._number_of(request.purpose), [])
            self._num_texts += 1
            self._insert(2 * slot + 2, self._num_texts, request.prompt_token_ids)

    def propose(self, slots: Int64Array, max_nodes: Int64Array, min_score: float) -> DraftTrees:
        """Draft after each suffix of both texts, and take for each slot the draft with the largest sum of scores."""
        best = []
        for slot, room in zip(slots.tolist(), max_nodes.tolist(), strict=True):
            drafts = [EMPTY_TREE, *self._drafts(2 * slot + 1, room), *self._drafts(2 * slot + 2, room)]
            best.append(max(drafts, key=lambda tree: tree.scores.sum()))
        return DraftTrees.of(best)

    def observe(self, slots: Int64Array, token_ids: Int32Array, offsets: Int64Array) -> None:
        """Append the committed tokens to both texts; drafts of other samples do not find them yet."""
        self._store.extend(2 * slots + 1, token_ids, offsets, links=False)
        self._store.extend(2 * slots + 2, token_ids, offsets)

    def finish(self, slots: Sequence[int], completions: Sequence[Completion | None]) -> None:
        """Keep completed responses."""
        self.learn([completion for completion in completions if completion is not None])

    def learn(self, completions: Sequence[Completion]) -> None:
        """Keep responses; drafts find them at once."""
        for completion in completions:
            request, response = completion.request, completion.response
            starts = [start for start, _ in response.extensions]
            text = np.insert(response.token_ids, starts, START_TOKEN).astype(np.int32)
            self._insert(0, self._number_of(request.purpose), text)
            self._caches[request.purpose].add(request.prompt_token_ids, text)

    def end_step(self) -> None:
        """Forget all texts: the newest responses are inserted again."""
        self._begin_step()

    def _insert(self, slot: int, number: int, text: Sequence[int] | Int32Array) -> None:
        """Begin a slot's text of a number."""
        self._store.start(np.array([slot]), [number])
        self._store.extend(np.array([slot]), *end_to_end([[START_TOKEN, *text]]))

    def _number_of(self, purpose: str) -> int:
        """Number of the responses of a purpose, which are in the store from then on."""
        if purpose not in self._numbers:
            self._num_texts += 1
            self._numbers[purpose] = self._num_texts
            cache = self._caches.setdefault(purpose, RolloutCache(max_rollouts=MAX_ROLLOUTS, max_bytes=MAX_BYTES))
            for rollout in (response for prompt in cache.prompts() for response in cache.rollouts(prompt)):
                self._insert(0, self._num_texts, rollout.tokens)
        return self._numbers[purpose]

    def _drafts(self, slot: int, max_nodes: int) -> Iterator[DraftTree]:
        """A draft for each suffix of a slot's text."""
        places, matches = self._store.find(slot)
        matches = matches.clip(max=MAX_MATCH)
        for match in np.unique(matches).tolist():
            yield self._grow(places[matches >= match], min(max_nodes, MAX_TREE, NODES_PER_MATCH * match))

    def _grow(self, places: Int32Array, room: int) -> DraftTree:
        """Best first: a node's score is its parent's times the share of the parent's places that have its token."""
        nodes: list[tuple[int, int, float]] = []
        waiting: list[tuple[float, int, int, Int32Array]] = []
        score, parent = 1.0, ROOT
        while len(nodes) < room:
            tokens = self._store.arrays.tokens[places]
            for token, count in zip(*np.unique(tokens, return_counts=True), strict=True):
                if score * count / len(places) >= self.options.min_score:
                    heapq.heappush(waiting, (-score * count / len(places), int(token), parent, places[tokens == token]))
            if not waiting:
                break
            score, token, above, places = heapq.heappop(waiting)
            score, parent, places = -score, len(nodes), self._store.places_after(places)
            nodes.append((token, above, score))
        token_ids, parents, scores = zip(*nodes, strict=True) if nodes else ((), (), ())
        return DraftTree(
            token_ids=np.array(token_ids, np.int32),
            parents=np.array(parents, np.int32),
            scores=np.array(scores, np.float32),
        )
