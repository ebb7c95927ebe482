"""SuffixDecoding: one trie of all responses and one of each sample's own text; the best of many guesses is drafted.

After G. Oliaro et al. 2024, "SuffixDecoding: Extreme Speculative Decoding for Emerging AI Applications": a global tree
of earlier responses, a tree of the request's prompt and output. Each suffix of what matches in either gives a draft
whose scores are shares of the occurrences; the draft whose scores sum to most is taken. Here both trees are suffix
automata, which match at any depth. It is a baseline, and takes milliseconds of Python.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
from pydantic import Field

from srtrl.drafters.base import Int32Array, Int64Array, end_to_end
from srtrl.drafters.draft_tree import DraftTrees
from srtrl.drafters.prompt_tries import PromptKey, TrieDrafter, TrieOptions
from srtrl.drafters.suffix_automaton import LENGTH, LINK, MATCH, ROOT, START_TOKEN, STATE, locate
from srtrl.drafters.token_trie import TokenTrie, TrieCursors
from srtrl.drafters.trie_draft import SUFFIX, draft_trees
from srtrl.recipe.schema import Section
from srtrl.types import Completion, Request

ALL_PROMPTS: tuple[int, ...] = ()
"""The responses are kept as those of a prompt without tokens."""
MAX_TREE, MAX_MATCH, NODES_PER_MATCH = 48, 64, 4
"""Largest draft, longest suffix that is looked at, and nodes of a draft for each token of its suffix."""


class SuffixOptions(TrieOptions):
    """Options of the drafter `suffix`; its prompts share one trie."""

    min_score: float = Field(default=0.1, ge=0, lt=1)
    """Nodes that are less likely to be accepted are not proposed (the authors' setting)."""
    max_rollouts: int = Field(default=1_000_000, ge=1)
    """Responses kept; the newest stay."""
    max_trie_tokens: int = Field(default=1_000_000, ge=64)
    """Maximum number of tokens in the global trie (about 100 bytes each). After each policy update it is built again
    from the newest responses, which fill at most half of it."""


class Drafter(TrieDrafter):
    """See `srtrl.drafters.base.DrafterBase`."""

    Options = SuffixOptions
    options: SuffixOptions
    inserts = False
    file_stem = "responses"

    def __init__(self, options: Section | None = None) -> None:
        super().__init__(options)
        self._own = TrieCursors()
        """In a trie of each sample's prompt and response."""

    def key_of(self, request: Request) -> PromptKey:
        """Return the purpose: all its samples share a trie."""
        return request.purpose, ALL_PROMPTS

    def expected_tokens(self, request: Request) -> float | None:
        """Nothing: the responses are not kept by prompt."""
        return None

    def keep(self, key: PromptKey, text: npt.NDArray[np.int32]) -> None:
        """A response enters the global trie at once."""
        super().keep(key, text)
        if key in self._tries:
            self._tries[key].insert(text)
            self.cursors.refresh(self._tries[key])

    def start(self, slots: Int64Array, requests: Sequence[Request]) -> None:
        """Give each sample a cursor in the global trie, and a trie of its own, with its prompt."""
        super().start(slots, requests)
        self._own.start(slots, [TokenTrie() for _ in requests], inserts=True)
        self._own.extend(slots, *end_to_end([(START_TOKEN, *request.prompt_token_ids) for request in requests]))

    def propose(self, slots: Int64Array, max_nodes: Int64Array) -> DraftTrees:
        """Draft after each suffix of both matches, and take for each slot the draft with the largest sum of scores."""
        found = [
            (row, room, cursor, trie)
            for row, (slot, most) in enumerate(zip(slots.tolist(), max_nodes.tolist(), strict=True))
            for room, cursor, trie in self._candidates(slot, most)
        ]
        if not found:
            return DraftTrees.empty(0)
        rows, rooms, cursors, tries = zip(*found, strict=True)
        candidates = TrieCursors()
        candidates.start(np.arange(len(found)), tries, inserts=False)
        candidates.arrays.rows[:] = cursors
        trees = draft_trees(candidates.arrays, np.arange(len(found)), np.array(rooms), SUFFIX, self.options.min_score)
        sums = np.bincount(np.repeat(np.arange(len(trees)), trees.sizes), trees.scores, minlength=len(trees))
        by_row = np.lexsort((-sums, rows))
        return trees.take(by_row[np.searchsorted(rows, np.arange(len(slots)))])

    def observe(self, slots: Int64Array, token_ids: Int32Array, offsets: Int64Array) -> None:
        """Committed tokens enter the samples' own tries, and are followed in the global one."""
        super().observe(slots, token_ids, offsets)
        self._own.extend(slots, token_ids, offsets)

    def finish(self, slots: Sequence[int], completions: Sequence[Completion | None]) -> None:
        """Completed responses enter the global trie; the samples' own tries go."""
        super().finish(slots, completions)
        self._own.stop(slots)

    def take_metrics(self) -> dict[str, float]:
        """See docs/metrics.md for each metric."""
        metrics = super().take_metrics()
        metrics["engine/cache_bytes"] += sum(trie.num_bytes for trie in self._own.tries if trie is not None)
        return metrics

    def _candidates(self, slot: int, max_nodes: int) -> Iterator[tuple[int, Int32Array, TokenTrie]]:
        """Number of nodes, cursor and trie of each draft for a slot; the first one is empty."""
        for cursors in (self.cursors, self._own):
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
