"""The policy as a learner: its loss, named by the recipe, and the comparison of decoder and trainer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from srtrl import ranks
from srtrl.algorithms.losses import importance_weights, opsm_mask
from srtrl.algorithms.reductions import k3
from srtrl.model.attention import Gather
from srtrl.model.logprobs import token_logprobs
from srtrl.model.transformer import Transformer
from srtrl.ranks.sharding import resharded
from srtrl.recipe.schema import Recipe
from srtrl.resolve import declared, resolve_part
from srtrl.rollout.packing import PackedBatch
from srtrl.trainer.learner import Learner, PassObserver, is_user_defined, loss_metrics
from srtrl.trainer.optimizer import MasterAdamW
from srtrl.trainer.passes import Column, NonFiniteError, UpdateContext
from srtrl.types import TrainSequence

MIN_COMPARED_TOKENS = 64
"""With fewer tokens, one that bfloat16 rounds badly would move the mean of the log-prob differences to its limit."""


class LogprobDifferenceError(RuntimeError):
    """The log-probs of decoder and trainer differ too much; the policy was not changed."""


class PolicyLearner(Learner):
    """The policy; loss function, importance weights, KL, entropy bonus and reduction are those that a recipe names."""

    model: Transformer

    def __init__(
        self, model: Transformer, optimizer: MasterAdamW, recipe: Recipe, observers: Sequence[PassObserver] = ()
    ) -> None:
        """Resolve the names of `recipe.algorithm`.

        Args:
            model: The policy.
            optimizer: Of its parameters.
            recipe: Its `algorithm` and `train` count.
            observers: They learn in the same passes.

        Raises:
            ValueError: a name is unknown.
        """
        super().__init__(model, optimizer, recipe.policy_updates)
        algorithm = recipe.algorithm
        self.recipe = recipe
        self.loss_name = f"algorithm.loss {algorithm.loss}"
        self.token_loss = resolve_part("algorithm.loss", algorithm.loss)
        self.reduction = resolve_part("algorithm.reduction", algorithm.reduction)
        self.kl = resolve_part("algorithm.kl.estimator", algorithm.kl.estimator)
        has_bonus = algorithm.entropy_coefficient > 0
        self.needs_entropy = has_bonus or bool(declared(self.token_loss, 4, {"entropy": None}))
        self.difference: dict[str, float] = {}
        """`logprob_difference/*` of the current step, once the log-probs are compared."""
        self.observers = observers
        self._first_logprobs: dict[int, Tensor] = {}  # of this rank's micro-batches, until they are compared

    def loss(self, packed: PackedBatch, sequence_lengths: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """See `Learner`; the log-probs of the step's first mini-batch are kept for `before_step`.

        The importance weights multiply the policy's loss. They do not multiply KL, entropy and drift, which are no
        expectations over the decoder's samples: they measure the policy as it is.
        """
        algorithm = self.recipe.algorithm
        logprobs, entropy = response_logprobs(  # [R] each
            self.model, packed, self.recipe.rollout.temperature, self.observers, has_entropy=self.needs_entropy
        )
        if not self.difference:
            self._first_logprobs[packed.first_sequence] = logprobs.detach()
        old_logprobs = packed.rollout_logprobs if packed.old_logprobs is None else packed.old_logprobs
        offered = {"entropy": entropy, "rollout_logprobs": packed.rollout_logprobs}
        if packed.ref_logprobs is not None:
            offered["ref_logprobs"] = packed.ref_logprobs
        token_loss, logged = self.token_loss(  # [R], and [R] by name
            logprobs,
            old_logprobs,
            packed.advantages,
            packed.sequence_index,
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
            **declared(self.token_loss, 4, offered),
            **algorithm.loss_options,
        )
        metrics = loss_metrics(algorithm.loss, logged)
        rollout_logprobs, index = packed.rollout_logprobs, packed.sequence_index
        if algorithm.opsm is not None:
            is_dropped = opsm_mask(rollout_logprobs, logprobs, packed.advantages, index, threshold=algorithm.opsm)
            token_loss = token_loss.masked_fill(is_dropped, 0.0)
            metrics["opsm/dropped_share"] = is_dropped.to(token_loss.dtype)
        if self.recipe.importance_mode != "none":
            token_loss = token_loss * self._importance_weights(old_logprobs, rollout_logprobs, index)[0]
        if algorithm.drift > 0:
            squares = (logprobs - rollout_logprobs).square()  # [R]
            metrics["drift"] = squares.detach()
            token_loss = token_loss + algorithm.drift * squares
        if algorithm.kl.coefficient > 0:
            assert packed.ref_logprobs is not None, "a KL coefficient above 0 needs ref_logprobs"
            kl = self.kl(logprobs, packed.ref_logprobs)  # [R]
            metrics["kl/ref"] = kl.detach()
            if algorithm.kl.placement == "loss":
                token_loss = token_loss + algorithm.kl.coefficient * kl
        if algorithm.entropy_coefficient > 0:
            token_loss = token_loss - algorithm.entropy_coefficient * entropy
        reduced: Tensor = self.reduction(
            token_loss,
            packed.sequence_index,
            sequence_lengths=sequence_lengths,
            max_new_tokens=self.recipe.rollout.max_new_tokens,
        )
        return reduced, metrics

    def before_update(self, sequences: Sequence[TrainSequence], context: UpdateContext) -> None:
        """Compare all recomputed log-probs with the decoder's, if the recipe recomputes them.

        Otherwise those of the first mini-batch are compared, in its forward passes: both have the same weights there.

        Raises:
            NonFiniteError: a log-prob is not finite.
            LogprobDifferenceError: `train.max_logprob_difference` is exceeded; raised before any weight changes.
        """
        recipe = context.recipe
        self.difference = {}
        if recipe.algorithm.old_logprobs == "recompute":
            old_logprobs = [sequence.old_logprobs for sequence in sequences if sequence.old_logprobs is not None]
            assert len(old_logprobs) == len(sequences), "recomputed before credit assignment"
            limit, where = recipe.train.max_logprob_difference, f"step {context.step}"
            self.difference = logprob_difference(sequences, np.concatenate(old_logprobs), limit=limit, where=where)

    def after_update(self, sequences: Sequence[TrainSequence], context: UpdateContext) -> dict[str, float]:
        """Metrics of all response tokens, also of the sequences that need no pass, and of optimizer and observers.

        `entropy` is estimated: the mean of -log p of the sampled tokens, whose expectation it is. `importance/weight`
        and `/outside_share`, `logprob_difference/mean`, `/max`, `/kl`. `tokens/update` are those of all epochs, with
        prompts, without the sequences that need no pass; `tokens/update_rows` are what was computed for them.

        Raises:
            NonFiniteError: the loss of an observer is not finite; the policy has learned.
        """
        rollout = torch.from_numpy(np.concatenate([one.rollout_logprobs for one in sequences]))  # [R]
        metrics = {"entropy": -float(rollout.double().mean())}
        if self.recipe.importance_mode != "none":
            old = [one.rollout_logprobs if one.old_logprobs is None else one.old_logprobs for one in sequences]
            index = torch.arange(len(old)).repeat_interleave(torch.tensor([len(one) for one in old]))  # [R]
            weights, is_outside = self._importance_weights(torch.from_numpy(np.concatenate(old)), rollout, index)
            metrics["importance/weight"] = float(weights.double().mean())
            metrics["importance/outside_share"] = float(is_outside.double().mean())
        for observer in self.observers:
            metrics |= observer.end_update(sequences, f"step {context.step}")
        num_tokens = sum(len(sequence.token_ids) for sequence in sequences if self.needs_pass(sequence))
        metrics |= self.difference | self.optimizer.metrics()
        metrics["tokens/update"] = context.recipe.train.num_epochs * num_tokens
        return {**metrics, "tokens/update_rows": self.num_rows}

    def _importance_weights(self, old: Tensor, rollout: Tensor, sequence_index: Tensor) -> tuple[Tensor, Tensor]:
        """See `importance_weights`, in the recipe's mode."""
        section = self.recipe.algorithm.importance
        bounds = {"min": section.min, "max": section.max}
        return importance_weights(old, rollout, sequence_index, mode=self.recipe.importance_mode, **bounds)

    def resharded(self) -> AbstractContextManager[None]:
        """See `Learner`; the decoder needs the whole model."""
        return resharded(self.model)

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """See `Learner`; with those of the observers."""
        return super().tensors() | {observer.folder: observer.tensors() for observer in self.observers}

    def load(self, folder: Path) -> None:
        """See `Learner`."""
        super().load(folder)
        for observer in self.observers:
            observer.load(folder)

    def before_step(self, sequences: Sequence[TrainSequence], context: UpdateContext, place: str) -> None:
        """Compare the log-probs of the step's first mini-batch: decoder and trainer still have the same weights."""
        if not self.difference:
            mine = {first: logprobs.float().cpu().numpy() for first, logprobs in self._first_logprobs.items()}
            self._first_logprobs = {}
            logprobs = np.concatenate(ranks.join(mine, f"the log-probs of {place}"))
            limit = context.recipe.train.max_logprob_difference
            self.difference = logprob_difference(sequences, logprobs, limit=limit, where=place)
        for observer in self.observers:
            observer.after_mini_batch(place)

    def needs_pass(self, sequence: TrainSequence) -> bool:
        """Whether a pass over a sequence can give a gradient.

        It cannot where all advantages are 0 and the loss is one of srtrl's, each of which is proportional to the
        advantage, without a KL, an entropy bonus or a drift term beside it.
        """
        algorithm = self.recipe.algorithm
        # A KL in the reward has no gradient of its own, but `kl/ref` is measured in the passes.
        has_other_terms = max(algorithm.kl.coefficient, algorithm.entropy_coefficient, algorithm.drift) > 0
        return has_other_terms or is_user_defined(algorithm.loss) or bool(sequence.advantages.any())


def response_logprobs(
    model: Transformer,
    packed: PackedBatch,
    temperature: float,
    observers: Sequence[PassObserver] = (),
    *,
    has_entropy: bool = True,
) -> tuple[Tensor, Tensor]:
    """Forward pass of one micro-batch: log-probs [R] of its response tokens and entropies [R], differentiable.

    `observers` see the hidden states. Without `has_entropy` there are no entropies: [0].
    """
    hidden = model(packed.token_ids, packed.plan)  # [T, D]
    hidden = Gather(packed.hidden_index, len(hidden))(hidden)  # [R, D]
    for observer in observers:
        observer.see(hidden, packed)
    inputs = (hidden, model.head_weight, packed.target_ids)
    return token_logprobs(*inputs, temperature=temperature, has_entropy=has_entropy, softmax=model.softmax)


def logprobs_column(
    stage: str,
    field: str,
    model: Transformer,
    temperature: float,
    around: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Column:
    """The log-probs of the response tokens by a model, as a field such as `ref_logprobs`; see `Column`."""
    return Column(
        stage=stage,
        field=field,
        model=model,
        forward=lambda packed: response_logprobs(model, packed, temperature, has_entropy=False)[0],
        around=around,
    )


def logprob_difference(
    sequences: Sequence[TrainSequence],
    trainer_logprobs: npt.NDArray[np.float32],
    *,
    limit: float,
    where: str,
) -> dict[str, float]:
    """Compare the decoder's log-probs with those that the trainer computes with the same weights.

    Args:
        sequences: With the decoder's `rollout_logprobs`; tokens of earlier policies are not compared.
        trainer_logprobs: Of all response tokens, in the order of the sequences, [R].
        limit: `train.max_logprob_difference`.
        where: Begins the error messages, such as "step 3".

    Returns:
        `logprob_difference/mean` and `/max` of the absolute difference, and `/kl`, the k3 estimate of
        KL(decoder || trainer), all over tokens.

    Raises:
        NonFiniteError: a log-prob of either is not finite.
        LogprobDifferenceError: the mean exceeds the limit, over at least `MIN_COMPARED_TOKENS` tokens.
    """
    rollout = torch.from_numpy(np.concatenate([sequence.rollout_logprobs for sequence in sequences])).double()
    trainer = torch.from_numpy(trainer_logprobs).double()
    for name, logprobs in (("decoder", rollout), ("trainer", trainer)):
        if not torch.isfinite(logprobs).all():
            raise NonFiniteError(
                f"{where}: a log-prob by the {name} is not a finite number; the policy's weights were not changed by "
                "this step"
            )
    ages = [np.zeros(len(s.rollout_logprobs)) if s.ages is None else s.ages for s in sequences]
    is_fresh = torch.from_numpy(np.concatenate(ages) == 0)  # [R]
    rollout, trainer = rollout[is_fresh], trainer[is_fresh]
    difference = (rollout - trainer).abs() if len(rollout) else torch.zeros(1)
    mean = float(difference.mean())
    if mean > limit and len(difference) >= MIN_COMPARED_TOKENS:
        raise LogprobDifferenceError(
            f"{where}: the mean absolute difference of the log-probs by decoder and trainer is {mean:.6g} nats per "
            f"token, more than train.max_logprob_difference ({limit:g}); the policy's weights were not changed by this "
            "step. Rounding in bfloat16 gives a mean near 0.01: look at logprob_difference/* of earlier steps. If it "
            "was small before, this is a fault; if it was always near the limit, raise the limit, or set "
            "algorithm.old_logprobs=recompute and algorithm.importance.mode=token_mask"
        )
    return {
        "logprob_difference/mean": mean,
        "logprob_difference/max": float(difference.max()),
        "logprob_difference/kl": float(k3(rollout, trainer).mean()) if len(rollout) else 0.0,
    }
