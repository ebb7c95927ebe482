"""Sequences -> micro-batches of whole sequences laid end to end, without padding."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from srtrl.model.attention import copy_to_device
from srtrl.types import TrainSequence

PER_TOKEN = ("advantages", "rollout_logprobs", "old_logprobs", "ref_logprobs", "values", "returns")
"""Fields of a sequence, and of a micro-batch, with one number for each sampled token."""


@dataclass(kw_only=True, slots=True, frozen=True)
class PackedBatch:
    """One micro-batch. Rows of the tensors [R] are the sampled tokens, in the order of the packed tokens [T]."""

    first_sequence: int
    """Index of its first sequence, of those given to `pack`: what orders the micro-batches."""
    weight: float
    """Of its loss: 1, or 0 for what a rank computes only to take as many passes as the others."""
    token_ids: Tensor
    """Prompts and responses, [T] int64."""
    lengths: tuple[int, ...]
    """Tokens of each sequence, prompt included; they sum to T."""
    hidden_index: Tensor
    """Packed position whose next token is the target: the target's own position minus 1, [R] int64."""
    target_ids: Tensor
    """[R] int64."""
    sequence_index: Tensor
    """Index of the row's sequence among those given to `pack` (not: in this micro-batch), [R] int64."""
    advantages: Tensor
    """[R] float32."""
    rollout_logprobs: Tensor
    """[R] float32."""
    old_logprobs: Tensor | None
    """[R] float32; None where the sequences have none."""
    ref_logprobs: Tensor | None
    """[R] float32; None where the sequences have none."""
    values: Tensor | None
    """Of a value model before the update, [R] float32; None where the sequences have none."""
    returns: Tensor | None
    """Targets of the value model, [R] float32; None where the sequences have none."""


def pack(
    sequences: Sequence[TrainSequence],
    max_tokens: int,
    device: torch.device | str,
    *,
    rank: int = 0,
    num_ranks: int = 1,
    fill: bool = False,
) -> Iterator[PackedBatch]:
    """Fill micro-batches of at most `max_tokens` tokens with the sequences, in the given order.

    A sequence that no longer fits opens the next micro-batch. The layout depends on the order and the lengths alone.
    All sequences are checked at once; the tensors of a micro-batch are made when it is asked for, so that the device
    holds no more than the caller does.

    Of several ranks each gets its share of the micro-batches: they are dealt in turn, the one with most tokens first.
    With `fill` all ranks get the same number: one that would have fewer gets the smallest too, with weight zero.

    Raises:
        ValueError: a sequence alone is longer than `max_tokens`.
    """
    starts: list[int] = []  # the first sequence of each micro-batch
    sizes: list[int] = []  # and its tokens
    for index, sequence in enumerate(sequences):
        _check(sequence)
        length = len(sequence.token_ids)
        if length > max_tokens:
            raise ValueError(
                f"sequence {index} has {length} tokens, more than the {max_tokens} of one micro-batch: "
                f"raise train.micro_batch_tokens to at least {length}"
            )
        if not sizes or sizes[-1] + length > max_tokens:
            starts.append(index)
            sizes.append(0)
        sizes[-1] += length
    ranges = list(pairwise([*starts, len(sequences)]))
    longest_first = sorted(range(len(ranges)), key=lambda number: -sizes[number])
    chosen = [(*ranges[number], 1.0) for number in sorted(longest_first[rank::num_ranks])]
    if fill and len(chosen) * num_ranks < len(ranges):
        chosen.append((*ranges[longest_first[-1]], 0.0))
    return (_pack_range(sequences[first:end], first, weight, device) for first, end, weight in chosen)


def _pack_range(chosen: Sequence[TrainSequence], first: int, weight: float, device: torch.device | str) -> PackedBatch:
    """The micro-batch of these sequences; `first` is the index of the first one."""
    token_ids = np.concatenate([sequence.token_ids for sequence in chosen])  # [T]
    lengths = [len(sequence.token_ids) for sequence in chosen]
    ends = np.cumsum(lengths)
    targets = [end - length + sequence.targets for end, length, sequence in zip(ends, lengths, chosen, strict=True)]
    target_index = np.concatenate(targets)  # [R] packed position of each sampled token

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
        token_ids=tensor(token_ids),
        lengths=tuple(lengths),
        hidden_index=tensor(target_index - 1),
        target_ids=tensor(token_ids[target_index]),
        sequence_index=tensor(np.repeat(np.arange(first, first + len(chosen)), [len(indices) for indices in targets])),
        **per_token,
    )


def _check(sequence: TrainSequence) -> None:
    targets = sequence.targets
    assert targets[0] >= 1, "the first sampled token needs a token before it"
    assert targets[-1] < len(sequence.token_ids), "a target outside the sequence"
    lengths = {len(array) for field in PER_TOKEN if (array := getattr(sequence, field)) is not None}
    assert lengths == {len(targets)}, f"{len(targets)} sampled tokens, but per-token arrays of {lengths}"
