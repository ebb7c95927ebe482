"""Partial rollouts: a rollout ends when a share of its groups is complete, and the other samples go on in the next one.

Which samples end is decided on a virtual clock: at tick t each sample has t new tokens, as if all decoded side by side,
a token at a time. A group is complete at the tick of its last sample, and the rollout ends at the tick at which as many
groups are complete as are wanted, at tick 1 at the earliest. So the end depends on policy, seed and data order alone,
where a number of decode steps would depend on slots, drafts, pages and ranks.

The real decoder does not keep that time. A sample may be ahead of the last tick when that is known: what it has beyond
it is no part of the rollout, even its end (its tokens are drafts for the next rollout, which samples them again). And
one that is behind is decoded up to that tick.

With an environment the clock counts what the policy samples: observations and tools take no time, so that the order in
which tools finish decides nothing. A turn that ends at the last tick is answered in this rollout, and the sample goes
on after the answer.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

from srtrl import ranks
from srtrl.features.rounds import RoundsSampler, truncated, with_own_answers
from srtrl.rollout.collect import Collector, FixedDraws, collect_rollouts, data_order
from srtrl.trainer.sampling import Collected
from srtrl.types import Completion, Prompt, Request, Response, Rollout, RolloutGroup, SampleKey

if TYPE_CHECKING:
    from srtrl.engine.engine import Engine


class PartialSampler(RoundsSampler):
    """The sampler of `rollout.mode: partial`; `earlier` has the samples of incomplete groups, by draw and sample."""

    @property
    def num_wanted(self) -> int:
        """See `Sampler`."""
        rollout = self.context.recipe.rollout
        return share_of(rollout.num_prompts, rollout.min_complete)

    def going_on(self) -> list[int]:
        """See `RoundsSampler`."""
        return sorted({draw for draw, _ in self.earlier})

    def round(self, step: int, draws: list[tuple[int, Prompt]], collector: Collector) -> list[RolloutGroup]:
        """See `RoundsSampler`."""
        engine, rollout = self.context.engine, self.context.recipe.rollout
        limit, oldest = rollout.max_new_tokens, engine.policy_version - rollout.max_age
        collector.prefixes = {key: truncated(p, len(p.token_ids), limit) for key, p in self.earlier.items()}
        due = {draw for (draw, _), prefix in self.earlier.items() if prefix.policy_versions[0] <= oldest}
        num_complete = share_of(len(draws), rollout.min_complete)
        some = PartialDraws(draws, num_complete=num_complete, due=due)
        found = collect_rollouts(engine, collector, some)
        self.earlier = some.carried
        return found

    def collect(self, step: int, collector: Collector) -> Collected:
        """See `Sampler`; counts the samples that go on."""
        collected = super().collect(step, collector)
        num_carried = sum(prefix.finish_reason is None for prefix in self.earlier.values())
        return collected._replace(metrics={"off_policy/carried": float(num_carried)})


class PartialDraws(FixedDraws):
    """Draws of which the first complete ones are rolled out; the samples of the others are `carried`.

    With several ranks each sample that ends is published to all: a counter numbers them, and one counter for each
    number has the sample and its tick.
    """

    def __init__(self, draws: Sequence[tuple[int, Prompt]], *, num_complete: int, due: Collection[int] = ()) -> None:
        """All ranks make the same.

        Args:
            draws: See `FixedDraws`. Those with samples in `Collector.prefixes` go on.
            num_complete: Number of groups at whose completion the rollout ends; at least 1.
            due: Draws that are waited for beside that, because their samples are old.
        """
        super().__init__(draws)
        assert 1 <= num_complete <= len(draws)
        self.num_complete = num_complete
        self.due = set(due)
        self.carried: dict[SampleKey, Response] = {}
        """After the rollout: all samples of the draws that are not complete, finished ones too; on all ranks."""
        self._completions: dict[SampleKey, Completion] = {}
        """Of this rank, the interrupted ones too."""
        self._ticks: dict[int, dict[int, int]] = {draw_index: {} for draw_index, _ in self.draws}
        """By draw and sample, of all ranks: new tokens of those that are finished."""
        self._num_read = 0
        self._last_tick: int | None = None
        """At which the rollout ends, or the latest at which it may; None while any is possible."""

    def requests(self, engine: Engine, collector: Collector) -> Iterator[Request]:
        """See `Draws`; ends the samples that have reached the last tick first."""
        self._read_ticks(collector, collector.share.read("ended"))
        if self._last_tick is not None:
            for completion in engine.interrupt(self._last_tick):
                self._completions[data_order(completion.request)] = collector.turns.give_up(completion)
                collector.share.add("finished")
        yield from super().requests(engine, collector)

    def complete(self, collector: Collector) -> Sequence[int]:
        """See `Draws`."""
        self._read_ticks(collector, collector.share.add("ended", 0))
        last = self._last_tick
        assert last is not None, "the rollout has not ended"
        return [draw for draw, tick in self._complete(collector).items() if tick <= last]

    def rollouts(self, collector: Collector) -> list[Rollout]:
        """See `Draws`; of the complete draws. Sets `carried`."""
        complete, last = self.complete(collector), self._last_tick
        assert last is not None
        carried: dict[SampleKey, Response] = {}
        for draw, sample in sorted(self._completions):
            if draw not in complete:
                completion = self._completions[draw, sample]
                response = completion.response
                if self._ticks[draw].get(sample, last + 1) > last:
                    response = response.cut([*completion.newly_sampled, len(response.token_ids)][last])
                carried[draw, sample] = with_own_answers(response)
        for part in ranks.gather(carried, "the samples that are carried over"):
            self.carried |= part
        return collector.take(complete)

    def ended(self, collector: Collector, completion: Completion) -> None:
        """See `Draws`: lets all ranks know the sample's tick."""
        key = data_order(completion.request)
        self._completions[key] = completion
        number = collector.share.add("ended")
        tick = len(completion.newly_sampled)
        place = (key[0] - self.draws[0][0]) * collector.num_samples + key[1]
        collector.share.add(f"ended {number}", 1 + (tick << 32) + place)

    def _read_ticks(self, collector: Collector, num_ended: int) -> None:
        """Read what was published since the last call, and compute the last tick anew."""
        first = self._num_read
        while self._num_read < num_ended and (value := collector.share.add(f"ended {self._num_read}", 0)):
            draw, sample = divmod((value - 1) & 0xFFFFFFFF, collector.num_samples)
            self._ticks[self.draws[0][0] + draw][sample] = (value - 1) >> 32
            self._num_read += 1
        complete = self._complete(collector) if self._num_read > first else {}
        if len(complete) >= self.num_complete and self.due <= complete.keys():
            ticks = sorted(complete.values())
            self._last_tick = max([1, ticks[self.num_complete - 1], *(complete[draw] for draw in self.due)])

    def _complete(self, collector: Collector) -> dict[int, int]:
        """The draws all of whose samples are finished, as far as is known, in data order, and their ticks."""
        return {d: max(ticks.values()) for d, ticks in self._ticks.items() if len(ticks) == collector.num_samples}


def share_of(count: int, share: float) -> int:
    """The smallest number that is at least this share of `count`, at least 1; rounding of the share apart."""
    return max(1, math.ceil(count * share - 1e-9))
