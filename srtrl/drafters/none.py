"""The drafter that never drafts: one token a decode step."""

from collections.abc import Sequence

from srtrl.drafters.draft_tree import EMPTY_TREE, DraftTree


class Drafter:
    """See `srtrl.drafters.base.Drafter`."""

    def start(self, sequence_id: int, prompt_token_ids: tuple[int, ...]) -> None:
        """Nothing to prepare."""

    def propose(self, sequence_ids: Sequence[int], max_nodes: Sequence[int]) -> list[DraftTree]:
        """Return an empty tree for each sequence."""
        return [EMPTY_TREE] * len(sequence_ids)

    def observe(self, sequence_id: int, token_ids: Sequence[int]) -> None:
        """Nothing to learn."""

    def finish(self, sequence_id: int) -> None:
        """Nothing to forget."""

    def on_policy_update(self) -> None:
        """Nothing depends on the policy."""
