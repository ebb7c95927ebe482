"""The update of a tiny float64 policy against loops over plain floats."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch import Tensor
from update_cases import (
    NUM_GROUPS,
    NUM_SAMPLES,
    TEMPERATURE,
    RecordingSGD,
    fresh_accelerator,
    make_policy,
    make_recipe,
    make_sequences,
    naive_distributions,
    naive_logprobs,
    update,
)

from srtrl.model.transformer import Transformer
from srtrl.recipe import Recipe
from srtrl.trainer.update import compute_logprobs, mini_batches
from srtrl.types import TrainSequence

COEFFICIENT = 0.1


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    with fresh_accelerator() as accelerator:
        yield accelerator


def gradient_of(
    recipe: Recipe, sequences: Sequence[TrainSequence], accelerator: Accelerator
) -> tuple[list[Tensor], dict[str, float]]:
    """Gradient of the first mini-batch at fresh weights, and the metrics."""
    policy = make_policy()
    optimizer = RecordingSGD(policy)
    metrics = update(policy, optimizer, accelerator, sequences, recipe)
    assert len(optimizer.gradients[0]) == len(list(policy.parameters()))
    return optimizer.gradients[0], metrics


def hand_loss(policy: Transformer, sequences: Sequence[TrainSequence], recipe: Recipe) -> float:
    """Loss of all sequences as one mini-batch, token by token."""
    algorithm = recipe.algorithm
    lengths = [len(sequence.advantages) for sequence in sequences]
    total = 0.0
    for sequence in sequences:
        assert sequence.ref_logprobs is not None
        weight = {
            "token_mean": 1 / sum(lengths),
            "sequence_mean_token_mean": 1 / (len(lengths) * len(sequence.advantages)),
            "sequence_mean_token_sum": 1 / len(lengths),
            "sequence_mean_token_sum_norm": 1 / (len(lengths) * 10),
        }[algorithm.reduction]
        rows = zip(
            naive_logprobs(policy, sequence),
            sequence.rollout_logprobs.tolist(),
            sequence.ref_logprobs.tolist(),
            sequence.advantages.tolist(),
            strict=True,
        )
        for new, old, ref, advantage in rows:
            ratio = math.exp(new - old)
            clipped = min(max(ratio, 1 - 0.2), 1 + 0.3)
            loss = -min(ratio * advantage, clipped * advantage)
            if algorithm.kl.coefficient > 0 and algorithm.kl.placement == "loss":
                loss += (
                    COEFFICIENT
                    * {
                        "k2": (new - ref) ** 2 / 2,
                        "k3": math.exp(ref - new) - 1 - (ref - new),
                    }[algorithm.kl.estimator]
                )
            total += weight * loss
    return total


KL_OPTIONS: dict[str, dict[str, Any]] = {
    "no KL": {},
    **{f"{k} in loss": {"kl": {"coefficient": COEFFICIENT, "estimator": k}} for k in ("k2", "k3")},
    "KL in reward": {"kl": {"coefficient": COEFFICIENT, "placement": "reward"}},
}
REDUCTIONS = [
    "token_mean",
    "sequence_mean_token_mean",
    "sequence_mean_token_sum",
    "sequence_mean_token_sum_norm",
]


@pytest.mark.parametrize("kl", KL_OPTIONS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_loss_and_gradient_equal_the_hand_computation(kl: str, reduction: str, accelerator: Accelerator) -> None:
    recipe = make_recipe(algorithm={"clip_high": 0.3, "reduction": reduction, **KL_OPTIONS[kl]})
    policy = make_policy()
    sequences = make_sequences(policy, noise=0.3)
    gradient, metrics = gradient_of(recipe, sequences, accelerator)
    assert metrics["loss"] == pytest.approx(hand_loss(policy, sequences, recipe), rel=1e-12)
    assert metrics["clip_share/low"] > 0
    assert metrics["clip_share/high"] > 0

    generator = torch.Generator().manual_seed(0)
    for _ in range(3):  # along random directions in the space of all weights
        directions = [torch.randn(g.shape, generator=generator, dtype=g.dtype) for g in gradient]
        slope = sum(float((g * d).sum()) for g, d in zip(gradient, directions, strict=True))
        values = []
        for sign in (1, -1):
            moved = make_policy()
            with torch.no_grad():
                for parameter, direction in zip(moved.parameters(), directions, strict=True):
                    parameter.add_(direction, alpha=sign * 1e-6)
            values.append(hand_loss(moved, sequences, recipe))
        assert slope == pytest.approx((values[0] - values[1]) / 2e-6, rel=1e-6, abs=1e-8)


def test_metrics_are_means_over_all_tokens_of_all_mini_batches(accelerator: Accelerator) -> None:
    recipe = make_recipe(
        train__mini_batch_prompts=1,
        train__micro_batch_tokens=16,
        train__learning_rate=1e-300,  # the weights stay, so that one naive pass gives all
        algorithm__kl={"coefficient": COEFFICIENT, "estimator": "k2"},
    )
    policy = make_policy()
    sequences = make_sequences(policy, noise=0.3)
    _, metrics = gradient_of(recipe, sequences, accelerator)
    entropies, kls, low, high = [], [], [], []
    for sequence in sequences:
        assert sequence.ref_logprobs is not None
        rows = naive_distributions(policy, sequence).detach()
        entropies += (-(rows.exp() * rows).sum(-1)).tolist()
        new = np.array(naive_logprobs(policy, sequence))
        kls += ((new - sequence.ref_logprobs) ** 2 / 2).tolist()
        ratio = np.exp(new - sequence.rollout_logprobs)
        low += ((ratio < 0.8) & (sequence.advantages < 0)).tolist()
        high += ((ratio > 1.3) & (sequence.advantages > 0)).tolist()
    assert metrics["entropy"] == pytest.approx(np.mean(entropies), rel=1e-12)
    assert metrics["kl/ref"] == pytest.approx(np.mean(kls), rel=1e-6)
    assert metrics["clip_share/low"] == pytest.approx(np.mean(low), rel=1e-12)
    assert metrics["clip_share/high"] == pytest.approx(np.mean(high), rel=1e-12)
    losses = [hand_loss(policy, sequences[first : first + 2], recipe) for first in (0, 2, 4)]
    assert metrics["loss"] == pytest.approx(np.mean(losses), rel=1e-12)
    difference = np.abs(
        np.concatenate([naive_logprobs(policy, s) - s.rollout_logprobs for s in sequences[:2]])
    )  # the first mini-batch
    assert metrics["logprob_difference/mean"] == pytest.approx(difference.mean(), rel=1e-5)
    assert metrics["logprob_difference/max"] == pytest.approx(difference.max(), rel=1e-5)


def test_each_mini_batch_has_a_gradient_of_its_own(accelerator: Accelerator) -> None:
    policy = make_policy()
    sequences = make_sequences(policy, noise=0.3)
    optimizer = RecordingSGD(policy)
    recipe = make_recipe(train__mini_batch_prompts=1, train__num_epochs=2, train__learning_rate=1e-300)
    update(policy, optimizer, accelerator, sequences, recipe)
    batches = list(mini_batches(sequences, size=1, num_epochs=2, seed=recipe.seed, step=1))
    assert len(optimizer.gradients) == len(batches) == 6
    for gradient, batch in zip(optimizer.gradients, batches, strict=True):
        alone, _ = gradient_of(make_recipe(), batch.sequences, accelerator)
        torch.testing.assert_close(gradient, alone, rtol=1e-12, atol=1e-12)
    assert all(parameter.grad is None for parameter in policy.parameters()), "gradients must not outlive the update"


def test_gradient_norm_is_logged_before_clipping_and_clipped(accelerator: Accelerator) -> None:
    sequences = make_sequences(make_policy())
    gradient, metrics = gradient_of(make_recipe(), sequences, accelerator)
    norm = math.sqrt(sum(float(g.square().sum()) for g in gradient))
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-12)
    clipped, metrics = gradient_of(make_recipe(train__max_grad_norm=norm / 4), sequences, accelerator)
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-12)
    torch.testing.assert_close(clipped, [g / 4 for g in gradient], rtol=1e-5, atol=1e-12)


def test_an_update_makes_good_samples_likelier(accelerator: Accelerator) -> None:
    policy = make_policy()
    sequences = [
        replace(sequence, advantages=np.full_like(sequence.advantages, 1.0 if index % 2 == 0 else -1.0))
        for index, sequence in enumerate(make_sequences(policy))
    ]
    before = [np.mean(naive_logprobs(policy, sequence)) for sequence in sequences]
    update(policy, RecordingSGD(policy), accelerator, sequences, make_recipe())
    change = np.array([np.mean(naive_logprobs(policy, sequence)) for sequence in sequences]) - before
    assert change[0::2].mean() > 0 > change[1::2].mean()


def test_tied_heads_get_the_gradient_of_both_uses(accelerator: Accelerator) -> None:
    policy = make_policy(tied=True)
    sequences = make_sequences(policy)
    recipe = make_recipe(algorithm__reduction="token_mean")
    optimizer = RecordingSGD(policy)
    index = [name for name, _ in policy.named_parameters()].index("embedding")
    update(policy, optimizer, accelerator, sequences, recipe)
    values = []
    for sign in (1, -1):
        moved = make_policy(tied=True)
        with torch.no_grad():
            moved.embedding[3, 2] += sign * 1e-6
        values.append(hand_loss(moved, sequences, recipe))
    assert float(optimizer.gradients[0][index][3, 2]) == pytest.approx((values[0] - values[1]) / 2e-6, rel=1e-6)


# ---- learning rate ----


def test_learning_rate_follows_the_schedule_over_steps_epochs_and_mini_batches(accelerator: Accelerator) -> None:
    recipe = make_recipe(
        train__mini_batch_prompts=1, train__num_epochs=2, train__warmup_steps=3, train__schedule="linear"
    )  # 2 steps of 2 epochs of 3 mini-batches: 12 optimizer steps
    policy = make_policy()
    optimizer = RecordingSGD(policy)
    for step in (1, 2):
        metrics = update(policy, optimizer, accelerator, make_sequences(policy), recipe, step=step)
        assert metrics["learning_rate"] == optimizer.rates[-1]
    falling = [(12 - index) / 9 for index in range(3, 12)]
    assert optimizer.rates == pytest.approx([1e-3 * f for f in (1 / 4, 2 / 4, 3 / 4, *falling)], rel=1e-12)
    assert len(optimizer.gradients) == 12


# ---- three log-probs ----


def test_recompute_starts_at_ratio_one_and_measures_all_sequences(accelerator: Accelerator) -> None:
    sequences = make_sequences(make_policy(), noise=0.3)
    recipe = make_recipe(algorithm__old_logprobs="recompute", train__mini_batch_prompts=1, train__learning_rate=1e-300)
    _, metrics = gradient_of(recipe, sequences, accelerator)
    by_group = np.array([s.advantages[0] for s in sequences], np.float64).reshape(NUM_GROUPS, NUM_SAMPLES)
    assert metrics["loss"] == pytest.approx(-by_group.mean(), rel=1e-6)
    assert metrics["clip_share/low"] == metrics["clip_share/high"] == 0
    policy = make_policy()
    difference = np.concatenate([s.rollout_logprobs - naive_logprobs(policy, s) for s in sequences])
    assert metrics["logprob_difference/mean"] == pytest.approx(np.abs(difference).mean(), rel=1e-5)
    kl = np.exp(-difference) - 1 + difference
    assert metrics["logprob_difference/kl"] == pytest.approx(kl.mean(), rel=1e-4)


def test_compute_logprobs_equals_one_sequence_at_a_time(accelerator: Accelerator) -> None:
    policy = make_policy()
    sequences = make_sequences(policy)
    found = compute_logprobs(policy, sequences, accelerator, micro_batch_tokens=20, temperature=TEMPERATURE)
    assert len(found) == len(sequences)
    for array, sequence in zip(found, sequences, strict=True):
        assert array.dtype == np.float32
        np.testing.assert_allclose(array, naive_logprobs(policy, sequence), rtol=1e-6)


def test_autocast_reaches_the_model_and_the_head() -> None:
    with fresh_accelerator(mixed_precision="bf16") as accelerator:
        policy = make_policy(dtype=torch.float32)
        sequences = make_sequences(policy)
        found = compute_logprobs(policy, sequences, accelerator, micro_batch_tokens=20, temperature=TEMPERATURE)
        with torch.autocast("cpu", torch.bfloat16):
            expected = [naive_logprobs(policy, sequence) for sequence in sequences]
        for array, logprobs, sequence in zip(found, expected, sequences, strict=True):
            np.testing.assert_allclose(array, logprobs, atol=1e-5)
            assert np.abs(array - sequence.rollout_logprobs).max() > 1e-4, "computed in float32"
