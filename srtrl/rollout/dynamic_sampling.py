"""Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): groups without a signal are replaced by further prompts.

A group is *decided* when all its samples are decoded and graded: the filters keep it or drop it. The next draw of the
data order is opened while

    kept + undecided < num_prompts    and    opened < max_draws.

With several ranks, these are numbers of all ranks together, in counters that all share. A rank with a free slot takes
the next draw, which stays there with all of its samples, and waits until it may be opened.

By the first condition no draw is opened that might not be needed. So when all are decided and the batch is full, the
opened draws are the shortest prefix of the data order that holds `num_prompts` kept groups: the last one opened is
kept, and without it one is missing. Which groups these are depends on the policy, the seed and the data order alone,
not on what finished first, on slots, drafts, or on how fast the graders are. (Taking the first groups that are complete
would favour prompts with short answers.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from srtrl.ranks.sharing import round_robin
from srtrl.rollout.collect import Source, drive
from srtrl.types import Prompt, Request, Rollout, RolloutGroup

if TYPE_CHECKING:
    from srtrl.engine.engine import Engine
    from srtrl.rollout.collect import Collector


def sample_until_full(
    engine: Engine,
    collector: Collector,
    prompt_of: Callable[[int], Prompt],
    *,
    first_draw: int,
    num_prompts: int,
    max_draws: int,
    keeps: Callable[[RolloutGroup], bool],
    run_ahead: Callable[[range], list[Request]] = lambda _: [],
) -> tuple[list[RolloutGroup], list[RolloutGroup]]:
    """Decode and grade draws from `first_draw` on until the filters have kept `num_prompts` groups.

    Groups are graded one by one, as they are complete: a `batched` reward sees the samples of one group, and a reward
    must not depend on the order of its calls (on a global random state, say), or it depends on timing.

    Args:
        engine: Decodes; its policy is not changed.
        collector: Makes the requests and takes the completions; no draw of it is open.
        prompt_of: The prompt of a draw of the run.
        first_draw: The first that no earlier step has used.
        num_prompts: Groups to be kept.
        max_draws: Maximum number of draws opened; where they do not suffice, the batch has fewer groups.
        keeps: Whether the filters keep a group; called once for each group, in no particular order.
        run_ahead: Called with each range of draws that is opened; returns what more idle slots may decode from then on.
            A run-ahead ends when its draw is opened.

    Returns:
        The groups of all draws that were opened, and of these the groups that are kept; both in data order.

    Raises:
        ValueError: A request that the engine can never serve, or what `keeps` raises.
    """
    ranks = collector.ranks
    source = _DrawsUntilFull(
        engine, collector, prompt_of, range(first_draw, first_draw + max_draws), num_prompts, keeps, run_ahead
    )
    drive(engine, collector, lambda: source)
    assert not source.undecided, f"draws {source.undecided} were never decided"
    with collector.timer.stage("grading"):  # so that it is logged where no rank had to wait, too
        groups = collector.exchange(engine, source.rollouts)
        kept = set[int]().union(*ranks.gather(source.kept, "the kept groups"))
        return groups, [group for group in groups if group.draw_index in kept]


class _DrawsUntilFull(Source):
    """`Source` of the samples of further draws until enough groups are kept; see the top of this file."""

    def __init__(
        self,
        engine: Engine,
        collector: Collector,
        prompt_of: Callable[[int], Prompt],
        draws: range,
        num_prompts: int,
        keeps: Callable[[RolloutGroup], bool],
        run_ahead: Callable[[range], list[Request]],
    ) -> None:
        self.undecided: list[int] = []
        """Draws that this rank has opened."""
        self.rollouts: list[Rollout] = []
        """Of this rank's decided draws."""
        self.kept: set[int] = set()
        """Of this rank's decided draws."""
        self._engine = engine
        self._collector = collector
        self._prompt_of = prompt_of
        self._draws = draws
        self._num_prompts = num_prompts
        self._keeps = keeps
        self._run_ahead = run_ahead
        self._next: int | None = None
        """Number of this rank's next draw, which may not be opened yet."""

    def requests(self) -> Iterator[Request]:
        """See `Source`; decides the graded draws first."""
        collector = self._collector
        for draw in [draw for draw in self.undecided if collector.is_graded(draw)]:
            rollouts = collector.take([draw])
            self.undecided.remove(draw)
            self.rollouts += rollouts
            is_kept = self._keeps(RolloutGroup(prompt=rollouts[0].prompt, draw_index=draw, rollouts=rollouts))
            collector.counters.add("kept" if is_kept else "dropped")
            if is_kept:
                self.kept.add(draw)
        opened: list[int] = []
        while self._has_room() and (draw_index := self._take_next()) is not None:
            opened.append(draw_index)
            self.undecided.append(draw_index)
            yield from collector.open(draw_index, self._prompt_of(draw_index))
            collector.num_total = (draw_index - self._draws.start + 1) * collector.num_samples
        if opened:
            yield from round_robin(self._run_ahead(range(opened[0], opened[-1] + 1)), collector.ranks)

    def is_over(self) -> bool:
        """See `Source`; whether all draws that the batch needs are decided."""
        num_dropped = self._collector.counters.read("dropped")
        return self._collector.counters.read("kept") + num_dropped >= self._limit(num_dropped)

    def _has_room(self) -> bool:
        """Whether one more draw may be this rank's; with several ranks: up to its share, and when it has a slot."""
        num_ranks = self._collector.ranks.count
        max_open = -(-self._num_prompts // num_ranks)
        return num_ranks == 1 or (len(self.undecided) < max_open and self._engine.num_free_slots > 0)

    def _take_next(self) -> int | None:
        """This rank's next draw, if it may be opened now."""
        if self._next is None:
            self._next = self._collector.counters.add("draws")
        if self._next >= self._limit(self._collector.counters.read("dropped")):
            return None
        number, self._next = self._next, None
        return self._draws[number]

    def _limit(self, num_dropped: int) -> int:
        """Number of draws that may be open or decided."""
        return min(self._num_prompts + num_dropped, len(self._draws))
