"""Who computes what in the next decode step: admission, chunked prefill, pages, preemption. No tensors here.

Who comes next is the waiting line's business (`admission.py`). Pages run out in this order of remedies: run-aheads are
dropped; prompts that no running sample waits for are evicted; then the sample that was admitted last is preempted and
later recomputed. The oldest sample always goes on, so the engine cannot get stuck. Run-aheads (`idle_slots.py`) get
what is left after all this: a primary's schedule is the same, step for step, with and without them.
Nothing here looks at a clock: the same requests give the same steps.
"""

from collections.abc import Sequence as SequenceOf

from srtrl.engine.admission import Admission, WaitingLine
from srtrl.engine.idle_slots import IdleCapacity, IdleSlots
from srtrl.engine.page_pool import PagePool
from srtrl.engine.sequence import PageHolder, PrefillChunk, PromptPages, ScheduledStep, Sequence
from srtrl.types import Request


class Scheduler:
    """Keeps waiting and running samples and their pages."""

    def __init__(
        self,
        pool: PagePool,
        *,
        num_slots: int,
        prefill_chunk_tokens: int,
        admission: Admission = "breadth_first",
        long_first: bool = True,
        max_draft_nodes: int = 16,
    ) -> None:
        """`max_draft_nodes`: most draft nodes of a sample in a step; run-aheads leave pages for those of primaries."""
        self.pool = pool
        self.num_slots = num_slots
        self.prefill_chunk_tokens = prefill_chunk_tokens
        self.max_draft_nodes = max_draft_nodes
        self.running: list[Sequence] = []
        """Primaries, in the order of admission."""
        self.idle_slots = IdleSlots(pool)
        self.num_preemptions = 0
        self._waiting = WaitingLine(admission, long_first=long_first)
        self._prompts: dict[tuple[int, ...], PromptPages] = {}
        self._num_admissions = 0

    @property
    def has_work(self) -> bool:
        """Whether an unfinished primary is left."""
        return bool(self.running or self._waiting)

    @property
    def num_waiting(self) -> int:
        """Primaries without a slot."""
        return len(self._waiting)

    @property
    def may_run_ahead(self) -> bool:
        """Whether the next step may have rows for run-aheads: some run, or one waits and a slot stays free for it."""
        if self.idle_slots.running:
            return True
        return self.idle_slots.has_work and len(self.running) + self.num_waiting < self.num_slots

    def add(self, sequence_id: int, request: Request, expected_tokens: float | None = None) -> None:
        """Queue one sample, a primary or a run-ahead; also between two steps of others.

        Args:
            sequence_id: Given out once.
            request: `is_run_ahead` puts it into a line of its own.
            expected_tokens: Of a primary: how long the response may become, None if nothing is known.
        """
        if request.is_run_ahead:
            self.idle_slots.add(sequence_id, request)
            return
        prompt = self._prompts.get(request.prompt_token_ids)
        if prompt is None:
            prompt = self._prompts[request.prompt_token_ids] = PromptPages(list(request.prompt_token_ids))
            if expected_tokens is not None:
                self.expect(request.prompt_token_ids, expected_tokens)
        prompt.num_users += 1
        self._waiting.add(
            Sequence(token_ids=list(request.prompt_token_ids), sequence_id=sequence_id, request=request, prompt=prompt)
        )

    def expect(self, prompt_token_ids: tuple[int, ...], num_tokens: float) -> None:
        """Take one more length into what is expected of the prompt's samples; finished samples count by themselves."""
        self._waiting.expect(prompt_token_ids, num_tokens)

    def schedule(self, max_run_ahead: int = 0) -> ScheduledStep:
        """Admit samples, find pages, and say what the next forward pass computes.

        Args:
            max_run_ahead: Most rows of run-aheads in this step: roots and prompt tokens. Fewer than there are running
                run-aheads: the newest pause, and keep their pages.
        """
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
        step.num_primaries = len(step.decodes)
        promised = sum(self._pages_to_start(sequence) for sequence in self.running if not sequence.has_started)
        left = IdleCapacity(
            num_rows=max_run_ahead,
            num_prefill_tokens=budget,
            num_slots=self.num_slots - len(self.running),
            num_reserved_pages=promised + len(self.running) * max(1, self.pool.pages_for(self.max_draft_nodes)),
            may_admit=not self._waiting,
        )
        self.idle_slots.schedule(step, left, self.running, self._prompts)
        return step

    def grow_for_drafts(self, sequences: SequenceOf[Sequence], sizes: SequenceOf[int]) -> list[int]:
        """Take free pages for draft nodes; returns how many nodes of each sequence have room.

        Drafts never evict, drop or preempt. To be called with all sequences of `ScheduledStep.decodes` in their order:
        primaries first.
        """
        page_size = self.pool.page_size
        granted = []
        for sequence, size in zip(sequences, sizes, strict=True):
            has_room = not size or len(sequence.page_ids) * page_size >= len(sequence.token_ids) + size
            granted.append(size if has_room else self._grow(sequence, size))
        return granted

    def _grow(self, sequence: Sequence, num_nodes: int) -> int:
        """Take free pages for the nodes of one sequence; returns how many have room."""
        page_size = self.pool.page_size
        while len(sequence.page_ids) * page_size < len(sequence.token_ids) + num_nodes:
            pages = self.pool.allocate(1)
            if pages is None:
                break
            sequence.add_pages(pages)
        return min(num_nodes, len(sequence.page_ids) * page_size - len(sequence.token_ids))

    def trim(self, sequence: Sequence) -> None:
        """Give back the pages behind the root: rejected drafts leave nothing."""
        needed = self.pool.pages_for(len(sequence.token_ids))
        if len(sequence.page_ids) > needed:
            self.pool.release(sequence.cut_pages(needed))

    def finish(self, sequence: Sequence) -> None:
        """Free the slot and the pages of a finished sample; the next waiting one takes them in the next step."""
        if sequence.is_run_ahead:
            self.idle_slots.finish(sequence)
            return
        self.running.remove(sequence)
        self.pool.release(sequence.drop_pages())
        self.expect(sequence.request.prompt_token_ids, sequence.num_generated)
        self._leave_prompt(sequence)

    def take_dropped(self) -> list[int]:
        """Ids of run-aheads that had a slot and were pushed out since the last call; they do not come back."""
        return self.idle_slots.take_dropped()

    def clear(self) -> list[int]:
        """Drop every sample, finished or not, and every page; returns the ids of the dropped samples.

        Run-aheads that still waited for a slot are not among them: nobody was told of them.
        """
        dropped = [sequence.sequence_id for sequence in [*self.running, *self._waiting]] + self.idle_slots.clear()
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
        running = [*self.running, *self.idle_slots.running]
        assert len(running) <= self.num_slots
        holders: list[PageHolder] = [*running, *self._prompts.values()]
        self.pool.check_integrity([holder.page_ids for holder in holders])
        assert all(holder.page_table.tolist() == holder.page_ids for holder in holders)
        for sequence in running:
            assert len(sequence.page_ids) * self.pool.page_size >= sequence.num_computed
            writable = sequence.num_computed // self.pool.page_size
            assert not any(self.pool.is_shared(page) for page in sequence.page_ids[writable:])

    def _admit(self) -> None:
        """Fill free slots while the pages of all admitted samples can be expected to suffice."""
        promised = sum(self._pages_to_start(sequence) for sequence in self.running if not sequence.has_started)
        while self._waiting and len(self.running) < self.num_slots:
            sequence = self._waiting.first(self.running)
            spare = len(self.running) // 4  # running samples want a page every page_size tokens
            promised += self._pages_to_start(sequence)
            if self.running and not self._make_room(promised + spare, keep=sequence.prompt):
                return
            self._waiting.pop_first(self.running)
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
        sequence.add_pages(pages)
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
        """Have `count` pages free, by dropping run-aheads and evicting prompts that no running sample waits for.

        Returns False if that cannot be; then nothing is dropped or evicted. Pages of run-aheads count as free ones, so
        that the answer is the same without them. A prompt's pages that samples share do not become free.
        """
        num_free = self.pool.num_free + self.idle_slots.num_pages
        idle: list[PromptPages] = []
        if num_free < count:
            awaited = {id(sequence.prompt) for sequence in self.running if not sequence.has_started}
            idle = [p for p in self._prompts.values() if p.page_ids and p is not keep and id(p) not in awaited]
            num_evictable = sum(not self.pool.is_shared(page) for prompt in idle for page in prompt.page_ids)
            if num_free + num_evictable < count:
                return False
        self.idle_slots.free_pages(count)
        while self.pool.num_free < count:
            self.pool.release(idle.pop().drop_pages())
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Take the pages of a running sample; it waits first in line and will be recomputed, to the same tokens."""
        self.running.remove(sequence)
        self.pool.release(sequence.drop_pages())
        sequence.has_started = False
        self._waiting.put_back(sequence)
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
