"""As `srt`, but from rollouts that were completed in earlier steps, and from nothing newer.

RhymeRL drafts from these (He et al. 2025, "History Rhymes: Accelerating LLM Reinforcement Learning with RhymeRL"); the
difference to `srt` is the gain of online insertion.
"""

from collections.abc import Sequence

from srtrl.drafters.srt import Drafter as SrtDrafter
from srtrl.recipe.schema import Section
from srtrl.types import Completion


class Drafter(SrtDrafter):
    """See `srtrl.drafters.base.DrafterBase`."""

    uses_texts = False
    inserts = False
    num_top = 0

    def __init__(self, options: Section | None = None) -> None:
        super().__init__(options)
        self._completed: list[Completion] = []  # in this step: not history yet

    def _learn(self, completions: Sequence[Completion]) -> None:
        """Set completed rollouts aside, until the step ends."""
        self._completed += completions

    def end_step(self) -> None:
        """Completed rollouts become history."""
        super().end_step()
        super()._learn(self._completed)
        self._completed = []
