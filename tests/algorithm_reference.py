"""The papers' formulas in loops over sequences and tokens, in NumPy float64 and independent of `srtrl/algorithms`.

A batch is ragged: a list with one array [L] a sequence. Losses take the log-probs twice, `new` and `stopped`: the same
numbers, but what a formula puts under a stop-gradient is computed from `stopped`. The derivative with respect to `new`
alone, by central differences, is then the gradient that the formula means.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[np.float64]
Ragged = list[Array]
LossFormula = Callable[[Ragged, Ragged, Ragged, Ragged, float, float], Ragged]
"""(new, stopped, old, advantages, clip_low, clip_high) -> one loss a token."""


@dataclass
class RaggedBatch:
    """Random sequences of different lengths; every field but `lengths` has one array [L] a sequence."""

    lengths: list[int]
    new: Ragged
    old: Ragged
    ref: Ragged
    advantages: Ragged
    """One number a sequence, repeated over its tokens, or one a token."""

    @property
    def sequence_index(self) -> Tensor:
        return torch.tensor([index for index, length in enumerate(self.lengths) for _ in range(length)])


def random_batch(seed: int, *, spread: float = 0.4, per_token: bool = False) -> RaggedBatch:
    """2 to 6 sequences of 1 to 9 tokens; `spread` is the standard deviation of new - old."""
    generator = np.random.default_rng(seed)
    lengths = [int(length) for length in generator.integers(1, 10, generator.integers(2, 7))]
    old = [generator.uniform(-4.0, -0.05, length) for length in lengths]
    new = [values + spread * generator.standard_normal(len(values)) for values in old]
    ref = [values + 0.5 * generator.standard_normal(len(values)) for values in old]
    advantages = [
        generator.standard_normal(length) if per_token else np.full(length, generator.standard_normal())
        for length in lengths
    ]
    return RaggedBatch(lengths, new, old, ref, advantages)


def packed(values: Ragged) -> Tensor:
    """[R] float64, the sequences one after another."""
    return torch.from_numpy(np.concatenate(values))


def padded(values: Ragged, padding: float = 0.0) -> tuple[Tensor, Tensor]:
    """[B, L] float64 with `padding` on the right, and the mask [B, L]."""
    longest = max(map(len, values))
    rows = torch.full((len(values), longest), padding, dtype=torch.float64)
    mask = torch.zeros(len(values), longest, dtype=torch.bool)
    for row, numbers in enumerate(values):
        rows[row, : len(numbers)] = torch.from_numpy(numbers)
        mask[row, : len(numbers)] = True
    return rows, mask


def clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def ppo_clip(new: Ragged, stopped: Ragged, old: Ragged, advantages: Ragged, low: float, high: float) -> Ragged:
    """Equation 7 of arXiv 1707.06347."""
    losses = []
    for now, before, advantage in zip(new, old, advantages, strict=True):
        ratios = [math.exp(a - b) for a, b in zip(now, before, strict=True)]
        losses.append(
            np.array([-min(r * a, clip(r, 1 - low, 1 + high) * a) for r, a in zip(ratios, advantage, strict=True)])
        )
    return losses


def dual_clip_of(cap: float) -> LossFormula:
    """The dual-clip objective of arXiv 1912.09729: max(min(...), cap * A) where A < 0."""

    def dual_clip(new: Ragged, stopped: Ragged, old: Ragged, advantages: Ragged, low: float, high: float) -> Ragged:
        losses = []
        for loss, advantage in zip(ppo_clip(new, stopped, old, advantages, low, high), advantages, strict=True):
            objectives = [max(-x, cap * a) if a < 0 else -x for x, a in zip(loss, advantage, strict=True)]
            losses.append(-np.array(objectives))
        return losses

    return dual_clip


def gspo(new: Ragged, stopped: Ragged, old: Ragged, advantages: Ragged, low: float, high: float) -> Ragged:
    """Equations 5 and 7 of arXiv 2507.18071: the ratio is (p_new(y) / p_old(y)) ** (1 / |y|)."""
    losses = []
    for now, before, advantage in zip(new, old, advantages, strict=True):
        ratio = (math.prod(map(math.exp, now)) / math.prod(map(math.exp, before))) ** (1 / len(now))
        losses.append(np.array([-min(ratio * a, clip(ratio, 1 - low, 1 + high) * a) for a in advantage]))
    return losses


def gspo_token(new: Ragged, stopped: Ragged, old: Ragged, advantages: Ragged, low: float, high: float) -> Ragged:
    """Equations 13 and 14 of arXiv 2507.18071: sg(s) p_new / sg(p_new)."""
    losses = []
    for now, fixed, before, advantage in zip(new, stopped, old, advantages, strict=True):
        sequence_ratio = (math.prod(map(math.exp, fixed)) / math.prod(map(math.exp, before))) ** (1 / len(now))
        ratios = [sequence_ratio * math.exp(a) / math.exp(b) for a, b in zip(now, fixed, strict=True)]
        losses.append(
            np.array([-min(r * a, clip(r, 1 - low, 1 + high) * a) for r, a in zip(ratios, advantage, strict=True)])
        )
    return losses


def cispo(new: Ragged, stopped: Ragged, old: Ragged, advantages: Ragged, low: float, high: float) -> Ragged:
    """Equations 4 and 5 of arXiv 2506.13585: -sg(clip(ratio)) A log p_new."""
    losses = []
    for now, fixed, before, advantage in zip(new, stopped, old, advantages, strict=True):
        weights = [clip(math.exp(a) / math.exp(b), 1 - low, 1 + high) for a, b in zip(fixed, before, strict=True)]
        losses.append(np.array([-w * a * p for w, a, p in zip(weights, advantage, now, strict=True)]))
    return losses


def policy_gradient(new: Ragged, stopped: Ragged, old: Ragged, advantages: Ragged, low: float, high: float) -> Ragged:
    """REINFORCE: -A log p_new."""
    return [
        np.array([-a * p for a, p in zip(advantage, now, strict=True)])
        for now, advantage in zip(new, advantages, strict=True)
    ]


LOSSES: dict[str, LossFormula] = {
    "ppo_clip": ppo_clip,
    "dual_clip": dual_clip_of(3.0),
    "gspo": gspo,
    "gspo_token": gspo_token,
    "cispo": cispo,
    "policy_gradient": policy_gradient,
}


def central_differences(function: Callable[[Ragged], float], at: Ragged, step: float = 1e-6) -> Ragged:
    """Derivative of `function` with respect to each number of `at`."""
    gradients = [np.zeros_like(values) for values in at]
    for row, gradient in enumerate(gradients):
        for column in range(len(gradient)):
            moved = []
            for sign in (1, -1):
                point = [values.copy() for values in at]
                point[row][column] += sign * step
                moved.append(function(point))
            gradient[column] = (moved[0] - moved[1]) / (2 * step)
    return gradients


def weighted(losses: Ragged, weights: Ragged) -> float:
    return sum(
        float(w) * float(x) for row, ws in zip(losses, weights, strict=True) for x, w in zip(row, ws, strict=True)
    )


def reduction_weights(reduction: str, lengths: Sequence[int], max_new_tokens: int) -> Ragged:
    """Weight of each token in the loss of the mini-batch."""
    divisors = {
        "token_mean": [sum(lengths)] * len(lengths),
        "sequence_mean_token_mean": [length * len(lengths) for length in lengths],
        "sequence_mean_token_sum": [len(lengths)] * len(lengths),
        "sequence_mean_token_sum_norm": [len(lengths) * max_new_tokens] * len(lengths),
    }[reduction]
    return [np.full(length, 1 / divisor) for length, divisor in zip(lengths, divisors, strict=True)]


def gae(rewards: Ragged, values: Ragged, gamma: float, lam: float) -> Ragged:
    """Equation 16 of arXiv 1506.02438, the sum written out; the value after the last token is 0."""
    advantages = []
    for reward, value in zip(rewards, values, strict=True):
        length = len(reward)
        following = [*value[1:], 0.0]
        deltas = [reward[t] + gamma * following[t] - value[t] for t in range(length)]
        advantages.append(
            np.array([sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, length)) for t in range(length)])
        )
    return advantages


def returns_to_go(rewards: Ragged, gamma: float) -> Ragged:
    return [
        np.array([sum(gamma ** (k - t) * row[k] for k in range(t, len(row))) for t in range(len(row))])
        for row in rewards
    ]


def whiten(values: Ragged) -> Ragged:
    """Mean 0 and standard deviation 1 over all tokens; the variance has divisor n - 1, and 1e-8 is added to it."""
    tokens = [float(number) for row in values for number in row]
    mean = sum(tokens) / len(tokens)
    variance = sum((number - mean) ** 2 for number in tokens) / (len(tokens) - 1)
    return [np.array([(number - mean) / math.sqrt(variance + 1e-8) for number in row]) for row in values]
