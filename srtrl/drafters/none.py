"""The drafter that never drafts: one token per decode step."""

from srtrl.drafters.base import DrafterBase, Int64Array
from srtrl.drafters.draft_tree import DraftTrees


class Drafter(DrafterBase):
    """See `srtrl.drafters.base.DrafterBase`."""

    drafts = False

    def propose(self, slots: Int64Array, max_nodes: Int64Array, min_score: float) -> DraftTrees:
        """Return an empty tree for each slot."""
        return DraftTrees.empty(len(slots))
