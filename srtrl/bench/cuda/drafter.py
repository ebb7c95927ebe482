"""A drafter that knows what will be sampled, for checks that drafts change nothing."""

from collections.abc import Mapping, Sequence

import numpy as np

from srtrl.drafters.base import DrafterBase
from srtrl.drafters.draft_tree import ROOT, DraftTree, DraftTrees
from srtrl.types import Completion, Request

DEPTH = 4


class ScriptedDrafter(DrafterBase):
    """Drafts trees around the known text: at each depth a wrong token first, then, if told so, the right one.

    The right one is never the first of its siblings, so that what is accepted must be moved to its place.
    """

    def __init__(self, truth: Mapping[int, Sequence[int]], *, is_right: bool, vocab_size: int) -> None:
        """Know the responses by `Request.rng_key`; without `is_right` every node is wrong."""
        super().__init__()
        self._truth = truth
        self._is_right = is_right
        self._vocab_size = vocab_size
        self._ahead: dict[int, list[int]] = {}

    def start(self, sequence_id: int, request: Request) -> None:
        """See `DrafterBase`."""
        self._ahead[sequence_id] = list(self._truth[request.rng_key])

    def observe(self, sequence_ids: Sequence[int], token_ids: Sequence[Sequence[int]]) -> None:
        """See `DrafterBase`."""
        for sequence_id, tokens in zip(sequence_ids, token_ids, strict=True):
            del self._ahead[sequence_id][: len(tokens)]

    def finish(self, sequence_id: int, completion: Completion | None) -> None:
        """See `DrafterBase`."""
        del self._ahead[sequence_id]

    def propose(self, sequence_ids: Sequence[int], max_nodes: Sequence[int]) -> DraftTrees:
        """See `DrafterBase`."""
        return DraftTrees.of(
            self._tree(self._ahead[sequence_id]).first(most)
            for sequence_id, most in zip(sequence_ids, max_nodes, strict=True)
        )

    def _tree(self, ahead: Sequence[int]) -> DraftTree:
        tokens: list[int] = []
        parents: list[int] = []
        parent = ROOT
        for right in ahead[:DEPTH]:
            tokens.append((right + 1) % self._vocab_size)
            parents.append(parent)
            if self._is_right:
                tokens.append(right)
                parents.append(parent)
            parent = len(tokens) - 1
        return DraftTree(
            token_ids=np.array(tokens, np.int32),
            parents=np.array(parents, np.int32),
            scores=np.full(len(tokens), 0.9, np.float32),
        )
