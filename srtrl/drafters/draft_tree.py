"""Draft trees: guessed continuations of sequences that a single forward pass verifies.

`DraftTree` is one sequence's tree; `DraftTrees` are those of a decode step, end to end in flat arrays.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numba
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

    def first(self, num_nodes: int) -> "DraftTree":
        """Return the tree of its first `num_nodes` nodes (a tree again, for parents come first)."""
        return DraftTree(
            token_ids=self.token_ids[:num_nodes], parents=self.parents[:num_nodes], scores=self.scores[:num_nodes]
        )


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

    def take(self, indices: npt.NDArray[np.int64]) -> "DraftTrees":
        """Return the trees at `indices`."""
        sizes = self.sizes[indices]
        offsets = np.zeros(len(indices) + 1, np.int64)
        offsets[1:] = sizes.cumsum()
        nodes = ranges(self.offsets[indices], sizes)
        return DraftTrees(
            token_ids=self.token_ids[nodes], parents=self.parents[nodes], scores=self.scores[nodes], offsets=offsets
        )

    def replace(self, indices: npt.NDArray[np.int64], others: "DraftTrees") -> "DraftTrees":
        """Return these trees, but at `indices` [len(others)] the others."""
        both = DraftTrees(
            token_ids=np.concatenate([self.token_ids, others.token_ids]),
            parents=np.concatenate([self.parents, others.parents]),
            scores=np.concatenate([self.scores, others.scores]),
            offsets=np.concatenate([self.offsets, self.offsets[-1] + others.offsets[1:]]),
        )
        sources = np.arange(len(self))
        sources[indices] = len(self) + np.arange(len(others))
        return both.take(sources)

    @property
    def num_nodes(self) -> int:
        """Number of drafted tokens in all trees."""
        return len(self.token_ids)

    @property
    def sizes(self) -> npt.NDArray[np.int64]:
        """[B], number of nodes of each tree."""
        sizes: npt.NDArray[np.int64] = self.offsets[1:] - self.offsets[:-1]  # `np.diff` takes ten times as long
        return sizes

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


def ranges(starts: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The numbers from starts[i] on, counts[i] of them, for each i in turn."""
    numbers: npt.NDArray[np.int64] = np.arange(counts.sum()) + np.repeat(starts - (counts.cumsum() - counts), counts)
    return numbers


def check_trees(trees: DraftTrees, max_nodes: npt.NDArray[np.int64], vocab_size: int, who: str) -> None:
    """Check what kernels rely on, before the arrays of any drafter reach one: it takes microseconds.

    Args:
        trees: What the drafter proposed.
        max_nodes: [B], as given to `propose`.
        vocab_size: Token ids are below it.
        who: The drafter, for the message.

    Raises:
        ValueError: The drafter does not keep its promises.
    """
    for name, dtype in (("token_ids", np.int32), ("parents", np.int32), ("scores", np.float32), ("offsets", np.int64)):
        array = getattr(trees, name)
        if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != 1:
            raise ValueError(f"{who} proposed {name} that are no one-dimensional {np.dtype(dtype).name} array")
    tree, node, problem = _find_problem(
        trees.token_ids, trees.parents, trees.scores, trees.offsets, max_nodes, vocab_size
    )
    if problem == _NONE:
        return
    place = f"node {node} of tree {tree}"
    raise ValueError(
        f"{who} proposed incorrect draft trees: "
        + {
            _NUMBER: f"expected {len(max_nodes)} trees, whose offsets run from 0 to the number of tokens, parents and "
            f"scores; found {len(trees)} trees with {len(trees.token_ids)}, {len(trees.parents)} and "
            f"{len(trees.scores)} of these",
            _SIZE: f"tree {tree} has {trees.sizes[tree] if tree >= 0 else 0} nodes, expected 0 to {max_nodes[tree]}",
            _PARENT: f"{place} has parent {trees.parents[node]}, but a parent comes before its children",
            _TOKEN: f"{place} has token {trees.token_ids[node]} of a vocabulary of {vocab_size}; are its rollouts "
            "those of another tokenizer?",
            _SCORE: f"{place} has score {trees.scores[node]}, expected a finite number",
            _RISE: f"{place} has score {trees.scores[node]}, more than its parent's: expected an estimate of the "
            "probability that the node and all nodes above it are accepted, which is at most the parent's",
        }[problem]
    )


_NONE, _NUMBER, _SIZE, _PARENT, _TOKEN, _SCORE, _RISE = range(7)


@numba.njit(cache=True, nogil=True)
def _find_problem(
    token_ids: npt.NDArray[np.int32],
    parents: npt.NDArray[np.int32],
    scores: npt.NDArray[np.float32],
    offsets: npt.NDArray[np.int64],
    max_nodes: npt.NDArray[np.int64],
    vocab_size: int,
) -> tuple[int, int, int]:
    """Tree, node and kind of the first problem; `_NONE` if there is none."""
    if not (
        len(offsets) == len(max_nodes) + 1
        and offsets[0] == 0
        and offsets[-1] == len(token_ids) == len(parents) == len(scores)
    ):
        return 0, 0, _NUMBER
    for tree in range(len(max_nodes)):  # sizes first: offsets out of range must not be followed
        if not 0 <= offsets[tree + 1] - offsets[tree] <= max_nodes[tree]:
            return tree, 0, _SIZE
    for tree in range(len(max_nodes)):
        for node in range(offsets[tree], offsets[tree + 1]):
            problem = _NONE
            if not ROOT <= parents[node] < node - offsets[tree]:
                problem = _PARENT
            elif not 0 <= token_ids[node] < vocab_size:
                problem = _TOKEN
            elif not np.isfinite(scores[node]):
                problem = _SCORE
            elif parents[node] != ROOT and scores[node] > scores[offsets[tree] + parents[node]]:
                problem = _RISE
            if problem != _NONE:
                return tree, node, problem
    return 0, 0, _NONE
