"""Log-probs of whole training sequences by the trainer's forward pass, and how far the decoder's are from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from srtrl.algorithms.reductions import k3
from srtrl.model.attention import PackedPlan
from srtrl.model.logprobs import token_logprobs
from srtrl.rollout.packing import PackedBatch, pack
from srtrl.types import TrainSequence

if TYPE_CHECKING:
    from accelerate import Accelerator

    from srtrl.model.transformer import Transformer


class NonFiniteError(RuntimeError):
    """A log-prob, a loss or a gradient is not a finite number; the weights were not changed by it."""


class LogprobDifferenceError(RuntimeError):
    """Decoder and trainer give one token too different log-probs; the policy was not changed."""


def response_logprobs(
    model: Transformer, packed: PackedBatch, accelerator: Accelerator, temperature: float
) -> tuple[Tensor, Tensor]:
    """Forward pass of one micro-batch: log-probs [R] of its response tokens and entropies [R], differentiable."""
    plan = PackedPlan.from_lengths(packed.lengths, packed.token_ids.device)
    with accelerator.autocast():
        hidden = model(packed.token_ids, plan)[packed.hidden_index]  # [R, D]
        return token_logprobs(hidden, model.head_weight, packed.target_ids, temperature=temperature)


def compute_logprobs(
    model: Transformer,
    sequences: Sequence[TrainSequence],
    accelerator: Accelerator,
    *,
    micro_batch_tokens: int,
    temperature: float,
) -> list[npt.NDArray[np.float32]]:
    """Log-probs of the response tokens of each sequence, without gradient: for `ref_logprobs` and `old_logprobs`.

    Returns:
        One array [L - num_prompt_tokens] a sequence, in their order.

    Raises:
        ValueError: a sequence is longer than `micro_batch_tokens`.
    """
    with torch.no_grad():
        parts = [
            response_logprobs(model, packed, accelerator, temperature)[0]
            for packed in pack(sequences, micro_batch_tokens, model.head_weight.device)
        ]
    return split_by_sequence(torch.cat(parts), sequences)


def split_by_sequence(values: Tensor, sequences: Sequence[TrainSequence]) -> list[npt.NDArray[np.float32]]:
    """Cut one number a response token, in packed order, into one array a sequence."""
    ends = np.cumsum([len(sequence.rollout_logprobs) for sequence in sequences])
    assert len(values) == ends[-1]
    return np.split(values.float().cpu().numpy(), ends[:-1])


def logprob_difference(
    sequences: Sequence[TrainSequence],
    trainer_logprobs: Sequence[npt.NDArray[np.float32]],
    *,
    max_difference: float,
    where: str,
) -> dict[str, float]:
    """Compare the decoder's log-probs with those that the trainer computes with the same weights.

    Args:
        sequences: with the decoder's `rollout_logprobs`.
        trainer_logprobs: one array a sequence, as `compute_logprobs` returns them.
        max_difference: largest difference of one token, in nats.
        where: begins the error messages, such as "step 3".

    Returns:
        `logprob_difference/mean` and `/max` of the absolute difference, and `/kl`, the k3 estimate of
        KL(decoder || trainer), all over tokens.

    Raises:
        NonFiniteError: a log-prob of either is not finite; names sequence and token.
        LogprobDifferenceError: `max_difference` is exceeded; names the sequence and token of the largest difference.
    """
    rollout = torch.from_numpy(np.concatenate([sequence.rollout_logprobs for sequence in sequences])).double()
    trainer = torch.from_numpy(np.concatenate(list(trainer_logprobs))).double()
    difference = (rollout - trainer).abs()  # [R]
    worst = int(difference.argmax())  # a NaN counts as largest
    largest = float(difference[worst])
    if not largest <= max_difference:
        found = f"{where}: {_describe_token(sequences, worst)}: log-prob {rollout[worst]:.6g} by the decoder, "
        found += f"{trainer[worst]:.6g} by the trainer; the policy's weights were not changed by this step"
        if not np.isfinite(largest):
            raise NonFiniteError(f"{found}; a log-prob must be a finite number")
        raise LogprobDifferenceError(
            f"{found}; they differ by {largest:.6g}, more than train.max_logprob_difference ({max_difference:g}). "
            "Where both compute in float32 this means a fault of the decoder or the update; where one uses bfloat16 "
            "(model.dtype, decode_dtype, mixed_precision) it may be rounding: compare the logged mean, raise the limit"
        )
    return {
        "logprob_difference/mean": float(difference.mean()),
        "logprob_difference/max": largest,
        "logprob_difference/kl": float(k3(rollout, trainer).mean()),
    }


def _describe_token(sequences: Sequence[TrainSequence], row: int) -> str:
    """Name the response token in row `row` of all response tokens laid end to end."""
    for index, sequence in enumerate(sequences):
        if row < len(sequence.rollout_logprobs):
            token_id = sequence.token_ids[sequence.num_prompt_tokens + row]
            return f"sequence {index} (in order of draw and sample), response token {row} (id {token_id})"
        row -= len(sequence.rollout_logprobs)
    raise AssertionError(f"row {row} is behind the last response token")
