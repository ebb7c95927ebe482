"""The decoder's attention: rows of many sequences against the pages of the KV cache, under draft-tree masks.

A *KV index*, a place in the cache, is `page * page_size + offset`. A row sees the committed positions of its sequence
(through the page table) and the draft nodes on its own branch, itself included (as bits); a prompt token or a root sees
committed positions only. One token and one tree are the same code path. Here are the cache, the rows of a step
and the kernel for CPUs.

In the CPU kernel each (row, key-value head) is one task that computes alone, in one fixed order: keys by absolute
position, then the row's own branch of the draft tree by depth. So the output bits of a row do not depend on the batch
around it, on how many rows were computed together, or on whether a key was committed or drafted: tree verification
equals sequential decoding with `==`. Gathering pages for `scaled_dot_product_attention` promises none of this and is
slower.

Letters: see `srtrl/types.py`; N rows, B page tables of P pages, W words of ancestor bits, all with padding.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numba
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from srtrl.model.cpu_threads import use_kernel_threads
from srtrl.model.kernels import makes_arrays
from srtrl.model.vector_exp import exp_parts

Array = npt.NDArray[Any]
Int32Array = npt.NDArray[np.int32]

BITS_PER_WORD = 32

NUM_LANES = 16
"""The CPU kernel sums the softmax denominator in this number of lanes, by position modulo it."""


class KVCache:
    """Keys and values of all layers in pages.

    Two layouts in memory, one way to index. For the CPU kernel's vector loops keys lie dimension by dimension within a
    head's page, values token by token, and both are at least float32. *Token-major* (CUDA): all heads of a token
    together, in the dtype of the model (`kernel_keys`); `key_pages` and `value_pages` are permuted views.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        token_major: bool = False,
    ) -> None:
        """Allocate; `token_major` chooses the layout (see the class)."""
        self.page_size = page_size

        # Zeros, for masked keys have weight 0 and 0 * NaN is NaN.
        def allocate(*page_shape: int) -> Tensor:
            cache_dtype = dtype if token_major else torch.promote_types(dtype, torch.float32)
            return torch.zeros((num_layers, num_pages, *page_shape), dtype=cache_dtype, device=device)

        if token_major:
            token_shape = (page_size, num_kv_heads, head_dim)
            key_pages = allocate(*token_shape).permute(0, 1, 3, 4, 2)
            value_pages = allocate(*token_shape).transpose(2, 3)
        else:
            key_pages = allocate(num_kv_heads, head_dim, page_size)
            value_pages = allocate(num_kv_heads, page_size, head_dim)
        self.key_pages = key_pages
        """[num_layers, num_pages, K, E, page_size]."""
        self.value_pages = value_pages
        """[num_layers, num_pages, K, page_size, E]."""

    def kernel_keys(self, layer: int) -> Tensor:
        """Keys of one layer as they lie in a token-major cache: [num_pages, page_size, K, E], contiguous."""
        return self.key_pages[layer].permute(0, 3, 1, 2)

    def kernel_values(self, layer: int) -> Tensor:
        """Values of one layer as they lie in a token-major cache: [num_pages, page_size, K, E], contiguous."""
        return self.value_pages[layer].transpose(1, 2)

    def write(self, layer: int, indices: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys and values, [M, K, E] each, of one layer at KV indices [M]."""
        pages, offsets = indices.long() // self.page_size, indices.long() % self.page_size
        self.key_pages[layer][pages, :, :, offsets] = keys.to(self.key_pages.dtype)
        self.value_pages[layer][pages, :, offsets] = values.to(self.value_pages.dtype)

    def move_indices(self, sources: Int32Array, targets: Int32Array) -> None:
        """Copy single KV indices in all layers, [M] each; every source is read before any target is written."""
        moves = np.stack(np.divmod(np.stack([sources, targets]).astype(np.int64), self.page_size))
        (source_page, target_page), (source, target) = torch.from_numpy(moves).to(self.key_pages.device)  # [M] each
        keys = self.key_pages[:, source_page, :, :, source]  # [M, num_layers, K, E]
        values = self.value_pages[:, source_page, :, source]
        self.key_pages[:, target_page, :, :, target] = keys
        self.value_pages[:, target_page, :, target] = values


@dataclass(kw_only=True, slots=True, frozen=True)
class TreeRows:
    """The rows of a step as int32 tensors on the device; `engine.step_inputs.StepInputs` documents each field."""

    token_ids: Tensor
    """[N]."""
    positions: Tensor
    """[N], rotary positions."""
    kv_indices: Tensor
    """[N], where the row's own key and value go; -1 for padding: nothing is written."""
    context_lengths: Tensor
    """[N], committed positions that the row sees (its own included where it is no draft node); 0 for padding."""
    row_tables: Tensor
    """[N], row of `page_tables`."""
    ancestors: Tensor
    """[N, W], bits of the draft nodes that the row sees, itself included: bit i % 32 of word i // 32 for node i of its
    tree, whose key lies at position context_length + i of the sequence."""
    page_tables: Tensor
    """[B, P], pages of each sequence in order of position; entries after its last page are never read."""


class PagedPlan:
    """The plan of a decode step on a CPU (`srtrl.model.attention.AttentionPlan`), by one Numba kernel in float32."""

    def __init__(self, cache: KVCache, rows: TreeRows) -> None:
        assert cache.key_pages.dtype == torch.float32, "the kernel reads float32"
        self.cache = cache
        self.positions = rows.positions.long()
        self.num_positions = int(rows.positions.max()) + 1
        self._kv_indices, self._contexts = rows.kv_indices.numpy(), rows.context_lengths.numpy()
        self._row_tables, self._page_tables = rows.row_tables.numpy(), rows.page_tables.numpy()
        bits = np.unpackbits(rows.ancestors.numpy().view(np.uint8), axis=1, bitorder="little")  # [N, 32 W]
        owners, nodes = np.nonzero(bits)  # by row, then by depth: a node's ancestors come before it
        positions = self._contexts[owners] + nodes
        pages = self._page_tables[self._row_tables[owners], positions // cache.page_size]
        self._branches = pages * cache.page_size + positions % cache.page_size
        """KV indices of the draft nodes that the rows see, one row after the other."""
        self._branch_starts = np.searchsorted(owners, np.arange(len(bits) + 1))
        self._longest = int(self._contexts.max() + np.diff(self._branch_starts).max())

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
        """Store the rows' keys and values, then attend; see `AttentionPlan.attend`. Padding rows come out as zeros."""
        keys, values = self.cache.key_pages[layer].numpy(), self.cache.value_pages[layer].numpy()
        # Contiguous for any number of rows: other strides would be another type, and compile once more.
        q_rows, k_rows, v_rows = (heads.float().contiguous().numpy() for heads in (q, k, v))
        write_kv(k_rows, v_rows, self._kv_indices, keys, values)
        use_kernel_threads(2 * int(self._contexts.sum()) * q.shape[1] * q.shape[2])
        out = torch.zeros(q.shape, dtype=torch.float32)
        tables = self._page_tables, self._row_tables, self._contexts, self._branches, self._branch_starts
        scale = np.float32(q.shape[-1] ** -0.5)
        inputs = AttentionInputs(q_rows, keys, values, *tables, scale, self._longest, window or self._longest)
        attend_paged(inputs, out.numpy())
        return out.to(q.dtype)


@numba.njit(cache=True, nogil=True)
def write_kv(k: Array, v: Array, kv_indices: Array, key_pages: Array, value_pages: Array) -> None:
    """Store the keys and values of the rows, `k` and `v` [N, K, E], at `kv_indices` [N] int32; -1 stores nothing."""
    page_size = key_pages.shape[3]
    for n in range(len(kv_indices)):
        if kv_indices[n] < 0:
            continue
        page, offset = kv_indices[n] // page_size, kv_indices[n] % page_size
        for head in range(k.shape[1]):
            for e in range(k.shape[2]):
                key_pages[page, head, e, offset] = k[n, head, e]
                value_pages[page, head, offset, e] = v[n, head, e]


class AttentionInputs(NamedTuple):
    """The inputs of `attend_paged`."""

    q: Array
    """[N, H, E] float32."""
    key_pages: Array
    """[num_pages, K, E, page_size] float32."""
    value_pages: Array
    """[num_pages, K, page_size, E] float32."""
    page_tables: Array
    """[B, P] int32, the pages of each sequence."""
    row_tables: Array
    """[N] int32, which page table a row reads."""
    context_lengths: Array
    """[N] int32, positions 0 to this of the page table are seen; rows of 0 are left out."""
    branches: Array
    """KV indices of the draft nodes that the rows see, row by row, each row's by depth."""
    branch_starts: Array
    """[N + 1], where in `branches` those of a row begin."""
    scale: np.float32
    """Factor of the scores."""
    longest: int
    """No row has more keys."""
    window: int
    """A row sees the last of its keys, as many as this; they are in order of position."""


@numba.njit(parallel=True, cache=True, nogil=True)
def attend_paged(inputs: AttentionInputs, out: Array) -> None:
    """Attention of each row to its committed context and its branch of the draft tree, into `out` [N, H, E] float32."""
    for n in numba.prange(len(out)):
        if inputs.context_lengths[n] > 0:
            _attend_row(np.int64(n), inputs, out)  # an unsigned number, as in the loop, would compile once more


@makes_arrays
def _attend_row(n: np.int64, inputs: AttentionInputs, out: Array) -> None:
    """Attention of row n, see `attend_paged`: in a parallel function this would take twice as long to compile."""
    q, key_pages, value_pages, page_tables, row_tables = inputs[:5]
    context_lengths, branches, starts, scale, longest, window = inputs[5:]
    num_kv_heads, page_size = key_pages.shape[1], key_pages.shape[3]
    group, width = q.shape[1] // num_kv_heads, q.shape[2]
    context, pages, branch = (
        context_lengths[n],
        page_tables[row_tables[n]],
        branches[starts[n] : starts[n + 1]],
    )
    first = max(0, context + len(branch) - window)
    room = longest + page_size + NUM_LANES
    scratch = np.empty((3, group, width), np.float32)
    queries, sums, inverse = scratch[0], scratch[1], scratch[2, :, 0]
    scores = np.empty((group, room), np.float32)
    powers = np.empty(room, np.int32)
    for head in range(num_kv_heads):
        for g in range(group):
            for e in range(width):
                queries[g, e] = q[n, head * group + g, e] * scale
                sums[g, e] = 0
        _score_keys(queries, key_pages, head, pages, context, branch, first, scores)
        for g in range(group):
            inverse[g] = np.float32(1) / _softmax(scores[g], powers, first, context + len(branch))
        _sum_values(scores, value_pages, head, pages, context, branch, first, sums)
        for g in range(group):
            for e in range(width):
                out[n, head * group + g, e] = sums[g, e] * inverse[g]


@numba.njit(inline="always")
def _score_keys(
    queries: Array, key_pages: Array, head: int, pages: Array, context: int, branch: Array, first: int, scores: Array
) -> None:
    """scores[g, i] = queries[g] . key, over the context's pages and then the KV indices `branch`, from i = `first`."""
    page_size = key_pages.shape[3]
    for p in range((context + page_size - 1) // page_size):
        if p < first // page_size:
            continue
        keys = key_pages[pages[p], head]  # [E, page_size]
        for g in range(queries.shape[0]):
            page_scores = scores[g, p * page_size : (p + 1) * page_size]
            for j in range(page_size):
                page_scores[j] = 0
            for e in range(keys.shape[0]):
                factor = queries[g, e]
                for j in range(page_size):
                    page_scores[j] += factor * keys[e, j]
    for i in range(len(branch)):
        keys = key_pages[branch[i] // page_size, head]
        for g in range(queries.shape[0]):
            score = np.float32(0)
            for e in range(queries.shape[1]):
                score += queries[g, e] * keys[e, branch[i] % page_size]
            scores[g, context + i] = score


@numba.njit(inline="always")
def _softmax(scores: Array, powers: Array, first: int, length: int) -> np.float32:
    """Replace `scores[first:length]` by e**(score - max), those before by 0; returns their sum.

    `powers` is int32 scratch as long as `scores`.
    """
    seen = scores[first:length]  # loops from 0: from elsewhere they are slower
    highest = seen[0]
    for t in range(1, len(seen)):
        highest = max(highest, seen[t])
    for t in range(len(seen)):
        seen[t], powers[t] = exp_parts(seen[t] - highest)
    factors = powers.view(np.float32)
    for t in range(len(seen)):
        seen[t] *= factors[t]
    for t in range(first):
        scores[t] = 0
    padded = (length + NUM_LANES - 1) // NUM_LANES * NUM_LANES
    for t in range(length, padded):
        scores[t] = 0
    lanes = np.zeros(NUM_LANES, np.float32)
    for start in range(0, padded, NUM_LANES):
        for j in range(NUM_LANES):
            lanes[j] += scores[start + j]
    total = np.float32(0)
    for j in range(NUM_LANES):
        total += lanes[j]
    return total


@numba.njit(inline="always")
def _sum_values(
    scores: Array, value_pages: Array, head: int, pages: Array, context: int, branch: Array, first: int, sums: Array
) -> None:
    """sums[g] += scores[g, i] * value, in the order of `_score_keys`; scores before `first` are 0."""
    page_size = value_pages.shape[2]
    for p in range((context + page_size - 1) // page_size):
        if p < first // page_size:
            continue
        values = value_pages[pages[p], head]  # [page_size, E]
        for g in range(sums.shape[0]):
            for j in range(min(page_size, context - p * page_size)):
                weight = scores[g, p * page_size + j]
                for e in range(sums.shape[1]):
                    sums[g, e] += weight * values[j, e]
    for i in range(len(branch)):
        values = value_pages[branch[i] // page_size, head]
        for g in range(sums.shape[0]):
            weight = scores[g, context + i]
            for e in range(sums.shape[1]):
                sums[g, e] += weight * values[branch[i] % page_size, e]
