"""AdamW, its float32 master weights for a half-type model, and its learning rate.

The learning rate is a pure function of the optimizer step: nothing of it is saved or resumed.
"""

import math
import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from srtrl.model.attention import HALF_DTYPES
from srtrl.recipe.schema import UpdatePlan
from srtrl.run.checkpoint import load_tensors


def build_optimizer(
    model: nn.Module, *, learning_rate: float, weight_decay: float, betas: tuple[float, float], eps: float = 1e-8
) -> "MasterAdamW":
    """AdamW over all parameters of `model`; weight decay only on matrices (not on norms, biases or embeddings).

    The groups have the parameters' names (`param_names`), by which `MasterAdamW.tensors` names what a checkpoint holds.
    """
    matrices: list[tuple[str, nn.Parameter]] = []
    others: list[tuple[str, nn.Parameter]] = []
    for name, parameter in model.named_parameters():
        (matrices if parameter.ndim >= 2 and "embed" not in name else others).append((name, parameter))
    groups = [
        {"params": named, "weight_decay": decay}
        for named, decay in ((matrices, weight_decay), (others, 0.0))
        if named  # torch takes an empty group for one without names
    ]
    return MasterAdamW(groups, lr=learning_rate, betas=betas, eps=eps)


def learning_rate_at(updates: UpdatePlan, step: int, number: int) -> float:
    """Learning rate of the `number`-th optimizer step (from 0) of training step `step` (from 1).

    Linear warm-up reaches the peak at optimizer step `warmup_steps` (0-based); then `constant`, or falling along a line
    or half a cosine to zero, which is reached just after the last step (transformers'
    `get_linear_schedule_with_warmup`, except that the warm-up begins at `peak / (warmup_steps + 1)`: a first step with
    rate zero would be wasted).

    The schedule counts full batches, so that it depends on the step alone: if filters left fewer mini-batches, it
    moves on as if there had been all.
    """
    peak, warmup = updates.learning_rate, updates.warmup_steps
    index = (step - 1 - updates.num_skipped) * updates.steps_per_batch + number  # of all optimizer steps, 0-based
    if index < warmup:
        return peak * (index + 1) / (warmup + 1)
    done = (index - warmup) / max(1, updates.num_steps - warmup)  # share of the falling part, [0, 1)
    if updates.schedule == "linear":
        return peak * max(0.0, 1.0 - done)
    if updates.schedule == "cosine":
        return peak * 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))
    assert updates.schedule == "constant", f"unknown schedule {updates.schedule}"
    return peak


class MasterAdamW(torch.optim.AdamW):
    """Fused AdamW over float32 masters; after each step the model's tensors hold the masters, rounded.

    A bfloat16 number has 8 significant bits, so a weight moves only by steps of 1/256 of itself or more: an update of
    1e-6 would vanish. Here it adds up in the master weight, and the model's weight is the master, rounded. The same
    holds for gradients of several micro-batches. Micikevicius et al., "Mixed Precision Training" (2018), section 3.1.
    Bytes per parameter: 2 (weight) + 4 (master) + 8 (moments) + 4 (gradient sum), against 16 of a float32 model.

    The groups (`param_groups`) hold the masters: norms are taken and clipped there. A parameter that is wider than a
    half type (all of a float32 model, a head in float32) is its own master. A micro-batch's gradient is added to the
    master's as soon as `backward` has it, in float32, and freed, so that only one layer's bfloat16 gradient exists at a
    time. So there is one optimizer for a model: a second one would get no gradients.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], **options: Any) -> None:
        """Take all memory of the state: a step that ran out of it half-way would leave some weights moved.

        Args:
            groups: Of the model's own parameters, with their names.
            options: Of `torch.optim.AdamW`.
        """
        self.master_of: dict[nn.Parameter, Tensor] = {}
        """The float32 master of each parameter of a half type."""
        masters = [
            {**group, "params": [(name, self._make_master(parameter)) for name, parameter in group["params"]]}
            for group in groups
        ]
        is_computed = all(master.device.type != "meta" for group in masters for _, master in group["params"])
        super().__init__(masters, fused=is_computed, **options)  # where only sizes count, there are no fused kernels
        for group in self.param_groups:  # as fused AdamW does in its first step: on the device, and in float32
            for parameter in group["params"]:
                self.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter, requires_grad=False),
                    "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
                }

    def holders(self, model: nn.Module) -> list[Tensor]:
        """The tensors whose `.grad` is used, in the order of `model.parameters()`: what is clipped and summed."""
        return [self.master_of.get(parameter, parameter) for parameter in model.parameters()]

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients while there are any. Of sharded parameters this rank's part."""
        parameters = (parameter for group in self.param_groups for parameter in group["params"])
        return sum((part.to_local() if hasattr(part, "to_local") else part).nbytes for part in parameters)

    def tensors(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """The state by name: its own memory, to be read and written.

        If the groups hold other values than the model, those of a model whose `dtype` is a half type, these are
        included: the model's own files do not have them. The names and shapes do not depend on sharding.
        """
        tensors: dict[str, Tensor] = {}
        for group in self.param_groups:
            for name, parameter in zip(group["param_names"], group["params"], strict=True):
                tensors |= {f"{name}.{key}": value for key, value in self.state[parameter].items()}
                if self._has_own_values(dtype):
                    tensors[f"{name}.master"] = parameter.detach()
        return {name: tensor if tensor.ndim else tensor.view(1) for name, tensor in tensors.items()}

    def load(self, dtype: torch.dtype, checkpoint: Path, name: str) -> None:
        """Read the state from the folder `name` of a checkpoint; see `load_tensors`."""
        load_tensors(checkpoint, name, self.tensors(dtype))
        self.write_weights()

    def save(self, folder: Path) -> None:
        """Write what a checkpoint holds beside `tensors`."""

    def metrics(self) -> dict[str, float]:
        """Return the metrics that a step logs of the optimizer."""
        return {}

    def base_weights(self) -> AbstractContextManager[None]:
        """Context of the reference policy's passes, if that is the model with its initial weights."""
        return nullcontext()

    def hand_over_masters(self) -> None:
        """Make the masters the model's own tensors, as when training is over and what is not rounded is to be saved."""
        for parameter, master in self.master_of.items():
            parameter.data = master.detach()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Move what the groups hold by its gradients, which are used up, and write the model's tensors, in place."""
        assert closure is None, "the gradients are there already"
        for parameter, master in self.master_of.items():
            _hand_over(master, parameter)
        assert any(master.grad is not None for group in self.param_groups for master in group["params"]), (
            "no gradients: another optimizer took them"
        )
        super().step()
        self.zero_grad()
        self.write_weights()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of masters and model."""
        super().zero_grad(set_to_none)
        for parameter in self.master_of:
            parameter.grad = None

    @torch.no_grad()
    def write_weights(self) -> None:
        """Make the model's tensors the masters, rounded."""
        if self.master_of:
            torch._foreach_copy_(list(self.master_of), list(self.master_of.values()))

    def _has_own_values(self, dtype: torch.dtype) -> bool:
        return dtype in HALF_DTYPES or bool(self.master_of)

    def _make_master(self, parameter: nn.Parameter) -> Tensor:
        """The tensor that the optimizer updates: the float32 master of the parameter, or the parameter itself."""
        if parameter.dtype not in HALF_DTYPES:
            return parameter
        master = self.master_of[parameter] = parameter.detach().float().requires_grad_()
        # The hook holds no optimizer: the garbage collector does not see through a parameter's hooks.
        handle = parameter.register_post_accumulate_grad_hook(partial(_hand_over, master))  # type: ignore[no-untyped-call]
        weakref.finalize(self, handle.remove).atexit = False
        return master


@torch.no_grad()
def _hand_over(master: Tensor, parameter: Tensor) -> None:
    """Move a gradient from the model's tensor to its master, adding in float32."""
    if parameter.grad is not None:
        master.grad = parameter.grad.float() if master.grad is None else master.grad.add_(parameter.grad)
        parameter.grad = None
