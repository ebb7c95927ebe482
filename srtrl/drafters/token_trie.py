"""The trie of all suffixes of a prompt's rollouts, from which drafts are made.

A trie is one flat array (`trie_memory`) with a Numba kernel for each thing that is done to it (`trie_kernel`,
`trie_draft`). A decode step has sequences of many prompts, hence of many tries: the batch functions here pass the
addresses of all their arrays to one kernel call, which opens them (handing over 128 arrays as arguments would take
longer than the drafts do). The kernel groups sequences by trie and gives each trie to one thread, so that two
samples of a prompt never write at the same time. A kernel cannot enlarge an array: it stops at the token for which
there is no room, the array is doubled here, and it goes on from there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

import numba
import numpy as np
import numpy.typing as npt

from srtrl.drafters.draft_frontier import RuleConstants, Tree
from srtrl.drafters.draft_tree import DraftTrees
from srtrl.drafters.shared_ngrams import SharedNgrams
from srtrl.drafters.trie_draft import (
    AUTHORS,
    BLEND,
    PAPER,
    SUFFIX,
    Batch,
    draft_groups,
    draft_groups_in_parallel,
)
from srtrl.drafters.trie_kernel import (
    FOLLOWING,
    INSERTING,
    KIND,
    MATCH,
    STOPPED,
    Advance,
    advance,
    advance_groups,
    advance_groups_in_parallel,
    find_state,
    free_cursor,
    new_cursor,
)
from srtrl.drafters.trie_memory import (
    BLOCK,
    COUNT,
    INITIAL_SIZE,
    NONE,
    NUM_STATES,
    NUM_TOKENS,
    START_TOKEN,
    USED,
    Memory,
    Places,
    edges_end,
    format_memory,
)
from srtrl.model.cpu_threads import WORK_PER_THREAD, use_kernel_threads

TokenIds = Sequence[int] | npt.NDArray[Any]

INTEGERS_PER_TOKEN = 8
"""A trie begins with so much room for each token that is expected: less than what a new text takes (18), for texts of a
prompt repeat each other."""
RULES = {"blend": BLEND, "paper": PAPER, "authors": AUTHORS, "suffix": SUFFIX}


class TokenTrie:
    """All suffixes of one prompt's rollouts, stored as a suffix automaton, with exact counts.

    Several samples may be inserted at the same time, each by its own cursor: `start`, `extend` as its tokens come,
    `stop`. All see the others' tokens at once. A cursor knows what it matches: a sample that is inserted all of its
    text (nothing has to be searched), one made by `follow` the longest suffix of its text that occurs.
    """

    def __init__(self, *, expected_tokens: int = 0) -> None:
        """Make an empty trie; `expected_tokens`: there will be about so many, so that it need not grow often."""
        least = INITIAL_SIZE + INTEGERS_PER_TOKEN * expected_tokens
        self._memory: Memory = np.empty(1 << (least - 1).bit_length(), np.int32)
        self.address = self._memory.ctypes.data
        """Of the memory, until it grows."""
        self.size = len(self._memory)
        """Integers of the memory, until it grows."""
        format_memory(self._memory)

    @property
    def num_tokens(self) -> int:
        """Inserted tokens."""
        return int(self._memory[NUM_TOKENS])

    @property
    def num_states(self) -> int:
        """States of the automaton."""
        return int(self._memory[NUM_STATES])

    @property
    def num_bytes(self) -> int:
        """Bytes of the array, its unused end included."""
        return self._memory.nbytes

    def start(self, *, drafts: bool = True) -> int:
        """Begin to insert a sample; returns its cursor, which matches the beginning of a response.

        One that will not be drafted for (`drafts=False`) is inserted faster.
        """
        return self._new_cursor(INSERTING, drafts)

    def follow(self) -> int:
        """Return a cursor that matches tokens without inserting them, from the beginning of a response on."""
        return self._new_cursor(FOLLOWING, True)

    def extend(self, cursor: int, token_ids: TokenIds) -> None:
        """Next tokens of a cursor's sample, inserted or followed."""
        self._check(cursor)
        tokens = _as_tokens(token_ids)
        done = 0
        while (done := advance(self._memory, cursor, tokens, done)) < len(tokens):
            self.grow()

    def stop(self, cursor: int) -> None:
        """Give a cursor back; the tokens stay."""
        self._check(cursor)
        free_cursor(self._memory, cursor)

    def insert(self, token_ids: TokenIds) -> None:
        """Insert a whole rollout, or several (see `end_to_end`)."""
        cursor = self.start(drafts=False)
        self.extend(cursor, token_ids)
        self.stop(cursor)

    def match_length(self, cursor: int) -> int:
        """Length of the text that a cursor matches; the beginning of the response counts as a token."""
        self._check(cursor)
        return int(self._memory[cursor + MATCH])

    def count(self, token_ids: TokenIds) -> int:
        """Return how often tokens occur in a row in all that was inserted."""
        if not len(token_ids):
            raise ValueError("token_ids is empty: count the occurrences of one token or more")
        state = find_state(self._memory, _as_tokens(token_ids))
        return 0 if state == NONE else int(self._memory[state + COUNT])

    def continuations(self, token_ids: TokenIds) -> dict[int, int]:
        """Tokens that follow the given ones somewhere, with the number of times, the most frequent first."""
        state = find_state(self._memory, _as_tokens(token_ids))
        if state == NONE:
            return {}
        pairs = self._memory[self._memory[state + BLOCK] : edges_end(self._memory, state)].reshape(-1, 2).tolist()
        counts = {token: int(self._memory[target + COUNT]) for token, target in pairs if token >= 0}
        return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))

    def grow(self) -> None:
        """Double the array."""
        memory = np.empty(2 * len(self._memory), np.int32)
        used = self._memory[USED]
        memory[:used] = self._memory[:used]
        self._memory = memory
        self.address, self.size = memory.ctypes.data, len(memory)

    def _new_cursor(self, kind: int, drafts: bool) -> int:
        while (cursor := new_cursor(self._memory, kind, drafts)) == NONE:
            self.grow()
        return int(cursor)

    def _check(self, cursor: int) -> None:
        assert self._memory[cursor + KIND] != STOPPED, f"cursor {cursor} was stopped"


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRule:
    """How a draft tree is made from a trie. All ties are broken by count, then by token id."""

    name: Literal["blend", "paper", "authors", "suffix"] = "blend"
    """`blend`: Witten-Bell back-off. A context and its suffixes, the longest first, each take the share
    total / (total + distinct_weight x distinct) x match / (match + match_weight) of the probability mass that is left
    and spread it over the tokens that followed them, by count, until `tail` is left (of a suffix only the occurrences
    count that are not the longer context's). Before them, an aligned context (see `trie_alignment`) takes
    (run + first_run) / (run + run_weight) x match / (match + match_weight), where run is the number of tokens for which
    it has held and match its length before; after them, what the last two tokens, then the last one, are followed by in
    texts of other prompts, as contexts of length 2 and 1. Trees grow best-first.
    `paper`: the rule of the SRT paper: the longest match that something follows, share of its occurrences, best-first.
    `authors`: the rule of that paper's code: the most frequent token again and again, at most as many as the match has.
    `suffix`: the rule of SuffixDecoding (Oliaro et al., 2024): a tree from each suffix of the match, by share of the
    occurrences, of at most nodes_per_match x its length nodes; the one with the largest sum of scores is taken."""
    min_score: float = 0.1
    """Smallest score (path product) of a node."""
    max_depth: int = 1 << 20
    """Longest path of a tree."""
    max_contexts: int = 4
    """`blend`: most contexts that are blended at a node, counting those that something follows."""
    distinct_weight: float = 0.5
    """`blend`: what a distinct token takes from the trust in a context."""
    match_weight: float = 2.0
    """`blend`: length of a match that is trusted by half."""
    first_run: float = 0.1
    """`blend`: tokens that an aligned context counts as held for at its beginning."""
    run_weight: float = 2.5
    """`blend`: tokens for which an aligned context must hold to be trusted by half; infinite: without."""
    tail: float = 0.15
    """`blend`: mass that is not worth a shorter context. It is a share of each node's own mass, so that scores do not
    depend on `min_score`: in replays shorter contexts cost more nodes than they brought tokens. Texts of other prompts
    are asked all the same."""
    max_tokens: int = 24
    """`authors`: longest draft."""
    max_tree: int = 48
    """`suffix`: largest tree."""
    max_match: int = 64
    """`suffix`: longest match that is looked at."""
    nodes_per_match: float = 4.0
    """`suffix`: nodes of a tree for each token of the match."""

    def constants(self, least_score: float = 0.0) -> RuleConstants:
        """Return what the kernels take. `least_score` is for `blend` only: published rules stay as they are."""
        max_nodes = {"authors": self.max_tokens, "suffix": self.max_tree}.get(self.name, 1 << 20)
        return RuleConstants(
            rule=RULES[self.name],
            min_score=self.min_score,
            least_score=max(self.min_score, least_score),
            max_depth=self.max_depth,
            max_contexts=self.max_contexts,
            distinct_weight=self.distinct_weight,
            match_weight=self.match_weight,
            tail=self.tail,
            max_nodes=max_nodes,
            max_match=self.max_match,
            nodes_per_match=self.nodes_per_match,
            first_run=self.first_run,
            run_weight=self.run_weight,
        )


NO_NGRAMS = SharedNgrams.none()
_TEXT_END = np.array([START_TOKEN], np.int32)

WORK_PER_NODE = 20
"""What room for a node costs, in the unit of `WORK_PER_THREAD`: a node takes about 0.3 microseconds, most room stays
free, and waiting for a second thread has taken 8 milliseconds on a busy machine. So threads begin at 10,000 nodes."""
WORK_PER_TOKEN = 20
"""The same for inserting a token (about 0.1 microseconds)."""


def end_to_end(texts: Sequence[Memory]) -> Memory:
    """Join whole rollouts, [n] int32 each, at least one, so that a single cursor inserts them all."""
    parts = [texts[0]]
    for text in texts[1:]:
        parts += _TEXT_END, text
    return np.concatenate(parts)


def extend_batch(tries: Sequence[TokenTrie], cursors: Sequence[int], token_ids: Sequence[TokenIds]) -> None:
    """Extend each cursor (of the trie at its place) by its tokens, in the order given."""
    if not len(tries):
        return
    offsets = _offsets([len(ids) for ids in token_ids])
    tokens = _joined(token_ids, int(offsets[-1]))
    lengths = offsets[1:] - offsets[:-1]
    progress = np.zeros(len(tries), np.int64)
    places = np.array(cursors, np.int64)
    while True:
        rows, starts, addresses, sizes = _group(tries)
        batch = Advance(rows, starts, addresses, sizes, places, tokens, offsets, progress)
        if _pays_for_threads(len(tokens) * WORK_PER_TOKEN, len(starts) - 1):
            advance_groups_in_parallel(batch)
        else:
            advance_groups(batch)
        waiting = np.flatnonzero(progress < lengths).tolist()
        if not waiting:
            return
        for trie in {id(tries[row]): tries[row] for row in waiting}.values():
            trie.grow()


def propose_batch(
    tries: Sequence[TokenTrie],
    cursors: Sequence[int],
    max_nodes: Sequence[int],
    rule: DraftRule,
    shared: SharedNgrams = NO_NGRAMS,
    least_score: float = 0.0,
) -> DraftTrees:
    """Draft for each cursor (of the trie at its place) a tree of at most so many nodes.

    `shared` is what the rule `blend` knows of other prompts' texts; below `least_score` it proposes nothing.
    """
    if not len(tries):
        return DraftTrees.empty(0)
    rooms = _offsets(max_nodes)
    total = int(rooms[-1])
    constants = rule.constants(least_score)
    batch = Batch(*_group(tries), np.array(cursors, np.int64), rooms, shared.table)
    trees = Tree(np.empty(total, np.int32), np.empty(total, np.int32), np.empty(total, np.float32))
    offsets = np.empty(len(tries) + 1, np.int64)
    if _pays_for_threads(total * WORK_PER_NODE, len(batch.starts) - 1):
        draft_groups_in_parallel(batch, constants, trees, offsets)
    else:
        draft_groups(batch, constants, trees, offsets)
    total = int(offsets[-1])
    return DraftTrees(
        token_ids=trees.token_ids[:total], parents=trees.parents[:total], scores=trees.scores[:total], offsets=offsets
    )


def _pays_for_threads(work: int, num_tries: int) -> bool:
    """Whether the next kernel's work is worth more than one thread; if so, their number is set."""
    if num_tries == 1 or work < 2 * WORK_PER_THREAD:
        return False
    use_kernel_threads(work)
    return bool(numba.get_num_threads() > 1)


def _group(tries: Sequence[TokenTrie]) -> tuple[Places, Places, Places, Places]:
    """Rows grouped by trie, where each group begins, and each row's address and size of memory."""
    addresses = np.array([trie.address for trie in tries], np.int64)
    sizes = np.array([trie.size for trie in tries], np.int64)
    rows = addresses.argsort(kind="stable")
    grouped = addresses[rows]
    is_first = np.ones(len(rows) + 1, np.bool_)
    is_first[1:-1] = grouped[1:] != grouped[:-1]
    return rows, is_first.nonzero()[0], addresses, sizes


def _offsets(lengths: Sequence[int]) -> Places:
    """Where each row begins, and the end."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    offsets[1:] = lengths
    return offsets.cumsum()


def _joined(token_ids: Sequence[TokenIds], total: int) -> Memory:
    """Tokens of all rows, end to end."""
    if all(isinstance(ids, list) for ids in token_ids):  # a step's few tokens: an array for each would take longer
        return np.fromiter(chain.from_iterable(token_ids), np.int32, total)
    return np.concatenate([_as_tokens(ids) for ids in token_ids])


def _as_tokens(token_ids: TokenIds) -> Memory:
    return np.ascontiguousarray(token_ids, dtype=np.int32)
