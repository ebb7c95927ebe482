"""Who computes what in the next decode step: admission, chunked prefill, pages, preemption. No tensors here.

Admission is breadth-first: the first sample of every prompt (the scout), then the second of every prompt, and so on, so
that later samples find drafts in what their siblings said. Within such a wave the samples that are expected to be long
go first: a training step ends when its last sample does. Only the order of decoding depends on this, never a token.

Pages run out in this order of remedies: pages left over from rejected drafts; run-aheads are dropped; prompts that no
running sample waits for are evicted; then the KV of samples that have no slot (between two turns); then the sample that
was admitted last is preempted. What was evicted or preempted is recomputed. The oldest running sample always advances,
and samples that lost their pages come before new ones, so the engine cannot get stuck. Run-aheads get what is left
after all this: a primary's schedule is the same, step for step, with and without them. Nothing here looks at a clock:
the same requests give the same steps.
"""

from dataclasses import dataclass, field, replace

import numpy as np

from srtrl.engine.batch import NO_SLOT, Batch, PromptPages, Sample
from srtrl.engine.rows import Int32Array, Int64Array, PrefillChunk
from srtrl.engine.run_aheads import RunAheads
from srtrl.engine.waiting_line import WaitingLine
from srtrl.types import Request

MAX_KEEPING = 3
"""Samples without a slot that keep pages from waiting ones, for each running one."""


@dataclass(slots=True)
class ScheduledStep:
    """The work of one decode step."""

    slots: Int64Array = field(default_factory=lambda: np.empty(0, np.int64))
    """[B], those that sample at least one token; run-aheads come after all primaries."""
    num_primaries: int = 0
    """The first slots: primaries."""
    chunks: list[PrefillChunk] = field(default_factory=list)
    page_copies: list[tuple[int, int]] = field(default_factory=list)
    """(source, target) pages to copy before the forward pass, all sources read before any target is written."""
    ended: dict[int, Sample] = field(default_factory=dict)
    """Samples that were preempted or dropped, by the slot that they had; it may be in `started` again."""
    started: list[Sample] = field(default_factory=list)
    """Samples that took a slot."""
    holders: list[PromptPages | Sample] = field(default_factory=list)
    """Whose KV each chunk computes."""

    @property
    def num_prompt_rows(self) -> int:
        """Rows of all chunks."""
        return sum(len(chunk.token_ids) for chunk in self.chunks)

    def add_chunk(self, holder: PromptPages | Sample, chunk: PrefillChunk) -> int:
        """Compute a chunk in this step; returns its number of tokens."""
        self.holders.append(holder)
        self.chunks.append(chunk)
        return len(chunk.token_ids)

    def end(self, sample: Sample) -> None:
        """A sample loses its slot. If it started in this step, undo the start."""
        if sample in self.started:
            self.started.remove(sample)
        else:
            self.ended[sample.slot] = sample


class Scheduler:
    """Keeps waiting and running samples and their pages."""

    def __init__(
        self,
        batch: Batch,
        *,
        prefill_chunk_tokens: int,
        max_draft_nodes: int,
    ) -> None:
        """`max_draft_nodes`: of a sample in a step; run-aheads leave pages for those of primaries."""
        self.batch = batch
        self.pool = batch.pool
        self.prefill_chunk_tokens = prefill_chunk_tokens
        self.max_draft_nodes = max_draft_nodes
        self.running: list[Sample] = []
        """Primaries, in the order of admission."""
        self.run_aheads = RunAheads(batch)
        self.num_preemptions = 0
        self.paused: dict[int, Sample] = {}
        """Samples between two turns, by RNG key."""
        self._keeping: list[Sample] = []
        """Samples without a slot that keep pages: paused ones, and extended ones that wait."""
        self._starting: list[Sample] = []
        """Those of `running` that do not decode yet: KV before their root is missing."""
        self._waiting = WaitingLine()
        self._prompts: dict[tuple[int, ...], PromptPages] = {}
        self._num_admissions = 0
        self._ended: dict[int, Sample] = {}
        """Run-aheads that ended between two steps, by slot."""

    @property
    def has_work(self) -> bool:
        """Whether an unfinished primary is left that is not paused."""
        return bool(self.running or self._waiting)

    @property
    def num_waiting(self) -> int:
        """Primaries without a slot."""
        return len(self._waiting)

    @property
    def num_free_slots(self) -> int:
        """Slots that no primary has or waits for."""
        return max(0, self.batch.num_slots - len(self.running) - len(self._waiting))

    @property
    def may_run_ahead(self) -> bool:
        """Whether the next step may have rows for run-aheads: some run, or one waits and a slot stays free for it."""
        if self.run_aheads.running:
            return True
        return self.run_aheads.has_work and len(self.running) + self.num_waiting < self.batch.num_slots

    def add(self, request: Request, expected_tokens: float | None = None) -> None:
        """Queue one sample, a primary or a run-ahead; also between two steps of others.

        A primary ends the run-ahead on its RNG key.

        Args:
            request: `is_run_ahead` puts it into a line of its own.
            expected_tokens: Of a primary: expected length of the response, None if nothing is known.
        """
        if request.is_run_ahead:
            self.run_aheads.add(request)
            return
        self._ended |= self.run_aheads.end_rng_key(request.rng_key)
        prompt = self._prompts.get(request.prompt_token_ids)
        if prompt is None:
            prompt = PromptPages(np.array(request.prompt_token_ids, np.int32))
            self._prompts[request.prompt_token_ids] = prompt
            if expected_tokens is not None:
                self._waiting.expect(request.prompt_token_ids, expected_tokens)
        prompt.num_users += 1
        self._waiting.add(Sample(request, prompt))

    def schedule(self, max_run_ahead: int = 0) -> ScheduledStep:
        """Admit samples, find pages, and say what the next forward pass computes.

        Args:
            max_run_ahead: Largest number of rows of run-aheads in this step: roots and prompt tokens. Fewer than there
                are running run-aheads: the newest pause, and keep their pages.
        """
        step = ScheduledStep(ended=self._ended)
        self._ended = {}
        self._admit(step)
        self._grow_decoding(step)
        budget = self.prefill_chunk_tokens
        for sample in list(self._starting):
            if sample.slot != NO_SLOT:  # not preempted for the sake of one before it
                budget = self._advance(sample, step, budget)
        batch = self.batch
        step.slots = np.flatnonzero(batch.is_decoding & ~batch.is_run_ahead)
        step.num_primaries = len(step.slots)
        assert step.chunks or step.num_primaries or not self.has_work, "no progress: the oldest sample must advance"
        if self.run_aheads.has_work:
            promised = sum(map(self._pages_to_start, self._starting))
            own = len(self.running) * max(1, self.pool.pages_for(self.max_draft_nodes))
            self.run_aheads.schedule(
                step,
                num_rows=max_run_ahead,
                num_prefill_tokens=budget,
                num_slots=batch.num_slots - len(self.running),
                num_reserved_pages=promised + own,
                may_admit=not self._waiting,
            )
        for holder, chunk in zip(step.holders, step.chunks, strict=True):
            if isinstance(holder, PromptPages):
                holder.num_computed += len(chunk.token_ids)
            else:
                batch.num_computed[holder.slot] += len(chunk.token_ids)
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
            oldest_first = self._by_admission(slots)
            missing[oldest_first[missing[oldest_first].cumsum() > self.pool.num_free]] = 0
        if missing.any():
            batch.grow(slots, missing)
        room: Int64Array = np.minimum(sizes, batch.num_pages[slots] * self.pool.page_size - batch.num_tokens[slots])
        return room

    def finish(self, sample: Sample) -> None:
        """Free the slot and the pages of a finished sample; the next waiting one takes them in the next step."""
        if sample.request.is_run_ahead:
            self.run_aheads.finish(sample)
            return
        self.running.remove(sample)
        num_generated = len(self.batch.generated(sample.slot))
        self._release(sample)
        self._forget(sample, num_generated)

    def pause(self, sample: Sample) -> None:
        """A turn has ended: free the slot; the KV is kept while there is room for it."""
        assert sample.request.rng_key not in self.paused, "two samples with turns have the same RNG key"
        self.running.remove(sample)
        self.batch.save_text(sample)
        sample.num_computed = int(self.batch.num_computed[sample.slot])
        sample.page_ids = self.batch.pages(sample.slot)[: self.pool.pages_for(sample.num_computed)].copy()
        self._release(sample)
        self.paused[sample.request.rng_key] = sample
        self._keeping.append(sample)

    def extend(self, rng_key: int, token_ids: Int32Array) -> None:
        """A paused sample waits for a slot again, with tokens after its last turn."""
        sample = self.paused.pop(rng_key)
        start = len(sample.token_ids)
        sample.extensions.append((start, start + len(token_ids)))
        sample.token_ids = np.concatenate([sample.token_ids, token_ids])
        sample.logprobs = np.concatenate([sample.logprobs, np.zeros(len(token_ids), np.float32)])
        sample.request = replace(sample.request, turn=sample.request.turn + 1)
        self._waiting.add(sample)

    def end(self, rng_key: int) -> None:
        """A paused sample is finished."""
        sample = self.paused.pop(rng_key)
        if sample in self._keeping:
            self._evict(sample)
        self._forget(sample, len(sample.token_ids))

    def _evict_for(self, sample: Sample) -> None:
        """Evict, of the other samples without a slot, that which was admitted last: slots must not decide it."""
        others = [kept for kept in self._keeping if kept is not sample]
        self._evict(max(others, key=lambda kept: kept.admission))

    def _evict(self, sample: Sample) -> None:
        """Take the pages of a sample without a slot; it will be recomputed."""
        self._keeping.remove(sample)
        self.pool.release(sample.page_ids)
        sample.page_ids = sample.page_ids[:0]

    def _forget(self, sample: Sample, num_generated: int) -> None:
        """A sample has ended and holds nothing any more."""
        self._waiting.expect(sample.request.prompt_token_ids, num_generated)
        prompt = sample.prompt
        prompt.num_users -= 1
        if prompt.num_users == 0:
            self._drop_prompt(prompt)
            del self._prompts[sample.request.prompt_token_ids]

    def clear(self) -> dict[int, Sample]:
        """Drop every sample, finished or not, and every page; returns those that had a slot, by slot."""
        ended = self._ended | {sample.slot: sample for sample in self.running} | self.run_aheads.clear()
        for sample in self.running:
            self._release(sample)
        for sample in list(self._keeping):
            self._evict(sample)
        for prompt in self._prompts.values():
            self._drop_prompt(prompt)
        for samples in (self.running, self._starting, self._prompts, self._waiting, self.paused):
            samples.clear()
        self._ended = {}
        return ended

    def check_integrity(self) -> None:
        """Assert that pages and their holders agree (for tests, after any operation)."""
        batch = self.batch
        running = [*self.running, *self.run_aheads.running]
        assert len(running) + batch.num_free == batch.num_slots
        assert all(batch.samples[sample.slot] is sample for sample in running)
        pages = [batch.pages(sample.slot) for sample in running]
        kept = [sample.page_ids for sample in self._keeping]
        self.pool.check_integrity([*pages, *kept, *(prompt.page_ids for prompt in self._prompts.values())])
        for sample, held in zip(running, pages, strict=True):
            num_computed = batch.num_computed[sample.slot]
            assert len(held) * self.pool.page_size >= num_computed
            writable = held[num_computed // self.pool.page_size :]
            assert self.pool.num_unshared(writable) == len(writable), "a page that will be written is shared"

    def _admit(self, step: ScheduledStep) -> None:
        """Fill free slots while the pages of all admitted samples can be expected to suffice.

        Samples without a slot lose their pages to waiting ones while they are more than `MAX_KEEPING` for each that
        runs: recomputing them costs less than nearly empty decode steps, but more than some idle slots.
        """
        if not self._waiting or len(self.running) == self.batch.num_slots:
            return
        promised = sum(map(self._pages_to_start, self._starting))
        while self._waiting and len(self.running) < self.batch.num_slots:
            sample = self._waiting.first(self.running, self.batch)
            spare = len(self.running) // 4  # running samples want a page every page_size tokens
            promised += self._pages_to_start(sample)
            while self.running and not self._make_room(promised + spare, step, keep=sample.prompt):
                if len(self._keeping) <= MAX_KEEPING * len(self.running):
                    return
                self._evict_for(sample)
            self._waiting.pop()
            if self.batch.num_free == 0:
                self.run_aheads.drop_newest(step)
            sample.admission = self._num_admissions
            self._num_admissions += 1
            if sample in self._keeping:
                self._keeping.remove(sample)
            self.batch.put(sample)
            self.running.append(sample)
            self._starting.append(sample)
            step.started.append(sample)

    def _pages_to_start(self, sample: Sample) -> int:
        """Pages until the sample can decode (an upper bound: each sibling counts a prompt that has no pages yet)."""
        if sample.has_started:
            return 0
        prompt, num_prompt = sample.prompt, len(sample.prompt.token_ids)
        generated = sample.token_ids if sample.slot == NO_SLOT else self.batch.generated(sample.slot)
        if len(sample.page_ids):
            return self.pool.pages_for(num_prompt + len(generated)) - len(sample.page_ids)
        of_prompt = 0 if len(prompt.page_ids) else self.pool.pages_for(prompt.num_missing)
        return of_prompt + self.pool.pages_for(num_prompt + len(generated)) - num_prompt // self.pool.page_size

    def _grow_decoding(self, step: ScheduledStep) -> None:
        """A page for the root of each decoding primary that has none."""
        batch = self.batch
        slots = np.flatnonzero(batch.is_decoding & ~batch.is_run_ahead)
        missing = np.maximum(batch.missing_pages(slots, batch.num_tokens[slots]), 0)
        if not missing.any():
            return
        if self._make_room(int(missing.sum()), step, keep=None, may_evict=False):
            batch.grow(slots, missing)
            return
        for sample in list(self.running):
            if sample.slot != NO_SLOT and batch.is_decoding[sample.slot]:
                self._reserve(sample, step)

    def _advance(self, sample: Sample, step: ScheduledStep, budget: int) -> int:
        """Bring a sample nearer to decoding: its prompt, then what it had generated before a preemption.

        Returns:
            What is left of the budget of prefill tokens.
        """
        batch, prompt, slot = self.batch, sample.prompt, sample.slot
        if not sample.has_started and prompt.num_missing > 0:
            if budget and prompt not in step.holders and self._reserve_prompt(sample, step):
                start, stop = prompt.num_computed, prompt.num_computed + min(budget, prompt.num_missing)
                chunk = PrefillChunk(prompt.token_ids[start:stop], start, prompt.page_ids)
                budget -= step.add_chunk(prompt, chunk)
        elif sample.has_started or self._start(sample, step):
            is_missing = batch.num_computed[slot] < batch.num_tokens[slot] - 1
            if (budget or not is_missing) and self._reserve(sample, step):
                if is_missing:
                    budget -= step.add_chunk(sample, batch.chunk(slot, budget))
                else:
                    batch.is_decoding[slot] = True
                    self._starting.remove(sample)
        return budget

    def _reserve_prompt(self, sample: Sample, step: ScheduledStep) -> bool:
        """Find all pages of the sample's prompt; False where the sample itself had to be preempted."""
        prompt = sample.prompt
        if not len(prompt.page_ids):
            needed = self.pool.pages_for(prompt.num_missing)
            if not self._obtain(needed, sample, step):
                return False
            prompt.page_ids = self.pool.allocate(needed)
        return True

    def _start(self, sample: Sample, step: ScheduledStep) -> bool:
        """Give the sample its share of the prompt's pages; False where it had to be preempted."""
        prompt, pool, slot = sample.prompt, self.pool, sample.slot
        num_computed = prompt.num_computed
        num_full, num_rest = divmod(num_computed, pool.page_size)
        others_use_it = prompt.num_users > 1
        if num_rest == 0:
            pool.share(prompt.page_ids)
            self.batch.set_pages(slot, prompt.page_ids)
        elif others_use_it and pool.num_free == 0 and not self._obtain(1, sample, step):
            if not self.running or self.running[0] is not sample:
                return False
            self._hand_over(prompt, slot)  # alone and still no page: take the prompt's own, others recompute
        elif others_use_it:
            copy = pool.allocate(1)
            step.page_copies.append((int(prompt.page_ids[num_full]), int(copy[0])))
            pool.share(prompt.page_ids[:num_full])
            self.batch.set_pages(slot, np.concatenate([prompt.page_ids[:num_full], copy]))
        else:
            self._hand_over(prompt, slot)  # the last user needs no copy
        self.batch.num_computed[slot] = num_computed
        sample.has_started = True
        return True

    def _hand_over(self, prompt: PromptPages, slot: int) -> None:
        self.batch.set_pages(slot, prompt.page_ids)
        prompt.forget_pages()

    def _reserve(self, sample: Sample, step: ScheduledStep) -> bool:
        """Let the sample have pages for all of its tokens; False where it had to be preempted."""
        slots = np.array([sample.slot])
        missing = self.batch.missing_pages(slots, self.batch.num_tokens[slots])
        if missing[0] > 0:
            if not self._obtain(int(missing[0]), sample, step):
                return False
            self.batch.grow(slots, missing)
        return True

    def _obtain(self, count: int, sample: Sample, step: ScheduledStep) -> bool:
        """Have `count` pages free for `sample`: evict prompts and kept KV, preempt later samples, at last itself."""
        while not self._make_room(count, step, keep=sample.prompt):
            if self._keeping:
                self._evict_for(sample)
                continue
            victim = self.running[-1]
            if victim is sample and len(self.running) == 1:
                return self._make_room(count, step, keep=None)
            self._preempt(victim, step)
            if victim is sample:
                return False
        return True

    def _make_room(self, count: int, step: ScheduledStep, *, keep: PromptPages | None, may_evict: bool = True) -> bool:
        """Have `count` pages free, by dropping run-aheads and evicting prompts that no running sample waits for.

        Returns False if that cannot be; then nothing is dropped or evicted. Pages of run-aheads count as free ones, so
        that the answer is the same without them, and so is what is trimmed. A prompt's pages that samples share do not
        become free.
        """
        num_free = self.pool.num_free + self.run_aheads.num_pages
        if num_free < count:
            self.batch.trim()
            num_free = self.pool.num_free + self.run_aheads.num_pages
        idle: list[PromptPages] = []
        if num_free < count and may_evict:
            awaited = {id(sample.prompt) for sample in self._starting if not sample.has_started}
            idle = [p for p in self._prompts.values() if len(p.page_ids) and p is not keep and id(p) not in awaited]
        if num_free + sum(self.pool.num_unshared(prompt.page_ids) for prompt in idle) < count:
            return False
        self.run_aheads.free_pages(count, step)
        while self.pool.num_free < count:
            self._drop_prompt(idle.pop())
        return True

    def _by_admission(self, slots: Int64Array) -> Int64Array:
        """Indices of `slots` in the order in which their samples were admitted."""
        samples = [self.batch.samples[slot] for slot in slots.tolist()]
        admissions = np.array([sample.admission for sample in samples if sample is not None], np.int64)
        order: Int64Array = admissions.argsort(kind="stable")
        return order

    def _preempt(self, sample: Sample, step: ScheduledStep) -> None:
        """Take the pages of a running sample; it waits first in line and will be recomputed, to the same tokens."""
        self.running.remove(sample)
        step.end(sample)
        self.batch.save_text(sample)
        self._release(sample)
        self._waiting.add(sample)
        self.num_preemptions += 1

    def _release(self, sample: Sample) -> None:
        """Free a sample's pages and slot."""
        if sample in self._starting:
            self._starting.remove(sample)
        self.batch.take_out(sample)

    def _drop_prompt(self, prompt: PromptPages) -> None:
        self.pool.release(prompt.page_ids)
        prompt.forget_pages()
