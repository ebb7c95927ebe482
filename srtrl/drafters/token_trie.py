"""A trie of all suffixes of some texts, and cursors of slots in such tries, over `suffix_automaton.py`."""

from collections.abc import Sequence

import numba
import numpy as np

from srtrl.drafters.distributions import NO_DISTRIBUTIONS, SIZE, UNKNOWN, unknown
from srtrl.drafters.suffix_automaton import (
    CURSOR,
    INITIAL_SIZE,
    INTEGERS_PER_TOKEN,
    NUM_STATES,
    NUM_TOKENS,
    ROOT,
    START_TOKEN,
    USED,
    WORK_PER_TOKEN,
    Cursors,
    Int32Array,
    Int64Array,
    advance_rows,
    format_memory,
    read_distributions,
)
from srtrl.model.cpu_threads import use_kernel_threads

MAX_INTEGERS = 2**30
"""Of a trie's array: some hundred million tokens."""


class TokenTrie:
    """All suffixes of some texts, with the number of times that each was followed by each token."""

    def __init__(self, *, expected_tokens: int = 0, expected_distributions: int = 0) -> None:
        """Make an empty trie with room for about `expected_tokens`."""
        size = INITIAL_SIZE + INTEGERS_PER_TOKEN * expected_tokens + SIZE * expected_distributions
        self.memory: Int32Array = np.empty(1 << (size - 1).bit_length(), np.int32)
        format_memory(self.memory)

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
        cursors = TrieCursors()
        cursors.start(np.zeros(1, np.int64), [self], inserts=True)
        cursors.extend(np.zeros(1, np.int64), np.array([START_TOKEN, *text], np.int32), np.array([0, 1 + len(text)]))

    def distributions(self, text: Int32Array) -> Int32Array:
        """What each token of an inserted text was drawn from, as far as it is known: [tokens, SIZE], or [0, SIZE]."""
        found = unknown(1 + len(text))
        read_distributions(self.memory, np.concatenate([np.array([START_TOKEN], np.int32), text]), found)
        return found[1:] if (found != UNKNOWN).any() else NO_DISTRIBUTIONS

    def grow(self) -> None:
        """Double the array.

        Raises:
            ValueError: Indices into it, which are int32, would not reach its end.
        """
        if len(self.memory) >= MAX_INTEGERS:
            raise ValueError(
                f"rollout.drafter: no more fits in a trie of {self.num_tokens:,} tokens; `suffix` has one trie for all "
                "prompts, `srt` one for each: use rollout.drafter=srt"
            )
        memory = np.empty(2 * len(self.memory), np.int32)
        used = self.memory[USED]
        memory[:used] = self.memory[:used]
        self.memory = memory


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
        self.arrays.rows[slots] = (ROOT, 0, START_TOKEN, START_TOKEN, inserts, 0)
        self.arrays.addresses[slots] = [trie.memory.ctypes.data for trie in tries]
        self.arrays.sizes[slots] = [len(trie.memory) for trie in tries]
        for slot, trie in zip(slots.tolist(), tries, strict=True):
            self.tries[slot] = trie

    def stop(self, slots: Sequence[int]) -> None:
        """Free slots; what they inserted stays."""
        for slot in slots:
            self.tries[slot] = None

    def extend(
        self, slots: Int64Array, token_ids: Int32Array, offsets: Int64Array, known: Int32Array = NO_DISTRIBUTIONS
    ) -> None:
        """Next tokens of some slots: those of row b are `token_ids[offsets[b] : offsets[b + 1]]`.

        `known`: the distributions they were drawn from, [tokens, SIZE], or [0, SIZE].
        """
        progress, sizes = np.zeros(len(slots), np.int64), offsets[1:] - offsets[:-1]
        use_kernel_threads(WORK_PER_TOKEN * len(token_ids))
        num_parts = numba.get_num_threads()
        while True:
            advance_rows(self.arrays, slots, token_ids, offsets, known, progress, num_parts)
            waiting = slots[progress < sizes].tolist()
            if not waiting:
                return
            for trie in {id(trie): trie for trie in map(self.tries.__getitem__, waiting)}.values():
                assert trie is not None, "a slot was not started"
                trie.grow()
                self.refresh(trie)

    def refresh(self, trie: TokenTrie) -> None:
        """A trie has grown: its array is another one."""
        slots = [slot for slot, other in enumerate(self.tries) if other is trie]
        self.arrays.addresses[slots] = trie.memory.ctypes.data
        self.arrays.sizes[slots] = len(trie.memory)
