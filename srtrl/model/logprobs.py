"""Hidden states -> log-probs of given tokens, without ever holding the logits of a whole micro-batch.

This is the only logits-to-log-prob path of the update; its numerics are those of the decoder: logits in the type of the
weights, then float32 (float64 stays), divided by the temperature, then `log_softmax`.

R response tokens of a micro-batch, V vocabulary, D model width, C tokens of one chunk.
"""

from typing import Any, NamedTuple

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


class Slopes(NamedTuple):
    """What the gradient of the logits of some tokens is made of, [C] each."""

    logprobs: Tensor
    """Log-probs of the targets, as the forward pass has computed them."""
    target: Tensor
    """Gradient of these log-probs."""
    probs: Tensor
    """Factor of each probability: minus that gradient, minus the entropy times its gradient."""
    entropy: Tensor | None
    """Gradient of the entropy; None: it has none."""


class Softmax:
    """Log-probs of one chunk of tokens, and the gradient of its logits, in plain PyTorch; a device may have its own."""

    def forward(
        self, hidden: Tensor, head_weight: Tensor, target_ids: Tensor, temperature: float, *, has_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probs of `target_ids` [C] and, where they are wanted, entropies [C], from [C, D] and [V, D]."""
        distribution = _log_distribution(hidden, head_weight, temperature)  # [C, V]
        logprobs = distribution.gather(-1, target_ids[:, None]).squeeze(-1)
        return logprobs, -distribution.exp().mul_(distribution).sum(dim=-1) if has_entropy else None

    def gradient(
        self, hidden: Tensor, head_weight: Tensor, target_ids: Tensor, temperature: float, slopes: Slopes
    ) -> Tensor:
        """Gradient of the logits, [C, V] in their type.

        d logprob / d logit_v = 1[v is the target] - p_v; d entropy / d logit_v = -p_v (log p_v + entropy).
        """
        grad = _log_distribution(hidden, head_weight, temperature)  # [C, V]
        if slopes.entropy is None:
            grad.exp_().mul_(slopes.probs[:, None])
        else:
            probs = grad.exp()
            grad.mul_(-slopes.entropy[:, None]).add_(slopes.probs[:, None]).mul_(probs)
            del probs
        grad.scatter_add_(-1, target_ids[:, None], slopes.target[:, None])
        return _divide(grad, temperature).to(head_weight.dtype)


PLAIN_SOFTMAX = Softmax()


def token_logprobs(
    hidden: Tensor,
    head_weight: Tensor,
    target_ids: Tensor,
    *,
    temperature: float,
    has_entropy: bool = True,
    chunk_size: int | None = None,
    softmax: Softmax = PLAIN_SOFTMAX,
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
        has_entropy: whether entropies are computed.
        chunk_size: tokens whose logits exist at the same time; by default `chunk_tokens` of V.
        softmax: computes a chunk.

    Returns:
        log-probs [R] and entropies in nats [R] ([0] without `has_entropy`), in float32 (float64 where the inputs are).
    """
    assert temperature > 0, f"temperature must be above 0, is {temperature}"
    assert hidden.dtype == head_weight.dtype
    options = (temperature, has_entropy, chunk_size or chunk_tokens(len(head_weight)), softmax)
    logprobs, entropy = _TokenLogprobs.apply(hidden, head_weight, target_ids, *options)  # type: ignore[no-untyped-call]
    return logprobs, entropy


def chunk_tokens(vocab_size: int) -> int:
    """Tokens of a chunk: `MAX_CHUNK_TOKENS`, or fewer where their float32 logits would take over `MAX_CHUNK_BYTES`."""
    limit = MAX_CHUNK_BYTES // (4 * vocab_size) // _CHUNK_MULTIPLE * _CHUNK_MULTIPLE
    return min(MAX_CHUNK_TOKENS, max(_CHUNK_MULTIPLE, limit))


class _TokenLogprobs(torch.autograd.Function):
    """A custom function rather than a checkpoint around each chunk: faster, and sums the head's gradient in place."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head_weight: Tensor,
        target_ids: Tensor,
        temperature: float,
        has_entropy: bool,
        chunk_size: int,
        softmax: Softmax,
    ) -> tuple[Tensor, Tensor]:
        ctx.temperature, ctx.chunk_size, ctx.softmax = temperature, chunk_size, softmax
        ctx.set_materialize_grads(False)
        logprobs = hidden.new_empty(len(hidden), dtype=torch.promote_types(head_weight.dtype, torch.float32))  # [R]
        entropy = logprobs.new_empty(len(hidden) if has_entropy else 0)
        for start in range(0, len(hidden), chunk_size):
            chunk = slice(start, start + chunk_size)
            inputs = (hidden[chunk], head_weight, target_ids[chunk], temperature)
            logprobs[chunk], chunk_entropy = softmax.forward(*inputs, has_entropy=has_entropy)
            if chunk_entropy is not None:
                entropy[chunk] = chunk_entropy
        ctx.save_for_backward(hidden, head_weight, target_ids, logprobs, entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, head_weight, target_ids, logprobs, entropy = ctx.saved_tensors
        grad_logprobs = torch.zeros_like(logprobs) if grad_logprobs is None else grad_logprobs
        probs = -grad_logprobs if grad_entropy is None else -grad_logprobs - grad_entropy * entropy  # [R]
        grad_hidden = torch.zeros_like(hidden)  # [R, D]
        grad_weight = torch.zeros_like(head_weight) if ctx.needs_input_grad[1] else None  # [V, D]
        for start in range(0, len(hidden), ctx.chunk_size):
            chunk = slice(start, start + ctx.chunk_size)
            rows, entropy_slopes = hidden[chunk], None if grad_entropy is None else grad_entropy[chunk]
            slopes = Slopes(logprobs[chunk], grad_logprobs[chunk], probs[chunk], entropy_slopes)
            grad = ctx.softmax.gradient(rows, head_weight, target_ids[chunk], ctx.temperature, slopes)  # [C, V]
            grad_hidden[chunk] = grad @ head_weight
            if grad_weight is not None:
                grad_weight.addmm_(grad.T, rows)  # no second [V, D]
            del grad
        return grad_hidden, grad_weight, None, None, None, None, None


def _log_distribution(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """Log-probs of all tokens of the vocabulary, [C, V], from [C, D] and [V, D]."""
    logits = functional.linear(hidden, weight)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return torch.log_softmax(_divide(logits, temperature), dim=-1)


def _divide(values: Tensor, temperature: float) -> Tensor:
    """`values` divided in place; a temperature of 1 spares the pass over [C, V]."""
    return values if temperature == 1 else values.div_(temperature)
