"""How the ranks of a run share a rollout: who decodes which sample, who helps whom, who waits. No engine, no tensors.

The samples of a step are dealt to ranks by expected length. What a rank has been dealt is its *line*, in the order in
which it is to be admitted. The rank begins with the first samples of its line, as many as it has slots; how many of the
others are taken says a counter that all ranks share. The rank takes from them as its slots become free, and a rank with
none left takes the next sample of the rank with most left, as far as it knows. So no sample is decoded twice, no sample
that another rank could begin waits for a slot, and no decode step needs a collective. What a sample says depends on its
RNG key alone, so that none of this is seen in the rollouts.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby

from srtrl.engine.waiting_line import admission_order
from srtrl.ranks.processes import FAILURES, TIMEOUT_VARIABLE, RankError, Ranks
from srtrl.types import Request

POLL_SECONDS = 0.02
"""A counter that others change is read again after this time."""


def deal(
    requests: Sequence[Request], expected_tokens: Mapping[int, float | None], num_ranks: int
) -> list[list[Request]]:
    """The line of each rank; no rank is expected to decode more than its share and one sample.

    The samples of the prompt that is expected to be longest go to the rank with the least to do, and so on. A prompt is
    kept whole where that leaves no rank with more than its share: its samples draft from each other.

    Args:
        requests: The samples of a step, in data order.
        expected_tokens: Draw -> expected length of a sample; None, where nothing is known, stands for an average one.
        num_ranks: Number of lines.
    """
    known = [length for length in expected_tokens.values() if length is not None]
    average = sum(known) / len(known) if known else 1.0
    lengths = {draw: max(1.0, average if length is None else length) for draw, length in expected_tokens.items()}
    share = sum(lengths[request.draw_index] for request in requests) / num_ranks
    loads = [0.0] * num_ranks
    lines: list[list[Request]] = [[] for _ in range(num_ranks)]
    draws = [list(samples) for _, samples in groupby(requests, key=lambda request: request.draw_index)]
    for samples in sorted(draws, key=lambda one: (-lengths[one[0].draw_index], one[0].draw_index)):
        length, num_dealt = lengths[samples[0].draw_index], 0
        while num_dealt < len(samples):
            rank = loads.index(min(loads))
            room = max(1, round((share - loads[rank]) / length))
            given = samples[num_dealt : num_dealt + room]
            lines[rank] += given
            loads[rank] += length * len(given)
            num_dealt += len(given)
    for line in lines:
        line.sort(key=lambda request: admission_order(request, lengths[request.draw_index]))
    return lines


class SharedCounters:
    """Counters of one rollout, and the time that this rank spends on it. With one rank nobody waits."""

    def __init__(self, ranks: Ranks) -> None:
        """All ranks begin the same rollout."""
        self.ranks = ranks if ranks.count > 1 else Ranks()  # whose counters go with the rollout
        self.busy_seconds = 0.0
        """In which this rank decoded samples of its step."""
        self._scope = ranks.new_scope("rollout")
        self._read: dict[str, tuple[float, int]] = {}
        """When each counter was read, and what it was."""
        self._last = time.monotonic()
        """When `lap` was called."""
        self._last_progress = self._last
        """Of any rank, as far as this one knows."""
        self._is_busy = False

    def add(self, name: str, amount: int = 1) -> int:
        """Count; returns the value before that."""
        before = self.ranks.add(f"{self._scope}/{name}", amount)
        self._read[name] = time.monotonic(), before + amount
        return before

    def read(self, name: str) -> int:
        """The value as it is, or was a moment ago."""
        seconds, value = self._read.get(name, (0.0, 0))
        if self.ranks.count > 1 and time.monotonic() < seconds + POLL_SECONDS:
            return value
        found = self.add(name, 0)
        if found != value:
            self._last_progress = time.monotonic()
        return found

    @contextmanager
    def together(self) -> Iterator[None]:
        """The rollout of each rank: an error of one ends the others as soon as they have nothing to decode."""
        with self.ranks.together("the rollout"):
            try:
                yield
            except FAILURES:
                self.add("failed")
                raise

    @property
    def has_failed(self) -> bool:
        """Whether a rank has; nobody needs to wait for it."""
        return self.read("failed") > 0

    def lap(self, *, is_busy: bool) -> None:
        """Count the time since the last call, as was said then; `is_busy`: whether samples decode here from now on."""
        now = time.monotonic()
        if self._is_busy:
            self.busy_seconds += now - self._last
            self._last_progress = now
        self._last, self._is_busy = now, is_busy

    def wait(self, what: str, *, may_run_ahead: bool) -> bool:
        """This rank has no sample until others are further; returns after a moment, or at once and True to run ahead.

        Raises:
            RankError: It has waited for `what` for too long.
        """
        assert self.ranks.count > 1, f"one rank waits for {what}"
        self.lap(is_busy=False)
        self.read("finished")  # a sample of any rank is progress
        seconds = self.ranks.timeout_seconds
        if self._last > self._last_progress + seconds:
            raise RankError(
                f"rank {self.ranks.index} of {self.ranks.count} waited for {what} of the others for more than "
                f"{seconds:g} seconds ({TIMEOUT_VARIABLE})"
            )
        if not may_run_ahead:
            time.sleep(POLL_SECONDS)
        return may_run_ahead


@dataclass(slots=True)
class Claims:
    """Samples that any rank may decode, as one of them sees what is left."""

    counters: SharedCounters
    lines: Sequence[Sequence[Request]]
    """Of each rank, without those with which it begins; the same on all."""
    num_claimed: int = 0
    """Samples of other ranks that this one has taken."""
    _num_left: list[int] = field(init=False)
    """Of each rank, samples that are not taken, or more: what was known last."""

    def __post_init__(self) -> None:
        self._num_left = [len(line) for line in self.lines]

    def take(self, count: int) -> list[Request]:
        """The next samples for this rank, at most `count`: fewer only where none is left anywhere."""
        mine = self.counters.ranks.index
        taken = self._take(mine, count) if count and self._num_left[mine] else []
        while len(taken) < count and (most := max(self._num_left)):
            claimed = self._take(self._num_left.index(most), 1)
            self.num_claimed += len(claimed)
            taken += claimed
        return taken

    def _take(self, rank: int, count: int) -> list[Request]:
        """The next `count` samples of a rank's line, or what is left."""
        line = self.lines[rank]
        start = self.counters.add(f"taken of rank {rank}", count)
        self._num_left[rank] = max(0, len(line) - start - count)
        return list(line[start : start + count])
