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
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING

from srtrl import ranks
from srtrl.rollout.collect import Draws
from srtrl.types import Prompt, Request, Rollout, RolloutGroup

if TYPE_CHECKING:
    from srtrl.engine.engine import Engine
    from srtrl.rollout.collect import Collector


@dataclass(slots=True)
class DrawsUntilFull(Draws):
    """Draws from `first_draw` on, until the filters have kept `num_prompts` groups.

    Groups are graded one by one, as they are complete: a `batched` reward sees the samples of one group, and a reward
    must not depend on the order of its calls (on a global random state, say), or it depends on timing.
    """

    prompt_of: Callable[[int], Prompt]
    """The prompt of a draw of the run."""
    _: KW_ONLY
    first_draw: int
    """The first that no earlier step has used."""
    num_prompts: int
    """Groups to be kept."""
    max_draws: int
    """Maximum number of draws opened; where they do not suffice, the batch has fewer groups."""
    keeps: Callable[[RolloutGroup], bool]
    """Whether the filters keep a group; called once for each group, in no particular order."""
    on_open: Callable[[range], None] = lambda _: None
    """Called with each range of draws that was opened."""
    undecided: list[int] = field(default_factory=list, init=False)
    """Draws that this rank has opened."""
    num_opened: int = field(default=0, init=False)
    _kept: set[int] = field(default_factory=set, init=False)
    """This rank's decided draws that are kept."""
    _rollouts: list[Rollout] = field(default_factory=list, init=False)
    """Rollouts of this rank's decided draws."""
    _next: int | None = field(default=None, init=False)
    """Number of this rank's next draw, which may not be opened yet."""

    def requests(self, engine: Engine, collector: Collector) -> Iterator[Request]:
        """See `Draws`; decides the graded draws first."""
        for draw in [draw for draw in self.undecided if collector.is_graded(draw)]:
            rollouts = collector.take([draw], are_shared=False)
            self.undecided.remove(draw)
            self._rollouts += rollouts
            is_kept = self.keeps(RolloutGroup(prompt=rollouts[0].prompt, draw_index=draw, rollouts=rollouts))
            collector.ranks.add("kept" if is_kept else "dropped")
            if is_kept:
                self._kept.add(draw)
        opened: list[int] = []
        while self._has_room(engine, collector) and (draw_index := self._take_next(collector)) is not None:
            opened.append(draw_index)
            self.num_opened = draw_index - self.first_draw + 1
            self.undecided.append(draw_index)
            yield from collector.open(draw_index, self.prompt_of(draw_index))
        if opened:
            self.on_open(range(opened[0], opened[-1] + 1))

    def are_over(self, collector: Collector) -> bool:
        """See `Draws`; whether all draws that the batch needs are decided."""
        num_dropped = collector.ranks.read("dropped")
        return collector.ranks.read("kept") + num_dropped >= self._limit(num_dropped)

    def rollouts(self, collector: Collector) -> list[Rollout]:
        """See `Draws`."""
        assert not self.undecided, f"draws {self.undecided} were never decided"
        return self._rollouts

    def kept_groups(self, groups: list[RolloutGroup]) -> list[RolloutGroup]:
        """Those of the groups that are kept; called on all ranks."""
        kept = set[int]().union(*ranks.gather(self._kept, "the kept groups"))
        return [group for group in groups if group.draw_index in kept]

    def _has_room(self, engine: Engine, collector: Collector) -> bool:
        """Whether one more draw may be this rank's; with several ranks: up to its share, and when it has a slot."""
        max_open = -(-self.num_prompts // ranks.count())
        return ranks.count() == 1 or (len(self.undecided) < max_open and engine.num_free_slots > 0)

    def _take_next(self, collector: Collector) -> int | None:
        """This rank's next draw, if it may be opened now."""
        if self._next is None:
            self._next = collector.ranks.add("draws")
        if self._next >= self._limit(collector.ranks.read("dropped")):
            return None
        number, self._next = self._next, None
        return self.first_draw + number

    def _limit(self, num_dropped: int) -> int:
        """Number of draws that may be open or decided."""
        return min(self.num_prompts + num_dropped, self.max_draws)
