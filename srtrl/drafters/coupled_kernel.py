"""Chains merged into draft trees, all sequences of a step in one call."""

from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from srtrl.drafters.draft_tree import ROOT

Array = npt.NDArray[Any]


@numba.njit(cache=True, nogil=True)
def _join(
    tokens: Array, parents: Array, scores: Array, count: int, chain: Array, chance: float, chain_nodes: Array
) -> int:
    """Add the chain to a tree of `count` nodes, sharing the nodes it has in common; returns the number of nodes.

    `chain_nodes[depth]` is set to the chain's node at that depth. Scores of the nodes that were there stay.
    """
    node = ROOT
    total = count
    shared = True
    score = 1.0
    for depth in range(len(chain)):
        found = -1
        if shared:
            for other in range(node + 1, count):
                if parents[other] == node and tokens[other] == chain[depth]:
                    found = other
                    break
            shared = found >= 0
        score *= chance
        if found < 0:
            found = total
            tokens[found], parents[found], scores[found] = chain[depth], node, score
            total += 1
        chain_nodes[depth] = found
        node = found
    return total


@numba.njit(cache=True, nogil=True)
def _rescore(
    parents: Array, scores: Array, count: int, total: int, chance: float, chain_nodes: Array, merged: Array
) -> None:
    """Scores of the joint tree into `merged` [total].

    A node of the chain has the larger of its two scores. What that leaves of its parent's is all that its siblings can
    have: they share it as they shared what the tree left them, and so do their descendants.
    """
    depths = np.full(total, -1, np.int64)  # of the nodes of the chain, from 0
    for depth in range(len(chain_nodes)):
        depths[chain_nodes[depth]] = depth
    for node in range(total):
        parent = parents[node]
        old_above = scores[parent] if parent != ROOT else 1.0
        new_above = merged[parent] if parent != ROOT else 1.0
        depth = depths[node]
        if depth >= 0:
            score = max(chance ** (depth + 1), scores[node])
        elif parent == ROOT or depths[parent] >= 0:
            next_depth = depths[parent] + 1 if parent != ROOT else 0
            old_left, new_left = old_above, new_above
            if next_depth < len(chain_nodes):
                rival = chain_nodes[next_depth]
                if rival < count:
                    old_left -= scores[rival]
                    new_left -= max(chance ** (next_depth + 1), scores[rival])
                else:
                    new_left -= scores[rival]
            old_left = max(old_left, scores[node])
            score = max(new_left, 0.0) * scores[node] / old_left if old_left > 0 else 0.0
        else:
            score = new_above * scores[node] / old_above if old_above > 0 else 0.0
        merged[node] = min(score, new_above)


@numba.njit(cache=True, nogil=True)
def merge_chains(
    token_ids: Array,
    parents: Array,
    scores: Array,
    offsets: Array,
    chains: Array,
    chain_offsets: Array,
    chances: Array,
    max_nodes: Array,
) -> tuple[Array, Array, Array, Array]:
    """Merge a chain into each of B trees; the best `max_nodes` nodes stay, in order of falling score.

    Args:
        token_ids: [nodes of all trees] int32, as in `DraftTrees`.
        parents: As in `DraftTrees`.
        scores: As in `DraftTrees`.
        offsets: [B + 1].
        chains: [tokens of all chains] int32.
        chain_offsets: [B + 1]; a chain may be empty.
        chances: [B], chance of each token of the chain to be accepted, given that those before it are.
        max_nodes: [B].

    Returns:
        Token ids, parents, scores and offsets of the merged trees, as in `DraftTrees`.
    """
    room = len(token_ids) + len(chains)
    out_tokens, out_parents = np.empty(room, np.int32), np.empty(room, np.int32)
    out_scores, out_offsets = np.empty(room, np.float32), np.zeros(len(offsets), np.int64)
    for b in range(len(chances)):
        first, count, at = offsets[b], offsets[b + 1] - offsets[b], out_offsets[b]
        chain = chains[chain_offsets[b] : chain_offsets[b + 1]]
        tree_tokens, tree_parents = np.empty(count + len(chain), np.int32), np.empty(count + len(chain), np.int32)
        tree_scores = np.empty(count + len(chain), np.float32)
        tree_tokens[:count] = token_ids[first : first + count]
        tree_parents[:count] = parents[first : first + count]
        tree_scores[:count] = scores[first : first + count]
        if len(chain):
            chain_nodes = np.empty(len(chain), np.int64)
            total = _join(tree_tokens, tree_parents, tree_scores, count, chain, chances[b], chain_nodes)
            merged = np.empty(total, np.float32)
            _rescore(tree_parents, tree_scores, count, total, chances[b], chain_nodes, merged)
        else:
            total, merged = count, tree_scores
        # Stable: of equal scores the parent, which has the lower index, comes first.
        order = np.argsort(-merged[:total], kind="mergesort")
        places = np.empty(total, np.int32)
        kept = min(total, max_nodes[b])
        for rank in range(kept):
            node = order[rank]
            places[node] = rank
            out_tokens[at + rank] = tree_tokens[node]
            out_parents[at + rank] = places[tree_parents[node]] if tree_parents[node] != ROOT else ROOT
            out_scores[at + rank] = merged[node]
        out_offsets[b + 1] = at + kept
    end = out_offsets[-1]
    return out_tokens[:end], out_parents[:end], out_scores[:end], out_offsets
