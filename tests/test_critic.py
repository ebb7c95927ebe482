"""The critic: its model, and its values, gradients and metrics against the same numbers computed the slow way."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from critic_cases import make_critic, make_critic_recipe, make_value_model, make_value_sequences, padded_values
from padded_update import descend, naive_batches
from safetensors.torch import save_file
from torch import Tensor
from update_cases import make_policy

from srtrl.features.critic import (
    HEAD_FILE,
    ValueModel,
    load_value_model,
    save_value_model,
    value_metrics,
    values_column,
)
from srtrl.model.attention import PackedPlan
from srtrl.model.weights import load_model, save_model
from srtrl.trainer.passes import NonFiniteError, UpdateContext, fill
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


@pytest.mark.parametrize(
    ("value_loss", "micro_batch_tokens"), [("clipped_value", 20), ("clipped_value", 1000), ("squared_error", 25)]
)
def test_values_and_gradients_equal_those_of_a_padded_batch(value_loss: str, micro_batch_tokens: int) -> None:
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
    context = UpdateContext(recipe=recipe, step=3)
    filled = fill(values_column(model), sequences, context)
    found = [sequence.values for sequence in filled if sequence.values is not None]
    assert [len(values) for values in found] == [len(sequence.advantages) for sequence in sequences]
    assert all(values.dtype == np.float32 for values in found)
    np.testing.assert_allclose(np.concatenate(found), padded_values(model, sequences).detach().numpy(), rtol=1e-6)
    metrics = critic.learn(sequences, context)
    assert len(optimizer.gradients) == 4
    assert critic.num_rows < 2 * sum(len(sequence.token_ids) for sequence in sequences), "some tokens are shared"

    losses, norms, shares, counts = [], [], [], []
    batches = naive_batches(sequences, recipe.critic_updates, recipe.seed, 3)
    for gradients, batch in zip(optimizer.gradients, batches, strict=True):
        value_clip = recipe.critic.value_clip if value_loss == "clipped_value" else None
        loss, share = naive_loss(naive, batch, value_clip)
        expected = descend(naive, loss, recipe.critic.learning_rate)
        for (name, _), mine, other in zip(naive.named_parameters(), gradients, expected, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12, msg=name)
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
        metrics = critic.learn(make_value_sequences(), UpdateContext(recipe=recipe, step=step))
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


def test_returns_that_differ_by_rounding_have_no_explained_variance() -> None:
    sequences = make_value_sequences()
    equal = [replace(sequence, returns=np.full_like(sequence.advantages, 0.25)) for sequence in sequences]
    assert value_metrics(equal).keys() == {"value_mean", "return_mean"}
    for reward in (0.0, 0.3):  # with gamma = lambda = 1 all returns are the reward, as (reward - value) + value
        cancelled = []
        for sequence in sequences:
            assert sequence.values is not None
            values = sequence.values * np.float32(7)
            cancelled.append(replace(sequence, values=values, returns=(np.float32(reward) - values) + values))
        returns = np.concatenate([sequence.returns for sequence in cancelled if sequence.returns is not None])
        assert (returns.min() < returns.max()) == (reward > 0), "the case must have rounding errors"
        assert value_metrics(cancelled).keys() == {"value_mean", "return_mean"}
    noise = np.random.default_rng(0)  # all rewards 0: GAE's sums cancel the values up to a rounding error of float64
    failed = [replace(one, returns=(1e-16 * noise.normal(size=len(one.advantages))).astype("f4")) for one in cancelled]
    assert value_metrics(failed).keys() == {"value_mean", "return_mean"}
    small = [replace(one, returns=np.linspace(0, 1e-2, len(one.advantages), dtype=np.float32)) for one in cancelled]
    assert value_metrics(small)["explained_variance"] < -1e4, "values that are far too large are no rounding errors"


# --- Numbers and functions that are wrong -----------------------------------------------------------------------------


def test_a_value_that_is_no_number_stops_the_step() -> None:
    model, sequences = make_value_model(), make_value_sequences()
    token = int(sequences[2].token_ids[sequences[2].num_prompt_tokens])  # the first that is read within a response
    with torch.no_grad():
        model.body.embedding[token] = float("nan")
    with pytest.raises(NonFiniteError, match="step 7: values has a number that is not finite"):
        fill(values_column(model), sequences, UpdateContext(recipe=make_critic_recipe(), step=7))


def test_a_loss_that_is_no_number_changes_no_weight() -> None:
    model, sequences = make_value_model(), make_value_sequences()
    assert sequences[0].returns is not None
    sequences[0].returns[0] = np.inf
    before = [parameter.detach().clone() for parameter in model.parameters()]
    recipe = make_critic_recipe()
    critic, _ = make_critic(model, recipe)
    with pytest.raises(NonFiniteError, match="critic, step 2, epoch 1, mini-batch"):
        critic.learn(sequences, UpdateContext(recipe=recipe, step=2))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))


ValueLossResult = tuple[Tensor, dict[str, Tensor]]


def absolute_error(
    values: Tensor, old_values: Tensor, returns: Tensor, *_: Tensor, **options: float
) -> ValueLossResult:
    """Right."""
    error = (values - returns).abs()
    return error, {"far_share": (error.detach() > 1).double()}


def test_a_value_loss_of_ones_own() -> None:
    recipe = make_critic_recipe({"value_loss": "test_critic:absolute_error"})
    critic, _ = make_critic(make_value_model(), recipe)
    metrics = critic.learn(make_value_sequences(), UpdateContext(recipe=recipe, step=1))
    assert 0 < metrics["critic/loss/far_share"] < 1
    with pytest.raises(ValueError, match=r"no_such_loss.*losses.py; known: clipped_value"):
        make_critic(make_value_model(), make_critic_recipe({"value_loss": "no_such_loss"}))


# --- The model -------------------------------------------------------------------------------------------------------

TOKEN_IDS = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])
LENGTHS = (5, 3)


def values_of(model: ValueModel) -> torch.Tensor:
    values: torch.Tensor = model(TOKEN_IDS, PackedPlan(LENGTHS, "cpu"))
    return values


def test_a_fresh_critic_says_zero_and_draws_no_random_number() -> None:
    body = make_policy()
    before = torch.get_rng_state()
    model = ValueModel(body)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(values_of(model), torch.zeros(len(TOKEN_IDS), dtype=torch.float64))


def test_values_are_float32_for_a_bfloat16_body() -> None:
    model = make_value_model(dtype=torch.bfloat16)
    hidden, values = model.body(TOKEN_IDS, PackedPlan(LENGTHS, "cpu")), values_of(model)
    assert model.value_head.dtype == values.dtype == torch.float32
    expected = (hidden.double() @ model.value_head[0].double()).float()
    torch.testing.assert_close(values, expected, rtol=1e-6, atol=1e-6)  # bfloat16 would be off by 1e-2


@pytest.mark.parametrize(("dtype", "tied"), [(torch.float32, True), (torch.bfloat16, False)], ids=str)
def test_saved_and_loaded_has_the_same_bits(dtype: torch.dtype, tied: bool, tmp_path: Path) -> None:
    model = ValueModel(make_policy(dtype=dtype, tied=tied))
    with torch.no_grad():
        model.value_head.copy_(torch.linspace(-1, 1 / 3, model.value_head.numel())[None])
    save_value_model(model, tmp_path / "critic")
    loaded = load_value_model(tmp_path / "critic", dtype=dtype, device="cpu")
    assert [name for name, _ in loaded.named_parameters()] == [name for name, _ in model.named_parameters()]
    for (name, mine), other in zip(loaded.named_parameters(), model.parameters(), strict=True):
        assert mine.dtype == other.dtype
        assert torch.equal(mine, other), name
    assert torch.equal(values_of(loaded), values_of(model))
    body = load_model(tmp_path / "critic", dtype=dtype, device="cpu")  # is a model folder
    assert torch.equal(body.embedding, model.body.embedding)


def test_a_policy_becomes_a_critic_with_its_body_and_without_its_output_head(tmp_path: Path) -> None:
    policy = make_policy(dtype=torch.float32)
    save_model(policy, tmp_path / "policy")
    model = load_value_model(tmp_path / "policy", dtype=torch.float32, device="cpu")
    assert not model.value_head.any()
    assert model.body.head is None
    assert torch.equal(model.body.embedding, policy.embedding)
    plan = PackedPlan(LENGTHS, "cpu")
    assert torch.equal(model.body(TOKEN_IDS, plan), policy(TOKEN_IDS, plan))


def test_a_wrong_value_head_is_refused(tmp_path: Path) -> None:
    save_value_model(make_value_model(dtype=torch.float32), tmp_path)
    for name, width in (("value_head.weight", 9), ("score.weight", 8)):
        save_file({name: torch.zeros(1, width)}, tmp_path / HEAD_FILE)
        with pytest.raises(ValueError, match=rf"{name}': \[1, {width}\].* expected {{'value_head.weight': \[1, 8\]}}"):
            load_value_model(tmp_path, dtype=torch.float32, device="cpu")
    (tmp_path / HEAD_FILE).write_bytes(b"half a file")
    with pytest.raises(ValueError, match="no readable safetensors file"):
        load_value_model(tmp_path, dtype=torch.float32, device="cpu")
