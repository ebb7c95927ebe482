"""Passes over a step's sequences: micro-batches, shared by the ranks, whose results all ranks get.

The micro-batches, and the order of their results, are those of one rank: results differ by the order of sums alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from srtrl import ranks
from srtrl.ranks.sharding import is_sharded
from srtrl.recipe.schema import Recipe
from srtrl.rollout.packing import PackedBatch, pack, sharing_order
from srtrl.types import TrainSequence


class NonFiniteError(RuntimeError):
    """A log-prob, a loss or a gradient is not a finite number; the weights were not changed by it."""


@dataclass(kw_only=True, slots=True, frozen=True)
class UpdateContext:
    """The context of all passes of a training step: the same on all ranks, which share them."""

    recipe: Recipe
    step: int
    """Number of the training step, from 1: names it in errors, and places it on the learning rate's schedule."""


@dataclass(slots=True)
class SharedPasses:
    """The micro-batches of this rank, and their results."""

    micro_batches: Iterator[PackedBatch]
    results: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    """Tensors of this rank's micro-batches, by `first_sequence`; the names are the caller's."""
    all_results: list[dict[str, Tensor]] = field(default_factory=list)
    """After the `with` block: of all micro-batches, in order. On the CPU where there are several ranks."""


@contextmanager
def shared_passes(
    model: nn.Module, sequences: Sequence[TrainSequence], context: UpdateContext, what: str
) -> Iterator[SharedPasses]:
    """Share passes of `model` over the sequences: inside the `with` block a rank computes its micro-batches.

    Args:
        model: The device and the sharding of its parameters count.
        sequences: At least one.
        context: Its `train.micro_batch_tokens` is the token budget of a micro-batch.
        what: Names the passes in errors.

    Raises:
        ValueError: a sequence is longer than `train.micro_batch_tokens`.
        ValueError, RuntimeError, torch.OutOfMemoryError: raised in the block of any rank; on all ranks. With a sharded
            model the others are then in the middle of a pass, and learn only that the rank has ended (`RankError`).
    """
    equal_passes = is_sharded(model)
    with ranks.waiting(what) if equal_passes else ranks.synchronized(what):
        micro_batches = pack(
            sequences,
            context.recipe.train.micro_batch_tokens,
            next(model.parameters()).device,
            rank=ranks.index(),
            num_ranks=ranks.count(),
            fill=equal_passes,
        )
        passes = SharedPasses(micro_batches)
        yield passes
        results = passes.results
        if ranks.count() > 1:  # after all passes, so that the device need not wait for the host
            results = {first: {name: tensor.cpu() for name, tensor in part.items()} for first, part in results.items()}
    passes.all_results = ranks.join(results, what)


@dataclass(kw_only=True, slots=True, frozen=True)
class Column:
    """A number for each response token that a pass computes before credit is assigned."""

    stage: str
    """Names its time, `time/<stage>`, and its place in errors."""
    field: str
    """The field of `TrainSequence` that is filled, such as `ref_logprobs`."""
    model: nn.Module
    forward: Callable[[PackedBatch], Tensor]
    """A pass of the model: the numbers of a micro-batch's response tokens, [R]."""
    around: Callable[[], AbstractContextManager[None]] = nullcontext
    """Entered before the first pass and left after the last one."""


def fill(column: Column, sequences: Sequence[TrainSequence], context: UpdateContext) -> list[TrainSequence]:
    """The sequences with a column filled in, by passes without gradient. All ranks share the work, and get the same.

    Args:
        column: What is computed.
        sequences: In order; all ranks have the same ones.
        context: See `shared_passes`.

    Raises:
        NonFiniteError: a number is not finite.
        ValueError: as `shared_passes`, like its other errors.
    """
    order = sharing_order(sequences)
    in_order = [sequences[index] for index in order]
    with torch.no_grad(), column.around(), shared_passes(column.model, in_order, context, column.stage) as passes:
        for packed in passes.micro_batches:
            passes.results[packed.first_sequence] = {column.field: column.forward(packed)}
    numbers = torch.cat([part[column.field] for part in passes.all_results]).float().cpu().numpy()  # [R], all in order
    if not np.isfinite(numbers).all():
        raise NonFiniteError(
            f"step {context.step}: {column.field} has a number that is not finite; no weights of this step were changed"
        )
    ends = np.cumsum([len(sequence.rollout_logprobs) for sequence in in_order])
    assert len(numbers) == ends[-1]
    parts: dict[int, Any] = dict(zip(order, np.split(numbers, ends[:-1]), strict=True))
    return [replace(sequence, **{column.field: parts[index]}) for index, sequence in enumerate(sequences)]


def sum_gradients(holders: Sequence[Tensor]) -> None:
    """Replace the gradients by their sums over the ranks; a rank that had no micro-batch adds zeros.

    Those of sharded tensors are sums already: backward passes have made them.
    """
    if ranks.count() > 1:
        whole = [holder for holder in holders if not hasattr(holder, "to_local")]
        for holder in whole:
            holder.grad = torch.zeros_like(holder) if holder.grad is None else holder.grad
        ranks.sum([holder.grad for holder in whole if holder.grad is not None], "the gradients")
