"""What stops an update, and that it stops before the weights change."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch import Tensor
from update_cases import RecordingSGD, make_policy, make_recipe, make_sequences, naive_logprobs, update

from srtrl.trainer.update import LogprobDifferenceError, NonFiniteError, logprob_difference
from srtrl.types import TrainSequence

LossResult = tuple[Tensor, dict[str, Tensor]]


def shift_logprob(sequences: list[TrainSequence], index: int, token: int, by: float) -> list[TrainSequence]:
    logprobs = sequences[index].rollout_logprobs.copy()
    logprobs[token] += by
    return [*sequences[:index], replace(sequences[index], rollout_logprobs=logprobs), *sequences[index + 1 :]]


@pytest.mark.parametrize("old_logprobs", ["rollout", "recompute"])
def test_a_large_logprob_difference_stops_before_any_change(old_logprobs: str, accelerator: Accelerator) -> None:
    policy = make_policy()
    sequences = shift_logprob(make_sequences(policy), 4, 1, by=-0.5)
    before = [parameter.detach().clone() for parameter in policy.parameters()]
    limits = {"train__max_logprob_difference": 0.4, "train__micro_batch_tokens": 16}
    recipe = make_recipe(algorithm__old_logprobs=old_logprobs, **limits)
    token = sequences[4].token_ids[sequences[4].num_prompt_tokens + 1]
    message = (
        rf"step 7.*: sequence 4 .*, response token 1 \(id {token}\).*; the policy's weights were not changed by this "
        r"step.* differ by 0\.5.*max_logprob_difference \(0\.4\)"
    )
    with pytest.raises(LogprobDifferenceError, match=message):
        update(policy, RecordingSGD(policy), accelerator, sequences, recipe, step=7)
    assert all(map(torch.equal, before, policy.parameters()))
    within = recipe.model_copy(update={"train": recipe.train.model_copy(update={"max_logprob_difference": 0.6})})
    metrics = update(policy, RecordingSGD(policy), accelerator, sequences, within, step=7)
    assert metrics["logprob_difference/max"] == pytest.approx(0.5, abs=1e-5)


def test_mini_batches_after_the_first_are_not_compared(accelerator: Accelerator) -> None:
    """Their weights have moved; a difference there says nothing of the decoder."""
    policy = make_policy()
    sequences = make_sequences(policy)
    recipe = make_recipe(train__mini_batch_prompts=1, train__max_logprob_difference=1e-3, train__learning_rate=1e-2)
    metrics = update(policy, RecordingSGD(policy), accelerator, sequences, recipe)
    assert metrics["logprob_difference/max"] < 1e-5
    moved = [np.abs(naive_logprobs(policy, s) - s.rollout_logprobs).max() for s in sequences]
    assert max(moved) > 1e-2


def test_logprob_difference_of_a_nan_is_non_finite() -> None:
    sequences = make_sequences(make_policy())
    trainer = [sequence.rollout_logprobs.copy() for sequence in sequences]
    trainer[2][0] = np.nan
    with pytest.raises(NonFiniteError, match=r"step 3: sequence 2 .*, response token 0 .* nan by the trainer"):
        logprob_difference(sequences, np.concatenate(trainer), max_difference=1.0, where="step 3")


# --- Functions of a user's own ----------------------------------------------------------------------------------------


def nan_loss(logprobs: Tensor, *_: Tensor, **options: float) -> LossResult:
    return logprobs * math.nan, {}


def infinite_slope_loss(logprobs: Tensor, *_: Tensor, **options: float) -> LossResult:
    return (logprobs - logprobs.detach()).sqrt(), {}


def mean_loss(logprobs: Tensor, *_: Tensor, **options: float) -> LossResult:
    return -logprobs.mean(), {}


def loss_with_a_scalar_metric(logprobs: Tensor, *_: Tensor, **options: float) -> LossResult:
    return -logprobs, {"mine": logprobs.detach().mean()}


def loss_with_a_rare_metric(
    logprobs: Tensor, old: Tensor, advantages: Tensor, *_: Tensor, **options: float
) -> LossResult:
    """A metric for micro-batches of positive advantages alone."""
    return -logprobs, {"rare": logprobs.detach()} if bool((advantages > 0).any()) else {}


def loss_with_an_entropy(logprobs: Tensor, *_: Tensor, **options: float) -> LossResult:
    return -logprobs, {"clip_share/mine": logprobs.detach(), "entropy": logprobs.detach()}


def mean_kl(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    return (logprobs - ref_logprobs).mean()


def no_reduction(token_loss: Tensor, sequence_index: Tensor, **_: Any) -> Tensor:
    return token_loss


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "*nan_loss"}, "step 4, epoch 1, mini-batch 1: the loss is nan"),
        ({"loss": "*infinite_slope_loss"}, "step 4, epoch 1, mini-batch 1: the gradient norm is (nan|inf)"),
        (
            {"loss": "*mean_loss"},
            r"algorithm\.loss must return one number per token, \(\d+,\); its loss has shape \(\)",
        ),
        ({"loss": "*loss_with_a_scalar_metric"}, r"algorithm\.loss .* \(\d+,\); mine has shape \(\)"),
        ({"loss": "*loss_with_a_rare_metric"}, r"algorithm\.loss must return the same metrics .* `rare` for some only"),
        ({"loss": "*loss_with_an_entropy"}, "algorithm.loss returns a metric named `entropy`, which is srtrl's own"),
        (
            {"kl": {"coefficient": 0.1, "estimator": "*mean_kl"}},
            r"algorithm\.kl\.estimator must .* \(\d+,\); its estimate has shape \(\)",
        ),
        ({"reduction": "*no_reduction"}, r"algorithm\.reduction must return one number, found shape \(\d+,\)"),
        ({"loss": "ppo_clipp"}, "`ppo_clipp` is not in srtrl/algorithms/losses.py, did you mean `ppo_clip`"),
        ({"reduction": "mean"}, "`mean` is not in srtrl/algorithms/reductions.py"),
    ],
    ids=str,
)
def test_a_wrong_function_stops_before_any_change(
    options: dict[str, Any], message: str, accelerator: Accelerator
) -> None:
    """A star is for this module."""
    named: dict[str, Any] = {
        key: value.replace("*", f"{__name__}:") for key, value in options.items() if isinstance(value, str)
    }
    if "kl" in options:
        named["kl"] = {**options["kl"], "estimator": f"{__name__}:mean_kl"}
    policy = make_policy()
    before = [parameter.detach().clone() for parameter in policy.parameters()]
    recipe = make_recipe(algorithm=named, train__micro_batch_tokens=16)
    expected = NonFiniteError if message.startswith("step") else ValueError
    with pytest.raises(expected, match=message):
        update(policy, RecordingSGD(policy), accelerator, make_sequences(policy), recipe, step=4)
    assert all(map(torch.equal, before, policy.parameters()))
