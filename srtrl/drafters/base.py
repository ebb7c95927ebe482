"""What the engine asks of a drafter. A drafter is one file here, or a class of your own package."""

from collections.abc import Sequence
from pathlib import Path

from srtrl.drafters.draft_tree import DraftTrees
from srtrl.recipe_base import Section
from srtrl.types import Completion, Request

NOBODY = -1
"""Sequence id of a sample that begins and ends at once."""


class NoOptions(Section):
    """A drafter without options."""


class DrafterBase:
    """Guesses tokens. It may be wrong: verification keeps the sampled tokens the same, whatever is proposed.

    A subclass named `Drafter` in `srtrl/drafters/<name>.py` is the drafter `<name>`. Its `Options` document and check
    `rollout.drafter_options`. `propose` must be written; the rest does nothing unless it is. A live sample is known by
    `sequence_id`, which the engine gives out and never uses twice.
    """

    Options: type[Section] = NoOptions
    uses_run_aheads: bool = False
    """Whether it drafts from what run-aheads have decoded; where it does not, training decodes none."""
    has_kernels: bool = False
    """Whether a short rollout with another drafter of this class and these options shall compile them beforehand."""
    least_score: float = 0.0
    """Nodes with a lower score are hardly worth a row of the coming step: the engine sets it before it calls `propose`,
    which need not make them."""

    def __init__(self, options: Section | None = None) -> None:
        """Make a drafter; without options, with their defaults."""
        self.options = options if options is not None else self.Options()

    def start(self, sequence_id: int, request: Request) -> None:
        """Begin a sample, no later than drafts are wanted for it.

        `request.is_run_ahead` marks one that is decoded for the sake of later drafts only.
        """

    def propose(self, sequence_ids: Sequence[int], max_nodes: Sequence[int]) -> DraftTrees:
        """Return one tree a sequence, of at most `max_nodes` nodes; an empty tree where nothing is worth a guess.

        Nodes come in order of falling score, so that a tree cut short is the best of its size.
        """
        raise NotImplementedError

    def observe(self, sequence_ids: Sequence[int], token_ids: Sequence[Sequence[int]]) -> None:
        """Tokens that were committed to the samples since the last call, in order; before `propose`."""

    def finish(self, sequence_id: int, completion: Completion | None) -> None:
        """End of a sample; `completion` is None where it was given up (a run-ahead, or an interrupted rollout).

        A completion says all tokens, those too of which `observe` has not heard. It may come some steps late.
        """

    def learn(self, completions: Sequence[Completion]) -> None:
        """Samples have ended for which no drafts were wanted, so that they were never begun here."""
        for completion in completions:
            self.start(NOBODY, completion.request)
            self.finish(NOBODY, completion)

    def expected_tokens(self, request: Request) -> float | None:
        """Expected number of tokens of a sample's response, None if unknown: long ones are admitted early.

        Asked once of each sample, as it comes; it begins with `start` when drafts are wanted.
        """
        return None

    def set_next_uses(self, prompts: Sequence[tuple[int, ...]]) -> None:
        """Prompts (token ids) that come next, in order; what is needed last may be forgotten first."""

    def on_policy_update(self) -> None:
        """The weights have changed; what was learned about the text stays valid."""

    def take_metrics(self) -> dict[str, float]:
        """Metrics of the drafter's own since the last call, all under `engine/`."""
        return {}

    def save(self, folder: Path) -> None:
        """Write what shall survive into files in the folder (a checkpoint's), no sample being live."""

    def load(self, folder: Path) -> None:
        """Read what `save` wrote; a folder without it (of another drafter) leaves the drafter empty."""
