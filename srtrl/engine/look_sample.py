"""Which sequences a look asks drafts for: whether drafts pay shows in some of them, in a part of the time."""

from collections.abc import Sequence as SequenceOf

from srtrl.engine.sequence import PromptPages, Sequence

LOOK_SEQUENCES = 32
"""About so many."""


class LookSample:
    """Some of the prompts with all their running samples, for these draft from each other's text."""

    def __init__(self) -> None:
        self._prompts: set[PromptPages] = set()
        """Kept from ask to ask, so that the drafter need not catch up with others."""

    def of(self, primaries: SequenceOf[Sequence]) -> list[int]:
        """Return which of the primaries to ask for, ascending: all where they are not many."""
        if len(primaries) <= 2 * LOOK_SEQUENCES:
            return list(range(len(primaries)))
        places = self._places(primaries)
        if len(places) < LOOK_SEQUENCES // 2:
            self._choose(primaries)
            places = self._places(primaries)
        return places

    def _places(self, primaries: SequenceOf[Sequence]) -> list[int]:
        return [place for place, sequence in enumerate(primaries) if sequence.prompt in self._prompts]

    def _choose(self, primaries: SequenceOf[Sequence]) -> None:
        """Choose prompts from all over the order of admission, for those that are expected to be long come first."""
        prompts = list(dict.fromkeys(sequence.prompt for sequence in primaries))
        count = -(-LOOK_SEQUENCES * len(prompts) // len(primaries))
        self._prompts = {prompts[i * len(prompts) // count] for i in range(count)}
