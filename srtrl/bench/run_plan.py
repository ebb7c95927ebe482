"""How many runs of a comparison count."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from srtrl.bench.statistics import runs_needed


@dataclass(kw_only=True, slots=True, frozen=True)
class RunPlan:
    """How many runs count."""

    repeats: int
    """All of them; with `precision` the pilot."""
    precision: float | None = None
    """Half-width that the 95% intervals of the ratios shall have, as a share of the ratio."""
    max_seconds: float = float("inf")
    """With `precision`: no more runs than take about so long together."""
    until: float = float("inf")
    """`time.perf_counter()` at which the runs should be over: none begins that would take longer. The first counts."""

    @property
    def num_pilot(self) -> int | None:
        """See `Comparison`."""
        return self.repeats if self.precision is not None else None

    def num_runs(self, pilots: Sequence[Mapping[str, Sequence[float]]], pilot_seconds: float) -> int:
        """Decide, once, how many runs there will be, those of the pilot among them.

        Args:
            pilots: One a table row: contender -> seconds of its pilot runs, the first being what the others are
                compared with.
            pilot_seconds: What the pilot took of the clock.
        """
        if self.precision is None:
            return self.repeats
        needed = self.repeats
        for seconds in pilots:
            first, *others = seconds.values()
            needed = max([needed, *(runs_needed(first, other, precision=self.precision) for other in others)])
        affordable = self.max_seconds / max(pilot_seconds, 1e-9) * self.repeats
        return needed if needed <= affordable else max(self.repeats, int(affordable))
