"""Training of a bfloat16 model: float32 masters, moments and gradient sums, against a plain loop.

`test_ppo_training.py` resumes a killed bfloat16 run.
"""

import gc
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from update_cases import make_policy, make_recipe, make_sequences

from srtrl.model.logprobs import token_logprobs
from srtrl.model.transformer import Transformer
from srtrl.rollout.packing import PackedBatch, pack, sharing_order
from srtrl.trainer.learner import Learner
from srtrl.trainer.optimizer import MasterAdamW, build_optimizer
from srtrl.trainer.passes import UpdateContext
from srtrl.types import TrainSequence

RATE = 1e-3
BUDGET = 24


def optimizer_of(model: nn.Module) -> MasterAdamW:
    return build_optimizer(model, learning_rate=RATE, weight_decay=0.1, betas=(0.9, 0.99))


def micro_batch_loss(policy: Transformer, packed: PackedBatch) -> Tensor:
    """Any loss will do."""
    hidden = policy(packed.token_ids, packed.plan)[packed.hidden_index]
    logprobs, _ = token_logprobs(hidden, policy.head_weight, packed.target_ids, temperature=0.8)
    return -(logprobs * packed.advantages).sum() / 30


class AnyLearner(Learner):
    """Of `micro_batch_loss`."""

    model: Transformer

    def loss(self, packed: PackedBatch, sequence_lengths: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """With a metric of ones."""
        return micro_batch_loss(self.model, packed), {"one": torch.ones(len(packed.target_ids))}


def descend_by_hand(policy: Transformer, sequences: Sequence[TrainSequence], max_norm: float) -> float:
    """Four epochs of one mini-batch with plain tensors; returns the mean norm. All but a pass's results is float32.

    Weight decay is for matrices alone.
    """
    names, parameters = zip(*policy.named_parameters(), strict=True)
    masters = [nn.Parameter(parameter.detach().float()) for parameter in parameters]
    groups = [
        {"params": [master], "weight_decay": 0.1 * (master.ndim >= 2 and "embed" not in name)}
        for name, master in zip(names, masters, strict=True)
    ]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.99), eps=1e-8, fused=True)
    norms = 0.0
    for number in range(4):
        for master in masters:
            master.grad = torch.zeros_like(master)
        for packed in pack(sequences, BUDGET, "cpu"):
            slopes = torch.autograd.grad(micro_batch_loss(policy, packed), parameters)
            for master, slope in zip(masters, slopes, strict=True):
                assert slope.dtype == policy.dtype
                assert master.grad is not None
                master.grad += slope.float()
        norms += float(torch.nn.utils.clip_grad_norm_(masters, max_norm))
        for group in optimizer.param_groups:
            group["lr"] = RATE * (1 - number / 4)
        optimizer.step()
        for parameter, master in zip(parameters, masters, strict=True):
            parameter.data.copy_(master.data)
    return norms / 4


@pytest.mark.parametrize(
    ("dtype", "tied", "max_norm"),
    [(torch.bfloat16, False, 1e9), (torch.bfloat16, True, 0.05), (torch.float32, False, 0.05)],
    ids=str,
)
def test_weights_are_those_of_float32_masters_to_the_bit(dtype: torch.dtype, tied: bool, max_norm: float) -> None:
    """A float32 model is trained by plain AdamW; nothing but the time at which its state is made differs."""
    sequences = [replace(sequence, draw_index=0) for sequence in make_sequences(make_policy())]
    sequences = [sequences[index] for index in sharing_order(sequences)]
    assert len(list(pack(sequences, BUDGET, "cpu"))) > 2
    ours, by_hand, before = (make_policy(dtype=dtype, tied=tied, scale=8) for _ in range(3))
    optimizer = optimizer_of(ours)
    assert bool(optimizer.master_of) == (dtype != torch.float32), "a float32 parameter is its own master"
    recipe = make_recipe(
        train__num_steps=1,
        train__num_epochs=4,
        train__micro_batch_tokens=BUDGET,
        train__schedule="linear",
        train__max_grad_norm=max_norm,
    )
    learner = AnyLearner(ours, optimizer, recipe.policy_updates)
    metrics = learner.learn(sequences, UpdateContext(recipe=recipe, step=1))
    assert metrics["grad_norm"] == descend_by_hand(by_hand, sequences, max_norm)
    assert all(map(torch.equal, ours.parameters(), by_hand.parameters()))
    assert not all(map(torch.equal, ours.parameters(), before.parameters()))


def test_the_models_tensors_stay_where_they_are_and_hold_no_gradient() -> None:
    """The decoder reads these very tensors; and a step allocates nothing that could run out with half of it done."""
    policy = make_policy(dtype=torch.bfloat16, scale=8)
    optimizer = optimizer_of(policy)
    parameters = list(policy.parameters())

    def addresses() -> list[int]:
        state = [tensor for one in optimizer.state.values() for _, tensor in sorted(one.items())]
        return [tensor.data_ptr() for tensor in (*parameters, *optimizer.master_of.values(), *state)]

    before = addresses()
    assert len(before) == 5 * len(parameters), "steps and both moments are there"
    loss = micro_batch_loss(policy, next(pack(make_sequences(make_policy()), BUDGET, "cpu")))
    loss.backward()  # type: ignore[no-untyped-call]
    assert all(parameter.grad is None for parameter in parameters)
    gradients = [one.grad for one in optimizer.holders(policy) if one.grad is not None]
    assert [(one.shape, one.dtype) for one in gradients] == [(one.shape, torch.float32) for one in parameters]
    assert optimizer.gradient_bytes == sum(one.nbytes for one in gradients)
    optimizer.step()
    assert all(one.grad is None for one in (*parameters, *optimizer.master_of.values())), "they are used up"
    assert addresses() == before
    assert all(torch.equal(parameter, optimizer.master_of[parameter].bfloat16()) for parameter in parameters)


def test_optimizer_and_masters_are_freed_before_the_model() -> None:
    model = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    first = optimizer_of(model)
    (master,) = first.holders(model)
    left: list[weakref.ref[Any]] = [weakref.ref(first), weakref.ref(master)]
    second = optimizer_of(model)
    (model.weight * 2).sum().backward()  # type: ignore[no-untyped-call]
    with pytest.raises(AssertionError, match="another optimizer took them"):
        second.step()
    del first, master
    gc.collect()
    assert [one() for one in left] == [None, None]
    (master,) = second.holders(model)
    before = master.item()
    (model.weight * 2).sum().backward()  # type: ignore[no-untyped-call]
    second.step()
    assert master.item() != before
