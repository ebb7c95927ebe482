"""Sequences -> micro-batches of whole sequences laid end to end, without padding; what they share is there once."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from srtrl.model.attention import PackedPlan, copy_to_device
from srtrl.types import TrainSequence, num_equal

PER_TOKEN = ("advantages", "rollout_logprobs", "old_logprobs", "ref_logprobs", "values", "returns")
"""Fields of a sequence, and of a micro-batch, with one number for each sampled token."""


@dataclass(kw_only=True, slots=True, frozen=True)
class PackedBatch:
    """One micro-batch. Rows of the tensors [R] are the sampled tokens, in the order of the packed tokens [T]."""

    first_sequence: int
    """Index of its first sequence, of those given to `pack`: what orders the micro-batches."""
    weight: float
    """Weight of its loss: 1, or 0 for what a rank computes only to take as many passes as the others."""
    token_ids: Tensor
    """Prompts and responses, without what a sequence shares with the one before it: [T] int64."""
    plan: PackedPlan
    """Position of each sequence in `token_ids`."""
    hidden_index: Tensor
    """Packed row of the token before the target, which predicts it; several targets may have the same: [R] int64."""
    places: Tensor
    """Row of that token if nothing were shared: neighbours of a turn are neighbours here, [R] int64."""
    target_ids: Tensor
    """[R] int64."""
    sequence_index: Tensor
    """Index of the row's sequence among those given to `pack` (not: in this micro-batch), [R] int64."""
    advantages: Tensor
    """[R] float32."""
    rollout_logprobs: Tensor
    """[R] float32."""
    old_logprobs: Tensor | None
    """[R] float32; None if the sequences have none."""
    ref_logprobs: Tensor | None
    """[R] float32; None if the sequences have none."""
    values: Tensor | None
    """Outputs of a value model before the update, [R] float32; None if the sequences have none."""
    returns: Tensor | None
    """Targets of the value model, [R] float32; None if the sequences have none."""


def pack(
    sequences: Sequence[TrainSequence],
    max_tokens: int,
    device: torch.device | str,
    *,
    rank: int = 0,
    num_ranks: int = 1,
    fill: bool = False,
) -> Iterator[PackedBatch]:
    """Fill micro-batches of at most `max_tokens` rows with the sequences, in the given order.

    A sequence adds no rows for the tokens that it shares with the one before it (see `sharing_order`), unless it is the
    first of a micro-batch. A draw that no longer fits opens the next micro-batch, if it fits one at all; so does a
    sequence. The layout depends on the order and the tokens alone.
    All sequences are checked at once; the tensors of a micro-batch are made when it is asked for, so that the device
    holds no more than the caller does.

    Of several ranks each gets its share of the micro-batches: they are dealt in turn, the one with most rows first.
    With `fill` all ranks get the same number: one that would have fewer gets the smallest too, with weight zero.

    Raises:
        ValueError: a sequence alone is longer than `max_tokens`.
    """
    shared = shared_tokens(sequences)
    added = [len(sequence.token_ids) - common for sequence, common in zip(sequences, shared, strict=True)]
    rows_of_draws = Counter[int]()
    for sequence, num_rows in zip(sequences, added, strict=True):
        rows_of_draws[sequence.draw_index] += num_rows
    starts: list[int] = []  # the first sequence of each micro-batch
    sizes: list[int] = []  # and its rows
    for index, sequence in enumerate(sequences):
        _check(sequence, index, max_tokens)
        rows_of_draw = rows_of_draws.pop(sequence.draw_index, 0)  # at its first sequence
        if shared[index] + rows_of_draw > max_tokens:
            rows_of_draw = 0  # no micro-batch takes all of it
        if not sizes or sizes[-1] + max(rows_of_draw, added[index]) > max_tokens:
            starts.append(index)
            sizes.append(shared[index])
        sizes[-1] += added[index]
    ranges = list(pairwise([*starts, len(sequences)]))
    longest_first = sorted(range(len(ranges)), key=lambda number: -sizes[number])
    chosen = [(*ranges[number], 1.0) for number in sorted(longest_first[rank::num_ranks])]
    if fill and len(chosen) * num_ranks < len(ranges):
        chosen.append((*ranges[longest_first[-1]], 0.0))
    return (_pack_range(sequences[a:b], [0, *shared[a + 1 : b]], a, weight, device) for a, b, weight in chosen)


def sharing_order(sequences: Sequence[TrainSequence]) -> list[int]:
    """Indices of the sequences by draw, and those of a draw by their tokens: neighbours have most in common."""
    keys = [(sequence.draw_index, sequence.token_ids.astype(">i8").tobytes()) for sequence in sequences]
    return sorted(range(len(sequences)), key=keys.__getitem__)


def shared_tokens(sequences: Sequence[TrainSequence]) -> list[int]:
    """Tokens with which each sequence begins as the one before it does, its own last token not counted."""
    pairs = pairwise(sequence.token_ids for sequence in sequences)
    return [0, *(num_equal(before, token_ids[:-1]) for before, token_ids in pairs)][: len(sequences)]


def _pack_range(
    chosen: Sequence[TrainSequence], shared: Sequence[int], first: int, weight: float, device: torch.device | str
) -> PackedBatch:
    """The micro-batch of these sequences; `first` is the index of the first one."""
    lengths = [len(sequence.token_ids) for sequence in chosen]
    plan = PackedPlan(lengths, device, shared)
    starts = np.cumsum(lengths) - lengths
    rows = [path.numpy()[sequence.targets - 1] for path, sequence in zip(plan.paths, chosen, strict=True)]
    places = [start + sequence.targets - 1 for start, sequence in zip(starts, chosen, strict=True)]
    numbers = np.arange(first, first + len(chosen))

    def tensor(array: npt.NDArray[np.generic]) -> Tensor:
        return copy_to_device(torch.from_numpy(array), device)

    def joined(field: str) -> Tensor | None:
        arrays = [getattr(sequence, field) for sequence in chosen]
        absent = [array is None for array in arrays]
        assert all(absent) or not any(absent), "either all sequences have these numbers or none"
        return None if absent[0] else tensor(np.concatenate(arrays))

    per_token: dict[str, Any] = {field: joined(field) for field in PER_TOKEN}
    return PackedBatch(
        first_sequence=first,
        weight=weight,
        token_ids=tensor(np.concatenate([sequence.token_ids[n:] for sequence, n in zip(chosen, shared, strict=True)])),
        plan=plan,
        hidden_index=tensor(np.concatenate(rows)),
        places=tensor(np.concatenate(places)),
        target_ids=tensor(np.concatenate([sequence.token_ids[sequence.targets] for sequence in chosen])),
        sequence_index=tensor(np.repeat(numbers, [len(sequence.targets) for sequence in chosen])),
        **per_token,
    )


def _check(sequence: TrainSequence, index: int, max_tokens: int) -> None:
    length = len(sequence.token_ids)
    if length > max_tokens:
        raise ValueError(
            f"sequence {index} has {length} tokens, more than the {max_tokens} of one micro-batch: "
            f"raise train.micro_batch_tokens to at least {length}"
        )
    targets = sequence.targets
    assert targets[0] >= 1, "the first sampled token needs a token before it"
    assert targets[-1] < len(sequence.token_ids), "a target outside the sequence"
    lengths = {len(array) for field in PER_TOKEN if (array := getattr(sequence, field)) is not None}
    assert lengths == {len(targets)}, f"{len(targets)} sampled tokens, but per-token arrays of {lengths}"
