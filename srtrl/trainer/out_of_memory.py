"""A device that is too small for the update: which options make it fit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from srtrl.recipe import Recipe


class UpdateMemoryError(RuntimeError):
    """The device has too little memory for a stage of the update; the message says what helps."""


@contextmanager
def explain_out_of_memory(where: str, recipe: Recipe, *, has_engine: bool = True) -> Iterator[None]:
    """Turn torch's error inside the `with` block into one that a user can act on.

    Memory runs out between optimizer steps only: the state of the optimizer is allocated when it is built, and a step
    works in place. So no weight is ever left half changed.

    Args:
        where: begins the message, such as "step 3, update".
        recipe: whose options are named.
        has_engine: whether there is a decoder, whose KV cache takes memory too.

    Raises:
        UpdateMemoryError: in place of `torch.OutOfMemoryError`.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        found = str(error).partition(" If reserved but unallocated")[0].strip()  # without hints for the allocator
        advice = "".join(f"\n  {line}" for line in _advice(recipe, has_engine=has_engine))
        raise UpdateMemoryError(
            f"{where}: the device's memory is too small. {found}\n"
            f"No weight was left half changed: the optimizer had not begun its step. What helps:{advice}"
        ) from error


def _advice(recipe: Recipe, *, has_engine: bool) -> Iterator[str]:
    """Options that would lower the update's memory, what costs least first."""
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
    if has_engine and recipe.rollout.kv_across_update != "release":
        yield "rollout.kv_across_update=release: the KV cache's pages are given back for the update"
        yield "rollout.kv_memory_share or rollout.kv_memory_gib lower: fewer pages, so fewer sequences at once"
    if recipe.model.dtype == "float32":
        yield "model.dtype=bfloat16, in a run of its own: half the activations, and no cast copies of the weights"
