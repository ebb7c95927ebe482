"""Padding, order and micro-batch size do not change the gradient: packed in any way, it is that of one padded batch."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from padded_update import LOSSES, RATIO_CAP, REDUCTIONS, gradient_of, k3, pad_all, reduce, token_losses
from torch import Tensor
from update_cases import RecordingSGD, fresh_accelerator, make_policy, make_recipe, make_sequences, update

from srtrl.model.transformer import Transformer
from srtrl.types import TrainSequence

KL = 0.05
LOW, HIGH = 0.1, 0.15
MAX_NEW_TOKENS = 10
SCALE = 8
"""Of the weights: at the tests' usual 20 the network itself makes 1e-6 of the rounding of a rare token."""


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    with fresh_accelerator() as accelerator:
        yield accelerator


def random_case(policy: Transformer, seed: int) -> list[TrainSequence]:
    """Ragged groups whose tokens have advantages of their own."""
    rng = np.random.default_rng(seed)
    sequences = make_sequences(policy, noise=0.5, num_groups=5, seed=seed)
    kept = [sequences[index] for index in sorted(rng.choice(len(sequences), size=7, replace=False))]
    return [
        replace(sequence, advantages=rng.normal(-0.5, size=len(sequence.advantages)).astype(np.float32))
        for sequence in kept
    ]


def packed_gradient(
    loss: str,
    reduction: str,
    sequences: Sequence[TrainSequence],
    micro_batch_tokens: int,
    accelerator: Accelerator,
    dtype: torch.dtype,
) -> tuple[list[Tensor], dict[str, float]]:
    """By our update, in the given order: every sequence is a draw of its own, and all are one mini-batch."""
    recipe = make_recipe(
        rollout__num_prompts=len(sequences),
        algorithm__loss=loss,
        algorithm__loss_options={"ratio_cap": RATIO_CAP} if loss == "dual_clip" else {},
        algorithm__reduction=reduction,
        algorithm__clip_low=LOW,
        algorithm__clip_high=HIGH,
        algorithm__kl={"coefficient": KL},
        train__micro_batch_tokens=micro_batch_tokens,
    )
    policy = make_policy(dtype=dtype, scale=SCALE)
    optimizer = RecordingSGD(policy)
    ordered = [replace(sequence, draw_index=index) for index, sequence in enumerate(sequences)]
    metrics = update(policy, optimizer, accelerator, ordered, recipe)
    (gradient,) = optimizer.gradients
    return gradient, metrics


def distance(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Norm of the difference over the norm of the expected gradient."""
    difference = sum(float((f.double() - e.double()).square().sum()) for f, e in zip(found, expected, strict=True))
    return math.sqrt(difference / sum(float(e.double().square().sum()) for e in expected))


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("loss", LOSSES)
def test_any_packing_has_the_gradient_of_one_padded_batch(loss: str, reduction: str, accelerator: Accelerator) -> None:
    """Float64: to 1e-12 of the padded batch's. Float32: among each other to 1e-6 (about 1e-7 is found)."""
    policy = make_policy(scale=SCALE)
    rng = np.random.default_rng((LOSSES.index(loss), REDUCTIONS.index(reduction)))
    sequences = random_case(policy, seed=int(rng.integers(1000)))
    padded = pad_all(policy, sequences)
    naive = reduce(reduction, token_losses(loss, padded, LOW, HIGH) + KL * k3(padded), padded.mask, MAX_NEW_TOKENS)
    expected = gradient_of(policy, naive)
    in_float32: list[list[Tensor]] = []
    all_metrics: list[dict[str, float]] = []
    for budget in (16, int(rng.integers(17, 60)), 1000):
        order = rng.permutation(len(sequences))
        reordered = [sequences[index] for index in order]
        found, metrics = packed_gradient(loss, reduction, reordered, budget, accelerator, torch.float64)
        assert distance(found, expected) < 1e-12
        assert metrics["loss"] == pytest.approx(naive.item(), rel=1e-12)
        assert metrics["kl/ref"] == pytest.approx(k3(padded)[padded.mask].mean().item(), rel=1e-12)
        all_metrics.append(metrics)
        assert metrics == pytest.approx(all_metrics[0], rel=1e-6)  # log-probs are compared in float32
        in_float32.append(packed_gradient(loss, reduction, reordered, budget, accelerator, torch.float32)[0])
        assert distance(in_float32[-1], in_float32[0]) < 1e-6
        assert distance(in_float32[-1], expected) < 1e-5, "the weights alone are rounded by 6e-8"


@pytest.mark.parametrize("loss", ["ppo_clip", "dual_clip", "gspo", "cispo"])
def test_the_cases_meet_every_clip(loss: str, accelerator: Accelerator) -> None:
    """Or the comparison above would show less than it seems to."""
    sequences = random_case(make_policy(scale=SCALE), seed=0)
    _, metrics = packed_gradient(loss, "token_mean", sequences, 1000, accelerator, torch.float64)
    clips = {name: share for name, share in metrics.items() if name.startswith("clip_share/")}
    assert len(clips) == (3 if loss == "dual_clip" else 2)
    assert all(0 < share < 1 for share in clips.values()), clips
