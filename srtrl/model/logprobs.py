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

MAX_CHUNK_TOKENS = 1024
"""Tokens of a chunk: enough to keep the matrix products busy."""
MAX_CHUNK_BYTES = 2**29
"""Bytes of one chunk's [C, V] in float32; forward and backward hold two of them at their peak. At V = 151,936 a
chunk is 832 tokens, and the peak 0.94 GiB."""
_CHUNK_MULTIPLE = 64  # rows of a tile of a matrix product


def token_logprobs(
    hidden: Tensor, head_weight: Tensor, target_ids: Tensor, *, temperature: float, chunk_size: int | None = None
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target token and entropy of its distribution, both differentiable.

    The backward pass computes the logits again: the memory of both passes is two float32 tensors [chunk_size, V],
    for any R, and the gradient of the head, unless it is frozen. That is summed over the chunks in the head's own type;
    in bfloat16 four chunks raised its rounding error from 0.45% to 0.49%.

    Args:
        hidden: final hidden states at the positions whose next tokens are the targets, [R, D].
        head_weight: output head, [V, D].
        target_ids: [R], int64.
        temperature: divides the logits; above 0.
        chunk_size: tokens whose logits exist at the same time; by default `chunk_tokens` of V.

    Returns:
        log-probs [R] and entropies in nats [R], in float32 (in float64 where the inputs are).
    """
    assert temperature > 0, f"temperature must be above 0, is {temperature}"
    assert hidden.dtype == head_weight.dtype
    logprobs, entropy = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, head_weight, target_ids, temperature, chunk_size or chunk_tokens(len(head_weight))
    )
    return logprobs, entropy


def chunk_tokens(vocab_size: int) -> int:
    """Tokens of a chunk: `MAX_CHUNK_TOKENS`, or fewer where their float32 logits would take over `MAX_CHUNK_BYTES`."""
    limit = MAX_CHUNK_BYTES // (4 * vocab_size) // _CHUNK_MULTIPLE * _CHUNK_MULTIPLE
    return min(MAX_CHUNK_TOKENS, max(_CHUNK_MULTIPLE, limit))


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
        ctx.temperature, ctx.chunk_size = temperature, chunk_size
        ctx.set_materialize_grads(False)
        logprobs = hidden.new_empty(len(hidden), dtype=torch.promote_types(head_weight.dtype, torch.float32))  # [R]
        entropy = torch.empty_like(logprobs)  # [R]
        for start in range(0, len(hidden), chunk_size):
            chunk = slice(start, start + chunk_size)
            distribution = _log_distribution(hidden[chunk], head_weight, temperature)  # [C, V]
            logprobs[chunk] = distribution.gather(-1, target_ids[chunk, None]).squeeze(-1)
            entropy[chunk] = -distribution.exp().mul_(distribution).sum(dim=-1)
            del distribution  # before the next chunk's is made
        ctx.save_for_backward(hidden, head_weight, target_ids, entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor, Tensor | None, None, None, None]:
        hidden, head_weight, target_ids, entropy = ctx.saved_tensors
        grad_logprobs = torch.zeros_like(entropy) if grad_logprobs is None else grad_logprobs
        grad_hidden = torch.zeros_like(hidden)  # [R, D]
        grad_weight = torch.zeros_like(head_weight) if ctx.needs_input_grad[1] else None  # [V, D]
        for start in range(0, len(hidden), ctx.chunk_size):
            chunk = slice(start, start + ctx.chunk_size)
            hidden_chunk = hidden[chunk]  # [C, D]
            # d logprob / d logit_v = 1[v is the target] - p_v; d entropy / d logit_v = -p_v (log p_v + entropy).
            grad = _log_distribution(hidden_chunk, head_weight, ctx.temperature)  # [C, V]
            row_factor = -grad_logprobs[chunk]  # [C]
            if grad_entropy is None:
                grad.exp_().mul_(row_factor[:, None])
            else:
                probs = grad.exp()
                row_factor -= grad_entropy[chunk] * entropy[chunk]
                grad.mul_(-grad_entropy[chunk, None]).add_(row_factor[:, None]).mul_(probs)
                del probs
            grad.scatter_add_(-1, target_ids[chunk, None], grad_logprobs[chunk, None])
            grad = _divide(grad, ctx.temperature).to(head_weight.dtype)
            grad_hidden[chunk] = grad @ head_weight
            if grad_weight is not None:
                grad_weight.addmm_(grad.T, hidden_chunk)  # no second [V, D]
            del grad
        return grad_hidden, grad_weight, None, None, None


def _log_distribution(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """Log-probs of all tokens of the vocabulary, [C, V], from [C, D] and [V, D]."""
    logits = functional.linear(hidden, weight)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return torch.log_softmax(_divide(logits, temperature), dim=-1)


def _divide(values: Tensor, temperature: float) -> Tensor:
    """`values` divided in place; a temperature of 1 spares the pass over [C, V]."""
    return values if temperature == 1 else values.div_(temperature)
