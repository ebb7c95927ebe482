"""The texts that drafts come from, and the places in them that follow the same tokens, found as gzip finds repeats.

This is how the trie of a prompt's texts is stored: a context is a node, the places that follow it are its occurrences,
and their tokens are its children. All texts lie in one array of positions, in pages: a running sample's text grows
while others do. `START_TOKEN` begins each text. A *place* is a position; the tokens before it in its text are its
context. For each of `LENGTHS` a place is linked to the newest older place after the same last tokens. So the places
after "to be" are a chain, the newest first:

    newest[hash(prompt, "to be")] -> place of "or" -> place of "is" -> place of "or" -> NONE

A search follows the chain of the longest of these lengths, then the next one, and counts at each place how many tokens
back it agrees with the text before a draft (its *match*). Hashes of two contexts may be equal: so tokens are compared.
"""

from typing import NamedTuple

import numba
import numpy as np
import numpy.typing as npt

from srtrl.drafters.distributions import NO_DISTRIBUTIONS, SIZE, UNKNOWN
from srtrl.model.kernels import inlined, inner, makes_arrays

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

NONE = -1
"""No position."""
START_TOKEN = -1
"""The first token of each text: a token outside the vocabulary, so that the beginning is a context like any other."""
EMPTY = -2
"""Token of a position that no text has reached."""
PAGE = 64
INITIAL_PAGES = 64
LENGTHS = (1, 4)
"""Tokens of the contexts that have chains, at most `MAX_MATCH`."""
MAX_MATCH = 64
"""Tokens back that a search compares."""
MAX_PLACES = 64
"""Places that a search keeps, the newest of each chain, and steps that it makes along a chain."""
ENOUGH_LENGTHS, ENOUGH_PLACES = 2, 16
"""Different matches among a node's places, and places, that need no (further) search."""

BEFORE, AFTER, PROMPT = 0, 1, 2
"""Columns of a page: position before its first one, position after its last one, number of its prompt."""
END, NUM_PASSED, OWNER = 0, 1, 2
"""Columns of a slot: last position of its text, tokens of that text (START included), number of its prompt."""


class Texts(NamedTuple):
    """Arrays over positions, pages and slots."""

    tokens: Int32Array
    """[positions]."""
    older: Int32Array
    """[positions, lengths], the next place of each chain."""
    known: Int32Array
    """[positions, SIZE], the distribution of each token, see `srtrl.drafters.distributions`."""
    pages: Int32Array
    """[pages, 3]."""
    slots: Int32Array
    """[slots, 3]."""
    newest: Int32Array
    """[lengths, a power of two], the first place of each chain."""


class Pending(NamedTuple):
    """Tokens that follow the texts of slots and are not appended yet."""

    token_ids: Int32Array
    """[tokens]."""
    spans: Int64Array
    """[slots, 2], where those of each slot begin and end."""


NO_PENDING = Pending(np.zeros(0, np.int32), np.zeros((0, 2), np.int64))
"""Pending tokens of no slot."""


class Sought(NamedTuple):
    """The text before a draft."""

    prompt: int
    """Number of the prompt, of whose texts are the places."""
    size: int
    """Tokens that are compared, at most `MAX_MATCH`."""
    num_passed: int
    """Tokens of the whole text, START included."""


class Found(NamedTuple):
    """Places of the nodes of a draft, those of its root first; those that agree longest, then the newest first."""

    places: Int32Array
    """[1 + nodes, MAX_PLACES]."""
    matches: Int32Array
    """Length of each place's match."""
    tokens: Int32Array
    """Token of each place."""
    nums: Int32Array
    """[1 + nodes], of places."""
    window: Int32Array
    """[nodes + MAX_MATCH], the text before a node, the last token first, from the index `nodes - depth` on."""


@makes_arrays
def make_found(num_nodes: int) -> Found:
    """Room for a draft."""
    places = np.empty((3, num_nodes + 1, MAX_PLACES), np.int32)
    nums, window = np.empty(num_nodes + 1, np.int32), np.empty(num_nodes + MAX_MATCH, np.int32)
    return Found(places[0], places[1], places[2], nums, window)


@inlined
def position_before(texts: Texts, position: int) -> int:
    """The position before another in its text."""
    return int(position - 1 if position % PAGE else texts.pages[position // PAGE, BEFORE])


@inlined
def position_after(texts: Texts, position: int) -> int:
    """The position after another in its text, which a text need not have reached; or `NONE`."""
    return int(position + 1 if (position + 1) % PAGE else texts.pages[position // PAGE, AFTER])


@inlined
def _longer(code: np.uint64, token: int) -> np.uint64:
    """Hash of a context that begins one token earlier."""
    return (code ^ (code >> np.uint64(29))) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(token + 3)


@inlined
def _chain_of(texts: Texts, code: np.uint64) -> int:
    """Index in a row of `newest`."""
    code = (code ^ (code >> np.uint64(31))) * np.uint64(0xBF58476D1CE4E5B9)
    return int(np.int64((code >> np.uint64(32)) & np.uint64(texts.newest.shape[1] - 1)))


# --- Insertion --------------------------------------------------------------------------------------------------------


@inner
def _link(texts: Texts, place: int) -> None:
    """Make a place the newest one of its contexts' chains."""
    code, length, position = np.uint64(texts.pages[place // PAGE, PROMPT]), 0, position_before(texts, place)
    for i in range(len(LENGTHS)):
        while length < LENGTHS[i]:
            if position == NONE:
                return
            token = texts.tokens[position]
            code, length = _longer(code, token), length + 1
            position = position_before(texts, position) if token != START_TOKEN else NONE
        chain = _chain_of(texts, code)
        texts.older[place, i], texts.newest[i, chain] = texts.newest[i, chain], place


@numba.njit(cache=True, nogil=True)
def _append(
    texts: Texts,
    slots: Int64Array,
    token_ids: Int32Array,
    offsets: Int64Array,
    known: Int32Array,
    num_pages: int,
) -> int:
    """Append to the texts of some slots, there being room, see `TextStore.extend`; returns the number of pages."""
    for b in range(len(slots)):
        slot = texts.slots[slots[b]]
        for i in range(offsets[b], offsets[b + 1]):
            last, place = slot[END], slot[END] + 1
            if place % PAGE == 0:
                place = num_pages * PAGE
                texts.pages[num_pages, BEFORE], texts.pages[num_pages, AFTER] = last, NONE
                texts.pages[num_pages, PROMPT] = slot[OWNER]
                texts.tokens[place : place + PAGE] = EMPTY
                if last != NONE:
                    texts.pages[last // PAGE, AFTER] = place
                num_pages += 1
            is_start = token_ids[i] == START_TOKEN
            texts.tokens[place], texts.known[place, 0] = token_ids[i], UNKNOWN
            if len(known) > 0:
                for j in range(SIZE):
                    texts.known[place, j] = known[i, j]
            if not is_start:
                _link(texts, place)
            slot[END], slot[NUM_PASSED] = place, 1 if is_start else slot[NUM_PASSED] + 1
    return num_pages


@numba.njit(cache=True, nogil=True)
def _link_again(texts: Texts, num_pages: int) -> None:
    """Link all places anew."""
    for place in range(num_pages * PAGE):
        if texts.tokens[place] >= 0:
            _link(texts, place)


# --- Search -----------------------------------------------------------------------------------------------------------


@inlined
def seek(texts: Texts, pending: Pending, slot: int, found: Found) -> Sought:
    """The text of a slot with its pending tokens, whose end is written into the window."""
    position, num_passed, prompt = texts.slots[slot, END], texts.slots[slot, NUM_PASSED], texts.slots[slot, OWNER]
    begin, end = 0, 0
    if slot < len(pending.spans):
        begin, end = pending.spans[slot]
    size, first = min(num_passed + end - begin, MAX_MATCH), len(found.nums) - 1
    for i in range(size):
        if i < end - begin:
            found.window[first + i] = pending.token_ids[end - 1 - i]
        else:
            found.window[first + i] = texts.tokens[position]
            position = position_before(texts, position)
    return Sought(int(prompt), int(size), int(num_passed + end - begin))


@inlined
def _put_place(found: Found, node: int, num: int, place: int, match: int) -> bool:
    """Put a place among `num` others; returns whether none of them agrees as far."""
    i = num
    while i > 0 and found.matches[node, i - 1] < match:
        found.matches[node, i], found.places[node, i] = found.matches[node, i - 1], found.places[node, i - 1]
        i -= 1
    found.matches[node, i], found.places[node, i] = match, place
    return bool(i == 0 or found.matches[node, i - 1] != match)


@inner
def search(texts: Texts, sought: Sought, found: Found, depth: int, node: int, enough_lengths: int) -> None:
    """Find the places of a node, the drafted tokens before which are in the window."""
    begin, size = len(found.nums) - 1 - depth, sought.size + depth
    num, num_lengths, limit = 0, 0, size + 1
    for i in range(len(LENGTHS) - 1, -1, -1):
        if LENGTHS[i] > size or num_lengths >= enough_lengths:
            continue
        code = np.uint64(sought.prompt)
        for j in range(LENGTHS[i]):
            code = _longer(code, found.window[begin + j])
        place, num_steps = texts.newest[i, _chain_of(texts, code)], 0
        while place != NONE and num < MAX_PLACES and num_steps < MAX_PLACES:
            if texts.pages[place // PAGE, PROMPT] == sought.prompt:
                match, position = 0, position_before(texts, place)
                while match < min(size, limit) and texts.tokens[position] == found.window[begin + match]:
                    match, position = match + 1, position_before(texts, position)
                if LENGTHS[i] <= match < limit:  # else it is of another context, or was found by a longer one
                    num_lengths += _put_place(found, node, num, place, match)
                    num += 1
            place, num_steps = texts.older[place, i], num_steps + 1
        limit = LENGTHS[i]
    for i in range(num):
        found.tokens[node, i] = texts.tokens[found.places[node, i]]
    found.nums[node] = num


@inlined
def find_places(texts: Texts, sought: Sought, found: Found, depth: int, above: int, node: int) -> None:
    """Find the places of a node: those of the node above that went on with its token; by a search if they are few.

    `above`: index of the node above in `found`; `NONE` for the root. The drafted tokens are in the window.
    """
    num, num_lengths = 0, 0
    if above != NONE:
        token = found.window[len(found.nums) - 1 - depth]
        for i in range(found.nums[above]):
            if found.tokens[above, i] == token:
                place, match = position_after(texts, found.places[above, i]), found.matches[above, i] + 1
                if place != NONE and texts.tokens[place] >= 0:
                    num_lengths += num == 0 or found.matches[node, num - 1] != match
                    found.places[node, num], found.matches[node, num] = place, match
                    found.tokens[node, num] = texts.tokens[place]
                    num += 1
    found.nums[node] = num
    if num_lengths < ENOUGH_LENGTHS and num < ENOUGH_PLACES:
        search(texts, sought, found, depth, node, ENOUGH_LENGTHS)


class TextStore:
    """Texts of prompts, some of which grow: those of slots."""

    def __init__(self) -> None:
        self.num_pages = 0
        """In use."""
        self.arrays = _make_texts(INITIAL_PAGES, slots=np.zeros((0, 3), np.int32))

    @property
    def num_bytes(self) -> int:
        """Memory of the pages in use, with their share of the chains."""
        of_pages = sum(array.nbytes for array in self.arrays) - self.arrays.slots.nbytes
        return of_pages * self.num_pages // len(self.arrays.pages)

    def start(self, slots: Int64Array, prompts: list[int]) -> None:
        """Let slots begin texts of prompts, given by number; the first token of each is to be `START_TOKEN`."""
        more = max(0, int(slots.max(initial=-1)) + 1 - len(self.arrays.slots))
        rows = np.pad(self.arrays.slots, ((0, more), (0, 0)), constant_values=NONE)
        rows[slots, END], rows[slots, OWNER] = NONE, prompts
        self.arrays = self.arrays._replace(slots=rows)

    def extend(
        self,
        slots: Int64Array,
        token_ids: Int32Array,
        offsets: Int64Array,
        known: Int32Array = NO_DISTRIBUTIONS,
    ) -> None:
        """Append to the texts of some slots: to that of row b `token_ids[offsets[b] : offsets[b + 1]]`.

        Args:
            slots: [B].
            token_ids: [tokens]; `START_TOKEN` begins another text.
            offsets: [B + 1].
            known: The distributions they were drawn from, [tokens, SIZE], or [0, SIZE].
        """
        needed = self.num_pages + len(slots) + len(token_ids) // PAGE
        if needed > len(self.arrays.pages):
            old, self.arrays = self.arrays, _make_texts(1 << (needed - 1).bit_length(), self.arrays.slots)
            for new, array in zip(self.arrays[:4], old[:4], strict=True):
                new[: len(array)] = array
            _link_again(self.arrays, self.num_pages)
        self.num_pages = _append(self.arrays, slots, token_ids, offsets, known, self.num_pages)

    def positions(self, slot: int) -> Int64Array:
        """Positions of a slot's text, that of START first."""
        end, num_passed, _ = self.arrays.slots[slot].tolist()
        parts = [np.zeros(0, np.int64)]
        while num_passed > 0:
            parts.append(np.arange(max(end - end % PAGE, end - num_passed + 1), end + 1))
            num_passed -= len(parts[-1])
            end = int(self.arrays.pages[end // PAGE, BEFORE])
        return np.concatenate(parts[::-1])

    def last_two(self, slots: Int64Array) -> Int32Array:
        """[B, 2], the last tokens of some slots' texts; twice `START_TOKEN` where there is no more."""
        texts, ends = self.arrays, self.arrays.slots[slots, END]
        before = np.where(ends % PAGE, ends - 1, texts.pages[ends // PAGE, BEFORE])
        last = texts.tokens[ends]
        return np.stack([np.where(last == START_TOKEN, START_TOKEN, texts.tokens[before]), last], axis=1)

    def clear(self) -> None:
        """Forget all texts."""
        self.num_pages = 0
        self.arrays.newest[:] = NONE


def _make_texts(num_pages: int, slots: Int32Array) -> Texts:
    """Arrays of no text."""
    size = num_pages * PAGE
    return Texts(
        tokens=np.empty(size, np.int32),
        older=np.empty((size, len(LENGTHS)), np.int32),
        known=np.empty((size, SIZE), np.int32),
        pages=np.empty((num_pages, 3), np.int32),
        slots=slots,
        newest=np.full((len(LENGTHS), 1 << (size - 1).bit_length()), NONE, np.int32),
    )
