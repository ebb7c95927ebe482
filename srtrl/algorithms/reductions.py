"""Reductions: from one loss a token to the loss of a mini-batch.

Every public function here is a value of `algorithm.reduction` and has the signature

    (token_loss, sequence_index, *, sequence_lengths, max_new_tokens) -> scalar

`token_loss` [R] and `sequence_index` [R] int64 (a row of `sequence_lengths`) are those of one micro-batch;
`sequence_lengths` [B] int64 are the response lengths of the *whole* mini-batch. Each returns the micro-batch's share of
the mini-batch's loss. The shares of all micro-batches sum to it: micro-batches change memory and not the gradient.
"""

from torch import Tensor


def token_mean(token_loss: Tensor, sequence_index: Tensor, *, sequence_lengths: Tensor, max_new_tokens: int) -> Tensor:
    """Mean over all tokens of the mini-batch (DAPO, arXiv 2503.14476, equation 12): long responses weigh more."""
    return token_loss.sum() / sequence_lengths.sum()


def sequence_mean_token_mean(
    token_loss: Tensor, sequence_index: Tensor, *, sequence_lengths: Tensor, max_new_tokens: int
) -> Tensor:
    """Mean over sequences of the mean over each one's tokens (GRPO, arXiv 2402.03300, equation 3)."""
    return (token_loss / sequence_lengths[sequence_index]).sum() / len(sequence_lengths)


def sequence_mean_token_sum(
    token_loss: Tensor, sequence_index: Tensor, *, sequence_lengths: Tensor, max_new_tokens: int
) -> Tensor:
    """Mean over sequences of the sum over each one's tokens: no length in the denominator at all."""
    return token_loss.sum() / len(sequence_lengths)


def sequence_mean_token_sum_norm(
    token_loss: Tensor, sequence_index: Tensor, *, sequence_lengths: Tensor, max_new_tokens: int
) -> Tensor:
    """`sequence_mean_token_sum` divided by the constant `max_new_tokens` (Dr. GRPO, arXiv 2503.20783).

    The constant brings the loss, and so the gradient norm that is clipped, to the scale of the other reductions without
    favouring any length.
    """
    return token_loss.sum() / (len(sequence_lengths) * max_new_tokens)
