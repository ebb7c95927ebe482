"""Draft trees: guessed continuations of sequences that a single forward pass verifies.

`DraftTree` is one sequence's tree; `DraftTrees` are those of a decode step, end to end in flat arrays.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

ROOT = -1
"""Parent of the nodes that continue the sequence directly."""


@dataclass(kw_only=True, slots=True, frozen=True)
class DraftTree:
    """Guesses of what follows a sequence's last committed token (the root, which is not a node of the tree).

    Nodes are in topological order: a parent comes before its children. Siblings carry different tokens, so that at
    most one of them can be accepted.
    """

    token_ids: npt.NDArray[np.int32]
    """[num_nodes]."""
    parents: npt.NDArray[np.int32]
    """[num_nodes], index of the parent node, or `ROOT`."""
    scores: npt.NDArray[np.float32]
    """[num_nodes], the drafter's estimate that the node is accepted; at most its parent's."""

    @property
    def num_nodes(self) -> int:
        """Number of drafted tokens."""
        return len(self.token_ids)

    def depths(self) -> npt.NDArray[np.int32]:
        """[num_nodes]: 1 for a child of the root, and one more for each generation."""
        depths = np.ones(self.num_nodes, dtype=np.int32)
        for node, parent in enumerate(self.parents):
            if parent != ROOT:
                depths[node] = depths[parent] + 1
        return depths

    def first(self, num_nodes: int) -> "DraftTree":
        """Return the tree of its first `num_nodes` nodes (a tree again, for parents come first)."""
        return DraftTree(
            token_ids=self.token_ids[:num_nodes], parents=self.parents[:num_nodes], scores=self.scores[:num_nodes]
        )

    def check(self, vocab_size: int) -> None:
        """Assert what the engine relies on: order, distinct siblings, known tokens."""
        assert len(self.parents) == len(self.scores) == self.num_nodes
        seen: set[tuple[int, int]] = set()
        for node, (token, parent) in enumerate(zip(self.token_ids.tolist(), self.parents.tolist(), strict=True)):
            assert ROOT <= parent < node, f"node {node} has parent {parent}: parents come before their children"
            assert 0 <= token < vocab_size, f"node {node} drafts token {token} of a vocabulary of {vocab_size}"
            assert (parent, token) not in seen, f"two children of node {parent} carry token {token}"
            seen.add((parent, token))


EMPTY_TREE = DraftTree(token_ids=np.empty(0, np.int32), parents=np.empty(0, np.int32), scores=np.empty(0, np.float32))
"""No draft: the step decodes one token, on the same code path."""


@dataclass(kw_only=True, slots=True, frozen=True)
class DraftTrees:
    """The trees of B sequences, laid end to end: tree i is the slice `offsets[i]` to `offsets[i + 1]`."""

    token_ids: npt.NDArray[np.int32]
    """[total nodes]."""
    parents: npt.NDArray[np.int32]
    """[total nodes], index of the parent within its own tree, or `ROOT`."""
    scores: npt.NDArray[np.float32]
    """[total nodes], as in `DraftTree`."""
    offsets: npt.NDArray[np.int64]
    """[B + 1], from 0 to the number of all nodes."""

    @staticmethod
    def of(trees: Iterable[DraftTree]) -> "DraftTrees":
        """Lay trees end to end."""
        trees = list(trees)
        return DraftTrees(
            token_ids=np.concatenate([EMPTY_TREE.token_ids, *(tree.token_ids for tree in trees)]),
            parents=np.concatenate([EMPTY_TREE.parents, *(tree.parents for tree in trees)]),
            scores=np.concatenate([EMPTY_TREE.scores, *(tree.scores for tree in trees)]),
            offsets=np.cumsum([0, *(tree.num_nodes for tree in trees)], dtype=np.int64),
        )

    @staticmethod
    def empty(num_trees: int) -> "DraftTrees":
        """No draft for any of `num_trees` sequences."""
        return DraftTrees(
            token_ids=EMPTY_TREE.token_ids,
            parents=EMPTY_TREE.parents,
            scores=EMPTY_TREE.scores,
            offsets=np.zeros(num_trees + 1, np.int64),
        )

    def spread(self, places: npt.NDArray[np.int64], num_trees: int) -> "DraftTrees":
        """Return `num_trees` trees: these at `places` [B], ascending, and empty ones between them."""
        offsets = np.zeros(num_trees + 1, np.int64)
        offsets[places + 1] = self.sizes
        return DraftTrees(token_ids=self.token_ids, parents=self.parents, scores=self.scores, offsets=offsets.cumsum())

    @property
    def num_nodes(self) -> int:
        """Number of drafted tokens in all trees."""
        return len(self.token_ids)

    @property
    def sizes(self) -> npt.NDArray[np.int64]:
        """[B], number of nodes of each tree."""
        return np.diff(self.offsets)

    def __len__(self) -> int:
        """Number of trees, empty ones included."""
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> DraftTree:
        """Tree of the sequence `index` (views, no copies)."""
        nodes = slice(int(self.offsets[index]), int(self.offsets[index + 1]))
        return DraftTree(token_ids=self.token_ids[nodes], parents=self.parents[nodes], scores=self.scores[nodes])

    def __iter__(self) -> Iterator[DraftTree]:
        """Iterate over the trees in order."""
        return (self[index] for index in range(len(self)))
