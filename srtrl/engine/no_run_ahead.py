"""Run-ahead as the engine sees it: decode samples of later steps in slots, rows and pages that are free now.

`NoRunAhead` is an engine without it, and says what each method is for; a subclass has the samples.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from srtrl.engine.batch import Sample, ScheduledStep
from srtrl.types import Request


@dataclass(kw_only=True, slots=True, frozen=True)
class Room:
    """Capacity of a step that the primaries leave free."""

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


class NoRunAhead:
    """Decodes no sample early. A subclass does: its samples (`Sample.is_run_ahead`) are never returned as completions.

    Such a sample shares no page with another, so dropping it frees all its pages: the scheduler counts them as free.
    """

    needs_cost = False
    """Whether the cost of a step must be known."""

    @property
    def num_pages(self) -> int:
        """Number of pages that run-aheads hold."""
        return 0

    @property
    def has_work(self) -> bool:
        """Whether a run-ahead has a slot or waits for one."""
        return False

    def choose(self, draws: range) -> range:
        """Those of `draws`, which this step or the next one may open later, whose samples are to be decoded now."""
        return range(0)

    def add(self, requests: Sequence[Request]) -> None:
        """Queue the samples of the draws that `choose` returned."""

    def max_rows(self, num_rows: int, *, is_alone: bool) -> int:
        """Largest number of rows of run-aheads beside `num_rows` others; `is_alone`: no primary has work."""
        return 0

    def schedule(self, step: ScheduledStep, room: Room) -> None:
        """Add rows to a step that has all rows of the primaries."""

    def drop_newest(self, step: ScheduledStep) -> None:
        """A primary wants a slot: end the sample that took one last."""

    def free_pages(self, count: int, step: ScheduledStep) -> None:
        """End samples, the newest first, until `count` pages of the pool are free, or none is left."""

    def cancel(self, rng_key: int) -> dict[int, Sample]:
        """The primary with this RNG key has come: end its sample; returns it by its slot, if it had one."""
        return {}

    def finish(self, sample: Sample) -> None:
        """A run-ahead has ended: free its slot and its pages."""

    def clear(self) -> dict[int, Sample]:
        """The rollout has ended: drop all; returns those that had a slot, by slot."""
        return {}
