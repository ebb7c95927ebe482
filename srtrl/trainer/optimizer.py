"""AdamW and its learning rate, which is a pure function of the optimizer step (nothing of it is saved or resumed)."""

import math

import torch
from torch import nn

from srtrl.recipe_base import Schedule, UpdatePlan


def build_optimizer(
    model: nn.Module, *, learning_rate: float, weight_decay: float, betas: tuple[float, float], eps: float
) -> torch.optim.AdamW:
    """AdamW over all parameters of `model`; weight decay only on matrices (not on norms, biases or embeddings).

    The groups hold parameters in the order of `model.parameters()`, so that a saved state fits the same architecture.
    """
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        (matrices if parameter.ndim >= 2 and "embed" not in name else others).append(parameter)
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, eps=eps, fused=True)


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
