"""Sums over the tokens of each sequence, in a packed batch.

Dimension letters: R response tokens of a micro-batch, each with the number of its sequence.
"""

from torch import Tensor


def sequence_sums(numbers: Tensor, sequence_index: Tensor) -> Tensor:
    """For each token the sum of `numbers` over all tokens of its sequence, [R] -> [R], with gradient.

    Summed in float64: the log-ratios of a long response must add up to the same number whatever they are packed with,
    and GSPO's clip range (3e-4) is too narrow for the rounding of a float32 sum.

    Args:
        numbers: [R].
        sequence_index: [R] int64, not negative; the sequences need not be contiguous, nor their numbers dense.

    Returns:
        [R] float64.
    """
    if len(sequence_index) == 0:
        return numbers.double()
    sums = numbers.new_zeros(int(sequence_index.max()) + 1).double()
    return sums.index_add(0, sequence_index, numbers.double())[sequence_index]


def sequence_means(numbers: Tensor, sequence_index: Tensor) -> Tensor:
    """For each token the mean of `numbers` over all tokens of its sequence: `sequence_sums` over the lengths."""
    return sequence_sums(numbers, sequence_index) / sequence_sums(
        numbers.detach().new_ones(len(numbers)), sequence_index
    )
