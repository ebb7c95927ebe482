"""Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): groups without a signal are replaced by further prompts.

A group is *decided* when all its samples are decoded and graded: the filters keep it or drop it. The next draw of the
data order is opened while

    kept + undecided < num_prompts    and    undecided < max_open_prompts    and    opened < max_draws.

With several ranks, these are numbers of all ranks together, in counters that all share. A rank with a free slot takes
the next draw, which stays there with all of its samples, and waits until it may be opened.

By the first condition no draw is opened that might not be needed. So when all are decided and the batch is full, the
opened draws are the shortest prefix of the data order that holds `num_prompts` kept groups: the last one opened is
kept, and without it one is missing. Which groups these are depends on the policy, the seed and the data order alone,
not on what finished first, on slots, drafts, or on how fast the graders are. (Taking the first groups that are complete
would favour prompts with short answers.) `max_open_prompts` changes the time it takes, never the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from srtrl.rollout.collect import of_rank
from srtrl.types import Prompt, Request, RolloutGroup

if TYPE_CHECKING:
    from srtrl.engine.engine import Engine
    from srtrl.ranks.sharing import SharedCounters
    from srtrl.rollout.collect import Collector


@dataclass(slots=True)
class _Draws:
    """The next draws of the data order, for this rank and the others: what is open and decided is counted for all."""

    counters: SharedCounters
    first_draw: int
    num_prompts: int
    max_open_prompts: int
    max_draws: int
    _next: int | None = None
    """This rank's next draw, which may not be opened yet."""

    def take(self) -> int | None:
        """The next draw, if it may be opened now."""
        if self._next is None:
            self._next = self.counters.add("draws")
        num_dropped = self.counters.read("dropped")
        num_decided = self.counters.read("kept") + num_dropped
        limit = min(self.num_prompts + num_dropped, num_decided + self.max_open_prompts, self.max_draws)
        if self._next >= limit:
            return None
        number, self._next = self._next, None
        return self.first_draw + number

    @property
    def is_full(self) -> bool:
        """Whether all draws that the batch needs are decided."""
        num_kept = self.counters.read("kept")
        return num_kept >= self.num_prompts or num_kept + self.counters.read("dropped") >= self.max_draws


def sample_until_full(
    engine: Engine,
    collector: Collector,
    prompt_of: Callable[[int], Prompt],
    *,
    first_draw: int,
    num_prompts: int,
    max_open_prompts: int,
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
        max_open_prompts: Maximum number of draws whose samples are decoded or graded at the same time.
        max_draws: Maximum number of draws opened; where they do not suffice, the batch has fewer groups.
        keeps: Whether the filters keep a group; called once for each group, in no particular order.
        run_ahead: Called with each range of draws that is opened; returns what more idle slots may decode from then on.
            A run-ahead ends when its draw is opened.

    Returns:
        The groups of all draws that were opened, and of these the groups that are kept; both in data order.

    Raises:
        ValueError: A request that the engine can never serve, or what `keeps` raises.
    """
    ranks, counters = collector.ranks, collector.counters
    undecided: list[int] = []
    decided: dict[int, RolloutGroup] = {}
    kept: set[int] = set()
    draws = _Draws(counters, first_draw, num_prompts, max_open_prompts, max_draws)
    max_own = -(-min(num_prompts, max_open_prompts) // ranks.count)

    def has_room() -> bool:
        """Whether one more draw may be this rank's; with several ranks: up to its share, and when it has a slot."""
        return ranks.count == 1 or (len(undecided) < max_own and engine.scheduler.num_free_slots > 0)

    def decide_and_open() -> None:
        for draw in [draw for draw in undecided if collector.is_graded(draw)]:
            (decided[draw],) = collector.take([draw])
            undecided.remove(draw)
            is_kept = keeps(decided[draw])
            counters.add("kept" if is_kept else "dropped")
            if is_kept:
                kept.add(draw)
        opened: list[int] = []
        while has_room() and (next_draw := draws.take()) is not None:
            opened.append(next_draw)
            undecided.append(next_draw)
            for request in collector.open(next_draw, prompt_of(next_draw)):
                engine.add(request)
            collector.num_total = (next_draw - first_draw + 1) * collector.num_samples
        if opened:
            for request in of_rank(run_ahead(range(opened[0], opened[-1] + 1)), ranks):
                engine.add(request)

    def advance() -> bool:
        """Decide what is graded, open what is needed; where nothing decodes, wait for what may change that."""
        counters.lap(is_busy=False)
        collector.take_turns(engine)
        decide_and_open()
        while undecided and not engine.has_work:
            collector.wait_any(undecided)
            collector.take_turns(engine)
            decide_and_open()
        counters.lap(is_busy=engine.has_work)
        while not (engine.has_work or draws.is_full or counters.has_failed):
            if counters.wait("draws", may_run_ahead=engine.scheduler.run_aheads.has_work):
                return True
            decide_and_open()
        return False

    with collector.timer.stage("rollout"), counters.together():
        for completion in engine.generate([], before_step=advance):
            collector.receive(completion)
    with collector.timer.stage("grading"):  # so that it is logged where nobody had to wait, too
        assert not undecided, f"draws {undecided} were never decided"
        groups = [decided[draw] for draw in sorted(decided)]
        if ranks.count > 1:
            groups = collector.exchange(engine, [rollout for group in groups for rollout in group.rollouts])
            kept = set().union(*ranks.gather(kept, "the kept groups"))
        return groups, [group for group in groups if group.draw_index in kept]
