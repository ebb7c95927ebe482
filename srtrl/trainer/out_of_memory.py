"""A device that is too small for the update: what was in use, and which options make it fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from srtrl.recipe import Recipe
from srtrl.trainer.optimizer import MasterWeightAdamW

GIB = 2**30
KV_CACHE = "the KV cache"
"""Name of the decoder's pages among what is in use."""


class UpdateMemoryError(RuntimeError):
    """The device has too little memory for a stage of the update; the message says what was in use and what helps."""


class PeakMemory:
    """Most bytes that tensors took on a CUDA device, in one stage and over all; always 0 on other devices."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._earlier = 0
        """Peak of the stages that are over."""

    def begin_stage(self) -> None:
        """From here on `of_stage` counts, beginning with what is allocated now."""
        self._earlier = max(self._earlier, self.of_stage())
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def of_stage(self) -> int:
        """Since the last `begin_stage` or `take`."""
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else 0

    def take(self) -> int:
        """Since the last call of this method, over all stages."""
        self.begin_stage()
        peak, self._earlier = self._earlier, 0
        return peak


@contextmanager
def explain_out_of_memory(
    where: str, recipe: Recipe, memory: PeakMemory, holders: Callable[[], Mapping[str, int]]
) -> Iterator[None]:
    """Turn torch's error inside the `with` block into one that a user can act on.

    Memory runs out between optimizer steps only: the state of the optimizer is allocated when it is built, and a step
    works in place. So no weight is ever left half changed.

    Args:
        where: begins the message, such as "step 3, update".
        recipe: whose options are named.
        memory: of the device; the block begins a stage of it.
        holders: bytes of what stays in memory, by name; asked for when the error is there.

    Raises:
        UpdateMemoryError: in place of `torch.OutOfMemoryError`.
    """
    memory.begin_stage()  # or what an earlier one held, such as pages given back since, would count as activations
    try:
        yield
    except torch.OutOfMemoryError as error:
        held = holders()
        raise UpdateMemoryError(
            f"{where}: the device's memory is too small. {_first_sentences(str(error))}\n"
            f"In use: {_in_use(held, memory)}.\n"
            "No weight was left half changed: the optimizer had not begun its step. What helps:\n"
            + "\n".join(f"  {advice}" for advice in _advice(recipe, has_pages=held.get(KV_CACHE, 0) > 0))
        ) from error


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes that the tensors take."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def optimizer_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of an optimizer's moments, and of its master weights where it has any."""
    moments = sum(tensor_bytes(state.values()) for state in optimizer.state.values())
    return moments + (tensor_bytes(optimizer.masters) if isinstance(optimizer, MasterWeightAdamW) else 0)


def gradient_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the gradients while there are any: those of the state are taken for good when the optimizer is built."""
    return sum(tensor_bytes(group["params"]) for group in optimizer.param_groups)


def _in_use(holders: Mapping[str, int], memory: PeakMemory) -> str:
    parts = [f"{name} {size / GIB:.2f} GiB" for name, size in holders.items() if size > 0]
    if memory.device.type == "cuda":
        rest = memory.of_stage() - sum(holders.values())
        parts.append(f"at most {max(0, rest) / GIB:.2f} GiB of gradients, activations and logits")
    return ", ".join(parts)


def _advice(recipe: Recipe, *, has_pages: bool) -> Iterator[str]:
    """Options that would lower the update's memory, what costs least first; `has_pages`: the KV cache is in it."""
    longest = recipe.rollout.max_prompt_tokens + recipe.rollout.max_new_tokens
    budget = recipe.train.micro_batch_tokens
    if budget > longest:
        yield (
            f"train.micro_batch_tokens={max(longest, budget // 2)} (now {budget}; at least {longest}, the longest "
            "sequence): fewer activations at a time; the gradient stays the same"
        )
    else:
        yield "rollout.max_new_tokens lower: a micro-batch holds at least one whole sequence, and now no more"
    if not recipe.model.gradient_checkpointing:
        yield "model.gradient_checkpointing=true: layers are computed again instead of kept; a third more time"
    if has_pages:
        yield "rollout.kv_across_update=release: the KV cache's pages are given back for the update"
        yield "rollout.kv_memory_share or rollout.kv_memory_gib lower: fewer pages, so fewer sequences at once"
    if recipe.model.dtype == "float32":
        yield "model.dtype=bfloat16, in a run of its own: half the activations, and no cast copies of the weights"


def _first_sentences(text: str) -> str:
    """Torch's account without its hints for the allocator."""
    return text.partition(" If reserved but unallocated")[0].strip()
