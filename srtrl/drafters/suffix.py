"""SuffixDecoding: a trie of all responses and one of each sample's own text; the best of many guesses is drafted.

After G. Oliaro et al. 2024, "SuffixDecoding: Extreme Speculative Decoding for Emerging AI Applications": a global tree
of earlier responses, a tree of the request's prompt and output. Each suffix of what matches in either gives a draft
whose scores are shares of the occurrences; the draft with the largest sum of scores is taken. Here both trees are
suffix automata, which match at any depth. It is a baseline for `srt`, and takes milliseconds of Python.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from pydantic import Field

from srtrl.drafters.base import DrafterBase, Int32Array, Int64Array, end_to_end
from srtrl.drafters.draft_tree import DraftTrees
from srtrl.drafters.suffix_automaton import LENGTH, LINK, MATCH, ROOT, START_TOKEN, STATE, locate
from srtrl.drafters.token_trie import TokenTrie, TrieCursors
from srtrl.drafters.trie_draft import Basis, Rule, draft_trees
from srtrl.recipe.schema import Section
from srtrl.types import Completion, Request

SUFFIX = Rule(max_contexts=1, distinct_weight=0.0, match_weight=0.0)
"""The shares of the occurrences of the longest context alone."""
MAX_TREE, MAX_MATCH, NODES_PER_MATCH = 48, 64, 4
"""Largest draft, longest suffix that is considered, and nodes of a draft for each token of its suffix."""


class SuffixOptions(Section):
    """Options of this drafter."""

    min_score: float = Field(default=0.1, ge=0, lt=1)
    """Nodes that are less likely to be accepted are not proposed (the authors' setting)."""


class Drafter(DrafterBase):
    """See `srtrl.drafters.base.DrafterBase`."""

    Options = SuffixOptions
    options: SuffixOptions

    def __init__(self, options: Section | None = None) -> None:
        super().__init__(options)
        self._responses: dict[str, TokenTrie] = {}
        """The global trie, for each purpose."""
        self._shared = TrieCursors()
        """In the global trie."""
        self._own = TrieCursors()
        """In a trie of each sample's prompt and response."""

    def start(self, slots: Int64Array, requests: Sequence[Request]) -> None:
        """Give each sample a cursor in the global trie, and a trie of its own, with its prompt."""
        self._shared.start(slots, [self._trie_of(request) for request in requests], inserts=False)
        self._shared.extend(slots, *end_to_end([(START_TOKEN,)] * len(slots)))
        self._own.start(slots, [TokenTrie() for _ in requests], inserts=True)
        self._own.extend(slots, *end_to_end([(START_TOKEN, *request.prompt_token_ids) for request in requests]))

    def propose(self, slots: Int64Array, max_nodes: Int64Array, min_score: float) -> DraftTrees:
        """Draft after each suffix of both matches, and take for each slot the draft with the largest sum of scores."""
        drafts = [
            (row, room, cursor, trie)
            for row, (slot, limit) in enumerate(zip(slots.tolist(), max_nodes.tolist(), strict=True))
            for room, cursor, trie in self._candidates(slot, limit)
        ]
        if not drafts:
            return DraftTrees.empty(0)
        rows, rooms, cursors, tries = zip(*drafts, strict=True)
        candidates = TrieCursors()
        candidates.start(np.arange(len(drafts)), tries, inserts=False)
        candidates.arrays.rows[:] = cursors
        which, basis = np.arange(len(drafts)), Basis(SUFFIX)
        trees = draft_trees(candidates.arrays, which, np.array(rooms), basis, self.options.min_score)
        sums = np.bincount(np.repeat(np.arange(len(trees)), trees.sizes), trees.scores, minlength=len(trees))
        by_row = np.lexsort((-sums, rows))
        return DraftTrees.of(trees[int(by_row[first])] for first in np.searchsorted(rows, np.arange(len(slots))))

    def observe(self, slots: Int64Array, token_ids: Int32Array, offsets: Int64Array) -> None:
        """Committed tokens enter the samples' own tries, and are followed in the global one."""
        self._shared.extend(slots, token_ids, offsets)
        self._own.extend(slots, token_ids, offsets)

    def finish(self, slots: Sequence[int], completions: Sequence[Completion | None]) -> None:
        """Completed responses enter the global trie; the samples' own tries go."""
        self._shared.stop(slots)
        self._own.stop(slots)
        self.learn([completion for completion in completions if completion is not None])

    def learn(self, completions: Sequence[Completion]) -> None:
        """Responses enter the global trie at once."""
        for completion in completions:
            trie = self._trie_of(completion.request)
            text, starts = completion.response.token_ids, [start for start, _ in completion.response.extensions]
            trie.insert(np.insert(text, starts, START_TOKEN) if starts else text)
            self._shared.refresh(trie)

    def _trie_of(self, request: Request) -> TokenTrie:
        return self._responses.setdefault(request.purpose, TokenTrie())

    def _candidates(self, slot: int, max_nodes: int) -> Iterator[tuple[int, Int32Array, TokenTrie]]:
        """Number of nodes, cursor and trie of each draft for a slot; the first one is empty."""
        for cursors in (self._shared, self._own):
            trie, cursor = cursors.tries[slot], cursors.arrays.rows[slot]
            assert trie is not None, f"slot {slot} was not started"
            yield 0, cursor, trie
            match = min(int(cursor[MATCH]), MAX_MATCH)
            state = locate(trie.memory, cursor[STATE], match)
            while state != ROOT:
                shorter = cursor.copy()
                shorter[STATE], shorter[MATCH] = state, match
                yield min(max_nodes, MAX_TREE, NODES_PER_MATCH * match), shorter, trie
                state = int(trie.memory[state + LINK])
                match = int(trie.memory[state + LENGTH])
