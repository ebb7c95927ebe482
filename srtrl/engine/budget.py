"""Which draft nodes a decode step verifies: as many of the best, over all sequences, as make the step pay most.

One more row in a step costs little while it fits into padding and memory bandwidth, and much when it does not; and a
node brings a token with the chance that it is accepted. So all nodes of all sequences stand in one queue, best chance
first, and the step takes so many of them that expected tokens per second are highest. With many sequences that is few
nodes each or none; with a last straggler it is many.
"""

import functools
from typing import Any

import numpy as np
import numpy.typing as npt

from srtrl.drafters.draft_tree import ROOT, DraftTree, DraftTrees
from srtrl.engine.asking import NUM_CLASSES, Asking, class_of
from srtrl.engine.budget_kernel import DRAFTED, EXPECTED, NUM_OUTCOMES, PLAIN, WORTH, choose_nodes, keep_nodes
from srtrl.engine.calibration import Calibration, Trust
from srtrl.engine.step_cost import StepCost

Array = npt.NDArray[Any]

FIRST_ASK, LEAST_ASK = 16, 4
"""Nodes of a sequence to ask for at first, and at least."""
USE_MEMORY = 0.95
SMALL_GAIN = 0.15
PLAIN_INTERVALS = 64, 256
"""One of so many steps does without drafts, so that the cost of that stays known: while they gain less, and more."""
PLAIN_STEPS = 2
"""So many of them in a row, of which the last one's cost is learned: drafting takes the place of the weights in the
processor's caches, and the first step behind it is slower than others."""
RECORD_EVERY = 4
"""Of more steps without drafts in a row one in so many is learned: it takes its time."""
FIRST_PLAIN = 4
"""The first such step; each further interval is twice as long, up to that."""
TAIL_SHARE = 0.25
"""While a rollout drains, about so many of the drafts' tokens make it end sooner: those of the last samples. The others
make later steps smaller, and that is worth what rows cost, and none of what a step costs beside."""
GROWING_SHARE = 0.6
"""Of the time that drafting for a look's sequences takes, so much grows with their number."""
CHEAP_SHARE = 0.5
"""Scores may be too low by so much: what is proposed reaches down to this share of a node's price."""
PRICED_ROWS = 32
"""The price of a node is that of one in so many, or in one for each sequence if that is more: of a whole stair."""


class DraftBudget:
    """Chooses the nodes of each step, and learns from the outcomes.

    In each step with sequences to decode: `max_nodes`, drafting if it is not 0, `select`, and behind the step
    `observe`, `record_drafting` and `record`. No clock is read here: the same calls give the same choices.
    """

    def __init__(
        self,
        cost: StepCost,
        *,
        fixed: int | None = None,
        most_nodes: int = 64,
        calibration: Calibration | None = None,
    ) -> None:
        """Make a budget.

        Args:
            cost: What a step costs; known by the time of the first `select`, unless `fixed`.
            fixed: Verify up to so many nodes of each sequence, whatever they cost; None: what pays.
            most_nodes: Most nodes of one sequence.
            calibration: What is known about the scores; by default nothing.
        """
        assert fixed is None or fixed >= 0
        self.cost = cost
        self.calibration = calibration or Calibration()
        self.fixed = fixed if fixed is None else min(fixed, most_nodes)
        self._most_nodes = most_nodes
        self._use = FIRST_ASK / 2
        """Nodes of the sequence that had most; old steps fade."""
        self._asking = Asking()
        self._steps_since_plain = [0] * NUM_CLASSES
        self._plain_intervals = [FIRST_PLAIN] * NUM_CLASSES
        self._plain_left = 0
        self._num_plain = 0
        """Steps without drafts in a row, of those that were recorded."""
        self._num_sequences = 0
        self._trust = Trust(NUM_CLASSES)
        self._last_expected = 0.0
        self._num_steps = self._num_asks = 0

    def max_nodes(self, num_sequences: int) -> int:
        """Return for how many nodes of each sequence to ask the drafter; called once a step.

        0 where drafts do not pay: they are then asked for now and then only, to see whether they do again.
        `num_sequences` are those that drafts are wanted for.
        """
        self._num_sequences = num_sequences
        self._num_steps += 1
        self._last_expected = 0.0
        if self.fixed is None and not self._is_due(num_sequences):
            return 0
        self._asking.asked()
        self._num_asks += 1
        if self.fixed is not None:
            return self.fixed
        room = -(-max(self.cost.max_rows - num_sequences, 0) // max(num_sequences, 1))
        return min(max(LEAST_ASK, min(int(2 * self._use + 0.5), room)), self._most_nodes)

    def _is_due(self, num_sequences: int) -> bool:
        """Whether to ask, one of some steps apart whose cost without drafts is to be learned."""
        size = class_of(num_sequences)
        if self._plain_left:
            self._plain_left -= 1
        if not self._asking.is_due(num_sequences):
            self._steps_since_plain[size] = 0
            return False
        self._steps_since_plain[size] += 1
        longest = PLAIN_INTERVALS[self._asking.gain(num_sequences) >= SMALL_GAIN]
        if self._steps_since_plain[size] >= min(self._plain_intervals[size], longest):
            self._plain_left = PLAIN_STEPS
            self._plain_intervals[size] = min(2 * self._plain_intervals[size], max(PLAIN_INTERVALS))
        if self._plain_left:
            self._steps_since_plain[size] = 0
            return False
        return True

    @property
    def only_looks(self) -> bool:
        """Whether the coming step asks just to see whether drafts pay: then some of the sequences are enough."""
        return self.fixed is None and self._asking.only_looks(self._num_sequences)

    def least_score(self, num_sequences: int, num_roots: int, context_per_row: float) -> float:
        """Return the score below which nodes hardly pay in the coming step, so that they need not be proposed.

        The price of a node, in tokens, is the mean time that a row takes, of a whole stair's rows, at the rate of
        tokens without drafts (drafts that pay raise the rate, and with it the price). So nodes that would fill free
        padding are given up, and those that calibration would raise to more than twice their score.

        Args:
            num_sequences: Those that drafts are wanted for.
            num_roots: All that decode, run-aheads included.
            context_per_row: Tokens that a root reads.
        """
        if self.fixed is not None:
            return 0.0
        more = max(num_roots, PRICED_ROWS)
        plain, drafted = self.cost.seconds_at([num_roots, num_roots + more], context_per_row).tolist()
        price: float = num_sequences * (drafted - plain) / (more * plain)
        return CHEAP_SHARE * min(price, 1.0)

    def select(
        self,
        trees: DraftTrees,
        *,
        context_tokens: float,
        num_other_rows: int = 0,
        weights: npt.NDArray[np.float64] | None = None,
        is_draining: bool = False,
        asked_share: float = 1.0,
    ) -> DraftTrees:
        """Return the nodes to verify: trees again, nodes in their old order, with the drafter's scores.

        Args:
            trees: What was proposed.
            context_tokens: Tokens that the roots read, summed over the sequences.
            num_other_rows: Rows of the step that are neither roots nor nodes (prompts).
            weights: [B], worth of a token of each sequence, at least 0: above 1 for those that will be last, 0 where
                nobody waits for it; by default all are 1.
            is_draining: No sample waits for a slot; whether asking pays is then judged more strictly.
            asked_share: Drafts were asked for so many of the sequences. What is chosen for these, and what it brings,
                is as if the others had such drafts, too.
        """
        if not len(trees):
            return trees
        worths = np.ones(len(trees)) if weights is None else np.asarray(weights, np.float64)
        assert len(worths) == len(trees)
        if self.fixed is not None:
            keep = np.arange(trees.num_nodes) - np.repeat(trees.offsets[:-1], trees.sizes) < self.fixed
            self._last_expected = float(self.calibration.calibrated(trees)[keep].sum())
            return _of_kept(trees, keep)
        keep = np.empty(trees.num_nodes, np.bool_)
        outcome = np.empty(NUM_OUTCOMES)
        curve = self.cost.curve(context_tokens / len(trees))
        trust = self.trust
        choose_nodes(
            trees.parents,
            trees.scores,
            trees.offsets,
            worths,
            self.calibration.corrections,
            curve.edges,
            curve.values,
            curve.tail_slope,
            self.cost.verify_seconds,
            asked_share,
            num_other_rows,
            self.draft_seconds,
            trust,
            keep,
            outcome,
        )
        chosen = _of_kept(trees, keep)
        self._last_expected, plain = float(outcome[EXPECTED]), float(outcome[PLAIN])
        self._use = max(USE_MEMORY * self._use, float(chosen.sizes.max()))
        if self._asking.asks_now:
            more_tokens = trust * float(outcome[WORTH]) / asked_share / max(float(worths.sum()), 1e-9)
            if is_draining:
                alone = self.cost.seconds(1, context_tokens / len(trees))
                more_tokens *= 1 - (1 - TAIL_SHARE) * (1 - 1 / len(trees)) * min(alone / plain, 1.0)
            num_asked = max(round(asked_share * self._num_sequences), 1)
            self._asking.learn(self._num_sequences, num_asked, more_tokens, plain, float(outcome[DRAFTED]))
        return chosen

    def observe(self, trees: DraftTrees, emitted_offsets: npt.NDArray[np.int64], emitted_tokens: Array) -> None:
        """Learn how good the estimates were.

        Args:
            trees: What was proposed, before `select`.
            emitted_offsets: [B + 1], where each sequence's tokens begin in `emitted_tokens`.
            emitted_tokens: Tokens that the step gave: accepted ones and the bonus token. Those of a sequence without
                nodes may be left out.
        """
        self.calibration.observe(trees, emitted_offsets, emitted_tokens)
        if trees.num_nodes:  # where nothing was verified, calibration goes on, and an old distrust fades
            num_accepted = len(emitted_tokens) - int(np.count_nonzero(np.diff(emitted_offsets)))
            self._trust.observe(class_of(self._num_sequences), self._last_expected, num_accepted)

    def record_drafting(self, seconds: float, asked_share: float = 1.0) -> None:
        """Learn what `propose`, `select` and `observe` took together; where drafts were asked for, behind `observe`."""
        for_all = seconds * (1 + GROWING_SHARE * (1 / asked_share - 1))
        self._asking.record_seconds(self._num_sequences, for_all, seconds)

    def record(self, trees: DraftTrees, *, context_tokens: float, seconds: float, was_asked: bool) -> None:
        """Learn what a step without prompt rows cost; it may be called when the next step has begun.

        Args:
            trees: What was verified.
            context_tokens: As in `select`.
            seconds: Wall time of the whole step without drafting.
            was_asked: Whether drafts were asked for.
        """
        self._asking.pay(seconds)
        if not len(trees):
            return
        self._num_plain = 0 if was_asked else self._num_plain + 1
        if not was_asked and self.fixed is None and self._num_plain % RECORD_EVERY != PLAIN_STEPS % RECORD_EVERY:
            return
        num_rows = len(trees) + trees.num_nodes
        self.cost.record(num_rows, context_tokens / len(trees) * num_rows, seconds, has_drafts=trees.num_nodes > 0)

    def begin_rollout(self, known_share: float) -> None:
        """Other prompts or other weights come; `known_share` of the samples have rollouts to draft from.

        Chances that were learned from samples without a history are too low for samples with one: they are forgotten.
        """
        if self._asking.begin_rollout(known_share):
            self.calibration.forget()
            self._trust = Trust(NUM_CLASSES)
            self._use = max(self._use, FIRST_ASK / 2)

    @property
    def trust(self) -> float:
        """Accepted nodes by expected ones, in steps of as many sequences as this one."""
        return self._trust.of(class_of(self._num_sequences))

    @property
    def gain(self) -> float:
        """What asking has brought in such steps, as a share of the tokens per second without."""
        return self._asking.gain(self._num_sequences)

    @property
    def draft_seconds(self) -> float:
        """What drafting for all sequences takes in such steps; 0 where it is not known."""
        return self._asking.draft_seconds(self._num_sequences)

    def take_metrics(self) -> dict[str, float]:
        """Metrics since the last call."""
        metrics = {
            "engine/calibration_error": self.calibration.error,
            "engine/draft_asked_share": self._num_asks / max(self._num_steps, 1),
        }
        self.calibration.reset_error()
        self._num_steps = self._num_asks = 0
        return metrics


def _of_kept(trees: DraftTrees, keep: npt.NDArray[np.bool_]) -> DraftTrees:
    """Return the trees of some of the nodes; a kept node's parent is kept."""
    offsets = np.empty_like(trees.offsets)
    token_ids, parents, scores = keep_nodes(trees.token_ids, trees.parents, trees.scores, trees.offsets, keep, offsets)
    return DraftTrees(token_ids=token_ids, parents=parents, scores=scores, offsets=offsets)


@functools.cache
def rehearse_choice() -> None:
    """Compile (or load) the kernels of budgets and costs, once a process, before a rollout needs them."""
    cost = StepCost.padded_to(8, 64)
    cost.probe(lambda num_rows, context_tokens, num_logits: 1e-3 + 1e-6 * num_rows)
    budget = DraftBudget(cost)
    chain = DraftTree(
        token_ids=np.array([1, 2], np.int32),
        parents=np.array([ROOT, 0], np.int32),
        scores=np.array([0.9, 0.8], np.float32),
    )
    trees = DraftTrees.of([chain])
    budget.begin_rollout(1.0)
    budget.max_nodes(len(trees))
    budget.least_score(len(trees), len(trees), 8.0)
    verified = budget.select(trees, context_tokens=8.0)
    budget.observe(trees, np.array([0, 2]), np.array([1, 3]))
    budget.record(verified, context_tokens=8.0, seconds=1e-3, was_asked=True)
    cost.curve().rows_within(1, np.arange(2.0), slowdown=1.0, row_seconds=1.0)
