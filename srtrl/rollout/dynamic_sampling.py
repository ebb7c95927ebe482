"""Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): groups without a signal are replaced by further prompts.

A group is *decided* when all its samples are decoded and graded: the filters keep it or drop it. The next draw of the
data order is opened while

    kept + undecided < num_prompts    and    undecided < max_open_prompts    and    opened < max_draws.

By the first condition no draw is opened that might not be needed. So when all are decided and the batch is full, the
opened draws are the shortest prefix of the data order that holds `num_prompts` kept groups: the last one opened is
kept, and without it one is missing. Which groups these are depends on the policy, the seed and the data order alone,
not on what finished first, on slots, drafts, or on how fast the graders are. (Taking the first groups that are complete
would favour prompts with short answers.) `max_open_prompts` changes the time it takes, never the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from srtrl.types import Prompt, Request, RolloutGroup

if TYPE_CHECKING:
    from srtrl.engine.engine import Engine
    from srtrl.rollout.collect import Collector


@dataclass(kw_only=True, slots=True, frozen=True)
class BatchLimits:
    """What a batch shall hold, and what it may cost."""

    num_prompts: int
    """Groups to be kept."""
    max_open_prompts: int
    """Most draws whose samples are decoded or graded at the same time."""
    max_draws: int
    """Most draws opened; where they do not suffice, the batch has fewer groups."""


@dataclass(kw_only=True, slots=True, frozen=True)
class SampledBatch:
    """The groups of all draws that were opened."""

    groups: list[RolloutGroup]
    """In data order, without a gap; those that the filters dropped too."""
    kept: list[RolloutGroup]
    """In data order; fewer than `num_prompts` only where `max_draws` was reached."""


def sample_until_full(
    engine: Engine,
    collector: Collector,
    prompt_of: Callable[[int], Prompt],
    *,
    first_draw: int,
    limits: BatchLimits,
    keeps: Callable[[RolloutGroup], bool],
    run_ahead: Callable[[range], list[Request]] | None = None,
) -> SampledBatch:
    """Decode and grade draws from `first_draw` on until the filters have kept `limits.num_prompts` groups.

    Groups are graded one by one, as they are complete: a `batched` reward sees the samples of one group, and a reward
    must not depend on the order of its calls (on a global random state, say), or it depends on timing.

    Args:
        engine: Decodes; its policy is not changed.
        collector: Makes the requests and takes the completions; no draw of it is open.
        prompt_of: The prompt of a draw of the run.
        first_draw: The first that no earlier step has used.
        limits: See `BatchLimits`.
        keeps: Whether the filters keep a group; called once a group, in no particular order.
        run_ahead: Called with each range of draws that is opened; returns what more idle slots may decode from then on.
            A run-ahead ends when its draw is opened.

    Returns:
        The groups, those of the shortest prefix of the draws that fills the batch.

    Raises:
        ValueError: A request that the engine can never serve, or what `keeps` raises.
    """
    filling = _Filling(
        engine=engine,
        collector=collector,
        prompt_of=prompt_of,
        limits=limits,
        keeps=keeps,
        run_ahead=run_ahead,
        next_draw=first_draw,
        last_draw=first_draw + limits.max_draws,
    )
    with collector.timer.stage("rollout"):
        for completion in engine.generate([], before_step=filling.advance):
            collector.receive(completion)
    with collector.timer.stage("grading"):  # so that it is logged where nobody had to wait, too
        return filling.result()


@dataclass(kw_only=True, slots=True)
class _Filling:
    """A batch that is being filled; see `sample_until_full` for the first fields."""

    engine: Engine
    collector: Collector
    prompt_of: Callable[[int], Prompt]
    limits: BatchLimits
    keeps: Callable[[RolloutGroup], bool]
    run_ahead: Callable[[range], list[Request]] | None
    next_draw: int
    last_draw: int
    """The first that may not be opened any more."""
    undecided: list[int] = field(default_factory=list)
    decided: dict[int, RolloutGroup] = field(default_factory=dict)
    kept: set[int] = field(default_factory=set)

    def advance(self) -> None:
        """Decide what is graded and open what is needed; where nothing decodes, wait for the graders."""
        self._decide()
        self._open()
        while self.undecided and not self.engine.has_work:
            with self.collector.timer.stage("grading"):
                self.collector.wait_any(self.undecided)
            self._decide()
            self._open()

    def result(self) -> SampledBatch:
        """The whole batch."""
        assert not self.undecided, f"draws {self.undecided} were never decided"
        draws = sorted(self.decided)
        return SampledBatch(
            groups=[self.decided[draw] for draw in draws],
            kept=[self.decided[draw] for draw in draws if draw in self.kept],
        )

    def _decide(self) -> None:
        graded = [draw for draw in self.undecided if self.collector.is_graded(draw)]
        for draw in graded:
            (group,) = self.collector.take([draw])
            self.undecided.remove(draw)
            self.decided[draw] = group
            if self.keeps(group):
                self.kept.add(draw)

    def _open(self) -> None:
        limits = self.limits
        opened = range(
            self.next_draw,
            min(
                self.next_draw + limits.num_prompts - len(self.kept) - len(self.undecided),
                self.next_draw + limits.max_open_prompts - len(self.undecided),
                self.last_draw,
            ),
        )
        if not opened:
            return
        self.next_draw = opened.stop
        self.undecided += opened
        for draw in opened:
            for request in self.collector.open(draw, self.prompt_of(draw)):
                self.engine.add(request)
        if self.run_ahead is not None:
            for request in self.run_ahead(opened):
                self.engine.add(request)
