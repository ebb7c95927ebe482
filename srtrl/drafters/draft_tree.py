"""Draft trees: guessed continuations of sequences that a single forward pass verifies.

`DraftTree` is one sequence's tree; `DraftTrees` are those of a decode step, end to end in flat arrays.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numba
import numpy as np
import numpy.typing as npt

from srtrl.resolve import describe_value

ROOT = -1
"""Parent of the nodes that continue the sequence directly."""


@dataclass(kw_only=True, slots=True, frozen=True)
class DraftTree:
    """Guessed continuations of a sequence's last committed token (the root, which is not a node of the tree).

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
        return replace(NO_TREES, offsets=np.zeros(num_trees + 1, np.int64))

    @property
    def num_nodes(self) -> int:
        """Number of drafted tokens in all trees."""
        return len(self.token_ids)

    @property
    def sizes(self) -> npt.NDArray[np.int64]:
        """[B], number of nodes of each tree."""
        sizes: npt.NDArray[np.int64] = self.offsets[1:] - self.offsets[:-1]  # `np.diff` takes ten times as long
        return sizes

    def pick(self, starts: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]) -> "DraftTrees":
        """Trees of the nodes from starts[i] on, sizes[i] of them, each the beginning of one of these trees."""
        nodes = ranges(starts, sizes)
        return DraftTrees(
            token_ids=self.token_ids[nodes],
            parents=self.parents[nodes],
            scores=self.scores[nodes],
            offsets=np.concatenate([[0], sizes.cumsum()]),
        )

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


NO_TREES = DraftTrees.of([])
"""Of no sequence."""


def ranges(starts: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The numbers from starts[i] on, counts[i] of them, for each i in turn."""
    numbers: npt.NDArray[np.int64] = np.arange(counts.sum()) + np.repeat(starts - (counts.cumsum() - counts), counts)
    return numbers


def check_trees(trees: DraftTrees, max_nodes: npt.NDArray[np.int64], vocab_size: int, drafter: str) -> None:
    """Check what kernels rely on, before the arrays of any drafter reach one: it takes microseconds.

    Args:
        trees: The proposal.
        max_nodes: [B], as given to `propose`.
        vocab_size: Token ids are below it.
        drafter: Its name, for the message.

    Raises:
        ValueError: The drafter does not keep its promises.
    """
    if not isinstance(trees, DraftTrees):
        raise ValueError(f"{drafter}: `propose` must return DraftTrees, it returned: {describe_value(trees)}")
    arrays = trees.token_ids, trees.parents, trees.scores, trees.offsets
    types = [(getattr(array, "dtype", None), getattr(array, "ndim", None)) for array in arrays]
    expected = [(np.dtype(dtype), 1) for dtype in (np.int32, np.int32, np.float32, np.int64)]
    if types != expected or not _are_valid(*arrays, max_nodes, vocab_size):
        raise ValueError(
            f"{drafter} proposed incorrect draft trees; expected {len(max_nodes)} trees of at most max_nodes nodes: "
            f"token_ids (int32) below {vocab_size}, the size of the vocabulary; parents (int32) before their children; "
            "scores (float32), each an estimate of the chance that the node and all nodes above it are accepted, so at "
            "most the parent's; offsets (int64) from 0 to the number of nodes. "
            "Token ids that are too large often are those of another tokenizer"
        )


@numba.njit(cache=True, nogil=True)
def _are_valid(
    token_ids: npt.NDArray[np.int32],
    parents: npt.NDArray[np.int32],
    scores: npt.NDArray[np.float32],
    offsets: npt.NDArray[np.int64],
    max_nodes: npt.NDArray[np.int64],
    vocab_size: int,
) -> bool:
    """Whether the arrays are trees within the limits."""
    if len(offsets) != len(max_nodes) + 1 or offsets[0] != 0:
        return False
    if not (offsets[-1] == len(token_ids) == len(parents) == len(scores)):
        return False
    for tree in range(len(max_nodes)):  # sizes first: offsets out of range must not be followed
        if not 0 <= offsets[tree + 1] - offsets[tree] <= max_nodes[tree]:
            return False
    for tree in range(len(max_nodes)):
        for node in range(offsets[tree], offsets[tree + 1]):
            parent = parents[node]
            if not ROOT <= parent < node - offsets[tree] or not 0 <= token_ids[node] < vocab_size:
                return False
            if not np.isfinite(scores[node]) or (parent != ROOT and scores[node] > scores[offsets[tree] + parent]):
                return False
    return True
