"""The work of the next decode step: admission, chunked prefill, pages, preemption. No tensors here.

Admission is breadth-first (`Request.admission_key`): the first sample of every prompt, then the second of every prompt,
and so on, so that later samples find drafts in their siblings' tokens. Only the order of decoding depends on this,
never a token.

The first sample of a prompt computes all of its KV; its siblings share the full pages and compute the rest themselves.
When pages run out, they are freed in this order: pages of rejected drafts; run-aheads; prompts that no sample
shares; the KV of samples between two turns; the sample that was admitted last, which is preempted. What was evicted or
preempted is recomputed. The oldest running sample always advances, and samples that lost their pages come before new
ones, so the engine cannot get stuck. The run_ahead gets what is left after all this: a primary's schedule is the same,
step for step, with and without it. Nothing here looks at a clock: the same requests give the same steps.
"""

from heapq import heappop, heappush

import numpy as np

from srtrl.engine.batch import NO_SLOT, Batch, PromptPages, Sample, ScheduledStep
from srtrl.engine.no_run_ahead import NoRunAhead, Room
from srtrl.engine.step_inputs import Int32Array, Int64Array
from srtrl.types import BEFORE_ALL, Request

MAX_PAUSED_PER_RUNNING = 3
"""Samples without a slot that keep their pages from waiting ones, for each running sample."""


class Scheduler:
    """Keeps waiting and running samples and their pages."""

    def __init__(
        self, batch: Batch, *, prefill_chunk_tokens: int, max_draft_nodes: int, run_ahead: NoRunAhead | None = None
    ) -> None:
        """A scheduler without samples.

        Args:
            batch: Empty; it has the slots and the pages.
            prefill_chunk_tokens: Largest number of prompt tokens of a step.
            max_draft_nodes: Largest number of draft nodes of a sample in a step.
            run_ahead: On the same batch; it leaves pages for those nodes.
        """
        self.batch = batch
        self.pool = batch.pool
        self.prefill_chunk_tokens = prefill_chunk_tokens
        self.max_draft_nodes = max_draft_nodes
        self.running: list[Sample] = []
        """Primaries, in the order of admission."""
        self.run_ahead = run_ahead or NoRunAhead()
        self.num_preemptions = 0
        self.paused: dict[int, Sample] = {}
        """Samples between two turns, by RNG key."""
        self._paused_with_kv: list[Sample] = []
        """Samples without a slot that keep pages: paused ones, and extended ones that wait."""
        self._starting: list[Sample] = []
        """Those of `running` that do not decode yet: KV before their root is missing."""
        self._waiting: list[tuple[tuple[float, float, int], int, Sample]] = []
        """A heap of (key, number, sample); the numbers keep samples of one key in the order in which they came."""
        self._num_queued = 0
        self._prompts: dict[tuple[int, ...], PromptPages] = {}
        self._num_admissions = 0
        self._ended: dict[int, Sample] = {}
        """Run-aheads that ended between two steps, by slot."""

    @property
    def has_work(self) -> bool:
        """Whether an unfinished primary is left that is not paused."""
        return bool(self.running or self._waiting)

    @property
    def num_free_slots(self) -> int:
        """Slots that no primary has or waits for."""
        return max(0, self.batch.num_slots - len(self.running) - len(self._waiting))

    def add(self, request: Request, expected_tokens: float | None = None) -> None:
        """Queue one primary; also between two steps of others. The run-ahead with its RNG key ends.

        `expected_tokens`: expected length of the response, None without history.
        """
        self._ended |= self.run_ahead.cancel(request.rng_key)
        prompt = self._prompts.get(request.prompt_token_ids)
        if prompt is None:
            prompt = PromptPages(np.array(request.prompt_token_ids, np.int32))
            self._prompts[request.prompt_token_ids] = prompt
        prompt.num_users += 1
        sample = Sample(request, prompt)
        if (prefix := request.prefix) is not None:
            sample.token_ids, sample.logprobs = prefix.token_ids, prefix.rollout_logprobs
            sample.extensions = list(prefix.extensions)
        self._queue(sample, request.admission_key(expected_tokens or 0.0))

    def schedule(self, max_run_ahead_rows: int = 0) -> ScheduledStep:
        """Admit samples, find pages, and return the work of the next forward pass."""
        step = ScheduledStep(ended=self._ended, is_run_ahead=not self.has_work)
        self._ended = {}
        self._admit(step)
        self._grow_decoding(step)
        budget = self.prefill_chunk_tokens
        for sample in list(self._starting):
            if sample.slot != NO_SLOT:  # not preempted for an older one
                budget -= self._advance(sample, step, budget)
        batch = self.batch
        step.slots = np.flatnonzero(batch.is_decoding & ~batch.is_run_ahead)
        step.num_primaries = len(step.slots)
        assert step.chunks or step.num_primaries or not self.has_work, "no progress: the oldest sample must advance"
        if self.run_ahead.has_work:
            promised = sum(map(self._pages_to_start, self._starting))
            own = len(self.running) * max(1, self.pool.pages_for(self.max_draft_nodes))
            room = Room(
                num_rows=max_run_ahead_rows,
                num_prefill_tokens=budget,
                num_slots=batch.num_slots - len(self.running),
                num_reserved_pages=promised + own,
                may_admit=not self._waiting,
            )
            self.run_ahead.schedule(step, room)
        return step

    def grow_for_drafts(self, slots: Int64Array, sizes: Int64Array) -> Int64Array:
        """Take free pages for draft nodes; returns the number of nodes of each slot that have room.

        Drafts never evict, drop or preempt. Where pages are short, samples that were admitted first get theirs first:
        the order must not be that of the slots, which run-aheads change.
        """
        batch = self.batch
        num_positions = np.where(sizes > 0, batch.num_tokens[slots] + sizes, 0)
        missing = np.maximum(batch.missing_pages(slots, num_positions), 0)
        if missing.sum() > self.pool.num_free:
            batch.trim()
            missing = np.maximum(batch.missing_pages(slots, num_positions), 0)
            oldest_first = batch.admissions[slots].argsort()
            missing[oldest_first[missing[oldest_first].cumsum() > self.pool.num_free]] = 0
        if missing.any():
            batch.grow(slots, missing)
        room: Int64Array = np.minimum(sizes, batch.num_pages[slots] * self.pool.page_size - batch.num_tokens[slots])
        return room

    def finish(self, sample: Sample) -> None:
        """Free the slot and the pages of a finished sample; the next waiting one takes them in the next step."""
        if sample.is_run_ahead:
            self.run_ahead.finish(sample)
            return
        self._leave_slot(sample)
        self._leave_prompt(sample)

    def pause(self, sample: Sample) -> None:
        """A turn has ended: free the slot; the KV is kept while there is room for it."""
        assert sample.request.rng_key not in self.paused, "two samples with turns have the same RNG key"
        sample.num_computed = int(self.batch.num_computed[sample.slot])
        sample.page_ids = self.batch.pages(sample.slot)[: self.pool.pages_for(sample.num_computed)].copy()
        self._leave_slot(sample)
        self.paused[sample.request.rng_key] = sample
        self._paused_with_kv.append(sample)

    def extend(self, rng_key: int, token_ids: Int32Array) -> None:
        """A paused sample waits for a slot again, with tokens after its last turn."""
        sample = self.paused.pop(rng_key)
        start = len(sample.token_ids)
        sample.extensions.append((start, start + len(token_ids)))
        sample.token_ids = np.concatenate([sample.token_ids, token_ids])
        sample.logprobs = np.concatenate([sample.logprobs, np.zeros(len(token_ids), np.float32)])
        self._queue(sample, (BEFORE_ALL, sample.admission, 0))

    def end(self, rng_key: int) -> None:
        """A paused sample is finished."""
        sample = self.paused.pop(rng_key)
        if sample in self._paused_with_kv:
            self._evict(sample)
        self._leave_prompt(sample)

    def clear(self) -> dict[int, Sample]:
        """Drop every sample, finished or not, and every page; returns those that had a slot, by slot."""
        ended = self._ended | {sample.slot: sample for sample in self.running} | self.run_ahead.clear()
        for sample in list(self.running):
            self._leave_slot(sample)
        for sample in list(self._paused_with_kv):
            self._evict(sample)
        for prompt in self._prompts.values():
            self._drop_pages(prompt)
        for samples in (self._prompts, self._waiting, self.paused):
            samples.clear()
        self._ended = {}
        return ended

    def _queue(self, sample: Sample, key: tuple[float, float, int]) -> None:
        """Let a sample wait for a slot; the one with the smallest key is admitted first."""
        heappush(self._waiting, (key, self._num_queued, sample))
        self._num_queued += 1

    def _admit(self, step: ScheduledStep) -> None:
        """Fill free slots while the pages of all admitted samples can be expected to suffice.

        Samples without a slot lose their pages to waiting ones while there are more than `MAX_PAUSED_PER_RUNNING` of
        them per running sample: recomputing them costs less than nearly empty decode steps, but more than some idle
        slots.
        """
        promised = sum(map(self._pages_to_start, self._starting))
        while self._waiting and len(self.running) < self.batch.num_slots:
            sample = self._waiting[0][-1]
            spare = len(self.running) // 4  # running samples want a page every page_size tokens
            promised += self._pages_to_start(sample)
            while self.running and not self._make_room(promised + spare, step, keep=sample.prompt):
                if len(self._paused_with_kv) <= MAX_PAUSED_PER_RUNNING * len(self.running):
                    return
                self._evict_for(sample)
            heappop(self._waiting)
            if self.batch.num_free == 0:
                self.run_ahead.drop_newest(step)
            sample.admission = self._num_admissions
            self._num_admissions += 1
            if sample in self._paused_with_kv:
                self._paused_with_kv.remove(sample)
            self.batch.put(sample)
            self.running.append(sample)
            self._starting.append(sample)
            step.started.append(sample)

    def _pages_to_start(self, sample: Sample) -> int:
        """Pages until the sample can decode (an upper bound: each sibling counts a prompt that has no pages yet)."""
        if sample.slot == NO_SLOT:
            num_generated, num_held = len(sample.token_ids), len(sample.page_ids)
        else:
            num_generated = len(self.batch.generated(sample.slot))
            num_held = int(self.batch.num_pages[sample.slot])
        num_pages = self.pool.pages_for(len(sample.prompt.token_ids) + num_generated)
        return num_pages - (num_held or len(sample.prompt.page_ids))

    def _grow_decoding(self, step: ScheduledStep) -> None:
        """A page for the root of each decoding primary that has none."""
        batch = self.batch
        slots = np.flatnonzero(batch.is_decoding & ~batch.is_run_ahead)
        missing = np.maximum(batch.missing_pages(slots, batch.num_tokens[slots]), 0)
        if not missing.any():
            return
        if self._make_room(int(missing.sum()), step):
            batch.grow(slots, missing)
            return
        for sample in list(self.running):
            if sample.slot != NO_SLOT and batch.is_decoding[sample.slot]:
                self._reserve(sample, step)

    def _advance(self, sample: Sample, step: ScheduledStep, budget: int) -> int:
        """Compute at most `budget` of the positions before a sample's root; once none is missing, let it decode.

        The KV of a step is written before it is read. So a sample decodes in the step of its last chunk, and its
        siblings share the prompt's pages in the step that computes them.

        Returns:
            Number of positions that are computed.
        """
        batch, prompt, slot = self.batch, sample.prompt, sample.slot
        num_shared = (len(prompt.token_ids) - 1) // self.pool.page_size  # full pages without the root's position
        if not batch.num_pages[slot] and num_shared:
            if len(prompt.page_ids):
                self.pool.share(prompt.page_ids)
                batch.set_pages(slot, prompt.page_ids)
                batch.num_computed[slot] = num_shared * self.pool.page_size
            elif any(other.prompt is prompt and batch.num_pages[other.slot] for other in self._starting):
                return 0  # a sibling is computing the prompt
        if not self._reserve(sample, step):
            return 0
        num_missing = int(batch.num_tokens[slot] - 1 - batch.num_computed[slot])
        count = min(budget, num_missing)
        if count:
            step.chunks.append(batch.chunk(slot, count))
            batch.num_computed[slot] += count
        is_computed = batch.num_computed[slot] >= num_shared * self.pool.page_size
        if prompt.num_users > 1 and is_computed and not len(prompt.page_ids):
            prompt.page_ids = batch.pages(slot)[:num_shared].copy()
            self.pool.share(prompt.page_ids)
        if count == num_missing:
            batch.is_decoding[slot] = True
            self._starting.remove(sample)
        return count

    def _reserve(self, sample: Sample, step: ScheduledStep) -> bool:
        """Give the sample pages for all of its tokens; False where it had to be preempted.

        Where too few are free, samples between two turns lose theirs, then later samples are preempted, then this one.
        """
        slots = np.array([sample.slot])
        missing = self.batch.missing_pages(slots, self.batch.num_tokens[slots])
        if missing[0] <= 0:
            return True
        while not self._make_room(int(missing[0]), step):
            if self._paused_with_kv:
                self._evict_for(sample)
                continue
            victim = self.running[-1]
            assert len(self.running) > 1, "the pages do not hold one sequence"
            self._preempt(victim, step)
            if victim is sample:
                return False
        self.batch.grow(slots, missing)
        return True

    def _make_room(self, count: int, step: ScheduledStep, *, keep: PromptPages | None = None) -> bool:
        """Have `count` pages free: those of run-aheads, then those of prompts that no sample shares, except `keep`.

        Returns False if that cannot be; then nothing is dropped or evicted. Pages of run-aheads count as free ones,
        so that the answer is the same without it, and so is what is trimmed.
        """
        num_free = self.pool.num_free + self.run_ahead.num_pages
        idle: list[PromptPages] = []
        if num_free < count:
            self.batch.trim()
            num_free = self.pool.num_free + self.run_ahead.num_pages
        if num_free < count:
            held = [prompt for prompt in self._prompts.values() if len(prompt.page_ids) and prompt is not keep]
            idle = [prompt for prompt in held if self.pool.num_unshared(prompt.page_ids)]
        if num_free + sum(len(prompt.page_ids) for prompt in idle) < count:
            return False
        self.run_ahead.free_pages(count, step)
        while self.pool.num_free < count:
            self._drop_pages(idle.pop())
        return True

    def _preempt(self, sample: Sample, step: ScheduledStep) -> None:
        """Take the pages of a running sample; it waits first in line and will be recomputed, to the same tokens."""
        step.end(sample)
        self._leave_slot(sample)
        self._queue(sample, (BEFORE_ALL, sample.admission, 0))
        self.num_preemptions += 1

    def _leave_slot(self, sample: Sample) -> None:
        """Free a running sample's slot and the pages that it does not keep."""
        self.running.remove(sample)
        if sample in self._starting:
            self._starting.remove(sample)
        self.batch.take_out(sample)

    def _leave_prompt(self, sample: Sample) -> None:
        """A sample has ended; the pages of its prompt go with the last one."""
        prompt = sample.prompt
        prompt.num_users -= 1
        if prompt.num_users == 0:
            self._drop_pages(prompt)
            del self._prompts[sample.request.prompt_token_ids]

    def _drop_pages(self, holder: PromptPages | Sample) -> None:
        self.pool.release(holder.page_ids)
        holder.page_ids = holder.page_ids[:0]

    def _evict_for(self, sample: Sample) -> None:
        """Evict the most recently admitted sample without a slot other than `sample`: slots must not decide it."""
        others = [kept for kept in self._paused_with_kv if kept is not sample]
        self._evict(max(others, key=lambda kept: kept.admission))

    def _evict(self, sample: Sample) -> None:
        """Take the pages of a sample without a slot; it will be recomputed."""
        self._paused_with_kv.remove(sample)
        self._drop_pages(sample)
