"""Token tries as objects: one trie, texts inserted into several, and the cursors of the slots of an engine."""

from collections.abc import Sequence

import numpy as np

from srtrl.drafters.suffix_automaton import (
    BLOCK,
    COUNT,
    CURSOR,
    EDGE,
    INITIAL_SIZE,
    INTEGERS_PER_TOKEN,
    NONE,
    NUM_STATES,
    NUM_TOKENS,
    ROOT,
    START_TOKEN,
    TARGET,
    USED,
    Cursors,
    Int32Array,
    Int64Array,
    advance_rows,
    advance_tries,
    edges_end,
    find_last_edge,
    format_memory,
)
from srtrl.model.cpu_threads import use_kernel_threads


class TokenTrie:
    """All suffixes of some texts, with the number of times that each was followed by each token."""

    def __init__(self, *, expected_tokens: int = 0, max_tokens: int = 1 << 30) -> None:
        """Make an empty trie; `max_tokens`: it takes no more."""
        least = INITIAL_SIZE + INTEGERS_PER_TOKEN * expected_tokens
        self.memory: Int32Array = np.empty(1 << (least - 1).bit_length(), np.int32)
        format_memory(self.memory, max_tokens)

    @property
    def num_tokens(self) -> int:
        """Inserted tokens."""
        return int(self.memory[NUM_TOKENS])

    @property
    def num_states(self) -> int:
        """States of the automaton."""
        return int(self.memory[NUM_STATES])

    @property
    def num_bytes(self) -> int:
        """Bytes of the array, its unused end included."""
        return self.memory.nbytes

    def insert(self, text: Sequence[int] | Int32Array) -> None:
        """Insert a whole text."""
        insert_texts([self], [[np.asarray(text, np.int32)]])

    def count(self, token_ids: Sequence[int]) -> int:
        """Return how often tokens (at least one) occur in a row in all texts."""
        edge = find_last_edge(self.memory, np.asarray(token_ids, np.int32))
        return 0 if edge == NONE else int(self.memory[edge + COUNT])

    def continuations(self, token_ids: Sequence[int]) -> dict[int, int]:
        """Tokens that follow the given ones somewhere, with the number of times, the most frequent first."""
        edge = find_last_edge(self.memory, np.asarray(token_ids, np.int32))
        if edge == NONE:
            return {}
        state = self.memory[edge + TARGET]
        edges = self.memory[self.memory[state + BLOCK] : edges_end(self.memory, state)].reshape(-1, EDGE).tolist()
        counts = {token: count for token, _, count in edges if token >= 0}
        return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))

    def grow(self) -> None:
        """Double the array."""
        memory = np.empty(2 * len(self.memory), np.int32)
        used = self.memory[USED]
        memory[:used] = self.memory[:used]
        self.memory = memory


def insert_texts(tries: Sequence[TokenTrie], texts: Sequence[Sequence[Int32Array]]) -> None:
    """Insert whole texts into tries, which must be different ones; in parallel where there is much to do."""
    start = np.array([START_TOKEN], np.int32)
    parts = [np.concatenate([part for text in own for part in (start, text)] or [start[:0]]) for own in texts]
    offsets = np.cumsum([0, *map(len, parts)])
    token_ids = np.concatenate([start[:0], *parts])
    cursors = TrieCursors()
    slots = np.arange(len(tries))
    cursors.start(slots, tries, inserts=True)
    progress = np.zeros(len(tries), np.int64)
    use_kernel_threads(WORK_PER_TOKEN * len(token_ids))
    while True:
        advance_tries(cursors.arrays, token_ids, offsets, progress)
        waiting = np.flatnonzero(progress < np.diff(offsets)).tolist()
        if not waiting:
            return
        for row in waiting:
            tries[row].grow()
            cursors.refresh(tries[row])


WORK_PER_TOKEN = 20
"""What inserting a token costs, in the unit of `use_kernel_threads`: about 0.1 microseconds."""


class TrieCursors:
    """A cursor for each slot, in a trie that it may share with others."""

    def __init__(self) -> None:
        self.arrays = Cursors(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros((0, CURSOR), np.int32))
        self.tries: list[TokenTrie | None] = []
        """Of each slot; None: it is free."""

    def start(self, slots: Int64Array, tries: Sequence[TokenTrie], *, inserts: bool) -> None:
        """Put cursors before a text, whose first token is to be `START_TOKEN`."""
        more = int(slots.max(initial=-1)) + 1 - len(self.tries)
        if more > 0:
            self.tries += [None] * more
            self.arrays = Cursors(
                np.pad(self.arrays.addresses, (0, more)),
                np.pad(self.arrays.sizes, (0, more)),
                np.pad(self.arrays.rows, ((0, more), (0, 0))),
            )
        self.arrays.rows[slots] = (ROOT, 0, START_TOKEN, START_TOKEN, inserts)
        self.arrays.addresses[slots] = [trie.memory.ctypes.data for trie in tries]
        self.arrays.sizes[slots] = [len(trie.memory) for trie in tries]
        for slot, trie in zip(slots.tolist(), tries, strict=True):
            self.tries[slot] = trie

    def stop(self, slots: Sequence[int]) -> None:
        """Free slots; what they inserted stays."""
        for slot in slots:
            self.tries[slot] = None

    def extend(self, slots: Int64Array, token_ids: Int32Array, offsets: Int64Array) -> None:
        """Next tokens of some slots: those of row b are `token_ids[offsets[b] : offsets[b + 1]]`."""
        progress = np.zeros(len(slots), np.int64)
        while True:
            row = advance_rows(self.arrays, slots, token_ids, offsets, progress)
            if row == len(slots):
                return
            trie = self.tries[slots[row]]
            assert trie is not None, f"slot {slots[row]} was not started"
            trie.grow()
            self.refresh(trie)

    def refresh(self, trie: TokenTrie) -> None:
        """A trie has grown: its array is another one."""
        slots = [slot for slot, other in enumerate(self.tries) if other is trie]
        self.arrays.addresses[slots] = trie.memory.ctypes.data
        self.arrays.sizes[slots] = len(trie.memory)
