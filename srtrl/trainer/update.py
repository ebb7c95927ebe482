"""The policy update of one training step: rollouts in, changed weights and metrics out.

Policy and critic learn in the same way, each with an `Objective` of its own: `run_optimizer_steps` cuts the step's
draws into mini-batches and takes one optimizer step for each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from srtrl.model.attention import copy_to_device
from srtrl.recipe.schema import UpdatePlan
from srtrl.trainer.objective import (
    Objective,
    PolicyObjective,
    logprob_difference,
)
from srtrl.trainer.optimizer import MasterAdamW, learning_rate_at
from srtrl.trainer.passes import NonFiniteError, UpdateContext, shared_passes, sum_gradients
from srtrl.types import TrainSequence

LOSS = "loss"
"""Name of the loss among the sums of a micro-batch."""


def update_policy(
    objective: PolicyObjective,
    optimizer: MasterAdamW,
    sequences: Sequence[TrainSequence],
    context: UpdateContext,
) -> dict[str, float]:
    """Learn from the rollouts of a training step; changes the weights of `objective.model`.

    Each mini-batch is one optimizer step (see `run_optimizer_steps`). Learning rate and order depend on the step alone,
    so that nothing of the update is saved for resume but the optimizer's state.

    The decoder's log-probs are compared with the trainer's while both have the same weights: in the forward passes of
    the first mini-batch (`algorithm.old_logprobs: rollout`), or for all sequences as `recompute` has computed them.

    Args:
        objective: Its model's parameters are those of `optimizer`.
        optimizer: See `srtrl.trainer.optimizer`.
        sequences: Those of each kept draw, whole or as overlong filtering left it, sorted by (draw, sample); at least
            one. With a KL coefficient above 0 they have `ref_logprobs`, with `old_logprobs: recompute` also
            `old_logprobs`, by the model.
        context: Its recipe has the sections `algorithm`, `train` and `rollout`, and the seed.

    Returns:
        `loss` and `grad_norm` (before clipping): means over optimizer steps; `learning_rate`: the last one's.
        `entropy`, `kl/ref` and the metrics of loss function and importance weights: means over all response tokens of
        all mini-batches, without the samples that need no pass. `logprob_difference/mean`, `/max`, `/kl`;
        `tokens/update`, prompts included, in all epochs. `draft_head/loss` and `draft_head/grad_norm`.

    Raises:
        NonFiniteError: a log-prob, a loss or a gradient norm is not finite; raised before that optimizer step. Or the
            draft head's loss is not; raised after the last one.
        LogprobDifferenceError: `train.max_logprob_difference` is exceeded; raised before any weight changes.
        ValueError: a sequence exceeds the micro-batch.
    """
    recipe = context.recipe
    objective.difference = {}
    if recipe.algorithm.old_logprobs == "recompute":
        old_logprobs = [sequence.old_logprobs for sequence in sequences if sequence.old_logprobs is not None]
        assert len(old_logprobs) == len(sequences), "recomputed before credit assignment"
        limit, where = recipe.train.max_logprob_difference, f"step {context.step}"
        objective.difference = logprob_difference(sequences, np.concatenate(old_logprobs), limit=limit, where=where)
    metrics = run_optimizer_steps(objective, optimizer, sequences, context, recipe.policy_updates)
    if objective.draft_head is not None:
        learned = objective.draft_head.end_update(sequences)
        if not np.isfinite(learned["draft_head/loss"]):
            raise NonFiniteError(
                f"step {context.step}: the loss of the draft head is {learned['draft_head/loss']}: lower "
                "rollout.draft_head.learning_rate, or continue without a head (--resume rollout.draft_head=null)"
            )
        metrics |= learned
    num_tokens = sum(len(sequence.token_ids) for sequence in sequences if objective.needs_pass(sequence))
    return {**metrics, **objective.difference, "tokens/update": recipe.train.num_epochs * num_tokens}


def run_optimizer_steps(
    objective: Objective,
    optimizer: MasterAdamW,
    sequences: Sequence[TrainSequence],
    context: UpdateContext,
    updates: UpdatePlan,
) -> dict[str, float]:
    """One optimizer step for each mini-batch: the gradient of its whole loss, its norm clipped.

    Each rank computes its share of the micro-batches; gradients, losses and metrics are then summed over the ranks, so
    that all take the same step. DistributedDataParallel would do the first alone, but average, and hang where ranks
    have different numbers of micro-batches; and decoder and update share the raw module.

    Args:
        objective: The parameters of its model are those of `optimizer`, all on one device. Gradients are freed at the
            end.
        optimizer: Its learning rate is set before each step.
        sequences: At least one, sorted by (draw, sample). Those that need no pass count in the mini-batch's lengths and
            are not computed, but for one where there is no other: the optimizer's moments go on.
        context: Its recipe has the seed, and `train.micro_batch_tokens`, the token budget of one forward and backward
            pass; the gradient does not depend on it.
        updates: Mini-batches, epochs, learning rates and gradient norm of this model.

    Returns:
        `loss` and `grad_norm` (before clipping): means over optimizer steps. The micro-batches' metrics: means over all
        response tokens of all mini-batches. `learning_rate`: that of the last optimizer step.

    Raises:
        NonFiniteError: a loss or a gradient norm is not finite; raised before that optimizer step.
        ValueError: a sequence exceeds the micro-batch.
    """
    assert sequences, "no sequences: the caller skips the update where there is nothing to learn from"
    model = objective.model
    losses, grad_norms, learning_rate = [], [], math.nan
    sums: list[dict[str, Tensor]] = []  # of the metrics of each micro-batch, float64
    num_tokens = 0
    named = mini_batches(sequences, updates, seed=context.recipe.seed, step=context.step)
    for number, (name, mini_batch) in enumerate(named):
        place = f"{objective.title}step {context.step}, {name}"
        skipped = [sequence for sequence in mini_batch if not objective.needs_pass(sequence)]
        computed = [sequence for sequence in mini_batch if objective.needs_pass(sequence)] or [skipped.pop(0)]
        lengths = [len(sequence.rollout_logprobs) for sequence in (*computed, *skipped)]
        optimizer.zero_grad(set_to_none=True)
        shares = add_gradients(objective, computed, lengths, context, place)
        loss = torch.stack([share.pop(LOSS) for share in shares]).sum()
        sums += shares
        num_tokens += sum(lengths[: len(computed)])
        objective.before_step(computed, context, place)
        losses.append(_finite(loss, f"{place}: the loss ({objective.loss_name})"))
        holders = optimizer.holders(model)
        sum_gradients(model, holders, context.ranks)
        norm = torch.nn.utils.clip_grad_norm_(holders, updates.max_grad_norm)
        grad_norms.append(_finite(norm, f"{place}: the gradient norm"))
        learning_rate = learning_rate_at(updates, context.step, number)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)  # frees the gradients' memory for the decoder
    means = {"loss": float(np.mean(losses)), **token_means(sums, num_tokens), "grad_norm": float(np.mean(grad_norms))}
    return {**means, "learning_rate": learning_rate}


def token_means(sums: Sequence[Mapping[str, Tensor]], num_tokens: int) -> dict[str, float]:
    """The mean of each metric over the tokens, from its sums over micro-batches; a missing one is 0."""
    names = dict.fromkeys(name for part in sums for name in part)
    return {name: float(sum(part[name] for part in sums if name in part)) / num_tokens for name in names}


def add_gradients(
    objective: Objective, computed: Sequence[TrainSequence], lengths: Sequence[int], context: UpdateContext, place: str
) -> list[dict[str, Tensor]]:
    """Forward and backward passes of a mini-batch: this rank's micro-batches add their gradients to the model's.

    Args:
        objective: The loss.
        computed: The sequences of the mini-batch that are computed.
        lengths: Response lengths of all its sequences, [B], those of `computed` first.
        context: See `shared_passes`.
        place: Names the mini-batch in errors.

    Returns:
        For each micro-batch of all ranks, its share of the loss as `LOSS`, and the sums of its metrics, float64.
    """
    device = next(objective.model.parameters()).device
    sequence_lengths = copy_to_device(torch.tensor(lengths), device)  # [B]
    with shared_passes(objective.model, computed, context, place) as passes:
        for packed in passes.micro_batches:
            share, metrics = objective.micro_batch_loss(packed, sequence_lengths)
            (packed.weight * share).backward()  # type: ignore[no-untyped-call]
            sums = {name: values.detach().sum(dtype=torch.float64) for name, values in metrics.items()}
            passes.results[packed.first_sequence] = {LOSS: share.detach().double(), **sums}
    return passes.all_results


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


def _finite(value: Tensor, what: str) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise NonFiniteError(f"{what} is {number}; the weights were not changed by this mini-batch")
    return number
