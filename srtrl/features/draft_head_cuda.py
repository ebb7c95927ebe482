"""The guesses of a draft head on a CUDA device: queued after a step, while the host prepares the next one.

Letters as in `draft_head.py`; C sequences. The net is plain PyTorch, one kernel finds the two best tokens of a row.
"""

from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton.language as tl
from torch import Tensor

from srtrl.cuda.buffers import aligned
from srtrl.cuda.jit import jit
from srtrl.cuda.runner import CudaRunner, PinnedCopy, QueueMark
from srtrl.cuda.sampling import BLOCK, load_scaled, noise_bits, rough_gumbel
from srtrl.cuda.shapes import padded_rows
from srtrl.engine.step_inputs import Int32Array
from srtrl.features.draft_head import BEST, REFUSED, SECOND, Guesser

Array = npt.NDArray[Any]


class CudaGuesses:
    """Inputs and guesses of a draft head at fixed addresses, and a graph for each padded number of sequences."""

    def __init__(self, head: Guesser, runner: CudaRunner, *, k: int, slots: int) -> None:
        """See `CpuGuesses`; for up to `slots` sequences."""
        self.head, self.k, self._runner = head, k, runner
        self._width = aligned(padded_rows(slots))
        self._staging = PinnedCopy((5 + k) * self._width, runner.hidden.device)
        self._guesses = PinnedCopy(3 * k * self._width, runner.hidden.device)
        self._end = QueueMark(runner.hidden.device)
        self._num = 0

    def begin(self) -> None:
        """See `Guesses`."""
        self.head.refresh(self._runner.model)

    def launch(self, rows: Array, token_ids: Array, temperatures: Array, rng_keys: Array, positions: Array) -> bool:
        """See `CpuGuesses`. Weights that move have dropped the graphs before."""
        self._end.wait()
        self._num, padded = len(rows), padded_rows(len(rows))
        places = np.minimum(np.arange(padded), len(rows) - 1)  # as padding the last sequence comes again
        self._states = self.head.aim(self._runner, rows[places])
        staging = self._staging.host.numpy().reshape(-1, self._width)
        staging[:2].reshape(-1).view(np.uint64)[:padded] = rng_keys[places]
        staging[2].view(np.float32)[:padded] = temperatures[places]
        numbers = rows, token_ids, *(positions + depth for depth in range(self.k))
        staging[3:, :padded] = np.stack(numbers)[:, places]
        is_prepared = self._runner.run((self, padded), partial(self._compute, padded))
        self._end.record()
        return is_prepared

    @torch.inference_mode()
    def _compute(self, num: int) -> None:
        """Guess for the first `num` sequences, a number that graphs are made for, which hold the copies, too."""
        self._staging.upload(len(self._staging.host))
        staging = self._staging.device.view(-1, self._width)
        rng_keys = staging[:2].view(-1).view(torch.int64)[:num]
        temperatures, (rows, last, *positions) = staging[2, :num].view(torch.float32), staging[3:, :num]

        def take_best(depth: int, logits: Tensor) -> Tensor:
            best, second, margins = self._guesses.device.view(self.k, 3, self._width)[depth, :, :num].unbind()
            noise, listed = (temperatures, rng_keys, positions[depth]), self.head.token_ids
            rank_listed_triton(logits, *noise, listed, (best, second, margins.view(torch.float32)))
            return best

        self.head.unroll(self._states.index_select(0, rows), last, self.k, take_best)
        self._guesses.download(len(self._guesses.host))

    def wait(self) -> tuple[Int32Array, npt.NDArray[np.float32]]:
        """See `CpuGuesses`."""
        self._end.wait()
        return read_guesses(self._guesses.host.numpy().reshape(self.k, 3, self._width)[:, :, : self._num])


def read_guesses(guesses: Int32Array) -> tuple[Int32Array, npt.NDArray[np.float32]]:
    """Tokens and margins as of `draft_chains`, from the results of `rank_listed_triton` at each depth, [K, 3, C]."""
    by_chain = guesses.transpose(2, 0, 1)
    tokens, margins = by_chain[..., [BEST, SECOND]], by_chain[..., 2].copy().view(np.float32)
    is_refused = np.isnan(margins)
    tokens[np.logical_or.accumulate(is_refused, axis=1)], margins[is_refused] = REFUSED, np.inf
    return tokens, margins


def rank_listed_triton(
    logits: Tensor,
    temperatures: Tensor,
    rng_keys: Tensor,
    positions: Tensor,
    listed: Tensor,
    out: tuple[Tensor, Tensor, Tensor],
    *,
    block: int = BLOCK,
) -> None:
    """Find the two listed tokens with the largest noisy logits of each row: a draft head's guesses.

    The noise is that of `sample_rows_triton`, in float32 alone: a guess may miss by its error.

    Args:
        logits: [N, L], a row adjacent in memory, L listed tokens.
        temperatures: [N] float32; 0 has no noise.
        rng_keys: [N] int64.
        positions: [N] int32.
        listed: [L] int64, the tokens' ids.
        out: [N] each, written: the best token (int32), the second best (int32, -1 where there is none), and how much
            better the best one is (float32, NaN where a logit is not finite: then the tokens mean nothing).
        block: Logits that a program takes at a time, a power of two.
    """
    rows = (logits, temperatures, rng_keys, positions)
    options = {"BLOCK": block, "num_warps": 8, "enable_fp_fusion": False}
    rank_listed[(len(logits),)](*rows, listed, *out, len(listed), logits.stride(0), **options)


@jit
def rank_listed(
    logits: tl.tensor,
    temperatures: tl.tensor,
    rng_keys: tl.tensor,
    positions: tl.tensor,
    listed: tl.tensor,
    out_best: tl.tensor,
    out_second: tl.tensor,
    out_margins: tl.tensor,
    num_listed: tl.tensor,
    row_stride: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """See `rank_listed_triton`; one program per row, each lane of which keeps the two best of its tokens."""
    row = tl.program_id(0)
    temperature = tl.load(temperatures + row)
    high = tl.full((BLOCK,), float("-inf"), tl.float32)
    low = high
    best = tl.full((BLOCK,), 0, tl.int32) + num_listed  # index in the list; this one is none
    second = best
    broken = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, num_listed, BLOCK):
        places = first + tl.arange(0, BLOCK)
        inside = places < num_listed
        value = load_scaled(logits, temperature, row, row_stride, places, num_listed)
        broken = tl.where(inside & ~(tl.abs(value) < float("inf")), 1, broken)
        if temperature > 0:
            tokens = tl.load(listed + places, mask=inside, other=0)
            value += rough_gumbel(noise_bits(rng_keys, positions, row, tokens))
        is_best, is_second = value > high, value > low  # of equals the first
        low = tl.where(is_best, high, tl.where(is_second, value, low))
        second = tl.where(is_best, best, tl.where(is_second, places, second))
        high = tl.where(is_best, value, high)
        best = tl.where(is_best, places, best)
    highest = tl.max(high, axis=0)
    winner = tl.min(tl.where(high == highest, best, num_listed), axis=0)
    left = tl.where(best == winner, low, high)
    next_highest = tl.max(left, axis=0)
    left_places = tl.where(best == winner, second, best)
    runner_up = tl.min(tl.where(left == next_highest, left_places, num_listed), axis=0)
    margin = tl.where(tl.max(broken, axis=0) != 0, float("nan"), highest - next_highest)
    tl.store(out_best + row, tl.load(listed + tl.minimum(winner, num_listed - 1)).to(tl.int32))
    other = tl.load(listed + tl.minimum(runner_up, num_listed - 1)).to(tl.int32)
    tl.store(out_second + row, tl.where(runner_up < num_listed, other, -1))
    tl.store(out_margins + row, margin)
