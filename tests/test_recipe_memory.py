"""The recipes for one GPU of 80 GB fit there with room: their memory, computed by running the update on no device.

Tensors on PyTorch's device `meta` have sizes and no content, so the update's own code says what it would allocate.
"""

import weakref
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from srtrl.engine.cuda_runner import CudaRunner
from srtrl.engine.kv_memory import choose_num_pages, kv_bytes
from srtrl.engine.runner import EngineOptions, page_bytes_of
from srtrl.model.hf_config import config_from_hf
from srtrl.model.logprobs import token_logprobs
from srtrl.model.shapes import SHAPES
from srtrl.model.transformer import Transformer
from srtrl.model.value_model import ValueModel
from srtrl.recipe.file import load_recipe
from srtrl.recipe.schema import Recipe
from srtrl.trainer.build import PREFILL_TOKENS, number_of_slots
from srtrl.trainer.optimizer import MasterWeightAdamW, allocate_state, gradient_bytes

ROOT = Path(__file__).parents[1]
GPU_BYTES = 80e9
MAX_SHARE = 0.9
"""The rest is for what is not counted: the CUDA context, libraries' workspaces, CUDA graphs, fragmentation."""
SHAPE_OF = {"Qwen/Qwen2.5-0.5B-Instruct": "qwen2.5-0.5b", "Qwen/Qwen2.5-1.5B": "qwen2.5-1.5b"}


@pytest.mark.parametrize("name", ["grpo_gsm8k", "grpo_math", "ppo_math", "dapo_math17k"])
def test_a_recipe_fits_one_gpu_with_room_and_the_docs_say_how(name: str) -> None:
    recipe = load_recipe(ROOT / "recipes" / f"{name}.yaml")
    parts = memory_of(recipe, SHAPE_OF[recipe.model.path])
    slots = parts.pop("slots")
    total = sum(parts.values())
    assert total <= MAX_SHARE * GPU_BYTES, parts
    row = [f"`{name}`", *(f"{one / 1e9:.1f}" for one in (*parts.values(), total)), f"{slots:.0f}"]
    assert "| " + " | ".join(row) + " |" in (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")


def test_slots_are_as_given_or_what_the_kv_cache_holds() -> None:
    def slots(*overrides: str, free: int | None = 10**10, **changes: int) -> int:
        recipe = load_recipe(ROOT / "recipes" / "grpo_math.yaml", overrides)
        return number_of_slots(recipe, make_policy("qwen2.5-1.5b"), free, **changes)

    of_one = 28_672 * 1152  # bytes of a quarter of 512 + 4096 tokens
    assert slots("rollout.slots=7") == slots("rollout.slots=7", free=None) == 7
    assert slots(free=None) == 64
    assert slots() == 5 * 10**9 // of_one
    assert slots(reserved_bytes=10**9) == slots(free=9 * 10**9) == int(4.5e9) // of_one
    assert slots("rollout.kv_memory_gib=2") == 2 * 2**30 // of_one
    assert slots(free=10**12) == 128 * 5
    assert [slots(free=10**12, num_samples=number) for number in (900, 2000)] == [900, 1024]
    assert slots(free=10**6) == 1


class MemoryTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all tensors that live; `peak` is the largest number of them."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        """Start with tensors that exist already."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._known: set[int] = set()
        self._num_bytes = self.peak = 0
        for tensor in known:
            self._add(tensor)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.device.type == "meta":
                self._add(tensor)
        return result

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._known:
            self._known.add(storage._cdata)
            self._num_bytes += storage.nbytes()
            self.peak = max(self.peak, self._num_bytes)
            weakref.finalize(storage, self._remove, storage._cdata, storage.nbytes())

    def _remove(self, key: int, num_bytes: int) -> None:
        self._known.remove(key)
        self._num_bytes -= num_bytes


class _Attention(torch.autograd.Function):
    """Allocates what FlashAttention does: it keeps its inputs, its output and one float32 for each row and head."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.empty_like(q)
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:2], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(one) for one in ctx.saved_tensors[:3])


class Plan:
    """The plan of an update, without attention's arithmetic."""

    def __init__(self, num_tokens: int, num_positions: int) -> None:
        self.positions = torch.zeros(num_tokens, dtype=torch.int64, device="meta")
        self.num_positions = num_positions

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _Attention.apply(q, k, v)  # type: ignore[no-any-return, no-untyped-call]


def make_policy(shape: str) -> Transformer:
    return Transformer(config_from_hf(SHAPES[shape], shape), torch.bfloat16, "meta")


def trainable(model: torch.nn.Module) -> MasterWeightAdamW:
    optimizer = MasterWeightAdamW([{"params": list(model.named_parameters())}], lr=1e-6, fused=False)
    allocate_state(optimizer)
    return optimizer


def num_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def optimizer_bytes(optimizer: MasterWeightAdamW) -> int:
    """Masters and moments."""
    return num_bytes(optimizer.master_of.values()) + sum(num_bytes(one.values()) for one in optimizer.state.values())


@cache  # several recipes train the same shape in the same way
def activation_bytes(shape: str, num_tokens: int, gradient_checkpointing: bool) -> int:
    """Peak of the second micro-batch of the update, beside weights, optimizer and gradients.

    Every token's logits are computed, as though there were no prompts.
    """
    policy = make_policy(shape)
    policy.gradient_checkpointing = gradient_checkpointing
    optimizer = trainable(policy)
    tracker = MemoryTracker([*policy.parameters(), *optimizer.master_of.values()])
    with tracker:
        for _ in range(2):  # gradients of the first one are there while the second one is computed
            tokens = torch.zeros(num_tokens, dtype=torch.int64, device="meta")
            hidden = policy(tokens, Plan(num_tokens, policy.config.max_position_embeddings))[tokens]
            logprobs, entropy = token_logprobs(hidden, policy.head_weight, tokens, temperature=1.0)
            (logprobs + entropy).sum().backward()  # type: ignore[no-untyped-call]
            del hidden, logprobs, entropy
    kept = num_bytes(policy.parameters()) + num_bytes(optimizer.master_of.values()) + gradient_bytes(optimizer)
    return tracker.peak - kept


def memory_of(recipe: Recipe, shape: str) -> dict[str, float]:
    """Bytes by part at the peak of a training step, which is in the update; and the number of slots."""
    policy = make_policy(shape)
    optimizer = trainable(policy)
    weights, gradients = num_bytes(policy.parameters()), gradient_bytes(optimizer)
    parts = {
        "weights": weights,
        "optimizer": optimizer_bytes(optimizer),
        "reference": weights if recipe.algorithm.kl.coefficient > 0 else 0,
        "critic": 0,
    }
    if recipe.critic is not None:
        critic = ValueModel(make_policy(shape))
        critic_optimizer = trainable(critic)
        parts["critic"] = num_bytes(critic.parameters()) + optimizer_bytes(critic_optimizer)
        gradients = max(gradients, gradient_bytes(critic_optimizer))
    free = int(GPU_BYTES - sum(parts.values()))
    rollout = recipe.rollout
    slots = number_of_slots(recipe, policy, free, reserved_bytes=gradients)
    options = EngineOptions(slots=slots, prefill_chunk_tokens=PREFILL_TOKENS["cuda"])
    longest = rollout.max_prompt_tokens + rollout.max_new_tokens
    tracker = MemoryTracker([])
    with tracker:
        CudaRunner(policy, options, longest)
    parts["decoder's buffers"] = tracker.peak
    page_bytes = page_bytes_of(policy, options.page_size)
    num_pages = choose_num_pages(
        kv_bytes(rollout.kv_memory_gib, free - tracker.peak, reserved_bytes=gradients),
        page_bytes=page_bytes,
        page_size=options.page_size,
        slots=slots,
        max_sequence_tokens=longest,
    )
    parts["KV cache"] = num_pages * page_bytes
    parts["gradients"] = gradients
    parts["activations"] = activation_bytes(shape, recipe.train.micro_batch_tokens, recipe.model.gradient_checkpointing)
    return {**parts, "slots": slots}
