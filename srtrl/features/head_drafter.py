"""A drafter with a draft head: for which sequences the head runs, and how likely its guesses are accepted.

A guess is as likely to be accepted as others were whose best and second best token were as far apart: a table of
margins for each depth, learned from the tokens that followed, for each purpose. The head runs for a sequence
where the tokens that it promises, times the chance that the other drafter has not the next token, are worth its time.
None of it changes a token.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import numba
import numpy as np
import numpy.typing as npt
import torch
from safetensors.numpy import load_file
from safetensors.numpy import save as to_safetensors

from srtrl.drafters.base import DrafterBase
from srtrl.drafters.draft_tree import ROOT, DraftTrees, check_trees
from srtrl.engine.cpu_runner import CpuRunner
from srtrl.engine.draft_budget import StepCost
from srtrl.engine.runner import Runner
from srtrl.engine.stats import MAX_DEPTH
from srtrl.engine.step_inputs import Int32Array, Int64Array
from srtrl.engine.verify import NO_ROW
from srtrl.features.draft_head import BEST, REFUSED, SECOND, DraftHead, Guesser, draft_chains, merge_chains
from srtrl.files import write_atomic
from srtrl.types import Purpose, Request

if TYPE_CHECKING:
    from srtrl.features.draft_head_cuda import CudaGuesses

Array = npt.NDArray[Any]

NUM_BINS, BIN_NATS = 16, 0.25
"""Bins of margins, and their width; the last bin has no end."""
FIRST_CHANCES, FIRST_WEIGHT = (0.3, 0.1), 4.0
"""Initial chances of the best and the second best token, and the number of tokens that they count as."""
MAX_TOKENS = 1000.0
"""With more, old tokens lose half of their weight: policy and head move."""
PROBE_EVERY = 16
"""One step in this many it runs for all sequences, so that what it promises stays current."""
FILE = "draft_head_margins.safetensors"
"""File of a checkpoint: the accepted and tried guesses by margin."""
NO_SLOTS: Int64Array = np.empty(0, np.int64)
HITS, TRIALS = 0, 1


class Guesses(Protocol):
    """Computation of the guesses of a head."""

    def begin(self) -> None:
        """A rollout begins: take over the policy's weights."""

    def launch(self, rows: Int64Array, *noise: Any) -> bool:
        """Queue the guesses after the last step's `rows` [C]; the others are those of `draft_chains`.

        Returns:
            Whether that was all: no kernel was compiled, and no graph captured.
        """

    def wait(self) -> tuple[Int32Array, npt.NDArray[np.float32]]:
        """Wait for the guesses that were launched last; see `draft_chains` for what it returns."""


class CpuGuesses:
    """The guesses of a head on a CPU, which computes them at once."""

    def __init__(self, head: Guesser, runner: Runner, *, k: int) -> None:
        """A head that guesses `k` tokens in a row, after rows of the runner's last step."""
        self.head, self.k, self._runner = head, k, runner

    def begin(self) -> None:
        """See `Guesses`."""
        self.head.refresh(self._runner.model)

    def launch(self, rows: Int64Array, *noise: Any) -> bool:
        """See `Guesses`."""
        states = self.head.aim(self._runner, rows)
        self._chains = draft_chains(self.head, states[torch.from_numpy(rows)], *noise, k=self.k)
        return True

    def wait(self) -> tuple[Int32Array, npt.NDArray[np.float32]]:
        """See `Guesses`."""
        return self._chains


class HeadDrafter:
    """Any `DrafterBase`, with a head's guesses in its trees; for the slots of one engine."""

    drafts = True

    def __init__(
        self,
        inner: DrafterBase,
        head: Guesser,
        runner: Runner,
        *,
        k: int,
        slots: int,
        cost: StepCost | None = None,
    ) -> None:
        """Make the drafter of an engine.

        Args:
            inner: The other drafter.
            head: Its policy is the runner's.
            runner: The engine's, as the two that follow.
            k: Tokens that are guessed in a row.
            slots: Number of slots.
            cost: Of a step; None where drafts are not budgeted by it: then the head always runs.
        """
        self.inner, self.head = inner, head
        self.k = k
        self.cost = cost
        self._runner = runner
        self._guesses = _guesses_on(runner, head, k=k, slots=slots)
        self.tables: dict[str, Array] = {}
        """By purpose, [k, 2, NUM_BINS, 2]: accepted and tried, of the best and the second best token."""
        self._promised: dict[str, float] = {}
        """By purpose, the number of tokens that a draft of the head promises."""
        self._purpose = ""
        self._rows = np.full(slots, NO_ROW)
        """[slots], the row of the last step that gave the slot's last token."""
        self._covered = np.zeros(slots)
        """[slots], the chance that the other drafter's last tree had the next token."""
        self._seconds = 0.0
        """Seconds of a draft of one sequence."""
        self._num_drafted = 0
        self._drafted = self._launched = self._owners = NO_SLOTS
        """Slots that were drafted for in this step, those that the head drafts for, and [C] the sequences of the
        current step that it has drafted for."""
        self._was_prepared = True
        self._num_steps = self._num_head_steps = 0
        """Steps, and those of them in which the head has drafted."""
        self._accepted = np.zeros(1 + MAX_DEPTH, np.int64)
        """The head's guesses, and those that have the next 1, 2, ... tokens."""

    def __getattr__(self, name: str) -> Any:
        """All else is the other drafter's."""
        return getattr(self.inner, name)

    @property
    def defers(self) -> bool:
        """See `DrafterBase`."""
        return self.inner.defers

    @defers.setter
    def defers(self, defers: bool) -> None:
        self.inner.defers = defers

    def begin_rollout(self, purpose: Purpose) -> None:
        """See `DrafterBase`."""
        self.inner.begin_rollout(purpose)
        self._purpose = purpose
        self.tables.setdefault(purpose, np.zeros((self.k, 2, NUM_BINS, 2)))
        self._promised.setdefault(purpose, float(self.k))
        self._guesses.begin()
        self._rows[:] = NO_ROW
        self._drafted = self._launched = self._owners = NO_SLOTS  # there are some after a step that has failed

    def start(self, slots: Int64Array, requests: Sequence[Request]) -> None:
        """No hidden state of these samples is known until a step has sampled a token."""
        self.inner.start(slots, requests)
        self._rows[slots], self._covered[slots] = NO_ROW, 0.0

    def propose(self, slots: Int64Array, max_nodes: Int64Array, min_score: float) -> DraftTrees:
        """Wait for the head's guesses, and add them to the other drafter's trees."""
        trees = self.inner.propose(slots, max_nodes, min_score)
        check_trees(trees, max_nodes, self._runner.model.config.vocab_size, str(self.inner))
        sums = np.concatenate([[0.0], (trees.scores * (trees.parents == ROOT)).cumsum(dtype=np.float64)])
        self._covered[slots] = sums[trees.offsets[1:]] - sums[trees.offsets[:-1]]
        self._drafted = slots
        launched, self._launched = self._launched, NO_SLOTS
        if not len(launched):
            return trees
        started = time.perf_counter()
        tokens, margins = self._guesses.wait()
        # In one layout on all devices: for each that they meet, Numba compiles its functions again.
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

    def prepare(self, slots: Int64Array, token_ids: Int32Array, offsets: Int64Array, rows: Int64Array) -> None:
        """Learn what margins were worth; launch the head where it pays, if this step has drafted: the next one will."""
        self._rows[:], self._launched = NO_ROW, NO_SLOTS  # what a step without drafts has not merged is of no use
        self._rows[slots] = rows
        self._num_steps += 1
        if len(self._owners):
            chains = self._owners, self._tokens, self._bins
            _learn(chains, token_ids, offsets, self.tables[self._purpose], self._accepted)
            self._num_head_steps += 1
            self._owners = NO_SLOTS
        if num := len(self._drafted):  # the first of `slots`
            self._launch(slots[:num], token_ids[offsets[1 : num + 1] - 1], rows[:num])
            self._drafted = NO_SLOTS
        self.inner.prepare(slots, token_ids, offsets, rows)

    def _launch(self, slots: Int64Array, last: Int32Array, rows: Int64Array) -> None:
        """Begin to draft for those of `slots` for which it pays, after their last tokens, which `rows` gave."""
        started = time.perf_counter()
        self._num_drafted += 1
        gain = self._promised[self._purpose] * (1 - self._covered[slots])
        pays = (gain > self._seconds / self._seconds_per_token(len(slots))) | (self._num_drafted % PROBE_EVERY == 0)
        pays &= rows != NO_ROW
        self._launched, rows, inputs = slots[pays], rows[pays], self._runner.inputs
        if len(rows):
            noise = inputs.temperatures[rows], inputs.rng_keys[rows].view(np.uint64)
            positions = inputs.sample_positions[rows].astype(np.int64) + 1
            self._was_prepared = self._guesses.launch(rows, last[pays], *noise, positions)
        self._last_seconds = time.perf_counter() - started

    def _seconds_per_token(self, num_sequences: int) -> float:
        """Time in which a step of this many sequences without drafts gives a token; infinite if none is measured."""
        if self.cost is None or self.cost.is_fixed or not self.cost.is_known:
            return float("inf")
        return self.cost.seconds(num_sequences) / num_sequences

    def take_metrics(self) -> dict[str, float]:
        """How often the head ran, and how many of its guesses have the next 1, 2, ... tokens."""
        metrics = self.inner.take_metrics()
        if self._num_head_steps:
            metrics["engine/head_steps_share"] = self._num_head_steps / self._num_steps
            num_guesses, *counts = self._accepted.tolist()
            for depth, count in enumerate(counts, 1):
                metrics[f"engine/head_acceptance_depth_{depth}"] = count / max(num_guesses, 1)
        self._num_steps = self._num_head_steps = self._accepted[:] = 0
        return metrics

    def save(self, folder: Path) -> None:
        """Write what margins were worth, and what the other drafter saves."""
        self.inner.save(folder)
        write_atomic(folder / FILE, to_safetensors(self.tables))

    def load(self, folder: Path) -> None:
        """Read what `save` wrote, by any `k`."""
        self.inner.load(folder)
        file = folder / FILE
        for purpose, rows in load_file(file).items() if file.is_file() else ():
            self.tables[purpose] = np.zeros((self.k, *rows.shape[1:]))
            self.tables[purpose][: len(rows)] = rows[: self.k]


def _guesses_on(runner: Runner, head: Guesser, *, k: int, slots: int) -> "CpuGuesses | CudaGuesses":
    """Guesses that are computed on the runner's device."""
    if isinstance(runner, CpuRunner):
        return CpuGuesses(head, runner, k=k)
    from srtrl.cuda.runner import CudaRunner
    from srtrl.features.draft_head_cuda import CudaGuesses

    assert isinstance(runner, CudaRunner)
    return CudaGuesses(head, runner, k=k, slots=slots)


def wrap_for_warm_up(inner: DrafterBase, runner: Runner) -> DrafterBase:
    """A drafter with a tiny head, for `compile_kernels`."""
    head = DraftHead(runner.model, runner.model.dtype, vocabulary=4, seed=0)
    return cast(DrafterBase, HeadDrafter(inner, head, runner, k=3, slots=2))


@numba.njit(cache=True, nogil=True)
def _fill_chances(table: Array, bins: Array, tokens: Array, chances: Array) -> None:
    """The chance that each guess, and all above it, is accepted, [C, K, 2]; 0 if it is refused."""
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
