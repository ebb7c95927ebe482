"""Mini-batches: which sequences each optimizer step learns from, and the gradient descent over them.

Policy and critic learn in the same way, each with a loss of its own: `mini_batches` cuts the step's draws, `descend`
takes one optimizer step for each mini-batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from srtrl.model.attention import copy_to_device
from srtrl.rollout.packing import PackedBatch, pack
from srtrl.trainer.optimizer import gradient_holders, set_learning_rate
from srtrl.trainer.sequence_logprobs import NonFiniteError
from srtrl.types import TrainSequence

if TYPE_CHECKING:
    from accelerate import Accelerator

MicroBatchLoss = Callable[[PackedBatch, Tensor], tuple[Tensor, dict[str, Tensor]]]
"""(micro-batch, response lengths [B] of its mini-batch) -> its share of the mini-batch's loss, with gradient, and
metrics of one number a response token, [R]."""


@dataclass(kw_only=True, slots=True, frozen=True)
class MiniBatch:
    """The sequences of one optimizer step."""

    epoch: int
    number: int
    """Within its epoch, from 0."""
    sequences: list[TrainSequence]
    """In data order; never empty."""


def mini_batches(
    sequences: Sequence[TrainSequence], *, size: int, num_epochs: int, seed: int, step: int
) -> Iterator[MiniBatch]:
    """Cut a step's draws into mini-batches of `size` whole draws, epoch by epoch.

    Sequences with the same `draw_index` are one draw, however many they are; draws that nothing is left of (filters,
    overlong filtering) take no place, so that the last mini-batch is smaller or mini-batches are fewer, and none is
    empty. The first epoch takes the draws in data order, later ones in an order drawn from (seed, step, epoch). Inside
    a mini-batch the order is always that of the data, so that packing does not depend on the draw.

    Args:
        sequences: sorted by (draw, sample).
        size: draws of one optimizer step, such as `train.mini_batch_prompts`.
        num_epochs: passes over all sequences.
        seed: the recipe's.
        step: the training step.
    """
    draws: dict[int, list[TrainSequence]] = {}
    for sequence in sequences:
        draws.setdefault(sequence.draw_index, []).append(sequence)
    groups = list(draws.values())
    for epoch in range(num_epochs):
        order = np.arange(len(groups))
        if epoch > 0:
            order = np.random.default_rng((seed, step, epoch)).permutation(len(groups))
        for number, start in enumerate(range(0, len(groups), size)):
            chosen = np.sort(order[start : start + size])
            batch = [sequence for index in chosen for sequence in groups[index]]
            yield MiniBatch(epoch=epoch, number=number, sequences=batch)


class TokenMeans:
    """Means over all tokens of a step, whatever the micro-batches; sums are float64 and stay on the device."""

    def __init__(self, source: str) -> None:
        """`source` is the recipe's option whose function gives the values, for errors."""
        self._source = source
        self._sums: dict[str, Tensor] | None = None  # None before the first micro-batch
        self._num_tokens = 0

    def add(self, values: Mapping[str, Tensor]) -> None:
        """Add the tokens of one micro-batch; each value is [R].

        Raises:
            ValueError: other names than in the micro-batch before; a mean over some tokens would pass for one of all.
        """
        if self._sums is not None and (unequal := sorted(self._sums.keys() ^ values.keys())):
            raise ValueError(
                f"{self._source} must return the same metrics for every micro-batch, and returned `{unequal[0]}` for "
                "some only; where it has no meaning, return zeros"
            )
        sums = {name: value.detach().sum(dtype=torch.float64) for name, value in values.items()}
        self._sums = sums if self._sums is None else {name: self._sums[name] + sums[name] for name in sums}
        if values:
            self._num_tokens += len(next(iter(values.values())))

    def result(self) -> dict[str, float]:
        """The mean of each value."""
        return {name: total.item() / self._num_tokens for name, total in (self._sums or {}).items()}


def accumulate_gradient(
    sequences: Sequence[TrainSequence],
    micro_batch_loss: MicroBatchLoss,
    accelerator: Accelerator,
    *,
    micro_batch_tokens: int,
    device: torch.device,
    means: TokenMeans,
) -> Tensor:
    """Add the gradient of one mini-batch's loss, micro-batch by micro-batch; returns that loss, a float64 scalar."""
    lengths = [len(sequence.token_ids) - sequence.num_prompt_tokens for sequence in sequences]
    sequence_lengths = copy_to_device(torch.tensor(lengths), device)  # [B]
    total = torch.zeros((), dtype=torch.float64, device=device)
    for packed in pack(sequences, micro_batch_tokens, device):
        loss, metrics = micro_batch_loss(packed, sequence_lengths)
        accelerator.backward(loss)
        means.add(metrics)
        total += loss.detach()
    return total


def descend(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    accelerator: Accelerator,
    batches: Iterable[MiniBatch],
    micro_batch_loss: MicroBatchLoss,
    *,
    micro_batch_tokens: int,
    max_grad_norm: float,
    learning_rate: Callable[[int], float],
    loss_option: str,
    where: str,
    check: Callable[[MiniBatch, str], None] | None = None,
) -> dict[str, float]:
    """One optimizer step for each mini-batch: the gradient of its whole loss, its norm clipped.

    Args:
        model: its parameters are those of `optimizer`; all on one device. Gradients are freed at the end.
        optimizer: its learning rate is set before each step.
        accelerator: gives backward and clipping.
        batches: at least one.
        micro_batch_loss: called once for each micro-batch, with the model's weights of that moment.
        micro_batch_tokens: token budget of one forward and backward pass; the gradient does not depend on it.
        max_grad_norm: the gradient's norm is clipped to this.
        learning_rate: of the n-th optimizer step of this call, from 0.
        loss_option: the recipe's option whose function `micro_batch_loss` calls, for errors.
        where: begins error messages, such as "step 3".
        check: called with each mini-batch and its place ("step 3, epoch 1, mini-batch 2") between gradient and
            optimizer step; raises to stop there.

    Returns:
        `loss` and `grad_norm` (before clipping): means over optimizer steps. The micro-batches' metrics: means over all
        response tokens of all mini-batches. `learning_rate`: that of the last optimizer step.

    Raises:
        NonFiniteError: a loss or a gradient norm is not finite; raised before that optimizer step.
        ValueError: a sequence exceeds `micro_batch_tokens`, or not all micro-batches have the same metrics.
    """
    assert accelerator.gradient_accumulation_steps == 1, "accelerate would divide the loss by these steps"
    device = next(model.parameters()).device
    means = TokenMeans(loss_option)
    losses: list[float] = []
    grad_norms: list[float] = []
    rate = math.nan
    for number, batch in enumerate(batches):
        place = f"{where}, epoch {batch.epoch + 1}, mini-batch {batch.number + 1}"
        optimizer.zero_grad(set_to_none=True)
        loss = accumulate_gradient(
            batch.sequences,
            micro_batch_loss,
            accelerator,
            micro_batch_tokens=micro_batch_tokens,
            device=device,
            means=means,
        )
        if check is not None:
            check(batch, place)
        losses.append(_finite(loss, f"{place}: the loss"))
        norm = accelerator.clip_grad_norm_(gradient_holders(model, optimizer), max_grad_norm)
        grad_norms.append(_finite(norm, f"{place}: the gradient norm"))
        rate = learning_rate(number)
        set_learning_rate(optimizer, rate)
        optimizer.step()
    assert losses, "no mini-batch: the caller skips the update where there is nothing to learn from"
    optimizer.zero_grad(set_to_none=True)  # frees the gradients' memory for the decoder
    return {
        "loss": float(np.mean(losses)),
        **means.result(),
        "grad_norm": float(np.mean(grad_norms)),
        "learning_rate": rate,
    }


def _finite(value: Tensor, what: str) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise NonFiniteError(f"{what} is {number}; the weights were not changed by this mini-batch")
    return number
