"""Hidden states -> log-probs of given tokens, without ever holding the logits of a whole micro-batch.

This is the only logits-to-log-prob path of the update; its numerics are those of the decoder: logits in the type of the
weights, then float32 (float64 stays), divided by the temperature, then `log_softmax`.

R response tokens of a micro-batch, V vocabulary, D model width, C tokens of one chunk.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

MAX_SAVED_ELEMENTS = 2**24
"""Up to this many elements of [R, V] (64 MiB of float32) are kept for the backward pass; beyond, it computes the logits
again, chunk by chunk. Keeping them makes a small vocabulary as fast as plain `log_softmax`."""


def token_logprobs(
    hidden: Tensor, head_weight: Tensor, target_ids: Tensor, *, temperature: float, chunk_size: int = 1024
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target token and entropy of its distribution, both differentiable.

    Beyond `MAX_SAVED_ELEMENTS` the memory of forward and backward is a few times `chunk_size` x V, whatever R is. The
    gradient of the head is summed over the chunks in the head's own type, which is the type that sums it over
    micro-batches too (`.grad`); in bfloat16 four chunks raised its rounding error from 0.45% to 0.49%. Under autocast
    the logits have autocast's type, like those of any other linear layer.

    Args:
        hidden: final hidden states at the positions whose next tokens are the targets, [R, D].
        head_weight: output head, [V, D].
        target_ids: [R], int64.
        temperature: divides the logits; above 0.
        chunk_size: tokens whose logits exist at the same time.

    Returns:
        log-probs [R] and entropies in nats [R], in float32 (in float64 where the inputs are).
    """
    assert temperature > 0, f"temperature must be above 0, is {temperature}"
    assert hidden.dtype == head_weight.dtype or torch.is_autocast_enabled(hidden.device.type)
    logprobs, entropy = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, head_weight, target_ids, temperature, chunk_size
    )
    return logprobs, entropy


def token_logprobs_reference(
    hidden: Tensor, head_weight: Tensor, target_ids: Tensor, *, temperature: float
) -> tuple[Tensor, Tensor]:
    """The same as `token_logprobs` in the fewest words and the most memory: the oracle of its tests."""
    logits = functional.linear(hidden, head_weight)  # [R, V]
    logits = logits if logits.dtype == torch.float64 else logits.float()
    logprobs = torch.log_softmax(logits / temperature, dim=-1)  # [R, V]
    entropy = -(logprobs.exp() * logprobs).sum(dim=-1)  # [R]
    return logprobs.gather(-1, target_ids.unsqueeze(-1)).squeeze(-1), entropy


class _TokenLogprobs(torch.autograd.Function):
    """A custom function rather than a checkpoint around each chunk: faster, and sums the head's gradient in place."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head_weight: Tensor, target_ids: Tensor, temperature: float, chunk_size: int
    ) -> tuple[Tensor, Tensor]:
        device_type = hidden.device.type
        autocast = torch.is_autocast_enabled(device_type) and head_weight.dtype != torch.float64
        ctx.logits_dtype = torch.get_autocast_dtype(device_type) if autocast else head_weight.dtype
        ctx.temperature, ctx.chunk_size = temperature, chunk_size
        ctx.save_for_backward(hidden, head_weight, target_ids)
        ctx.set_materialize_grads(False)
        saved: list[Tensor] | None = [] if len(hidden) * len(head_weight) <= MAX_SAVED_ELEMENTS else None
        ctx.saved_distributions = saved

        dtype = torch.float64 if head_weight.dtype == torch.float64 else torch.float32
        logprobs = hidden.new_empty(len(hidden), dtype=dtype)  # [R]
        entropy = torch.empty_like(logprobs)  # [R]
        weight = head_weight.to(ctx.logits_dtype)
        for start in range(0, len(hidden), chunk_size):
            chunk = slice(start, start + chunk_size)
            distribution = _log_distribution(hidden[chunk].to(ctx.logits_dtype), weight, temperature)  # [C, V]
            logprobs[chunk] = distribution.gather(-1, target_ids[chunk, None]).squeeze(-1)
            entropy[chunk] = -distribution.exp().mul_(distribution).sum(dim=-1)
            if saved is not None:
                saved.append(distribution)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor, Tensor, None, None, None]:
        hidden, head_weight, target_ids = ctx.saved_tensors
        weight = head_weight.to(ctx.logits_dtype)
        grad_hidden = torch.zeros_like(hidden)  # [R, D]
        grad_weight = torch.zeros_like(head_weight)  # [V, D]
        for index, start in enumerate(range(0, len(hidden), ctx.chunk_size)):
            chunk = slice(start, start + ctx.chunk_size)
            hidden_chunk = hidden[chunk].to(ctx.logits_dtype)  # [C, D]
            if ctx.saved_distributions is not None:
                distribution = ctx.saved_distributions[index]  # [C, V]
            else:
                distribution = _log_distribution(hidden_chunk, weight, ctx.temperature)
            grad_logits = _grad_logits(
                distribution,
                target_ids[chunk],
                None if grad_logprobs is None else grad_logprobs[chunk],
                None if grad_entropy is None else grad_entropy[chunk],
            )
            grad_logits = grad_logits.div_(ctx.temperature).to(ctx.logits_dtype)  # [C, V]
            grad_hidden[chunk] = grad_logits @ weight
            if grad_weight.dtype == ctx.logits_dtype:
                grad_weight.addmm_(grad_logits.T, hidden_chunk)  # no second [V, D]
            else:
                grad_weight += grad_logits.T @ hidden_chunk
        return grad_hidden, grad_weight, None, None, None


def _log_distribution(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """Log-probs of all tokens of the vocabulary, [C, V], from [C, D] and [V, D]."""
    logits = functional.linear(hidden, weight)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return torch.log_softmax(logits.div_(temperature), dim=-1)


def _grad_logits(
    distribution: Tensor, target_ids: Tensor, grad_logprobs: Tensor | None, grad_entropy: Tensor | None
) -> Tensor:
    """Gradient with respect to the tempered logits, [C, V].

    d logprob / d logit_v = 1[v is the target] - p_v; d entropy / d logit_v = -p_v (log p_v + entropy).
    """
    probs = distribution.exp()  # [C, V]
    row_factor = torch.zeros_like(probs[:, 0]) if grad_logprobs is None else -grad_logprobs  # [C]
    if grad_entropy is None:
        grad = probs.mul_(row_factor.unsqueeze(-1))
    else:
        entropy = -(probs * distribution).sum(dim=-1)  # [C]
        row_factor = row_factor - grad_entropy * entropy
        grad = probs.mul_(row_factor.unsqueeze(-1) - grad_entropy.unsqueeze(-1) * distribution)
    if grad_logprobs is not None:
        grad.scatter_add_(-1, target_ids.unsqueeze(-1), grad_logprobs.unsqueeze(-1))
    return grad
