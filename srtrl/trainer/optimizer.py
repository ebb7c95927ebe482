"""AdamW, its float32 master weights for a half-type model, and its learning rate.

The learning rate is a pure function of the optimizer step: nothing of it is saved or resumed.
"""

import math
import weakref
from collections.abc import Iterable
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
) -> torch.optim.AdamW:
    """AdamW over all parameters of `model`; weight decay only on matrices (not on norms, biases or embeddings).

    A model kept in a half type gets float32 master weights (`MasterWeightAdamW`). The groups have the parameters' names
    (`param_names`), by which `state_tensors` names what a checkpoint holds. All memory of the state is taken here: a
    step that ran out of it half-way would leave some weights moved and others not.
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
    is_half = any(parameter.dtype in HALF_DTYPES for parameter in model.parameters())
    kind = MasterWeightAdamW if is_half else torch.optim.AdamW
    is_computed = next(model.parameters()).device.type != "meta"  # where only sizes count, there are no fused kernels
    optimizer = kind(groups, lr=learning_rate, betas=betas, eps=eps, fused=is_computed)
    allocate_state(optimizer)
    return optimizer


def gradient_holders(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The tensors whose `.grad` the optimizer will use, in a fixed order: what is clipped and summed over the ranks."""
    return optimizer.holders(model) if isinstance(optimizer, MasterWeightAdamW) else list(model.parameters())


def allocate_state(optimizer: torch.optim.AdamW) -> None:
    """Make the state that fused AdamW makes in its first step: step count (float32, on the device) and both moments."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
            }


def state_tensors(optimizer: torch.optim.Optimizer, dtype: torch.dtype) -> dict[str, Tensor]:
    """The state of an optimizer of `build_optimizer` by name: its own memory, to be read and written.

    Where the groups hold other values than the model (masters of a model whose `dtype` is a half type, or adapters),
    these are included: the model's own files do not have them. The names and shapes do not depend on sharding.
    """
    has_own = dtype in HALF_DTYPES or isinstance(optimizer, MasterWeightAdamW)
    tensors: dict[str, Tensor] = {}
    for group in optimizer.param_groups:
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            tensors |= {f"{name}.{key}": value for key, value in optimizer.state[parameter].items()}
            if has_own:
                tensors[f"{name}.master"] = parameter.detach()
    return {name: tensor if tensor.ndim else tensor.view(1) for name, tensor in tensors.items()}


def load_state(optimizer: torch.optim.Optimizer, dtype: torch.dtype, checkpoint: Path, name: str) -> None:
    """Read the state of an optimizer from the folder `name` of a checkpoint; see `load_tensors`."""
    load_tensors(checkpoint, name, state_tensors(optimizer, dtype))
    if isinstance(optimizer, MasterWeightAdamW):
        optimizer.write_weights()


def gradient_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the gradients while there are any: those of the state are taken for good when the optimizer is built.

    Of sharded parameters this rank's part.
    """
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return sum((part.to_local() if hasattr(part, "to_local") else part).nbytes for part in parameters)


def learning_rate_at(updates: UpdatePlan, step: int, number: int) -> float:
    """Learning rate of the `number`-th optimizer step (from 0) of training step `step` (from 1).

    Linear warm-up reaches the peak at optimizer step `warmup_steps` (0-based); then `constant`, or falling along a line
    or half a cosine to zero, which is reached just after the last step (transformers'
    `get_linear_schedule_with_warmup`, except that the warm-up begins at `peak / (warmup_steps + 1)`: a first step with
    rate zero would be wasted).

    The schedule counts full batches, so that it depends on the step alone: where filters left fewer mini-batches, it
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


class MasterWeightAdamW(torch.optim.AdamW):
    """Fused AdamW over float32 masters; after each step the model's tensors hold the masters, rounded.

    A bfloat16 number has 8 significant bits, so a weight moves only by steps of 1/256 of itself or more: an update of
    1e-6 would vanish. Here it adds up in the master weight, and the model's weight is the master, rounded. The same
    holds for gradients of several micro-batches. Micikevicius et al., "Mixed Precision Training" (2018), section 3.1.
    Bytes per parameter: 2 (weight) + 4 (master) + 8 (moments) + 4 (gradient sum), against 16 of a float32 model.

    The groups (`param_groups`) hold the masters: norms are taken and clipped there. A parameter that is wider than a
    half type (a critic's head) is its own master. A micro-batch's gradient is added to the master's as soon as
    `backward` has it, in float32, and freed, so that only one layer's bfloat16 gradient exists at a time. So there is
    one optimizer for a model: a second one would get no gradients.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], **options: Any) -> None:
        """Arguments of `torch.optim.AdamW`; the groups are of the model's own parameters, with their names."""
        self.master_of: dict[nn.Parameter, Tensor] = {}
        """The float32 master of each parameter of a half type."""
        masters = [
            {**group, "params": [(name, self._make_master(one)) for name, one in group["params"]]} for group in groups
        ]
        super().__init__(masters, **options)

    def holders(self, model: nn.Module) -> list[Tensor]:
        """See `gradient_holders`: the masters in the order of `model.parameters()`."""
        return [self.master_of.get(parameter, parameter) for parameter in model.parameters()]

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
        torch._foreach_copy_(list(self.master_of), list(self.master_of.values()))

    def _make_master(self, parameter: nn.Parameter) -> Tensor:
        """The tensor that the optimizer moves in the parameter's stead."""
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
        gradient = parameter.grad.float()
        master.grad = gradient if master.grad is None else master.grad.add_(gradient)
        parameter.grad = None
