"""Bytes that an update allocates, computed on no device: its own code runs on tensors that have sizes and no content.

PyTorch's device `meta` has such tensors. What kernels for CUDA allocate, which do not run there, is imitated here.
"""

import weakref
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from srtrl.build_models import DTYPES
from srtrl.features.critic import ValueModel
from srtrl.features.lora import LoraAdamW
from srtrl.model.logprobs import Softmax, token_logprobs
from srtrl.model.transformer import Layer, ModelConfig, Style, Transformer
from srtrl.recipe.schema import ModelSection
from srtrl.trainer.optimizer import MasterAdamW, build_optimizer


@cache  # for other GPUs; sections hold lists, so that their JSON stands for them
def activation_bytes(config: ModelConfig, section: str, num_rows: int, num_keys: int) -> int:
    """Peak of an update, beside weights, masters and gradients; pairs of layers are alike, so that two sizes say it."""
    settings, num_layers = ModelSection.model_validate_json(section), config.num_hidden_layers
    few = 2 + num_layers % 2
    sizes = (replace(config, num_hidden_layers=number) for number in (few, few + 2))
    low, high = (peak_bytes(size, settings, num_rows, num_keys) for size in sizes)
    return low + (num_layers - few) // 2 * (high - low)


def peak_bytes(config: ModelConfig, section: ModelSection, num_rows: int, num_keys: int) -> int:
    """Peak of an update's second micro-batch, run on no device."""
    policy = make_policy(config, section)
    for layer in policy.layers:
        cast(Layer, layer).gated = _gated
    optimizer, masters = make_optimizer(policy, section)
    tracker = MemoryTracker([*policy.parameters(), *masters])
    with tracker:
        for _ in range(2):  # gradients of the first one are there while the second one is computed
            tokens = torch.zeros(num_rows, dtype=torch.int64, device="meta")
            hidden = policy(tokens, _Plan(num_rows, num_keys))[tokens]
            options: dict[str, Any] = {"temperature": 1.0, "softmax": _Softmax()}
            logprobs, entropy = token_logprobs(hidden, policy.head_weight, tokens, **options)
            (logprobs + entropy).sum().backward()  # type: ignore[no-untyped-call]
            del hidden, logprobs, entropy
    return tracker.peak - num_bytes([*policy.parameters(), *masters]) - optimizer.gradient_bytes


def num_bytes(tensors: Iterable[Tensor], num_parts: int = 1) -> int:
    """Bytes of the largest of the equal parts into which `fully_shard` cuts the rows of each tensor."""
    return sum(tensor.nbytes // len(tensor) * -(-len(tensor) // num_parts) for tensor in map(torch.atleast_1d, tensors))


def make_policy(config: ModelConfig, section: ModelSection) -> Transformer:
    """A policy without content."""
    policy = Transformer(config, DTYPES[section.dtype], "meta")
    policy.gradient_checkpointing = section.gradient_checkpointing
    return policy


def make_optimizer(model: Transformer | ValueModel, section: ModelSection) -> tuple[MasterAdamW, list[Tensor]]:
    """The optimizer of a model that learns, and the tensors that it moves in the place of the model's own."""
    options: dict[str, Any] = {"learning_rate": 1.0, "weight_decay": 0.0, "betas": (0.9, 0.999)}
    if section.lora is not None and isinstance(model, Transformer):
        optimizer: MasterAdamW = LoraAdamW(model, section.lora, seed=0, lr=options.pop("learning_rate"), **options)
    else:
        optimizer = build_optimizer(model, **options)
    own = {id(parameter) for parameter in model.parameters()}
    held = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    return optimizer, [tensor for tensor in held if id(tensor) not in own]


class MemoryTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all tensors that live; `peak` is the largest number of them."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        """Start with tensors that exist already."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._living: weakref.WeakValueDictionary[int, torch.UntypedStorage] = weakref.WeakValueDictionary()
        self.peak = 0
        self._add(known)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self._add(
            tensor for tensor in tree_leaves(result) if isinstance(tensor, Tensor) and tensor.device.type == "meta"
        )
        return result

    def _add(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            self._living[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        self.peak = max(self.peak, sum(storage.nbytes() for storage in self._living.values()))


class _Attention(torch.autograd.Function):
    """Allocates what FlashAttention does: it keeps its inputs, its output and one float32 for each row and head.

    Backward it has the queries' gradient in float32, and those of keys and values for each query head.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.empty_like(q)
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:2], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        q, k, v, *_ = ctx.saved_tensors
        temporary = [
            torch.empty_like(q, dtype=torch.float32),
            *(q.new_empty(len(tensor), *q.shape[1:]) for tensor in (k, v)),
        ]
        found = tuple(torch.empty_like(tensor) for tensor in (q, k, v))
        del temporary
        return found


class _Gated(torch.autograd.Function):
    """Allocates what the kernels of the gated activation do (srtrl/cuda/update.py): they keep the fused projection."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        return gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return torch.empty_like(ctx.saved_tensors[0])


def _gated(gate_up: Tensor, style: Style) -> Tensor:
    return _Gated.apply(gate_up)  # type: ignore[no-any-return, no-untyped-call]


class _Softmax(Softmax):
    """Allocates what the kernels of the log-probs do: logits in the type of the weights, their gradient over them."""

    def forward(self, hidden: Tensor, head_weight: Tensor, *_: Any, has_entropy: bool) -> tuple[Tensor, Tensor | None]:
        logits = functional.linear(hidden, head_weight)
        logprobs = logits.new_empty(len(logits), dtype=torch.float32)
        return logprobs, torch.empty_like(logprobs) if has_entropy else None

    def gradient(self, hidden: Tensor, head_weight: Tensor, *_: Any) -> Tensor:
        return functional.linear(hidden, head_weight)


class _Plan:
    """The plan of a micro-batch in an update, without attention's arithmetic."""

    def __init__(self, num_rows: int, num_keys: int) -> None:
        self.positions = torch.zeros(num_rows, dtype=torch.int64, device="meta")
        self.num_positions = num_rows
        self.path = torch.zeros(num_keys, dtype=torch.int64, device="meta")

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
        k, v = k.index_select(0, self.path), v.index_select(0, self.path)
        return _Attention.apply(q, k, v)  # type: ignore[no-any-return, no-untyped-call]
