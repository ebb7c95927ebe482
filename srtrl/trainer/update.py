"""The policy update of one training step: rollouts in, changed weights and metrics out.

Policy and critic learn in the same way, each with a loss of its own: `run_optimizer_steps` cuts the step's draws into
mini-batches and takes one optimizer step for each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from srtrl.algorithms.reductions import adapted_coefficient, k3
from srtrl.model.attention import PackedPlan, copy_to_device
from srtrl.model.logprobs import token_logprobs
from srtrl.ranks.processes import ONE_RANK, Ranks
from srtrl.recipe.schema import Recipe, TrainSection, UpdatePlan
from srtrl.rollout.packing import PackedBatch
from srtrl.trainer.objective import Objective
from srtrl.trainer.on_ranks import by_sequence, on_ranks, sum_gradients
from srtrl.trainer.optimizer import gradient_holders, learning_rate_at
from srtrl.types import TrainSequence

if TYPE_CHECKING:
    from accelerate import Accelerator

    from srtrl.model.transformer import Transformer

MicroBatchLoss = Callable[[PackedBatch, Tensor], tuple[Tensor, dict[str, Tensor]]]
"""(micro-batch, response lengths [B] of its mini-batch) -> its share of the mini-batch's loss, with gradient, and
metrics of one number for each response token, [R]."""


MIN_COMPARED_TOKENS = 64
"""With fewer tokens, one that bfloat16 rounds badly would move the mean of the log-prob differences to its limit."""


class NonFiniteError(RuntimeError):
    """A log-prob, a loss or a gradient is not a finite number; the weights were not changed by it."""


class LogprobDifferenceError(RuntimeError):
    """The log-probs of decoder and trainer differ too much; the policy was not changed."""


class UpdateMemoryError(RuntimeError):
    """The device has too little memory for a stage of the update; the message says what helps."""


def update_policy(
    policy: Transformer,
    optimizer: torch.optim.Optimizer,
    accelerator: Accelerator,
    sequences: Sequence[TrainSequence],
    *,
    recipe: Recipe,
    step: int,
    kl_coefficient: float,
    ranks: Ranks = ONE_RANK,
) -> dict[str, float]:
    """Learn from the rollouts of training step `step` (the first is 1); changes the weights of `policy`.

    Each mini-batch is one optimizer step (see `run_optimizer_steps`). Learning rate and order depend on the step alone,
    so that nothing of the update is saved for resume but the optimizer's state.

    The decoder's log-probs are compared with the trainer's while both have the same weights: in the forward passes of
    the first mini-batch (`algorithm.old_logprobs: rollout`), or for all sequences as `recompute` has computed them.

    Args:
        policy: its parameters are those of `optimizer`.
        optimizer: see `srtrl.trainer.optimizer`.
        accelerator: gives autocast, backward and clipping.
        sequences: those of each kept draw, whole or what overlong filtering left of it, sorted by (draw, sample); at
            least one. With a KL coefficient above 0 they have `ref_logprobs`, with `old_logprobs: recompute` also
            `old_logprobs`, by `policy`.
        recipe: the sections `algorithm`, `train`, `rollout` and the seed.
        step: names the step in errors and places it on the learning rate's schedule.
        kl_coefficient: the present one; see `next_kl_coefficient`.
        ranks: those that share the work; all call this with the same arguments, and all get the same.

    Returns:
        `loss` and `grad_norm` (before clipping): means over optimizer steps; `learning_rate`: the last one's.
        `entropy`, `kl/ref` and what loss function and importance weights log: means over all response tokens of all
        mini-batches, without the samples that `needs_pass` skips. `logprob_difference/mean`, `/max`, `/kl`.

    Raises:
        NonFiniteError: a log-prob, a loss or a gradient norm is not finite; raised before that optimizer step.
        LogprobDifferenceError: `train.max_logprob_difference` or `train.max_logprob_kl` is exceeded; raised before any
            weight changes.
        ValueError: a function that the recipe names returns the wrong shape, or a sequence exceeds the micro-batch.
    """
    temperature = recipe.rollout.temperature
    objective = Objective(recipe, kl_coefficient=kl_coefficient)
    compare = partial(logprob_difference, limits=recipe.train)
    difference: dict[str, float] = {}  # empty until the log-probs are compared
    first_logprobs: dict[int, Tensor] = {}  # of this rank's share of the first mini-batch, until then
    if recipe.algorithm.old_logprobs == "rollout":
        sequences = [replace(one, old_logprobs=one.rollout_logprobs) for one in sequences]
    else:
        old_logprobs = [one.old_logprobs for one in sequences if one.old_logprobs is not None]
        assert len(old_logprobs) == len(sequences), "recomputed before credit assignment"
        difference |= compare(sequences, np.concatenate(old_logprobs), where=f"step {step}")

    def micro_batch_loss(packed: PackedBatch, sequence_lengths: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        logprobs, entropy = response_logprobs(policy, packed, accelerator, temperature)  # [R]
        if not difference:
            first_logprobs[packed.first_sequence] = logprobs.detach()
        return objective.micro_batch_loss(logprobs, entropy, packed, sequence_lengths)

    def compare_first(mini_batch: Sequence[TrainSequence], where: str) -> None:
        if not difference:
            own = {first: logprobs.float().cpu().numpy() for first, logprobs in first_logprobs.items()}
            found = ranks.join(own, f"the log-probs of {where}")
            difference.update(compare(mini_batch, np.concatenate(found), where=where))

    metrics = run_optimizer_steps(
        policy,
        optimizer,
        accelerator,
        sequences,
        micro_batch_loss,
        updates=recipe.policy_updates,
        recipe=recipe,
        step=step,
        max_grad_norm=recipe.train.max_grad_norm,
        where=f"step {step}",
        before_step=compare_first,
        needs_pass=partial(needs_pass, recipe=recipe),
        ranks=ranks,
    )
    return {**metrics, **difference}


def needs_pass(sequence: TrainSequence, recipe: Recipe) -> bool:
    """Whether a forward and backward pass over a sequence can give the policy a gradient.

    It cannot where all advantages are 0 and the loss is one of ours, each of which is proportional to the advantage,
    without a KL or an entropy bonus beside it.
    """
    algorithm = recipe.algorithm
    has_kl = algorithm.kl.coefficient > 0 and algorithm.kl.placement == "loss"
    is_own = ":" in algorithm.loss
    return bool(sequence.advantages.any()) or has_kl or algorithm.entropy_coefficient > 0 or is_own


def next_kl_coefficient(
    kl_coefficient: float, metrics: Mapping[str, float], recipe: Recipe, *, sampled_kl: float | None, num_samples: int
) -> float:
    """The KL coefficient of the next training step: adapted where `algorithm.kl.target` asks for it, else the same.

    What it steers by is the KL that the coefficient multiplies: in the reward that of the policy that sampled (as in
    Ziegler et al.), in the loss that of the policy as it learns, over all epochs.

    Args:
        kl_coefficient: that of this step.
        metrics: of this step's update, with `kl/ref`, its mean KL per token.
        recipe: `algorithm.kl`.
        sampled_kl: `Credit.sampled_kl` of this step; None where the KL is not in the reward.
        num_samples: samples that the update learned from.
    """
    kl = recipe.algorithm.kl
    if kl.target is None:
        return kl_coefficient
    found = sampled_kl if kl.placement == "reward" else metrics["kl/ref"]
    assert found is not None, "credit assignment estimates the KL that it takes off the reward"
    return adapted_coefficient(kl_coefficient, found, target=kl.target, horizon=kl.horizon, num_samples=num_samples)


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
    recipe: Recipe,
    ranks: Ranks = ONE_RANK,
) -> list[npt.NDArray[np.float32]]:
    """Log-probs of the response tokens of each sequence, without gradient: for `ref_logprobs` and `old_logprobs`.

    Returns:
        One array [R] for each sequence, in their order; the same on all ranks, which share the work.

    Raises:
        ValueError: a sequence is longer than `train.micro_batch_tokens`.
    """
    temperature = recipe.rollout.temperature
    return by_sequence(
        lambda packed: response_logprobs(model, packed, accelerator, temperature)[0],
        model,
        sequences,
        recipe,
        ranks,
    )


def logprob_difference(
    sequences: Sequence[TrainSequence],
    trainer_logprobs: npt.NDArray[np.float32],
    *,
    limits: TrainSection,
    where: str,
) -> dict[str, float]:
    """Compare the decoder's log-probs with those that the trainer computes with the same weights.

    Args:
        sequences: with the decoder's `rollout_logprobs`.
        trainer_logprobs: of all response tokens, in the order of the sequences, [R].
        limits: its `max_logprob_difference` and `max_logprob_kl`.
        where: begins the error messages, such as "step 3".

    Returns:
        `logprob_difference/mean` and `/max` of the absolute difference, and `/kl`, the k3 estimate of
        KL(decoder || trainer), all over tokens.

    Raises:
        NonFiniteError: a log-prob of either is not finite; names sequence and token.
        LogprobDifferenceError: a limit is exceeded, by at least `MIN_COMPARED_TOKENS` tokens; names sequence and token
            of the largest difference too.
    """
    rollout = torch.from_numpy(np.concatenate([sequence.rollout_logprobs for sequence in sequences])).double()
    trainer = torch.from_numpy(trainer_logprobs).double()
    difference = (rollout - trainer).abs()  # [R]
    worst = int(difference.argmax())  # a NaN counts as largest
    at_worst = f"{describe_token(sequences, worst)}: log-prob {rollout[worst]:.6g} by the decoder, "
    at_worst += f"{trainer[worst]:.6g} by the trainer; the policy's weights were not changed by this step"
    if not torch.isfinite(difference[worst]):
        raise NonFiniteError(f"{where}: {at_worst}; a log-prob must be a finite number")
    mean, kl = float(difference.mean()), float(k3(rollout, trainer).mean())
    for option, name, found, limit in (
        ("max_logprob_difference", "mean absolute difference", mean, limits.max_logprob_difference),
        ("max_logprob_kl", "KL divergence", kl, limits.max_logprob_kl),
    ):
        if found > limit and len(difference) >= MIN_COMPARED_TOKENS:
            raise LogprobDifferenceError(
                f"{where}: the {name} of the log-probs by decoder and trainer is {found:.6g} nats per token, more than "
                f"train.{option} ({limit:g}). The largest difference: {at_worst}. Rounding in bfloat16 gives a mean "
                "near 0.01: look at logprob_difference/* of earlier steps. If it was small before, this is a fault; "
                "if it was always near the limit, raise the limit, or set algorithm.old_logprobs=recompute and "
                "algorithm.importance_cap=2"
            )
    return {
        "logprob_difference/mean": mean,
        "logprob_difference/max": float(difference[worst]),
        "logprob_difference/kl": kl,
    }


def describe_token(sequences: Sequence[TrainSequence], row: int) -> str:
    """Name the response token in row `row` of the response tokens [R] of all sequences, laid end to end."""
    ends = np.cumsum([len(sequence.rollout_logprobs) for sequence in sequences])
    index = int(np.searchsorted(ends, row, side="right"))
    sequence = sequences[index]
    position = sequence.targets[row - int(ends[index])]
    token = position - sequence.targets[0]  # the first is the first token of the response
    return f"sequence {index} (in order of draw and sample), response token {token} (id {sequence.token_ids[position]})"


def run_optimizer_steps(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    accelerator: Accelerator,
    sequences: Sequence[TrainSequence],
    micro_batch_loss: MicroBatchLoss,
    *,
    updates: UpdatePlan,
    recipe: Recipe,
    step: int,
    max_grad_norm: float,
    where: str,
    before_step: Callable[[Sequence[TrainSequence], str], None] = lambda *_: None,
    needs_pass: Callable[[TrainSequence], bool] = lambda _: True,
    ranks: Ranks = ONE_RANK,
) -> dict[str, float]:
    """One optimizer step for each mini-batch: the gradient of its whole loss, its norm clipped.

    Each rank computes its share of the micro-batches; gradients, losses and metrics are then summed over the ranks, so
    that all take the same step. DistributedDataParallel would do the first alone, but average, and hang where ranks
    have different numbers of micro-batches; and decoder and update share the raw module.

    Args:
        model: its parameters are those of `optimizer`; all on one device. Gradients are freed at the end.
        optimizer: its learning rate is set before each step.
        accelerator: gives backward and clipping.
        sequences: at least one, sorted by (draw, sample).
        micro_batch_loss: called once for each micro-batch, with the model's weights of that moment; its metrics have
            the same names each time.
        updates: mini-batches, epochs and learning rates of this model.
        recipe: its seed, and `train.micro_batch_tokens`, the token budget of one forward and backward pass; the
            gradient does not depend on it.
        step: the training step.
        max_grad_norm: the gradient's norm is clipped to this.
        where: begins error messages, such as "step 3".
        before_step: called with the computed sequences of each mini-batch and its place ("step 3, epoch 1, mini-batch
            2") between gradient and optimizer step; raises to stop there.
        needs_pass: which sequences can have a gradient. The others count in the mini-batch's lengths and are not
            computed, but for one where there is no other: the optimizer's moments go on.
        ranks: those that share the work; all call this with the same arguments, and all get the same.

    Returns:
        `loss` and `grad_norm` (before clipping): means over optimizer steps. The micro-batches' metrics: means over all
        response tokens of all mini-batches. `learning_rate`: that of the last optimizer step.

    Raises:
        NonFiniteError: a loss or a gradient norm is not finite; raised before that optimizer step.
        ValueError: a sequence exceeds the micro-batch.
    """
    assert accelerator.gradient_accumulation_steps == 1, "accelerate would divide the loss by these steps"
    assert sequences, "no sequences: the caller skips the update where there is nothing to learn from"
    device = next(model.parameters()).device
    losses, grad_norms, learning_rate = [], [], math.nan
    sums: list[dict[str, Tensor]] = []  # of the metrics of each micro-batch, float64
    num_tokens = 0
    plan = mini_batches(
        sequences, size=updates.mini_batch_prompts, num_epochs=updates.num_epochs, seed=recipe.seed, step=step
    )
    for number, (name, mini_batch) in enumerate(plan):
        place = f"{where}, {name}"
        optimizer.zero_grad(set_to_none=True)
        skipped = [sequence for sequence in mini_batch if not needs_pass(sequence)]
        computed = [sequence for sequence in mini_batch if needs_pass(sequence)] or [skipped.pop(0)]
        lengths = [len(sequence.rollout_logprobs) for sequence in (*computed, *skipped)]
        sequence_lengths = copy_to_device(torch.tensor(lengths), device)  # [B]
        backward = partial(_backward, micro_batch_loss, accelerator, sequence_lengths)
        shares = on_ranks(backward, model, computed, recipe, ranks, place)
        loss = torch.stack([share.pop(LOSS) for share in shares]).sum()
        sums += shares
        _check_names(sums[0], shares)
        num_tokens += sum(lengths[: len(computed)])
        before_step(computed, place)
        losses.append(_finite(loss, f"{place}: the loss"))
        holders = gradient_holders(model, optimizer)
        sum_gradients(model, holders, ranks)
        norm = accelerator.clip_grad_norm_(holders, max_grad_norm)
        grad_norms.append(_finite(norm, f"{place}: the gradient norm"))
        learning_rate = learning_rate_at(updates, step, number)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)  # frees the gradients' memory for the decoder
    return {
        "loss": float(np.mean(losses)),
        **{name: float(sum(part[name] for part in sums)) / num_tokens for name in sums[0]},
        "grad_norm": float(np.mean(grad_norms)),
        "learning_rate": learning_rate,
    }


LOSS = "loss"
"""Name of the loss among the sums of a micro-batch; no metric may have it (`RESERVED_METRICS`)."""


def _backward(
    micro_batch_loss: MicroBatchLoss, accelerator: Accelerator, sequence_lengths: Tensor, packed: PackedBatch
) -> dict[str, Tensor]:
    """Forward and backward pass of one micro-batch: its loss and the sums of its metrics, float64."""
    share, metrics = micro_batch_loss(packed, sequence_lengths)
    accelerator.backward(packed.weight * share)
    sums = {name: value.detach().sum(dtype=torch.float64) for name, value in metrics.items()}
    return {LOSS: share.detach().double(), **sums}


def _check_names(first: Mapping[str, Tensor], shares: Sequence[Mapping[str, Tensor]]) -> None:
    """Refuse metrics that only some ranks' micro-batches have; those of one rank `CheckedLoss` has compared."""
    for share in shares:
        if unequal := sorted(first.keys() ^ share.keys()):
            raise ValueError(
                f"the loss function must return the same metrics for every micro-batch, and returned `{unequal[0]}` "
                "for some only; where it has no meaning, return zeros"
            )


def mini_batches(
    sequences: Sequence[TrainSequence], *, size: int, num_epochs: int, seed: int, step: int
) -> Iterator[tuple[str, list[TrainSequence]]]:
    """Cut a step's draws into mini-batches of `size` whole draws, epoch by epoch.

    Sequences with the same `draw_index` are one draw. Draws of which nothing is left (filters, overlong filtering) take
    no place, so that the last mini-batch is smaller or mini-batches are fewer, and none is empty. The first epoch takes
    the draws in data order, later ones in an order drawn from (seed, step, epoch). Inside a mini-batch the order is
    always that of the data, so that packing does not depend on the draw.

    Args:
        sequences: sorted by (draw, sample).
        size: draws of one optimizer step, such as `train.mini_batch_prompts`.
        num_epochs: passes over all sequences.
        seed: the recipe's.
        step: the training step.

    Yields:
        The name of a mini-batch ("epoch 1, mini-batch 2") and its sequences.
    """
    draws: dict[int, list[TrainSequence]] = {}
    for sequence in sequences:
        draws.setdefault(sequence.draw_index, []).append(sequence)
    groups = list(draws.values())
    for epoch in range(num_epochs):
        order = np.arange(len(groups))
        if epoch > 0:
            order = np.random.default_rng((seed, step, epoch)).permutation(len(groups))
        for number, start in enumerate(range(0, len(groups), size), start=1):
            chosen = np.sort(order[start : start + size])
            yield f"epoch {epoch + 1}, mini-batch {number}", [one for index in chosen for one in groups[index]]


def _finite(value: Tensor, what: str) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise NonFiniteError(f"{what} is {number}; the weights were not changed by this mini-batch")
    return number


# --- A device that is too small: which options make the update fit ---------------------------------------------------


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
