"""Sharing of a rollout among the ranks of a run: dealing, claiming, waiting. No engine, no tensors here.

The samples of a step are dealt to ranks by expected length. The samples of a rank are its *line*, in the order in which
they are to be admitted. The rank begins with the first samples of its line, as many as it has slots; a counter that all
ranks share has the number of the others that are taken. The rank takes from them as its slots become free, and a rank
with none left takes the next sample of the rank with the longest line, as far as it knows. So no sample is decoded
twice, no sample that another rank could begin waits for a slot, and no decode step needs a collective. The tokens of a
sample depend on its RNG key alone, so that none of this changes the rollouts.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby

from srtrl import ranks
from srtrl.types import Request

POLL_SECONDS = 0.02
"""A counter that others change is read again after this time."""
REPORT_SECONDS = 1.0
"""A rank reports at most this often that it is making progress."""


def deal(
    requests: Sequence[Request], expected_tokens: Mapping[int, float | None], num_ranks: int
) -> list[list[Request]]:
    """The line of each rank; no rank is expected to decode more than its share and one sample.

    The samples of the prompt that is expected to be longest go to the rank with the least to do, and so on. A prompt is
    kept whole where that leaves no rank with more than its share: its samples draft from each other.

    Args:
        requests: The samples of a step, in data order.
        expected_tokens: Draw -> expected length of a sample; None, where nothing is known, stands for the average.
        num_ranks: Number of lines.
    """
    known = [length for length in expected_tokens.values() if length is not None]
    average = sum(known) / len(known) if known else 1.0
    lengths = {draw: max(1.0, average if length is None else length) for draw, length in expected_tokens.items()}
    share = sum(lengths[request.draw_index] for request in requests) / num_ranks
    loads = [0.0] * num_ranks
    lines: list[list[Request]] = [[] for _ in range(num_ranks)]
    draws = [list(samples) for _, samples in groupby(requests, key=lambda request: request.draw_index)]
    for samples in sorted(draws, key=lambda samples: (-lengths[samples[0].draw_index], samples[0].draw_index)):
        length, num_dealt = lengths[samples[0].draw_index], 0
        while num_dealt < len(samples):
            rank = loads.index(min(loads))
            room = max(1, round((share - loads[rank]) / length))
            given = samples[num_dealt : num_dealt + room]
            lines[rank] += given
            loads[rank] += length * len(given)
            num_dealt += len(given)
    for line in lines:
        line.sort(key=lambda request: request.admission_key(lengths[request.draw_index]))
    return lines


def round_robin(requests: Sequence[Request]) -> Iterator[Request]:
    """Run-aheads in the order in which this rank takes them: each rank begins with others."""
    for shift in range(ranks.count()):
        yield from requests[(ranks.index() + shift) % ranks.count() :: ranks.count()]


class SharedCounters:
    """Counters of one rollout that all ranks share, and this rank's part in it. With one rank nothing waits."""

    def __init__(self, earlier: "SharedCounters | None" = None) -> None:
        """All ranks begin the same rollout; what they measured in an `earlier` one of the same step counts."""
        self.busy_seconds: float = earlier.busy_seconds if earlier else 0.0
        """In which this rank decoded samples of its step."""
        self.num_claimed: int = earlier.num_claimed if earlier else 0
        """Samples of other ranks that this one has taken."""
        self._scope = ranks.new_scope("rollout")
        self._values: dict[str, tuple[float, int]] = {}
        """When each counter was read, and its value then."""
        self._last_report = 0.0
        self._last_progress = time.monotonic()
        """Of any rank, as far as this one has seen."""

    def add(self, name: str, amount: int = 1) -> int:
        """Count; returns the value before that."""
        known = self._values.get(name, (0.0, 0))[1]
        before = ranks.add(f"{self._scope}/{name}", amount) if ranks.count() > 1 else known
        self._values[name] = time.monotonic(), before + amount
        return before

    def read(self, name: str) -> int:
        """The value as it is, or was a moment ago."""
        seconds, known = self._values.get(name, (0.0, 0))
        if ranks.count() > 1 and time.monotonic() < seconds + POLL_SECONDS:
            return known
        value = self.add(name, 0)
        if value != known:
            self._last_progress = time.monotonic()
        return value

    @contextmanager
    def synchronized(self) -> Iterator[None]:
        """The rollout of each rank: an error of one ends the others as soon as they have nothing to decode."""
        with ranks.synchronized("rollout"):
            try:
                yield
            except ranks.FAILURES:
                self.add("failed")
                raise

    @property
    def has_failed(self) -> bool:
        """Whether a rank has: the others need not wait for it."""
        return self.read("failed") > 0

    def report_progress(self) -> None:
        """This rank decodes, or waits for its own tools and graders: others wait for it with reason."""
        now = self._last_progress = time.monotonic()
        if ranks.count() > 1 and now > self._last_report + REPORT_SECONDS:
            self._last_report = now
            self.add("progress")

    def count_busy(self, seconds: float) -> None:
        """This rank has decoded samples of its step for some time."""
        self.busy_seconds += seconds
        self.report_progress()

    def metrics(self) -> dict[str, float]:
        """How the ranks shared the rollout, under `engine/`; called on all of them. None with one rank."""
        if ranks.count() == 1:
            return {}
        mine = self.num_claimed, self.busy_seconds
        num_claimed, seconds = zip(*ranks.gather(mine, "the time of each rank"), strict=True)
        return {
            "engine/rank_claims": sum(num_claimed),
            "engine/rank_seconds_max": max(seconds),
            "engine/ranks_idle_share": 1 - sum(seconds) / (len(seconds) * max(*seconds, 1e-9)),
        }

    def wait_for_others(self, *, sleeps: bool) -> None:
        """This rank has no sample until others are further; returns after a moment, or at once if it does not sleep.

        Raises:
            RankError: No rank has made progress for too long.
        """
        assert ranks.count() > 1, "one rank waits for others"
        self.read("progress")
        seconds = ranks.timeout_seconds()
        if time.monotonic() > self._last_progress + seconds:
            raise ranks.RankError(
                f"rank {ranks.index()} of {ranks.count()} waited for samples of the others for more than "
                f"{seconds:g} seconds in which none of them made progress ({ranks.TIMEOUT_VARIABLE})"
            )
        if sleeps:
            time.sleep(POLL_SECONDS)


@dataclass(slots=True)
class Claims:
    """Samples that any rank may decode, as seen by one of the ranks."""

    counters: SharedCounters
    lines: Sequence[Sequence[Request]]
    """Of each rank, without those with which it begins; the same on all."""
    _num_left: list[int] = field(init=False)
    """Of each rank, samples that are not taken, or more: what was known last."""

    def __post_init__(self) -> None:
        self._num_left = [len(line) for line in self.lines]

    def take(self, count: int) -> list[Request]:
        """The next samples for this rank, at most `count`: fewer only where none is left anywhere."""
        mine = ranks.index()
        taken = self._take(mine, count) if count and self._num_left[mine] else []
        while len(taken) < count and (max_left := max(self._num_left)):
            claimed = self._take(self._num_left.index(max_left), 1)
            self.counters.num_claimed += len(claimed)
            taken += claimed
        return taken

    def _take(self, rank: int, count: int) -> list[Request]:
        """The next `count` samples of a rank's line, or what is left."""
        line = self.lines[rank]
        start = self.counters.add(f"taken of rank {rank}", count)
        self._num_left[rank] = max(0, len(line) - start - count)
        return list(line[start : start + count])
