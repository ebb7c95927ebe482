"""Run-aheads: samples at low priority, in the slots and pages that no primary wants. No tensors here.

A run-ahead has all its pages to itself, so that dropping it gives back every one, and the scheduler may count them as
free. It takes a slot only while no primary waits, and only free pages, of which it leaves what the primaries may want
in this step. When a primary wants its slot or its pages it is dropped for good, the newest first; and so it is when the
sample comes whose RNG key it has. What it has said so far stays with the drafter.
"""

from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from srtrl.engine.page_pool import PagePool
from srtrl.engine.sequence import PageHolder, PrefillChunk, PromptPages, ScheduledStep, Sequence
from srtrl.types import Request


@dataclass(kw_only=True, slots=True)
class IdleCapacity:
    """What the primaries leave of a step; counted down as run-aheads take of it."""

    num_rows: int
    """Rows for run-aheads: roots and prompt tokens."""
    num_prefill_tokens: int
    """Most prompt tokens among these rows."""
    num_slots: int
    """Slots that no primary has, whoever has them now."""
    num_reserved_pages: int
    """Pages that stay free, for the primaries' drafts and their next step."""
    may_admit: bool
    """Whether new run-aheads may take a slot: not while a primary waits."""


class IdleSlots:
    """Waiting and running run-aheads."""

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.running: list[Sequence] = []
        """In the order of admission, the paused ones included."""
        self._line: deque[tuple[int, Request]] = deque()
        self._dropped: list[int] = []

    @property
    def num_pages(self) -> int:
        """Pages that run-aheads hold."""
        return sum(len(sequence.page_ids) for sequence in self.running)

    @property
    def has_work(self) -> bool:
        """Whether a run-ahead is running or waits."""
        return bool(self.running or self._line)

    @property
    def num_waiting(self) -> int:
        """Run-aheads that have had no slot yet."""
        return len(self._line)

    def add(self, sequence_id: int, request: Request) -> None:
        """Queue a run-ahead; they are admitted in the order in which they were added."""
        assert request.is_run_ahead
        self._line.append((sequence_id, request))

    def end_rng_key(self, rng_key: int) -> list[int]:
        """Drop the run-aheads on a RNG key, for its sample has come; returns the ids of those that had a slot."""
        ended = [sequence for sequence in self.running if sequence.request.rng_key == rng_key]
        for sequence in ended:
            self.finish(sequence)
        if any(request.rng_key == rng_key for _, request in self._line):
            self._line = deque(waiting for waiting in self._line if waiting[1].rng_key != rng_key)
        return [sequence.sequence_id for sequence in ended]

    def free_pages(self, count: int) -> None:
        """Drop run-aheads until `count` pages of the pool are free, or none is left."""
        while self.running and self.pool.num_free < count:
            self._drop(self.running[-1])

    def finish(self, sequence: Sequence) -> None:
        """Free the slot and the pages of a run-ahead that came to its end."""
        self.running.remove(sequence)
        self.pool.release(sequence.drop_pages())

    def take_dropped(self) -> list[int]:
        """Ids of run-aheads that were dropped since the last call."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def clear(self) -> list[int]:
        """Drop all; returns the ids of those that had a slot and have not been reported by `take_dropped`."""
        self._line.clear()
        while self.running:
            self._drop(self.running[-1])
        return self.take_dropped()

    def schedule(
        self,
        step: ScheduledStep,
        left: IdleCapacity,
        primaries: SequenceOf[Sequence],
        prompts: Mapping[tuple[int, ...], PromptPages],
    ) -> None:
        """Add the run-aheads' work to a step that holds the primaries' already.

        Args:
            step: Gets prefills, decodes, page copies and the admitted run-aheads.
            left: What may be used; the oldest take rows first, the others pause and keep their pages.
            primaries: Those with a slot.
            prompts: Of all unfinished primaries, by their tokens.
        """
        for sequence in [one for one in self.running if _is_useless(one.request, prompts)]:
            self._drop(sequence)
        while len(self.running) > left.num_slots:
            self._drop(self.running[-1])
        self.free_pages(left.num_reserved_pages)
        position = 0
        while position < len(self.running):  # a lack of pages shortens the list, but never before `position`
            self._advance(self.running[position], step, left)
            position += 1
        while (
            left.may_admit
            and len(self.running) < left.num_slots
            and min(left.num_rows, left.num_prefill_tokens) > 0
            and self._admit(step, left, primaries, prompts)
        ):
            self._advance(self.running[-1], step, left)

    def _advance(self, sequence: Sequence, step: ScheduledStep, left: IdleCapacity) -> None:
        """Let a run-ahead decode, or compute more of its prompt, as far as rows go; without pages it is dropped."""
        missing = sequence.num_missing
        count = min(missing, left.num_rows, left.num_prefill_tokens) if missing > 0 else min(1, left.num_rows)
        if count <= 0:
            return
        num_pages = self.pool.pages_for(sequence.num_computed + count) - len(sequence.page_ids)
        while num_pages > self.pool.num_free - left.num_reserved_pages:
            newest = self.running[-1]
            self._drop(newest)
            if newest is sequence:
                return
        self._extend(sequence, num_pages)
        left.num_rows -= count
        if missing > 0:
            left.num_prefill_tokens -= count
            step.prefills.append(PrefillChunk(sequence, sequence.num_computed, count))
        else:
            step.decodes.append(sequence)

    def _admit(
        self,
        step: ScheduledStep,
        left: IdleCapacity,
        primaries: SequenceOf[Sequence],
        prompts: Mapping[tuple[int, ...], PromptPages],
    ) -> bool:
        """Give the first in line a slot; False where none waits, or its pages and one more for each are not free."""
        while self._line and _is_useless(self._line[0][1], prompts):
            self._line.popleft()
        if not self._line:
            return False
        sequence_id, request = self._line[0]
        num_prompt_tokens = len(request.prompt_token_ids)
        spare = self.pool.num_free - left.num_reserved_pages
        if self.pool.pages_for(num_prompt_tokens) + len(self.running) > spare:
            return False
        self._line.popleft()
        sequence = Sequence(
            token_ids=list(request.prompt_token_ids),
            sequence_id=sequence_id,
            request=request,
            prompt=PromptPages(list(request.prompt_token_ids)),  # holds nothing: the pages are the run-ahead's own
            has_started=True,
        )
        donor = self._donor(request.prompt_token_ids, primaries, prompts)
        if donor is not None:
            num_pages = self.pool.pages_for(num_prompt_tokens - 1)
            self._extend(sequence, num_pages)
            step.page_copies.extend(zip(donor.page_ids[:num_pages], sequence.page_ids, strict=True))
            sequence.num_computed = num_prompt_tokens - 1
        self.running.append(sequence)
        step.admitted_run_aheads.append(sequence)
        return True

    def _donor(
        self,
        prompt_token_ids: tuple[int, ...],
        primaries: SequenceOf[Sequence],
        prompts: Mapping[tuple[int, ...], PromptPages],
    ) -> PageHolder | None:
        """Who has the KV of this prompt (all but its last token) in pages that no copy of this step is to fill."""
        prompt = prompts.get(prompt_token_ids)
        if prompt is not None and prompt.page_ids and prompt.num_missing == 0:
            return prompt
        for sequence in [*primaries, *self.running]:
            # One position more than the prompt's shared part: then it has decoded in an earlier step.
            if sequence.num_computed >= len(prompt_token_ids) and sequence.request.prompt_token_ids == prompt_token_ids:
                return sequence
        return None

    def _extend(self, sequence: Sequence, num_pages: int) -> None:
        if num_pages > 0:
            pages = self.pool.allocate(num_pages)
            assert pages is not None
            sequence.add_pages(pages)

    def _drop(self, sequence: Sequence) -> None:
        self.finish(sequence)
        self._dropped.append(sequence.sequence_id)


def _is_useless(request: Request, prompts: Mapping[tuple[int, ...], PromptPages]) -> bool:
    """Whether nobody is left who could follow its text."""
    return request.ends_with_prompt and request.prompt_token_ids not in prompts
