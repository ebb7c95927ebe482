"""Run-aheads: samples at low priority, in the slots and pages that no primary wants. No tensors here.

A run-ahead computes its own prompt and has all its pages to itself, so that dropping it gives back every one, and the
scheduler may count them as free. It takes a slot only while no primary waits, and only free pages, of which it leaves
what the primaries may want in this step. When a primary wants its slot or its pages it is dropped for good, the newest
first; likewise when the sample with its RNG key is added. Its tokens so far stay with the drafter.
"""

import numpy as np

from srtrl.engine.batch import Batch, PromptPages, Sample, ScheduledStep
from srtrl.types import Request


class RunAheads:
    """Waiting and running run-aheads."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.pool = batch.pool
        self.running: list[Sample] = []
        """In the order of admission, the paused ones included."""
        self._line: dict[int, Request] = {}
        """Those that wait, by RNG key, in the order in which they were added."""

    @property
    def num_pages(self) -> int:
        """Pages that run-aheads hold."""
        return int(sum(self.batch.num_pages[sample.slot] for sample in self.running))

    @property
    def has_work(self) -> bool:
        """Whether a run-ahead is running or waits."""
        return bool(self.running or self._line)

    def add(self, request: Request) -> None:
        """Queue a run-ahead; they are admitted in the order in which they were added."""
        assert request.is_run_ahead
        assert request.rng_key not in self._line, "two run-aheads have the same RNG key"
        self._line[request.rng_key] = request

    def end_rng_key(self, rng_key: int) -> dict[int, Sample]:
        """End the run-aheads on an RNG key, for its sample has come; returns those that had a slot, by slot."""
        ended = {sample.slot: sample for sample in self.running if sample.request.rng_key == rng_key}
        for sample in ended.values():
            self.finish(sample)
        self._line.pop(rng_key, None)
        return ended

    def drop_newest(self, step: ScheduledStep) -> Sample:
        """Take slot and pages from the run-ahead that was admitted last."""
        sample = self.running[-1]
        step.end(sample)
        self.finish(sample)
        return sample

    def free_pages(self, count: int, step: ScheduledStep) -> None:
        """Drop run-aheads until `count` pages of the pool are free, or none is left."""
        while self.running and self.pool.num_free < count:
            self.drop_newest(step)

    def finish(self, sample: Sample) -> None:
        """Free the slot and the pages of a run-ahead that came to its end; it keeps its tokens."""
        self.running.remove(sample)
        self.batch.take_out(sample)

    def clear(self) -> dict[int, Sample]:
        """Drop all; returns those that had a slot, by slot."""
        self._line.clear()
        ended = {sample.slot: sample for sample in self.running}
        for sample in ended.values():
            self.finish(sample)
        return ended

    def schedule(
        self,
        step: ScheduledStep,
        *,
        num_rows: int,
        num_prefill_tokens: int,
        num_slots: int,
        num_reserved_pages: int,
        may_admit: bool,
    ) -> None:
        """Add the run-aheads' work to a step that holds the primaries' already.

        Args:
            step: Gets slots, chunks and the admitted run-aheads.
            num_rows: Rows for run-aheads: roots and prompt tokens. The oldest take rows first, the others pause and
                keep their pages.
            num_prefill_tokens: Largest number of prompt tokens among these rows.
            num_slots: Slots that no primary has; run-aheads may have them now.
            num_reserved_pages: Pages that stay free, for the primaries' drafts and their next step.
            may_admit: Whether new run-aheads may take a slot: not while a primary waits.
        """
        while len(self.running) > num_slots:
            self.drop_newest(step)
        self.free_pages(num_reserved_pages, step)
        decoding: list[int] = []
        position = 0
        while num_rows > 0:
            if position == len(self.running):
                can_admit = may_admit and position < num_slots and num_prefill_tokens > 0
                if not (can_admit and self._admit(step, num_reserved_pages)):
                    break
            sample = self.running[position]
            missing = int(self.batch.num_tokens[sample.slot] - 1 - self.batch.num_computed[sample.slot])
            count = min(missing, num_rows, num_prefill_tokens) if missing else 1
            position += 1
            if not count:
                continue
            if not self._grow(sample, count, step, num_reserved_pages):
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

    def _grow(self, sample: Sample, count: int, step: ScheduledStep, num_reserved_pages: int) -> bool:
        """Find pages for `count` more positions, from newer run-aheads if need be; False where it had to be dropped."""
        slot = sample.slot
        missing = self.pool.pages_for(int(self.batch.num_computed[slot]) + count) - int(self.batch.num_pages[slot])
        while missing > max(0, self.pool.num_free - num_reserved_pages):
            if self.drop_newest(step) is sample:
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
        sample = Sample(self._line.pop(request.rng_key), PromptPages(token_ids))
        self.batch.put(sample)
        self.running.append(sample)
        step.started.append(sample)
        return True
