"""The formulas of the KL, and of token-level advantages in loops over sequences and tokens.

They are in NumPy float64 and independent of `srtrl/algorithms`. A batch is a list with one array [L] per sequence; the
formulas of the losses are in `padded_update.py`.
"""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

Array = npt.NDArray[np.float64]
Ragged = list[Array]


def padded(values: Sequence[npt.NDArray[np.floating]], padding: float = 0.0) -> tuple[Tensor, Tensor]:
    """[B, L] float64 with `padding` on the right, and the mask [B, L]."""
    rows = [torch.from_numpy(numbers).double() for numbers in values]
    lengths = torch.tensor([len(row) for row in rows])
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    return pad_sequence(rows, batch_first=True, padding_value=padding), mask


def kl_estimate(name: str, log_ratio: Tensor) -> Tensor:
    """The estimate of each token's KL, from the log-prob by the policy less that by the reference."""
    return {"k1": log_ratio, "k2": log_ratio**2 / 2, "k3": (-log_ratio).exp() - 1 + log_ratio}[name]


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
