"""AdamW and its learning rate, which is a pure function of the optimizer step (nothing of it is saved or resumed)."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from srtrl.recipe_base import Schedule, UpdatePlan
from srtrl.trainer.master_weights import HALF_DTYPES, MasterWeightAdamW


def build_optimizer(
    model: nn.Module, *, learning_rate: float, weight_decay: float, betas: tuple[float, float], eps: float
) -> torch.optim.AdamW:
    """AdamW over all parameters of `model`; weight decay only on matrices (not on norms, biases or embeddings).

    A model kept in a half type gets float32 master weights (`MasterWeightAdamW`). The groups hold parameters in the
    order of `model.parameters()`, so that a saved state fits the same architecture. All memory of the state is taken
    here: a step that ran out of it half-way would leave some weights moved and others not.
    """
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        (matrices if parameter.ndim >= 2 and "embed" not in name else others).append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    optimizer: torch.optim.AdamW
    if any(parameter.dtype in HALF_DTYPES for parameter in model.parameters()):
        optimizer = MasterWeightAdamW(groups, lr=learning_rate, betas=betas, eps=eps)
    else:
        optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=betas, eps=eps, fused=True)
    _allocate_state(optimizer)
    return optimizer


def gradient_holders(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The tensors whose `.grad` the optimizer will use, in the order of `model.parameters()`: what is clipped."""
    parameters = list(model.parameters())
    return optimizer.masters_of(parameters) if isinstance(optimizer, MasterWeightAdamW) else [*parameters]


def _allocate_state(optimizer: torch.optim.AdamW) -> None:
    """What fused AdamW would make in its first step: the step count, float32 on the device, and both moments."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
            }


def learning_rate_at(step: int, *, peak: float, warmup_steps: int, num_steps: int, schedule: Schedule) -> float:
    """Learning rate of optimizer step `step` (0-based) of `num_steps`.

    Linear warm-up reaches `peak` at step `warmup_steps`; then `constant`, or falling along a line or half a cosine to
    zero, which is reached just after the last step (transformers' `get_linear_schedule_with_warmup`, except that
    the warm-up begins at `peak / (warmup_steps + 1)`: a first step with rate zero would be wasted).
    """
    if step < warmup_steps:
        return peak * (step + 1) / (warmup_steps + 1)
    done = (step - warmup_steps) / max(1, num_steps - warmup_steps)  # share of the falling part, [0, 1)
    if schedule == "linear":
        return peak * max(0.0, 1.0 - done)
    if schedule == "cosine":
        return peak * 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))
    assert schedule == "constant", f"unknown schedule {schedule}"
    return peak


def planned_learning_rate(updates: UpdatePlan, step: int, number: int) -> float:
    """Learning rate of the `number`-th optimizer step (from 0) of training step `step` (from 1).

    The schedule counts full batches, so that it depends on the step alone: where filters left fewer mini-batches, it
    moves on as if there had been all.
    """
    return learning_rate_at(
        (step - 1 - updates.num_skipped) * updates.steps_per_batch + number,
        peak=updates.learning_rate,
        warmup_steps=updates.warmup_steps,
        num_steps=updates.num_steps,
        schedule=updates.schedule,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Use `learning_rate` in every parameter group from the next step on."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
