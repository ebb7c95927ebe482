"""Sharing of a rollout among the ranks of a run: dealing, claiming, waiting, and the exchange of what was decoded.

The samples of a step are dealt to ranks by expected length. The samples of a rank are its *line*, in the order in which
they are to be admitted. The rank begins with the first samples of its line, as many as it has slots; a counter that all
ranks share has the number of the others that are taken. The rank takes from them as its slots become free, and a rank
with none left takes the next sample of the rank with the longest line, as far as it knows. So no sample is decoded
twice, no sample that another rank could begin waits for a slot, and no decode step needs a collective. The tokens of a
sample depend on its RNG key alone, so that none of this changes the rollouts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, groupby
from typing import TYPE_CHECKING

from srtrl import ranks
from srtrl.rollout.collect import data_order
from srtrl.rollout.one_rank import OneRank, RequestsOf
from srtrl.types import Completion, Request, Rollout

if TYPE_CHECKING:
    from srtrl.engine.engine import Engine

POLL_SECONDS = 0.02
"""A counter that others change is read again after this time."""
REPORT_SECONDS = 1.0
"""A rank reports at most this often that it is making progress."""


def deal(
    requests: Sequence[Request], expected_tokens: Mapping[int, float | None], num_ranks: int
) -> list[list[Request]]:
    """The line of each rank; no rank is expected to decode more than its share and one sample.

    The samples of the prompt that is expected to be longest go to the rank with the least to do, and so on. A prompt is
    kept whole if that leaves no rank with more than its share: its samples draft from each other.

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


class SeveralRanks(OneRank):
    """One rank's part of each rollout, of several ranks. All ranks make the same calls."""

    def __init__(self) -> None:
        self.busy_seconds = 0.0
        """Seconds in which this rank decoded samples of its step."""
        self.num_claimed = 0
        """Samples of other ranks that this one has taken."""
        self._last_report = 0.0
        self.begin()

    def begin(self) -> None:
        """A rollout begins."""
        self._scope = ranks.new_scope("rollout")
        self._values: dict[str, tuple[float, int]] = {}
        """When each counter was read, and its value then."""
        self._last_progress = time.monotonic()
        """Time of the last progress of any rank, as far as this one has seen."""

    @contextmanager
    def rollout(self) -> Iterator[None]:
        """See `OneRank`: an error of one rank ends the others as soon as they have nothing to decode."""
        self.begin()
        with ranks.synchronized("rollout"):
            try:
                yield
            except ranks.FAILURES:
                self.add("failed")
                raise

    def add(self, name: str, amount: int = 1) -> int:
        """See `OneRank`."""
        before = ranks.add(f"{self._scope}/{name}", amount)
        self._values[name] = time.monotonic(), before + amount
        return before

    def read(self, name: str) -> int:
        """See `OneRank`."""
        seconds, known = self._values.get(name, (0.0, 0))
        if time.monotonic() < seconds + POLL_SECONDS:
            return known
        value = self.add(name, 0)
        if value != known:
            self._last_progress = time.monotonic()
        return value

    def deal(self, engine: Engine, requests: Sequence[Request]) -> Sequence[Request]:
        """See `OneRank`: by the lengths that rank 0 expects, since all ranks must agree."""
        scouts = {request.draw_index: request for request in requests} if ranks.is_main() else {}
        expected = {draw: engine.drafter.expected_tokens(scout) for draw, scout in scouts.items()}
        expected, *_ = ranks.gather(expected, "the expected lengths")
        lines, slots = deal(requests, expected, ranks.count()), engine.options.slots
        self.wait_in([line[slots:] for line in lines])
        return lines[ranks.index()][:slots]

    def wait_in(self, lines: Sequence[Sequence[Request]]) -> None:
        """Let any rank claim the samples of these lines, one line for each rank; all ranks have the same."""
        self._lines = lines
        self._num_left = [len(line) for line in lines]
        """Samples of each line that were not taken when this rank last looked; there may be fewer now."""

    def claim(self, count: int) -> Sequence[Request]:
        """See `OneRank`; those of this rank's own line first."""
        mine = ranks.index()
        taken = self._take(mine, count) if count and self._num_left[mine] else []
        while len(taken) < count and (max_left := max(self._num_left)):
            claimed = self._take(self._num_left.index(max_left), 1)
            self.num_claimed += len(claimed)
            taken += claimed
        return taken

    def _take(self, rank: int, count: int) -> list[Request]:
        """The next `count` samples of a rank's line, or what is left."""
        line = self._lines[rank]
        start = self.add(f"taken of rank {rank}", count)
        self._num_left[rank] = max(0, len(line) - start - count)
        return list(line[start : start + count])

    def report_progress(self, busy_seconds: float = 0.0) -> None:
        """See `OneRank`: others wait for it with reason."""
        self.busy_seconds += busy_seconds
        now = self._last_progress = time.monotonic()
        if now > self._last_report + REPORT_SECONDS:
            self._last_report = now
            self.add("progress")

    def wait_for_others(self, *, sleeps: bool) -> bool:
        """See `OneRank`.

        Raises:
            RankError: No rank has made progress for too long.
        """
        if self.read("failed"):
            return False
        self.read("progress")
        seconds = ranks.timeout_seconds()
        if time.monotonic() > self._last_progress + seconds:
            raise ranks.RankError(
                f"rank {ranks.index()} of {ranks.count()} waited for samples of the others for more than "
                f"{seconds:g} seconds in which none of them made progress ({ranks.TIMEOUT_VARIABLE})"
            )
        if sleeps:
            time.sleep(POLL_SECONDS)
        return True

    def exchange(self, engine: Engine, rollouts: Sequence[Rollout], requests_of: RequestsOf) -> Sequence[Rollout]:
        """See `OneRank`."""
        shared = ranks.gather(([*rollouts], engine.drafter.new_texts()), "the rollouts of all ranks")
        del shared[ranks.index()]
        others = sorted(chain.from_iterable(theirs for theirs, _ in shared), key=data_order)
        prompts = {rollout.draw_index: rollout.prompt for rollout in others}
        requests = {data_order(request): request for request in requests_of(list(prompts.items()))}
        engine.drafter.learn(
            [Completion(request=requests[data_order(rollout)], response=rollout.response) for rollout in others]
        )
        for _, texts in shared:
            engine.drafter.learn_texts(texts)
        return others

    def take_metrics(self) -> dict[str, float]:
        """See `OneRank`."""
        mine = self.num_claimed, self.busy_seconds
        self.num_claimed, self.busy_seconds = 0, 0.0
        num_claimed, seconds = zip(*ranks.gather(mine, "the time of each rank"), strict=True)
        return {
            "engine/rank_claims": sum(num_claimed),
            "engine/rank_seconds_max": max(seconds),
            "engine/ranks_idle_share": 1 - sum(seconds) / (len(seconds) * max(*seconds, 1e-9)),
        }
