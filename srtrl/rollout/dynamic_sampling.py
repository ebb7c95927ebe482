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
from itertools import chain
from typing import TYPE_CHECKING

from srtrl.types import Prompt, Request, RolloutGroup

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
    undecided: list[int] = []
    decided: dict[int, RolloutGroup] = {}
    kept: set[int] = set()

    def decide_and_open() -> None:
        for draw in [draw for draw in undecided if collector.is_graded(draw)]:
            (decided[draw],) = collector.take([draw])
            undecided.remove(draw)
            if keeps(decided[draw]):
                kept.add(draw)
        num_opened = len(decided) + len(undecided)
        room = min(num_prompts - len(kept) - len(undecided), max_open_prompts - len(undecided), max_draws - num_opened)
        opened = range(first_draw + num_opened, first_draw + num_opened + room)
        if opened:
            undecided.extend(opened)
            for request in chain.from_iterable(collector.open(draw, prompt_of(draw)) for draw in opened):
                engine.add(request)
            for request in run_ahead(opened):
                engine.add(request)

    def advance() -> None:
        """Decide what is graded and open what is needed; where nothing decodes, wait for graders and environments."""
        collector.take_turns(engine)
        decide_and_open()
        while undecided and not engine.has_work:
            collector.wait_any(undecided)
            collector.take_turns(engine)
            decide_and_open()

    with collector.timer.stage("rollout"):
        for completion in engine.generate([], before_step=advance):
            collector.receive(completion)
    with collector.timer.stage("grading"):  # so that it is logged where nobody had to wait, too
        assert not undecided, f"draws {undecided} were never decided"
        return [decided[draw] for draw in sorted(decided)], [decided[draw] for draw in sorted(kept)]
