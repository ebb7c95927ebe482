"""The drafter that never drafts: one token a decode step."""

from collections.abc import Sequence

from srtrl.drafters.base import DrafterBase
from srtrl.drafters.draft_tree import DraftTrees


class Drafter(DrafterBase):
    """See `srtrl.drafters.base.DrafterBase`."""

    def propose(self, sequence_ids: Sequence[int], max_nodes: Sequence[int]) -> DraftTrees:
        """Return an empty tree for each sequence."""
        return DraftTrees.empty(len(sequence_ids))
