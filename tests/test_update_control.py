"""Importance weights and the adaptive KL coefficient: two training steps against the same in plain PyTorch."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny_run
import torch
from accelerate import Accelerator
from padded_update import importance_weights, k3, pad_all, reduce, token_losses
from torch import Tensor
from update_cases import (
    RecordingSGD,
    fresh_accelerator,
    make_policy,
    make_recipe,
    make_sequences,
    naive_logprobs,
)

from srtrl.metrics import read_metrics
from srtrl.model.transformer import Transformer
from srtrl.trainer.run_folder import RunProgress
from srtrl.trainer.trainer import run_training
from srtrl.trainer.update import next_kl_coefficient, update_policy
from srtrl.types import TrainSequence

CAP = 1.2
LEARNING_RATE = 1e-3
KL = {"coefficient": 0.05, "target": 0.01, "horizon": 40}


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    with fresh_accelerator() as accelerator:
        yield accelerator


def naive_step(
    policy: Transformer, sequences: list[TrainSequence], loss: str, level: str, coefficient: float
) -> dict[str, float]:
    """One training step of three mini-batches of one draw (two samples) each, on padded batches."""
    olds = [np.array(naive_logprobs(policy, sequence), np.float32) for sequence in sequences]
    sequences = [replace(sequence, old_logprobs=old) for sequence, old in zip(sequences, olds, strict=True)]
    kls: list[float] = []
    weights_seen: list[float] = []
    losses = []
    for start in (0, 2, 4):
        padded = pad_all(policy, sequences[start : start + 2])
        weights = importance_weights(padded, CAP, level).expand_as(padded.new)
        tokens = weights * token_losses(loss, padded, 0.2, 0.3) + coefficient * k3(padded)
        total = reduce("sequence_mean_token_mean", tokens, padded.mask, 10)
        gradient = torch.autograd.grad(total, list(policy.parameters()))
        with torch.no_grad():
            for parameter, slope in zip(policy.parameters(), gradient, strict=True):
                parameter.sub_(slope, alpha=LEARNING_RATE)
        kls += k3(padded)[padded.mask].tolist()
        weights_seen += weights[padded.mask].tolist()
        losses.append(total.item())
    return {
        "loss": float(np.mean(losses)),
        "kl/ref": float(np.mean(kls)),
        "importance/weight": float(np.mean(weights_seen)),
        "importance/capped_share": float(np.mean([weight >= CAP for weight in weights_seen])),
    }


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss", ["ppo_clip", "gspo"])
def test_two_steps_with_importance_weights_and_an_adaptive_coefficient(
    loss: str, level: str, accelerator: Accelerator
) -> None:
    recipe = make_recipe(
        algorithm__loss=loss,
        algorithm__old_logprobs="recompute",
        algorithm__importance_cap=CAP,
        algorithm__importance_level=level,
        algorithm__kl=KL,
        train__mini_batch_prompts=1,
        train__micro_batch_tokens=20,
        train__learning_rate=LEARNING_RATE,
    )
    ours, naive = make_policy(), make_policy()
    optimizer = RecordingSGD(ours)
    coefficient = expected_coefficient = 0.05
    for step in (1, 2):
        sequences = make_sequences(naive, noise=0.3, seed=step)
        metrics = update_policy(
            ours, optimizer, accelerator, sequences, recipe=recipe, step=step, kl_coefficient=coefficient
        )
        coefficient = next_kl_coefficient(coefficient, metrics, recipe, sampled_kl=None, num_samples=len(sequences))
        expected = naive_step(naive, sequences, loss, level, expected_coefficient)
        assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-6)  # weights are float32
        assert 0 < metrics["importance/capped_share"] < 1
        # Ziegler et al. (2019), section 2.2: 6 samples of a horizon of 40
        error = min(max(expected["kl/ref"] / 0.01 - 1, -0.2), 0.2)
        expected_coefficient *= 1 + error * 6 / 40
        assert coefficient == pytest.approx(expected_coefficient, rel=1e-9)
        assert coefficient > 0.05, "the reference is further away than the target"
        for found, wanted in zip(ours.parameters(), naive.parameters(), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-7, atol=1e-9)


def test_weights_do_not_weigh_the_kl(accelerator: Accelerator) -> None:
    """With advantages of zero only the KL is left, and the cap must not matter."""
    sequences = [
        replace(sequence, advantages=np.zeros_like(sequence.advantages))
        for sequence in make_sequences(make_policy(), noise=0.3)
    ]

    def gradient(importance_cap: float | None) -> list[Tensor]:
        recipe = make_recipe(
            algorithm__old_logprobs="recompute",
            algorithm__importance_cap=importance_cap,
            algorithm__kl={"coefficient": 0.05},
        )
        policy = make_policy()
        optimizer = RecordingSGD(policy)
        update_policy(policy, optimizer, accelerator, sequences, recipe=recipe, step=1, kl_coefficient=0.05)
        return optimizer.gradients[0]

    without = gradient(None)
    torch.testing.assert_close(gradient(0.1), without, rtol=0, atol=0)
    assert max(float(slope.abs().max()) for slope in without) > 0


def test_the_coefficient_given_is_the_one_used(accelerator: Accelerator) -> None:
    """The recipe's is only the first: gradients are linear in the coefficient."""

    def gradient(kl_coefficient: float) -> list[Tensor]:
        policy = make_policy()
        optimizer = RecordingSGD(policy)
        recipe = make_recipe(algorithm__kl={**KL, "coefficient": 77.0})
        sequences = make_sequences(policy, noise=0.3)
        update_policy(policy, optimizer, accelerator, sequences, recipe=recipe, step=1, kl_coefficient=kl_coefficient)
        return optimizer.gradients[0]

    small, middle, large = gradient(0.1), gradient(0.2), gradient(0.3)
    for low, mid, high in zip(small, middle, large, strict=True):
        torch.testing.assert_close(high - mid, mid - low, rtol=1e-9, atol=1e-12)
    assert any(not torch.equal(low, high) for low, high in zip(small, large, strict=True))


def test_kl_in_the_reward_is_measured_and_not_in_the_loss(accelerator: Accelerator) -> None:
    policy = make_policy()
    sequences = make_sequences(policy, noise=0.3)
    padded = pad_all(policy, sequences)
    gradients = []
    for kl in ({**KL, "placement": "reward"}, {}):
        optimizer = RecordingSGD(policy := make_policy())
        recipe = make_recipe(algorithm__kl=kl)
        metrics = update_policy(policy, optimizer, accelerator, sequences, recipe=recipe, step=1, kl_coefficient=0.05)
        gradients.append(optimizer.gradients[0])
        if kl:
            assert metrics["kl/ref"] == pytest.approx(k3(padded)[padded.mask].mean().item(), rel=1e-12)
        else:
            assert "kl/ref" not in metrics
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=0)


def test_a_fixed_coefficient_stays() -> None:
    recipe = make_recipe(algorithm__kl={"coefficient": 0.05})
    assert next_kl_coefficient(0.05, {"kl/ref": 9.0}, recipe, sampled_kl=None, num_samples=6) == 0.05
    assert next_kl_coefficient(0.0, {}, make_recipe(), sampled_kl=None, num_samples=6) == 0.0


@pytest.mark.parametrize(("placement", "error"), [("loss", 0.1), ("reward", -0.05)])
def test_the_coefficient_follows_the_kl_that_it_multiplies(placement: str, error: float) -> None:
    recipe = make_recipe(algorithm__kl={**KL, "placement": placement})
    found = next_kl_coefficient(0.05, {"kl/ref": 0.011}, recipe, sampled_kl=0.0095, num_samples=6)
    assert found == pytest.approx(0.05 * (1 + error * 6 / 40), rel=1e-12)


@pytest.mark.parametrize("placement", ["loss", "reward"])
def test_a_run_adapts_the_coefficient_and_a_resumed_one_goes_on_with_it(placement: str, tmp_path: Path) -> None:
    recipe = tiny_run.make_recipe(
        tiny_run.make_policy(tmp_path / "policy"),
        tmp_path / "runs",
        train__num_steps=3,
        train__checkpoint_every=1,
        eval={"before_and_after": False},
        algorithm__kl={"coefficient": 0.05, "target": 0.002, "horizon": 100, "placement": placement},
    )

    def rows(*, resume: bool) -> list[dict[str, float]]:
        run_training(recipe, resume=resume, progress=RunProgress("test", 3, plain_every=1000))
        return list(read_metrics(tmp_path / "runs" / "run" / "metrics.jsonl"))

    whole = rows(resume=False)
    coefficients = [row["kl/coefficient"] for row in whole]
    assert coefficients[0] == 0.05
    for row, coefficient in zip(whole, [*coefficients[1:], None], strict=True):
        if placement == "reward":  # no filters: the mean over samples of the sum, by the mean length
            kl = row["reward/kl_penalty"] / row["kl/coefficient"] / row["length/mean"]
            assert kl != row["kl/ref"]
        else:
            kl = row["kl/ref"]
        error = min(max(kl / 0.002 - 1, -0.2), 0.2)
        expected = row["kl/coefficient"] * (1 + error * 16 / 100)
        if coefficient is not None:
            assert coefficient == pytest.approx(expected, rel=1e-12) != 0.05
    checkpoints = tmp_path / "runs" / "run" / "checkpoints"
    state = json.loads((checkpoints / "step_000003" / "state.json").read_text())
    assert state["kl_coefficient"] == pytest.approx(expected, rel=1e-12)
    shutil.rmtree(checkpoints / "step_000003")
    resumed = rows(resume=True)
    for name in ("kl/coefficient", "kl/ref", "loss", "grad_norm"):
        assert resumed[-1][name] == whole[-1][name]
