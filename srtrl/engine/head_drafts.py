"""The drafts of a draft head in an engine: for which sequences it runs, and how likely its guesses are accepted.

A guess is as likely to be accepted as others were whose best and second best token were as far apart: a table of
margins for each depth, learned from the tokens that followed, for each purpose. The head runs for a sequence
where the tokens that it promises, times the chance that the drafter has not the next token, are worth its time. None of
it changes a token.
"""

import time
from pathlib import Path
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file
from safetensors.numpy import save as to_safetensors

from srtrl.drafters.draft_head import BEST, REFUSED, SECOND, DraftHead, merge_chains
from srtrl.drafters.draft_tree import ROOT, DraftTrees
from srtrl.engine.batch import Batch
from srtrl.engine.rows import Int64Array
from srtrl.engine.runner import Runner
from srtrl.engine.stats import EngineStats
from srtrl.engine.verify import RUNNING, Verified
from srtrl.metrics import write_atomic

Array = npt.NDArray[Any]

NUM_BINS, BIN_NATS = 16, 0.25
"""Of margins; the last bin has no end."""
FIRST_CHANCES, FIRST_WEIGHT = (0.3, 0.1), 4.0
"""Of the best and the second best token, and the tokens that this counts as."""
MAX_TOKENS = 1000.0
"""With more, old tokens lose half of their weight: policy and head move."""
PROBE_EVERY = 16
"""One step in this many it runs for all sequences, so that what it promises stays current."""
FILE = "draft_head_margins.safetensors"
"""In a checkpoint: what margins were worth."""
NO_ROW = -1
NO_SLOTS: Int64Array = np.empty(0, np.int64)
HITS, TRIALS = 0, 1


class NoHeadDrafts:
    """What an engine without a draft head has in its place: it does nothing."""

    is_on = False

    def begin_rollout(self, purpose: str) -> None:
        """The next steps are of a new rollout, maybe with new weights."""

    def start(self, slots: Int64Array) -> None:
        """Samples have got their slots: no hidden state of them is known until a step has sampled a token."""

    def observe(self, trees: DraftTrees, verified: Verified, stats: EngineStats) -> None:
        """Learn from the tokens that followed the drafts, count them, and note where the next ones begin."""

    def launch(self, batch: Batch, slots: Int64Array, seconds_per_token: float) -> None:
        """Begin to draft for those of `slots` for which it pays, after a verified step.

        Args:
            batch: The samples.
            slots: Those that the step has decoded, run-aheads not among them.
            seconds_per_token: Time in which a step without drafts gives a token.
        """

    def merge(self, trees: DraftTrees, slots: Int64Array, max_nodes: Array, min_score: float) -> DraftTrees:
        """Add the drafts to the drafter's trees for `slots` [B], of at most `max_nodes` [B] nodes each."""
        return trees

    def save(self, folder: Path) -> None:
        """Write what margins were worth into a checkpoint."""

    def load(self, checkpoint: Path) -> None:
        """Read what `save` has written, if it has; raises ValueError, and learns anew, where that is no such table."""


class HeadDrafts(NoHeadDrafts):
    """The head's drafts for the slots of one engine."""

    is_on = True

    def __init__(self, head: DraftHead, runner: Runner, *, k: int, num_slots: int) -> None:
        """`k`: tokens that are guessed in a row."""
        self.head = head
        self.k = k
        self._runner = runner
        self.tables: dict[str, Array] = {}
        """By purpose, [k, 2, NUM_BINS, 2]: accepted and tried, of the best and the second best token."""
        self._promised: dict[str, float] = {}
        """By purpose, the number of tokens that a draft of the head promises."""
        self._purpose = ""
        self._rows = np.full(num_slots, NO_ROW)
        """[slots], the row of the last step that gave the slot's last token."""
        self._covered = np.zeros(num_slots)
        """[slots], the chance that the drafter's last tree had the next token."""
        self._seconds = 0.0
        """Of a draft of one sequence."""
        self._num_steps = 0
        self._launched = self._owners = NO_SLOTS
        """Slots that it drafts for, and [C] the sequences of the current step that it has drafted for."""
        self._was_prepared = True

    def begin_rollout(self, purpose: str) -> None:
        """See `NoHeadDrafts`."""
        self._purpose = purpose
        self.tables.setdefault(purpose, np.zeros((self.k, 2, NUM_BINS, 2)))
        self._promised.setdefault(purpose, float(self.k))
        self.head.refresh(self._runner.model)
        self._rows[:], self._launched = NO_ROW, NO_SLOTS
        self._owners = NO_SLOTS  # there are some after a step that has failed

    def start(self, slots: Int64Array) -> None:
        """See `NoHeadDrafts`."""
        self._rows[slots], self._covered[slots] = NO_ROW, 0.0

    def observe(self, trees: DraftTrees, verified: Verified, stats: EngineStats) -> None:
        """See `NoHeadDrafts`."""
        num_new, offsets = verified.num_new, verified.offsets
        last = np.full(len(num_new), ROOT)
        has_path = num_new > 1
        last[has_path] = verified.nodes[offsets[1:][has_path] - 2]
        rows = trees.offsets[:-1] + np.arange(len(num_new)) + 1 + last
        self._rows[:], self._launched = NO_ROW, NO_SLOTS  # what a step without drafts has not merged is of no use
        self._rows[verified.slots] = np.where(verified.finish == RUNNING, rows, NO_ROW)
        if len(self._owners):
            chains = self._owners, self._tokens, self._bins
            table = self.tables[self._purpose]
            _learn(chains, verified.token_ids, offsets, table, stats.head_accepted)
            stats.num_head_steps += 1
            self._owners = NO_SLOTS

    def launch(self, batch: Batch, slots: Int64Array, seconds_per_token: float) -> None:
        """See `NoHeadDrafts`."""
        started = time.perf_counter()
        self._num_steps += 1
        gain = self._promised[self._purpose] * (1 - self._covered[slots])
        pays = (gain > self._seconds / seconds_per_token) | (self._num_steps % PROBE_EVERY == 0)
        has_room = batch.max_tokens[slots] - batch.num_tokens[slots] > 1
        self._launched = slots = slots[(self._rows[slots] != NO_ROW) & has_room & pays]
        if len(slots):
            positions = batch.num_tokens[slots]
            self._was_prepared = self._runner.launch_head(
                self.head,
                self.k,
                self._rows[slots],
                batch.token_ids[slots, positions - 1],
                batch.temperatures[slots],
                batch.rng_keys[slots],
                positions - batch.num_prompt_tokens[slots],
            )
        self._last_seconds = time.perf_counter() - started

    def merge(self, trees: DraftTrees, slots: Int64Array, max_nodes: Array, min_score: float) -> DraftTrees:
        """See `NoHeadDrafts`."""
        sums = np.concatenate([[0.0], (trees.scores * (trees.parents == ROOT)).cumsum(dtype=np.float64)])
        self._covered[slots] = sums[trees.offsets[1:]] - sums[trees.offsets[:-1]]
        launched, self._launched = self._launched, NO_SLOTS
        if not len(launched):
            return trees
        started = time.perf_counter()
        tokens, margins = self._runner.wait_head()
        # In one layout, whatever the device: for each that they meet, Numba compiles its functions again.
        tokens, margins = np.ascontiguousarray(tokens), np.ascontiguousarray(margins)
        places = np.full(len(self._rows), len(slots))
        places[slots[max_nodes > 0]] = np.flatnonzero(max_nodes)
        places = np.where(self._rows[launched] == NO_ROW, len(slots), places[launched])  # some have lost their slots
        order = places.argsort()[: (places < len(slots)).sum()]
        self._owners, self._tokens, margins = places[order], tokens[order], margins[order]
        self._bins = np.minimum(margins / BIN_NATS, NUM_BINS - 1).astype(np.int64)
        self._chances = np.empty(self._tokens.shape, np.float32)
        _fill_chances(self.tables[self._purpose], self._bins, self._tokens, self._chances)
        promised = self._promised[self._purpose]
        self._promised[self._purpose] += 0.1 * (float(self._chances.sum()) / len(launched) - promised)
        self._last_seconds += time.perf_counter() - started
        if self._was_prepared:
            self._seconds += 0.1 * (self._last_seconds / len(launched) - self._seconds)
        return merge_chains(trees, self._owners, self._tokens, self._chances, max_nodes, min_score)

    def save(self, folder: Path) -> None:
        """See `NoHeadDrafts`."""
        write_atomic(folder / FILE, to_safetensors(self.tables))

    def load(self, checkpoint: Path) -> None:
        """See `NoHeadDrafts`; `k` may be another one now."""
        file = checkpoint / FILE
        for purpose, rows in load_file(file).items() if file.is_file() else ():
            if rows.shape[1:] != (2, NUM_BINS, 2) or not (rows[..., TRIALS] >= rows[..., HITS]).all() or rows.min() < 0:
                raise ValueError(f"{file}: expected tables of accepted and tried tokens, at most as many accepted")
            self.tables[purpose] = np.zeros((self.k, *rows.shape[1:]))
            self.tables[purpose][: len(rows)] = rows[: self.k]


@numba.njit(cache=True, nogil=True)
def _fill_chances(table: Array, bins: Array, tokens: Array, chances: Array) -> None:
    """The chance that each guess, and all above it, is accepted, [C, K, 2]; 0 where it is refused."""
    for c in range(len(bins)):
        above = 1.0
        for depth in range(bins.shape[1]):
            for kind in range(2):
                hits, trials = table[depth, kind, bins[c, depth]]
                chance = (hits + FIRST_WEIGHT * FIRST_CHANCES[kind]) / (trials + FIRST_WEIGHT)
                chances[c, depth, kind] = above * chance if tokens[c, depth, kind] != REFUSED else 0.0
            above = chances[c, depth, BEST]


@numba.njit(cache=True, nogil=True)
def _learn(chains: tuple[Array, Array, Array], new_tokens: Array, offsets: Array, table: Array, counts: Array) -> None:
    """Count guesses that came true, as far as the tokens are known; `counts` has those of each depth."""
    owners, tokens, bins = chains
    for c in range(len(owners)):
        counts[0] += 1
        new = new_tokens[offsets[owners[c]] : offsets[owners[c] + 1]]
        for depth in range(min(len(new), tokens.shape[1])):
            cells = table[depth, :, bins[c, depth]]
            if tokens[c, depth, BEST] == REFUSED:
                break
            cells[:, TRIALS] += 1
            is_best, is_second = new[depth] == tokens[c, depth, BEST], new[depth] == tokens[c, depth, SECOND]
            cells[BEST, HITS] += is_best
            cells[SECOND, HITS] += is_second
            if cells[BEST, TRIALS] > MAX_TOKENS:
                cells /= 2
            counts[1 + depth] += is_best or is_second
            if not is_best:
                break
