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
from dataclasses import dataclass
from typing import TYPE_CHECKING

from srtrl.rollout.collect import StageTimer
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
    timer: StageTimer | None = None,
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
            A coupled run-ahead ends when its draw is opened.
        timer: Counts decoding as `rollout`, and waiting for graders while nothing decodes as `grading`.

    Returns:
        The groups, those of the shortest prefix of the draws that fills the batch.

    Raises:
        ValueError: A request that the engine can never serve, or what `keeps` raises.
    """
    timer = timer if timer is not None else StageTimer()
    filling = _Filling(engine, collector, prompt_of, first_draw, limits, keeps, run_ahead, timer)
    with timer.stage("rollout"):
        for completion in engine.generate([], before_step=filling.advance):
            collector.receive(completion)
    with timer.stage("grading"):  # so that it is logged where nobody had to wait, too
        return filling.result()


class _Filling:
    """A batch that is being filled."""

    def __init__(
        self,
        engine: Engine,
        collector: Collector,
        prompt_of: Callable[[int], Prompt],
        first_draw: int,
        limits: BatchLimits,
        keeps: Callable[[RolloutGroup], bool],
        run_ahead: Callable[[range], list[Request]] | None,
        timer: StageTimer,
    ) -> None:
        self._engine = engine
        self._collector = collector
        self._prompt_of = prompt_of
        self._limits = limits
        self._keeps = keeps
        self._run_ahead = run_ahead
        self._timer = timer
        self._next_draw = first_draw
        self._last_draw = first_draw + limits.max_draws
        """The first that may not be opened any more."""
        self._undecided: list[int] = []
        self._decided: dict[int, RolloutGroup] = {}
        self._kept: set[int] = set()

    def advance(self) -> None:
        """Decide what is graded and open what is needed; where nothing decodes, wait for the graders."""
        self._decide()
        self._open()
        while self._undecided and not self._engine.has_work:
            with self._timer.stage("grading"):
                self._collector.wait_any(self._undecided)
            self._decide()
            self._open()

    def result(self) -> SampledBatch:
        """The whole batch."""
        assert not self._undecided, f"draws {self._undecided} were never decided"
        draws = sorted(self._decided)
        return SampledBatch(
            groups=[self._decided[draw] for draw in draws],
            kept=[self._decided[draw] for draw in draws if draw in self._kept],
        )

    def _decide(self) -> None:
        graded = [draw for draw in self._undecided if self._collector.is_graded(draw)]
        for draw in graded:
            (group,) = self._collector.take([draw])
            self._undecided.remove(draw)
            self._decided[draw] = group
            if self._keeps(group):
                self._kept.add(draw)

    def _open(self) -> None:
        limits = self._limits
        opened = range(
            self._next_draw,
            min(
                self._next_draw + limits.num_prompts - len(self._kept) - len(self._undecided),
                self._next_draw + limits.max_open_prompts - len(self._undecided),
                self._last_draw,
            ),
        )
        if not opened:
            return
        self._next_draw = opened.stop
        self._undecided += opened
        for draw in opened:
            for request in self._collector.open(draw, self._prompt_of(draw)):
                self._engine.add(request)
        if self._run_ahead is not None:
            for request in self._run_ahead(opened):
                self._engine.add(request)
