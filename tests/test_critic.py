"""The critic: its model, and its values, gradients and metrics against the same numbers computed the slow way."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from critic_cases import make_critic_recipe, make_value_model, with_random_targets
from padded_update import naive_batches, padded_forward
from safetensors.torch import save_file
from torch import Tensor
from update_cases import NO_LIMIT, RecordingSGD, distance, make_policy, make_sequences

from srtrl.features.critic import Critic, ValueModel, load_value_model, save_value_model, value_metrics, values_column
from srtrl.model.attention import PackedPlan
from srtrl.model.weights import load_model, save_model
from srtrl.trainer.passes import NonFiniteError, UpdateContext, fill
from srtrl.types import TrainSequence


def make_value_sequences() -> list[TrainSequence]:
    """Six sequences of three draws with random values and returns; their lengths differ."""
    return with_random_targets(make_sequences(make_policy()))


def all_of(name: str, sequences: Sequence[TrainSequence]) -> Tensor:
    """The values or returns of all sequences, [R] float64."""
    return torch.from_numpy(np.concatenate([getattr(sequence, name) for sequence in sequences])).double()


def padded_values(model: ValueModel, sequences: Sequence[TrainSequence]) -> Tensor:
    """The value before each sampled token, [R], by a batch padded on the right."""
    _, hidden = padded_forward(model.body, sequences)
    values = hidden @ model.value_head[0]  # [B, longest]
    return torch.cat([row[sequence.targets - 1] for row, sequence in zip(values, sequences, strict=True)])


def naive_loss(model: ValueModel, sequences: Sequence[TrainSequence], value_clip: float) -> tuple[Tensor, Tensor]:
    """The mini-batch's loss on a padded batch, and the tokens whose gradient the clip takes away, [R].

    One half of max((v - R)^2, (clip(v, v_old - c, v_old + c) - R)^2), in the mean over all tokens.
    """
    values, old, returns = padded_values(model, sequences), all_of("values", sequences), all_of("returns", sequences)
    moved = torch.minimum(torch.maximum(values, old - value_clip), old + value_clip)
    errors, moved_errors = (values - returns) ** 2, (moved - returns) ** 2
    return 0.5 * torch.maximum(errors, moved_errors).mean(), moved_errors > errors


@pytest.mark.parametrize(
    ("value_loss", "micro_batch_tokens", "max_norm"),
    [("clipped_value", 20, NO_LIMIT), ("clipped_value", 1000, 0.1), ("squared_error", 25, 0.1)],
)
def test_values_and_gradients_equal_those_of_a_padded_batch(
    value_loss: str, micro_batch_tokens: int, max_norm: float
) -> None:
    """Two mini-batches and two epochs; the clip is around the values before the update, not the latest ones.

    The learning rate is the critic's own, without warm-up, the limit of the gradient's norm that of the policy.
    """
    is_clipped = value_loss == "clipped_value"
    section = {"value_loss": value_loss, "mini_batch_prompts": 2, "learning_rate": 0.2, "warmup_steps": 1}
    recipe = make_critic_recipe(  # 0.2 is the default: the recipe refuses another where there is no clip
        section | {"value_clip": 0.1 if is_clipped else 0.2},
        train__num_epochs=2,
        train__num_steps=5,
        train__schedule="linear",
        train__warmup_steps=3,
        train__max_grad_norm=max_norm,
        rollout__num_prompts=4,  # a filter dropped the fourth
        train__micro_batch_tokens=micro_batch_tokens,
    )
    model, sequences = make_value_model(), make_value_sequences()
    naive, optimizer, context = copy.deepcopy(model), RecordingSGD(model), UpdateContext(recipe=recipe, step=3)
    filled = fill(values_column(model), sequences, context)
    values = [sequence.values for sequence in filled if sequence.values is not None]
    assert [len(one) for one in values] == [len(sequence.targets) for sequence in sequences]
    assert {one.dtype.name for one in values} == {"float32"}
    torch.testing.assert_close(all_of("values", filled), padded_values(model, sequences), rtol=1e-6, atol=0)
    critic = Critic(model, optimizer, recipe)
    metrics = critic.learn(sequences, context)
    assert critic.num_rows < 2 * sum(len(sequence.token_ids) for sequence in sequences), "some tokens are shared"

    losses: list[float] = []
    norms, clipped = [], []
    batches = naive_batches(sequences, recipe.critic_updates, recipe.seed, 3)
    for gradients, batch in zip(optimizer.gradients, batches, strict=True):
        loss, is_stopped = naive_loss(naive, batch, 0.1 if is_clipped else np.inf)
        whole = torch.autograd.grad(loss, list(naive.parameters()))
        norms.append(float(torch.cat([gradient.flatten() for gradient in whole]).norm()))
        expected = [gradient * min(1, max_norm / (norms[-1] + 1e-6)) for gradient in whole]  # as torch clips it
        assert distance(gradients, expected) < 1e-12
        rate = 0.2 * (1 - (8 + len(losses)) / 20)  # of step 3 of 5, of four optimizer steps each
        for parameter, gradient in zip(naive.parameters(), expected, strict=True):
            parameter.data -= rate * gradient
        losses.append(loss.item())
        clipped.append(is_stopped.double())
    assert len(losses) == 4
    assert metrics["critic/learning_rate"] == optimizer.rates[-1] == pytest.approx(rate)
    assert metrics["critic/loss"] == pytest.approx(np.mean(losses), rel=1e-7)  # the bounds of the clip are float32
    assert metrics["critic/grad_norm"] == pytest.approx(np.mean(norms), rel=1e-10)
    assert {f"critic/{name}": value for name, value in value_metrics(sequences).items()}.items() <= metrics.items()
    assert metrics.get("critic/clip_share/value", 0) == pytest.approx(torch.cat(clipped).mean().item(), rel=1e-10)
    assert (clipped[0].mean() != clipped[2].mean()) == is_clipped, "it does something, and not the same in both epochs"


def test_explained_variance_equals_its_definition_but_where_returns_differ_by_rounding() -> None:
    sequence = make_value_sequences()[0]
    rng = np.random.default_rng(0)
    old, noise = rng.standard_normal((2, 60)).astype(np.float32)

    def metrics_of(values: Any, returns: Any) -> dict[str, float]:
        return value_metrics([replace(sequence, values=values, returns=np.asarray(returns, np.float32))])

    found = metrics_of(old, old + noise)
    explained = 1 - noise.var() / (old + noise).var()
    expected = {"value_mean": old.mean(), "return_mean": (old + noise).mean(), "explained_variance": explained}
    assert found == pytest.approx(expected, rel=1e-5)
    assert metrics_of(old, old)["explained_variance"] == 1
    assert metrics_of(7 * old, np.linspace(0, 0.01, 60))["explained_variance"] < -1e4, "far too large, no rounding"
    for reward in (0.0, 0.3):  # with gamma = lambda = 1 all returns are the reward, as (reward - value) + value
        returns = (np.float32(reward) - 7 * old) + 7 * old
        assert (returns.min() < returns.max()) == (reward > 0), "the case must have rounding errors"
        assert metrics_of(7 * old, returns).keys() == {"value_mean", "return_mean"}
    # all rewards 0: GAE's sums cancel the values up to a rounding error of float64
    assert metrics_of(7 * old, 1e-16 * noise).keys() == {"value_mean", "return_mean"}


def test_a_number_that_is_not_finite_changes_no_weight() -> None:
    recipe = make_critic_recipe()
    model, sequences = make_value_model(), make_value_sequences()
    before = copy.deepcopy(model.state_dict())
    infinite = [replace(one, returns=np.full_like(one.advantages, np.inf)) for one in sequences]
    with pytest.raises(NonFiniteError, match="critic, step 2, epoch 1, mini-batch"):
        Critic(model, RecordingSGD(model), recipe).learn(infinite, UpdateContext(recipe=recipe, step=2))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with torch.no_grad():
        model.body.embedding[sequences[2].token_ids[sequences[2].num_prompt_tokens]] = torch.nan
    with pytest.raises(NonFiniteError, match="step 7: values has a number that is not finite"):
        fill(values_column(model), sequences, UpdateContext(recipe=recipe, step=7))


def absolute_error(
    values: Tensor, old_values: Tensor, returns: Tensor, *_: Tensor, **options: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Right."""
    error = (values - returns).abs()
    return error, {"far_share": (error.detach() > 1).double()}


def test_a_value_loss_of_ones_own() -> None:
    recipe, model = make_critic_recipe({"value_loss": "test_critic:absolute_error"}), make_value_model()
    critic = Critic(model, RecordingSGD(model), recipe)
    metrics = critic.learn(make_value_sequences(), UpdateContext(recipe=recipe, step=1))
    assert 0 < metrics["critic/loss/far_share"] < 1


# --- The model -------------------------------------------------------------------------------------------------------

TOKEN_IDS = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])
PLAN = PackedPlan((5, 3), "cpu")


def test_values_are_float32_for_a_bfloat16_body() -> None:
    model = make_value_model(dtype=torch.bfloat16)
    hidden, values = model.body(TOKEN_IDS, PLAN), model(TOKEN_IDS, PLAN)
    assert model.value_head.dtype == values.dtype == torch.float32
    expected = (hidden.double() @ model.value_head[0].double()).float()
    torch.testing.assert_close(values, expected, rtol=1e-6, atol=1e-6)  # bfloat16 would be off by 1e-2


@pytest.mark.parametrize(("dtype", "tied"), [(torch.float32, True), (torch.bfloat16, False)], ids=str)
def test_a_policy_becomes_a_critic_that_is_saved_and_loaded_with_the_same_bits(
    dtype: torch.dtype, tied: bool, tmp_path: Path
) -> None:
    policy = make_policy(dtype=dtype, tied=tied)
    save_model(policy, tmp_path / "policy")
    random_state = torch.get_rng_state()
    model = load_value_model(tmp_path / "policy", dtype=dtype, device="cpu")
    assert torch.equal(torch.get_rng_state(), random_state)
    assert model.body.head is None
    assert torch.equal(model.body(TOKEN_IDS, PLAN), policy(TOKEN_IDS, PLAN))
    assert torch.equal(model(TOKEN_IDS, PLAN), torch.zeros(8))
    with torch.no_grad():
        model.value_head.copy_(torch.linspace(-1, 1 / 3, model.value_head.numel())[None])
    save_value_model(model, tmp_path / "critic")
    loaded = load_value_model(tmp_path / "critic", dtype=dtype, device="cpu")
    for (name, mine), (other_name, other) in zip(loaded.named_parameters(), model.named_parameters(), strict=True):
        assert (name, mine.dtype) == (other_name, other.dtype)
        assert torch.equal(mine, other), name
    assert torch.equal(loaded(TOKEN_IDS, PLAN), model(TOKEN_IDS, PLAN))
    body = load_model(tmp_path / "critic", dtype=dtype, device="cpu")  # is a model folder
    assert torch.equal(body.embedding, policy.embedding)


def test_a_wrong_value_head_is_refused(tmp_path: Path) -> None:
    save_value_model(make_value_model(dtype=torch.float32), tmp_path)
    for name, width in (("value_head.weight", 9), ("score.weight", 8)):
        save_file({name: torch.zeros(1, width)}, tmp_path / "value_head.safetensors")
        with pytest.raises(ValueError, match=rf"{name}': \[1, {width}\].* expected {{'value_head.weight': \[1, 8\]}}"):
            load_value_model(tmp_path, dtype=torch.float32, device="cpu")
