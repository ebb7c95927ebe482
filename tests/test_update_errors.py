"""What stops an update, and that it stops before the weights change."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from accelerate import Accelerator
from torch import Tensor
from update_cases import (
    RecordingSGD,
    fresh_accelerator,
    make_policy,
    make_recipe,
    make_sequences,
    naive_logprobs,
    update,
)

from srtrl.model.transformer import Transformer
from srtrl.trainer.update import LogprobDifferenceError, NonFiniteError, logprob_difference
from srtrl.types import TrainSequence


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    with fresh_accelerator() as accelerator:
        yield accelerator


def shift_logprob(sequences: list[TrainSequence], index: int, token: int, by: float) -> list[TrainSequence]:
    logprobs = sequences[index].rollout_logprobs.copy()
    logprobs[token] += by
    return [*sequences[:index], replace(sequences[index], rollout_logprobs=logprobs), *sequences[index + 1 :]]


def weights_of(policy: Transformer) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in policy.parameters()]


@pytest.mark.parametrize("old_logprobs", ["rollout", "recompute"])
def test_a_large_logprob_difference_stops_before_any_change(old_logprobs: str, accelerator: Accelerator) -> None:
    policy = make_policy()
    sequences = shift_logprob(make_sequences(policy), 4, 1, by=-0.5)
    before = weights_of(policy)
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
    options: dict[str, Any] = {"train__mini_batch_prompts": 1, "train__max_logprob_difference": 1e-3}
    policy = make_policy()
    sequences = make_sequences(policy)
    recipe = make_recipe(**options, train__learning_rate=1e-2)
    metrics = update(policy, RecordingSGD(policy), accelerator, sequences, recipe)
    assert metrics["logprob_difference/max"] < 1e-5
    moved = [np.abs(naive_logprobs(policy, s) - s.rollout_logprobs).max() for s in sequences]
    assert max(moved) > 1e-2


def test_logprob_difference_of_a_nan_is_non_finite() -> None:
    sequences = make_sequences(make_policy())
    trainer: list[npt.NDArray[np.float32]] = [sequence.rollout_logprobs.copy() for sequence in sequences]
    trainer[2][0] = np.nan
    with pytest.raises(NonFiniteError, match=r"step 3: sequence 2 .*, response token 0 .* nan by the trainer"):
        logprob_difference(sequences, trainer, max_difference=1.0, where="step 3")


def nan_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, sequence_index: Tensor, **_: float
) -> tuple[Tensor, dict[str, Tensor]]:
    return logprobs * math.nan, {}


def infinite_slope_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, sequence_index: Tensor, **_: float
) -> tuple[Tensor, dict[str, Tensor]]:
    return (logprobs - logprobs.detach()).sqrt(), {}


def nan_after_a_change_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, sequence_index: Tensor, **_: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Finite while the weights are those of the rollouts, as in a first mini-batch."""
    moved = (logprobs - old_logprobs).abs().max() > 1e-4
    return logprobs * (math.nan if moved else 1.0), {}


def mean_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, sequence_index: Tensor, **_: float
) -> tuple[Tensor, dict[str, Tensor]]:
    return -logprobs.mean(), {}


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ("nan_loss", "step 4, epoch 1, mini-batch 1: the loss is nan"),
        ("infinite_slope_loss", "step 4, epoch 1, mini-batch 1: the gradient norm is (nan|inf)"),
    ],
)
def test_a_non_finite_loss_or_gradient_stops_before_any_change(
    loss: str, message: str, accelerator: Accelerator
) -> None:
    policy = make_policy()
    sequences = make_sequences(policy)
    before = weights_of(policy)
    recipe = make_recipe(algorithm__loss=f"{__name__}:{loss}")
    with pytest.raises(NonFiniteError, match=message):
        update(policy, RecordingSGD(policy), accelerator, sequences, recipe, step=4)
    assert all(map(torch.equal, before, policy.parameters()))


def test_a_later_mini_batch_that_is_not_finite_is_named(accelerator: Accelerator) -> None:
    policy = make_policy()
    optimizer = RecordingSGD(policy)
    recipe = make_recipe(
        algorithm__loss=f"{__name__}:nan_after_a_change_loss", train__mini_batch_prompts=1, train__learning_rate=0.1
    )
    with pytest.raises(NonFiniteError, match="step 4, epoch 1, mini-batch 2: the loss is nan"):
        update(policy, optimizer, accelerator, make_sequences(policy), recipe, step=4)
    assert len(optimizer.gradients) == 1


def test_a_loss_of_the_wrong_shape_is_a_users_error(accelerator: Accelerator) -> None:
    policy = make_policy()
    recipe = make_recipe(algorithm__loss=f"{__name__}:mean_loss")
    with pytest.raises(ValueError, match=r"one number a token, \(\d+,\); its loss has shape \(\)"):
        update(policy, RecordingSGD(policy), accelerator, make_sequences(policy), recipe)


def loss_with_an_entropy(*args: torch.Tensor, **options: float) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return args[0], {"entropy": args[0].detach()}


def test_a_loss_may_not_log_under_a_name_of_the_trainers(accelerator: Accelerator) -> None:
    policy = make_policy()
    recipe = make_recipe(algorithm__loss=f"{__name__}:loss_with_an_entropy")
    with pytest.raises(ValueError, match="a metric named `entropy`, which is srtrl's own"):
        update(policy, RecordingSGD(policy), accelerator, make_sequences(policy), recipe)


LOGGED = [
    *("reward/mean", "reward/kl_penalty", "accuracy", "length/mean", "groups/kept", "samples/overlong_dropped"),
    *("data/epoch", "tokens/response", "grading/correct", "kl/ref", "kl/coefficient", "importance/weight"),
    *("logprob_difference/max", "critic/loss", "eval/accuracy", "time/update", "engine/tokens", "learning_rate"),
]


@pytest.mark.parametrize("name", LOGGED)
def test_a_loss_may_not_replace_what_another_part_logs(
    name: str, accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def greedy(logprobs: Tensor, *_: Tensor, **options: float) -> tuple[Tensor, dict[str, Tensor]]:
        return -logprobs, {"clip_share/mine": logprobs.detach(), name: logprobs.detach()}

    monkeypatch.setitem(globals(), "greedy", greedy)
    policy = make_policy()
    before = weights_of(policy)
    with pytest.raises(ValueError, match=f"algorithm.loss returns a metric named `{name}`, which is srtrl's own"):
        update(
            policy,
            RecordingSGD(policy),
            accelerator,
            make_sequences(policy),
            make_recipe(algorithm__loss=f"{__name__}:greedy"),
        )
    assert all(map(torch.equal, before, policy.parameters()))


def loss_with_a_rare_metric(
    logprobs: Tensor, old: Tensor, advantages: Tensor, *_: Tensor, **options: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Wrong: a metric for micro-batches of positive advantages alone."""
    metrics = {"rare": logprobs.detach()} if bool((advantages > 0).any()) else {}
    return -logprobs, metrics


def test_a_metric_of_some_micro_batches_only_is_a_users_error(accelerator: Accelerator) -> None:
    policy = make_policy()
    recipe = make_recipe(algorithm__loss=f"{__name__}:loss_with_a_rare_metric", train__micro_batch_tokens=16)
    with pytest.raises(ValueError, match=r"algorithm\.loss must return the same metrics .* `rare` for some only"):
        update(policy, RecordingSGD(policy), accelerator, make_sequences(policy), recipe)


def loss_with_a_wrong_metric(logprobs: Tensor, *_: Tensor, **options: float) -> tuple[Tensor, dict[str, Tensor]]:
    return -logprobs, {"mine": logprobs.detach().mean()}


def loss_with_a_weight(logprobs: Tensor, *_: Tensor, **options: float) -> tuple[Tensor, dict[str, Tensor]]:
    return -logprobs, {"importance/weight": logprobs.detach()}


def loss_with_an_option(
    logprobs: Tensor, *_: Tensor, clip_low: float, clip_high: float, factor: float
) -> tuple[Tensor, dict[str, Tensor]]:
    return -factor * logprobs, {}


def mean_kl(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    return (logprobs - ref_logprobs).mean()


def no_reduction(token_loss: Tensor, sequence_index: Tensor, **_: Any) -> Tensor:
    return token_loss


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": f"{__name__}:loss_with_a_wrong_metric"}, r"algorithm\.loss .* \(\d+,\); mine has shape \(\)"),
        ({"loss": f"{__name__}:loss_with_a_weight"}, "a metric named `importance/weight`, which is srtrl's own"),
        (
            {"kl": {"coefficient": 0.1, "estimator": f"{__name__}:mean_kl"}},
            r"algorithm\.kl\.estimator must .* \(\d+,\); its estimate has shape \(\)",
        ),
        (
            {"reduction": f"{__name__}:no_reduction"},
            r"algorithm\.reduction must return one number, found shape \(\d+,\)",
        ),
        ({"loss": "ppo_clipp"}, "`ppo_clipp` is not in srtrl/algorithms/losses.py, did you mean `ppo_clip`"),
        ({"reduction": "mean"}, "`mean` is not in srtrl/algorithms/reductions.py"),
    ],
)
def test_a_wrong_function_is_a_users_error(options: dict[str, Any], message: str, accelerator: Accelerator) -> None:
    policy = make_policy()
    before = weights_of(policy)
    with pytest.raises(ValueError, match=message):
        update(policy, RecordingSGD(policy), accelerator, make_sequences(policy), make_recipe(algorithm=options))
    assert all(map(torch.equal, before, policy.parameters()))


def test_a_loss_gets_its_options(accelerator: Accelerator) -> None:
    gradients = []
    for factor in (1.0, 4.0):
        policy = make_policy()
        optimizer = RecordingSGD(policy)
        recipe = make_recipe(
            algorithm__loss=f"{__name__}:loss_with_an_option", algorithm__loss_options={"factor": factor}
        )
        update(policy, optimizer, accelerator, make_sequences(policy), recipe)
        gradients.append(optimizer.gradients[0])
    torch.testing.assert_close(gradients[1], [4 * slope for slope in gradients[0]], rtol=1e-12, atol=0)
