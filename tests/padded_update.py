"""The policy's loss on one padded batch with masks, in plain float64 PyTorch: the slow twin of the packed update.

Written from the formulas on [B, L] tensors, sharing nothing with `srtrl.algorithms`, packing or micro-batches; only the
forward pass is the policy's own. B sequences, L the longest response; the mask is true at sampled tokens: what an
environment said is a hole in it.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from algorithm_reference import kl_estimate
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from update_cases import TEMPERATURE, naive_logprobs

from srtrl.model.attention import PackedPlan
from srtrl.model.transformer import Transformer
from srtrl.recipe.schema import ImportanceSection, Recipe, UpdatePlan
from srtrl.types import TrainSequence

LOSSES = ("ppo_clip", "dual_clip", "gspo", "gspo_token", "cispo", "dppo", "policy_gradient")
REDUCTIONS = ("token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "sequence_mean_token_sum_norm")
RATIO_CAP = 2.0
"""Cap of `dual_clip` and `dppo`: low, so that it is met, and a power of 2: its product with a float32 is exact."""


@dataclass(kw_only=True, frozen=True)
class Padded:
    """Sequences padded on the right, [B, L] each: place l is of token l + 1."""

    mask: Tensor
    new: Tensor
    """Log-probs by the policy, float64, with gradient."""
    entropy: Tensor
    old: Tensor
    rollout: Tensor
    ref: Tensor
    advantages: Tensor


def padded_forward(model: Transformer, sequences: Sequence[TrainSequence]) -> tuple[Tensor, Tensor]:
    """Token ids [B, longest] and hidden states [B, longest, D] of one batch of equally long rows.

    What follows a response is token 1: the attention is causal, so it reaches no token before it.
    """
    arrays = [torch.from_numpy(sequence.token_ids) for sequence in sequences]
    token_ids = pad_sequence(arrays, batch_first=True, padding_value=1)
    plan = PackedPlan([token_ids.shape[1]] * len(sequences), "cpu")
    return token_ids, model(token_ids.flatten(), plan).reshape(*token_ids.shape, -1)


def pad_all(policy: Transformer, sequences: Sequence[TrainSequence]) -> Padded:
    """Everything that a loss needs; `old` are the decoder's log-probs if the sequences have none."""
    token_ids, hidden = padded_forward(policy, sequences)
    rows = torch.log_softmax(policy.logits(hidden).double()[:, :-1] / TEMPERATURE, dim=-1)  # [B, L, V]
    chosen = rows.gather(2, token_ids[:, 1:, None])[..., 0]

    def padded(arrays: Sequence[npt.NDArray[np.float32] | None]) -> Tensor:
        """Numbers of the sampled tokens at their places, [B, L] float64, and zeros."""
        numbers = torch.zeros(chosen.shape, dtype=torch.float64)
        for row, sequence, array in zip(numbers, sequences, arrays, strict=True):
            if array is not None:
                row[sequence.targets - 1] = torch.from_numpy(array).double()
        return numbers

    mask = padded([np.ones(len(one.targets), np.float32) for one in sequences]) > 0
    return Padded(
        mask=mask,
        new=torch.where(mask, chosen, 0.0),
        entropy=-(rows.exp() * rows).sum(-1),
        old=padded([one.rollout_logprobs if one.old_logprobs is None else one.old_logprobs for one in sequences]),
        rollout=padded([one.rollout_logprobs for one in sequences]),
        ref=padded([one.ref_logprobs for one in sequences]),
        advantages=padded([one.advantages for one in sequences]),
    )


def ratios(name: str, p: Padded) -> Tensor:
    """New over old probability as the loss takes it, [B, L]: of each token, or in the geometric mean of a sequence."""
    mean_log_ratio = (p.new - p.old).sum(1, keepdim=True) / p.mask.sum(1, keepdim=True)  # the padding holds zeros
    if name == "gspo":
        return mean_log_ratio.exp().expand_as(p.new)
    if name == "gspo_token":
        return mean_log_ratio.detach().exp() * (p.new - p.new.detach()).exp()
    return (p.new - p.old).exp()


def token_losses(name: str, p: Padded, low: float, high: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of each token, and what each clip of the loss marks by metric, [B, L] each."""
    if name == "policy_gradient":
        return -p.advantages * p.new, {}
    ratio, is_good, is_bad = ratios(name, p), p.advantages > 0, p.advantages < 0
    if name == "dppo":  # drops by the difference of probabilities, to those of the decoder
        moved = p.new.exp() - p.rollout.exp()
        marks = {"clip_share/low": (moved < -low) & is_bad, "clip_share/high": (moved > high) & is_good}
        kept = ~marks["clip_share/low"] & ~marks["clip_share/high"]
        weight = (p.new - p.rollout).exp().detach().clamp(max=RATIO_CAP)
        value = -weight * p.advantages * (1 + p.new - p.new.detach())
        return torch.where(kept, value, 0.0), marks
    is_low, is_high, bounded = ratio < 1 - low, ratio > 1 + high, ratio.clamp(1 - low, 1 + high)
    if name == "cispo":  # it bounds a weight, of either sign
        marks = {"clip_share/low": is_low & (is_good | is_bad), "clip_share/high": is_high & (is_good | is_bad)}
        return -bounded.detach() * p.advantages * p.new, marks
    loss = torch.maximum(-ratio * p.advantages, -bounded * p.advantages)
    marks = {"clip_share/low": is_low & is_bad, "clip_share/high": is_high & is_good}
    if name == "dual_clip":
        loss = torch.where(is_bad, torch.minimum(loss, -RATIO_CAP * p.advantages), loss)
        marks["clip_share/dual"] = (ratio > RATIO_CAP) & is_bad
    return loss, marks


def weigh(section: ImportanceSection, p: Padded) -> tuple[Tensor, Tensor]:
    """Importance weight of each token, and whether it is outside the range, [B, L] each."""
    log_ratio = p.old - p.rollout  # zeros in the padding
    log_bounded = log_ratio
    if section.mode.startswith("sequence"):
        log_bounded = log_ratio.sum(1, keepdim=True).expand_as(log_ratio)
    if section.mode == "sequence_mean_mask":
        log_bounded = log_bounded / p.mask.sum(1, keepdim=True)
    is_outside = (log_bounded.exp() < section.min) | (log_bounded.exp() > section.max)
    if section.mode.endswith("truncate"):
        return log_bounded.exp().clamp(section.min, section.max), is_outside
    weights = log_ratio if section.mode == "sequence_mean_mask" else log_bounded
    return torch.where(is_outside, 0.0, weights.exp()), is_outside


def reduce(name: str, losses: Tensor, mask: Tensor, max_new_tokens: int) -> Tensor:
    """The loss of the batch, a scalar."""
    losses = torch.where(mask, losses, 0.0)
    if name == "token_mean":
        return losses.sum() / mask.sum()
    of_sequences = losses.sum(1)  # [B]
    if name == "sequence_mean_token_mean":
        of_sequences = of_sequences / mask.sum(1)
    if name == "sequence_mean_token_sum_norm":
        of_sequences = of_sequences / max_new_tokens
    return of_sequences.mean()


def naive_batches(
    sequences: Sequence[TrainSequence], plan: UpdatePlan, seed: int, step: int
) -> Iterator[list[TrainSequence]]:
    """Mini-batches of whole draws: the first epoch in order, a later one in an order of its own."""
    draws = sorted({sequence.draw_index for sequence in sequences})
    for epoch in range(plan.num_epochs):
        shuffled = np.random.default_rng((seed, step, epoch)).permutation(len(draws))
        order = shuffled if epoch else np.arange(len(draws))
        for start in range(0, len(draws), plan.mini_batch_prompts):
            chosen = order[start : start + plan.mini_batch_prompts]
            yield [sequence for sequence in sequences if draws.index(sequence.draw_index) in chosen]


def padded_loss(p: Padded, recipe: Recipe) -> tuple[Tensor, dict[str, list[float]]]:
    """The loss of a mini-batch with gradient, and the metrics of its tokens. Weights are of the policy's loss alone."""
    algorithm, kl = recipe.algorithm, recipe.algorithm.kl
    tokens, marks = token_losses(algorithm.loss, p, algorithm.clip_low, algorithm.clip_high)
    metrics = {"entropy": -p.rollout, **marks}
    if algorithm.opsm:
        moved = (p.rollout - p.new).sum(1, keepdim=True) / p.mask.sum(1, keepdim=True)  # the padding holds zeros
        metrics["opsm/dropped_share"] = (moved > algorithm.opsm) & (p.advantages < 0)
        tokens = torch.where(metrics["opsm/dropped_share"], 0.0, tokens)
    if algorithm.importance.mode != "auto":
        weights, is_outside = weigh(algorithm.importance, p)
        tokens = weights * tokens
        metrics |= {"importance/weight": weights, "importance/outside_share": is_outside}
    if algorithm.drift:
        metrics["drift"] = (p.new - p.rollout) ** 2
        tokens = tokens + algorithm.drift * metrics["drift"]
    if kl.coefficient:
        metrics["kl/ref"] = kl_estimate(kl.estimator, p.new - p.ref)
        tokens = tokens + (kl.coefficient * metrics["kl/ref"] if kl.placement == "loss" else 0)
    tokens = tokens - algorithm.entropy_coefficient * p.entropy
    loss = reduce(algorithm.reduction, tokens, p.mask, recipe.rollout.max_new_tokens)
    return loss, {name: values[p.mask].tolist() for name, values in metrics.items()}


def padded_step(
    policy: Transformer, sequences: Sequence[TrainSequence], recipe: Recipe, step: int = 1
) -> tuple[dict[str, float], list[list[Tensor]]]:
    """A training step of plain gradient descent at a constant rate: moves the policy; its metrics and gradients."""
    olds = [np.array(naive_logprobs(policy, sequence), np.float32) for sequence in sequences]
    difference = np.concatenate([s.rollout_logprobs - old for s, old in zip(sequences, olds, strict=True)])
    if recipe.algorithm.old_logprobs == "recompute":
        sequences = [replace(sequence, old_logprobs=old) for sequence, old in zip(sequences, olds, strict=True)]
    losses: list[float] = []
    gradients, per_token = [], defaultdict[str, list[float]](list)
    for batch in naive_batches(sequences, recipe.policy_updates, recipe.seed, step):
        loss, metrics = padded_loss(pad_all(policy, batch), recipe)
        if not losses and recipe.algorithm.old_logprobs == "rollout":  # the weights of later mini-batches have moved
            difference = difference[: len(metrics["entropy"])]
        for name, values in metrics.items():
            per_token[name] += values
        gradients.append(list(torch.autograd.grad(loss, list(policy.parameters()))))
        for parameter, gradient in zip(policy.parameters(), gradients[-1], strict=True):
            parameter.data -= recipe.train.learning_rate * gradient
        losses.append(loss.item())
    means = {
        "loss": float(np.mean(losses)),
        "logprob_difference/mean": float(np.abs(difference).mean()),
        "logprob_difference/max": float(np.abs(difference).max()),
        "logprob_difference/kl": float((np.exp(-difference) - 1 + difference).mean()),
        **{name: float(np.mean(values)) for name, values in per_token.items()},
    }
    return means, gradients
