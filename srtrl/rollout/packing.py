"""Sequences -> micro-batches of whole sequences laid end to end, without padding."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from srtrl.model.attention import copy_to_device
from srtrl.types import TrainSequence


@dataclass(kw_only=True, slots=True, frozen=True)
class PackedBatch:
    """One micro-batch. Rows of the tensors [R] are the response tokens, in the order of the packed tokens [T]."""

    token_ids: Tensor
    """Prompts and responses, [T] int64."""
    lengths: tuple[int, ...]
    """Tokens of each sequence, prompt included; they sum to T."""
    hidden_index: Tensor
    """Packed position whose next token is the target: the target's own position minus 1, [R] int64."""
    target_ids: Tensor
    """[R] int64."""
    sequence_index: Tensor
    """Which of the sequences given to `pack` (not: of this micro-batch), [R] int64."""
    advantages: Tensor
    """[R] float32."""
    rollout_logprobs: Tensor
    """[R] float32."""
    old_logprobs: Tensor | None
    """[R] float32; None where the sequences have none."""
    ref_logprobs: Tensor | None
    """[R] float32; None where the sequences have none."""
    values: Tensor | None
    """By the critic before the update, [R] float32; None where the sequences have none."""
    returns: Tensor | None
    """What the critic shall say, [R] float32; None where the sequences have none."""


def pack(sequences: Sequence[TrainSequence], max_tokens: int, device: torch.device | str) -> Iterator[PackedBatch]:
    """Fill micro-batches of at most `max_tokens` tokens with the sequences, in the given order.

    A sequence that no longer fits opens the next micro-batch. The layout depends on the order and the lengths alone.
    All sequences are checked at once; the tensors of a micro-batch are made when it is asked for, so that the device
    holds no more than the caller does.

    Raises:
        ValueError: a sequence alone is longer than `max_tokens`.
    """
    ranges: list[tuple[int, int]] = []  # first sequence of a micro-batch, and the first after it
    first, num_tokens = 0, 0
    for index, sequence in enumerate(sequences):
        _check(sequence)
        length = len(sequence.token_ids)
        if length > max_tokens:
            raise ValueError(
                f"sequence {index} has {length} tokens, more than the {max_tokens} of one micro-batch: "
                f"raise train.micro_batch_tokens to at least {length}"
            )
        if num_tokens + length > max_tokens:
            ranges.append((first, index))
            first, num_tokens = index, 0
        num_tokens += length
    if sequences:
        ranges.append((first, len(sequences)))
    return (_pack_range(sequences, first, last, device) for first, last in ranges)


def _pack_range(sequences: Sequence[TrainSequence], first: int, last: int, device: torch.device | str) -> PackedBatch:
    """The micro-batch of sequences `first` to `last` - 1."""
    chosen = sequences[first:last]
    lengths = np.array([len(sequence.token_ids) for sequence in chosen])  # [B]
    num_prompt_tokens = np.array([sequence.num_prompt_tokens for sequence in chosen])  # [B]
    num_response_tokens = lengths - num_prompt_tokens  # [B]
    starts = np.cumsum(lengths) - lengths  # [B] packed position of each first token
    token_ids = np.concatenate([sequence.token_ids for sequence in chosen])  # [T]
    within = _count_up(num_response_tokens)  # [R] 0, 1, ... within each response
    target_index = np.repeat(starts + num_prompt_tokens, num_response_tokens) + within  # [R]

    def tensor(array: npt.NDArray[np.generic]) -> Tensor:
        return copy_to_device(torch.from_numpy(array), device)

    def optional(field: Callable[[TrainSequence], npt.NDArray[np.float32] | None]) -> Tensor | None:
        arrays = [array for array in map(field, chosen) if array is not None]
        assert len(arrays) in (0, len(chosen)), "either all sequences have these numbers or none"
        return tensor(np.concatenate(arrays)) if arrays else None

    return PackedBatch(
        token_ids=tensor(token_ids),
        lengths=tuple(lengths.tolist()),
        hidden_index=tensor(target_index - 1),
        target_ids=tensor(token_ids[target_index]),
        sequence_index=tensor(np.repeat(np.arange(first, last), num_response_tokens)),
        advantages=tensor(np.concatenate([sequence.advantages for sequence in chosen])),
        rollout_logprobs=tensor(np.concatenate([sequence.rollout_logprobs for sequence in chosen])),
        old_logprobs=optional(lambda sequence: sequence.old_logprobs),
        ref_logprobs=optional(lambda sequence: sequence.ref_logprobs),
        values=optional(lambda sequence: sequence.values),
        returns=optional(lambda sequence: sequence.returns),
    )


def _count_up(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """0, 1, ..., counts[0] - 1, then 0, 1, ..., counts[1] - 1, and so on: [sum of counts]."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)


def _check(sequence: TrainSequence) -> None:
    num_response_tokens = len(sequence.token_ids) - sequence.num_prompt_tokens
    assert sequence.num_prompt_tokens >= 1, "the first response token needs a token before it"
    assert num_response_tokens >= 1, "a sequence without response tokens"
    arrays = (
        sequence.advantages,
        sequence.rollout_logprobs,
        sequence.old_logprobs,
        sequence.ref_logprobs,
        sequence.values,
        sequence.returns,
    )
    lengths = {len(array) for array in arrays if array is not None}
    assert lengths == {num_response_tokens}, f"{num_response_tokens} response tokens, but per-token arrays of {lengths}"
