"""How ranks share the passes over a step's sequences: each computes some micro-batches, and all know what came out.

The micro-batches, and the order of what they give, are those of one rank: results differ by the order of sums alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from srtrl.model.sharding import is_sharded
from srtrl.ranks.processes import Ranks
from srtrl.recipe.schema import Recipe
from srtrl.rollout.packing import PackedBatch, pack
from srtrl.types import TrainSequence


def on_ranks(
    compute: Callable[[PackedBatch], dict[str, Tensor]],
    model: nn.Module,
    sequences: Sequence[TrainSequence],
    recipe: Recipe,
    ranks: Ranks,
    what: str,
) -> list[dict[str, Tensor]]:
    """What `compute` gives for each micro-batch of the sequences, in order, on all ranks; each is computed by one rank.

    `compute` is a pass of `model`. The tensors are on the CPU where there are several ranks.

    Raises:
        ValueError, RuntimeError, torch.OutOfMemoryError: of any rank's `compute`, on all ranks. Where the model is
            sharded the others are then in the midst of a pass, and learn only that the rank has ended (`RankError`).
    """
    equal_passes = is_sharded(model)
    with ranks.waiting(what) if equal_passes else ranks.together(what):
        batches = pack(
            sequences,
            recipe.train.micro_batch_tokens,
            next(model.parameters()).device,
            rank=ranks.index,
            num_ranks=ranks.count,
            fill=equal_passes,
        )
        own = {packed.first_sequence: compute(packed) for packed in batches}
        if ranks.count > 1:  # after all of them, so that the device need not wait for the host
            own = {first: {name: one.cpu() for name, one in part.items()} for first, part in own.items()}
    return ranks.join(own, what)


def by_sequence(
    forward: Callable[[PackedBatch], Tensor],
    model: nn.Module,
    sequences: Sequence[TrainSequence],
    recipe: Recipe,
    ranks: Ranks,
) -> list[npt.NDArray[np.float32]]:
    """What `forward` gives for the response tokens [R] of each micro-batch, without gradient: an array per sequence."""
    with torch.no_grad():
        parts = on_ranks(lambda packed: {"": forward(packed)}, model, sequences, recipe, ranks, "log-probs or values")
    ends = np.cumsum([len(sequence.rollout_logprobs) for sequence in sequences])
    found = torch.cat([part[""] for part in parts])
    assert len(found) == ends[-1]
    return np.split(found.float().cpu().numpy(), ends[:-1])


def sum_gradients(model: nn.Module, holders: Sequence[Tensor], ranks: Ranks) -> None:
    """Replace the gradients by their sums over the ranks; a rank that had no micro-batch adds zeros.

    Those of a sharded model are sums already: its backward passes have made them.
    """
    if ranks.count > 1 and not is_sharded(model):
        for holder in holders:
            holder.grad = torch.zeros_like(holder) if holder.grad is None else holder.grad
        ranks.sum([holder.grad for holder in holders if holder.grad is not None], "the gradients")
