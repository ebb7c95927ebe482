"""The kernels' results in plain PyTorch: sampling, log-probs, the attention of the update and of a decode step.

docs/examples/reference.py is the slow twin of the whole method; these are the twins of single kernels.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from srtrl.model.noise import GOLDEN, MIX_1, MIX_2
from srtrl.model.paged_attention import BITS_PER_WORD, KVCache, TreeRows


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
    scaled = logits.float() / torch.where(temperatures > 0, temperatures, 1.0)[:, None]  # [N, V]
    gumbel = -torch.log(-torch.log(uniform_noise(rng_keys, positions, logits.shape[1])))  # [N, V] float64
    noisy = torch.where(temperatures[:, None] > 0, scaled.double() + gumbel, scaled.double())
    return noisy.argmax(dim=-1)


def token_logprobs_reference(
    hidden: Tensor, head_weight: Tensor, target_ids: Tensor, *, temperature: float
) -> tuple[Tensor, Tensor]:
    """The same as `token_logprobs` in the fewest words and the most memory."""
    logits = functional.linear(hidden, head_weight)  # [R, V]
    logits = logits if logits.dtype == torch.float64 else logits.float()
    logprobs = torch.log_softmax(logits / temperature, dim=-1)  # [R, V]
    entropy = -(logprobs.exp() * logprobs).sum(dim=-1)  # [R]
    return logprobs.gather(-1, target_ids.unsqueeze(-1)).squeeze(-1), entropy


def packed_attention_reference(
    lengths: Sequence[int],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    num_queries: Sequence[int] | None = None,
    window: int | None = None,
) -> Tensor:
    """Causal attention within each sequence, written out: a sequence and an explicit softmax at a time.

    q [T, H, E], k and v [S, K, E] -> [T, H, E]. The queries of a sequence are its last `num_queries` tokens, by default
    all `lengths`.
    """
    num_shared = q.shape[1] // k.shape[1]  # query heads on one key-value head
    outputs = []
    counts = (list(num_queries or lengths), list(lengths), list(lengths))
    parts = (heads.split_with_sizes(sizes) for heads, sizes in zip((q, k, v), counts, strict=True))
    for q_one, k_one, v_one in zip(*parts, strict=True):
        keys, values = (heads.repeat_interleave(num_shared, dim=1) for heads in (k_one, v_one))  # [L, H, E]
        scores = torch.einsum("ihe,jhe->hij", q_one, keys) * q.shape[-1] ** -0.5  # [H, Q, L]
        steps = torch.arange(len(keys), device=q.device)
        distances = steps[len(keys) - len(q_one) :, None] - steps  # [Q, L]
        unseen = (distances < 0) | (distances >= (window or len(keys)))
        weights = scores.masked_fill(unseen, float("-inf")).softmax(dim=-1)
        outputs.append(torch.einsum("hij,jhe->ihe", weights, values))
    return torch.cat(outputs)


class ReferencePlan:
    """The plan of a decode step (`srtrl.model.attention.AttentionPlan`) in plain PyTorch, one row at a time.

    It states what the kernels compute, on any device, in any dtype and cache layout.
    """

    def __init__(self, cache: KVCache, rows: TreeRows) -> None:
        self.cache = cache
        self.num_positions = int(rows.positions.max()) + 1
        self.positions = rows.positions.long()
        self.real = (rows.kv_indices >= 0).nonzero().squeeze(1)
        self.targets = page_and_offset(rows.kv_indices[self.real], cache.page_size)
        self.seen = [self._seen_by(rows, row) for row in self.real.tolist()]
        """For each real row the pages and offsets of all keys that it sees."""

    def _seen_by(self, rows: TreeRows, row: int) -> tuple[Tensor, Tensor]:
        context = int(rows.context_lengths[row])
        bit = torch.arange(BITS_PER_WORD, device=rows.ancestors.device)
        nodes = ((rows.ancestors[row, :, None] >> bit) & 1).flatten().nonzero().squeeze(1)
        positions = torch.cat((torch.arange(context, device=nodes.device), context + nodes))
        pages, offsets = page_and_offset(positions, self.cache.page_size)
        return rows.page_tables[rows.row_tables[row]][pages].long(), offsets

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
        """Store the rows' keys and values, then attend, softmax in at least float32; padding comes out as zeros."""
        key_pages, value_pages = self.cache.key_pages[layer], self.cache.value_pages[layer]
        pages, offsets = self.targets
        key_pages[pages, :, :, offsets] = k[self.real].to(key_pages.dtype)
        value_pages[pages, :, offsets] = v[self.real].to(value_pages.dtype)
        wide = torch.promote_types(q.dtype, torch.float32)
        out = torch.zeros_like(q, memory_format=torch.contiguous_format)
        for row, (pages, offsets) in zip(self.real.tolist(), self.seen, strict=True):
            if window is not None:  # they are in order of position
                pages, offsets = pages[-window:], offsets[-window:]  # noqa: PLW2901
            keys = key_pages[pages, :, :, offsets].to(wide)  # [n, K, E]
            values = value_pages[pages, :, offsets].to(wide)  # [n, K, E]
            grouped = q[row].to(wide).reshape(keys.shape[1], -1, q.shape[-1])  # [K, H / K, E]
            scores = torch.einsum("kge,nke->kgn", grouped, keys) * q.shape[-1] ** -0.5
            out[row] = torch.einsum("kgn,nke->kge", scores.softmax(-1), values).flatten(0, 1).to(q.dtype)
        return out


def page_and_offset(indices: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
    """Page and offset of each KV index; of positions: the entry of the page table and the offset. int64."""
    return indices.long() // page_size, indices.long() % page_size
