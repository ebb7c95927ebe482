"""`train.sharding: fsdp2`: a rank keeps its part of each weight, gradient and moment, and gathers weights to use them.

torch's `fully_shard` does this, layer by layer. The parts are float32: for a bfloat16 model they are the master weights
(see `MasterAdamW`), and what a pass gathers is bfloat16. So the update gives what it gives without sharding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, cast
from weakref import WeakKeyDictionary

import torch
from torch import nn

from srtrl import ranks

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


_pools: WeakKeyDictionary[nn.Module, torch.cuda.MemPool] = WeakKeyDictionary()
"""Memory for the gathered weights of a model, see `unshard`."""


def shard(model: nn.Module) -> None:
    """Replace the model's parameters by this rank's parts of them, in place; all ranks call it, before any optimizer.

    Gradients are then summed over the ranks by every backward pass, so that ranks need the same number of passes.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    body = next(module for module in model.modules() if hasattr(module, "layers"))  # of a critic its transformer
    weight = next(body.parameters())
    is_half = weight.dtype in (torch.bfloat16, torch.float16)
    gathered = MixedPrecisionPolicy(
        param_dtype=weight.dtype if is_half else None,
        reduce_dtype=torch.float32 if is_half else None,
        cast_forward_inputs=False,  # the rotary table, and the residual stream, have their type already
    )
    mesh = init_device_mesh(weight.device.type, (dist.get_world_size(),))
    for module in (*body.get_submodule("layers").children(), body):
        if is_half:
            module.float()  # one layer at a time, and its float32 copy is freed as soon as it is sharded
        fully_shard(module, mesh=mesh, mp_policy=gathered, reshard_after_forward=module is not model)
    if model is not body:  # the value head is float32 in any case
        fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False))
    for sharded in _sharded_modules(model):
        sharded.set_gradient_divide_factor(1.0)  # losses are divided by global token counts already
        sharded.set_force_sum_reduction_for_comms(True)  # gloo has nothing that also multiplies


def is_sharded(model: nn.Module) -> bool:
    """Whether `shard` has been called for it."""
    return bool(_sharded_modules(model))


def local_rows(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """This rank's rows of a sharded tensor, and the number of the first one; all of one that is not sharded."""
    if not hasattr(tensor, "to_local"):
        return tensor, 0
    return tensor.to_local(), ranks.index() * -(-len(tensor) // ranks.count())


def unshard(model: nn.Module, *, in_place: bool = False) -> None:
    """Gather all weights, until `reshard`: for the decoder and checkpoints, which read them as those of a plain model.

    In between a pass takes no collective, so that ranks may take different numbers of decode steps; the weights must
    not be changed. Costs the memory of a whole model in the type of its passes. All ranks call this, and then
    `Engine.end_step`. Does nothing where the model is not sharded.

    Args:
        model: Sharded.
        in_place: Gather on CUDA into memory that nothing else uses, so that the weights lie where they lay last time
            and the decoder's graphs stay valid; it remains allocated between the calls. (Where they lie elsewhere all
            the same, the decoder drops its graphs.)
    """
    with _own_memory(model) if in_place else nullcontext():
        for module in _sharded_modules(model):
            module.set_reshard_after_forward(False, recurse=False)
            module.unshard()


@contextmanager
def _own_memory(model: nn.Module) -> Iterator[None]:
    """Let tensors of a sharded model on CUDA be allocated from a pool that it keeps."""
    if not is_sharded(model) or next(model.parameters()).device.type != "cuda":
        yield
        return
    if model not in _pools:
        _pools[model] = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(_pools[model]):
        yield


def reshard(model: nn.Module) -> None:
    """End what `unshard` began, before the update: free all but this rank's parts."""
    for module in (modules := _sharded_modules(model)):
        module.set_reshard_after_forward(module is not modules[0], recurse=False)
        module.reshard()


@contextmanager
def resharded(model: nn.Module) -> Iterator[None]:
    """Around the update: a model that was unsharded for the rollouts is sharded inside the `with` block."""
    reshard(model)
    yield
    unshard(model, in_place=True)


@contextmanager
def resharded_after(model: nn.Module) -> Iterator[None]:
    """Around passes without gradient, which leave what is outside the layers gathered: after them that is freed too."""
    yield
    reshard(model)


def _sharded_modules(model: nn.Module) -> list[FSDPModule]:
    """The parts of the model that are gathered together, outermost first."""
    return [cast("FSDPModule", module) for module in model.modules() if hasattr(module, "reshard")]
