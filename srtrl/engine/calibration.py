"""How likely a draft is to be accepted: the drafter's scores, corrected online by what was emitted."""

from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from srtrl.drafters.draft_tree import ROOT, DraftTrees

Array = npt.NDArray[Any]

NUM_DEPTHS = 3
"""Classes of depth: 1, 2 and 3, deeper."""
LOGIT_RANGE = 6.0
NUM_KNOTS = 25
"""Conditional scores are told apart by their logit, half a unit each; outside the range they share the last knots."""
PRIOR_COUNT = 8.0
"""Outcomes that the drafter's own estimate counts for."""
MEMORY = 0.998
"""What is left of an outcome after a step: text and policy move."""
NUM_ERROR_BINS = 10
TRUST_MEMORY = 0.98
TRUST_PRIOR = 8.0
"""Nodes that stand for the trust in the chances before there are outcomes."""
LEAST_TRUST, MOST_TRUST = 0.1, 1.25


class Calibration:
    """Chances of acceptance from a drafter's scores.

    A node's score is that of its whole path; what is calibrated is the conditional score q = score / parent's score,
    the chance that the node is accepted once its parent is. Its outcome is known for every proposed node whose parent
    is on the emitted path, whether it was verified or not. For classes of (depth, logit of q) it sums outcome - q; the
    correction, shrunk where little is known and interpolated between the classes, is added to q. It is shrunk to that
    of the depth above, at the first depth to 0: scores that are too low for first tokens are too low for second ones,
    and outcomes of these come only with drafts.

    Siblings are corrected one by one: their chances may sum to more than 1.
    """

    def __init__(self) -> None:
        self._counts = np.zeros((NUM_DEPTHS, NUM_KNOTS))
        self._excess = np.zeros((NUM_DEPTHS, NUM_KNOTS))
        """Sum of outcome - q."""
        self.corrections = np.zeros((NUM_DEPTHS, NUM_KNOTS))
        """What is added to the conditional scores of each class."""
        self._errors = np.zeros((NUM_ERROR_BINS, 3))
        """Of the conditional chances given out, by size: number, sum, and sum of the outcomes."""

    def calibrated(self, trees: DraftTrees) -> npt.NDArray[np.float32]:
        """Return [num_nodes], the chance that each node is accepted; never more than its parent's."""
        chances = np.empty(trees.num_nodes, np.float32)
        calibrate(trees.parents, trees.scores, trees.offsets, self.corrections, chances)
        return chances

    def observe(self, trees: DraftTrees, emitted_offsets: npt.NDArray[np.int64], emitted_tokens: Array) -> None:
        """Learn from a step.

        Args:
            trees: What was proposed (not only what was verified), with the drafter's scores.
            emitted_offsets: [B + 1], where each sequence's tokens begin in `emitted_tokens`.
            emitted_tokens: Tokens that the step gave: accepted ones and the bonus token.
        """
        assert len(emitted_offsets) == len(trees) + 1
        _observe(
            trees.token_ids,
            trees.parents,
            trees.scores,
            trees.offsets,
            emitted_offsets,
            np.asarray(emitted_tokens, np.int64),
            self.corrections,
            self._counts,
            self._excess,
            self._errors,
        )

    @property
    def error(self) -> float:
        """Expected calibration error of the conditional chances since `reset_error`.

        Chances are put in ten classes; it is the mean, over nodes, of |mean chance - share accepted| of their class.
        """
        counts, chances, outcomes = self._errors.T
        return float(np.abs(chances - outcomes).sum() / max(counts.sum(), 1.0))

    def forget(self) -> None:
        """Take the scores as they are again: those that come are made of more than those before, or of less."""
        for learned in (self._counts, self._excess, self.corrections):
            learned[:] = 0

    def reset_error(self) -> None:
        """Begin a new measurement of the error; what was learned stays."""
        self._errors[:] = 0


class Trust:
    """Accepted nodes by expected ones, of those that were verified; apart for classes of steps.

    The best of noisy estimates are too good on the average. And who is left at the end of a rollout is not like the
    others: samples that have strayed from what their siblings said are the longest ones, and their drafts fail.
    """

    def __init__(self, num_classes: int) -> None:
        self._expected = np.full(num_classes, TRUST_PRIOR)
        self._accepted = np.full(num_classes, TRUST_PRIOR)

    def of(self, index: int) -> float:
        """The factor of the chances in steps of a class."""
        return float(min(max(self._accepted[index] / self._expected[index], LEAST_TRUST), MOST_TRUST))

    def observe(self, index: int, num_expected: float, num_accepted: int) -> None:
        """Learn from a step of a class: the sum of its nodes' chances, and how many of them were accepted."""
        for sums, count in ((self._expected, num_expected), (self._accepted, num_accepted)):
            sums[index] += count - (1 - TRUST_MEMORY) * (sums[index] - TRUST_PRIOR)


@numba.njit(cache=True, nogil=True)
def _place(conditional: float) -> float:
    """Position of a conditional score between the knots."""
    low = 0.5 / (1.0 + np.exp(LOGIT_RANGE))
    bounded = min(max(conditional, low), 1.0 - low)
    logit = np.log(bounded / (1.0 - bounded))
    place = (logit + LOGIT_RANGE) * ((NUM_KNOTS - 1) / (2 * LOGIT_RANGE))
    return float(min(max(place, 0.0), NUM_KNOTS - 1.0))


@numba.njit(cache=True, nogil=True)
def _conditional(scores: Array, first: int, node: int, parent: int) -> float:
    """The node's score by its parent's, in [0, 1]."""
    score = float(scores[first + node])
    if parent != ROOT:
        above = float(scores[first + parent])
        score = score / above if above > 0.0 else 0.0
    return min(max(score, 0.0), 1.0)


@numba.njit(cache=True, nogil=True)
def _correct(conditional: float, place: float, corrections: Array) -> float:
    """The conditional score and its correction, interpolated between two knots of its depth."""
    knot = min(int(place), NUM_KNOTS - 2)
    share = place - knot
    correction = (1.0 - share) * corrections[knot] + share * corrections[knot + 1]
    return float(min(max(conditional + correction, 0.0), 1.0))


@numba.njit(cache=True, nogil=True)
def calibrate(parents: Array, scores: Array, offsets: Array, corrections: Array, chances: Array) -> None:
    """Fill `chances` [num_nodes] float32; `corrections` is [NUM_DEPTHS, NUM_KNOTS], see `Calibration`."""
    depths = np.empty(len(parents), np.int32)
    for b in range(len(offsets) - 1):
        first = offsets[b]
        for node in range(offsets[b + 1] - first):
            parent = parents[first + node]
            depth = 0 if parent == ROOT else min(depths[first + parent] + 1, NUM_DEPTHS - 1)
            depths[first + node] = depth
            above = 1.0 if parent == ROOT else chances[first + parent]
            conditional = _conditional(scores, first, node, parent)
            chances[first + node] = above * _correct(conditional, _place(conditional), corrections[depth])


@numba.njit(cache=True, nogil=True)
def _observe(
    token_ids: Array,
    parents: Array,
    scores: Array,
    offsets: Array,
    emitted_offsets: Array,
    emitted_tokens: Array,
    corrections: Array,
    counts: Array,
    excess: Array,
    errors: Array,
) -> None:
    """Add the outcomes of all nodes whose parent is on the emitted path; see `Calibration.observe`."""
    counts *= MEMORY
    excess *= MEMORY
    matched = np.empty(len(parents), np.int32)  # tokens of the emitted path up to this node; 0: it is not on it
    for b in range(len(offsets) - 1):
        first, num_emitted = offsets[b], emitted_offsets[b + 1] - emitted_offsets[b]
        for node in range(offsets[b + 1] - first):
            matched[first + node] = 0
            parent = parents[first + node]
            above = 0 if parent == ROOT else matched[first + parent]
            if (above == 0 and parent != ROOT) or above >= num_emitted:
                continue  # its outcome is not known
            is_accepted = token_ids[first + node] == emitted_tokens[emitted_offsets[b] + above]
            if is_accepted:
                matched[first + node] = above + 1
            depth = min(above, NUM_DEPTHS - 1)
            conditional = _conditional(scores, first, node, parent)
            place = _place(conditional)
            knot = min(int(place), NUM_KNOTS - 2)
            share = place - knot
            outcome = 1.0 if is_accepted else 0.0
            counts[depth, knot] += 1.0 - share
            counts[depth, knot + 1] += share
            excess[depth, knot] += (1.0 - share) * (outcome - conditional)
            excess[depth, knot + 1] += share * (outcome - conditional)
            chance = _correct(conditional, place, corrections[depth])
            error_bin = min(int(chance * NUM_ERROR_BINS), NUM_ERROR_BINS - 1)
            errors[error_bin, 0] += 1.0
            errors[error_bin, 1] += chance
            errors[error_bin, 2] += outcome
    for depth in range(NUM_DEPTHS):
        prior = corrections[depth - 1] if depth else np.zeros(NUM_KNOTS)
        corrections[depth] = (excess[depth] + PRIOR_COUNT * prior) / (counts[depth] + PRIOR_COUNT)
