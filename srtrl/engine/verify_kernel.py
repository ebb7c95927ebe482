"""The walks of all sequences along their draft trees, in one call: the fast twin of `verify.walk_by_depth`.

Rows: sequence b of B has its root's row at `offsets[b] + b`, then those of its nodes. The outputs of its walk begin at
its root's row as well, one entry a token: a walk has at most as many tokens as the sequence has rows.
"""

from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from srtrl.drafters.draft_tree import ROOT
from srtrl.engine.sampling_kernel import make_scratch, sample_row

Array = npt.NDArray[Any]


@numba.njit(nogil=True)
def _next_node(node: int, token: int, num_left: int, node_tokens: Array, parents: Array, end_tokens: Array) -> int:
    """The child of `node` that carries `token`; `ROOT` where there is none or the sample ends with this token."""
    if num_left == 0:
        return ROOT
    for end_token in end_tokens:
        if end_token == token:
            return ROOT
    for child in range(node + 1, len(parents)):  # parents come before their children
        if parents[child] == node and node_tokens[child] == token:
            return child
    return ROOT


@numba.njit(parallel=True, cache=True, nogil=True)
def walk_trees(
    logits: Array,
    node_tokens: Array,
    parents: Array,
    offsets: Array,
    temperatures: Array,
    rng_keys: Array,
    positions: Array,
    limits: Array,
    end_tokens: Array,
    forced: Array,
    token_ids: Array,
    logprobs: Array,
    nodes: Array,
    counts: Array,
) -> None:
    """Sample along each sequence's tree, only the rows that its walk visits.

    Args:
        logits: [rows, V], the bits of float32 as uint32, or of bfloat16 as uint16.
        node_tokens: [num_nodes] int32, as `DraftTrees.token_ids`; `parents` and `offsets` likewise.
        parents: [num_nodes] int32.
        offsets: [B + 1] int64.
        temperatures: [B] float32.
        rng_keys: [B] uint64.
        positions: [B] int64, of the root's token within the response.
        limits: [B] int64, how many tokens the sample may still have; at least 1.
        end_tokens: [B, E] int64, padded with -1.
        forced: [rows] int32, laid out as the outputs: the tokens to take whatever is sampled; -1 takes the sampled.
        token_ids: [rows] int64, written; entries behind a walk's end are left alone.
        logprobs: [rows] float32, written.
        nodes: [rows] int32, written: the accepted node of each token but the last.
        counts: [B] int64, written: tokens of each walk, at least 1. A walk ends at a log-prob that is not finite.
    """
    for b in numba.prange(len(counts)):
        first, node, count = offsets[b] + b, ROOT, 0
        tree = slice(offsets[b], offsets[b + 1])
        scratch = make_scratch(logits.shape[1])
        while True:
            out = first + count
            token, logprob = sample_row(
                logits[first + 1 + node], temperatures[b], rng_keys[b], positions[b] + count, forced[out], scratch
            )
            token_ids[out], logprobs[out] = token, logprob
            count += 1
            if not np.isfinite(logprob):
                break
            node = _next_node(node, token, limits[b] - count, node_tokens[tree], parents[tree], end_tokens[b])
            if node == ROOT:
                break
            nodes[out] = node
        counts[b] = count


@numba.njit(cache=True, nogil=True)
def follow_trees(
    row_tokens: Array,
    row_logprobs: Array,
    node_tokens: Array,
    parents: Array,
    offsets: Array,
    limits: Array,
    end_tokens: Array,
    token_ids: Array,
    logprobs: Array,
    nodes: Array,
    counts: Array,
) -> None:
    """`walk_trees` where all rows were sampled before: `row_tokens` [rows] int64, `row_logprobs` [rows] float32."""
    for b in range(len(counts)):
        first, node, count = offsets[b] + b, ROOT, 0
        tree = slice(offsets[b], offsets[b + 1])
        while True:
            row, out = first + 1 + node, first + count
            token_ids[out], logprobs[out] = row_tokens[row], row_logprobs[row]
            count += 1
            if not np.isfinite(logprobs[out]):
                break
            node = _next_node(node, row_tokens[row], limits[b] - count, node_tokens[tree], parents[tree], end_tokens[b])
            if node == ROOT:
                break
            nodes[out] = node
        counts[b] = count
