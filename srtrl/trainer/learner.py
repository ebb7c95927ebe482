"""A model that learns from the rollouts of a training step: mini-batches, passes, gradients, optimizer steps.

The policy is a `Learner`, and so is any model beside it, with a loss of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Protocol, cast

import numpy as np
import torch
from torch import Tensor, nn

from srtrl.model.attention import copy_to_device
from srtrl.model.transformer import Transformer
from srtrl.recipe.schema import UpdatePlan
from srtrl.rollout.packing import PackedBatch, sharing_order
from srtrl.run.checkpoint import OPTIMIZER
from srtrl.trainer.optimizer import MasterAdamW, learning_rate_at
from srtrl.trainer.passes import NonFiniteError, UpdateContext, shared_passes, sum_gradients
from srtrl.types import TrainSequence

LOSS, ROWS = "loss", "rows"
"""Names of the loss and of the computed rows among the sums of a micro-batch."""


class PassObserver(Protocol):
    """Something that learns from the policy's passes, beside it."""

    folder: str
    """Folder of its tensors in a checkpoint."""

    def see(self, hidden: Tensor, packed: PackedBatch) -> None:
        """A forward pass: the final hidden states [R, D] of the response tokens of a micro-batch."""

    def after_mini_batch(self, place: str) -> None:
        """The passes of a mini-batch are done, on all ranks; `place` names it in errors."""

    def end_update(self, sequences: Sequence[TrainSequence], place: str) -> dict[str, float]:
        """The update is done; its metrics. Raises NonFiniteError."""

    def tensors(self) -> dict[str, Tensor]:
        """All that a checkpoint holds of it: its own memory, to be read and written."""

    def load(self, checkpoint: Path) -> None:
        """Take back what a checkpoint holds, if it has that."""


class Learner:
    """A model that learns. A subclass defines `loss`."""

    stage = "update"
    """Names its time, `time/<stage>`."""
    folder = OPTIMIZER
    """Folder of the optimizer's state in a checkpoint."""
    title = ""
    """Begins error messages."""
    prefix = ""
    """Begins the names of its metrics."""
    loss_name = ""
    """The option of its loss, and the function, as error messages name them."""

    def __init__(self, model: nn.Module, optimizer: MasterAdamW, updates: UpdatePlan) -> None:
        """A model that has learned nothing yet in this process.

        Args:
            model: Its weights learn.
            optimizer: Of the model's parameters alone.
            updates: Mini-batches, epochs, learning rates and gradient norm.
        """
        self.model = model
        self.optimizer = optimizer
        self.updates = updates
        self.num_rows = 0
        """Computed by the passes of the last `learn`, of all ranks: common beginnings of a micro-batch count once."""

    def loss(self, packed: PackedBatch, sequence_lengths: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """A micro-batch's share of the loss of its mini-batch, with gradient, and metrics with one number per token.

        Args:
            packed: The micro-batch; its `sequence_index` are rows of `sequence_lengths`.
            sequence_lengths: Response lengths of the whole mini-batch, [B].

        Returns:
            A scalar, and metrics [R] by name. A metric that a micro-batch lacks counts as zeros there.
        """
        raise NotImplementedError

    def before_update(self, sequences: Sequence[TrainSequence], context: UpdateContext) -> None:
        """Called with all sequences of a training step before its first mini-batch; raises to stop there."""

    def before_step(self, sequences: Sequence[TrainSequence], context: UpdateContext, place: str) -> None:
        """Called between the gradient of these sequences and the optimizer step; raises to stop there."""

    def after_update(self, sequences: Sequence[TrainSequence], context: UpdateContext) -> dict[str, float]:
        """Further metrics, after the last optimizer step of a training step."""
        return {}

    def needs_pass(self, sequence: TrainSequence) -> bool:
        """Whether a forward and backward pass over a sequence can give a gradient."""
        return True

    def learn(self, sequences: Sequence[TrainSequence], context: UpdateContext) -> dict[str, float]:
        """One optimizer step for each mini-batch: the gradient of its whole loss, its norm clipped.

        Each rank computes its share of the micro-batches; gradients, losses and metrics are then summed over the ranks,
        so that all take the same step. DistributedDataParallel would do the first alone, but average, and hang where
        ranks have different numbers of micro-batches; and decoder and update share the raw module.

        Learning rate and order depend on the step alone, so that nothing of the update is saved for resume but the
        optimizer's state.

        Args:
            sequences: At least one, sorted by (draw, sample). Those that need no pass count in the mini-batch's lengths
                and are not computed, but for one if there is no other: the optimizer's moments go on.
            context: Its recipe has the seed, and `train.micro_batch_tokens`, the token budget of one forward and
                backward pass; the gradient does not depend on it.

        Returns:
            `loss` and `grad_norm` (before clipping): means over optimizer steps. The micro-batches' metrics: means over
            all response tokens of all mini-batches; those of sequences that need no pass count as zeros.
            `learning_rate`: that of the last optimizer step. Those of `after_update`. All of them begin with `prefix`.

        Raises:
            NonFiniteError: a loss or a gradient norm is not finite; raised before that optimizer step.
            ValueError: a sequence exceeds the micro-batch.
        """
        assert sequences, "no sequences: the caller skips the update where there is nothing to learn from"
        sequences = [sequences[index] for index in sharing_order(sequences)]
        self.before_update(sequences, context)
        self.num_rows = 0
        losses, grad_norms, learning_rate = [], [], math.nan
        sums: list[dict[str, Tensor]] = []  # of the metrics of each micro-batch, float64
        num_tokens = 0
        named = mini_batches(sequences, self.updates, seed=context.recipe.seed, step=context.step)
        with self.resharded():
            for number, (name, mini_batch) in enumerate(named):
                place = f"{self.title}step {context.step}, {name}"
                skipped = [sequence for sequence in mini_batch if not self.needs_pass(sequence)]
                computed = [sequence for sequence in mini_batch if self.needs_pass(sequence)] or [skipped.pop(0)]
                lengths = torch.tensor([len(sequence.rollout_logprobs) for sequence in (*computed, *skipped)])  # [B]
                sequence_lengths = copy_to_device(lengths, next(self.model.parameters()).device)
                self.optimizer.zero_grad(set_to_none=True)
                with shared_passes(self.model, computed, context, place) as passes:
                    for packed in passes.micro_batches:
                        share, metrics = self.loss(packed, sequence_lengths)
                        (packed.weight * share).backward()  # type: ignore[no-untyped-call]
                        totals = {key: values.detach().sum(dtype=torch.float64) for key, values in metrics.items()}
                        counted = {LOSS: share.detach().double(), ROWS: torch.tensor(len(packed.token_ids))}
                        passes.results[packed.first_sequence] = counted | totals
                loss = torch.stack([part.pop(LOSS) for part in passes.all_results]).sum()
                self.num_rows += sum(int(part.pop(ROWS)) for part in passes.all_results)
                sums += passes.all_results
                num_tokens += int(lengths.sum())
                self.before_step(computed, context, place)
                losses.append(_finite(loss, f"{place}: the loss ({self.loss_name})"))
                learning_rate = learning_rate_at(self.updates, context.step, number)
                grad_norms.append(self._step(learning_rate, place))
        means = {"loss": float(np.mean(losses)), **token_means(sums, num_tokens)}
        means |= {"grad_norm": float(np.mean(grad_norms)), "learning_rate": learning_rate}
        means |= self.after_update(sequences, context)
        return {f"{self.prefix}{name}": value for name, value in means.items()}

    def _step(self, learning_rate: float, place: str) -> float:
        """Sum the gradients over the ranks, clip their norm, and move the weights; returns the norm."""
        holders = self.optimizer.holders(self.model)
        sum_gradients(holders)
        clipped = torch.nn.utils.clip_grad_norm_(holders, self.updates.max_grad_norm)
        norm = _finite(clipped, f"{place}: the gradient norm")
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)  # frees the gradients' memory, for the decoder too
        return norm

    def resharded(self) -> AbstractContextManager[None]:
        """Around the passes of an update: inside the `with` block a sharded model is in parts."""
        return nullcontext()

    @property
    def dtype(self) -> torch.dtype:
        """Type of the model's passes."""
        return cast(Transformer, self.model).dtype

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Tensors that the ranks of a run write into a checkpoint together, by the name of their folder."""
        return {self.folder: self.optimizer.tensors(self.dtype)}

    def whole(self) -> AbstractContextManager[None]:
        """Entered on all ranks before `save`: the model is whole inside the `with` block."""
        return nullcontext()

    def save(self, folder: Path) -> None:
        """Write what a checkpoint holds beside `tensors`."""
        self.optimizer.save(folder)

    def load(self, folder: Path) -> None:
        """Take back the optimizer's state, and the weights if it has their masters."""
        self.optimizer.load(self.dtype, folder, self.folder)


def mini_batches(
    sequences: Sequence[TrainSequence], updates: UpdatePlan, *, seed: int, step: int
) -> Iterator[tuple[str, list[TrainSequence]]]:
    """Cut a step's draws into mini-batches of whole draws, epoch by epoch.

    Sequences with the same `draw_index` are one draw. Draws of which nothing is left (filters, overlong filtering) take
    no place, so that the last mini-batch is smaller or mini-batches are fewer, and none is empty. The first epoch takes
    the draws in data order, later ones in an order drawn from (seed, step, epoch). Inside a mini-batch the order is
    always that of the data, so that packing does not depend on the draw.

    Args:
        sequences: sorted by (draw, sample).
        updates: Its `mini_batch_prompts` is the number of draws of a mini-batch, `num_epochs` of passes over all.
        seed: the recipe's.
        step: the training step.

    Yields:
        The name of a mini-batch ("epoch 1, mini-batch 2") and its sequences.
    """
    draws: dict[int, list[TrainSequence]] = {}
    for sequence in sequences:
        draws.setdefault(sequence.draw_index, []).append(sequence)
    groups, size = list(draws.values()), updates.mini_batch_prompts
    for epoch in range(updates.num_epochs):
        order = np.arange(len(groups))
        if epoch > 0:
            order = np.random.default_rng((seed, step, epoch)).permutation(len(groups))
        for number, start in enumerate(range(0, len(groups), size), start=1):
            chosen = np.sort(order[start : start + size])
            yield (
                f"epoch {epoch + 1}, mini-batch {number}",
                [sequence for index in chosen for sequence in groups[index]],
            )


def token_means(sums: Sequence[Mapping[str, Tensor]], num_tokens: int) -> dict[str, float]:
    """The mean of each metric over the tokens, from its sums over micro-batches; a missing one is 0."""
    names = dict.fromkeys(name for part in sums for name in part)
    return {name: float(sum(part[name] for part in sums if name in part)) / num_tokens for name in names}


# --- Functions that a recipe names ------------------------------------------------------------------------------------


def is_user_defined(name: str) -> bool:
    """Whether a name in a recipe is `package.module:function`."""
    return ":" in name


def loss_metrics(name: str, logged: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The metrics that the loss function `name` returns: those of a user's own under `loss/`, so that none collides."""
    prefix = "loss/" if is_user_defined(name) else ""
    return {f"{prefix}{metric}": values for metric, values in logged.items()}


def _finite(value: Tensor, what: str) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise NonFiniteError(f"{what} is {number}; the weights were not changed by this mini-batch")
    return number
