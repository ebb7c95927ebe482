"""Exact sampling by Gumbel-max with counter-based noise (DESIGN: "Exact sampling").

The token at position p of a sample is argmax over the vocabulary of logit / temperature + Gumbel noise, where the
noise of entry v is a hash of (rng_key, p, v). That is a draw from the softmax (Gumbel 1954; Maddison et al. 2014,
"A* sampling"), and a pure function of (logits, temperature, rng_key, position): it knows nothing of the batch, of the
drafter or of how many tokens a step verified.

`sample_rows_reference` is the definition, in plain PyTorch; on a CPU `sampling_kernel.py` gives the same tokens faster.
Letters: N rows, V vocabulary.
"""

import hashlib

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from srtrl.types import Purpose

GOLDEN = 0x9E3779B97F4A7C15
"""Increment of the SplitMix64 sequence (Steele, Lea and Flood 2014)."""
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
"""Multipliers of the SplitMix64 finaliser."""
MAX_NOISE = 1 << 24
"""Most noise numbers (rows x vocabulary) at once outside the CPU: some 130 MB for each of a few float64 tensors."""


def make_rng_key(seed: int, purpose: Purpose, draw_index: int, sample_index: int) -> int:
    """Return the unsigned 64-bit RNG key of one sample: a hash of everything that names it.

    In training `draw_index` is the draw's place in the data order of the whole run, and no draw is sampled in two
    steps. So the names of all samples that a run ever learns from differ, and so do their rng_keys, but for collisions
    of the hash (of n samples, n^2 / 2^65: 3e-6 for ten million). Two draws of one prompt are two draws. Names of other
    purposes differ in their second part: evaluation shares no noise with training, nor does a `run_ahead` that is not
    coupled. A coupled run-ahead has, on purpose, the name of the sample that it decodes early.
    """
    name = f"{seed}/{purpose}/{draw_index}/{sample_index}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little")


def _signed(value: int) -> int:
    """The int64 with the same 64 bits: PyTorch multiplies and adds those modulo 2**64."""
    return value - (1 << 64) if value >= 1 << 63 else value


def _mix(bits: Tensor) -> Tensor:
    """SplitMix64's finaliser on int64 tensors (shifts are logical: the sign is masked away)."""
    bits = (bits ^ ((bits >> 30) & ((1 << 34) - 1))) * _signed(MIX_1)
    bits = (bits ^ ((bits >> 27) & ((1 << 37) - 1))) * _signed(MIX_2)
    return bits ^ ((bits >> 31) & ((1 << 33) - 1))


def uniform_noise(rng_keys: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Uniform numbers strictly between 0 and 1, [N, V] float64, of `rng_keys` and `positions` [N] int64.

    Hash (rng_key, position) to a row key, then (row key, vocabulary index) to a number of 52 bits: with one more, the
    largest would round to 1.
    """
    row_keys = _mix(_mix(positions + _signed(GOLDEN)) ^ rng_keys)  # [N]
    index = torch.arange(1, vocab_size + 1, device=rng_keys.device, dtype=torch.int64)
    bits = _mix(row_keys[:, None] + index * _signed(GOLDEN))  # [N, V]
    return to_uniform(bits)


def to_uniform(bits: Tensor) -> Tensor:
    """Float64 strictly between 0 and 1 of the upper 52 bits of int64 `bits`."""
    return (((bits >> 12) & ((1 << 52) - 1)).double() + 0.5) * 2.0**-52


def sample_rows_reference(logits: Tensor, temperatures: Tensor, rng_keys: Tensor, positions: Tensor) -> Tensor:
    """Sample one token a row.

    Args:
        logits: [N, V], any float type; -inf excludes a token.
        temperatures: [N] float32; 0 takes the most likely token (the first of equals).
        rng_keys: [N] int64, the bits of the unsigned rng_keys.
        positions: [N] int64, index of the token within the response.

    Returns:
        [N] int64.
    """
    scaled = logits.float() / torch.where(temperatures > 0, temperatures, 1.0)[:, None]  # as in the trainer
    gumbel = -torch.log(-torch.log(uniform_noise(rng_keys, positions, logits.shape[1])))  # [N, V] float64
    noisy = torch.where(temperatures[:, None] > 0, scaled.double() + gumbel, scaled.double())
    return noisy.argmax(dim=-1)


def row_logprobs_reference(logits: Tensor, temperatures: Tensor, token_ids: Tensor) -> Tensor:
    """Log-probs [N] float32 of `token_ids` [N] under the tempered softmax (of temperature 1 where it is 0)."""
    scaled = logits.float() / torch.where(temperatures > 0, temperatures, 1.0)[:, None]
    return scaled.log_softmax(-1).gather(1, token_ids[:, None]).squeeze(1)


def filter_top_k_top_p(logits: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Set all but the most likely tokens to -inf: first the `top_k` [N] (0: all), of those the `top_p` [N] of mass.

    Ties at the border are cut by token index, so that exactly k remain. Never leaves a row without a token.
    """
    scaled = logits.float() / torch.where(temperatures > 0, temperatures, 1.0)[:, None]
    sorted_logits, order = scaled.sort(dim=-1, descending=True, stable=True)  # [N, V]
    rank = torch.arange(logits.shape[1], device=logits.device)
    keep = (top_k[:, None] == 0) | (rank < top_k[:, None])
    probs = sorted_logits.masked_fill(~keep, -torch.inf).softmax(-1)
    mass_before = probs.cumsum(-1) - probs
    # In float32 the sum can reach 1 before the last token: 1 must keep all of them.
    keep &= (top_p[:, None] >= 1) | (mass_before < top_p[:, None]) | (rank == 0)
    keep_by_token = torch.zeros_like(keep).scatter_(1, order, keep)
    return logits.masked_fill(~keep_by_token, -torch.inf)


def sample_rows(
    logits: Tensor,
    temperatures: npt.NDArray[np.float32],
    rng_keys: npt.NDArray[np.uint64],
    positions: npt.NDArray[np.int64],
    forced: npt.NDArray[np.int32] | None = None,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Sample one token a row and its log-prob; see `sample_rows_reference` and `row_logprobs_reference`.

    Where `forced` [N] is not -1 the row takes that token: the sampling is done all the same, and its token dropped.
    """
    if forced is None:
        forced = np.full(len(logits), -1, np.int32)
    if logits.device.type == "cpu":
        from srtrl.engine.sampling_kernel import sample_rows_on_cpu
        from srtrl.model.cpu_threads import use_kernel_threads

        use_kernel_threads(8 * logits.numel())
        token_ids = np.empty(len(logits), np.int64)
        logprobs = np.empty(len(logits), np.float32)
        sample_rows_on_cpu(logit_bits(logits), temperatures, rng_keys, positions, forced, token_ids, logprobs)
        return token_ids, logprobs
    inputs = [torch.from_numpy(array) for array in (temperatures, rng_keys.view(np.int64), positions, forced)]
    return sample_rows_by_torch(logits, *(tensor.to(logits.device) for tensor in inputs))


def logit_bits(logits: Tensor) -> npt.NDArray[np.uint32] | npt.NDArray[np.uint16]:
    """The memory of logits on a CPU as the kernels read it: bfloat16 as uint16, all else (as float32) as uint32."""
    if logits.dtype == torch.bfloat16:
        half: npt.NDArray[np.uint16] = logits.view(torch.uint16).numpy()
        return half
    whole: npt.NDArray[np.uint32] = logits.float().numpy().view(np.uint32)
    return whole


def sample_rows_by_torch(
    logits: Tensor, temperatures: Tensor, rng_keys: Tensor, positions: Tensor, forced: Tensor
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """`sample_rows` on the device of `logits`, with one copy to the host at the end."""
    num_rows_at_once = max(1, MAX_NOISE // logits.shape[1])
    results = []
    for first in range(0, len(logits), num_rows_at_once):
        rows = slice(first, first + num_rows_at_once)
        sampled = sample_rows_reference(logits[rows], temperatures[rows], rng_keys[rows], positions[rows])
        tokens = torch.where(forced[rows] >= 0, forced[rows].long(), sampled)
        logprobs = row_logprobs_reference(logits[rows], temperatures[rows], tokens)
        results.append(torch.stack((tokens.double(), logprobs.double())))  # both fit into float64
    on_host = torch.cat(results, dim=1).cpu().numpy()
    return on_host[0].astype(np.int64), on_host[1].astype(np.float32)
