"""Run-aheads: samples of later draws, decoded early in slots and pages that no primary wants. No tensors here.

A run-ahead is decoded by the current policy on the very RNG key that its sample will have. The next step's policy is
nearly the same and its noise is the same, so that the sample repeats a good part of the run-ahead word for word: a
draft of many tokens. The sample itself is decoded by the policy of its own step, and no draft changes a sampled token,
so it stays exact and on-policy; nothing is ever learned from a run-ahead.

A run-ahead computes its own prompt and has all its pages to itself. It takes a slot only while no primary waits, and
only free pages, of which it leaves what the primaries may want in this step. When a primary wants its slot or its pages
it is dropped for good, the newest first; likewise when its sample is added. The drafter learns its tokens so far.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from srtrl import ranks
from srtrl.drafters.base import DrafterBase, key_of
from srtrl.engine.batch import NO_SLOT, Batch, PromptPages, Sample, ScheduledStep
from srtrl.engine.draft_budget import MAX_ROWS, StepCost
from srtrl.engine.no_run_ahead import NoRunAhead, Room
from srtrl.types import Request


class RunAhead(NoRunAhead):
    """Waiting and running run-aheads of one engine."""

    needs_cost = True

    def __init__(self, batch: Batch, cost: StepCost, drafter: DrafterBase, *, max_slowdown: float) -> None:
        """Run-ahead on an engine's batch; `max_slowdown`: of a step with primaries, as a share of its time."""
        self.batch = batch
        self.pool = batch.pool
        self.cost = cost
        self.drafter = drafter
        self.max_slowdown = max_slowdown
        self.running: list[Sample] = []
        """In the order of admission, the paused ones included."""
        self._line: dict[int, Request] = {}
        """Those that wait, by RNG key, in the order in which they were added."""
        self._next_draw = 0
        """The first draw that was not chosen in this rollout."""

    @property
    def num_pages(self) -> int:
        """Pages that run-aheads hold."""
        return int(sum(self.batch.num_pages[sample.slot] for sample in self.running))

    @property
    def has_work(self) -> bool:
        """Whether a run-ahead is running or waits."""
        return bool(self.running or self._line)

    def choose(self, draws: range) -> range:
        """Each draw once."""
        chosen = range(max(draws.start, self._next_draw), draws.stop)
        self._next_draw = max(draws.stop, self._next_draw)
        return chosen

    def add(self, requests: Sequence[Request]) -> None:
        """Queue them breadth-first: one sample of every prompt, then the second of every prompt.

        Each rank begins with others. A run-ahead ends after its first turn.
        """
        ordered = sorted(requests, key=lambda request: (request.sample_index, request.draw_index))
        for shift in range(ranks.count()):
            for request in ordered[(ranks.index() + shift) % ranks.count() :: ranks.count()]:
                assert request.rng_key not in self._line, "two run-aheads have the same RNG key"
                self._line[request.rng_key] = replace(request, has_turns=False)

    def max_rows(self, num_rows: int, *, is_alone: bool) -> int:
        """Those that are nearly free; alone any number."""
        if is_alone:
            return MAX_ROWS
        return self.cost.rows_within(num_rows, self.max_slowdown) if self.cost.is_known and num_rows else 0

    def cancel(self, rng_key: int) -> dict[int, Sample]:
        """See `NoRunAhead`."""
        self._line.pop(rng_key, None)
        return self._end([sample for sample in self.running if sample.request.rng_key == rng_key])

    def clear(self) -> dict[int, Sample]:
        """See `NoRunAhead`."""
        self._line.clear()
        self._next_draw = 0
        return self._end(self.running)

    def drop_newest(self, step: ScheduledStep) -> None:
        """See `NoRunAhead`."""
        step.end(self.running[-1])
        self.finish(self.running[-1])

    def free_pages(self, count: int, step: ScheduledStep) -> None:
        """See `NoRunAhead`."""
        while self.running and self.pool.num_free < count:
            self.drop_newest(step)

    def finish(self, sample: Sample) -> None:
        """See `NoRunAhead`; the drafter learns its tokens."""
        self.running.remove(sample)
        self.batch.take_out(sample)
        self.drafter.learn_texts({key_of(sample.request): {sample.request.rng_key: sample.token_ids}})

    def schedule(self, step: ScheduledStep, room: Room) -> None:
        """The oldest take rows first."""
        num_rows, num_prefill_tokens = room.num_rows, room.num_prefill_tokens
        while len(self.running) > room.num_slots:
            self.drop_newest(step)
        self.free_pages(room.num_reserved_pages, step)
        decoding: list[int] = []
        position = 0
        while num_rows > 0:
            if position == len(self.running):
                can_admit = room.may_admit and position < room.num_slots and num_prefill_tokens > 0
                if not (can_admit and self._admit(step, room.num_reserved_pages)):
                    break
            sample = self.running[position]
            missing = int(self.batch.num_tokens[sample.slot] - 1 - self.batch.num_computed[sample.slot])
            count = min(missing, num_rows, num_prefill_tokens) if missing else 1
            position += 1
            if not count:
                continue
            if not self._grow(sample, count, step, room.num_reserved_pages):
                break  # no page for it: it was the last one and is gone
            num_rows -= count
            if missing:
                num_prefill_tokens -= count
                step.chunks.append(self.batch.chunk(sample.slot, count))
                self.batch.num_computed[sample.slot] += count
            else:
                self.batch.is_decoding[sample.slot] = True
                decoding.append(sample.slot)
        step.slots = np.concatenate([step.slots, np.array(decoding, np.int64)])

    def _end(self, samples: Sequence[Sample]) -> dict[int, Sample]:
        """End samples between two steps; returns them by the slots that they had."""
        ended = {sample.slot: sample for sample in samples}
        for sample in ended.values():
            self.finish(sample)
        return ended

    def _grow(self, sample: Sample, count: int, step: ScheduledStep, num_reserved_pages: int) -> bool:
        """Find pages for `count` more positions, from newer run-aheads if need be; False where it had to be dropped."""
        slot = sample.slot
        missing = self.pool.pages_for(int(self.batch.num_computed[slot]) + count) - int(self.batch.num_pages[slot])
        while missing > max(0, self.pool.num_free - num_reserved_pages):
            self.drop_newest(step)
            if sample.slot == NO_SLOT:
                return False
        if missing > 0:
            self.batch.grow(np.array([slot]), np.array([missing]))
        return True

    def _admit(self, step: ScheduledStep, num_reserved_pages: int) -> bool:
        """Give the first in line a slot; False where none waits, or its pages and one per run-ahead are not free."""
        if not self._line:
            return False
        request = next(iter(self._line.values()))
        token_ids = np.array(request.prompt_token_ids, np.int32)
        spare = self.pool.num_free - num_reserved_pages
        if self.pool.pages_for(len(token_ids)) + len(self.running) > spare:
            return False
        sample = Sample(self._line.pop(request.rng_key), PromptPages(token_ids), is_run_ahead=True)
        self.batch.put(sample)
        self.running.append(sample)
        step.started.append(sample)
        return True
