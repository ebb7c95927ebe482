"""The update on two ranks: what one process computes, but for the order of sums; errors stop all ranks alike."""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from critic_cases import make_critic_recipe, make_value_model, with_random_targets
from rank_cases import FORKED, RankPool, run_ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from update_cases import RecordingSGD, make_policy, make_recipe, make_sequences, update

from srtrl.build_models import build_draft_head
from srtrl.features.critic import Critic, values_column
from srtrl.features.draft_head_learner import NUM_STEPS
from srtrl.features.lora import LoraAdamW
from srtrl.model.transformer import Transformer
from srtrl.ranks.sharding import reshard, shard
from srtrl.recipe.schema import LoraSection
from srtrl.rollout.packing import pack
from srtrl.trainer.objective import PolicyLearner, logprobs_column
from srtrl.trainer.optimizer import MasterAdamW, build_optimizer
from srtrl.trainer.passes import UpdateContext, fill
from srtrl.types import TrainSequence

pytestmark = FORKED
BUDGET = 25
"""Tokens of a micro-batch: several in a mini-batch, of different sizes."""
ADAMW: dict[str, Any] = {"learning_rate": 1e-3, "weight_decay": 0.1, "betas": (0.9, 0.99), "eps": 1e-6}

Arrays = dict[str, npt.NDArray[Any]]
Found = tuple[dict[str, float], Arrays]
"""Metrics, and weights, gradients and the like by name."""


def arrays_of(name: str, tensors: Sequence[Tensor]) -> Arrays:
    full = [one.full_tensor() if isinstance(one, DTensor) else one for one in tensors]
    return {f"{name} {index}": one.detach().double().numpy().copy() for index, one in enumerate(full)}


def learn(
    sharding: str,
    optimizer_of: Callable[[nn.Module], MasterAdamW] = lambda model: build_optimizer(model, **ADAMW),
    dtype: torch.dtype = torch.float32,
    num_groups: int = 3,
    **options: Any,
) -> Found:
    """GRPO with a KL in the loss, clipped gradients, and what `options` change."""
    common = {"algorithm__kl": {"coefficient": 0.1}, "train__max_grad_norm": 0.5, "train__micro_batch_tokens": BUDGET}
    recipe = make_recipe(**{**common, **options}, train__sharding=sharding)
    policy, reference = make_policy(dtype=dtype, scale=8), make_policy(seed=3, dtype=dtype)
    if sharding == "fsdp2":
        shard(policy)
        shard(reference.requires_grad_(False))
    sequences = make_sequences(make_policy(scale=8), noise=0.2, num_groups=num_groups)
    context = UpdateContext(recipe=recipe, step=1)
    column = logprobs_column("reference", "ref_logprobs", reference, recipe.rollout.temperature)
    sequences = fill(column, sequences, context)
    found = [sequence.ref_logprobs for sequence in sequences if sequence.ref_logprobs is not None]
    optimizer = optimizer_of(policy)
    metrics = update(policy, optimizer, sequences, recipe)
    reshard(policy)
    arrays = arrays_of("weights", optimizer.holders(policy)) | dict(zip("abcdefgh", found, strict=False))
    if isinstance(optimizer, RecordingSGD):
        arrays |= arrays_of("gradient", [one for gradients in optimizer.gradients for one in gradients])
    return metrics, arrays


def learn_values(sharding: str, dtype: torch.dtype = torch.float32) -> Found:
    """PPO: the critic's values, its update, and the policy's."""
    recipe = make_critic_recipe(
        {"mini_batch_prompts": 1},
        train__num_epochs=2,
        train__max_grad_norm=0.5,
        train__micro_batch_tokens=BUDGET,
        train__sharding=sharding,
    )
    sequences = make_sequences(make_policy(scale=8), noise=0.2, num_groups=3)
    model, policy = make_value_model(dtype=dtype), make_policy(dtype=dtype, scale=8)
    if sharding == "fsdp2":
        shard(model)
        shard(policy)
    critic = Critic(model, build_optimizer(model, **ADAMW), recipe)
    context = UpdateContext(recipe=recipe, step=1)
    sequences = fill(values_column(model), with_random_targets(sequences), context)
    metrics = critic.learn(sequences, context)
    optimizer = build_optimizer(policy, **ADAMW)
    metrics |= update(policy, optimizer, sequences, recipe)
    reshard(policy)
    holders = {"critic": critic.optimizer.holders(model), "policy": optimizer.holders(policy)}
    return metrics, arrays_of("critic", holders["critic"]) | arrays_of("policy", holders["policy"])


def lora_of(model: nn.Module) -> MasterAdamW:
    assert isinstance(model, Transformer)
    section = LoraSection(rank=4)
    return LoraAdamW(model, section, seed=0, dtype=torch.bfloat16, lr=1e-3, weight_decay=0.1, betas=(0.9, 0.99))


CASES: dict[str, Callable[[str], Found]] = {
    "mini-batches and epochs": partial(learn, train__mini_batch_prompts=1, train__num_epochs=2),
    "gradients, old log-probs computed": partial(learn, optimizer_of=RecordingSGD, algorithm__old_logprobs="recompute"),
    "more ranks than micro-batches": partial(learn, num_groups=1, train__micro_batch_tokens=1000),
    "bfloat16, master weights": partial(learn, dtype=torch.bfloat16, train__num_epochs=2),
    "LoRA": partial(learn, optimizer_of=lora_of, dtype=torch.bfloat16, train__num_epochs=2),
    "critic": partial(learn_values, dtype=torch.float64),  # in float32 AdamW makes much of how its sums are rounded
    "bfloat16 critic": partial(learn_values, dtype=torch.bfloat16),
}
REPEATED = next(iter(CASES))
DDP_ALONE = ("gradients, old log-probs computed", "critic")
"""Gradients and the critic without sharding, and bfloat16 with it, are enough."""
FSDP_ALONE = ("bfloat16, master weights", "bfloat16 critic")


def run_case(name: str, sharding: str) -> Found:
    """Result of a case; the first one runs twice, for the same bits."""
    found = CASES[name](sharding)
    assert name != REPEATED or is_same(found, CASES[name](sharding))
    return found


def is_same(one: Found, other: Found) -> bool:
    return one[0] == other[0] and all(np.array_equal(array, other[1][name]) for name, array in one[1].items())


@pytest.mark.parametrize(
    ("name", "sharding"),
    [(name, "ddp") for name in CASES if name not in FSDP_ALONE]
    + [(name, "fsdp2") for name in CASES if name not in DDP_ALONE],
)
def test_ranks_learn_what_one_process_learns(name: str, sharding: str) -> None:
    assert len(list(pack(make_sequences(make_policy()), BUDGET, "cpu"))) % 2, "the ranks have different numbers"
    found, second = run_ranks(2, run_case, name, sharding)
    assert is_same(found, second)
    metrics, arrays = run_case(name, "ddp")
    assert found[0] == pytest.approx(metrics, rel=1e-6, abs=1e-6)
    for array_name, array in arrays.items():
        np.testing.assert_allclose(found[1][array_name], array, rtol=0, atol=1e-6, err_msg=array_name)


def learn_head() -> tuple[dict[str, float], Arrays]:
    """A draft head beside the policy, from fewer tokens than its optimizer has steps."""
    policy = make_policy(dtype=torch.float32)
    recipe = make_recipe(rollout__draft_head={}, train__micro_batch_tokens=BUDGET)
    learner = build_draft_head(recipe, policy)
    assert learner is not None
    learner.head.refresh(policy)
    before = [parameter.detach().clone() for parameter in learner.head.parameters()]
    policy_learner = PolicyLearner(policy, build_optimizer(policy, **ADAMW), recipe, [learner])
    sequences = make_sequences(policy)
    assert sum(len(sequence.targets) for sequence in sequences) < 2 * NUM_STEPS
    metrics = policy_learner.learn(sequences, UpdateContext(recipe=recipe, step=1))
    assert not any(map(torch.equal, before, learner.head.parameters()))
    return metrics, arrays_of("head", list(learner.head.parameters()))


def test_a_draft_head_learns_from_fewer_tokens_than_its_optimizer_has_steps() -> None:
    found, second = run_ranks(2, learn_head)
    assert is_same(found, second)
    for metrics in (found[0], learn_head()[0]):
        assert 0 < metrics["draft_head/loss"] < 10
        assert 0 < metrics["draft_head/grad_norm"] < 10


# --- Errors -----------------------------------------------------------------------------------------------------------


FLAWS: dict[str, Exception] = {
    "memory": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB."),
    "mistake": ValueError("a mistake of the user"),
    "broken": RuntimeError("the user's own"),
}


def failing_loss(logprobs: Tensor, *_: Tensor, flaw: str, **options: float) -> tuple[Tensor, dict[str, Tensor]]:
    """A user's, which fails on rank 1 alone."""
    if os.environ.get("RANK") == "1":
        if flaw in FLAWS:
            raise FLAWS[flaw]
        return {"nan": -logprobs * math.nan, "slope": (logprobs - logprobs.detach()).sqrt()}[flaw], {}
    return -logprobs, {}


def decoder_says_nan(sequences: Sequence[TrainSequence]) -> list[TrainSequence]:
    broken = sequences[4].rollout_logprobs.copy()
    broken[0] = math.nan
    return [*sequences[:4], replace(sequences[4], rollout_logprobs=broken), *sequences[5:]]


def errors_of() -> dict[str, str]:
    """The message of each case's error, on this rank."""
    found = {}
    for flaw in ("memory", "mistake", "nan", "slope", "decoder"):
        policy = make_policy(dtype=torch.float32)
        sequences, loss = make_sequences(policy), broken_loss(flaw)
        if flaw == "decoder":
            sequences, loss = decoder_says_nan(sequences), {}
        recipe = make_recipe(train__micro_batch_tokens=BUDGET, **loss)
        before = [parameter.detach().clone() for parameter in policy.parameters()]
        with pytest.raises((ValueError, RuntimeError)) as caught:
            update(policy, RecordingSGD(policy), sequences, recipe, step=7)
        found[flaw] = f"{caught.type.__name__}: {caught.value}"
        assert all(map(torch.equal, before, policy.parameters()))
    return found


def broken_loss(flaw: str) -> dict[str, Any]:
    return {"algorithm__loss": f"{__name__}:failing_loss", "algorithm__loss_options": {"flaw": flaw}}


def test_an_error_of_one_rank_stops_all_alike() -> None:
    other, found = run_ranks(2, errors_of)
    place = "step 7, epoch 1, mini-batch 1"
    not_changed = "the weights were not changed by this mini-batch"
    assert found["memory"] == "OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB."
    assert found["mistake"] == "ValueError: a mistake of the user"
    for flaw, message in found.items():
        is_of_rank_1 = flaw in ("memory", "mistake")
        assert other[flaw] == (f"RankError: rank 1 of 2: {message.partition(': ')[2]}" if is_of_rank_1 else message)
    loss = "the loss (algorithm.loss test_rank_update:failing_loss)"
    assert found["nan"] == f"NonFiniteError: {place}: {loss} is nan; {not_changed}"
    assert found["slope"].startswith(f"NonFiniteError: {place}: the gradient norm is")
    assert found["decoder"].startswith(f"NonFiniteError: {place}: a log-prob by the decoder is not a finite number")


def test_a_rank_that_ends_within_sharded_passes_is_noticed() -> None:
    _, failures = RankPool(2).outcomes(partial(learn, **broken_loss("broken")), "fsdp2")
    assert "RuntimeError: the user's own" in failures[1]
    waited = "RankError: rank 0 of 2 waited for the others (step 1, epoch 1, mini-batch 1): another rank has ended"
    assert waited in failures[0]
