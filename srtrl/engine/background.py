"""What fills the slots, rows and pages that no sample wants. No tensors here."""

from collections.abc import Sequence
from dataclasses import dataclass

from srtrl.engine.batch import Sample, ScheduledStep
from srtrl.types import Request


@dataclass(kw_only=True, slots=True, frozen=True)
class Room:
    """What the primaries leave of a step."""

    num_rows: int
    """Roots and prompt tokens. With fewer than there are samples with a slot, some pause and keep their pages."""
    num_prefill_tokens: int
    """Largest number of prompt tokens among these rows."""
    num_slots: int
    """Slots that no primary has."""
    num_reserved_pages: int
    """Pages that stay free, for the primaries' drafts and their next step."""
    may_admit: bool
    """Whether more samples may take a slot: not while a primary waits."""


class Background:
    """Nothing. A subclass has samples of its own (`Sample.is_background`), which are never completions.

    Each holds all its pages alone, so that dropping it gives back every one: the scheduler counts them as free.
    """

    needs_cost = False
    """Whether the cost of a step must be known."""

    @property
    def num_pages(self) -> int:
        """Pages that its samples hold."""
        return 0

    @property
    def has_work(self) -> bool:
        """Whether a sample of it is running or waits."""
        return False

    def choose(self, draws: range) -> range:
        """Of draws that may be opened later, in this step or the next, those whose samples it wants now."""
        return range(0)

    def add(self, requests: Sequence[Request]) -> None:
        """The samples of the draws that it chose."""

    def max_rows(self, num_rows: int, *, is_alone: bool) -> int:
        """Largest number of rows that it may have beside `num_rows` others."""
        return 0

    def schedule(self, step: ScheduledStep, room: Room) -> None:
        """Add its work to a step that holds the primaries' already."""

    def drop_newest(self, step: ScheduledStep) -> None:
        """A primary wants a slot: end the sample that took one last."""

    def free_pages(self, count: int, step: ScheduledStep) -> None:
        """End samples, the newest first, until `count` pages of the pool are free, or none is left."""

    def cancel(self, rng_key: int) -> dict[int, Sample]:
        """The primary with this RNG key has come: end its sample; returns it by its slot, if it had one."""
        return {}

    def finish(self, sample: Sample) -> None:
        """One of its samples has come to its end: free its slot and its pages."""

    def clear(self) -> dict[int, Sample]:
        """The rollout has ended: drop all; returns those that had a slot, by slot."""
        return {}
