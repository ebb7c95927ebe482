"""Paged tree attention on a CPU: one Numba kernel that reads the pages where they lie.

Each (row, key-value head) is one task that computes alone, in one fixed order: keys by absolute position, then the
row's own branch of the draft tree by depth. So the output bits of a row do not depend on the batch around it, on how
many rows were computed together, or on whether a key was committed or drafted: tree verification equals sequential
decoding with `==`. Gathering pages for `scaled_dot_product_attention` promises none of this and is slower.
"""

from typing import Any

import numba
import numpy as np
import numpy.typing as npt
from numba.extending import overload

from srtrl.model.vector_exp import exp_parts

NUM_LANES = 16
"""The softmax denominator is summed in so many lanes, by position modulo this."""

Array = npt.NDArray[Any]


def _as_float32(page: Any, buffer: Any) -> Any:
    """A page of one head as float32: the page itself, or a bfloat16 page (seen as uint16) widened into `buffer`."""
    raise AssertionError("compiled only")


@overload(_as_float32, inline="always")
def _(page: Any, buffer: Any) -> Any:
    def keep(page: Any, buffer: Any) -> Any:
        return page

    def widen(page: Any, buffer: Any) -> Any:
        bits = buffer.view(np.uint32)
        for i in range(page.shape[0]):
            for j in range(page.shape[1]):
                bits[i, j] = np.uint32(page[i, j]) << np.uint32(16)
        return buffer

    return keep if page.dtype == numba.float32 else widen


@numba.njit(inline="always")
def _softmax(scores: Array, powers: Array, length: int) -> np.float32:
    """Replace `scores[:length]` by e**(score - max); returns their sum. `powers` is int32 scratch as long."""
    highest = scores[0]
    for t in range(1, length):
        highest = max(highest, scores[t])
    for t in range(length):
        scores[t], powers[t] = exp_parts(scores[t] - highest)
    factors = powers.view(np.float32)
    for t in range(length):
        scores[t] *= factors[t]
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
def _score_page(query: Array, keys: Array, scores: Array) -> None:
    """scores[j] = query . keys[:, j] for the positions j of one page; `query` [E] is scaled, `keys` [E, page_size]."""
    for j in range(keys.shape[1]):
        scores[j] = 0
    for e in range(keys.shape[0]):
        factor = query[e]
        for j in range(keys.shape[1]):
            scores[j] += factor * keys[e, j]


@numba.njit(inline="always")
def _score_keys(
    queries: Array, key_pages: Array, head: int, pages: Array, context: int, path: Array, scores: Array
) -> None:
    """scores[g, i] = queries[g] . key, over the context's pages and then the branch `path` (KV indices by depth)."""
    page_size = key_pages.shape[3]
    buffer = np.empty((queries.shape[1], page_size), np.float32)
    for p in range((context + page_size - 1) // page_size):
        keys = _as_float32(key_pages[pages[p], head], buffer)
        for g in range(queries.shape[0]):
            _score_page(queries[g], keys, scores[g, p * page_size : (p + 1) * page_size])
    for i in range(len(path)):
        keys = _as_float32(key_pages[path[i] // page_size, head], buffer)
        for g in range(queries.shape[0]):
            score = np.float32(0)
            for e in range(queries.shape[1]):
                score += queries[g, e] * keys[e, path[i] % page_size]
            scores[g, context + i] = score


@numba.njit(inline="always")
def _sum_values(
    scores: Array, value_pages: Array, head: int, pages: Array, context: int, path: Array, sums: Array
) -> None:
    """sums[g] += scores[g, position] * value, in the order of positions."""
    page_size = value_pages.shape[2]
    buffer = np.empty((page_size, sums.shape[1]), np.float32)
    for p in range((context + page_size - 1) // page_size):
        values = _as_float32(value_pages[pages[p], head], buffer)
        for g in range(sums.shape[0]):
            for j in range(min(page_size, context - p * page_size)):
                weight = scores[g, p * page_size + j]
                for e in range(sums.shape[1]):
                    sums[g, e] += weight * values[j, e]
    for i in range(len(path)):
        values = _as_float32(value_pages[path[i] // page_size, head], buffer)
        for g in range(sums.shape[0]):
            weight = scores[g, context + i]
            for e in range(sums.shape[1]):
                sums[g, e] += weight * values[path[i] % page_size, e]


@numba.njit(inline="always")
def _fill_path(words: Array, context: int, pages: Array, page_size: int, path: Array) -> int:
    """KV indices of the draft nodes whose bits are set, by depth (ancestors come first); returns their number."""
    depth = 0
    for w in range(len(words)):
        bits = np.int64(words[w]) & np.int64(0xFFFFFFFF)
        node = 32 * w
        while bits != 0:
            if bits & 1:
                position = context + node
                path[depth] = pages[position // page_size] * page_size + position % page_size
                depth += 1
            bits >>= 1
            node += 1
    return depth


@numba.njit(parallel=True, cache=True, nogil=True)
def attend_paged(
    q: Array,
    key_pages: Array,
    value_pages: Array,
    page_tables: Array,
    row_tables: Array,
    context_lengths: Array,
    ancestors: Array,
    scale: np.float32,
    out: Array,
) -> None:
    """Attention of each row to its committed context and its branch of the draft tree.

    Args:
        q: [N, H, E] float32.
        key_pages: [num_pages, K, E, page_size], float32, or bfloat16 seen as uint16.
        value_pages: [num_pages, K, page_size, E], likewise.
        page_tables: [B, P] int32, the pages of each sequence.
        row_tables: [N] int32, which page table a row reads.
        context_lengths: [N] int32, positions 0 to this of the page table are seen.
        ancestors: [N, W] int32, bits of the row's ancestors in the tree and itself; see `PagedRows.ancestors`.
        scale: Factor of the scores.
        out: [N or more, H, E] float32, written.
    """
    num_rows, num_heads, width = q.shape
    num_kv_heads, page_size = key_pages.shape[1], key_pages.shape[3]
    group = num_heads // num_kv_heads
    most_nodes = 32 * ancestors.shape[1]
    longest = np.max(context_lengths) + most_nodes + page_size + NUM_LANES
    for task in numba.prange(num_rows * num_kv_heads):
        n, head = task // num_kv_heads, task % num_kv_heads
        pages = page_tables[row_tables[n]]
        path = np.empty(most_nodes, np.int32)
        path = path[: _fill_path(ancestors[n], context_lengths[n], pages, page_size, path)]
        queries = np.empty((group, width), np.float32)
        for g in range(group):
            for e in range(width):
                queries[g, e] = q[n, head * group + g, e] * scale
        scores = np.empty((group, longest), np.float32)
        powers = np.empty(longest, np.int32)
        sums = np.zeros((group, width), np.float32)
        _score_keys(queries, key_pages, head, pages, context_lengths[n], path, scores)
        inverse = np.empty(group, np.float32)
        for g in range(group):
            inverse[g] = np.float32(1) / _softmax(scores[g], powers, context_lengths[n] + len(path))
        _sum_values(scores, value_pages, head, pages, context_lengths[n], path, sums)
        for g in range(group):
            for e in range(width):
                out[n, head * group + g, e] = sums[g, e] * inverse[g]


@numba.njit(cache=True, nogil=True)
def write_kv(k: Array, v: Array, kv_indices: Array, key_pages: Array, value_pages: Array) -> None:
    """Store the keys and values of the rows, `k` and `v` [N, K, E], at `kv_indices` [N] int32."""
    page_size = key_pages.shape[3]
    for n in range(len(kv_indices)):
        page, offset = kv_indices[n] // page_size, kv_indices[n] % page_size
        for head in range(k.shape[1]):
            for e in range(k.shape[2]):
                key_pages[page, head, e, offset] = k[n, head, e]
                value_pages[page, head, offset, e] = v[n, head, e]
