"""Where draft trees lie among the rows of a step: the row of each root, then those of its nodes, tree after tree."""

from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from srtrl.drafters.draft_tree import ROOT, DraftTrees

Array = npt.NDArray[Any]


def root_rows(trees: DraftTrees) -> npt.NDArray[np.int64]:
    """[B], row of each root."""
    return trees.offsets[:-1] + np.arange(len(trees))


def node_rows(trees: DraftTrees) -> npt.NDArray[np.int64]:
    """[num_nodes], row of each node: before it lie the nodes before it, and as many roots as trees have begun."""
    return np.arange(trees.num_nodes) + np.repeat(np.arange(1, len(trees) + 1), trees.sizes)


def node_depths(trees: DraftTrees) -> npt.NDArray[np.int32]:
    """[num_nodes]: 1 for a child of a root, and one more for each generation (see `DraftTree.depths`)."""
    depths = np.empty(trees.num_nodes, np.int32)
    _fill_depths(trees.parents, trees.offsets, depths)
    return depths


@numba.njit(cache=True, nogil=True)
def _fill_depths(parents: Array, offsets: Array, depths: Array) -> None:
    for b in range(len(offsets) - 1):
        for node in range(offsets[b], offsets[b + 1]):
            depths[node] = 1 if parents[node] == ROOT else depths[offsets[b] + parents[node]] + 1


@numba.njit(cache=True, nogil=True)
def place_nodes(
    parents: Array,
    offsets: Array,
    depths: Array,
    write_slots: Array,
    positions: Array,
    context_lengths: Array,
    path_slots: Array,
    path_lengths: Array,
) -> None:
    """Fill the rows of the draft nodes: each sees the context up to its root, and its own branch.

    `parents`, `offsets` and `depths` are those of the trees; the other arrays are the fields of `PagedRows` of the same
    name, of which `write_slots` and the roots' rows are filled already.
    """
    for b in range(len(offsets) - 1):
        root = offsets[b] + b
        for node in range(offsets[b], offsets[b + 1]):
            row, depth = node + b + 1, depths[node]
            positions[row] = positions[root] + depth
            context_lengths[row] = context_lengths[root]
            path_lengths[row] = depth
            for level in range(depth - 1):  # the parent's branch; its row is filled, for parents come first
                path_slots[row, level] = path_slots[root + 1 + parents[node], level]
            path_slots[row, depth - 1] = write_slots[row]
