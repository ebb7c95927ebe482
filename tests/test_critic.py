"""The critic in a training step: values, gradients and metrics against the same numbers computed the slow way."""

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from critic_cases import (
    make_critic,
    make_critic_recipe,
    make_value_model,
    make_value_sequences,
    padded_values,
)
from padded_update import descend, naive_batches
from torch import Tensor

from srtrl.model.value_model import ValueModel
from srtrl.trainer.critic import update_critic, value_metrics, with_values
from srtrl.trainer.objective import NonFiniteError
from srtrl.trainer.passes import UpdateContext
from srtrl.types import TrainSequence

VALUE_CLIPS: dict[str, dict[str, float]] = {"clipped_value": {"value_clip": 0.1}, "squared_error": {"value_clip": 0.2}}
"""0.2 is the default: the recipe refuses another where there is no clip."""


def naive_loss(model: ValueModel, sequences: Sequence[TrainSequence], value_clip: float | None) -> tuple[Tensor, float]:
    """The mini-batch's loss on a padded batch, and the share of tokens whose gradient the clip takes away.

    One half of max((v - R)^2, (clip(v, v_old - c, v_old + c) - R)^2), in the mean over all tokens.
    """
    values = padded_values(model, sequences)  # [R]
    old = torch.cat([torch.from_numpy(one.values).double() for one in sequences if one.values is not None])
    returns = torch.cat([torch.from_numpy(one.returns).double() for one in sequences if one.returns is not None])
    loss = (values - returns) ** 2
    if value_clip is None:
        return 0.5 * loss.mean(), 0.0
    moved = torch.minimum(torch.maximum(values, old - value_clip), old + value_clip)
    clipped_away = (moved - returns).abs() > (values - returns).abs()
    return 0.5 * torch.maximum(loss, (moved - returns) ** 2).mean(), float(clipped_away.double().mean())


@pytest.mark.parametrize("micro_batch_tokens", [17, 1000])
def test_values_equal_those_of_a_padded_batch(micro_batch_tokens: int) -> None:
    model, sequences = make_value_model(), make_value_sequences()
    recipe = make_critic_recipe(train__micro_batch_tokens=micro_batch_tokens)
    filled = with_values(model, sequences, UpdateContext(recipe=recipe, step=1))
    found = [sequence.values for sequence in filled if sequence.values is not None]
    assert [len(values) for values in found] == [len(sequence.advantages) for sequence in sequences]
    assert all(values.dtype == np.float32 for values in found)
    expected = padded_values(model, sequences).detach().numpy()
    np.testing.assert_allclose(np.concatenate(found), expected, rtol=1e-6)


@pytest.mark.parametrize("micro_batch_tokens", [16, 25, 1000])
@pytest.mark.parametrize("value_loss", ["clipped_value", "squared_error"])
def test_gradients_equal_autograd_on_a_padded_batch(value_loss: str, micro_batch_tokens: int) -> None:
    """Two mini-batches and two epochs; the clip is around the values before the update, not the latest ones."""
    recipe = make_critic_recipe(
        {"value_loss": value_loss, "mini_batch_prompts": 2, **VALUE_CLIPS[value_loss]},
        train__num_epochs=2,
        rollout__num_prompts=4,  # a filter dropped the fourth
        train__micro_batch_tokens=micro_batch_tokens,
    )
    assert recipe.critic is not None
    model, sequences = make_value_model(), make_value_sequences()
    naive = copy.deepcopy(model)
    critic, optimizer = make_critic(model, recipe)
    metrics = update_critic(critic, sequences, UpdateContext(recipe=recipe, step=3))
    assert len(optimizer.gradients) == 4

    losses, norms, shares, counts = [], [], [], []
    batches = naive_batches(sequences, recipe.critic_updates, recipe.seed, 3)
    for gradients, batch in zip(optimizer.gradients, batches, strict=True):
        value_clip = recipe.critic.value_clip if value_loss == "clipped_value" else None
        loss, share = naive_loss(naive, batch, value_clip)
        expected = descend(naive, loss, recipe.critic.learning_rate)
        for (name, _), mine, other in zip(naive.named_parameters(), gradients, expected, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-12, msg=name)
        losses.append(loss.item())
        norms.append(float(torch.cat([gradient.flatten() for gradient in expected]).norm()))
        shares.append(share)
        counts.append(sum(len(sequence.advantages) for sequence in batch))
    assert metrics["critic/loss"] == pytest.approx(np.mean(losses), rel=1e-7)  # the bounds of the clip are float32
    assert metrics["critic/grad_norm"] == pytest.approx(np.mean(norms), rel=1e-10)
    assert {f"critic/{name}": value for name, value in value_metrics(sequences).items()}.items() <= metrics.items()
    if value_loss == "clipped_value":
        assert shares[0] != shares[2]  # the clip does something, and not the same in both epochs
        assert metrics["critic/clip_share/value"] == pytest.approx(np.average(shares, weights=counts), rel=1e-10)


def test_the_rate_is_the_critics_own_and_the_norm_that_of_the_policy() -> None:
    """Three optimizer steps a training step for the critic, one for the policy; the rate has no warm-up."""
    recipe = make_critic_recipe(
        {"learning_rate": 0.4, "mini_batch_prompts": 1, "warmup_steps": 1},
        train__num_steps=5,
        train__schedule="linear",
        train__warmup_steps=3,
        train__max_grad_norm=0.01,
    )
    model = make_value_model()
    critic, optimizer = make_critic(model, recipe)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    logged = []
    for step in range(1, 6):
        metrics = update_critic(critic, make_value_sequences(), UpdateContext(recipe=recipe, step=step))
        logged.append(metrics["critic/learning_rate"])
        assert metrics["critic/grad_norm"] > 0.1
    rates = optimizer.rates
    assert logged == rates[2::3]
    moved = torch.cat([(a.detach() - b).flatten() for a, b in zip(model.parameters(), before, strict=True)])
    assert 0 < float(moved.norm()) <= 1.001 * 0.01 * sum(rates), "each step is clipped to the norm"
    assert all(parameter.grad is None for parameter in model.parameters())
    assert rates == pytest.approx([0.4 * (1 - done / 15) for done in range(15)])


def test_explained_variance_equals_its_definition() -> None:
    sequences = make_value_sequences()
    values = np.concatenate([sequence.values for sequence in sequences if sequence.values is not None])
    returns = np.concatenate([sequence.returns for sequence in sequences if sequence.returns is not None])
    metrics = value_metrics(sequences)
    assert metrics["value_mean"] == pytest.approx(np.mean(values), rel=1e-5)
    assert metrics["return_mean"] == pytest.approx(np.mean(returns), rel=1e-5)
    residual = np.mean((returns - values - np.mean(returns - values)) ** 2)
    spread = np.mean((returns - np.mean(returns)) ** 2)
    assert metrics["explained_variance"] == pytest.approx(1 - residual / spread, rel=1e-4)

    perfect = [replace(sequence, values=sequence.returns) for sequence in sequences]
    assert value_metrics(perfect)["explained_variance"] == 1
    equal = [replace(sequence, returns=np.full_like(sequence.advantages, 0.25)) for sequence in sequences]
    assert value_metrics(equal).keys() == {"value_mean", "return_mean"}


@pytest.mark.parametrize("reward", [0.0, 0.3])
def test_returns_that_differ_by_rounding_have_no_explained_variance(reward: float) -> None:
    """With gamma = lambda = 1 all returns are the reward, computed as (reward - value) + value."""
    sequences = []
    for sequence in make_value_sequences():
        assert sequence.values is not None
        values = sequence.values * np.float32(7)
        sequences.append(replace(sequence, values=values, returns=(np.float32(reward) - values) + values))
    returns = np.concatenate([sequence.returns for sequence in sequences if sequence.returns is not None])
    assert (returns.min() < returns.max()) == (reward > 0), "the case must have rounding errors"
    assert value_metrics(sequences).keys() == {"value_mean", "return_mean"}
    noise = np.random.default_rng(0)  # all rewards 0: GAE's sums cancel the values up to a rounding error of float64
    failed = [replace(one, returns=(1e-16 * noise.normal(size=len(one.advantages))).astype("f4")) for one in sequences]
    assert value_metrics(failed).keys() == {"value_mean", "return_mean"}
    small = [replace(one, returns=np.linspace(0, 1e-2, len(one.advantages), dtype=np.float32)) for one in sequences]
    assert value_metrics(small)["explained_variance"] < -1e4, "values that are far too large are no rounding errors"


# --- Numbers and functions that are wrong -----------------------------------------------------------------------------


def test_a_value_that_is_no_number_stops_the_step() -> None:
    model, sequences = make_value_model(), make_value_sequences()
    token = int(sequences[2].token_ids[sequences[2].num_prompt_tokens])  # the first that is read within a response
    with torch.no_grad():
        model.body.embedding[token] = float("nan")
    with pytest.raises(NonFiniteError, match="step 7: a value by the critic is not a finite number"):
        with_values(model, sequences, UpdateContext(recipe=make_critic_recipe(), step=7))


def test_a_loss_that_is_no_number_changes_no_weight() -> None:
    model, sequences = make_value_model(), make_value_sequences()
    assert sequences[0].returns is not None
    sequences[0].returns[0] = np.inf
    before = [parameter.detach().clone() for parameter in model.parameters()]
    recipe = make_critic_recipe()
    critic, _ = make_critic(model, recipe)
    with pytest.raises(NonFiniteError, match="critic, step 2, epoch 1, mini-batch"):
        update_critic(critic, sequences, UpdateContext(recipe=recipe, step=2))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))


ValueLossResult = tuple[Tensor, dict[str, Tensor]]


def absolute_error(
    values: Tensor, old_values: Tensor, returns: Tensor, *_: Tensor, **options: float
) -> ValueLossResult:
    """Right."""
    error = (values - returns).abs()
    return error, {"far_share": (error.detach() > 1).double()}


@pytest.mark.parametrize(
    ("value_loss", "message"),
    [
        ("test_critic:absolute_error", None),
        ("no_such_loss", r"no_such_loss.*losses.py; known: clipped_value"),
    ],
)
def test_a_value_loss_of_ones_own(value_loss: str, message: str | None) -> None:
    recipe = make_critic_recipe({"value_loss": value_loss})
    with pytest.raises(ValueError, match=message) if message else nullcontext():
        critic, _ = make_critic(make_value_model(), recipe)
        metrics = update_critic(critic, make_value_sequences(), UpdateContext(recipe=recipe, step=1))
        assert 0 < metrics["critic/loss/far_share"] < 1
