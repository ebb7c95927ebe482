"""Who computes what in the next decode step: admission, chunked prefill, pages, preemption. No tensors here.

The order is breadth-first: the first sample of every prompt (the scout), then the second of every prompt, and so on.
Pages run out in this order of remedies: prompts that no running sample waits for are evicted; then the sample that was
admitted last is preempted and later recomputed. The oldest sample always goes on, so the engine cannot get stuck.
Nothing here looks at a clock: the same requests give the same steps.
"""

import heapq
from dataclasses import dataclass, field

from srtrl.engine.page_pool import PagePool
from srtrl.engine.sequence import PageHolder, PromptPages, Sequence
from srtrl.types import Request


@dataclass(slots=True, frozen=True)
class PrefillChunk:
    """Positions `start` to `start + count` of a prompt (or of a preempted sample) whose KV is computed in this step."""

    holder: PageHolder
    start: int
    count: int


@dataclass(slots=True)
class ScheduledStep:
    """The work of one decode step."""

    prefills: list[PrefillChunk] = field(default_factory=list)
    decodes: list[Sequence] = field(default_factory=list)
    """Samples whose root is computed and that sample at least one token."""
    page_copies: list[tuple[int, int]] = field(default_factory=list)
    """(source, target) pages to copy before the forward pass, all sources read before any target is written."""


class Scheduler:
    """Keeps waiting and running samples and their pages."""

    def __init__(self, pool: PagePool, *, num_slots: int, prefill_chunk_tokens: int) -> None:
        self.pool = pool
        self.num_slots = num_slots
        self.prefill_chunk_tokens = prefill_chunk_tokens
        self.running: list[Sequence] = []
        """In the order of admission."""
        self.num_preemptions = 0
        self._waiting: list[tuple[tuple[int, int, int, int], Sequence]] = []
        self._prompts: dict[tuple[int, ...], PromptPages] = {}
        self._num_admissions = 0

    @property
    def has_work(self) -> bool:
        """Whether an unfinished sample is left."""
        return bool(self.running or self._waiting)

    def add(self, sequence_id: int, request: Request) -> Sequence:
        """Queue one sample."""
        prompt = self._prompts.get(request.prompt_token_ids)
        if prompt is None:
            prompt = self._prompts[request.prompt_token_ids] = PromptPages(list(request.prompt_token_ids))
        prompt.num_users += 1
        sequence = Sequence(
            token_ids=list(request.prompt_token_ids), sequence_id=sequence_id, request=request, prompt=prompt
        )
        key = (1, request.sample_index, request.draw_index, sequence_id)
        heapq.heappush(self._waiting, (key, sequence))
        return sequence

    def schedule(self) -> ScheduledStep:
        """Admit samples, find pages, and say what the next forward pass computes."""
        self._admit()
        step = ScheduledStep()
        budget = self.prefill_chunk_tokens
        prefilled: set[int] = set()
        position = 0
        while position < len(self.running):  # preemption shortens the list, but never before `position`
            sequence = self.running[position]
            if not sequence.has_started and sequence.prompt.num_missing > 0:
                if id(sequence.prompt) not in prefilled and budget > 0 and self._reserve_prompt(sequence):
                    prefilled.add(id(sequence.prompt))
                    budget -= self._add_chunk(step, sequence.prompt, budget)
            elif self._start(sequence, step):
                if sequence.num_missing == 0:
                    if self._reserve(sequence, len(sequence.token_ids)):
                        step.decodes.append(sequence)
                elif budget > 0 and self._reserve(sequence, len(sequence.token_ids)):
                    budget -= self._add_chunk(step, sequence, budget)
            if position < len(self.running) and self.running[position] is sequence:
                position += 1
        assert step.prefills or step.decodes or not self.has_work, "no progress: the oldest sample must go on"
        return step

    def grow_for_drafts(self, sequence: Sequence, num_nodes: int) -> int:
        """Take free pages for draft nodes; returns how many nodes have room (drafts never evict or preempt)."""
        page_size = self.pool.page_size
        while len(sequence.page_ids) * page_size < len(sequence.token_ids) + num_nodes:
            pages = self.pool.allocate(1)
            if pages is None:
                break
            sequence.set_pages(sequence.page_ids + pages)
        return min(num_nodes, len(sequence.page_ids) * page_size - len(sequence.token_ids))

    def trim(self, sequence: Sequence) -> None:
        """Give back the pages behind the root: rejected drafts leave nothing."""
        needed = self.pool.pages_for(len(sequence.token_ids))
        if len(sequence.page_ids) > needed:
            self.pool.release(sequence.page_ids[needed:])
            sequence.set_pages(sequence.page_ids[:needed])

    def finish(self, sequence: Sequence) -> None:
        """Free the slot and the pages of a finished sample; the next waiting one takes them in the next step."""
        self.running.remove(sequence)
        self.pool.release(sequence.drop_pages())
        self._leave_prompt(sequence)

    def clear(self) -> list[int]:
        """Drop every sample, finished or not, and every page; returns the ids of the dropped samples."""
        dropped = [sequence.sequence_id for sequence in [*self.running, *(waiting for _, waiting in self._waiting)]]
        for sequence in self.running:
            self.pool.release(sequence.drop_pages())
        for prompt in self._prompts.values():
            self.pool.release(prompt.drop_pages())
        self.running.clear()
        self._waiting.clear()
        self._prompts.clear()
        return dropped

    def check_integrity(self) -> None:
        """Assert that pages and their holders agree (for tests, after any operation)."""
        assert len(self.running) <= self.num_slots
        self.pool.check_integrity([h.page_ids for h in [*self.running, *self._prompts.values()]])
        for sequence in self.running:
            assert len(sequence.page_ids) * self.pool.page_size >= sequence.num_computed
            writable = sequence.num_computed // self.pool.page_size
            assert not any(self.pool.is_shared(page) for page in sequence.page_ids[writable:])

    def _admit(self) -> None:
        """Fill free slots while the pages of all admitted samples can be expected to suffice."""
        promised = sum(self._pages_to_start(sequence) for sequence in self.running if not sequence.has_started)
        while self._waiting and len(self.running) < self.num_slots:
            sequence = self._waiting[0][1]
            spare = len(self.running) // 4  # running samples want a page every page_size tokens
            promised += self._pages_to_start(sequence)
            if self.running and not self._make_room(promised + spare, keep=sequence.prompt):
                return
            heapq.heappop(self._waiting)
            sequence.admission = self._num_admissions
            self._num_admissions += 1
            self.running.append(sequence)

    def _pages_to_start(self, sequence: Sequence) -> int:
        """Pages until the sample can decode (an upper bound: each sibling counts a prompt that has no pages yet)."""
        of_prompt = 0 if sequence.prompt.page_ids else self.pool.pages_for(sequence.prompt.num_missing)
        own = self.pool.pages_for(len(sequence.token_ids)) - len(sequence.prompt.token_ids) // self.pool.page_size
        return of_prompt + own

    def _reserve_prompt(self, sequence: Sequence) -> bool:
        """Find all pages of the sample's prompt; False where the sample itself had to be preempted."""
        prompt = sequence.prompt
        if prompt.page_ids:
            return True
        needed = self.pool.pages_for(prompt.num_missing)
        if not self._obtain(needed, sequence):
            return False
        pages = self.pool.allocate(needed)
        assert pages is not None
        prompt.set_pages(pages)
        return True

    def _start(self, sequence: Sequence, step: ScheduledStep) -> bool:
        """Give the sample its share of the prompt's pages; False where it had to be preempted."""
        if sequence.has_started:
            return True
        prompt = sequence.prompt
        num_full, num_rest = divmod(prompt.num_computed, self.pool.page_size)
        num_computed = prompt.num_computed
        others_use_it = prompt.num_users > 1
        if num_rest == 0:
            self.pool.share(prompt.page_ids)
            sequence.set_pages(prompt.page_ids)
        elif others_use_it and self.pool.num_free == 0 and not self._obtain(1, sequence):
            if not self.running or self.running[0] is not sequence:
                return False
            sequence.set_pages(prompt.drop_pages())  # alone and still no page: take the prompt's own, others recompute
        elif others_use_it:
            copy = self.pool.allocate(1)
            assert copy is not None
            step.page_copies.append((prompt.page_ids[num_full], copy[0]))
            self.pool.share(prompt.page_ids[:num_full])
            sequence.set_pages(prompt.page_ids[:num_full] + copy)
        else:
            sequence.set_pages(prompt.drop_pages())  # the last user needs no copy
        sequence.num_computed = num_computed
        sequence.has_started = True
        return True

    def _reserve(self, sequence: Sequence, num_positions: int) -> bool:
        """Let the sample have pages for so many positions; False where it had to be preempted."""
        missing = self.pool.pages_for(num_positions) - len(sequence.page_ids)
        if missing <= 0:
            return True
        if not self._obtain(missing, sequence):
            return False
        pages = self.pool.allocate(missing)
        assert pages is not None
        sequence.set_pages(sequence.page_ids + pages)
        return True

    def _obtain(self, count: int, sequence: Sequence) -> bool:
        """Have `count` pages free for `sequence`: evict idle prompts, preempt later samples, at last itself."""
        while not self._make_room(count, keep=sequence.prompt):
            victim = self.running[-1]
            if victim is sequence and len(self.running) == 1:
                return self._make_room(count, keep=None)
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _make_room(self, count: int, keep: PromptPages | None) -> bool:
        """Have `count` pages free, by evicting prompts that no running sample waits for; False if that cannot be.

        Then nothing is evicted. A prompt's pages that samples share do not become free.
        """
        if self.pool.num_free >= count:
            return True
        awaited = {id(sequence.prompt) for sequence in self.running if not sequence.has_started}
        idle = [p for p in self._prompts.values() if p.page_ids and p is not keep and id(p) not in awaited]
        num_evictable = sum(not self.pool.is_shared(page) for prompt in idle for page in prompt.page_ids)
        if self.pool.num_free + num_evictable < count:
            return False
        while self.pool.num_free < count:
            self.pool.release(idle.pop().drop_pages())
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Take the pages of a running sample; it waits first in line and will be recomputed, to the same tokens."""
        self.running.remove(sequence)
        self.pool.release(sequence.drop_pages())
        sequence.has_started = False
        heapq.heappush(self._waiting, ((0, sequence.admission, 0, sequence.sequence_id), sequence))
        self.num_preemptions += 1

    def _leave_prompt(self, sequence: Sequence) -> None:
        prompt = sequence.prompt
        prompt.num_users -= 1
        if prompt.num_users == 0:
            self.pool.release(prompt.drop_pages())
            del self._prompts[tuple(prompt.token_ids)]

    @staticmethod
    def _add_chunk(step: ScheduledStep, holder: PageHolder, budget: int) -> int:
        assert isinstance(holder, PromptPages | Sequence)
        count = min(budget, holder.num_missing)
        step.prefills.append(PrefillChunk(holder, holder.num_computed, count))
        return count
