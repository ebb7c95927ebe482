"""What the engine asks of a drafter. A drafter is one file here, or a class of your own package."""

from collections.abc import Sequence
from typing import Protocol

from srtrl.drafters.draft_tree import DraftTree


class Drafter(Protocol):
    """Guesses tokens. It may be wrong: verification keeps the sampled tokens the same, whatever is proposed.

    A live sample is known by `sequence_id`, which the engine gives out and never uses twice.
    """

    def start(self, sequence_id: int, prompt_token_ids: tuple[int, ...]) -> None:
        """Begin a sample of this prompt."""

    def propose(self, sequence_ids: Sequence[int], max_nodes: Sequence[int]) -> list[DraftTree]:
        """Return one tree a sequence, of at most `max_nodes` nodes; an empty tree where nothing is worth a guess."""

    def observe(self, sequence_id: int, token_ids: Sequence[int]) -> None:
        """Tokens that were committed to the sample, in order."""

    def finish(self, sequence_id: int) -> None:
        """End of the sample."""

    def on_policy_update(self) -> None:
        """The weights have changed; what was learned about the text stays valid."""
