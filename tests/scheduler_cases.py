"""Requests, and a runner that computes steps without a model, for tests of the scheduler."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from srtrl.engine.batch import Batch, PromptPages, Sample
from srtrl.engine.page_pool import PagePool
from srtrl.engine.rows import Int32Array
from srtrl.engine.scheduler import ScheduledStep, Scheduler
from srtrl.types import Request, SamplingParams

Name = tuple[int, int, bool]
"""Draw, sample, and whether it is a run-ahead."""


def request(draw: int, sample: int, prompt_length: int, max_new_tokens: int, **changes: Any) -> Request:
    """A sample of a prompt of its draw's own, which ends at its length limit."""
    values: dict[str, Any] = {"rng_key": 1000 * draw + sample}
    return Request(
        prompt_id=str(draw),
        prompt_token_ids=tuple(range(100 * draw, 100 * draw + prompt_length)),
        draw_index=draw,
        sample_index=sample,
        sampling=SamplingParams(max_new_tokens=max_new_tokens),
        **(values | changes),
    )


def run_ahead(draw: int, sample: int, prompt_length: int, max_new_tokens: int) -> Request:
    """A run-ahead on an RNG key that no primary has."""
    key = 10**6 + 1000 * draw + sample
    return request(draw, sample, prompt_length, max_new_tokens, rng_key=key, is_run_ahead=True)


def name_of(sample: Sample) -> Name:
    """What a sample is called in these tests."""
    return sample.request.draw_index, sample.request.sample_index, sample.request.is_run_ahead


def names(samples: Iterable[Sample]) -> list[tuple[int, int]]:
    """(draw, sample) of each."""
    return [name_of(sample)[:2] for sample in samples]


def make(
    num_pages: int = 100, page_size: int = 4, *, num_slots: int = 4, chunk: int = 100, nodes: int = 0, **more: Any
) -> tuple[Scheduler, "FakeRunner"]:
    """A scheduler for sequences of up to 120 tokens, and the runner of its steps; `nodes`: draft nodes of a sample."""
    batch = Batch(num_slots, 120, PagePool(num_pages, page_size), nodes)
    scheduler = Scheduler(batch, prefill_chunk_tokens=chunk, max_draft_nodes=nodes, **more)
    return scheduler, FakeRunner(scheduler)


class FakeRunner:
    """Keeps for each position of each page what a KV cache would: which prefix it was computed from.

    A sample's next tokens depend on its RNG key and its prefix alone, as a policy's do, and so does the number of its
    accepted drafts, up to the room that it got. Without drafts each sample gets one token per step.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.batch = scheduler.batch
        self.kv: dict[tuple[int, int], tuple[int, ...]] = {}
        self.live: dict[int, Name] = {}
        """Slot -> sample: as a drafter hears of them."""

    def step(self, max_run_ahead: int = 0) -> ScheduledStep:
        """Schedule a step, check it, and compute it."""
        step = self.schedule(max_run_ahead)
        self.run(step)
        return step

    def schedule(self, max_run_ahead: int = 0) -> ScheduledStep:
        """The next step, checked, but not computed."""
        scheduler, batch = self.scheduler, self.batch
        step = scheduler.schedule(max_run_ahead)
        scheduler.check_integrity()
        for slot in step.ended:
            del self.live[slot]
        for sample in step.started:
            assert sample.slot not in self.live, "a slot is started twice"
            self.live[sample.slot] = name_of(sample)
        running = [*scheduler.running, *scheduler.run_aheads.running]
        assert self.live == {sample.slot: name_of(sample) for sample in running}
        assert sum(len(chunk.token_ids) for chunk in step.chunks) <= scheduler.prefill_chunk_tokens
        assert len({id(holder) for holder in step.holders}) == len(step.holders) == len(step.chunks)
        assert batch.is_run_ahead[step.slots].tolist() == [i >= step.num_primaries for i in range(len(step.slots))]
        of_run_aheads = [
            len(chunk.token_ids)
            for holder, chunk in zip(step.holders, step.chunks, strict=True)
            if holder in scheduler.run_aheads.running
        ]
        assert len(step.slots) - step.num_primaries + sum(of_run_aheads) <= max_run_ahead
        return step

    def run(self, step: ScheduledStep) -> dict[Name, tuple[int, int, bool]]:
        """Compute the step; returns room for drafts, new tokens, and whether it finished, of each decoding sample."""
        size = self.scheduler.pool.page_size
        assert len({target for _, target in step.page_copies}) == len(step.page_copies)
        self.kv |= {
            (target, offset): self.kv[source, offset]
            for source, target in step.page_copies
            for offset in range(size)
            if (source, offset) in self.kv
        }
        for holder, chunk in zip(step.holders, step.chunks, strict=True):
            end = chunk.start + len(chunk.token_ids)
            tokens = holder.token_ids if isinstance(holder, PromptPages) else self.batch.token_ids[holder.slot]
            assert chunk.token_ids.tolist() == tokens[chunk.start : end].tolist()
            self._check(chunk.page_ids, tokens, chunk.start)
            self._write(chunk.page_ids, tokens, chunk.start, end)
        most = self.scheduler.max_draft_nodes
        primaries = step.slots[: step.num_primaries]
        wanted = np.array([self._hash(slot, 1) % (most + 1) for slot in primaries.tolist()], np.int64)
        rooms = self.scheduler.grow_for_drafts(primaries, wanted)
        assert (rooms >= 0).all()
        assert (rooms <= wanted).all()
        self.scheduler.check_integrity()
        rooms = np.append(rooms, np.zeros(len(step.slots) - step.num_primaries, np.int64))
        return dict(self._decode(slot, room) for slot, room in zip(step.slots.tolist(), rooms.tolist(), strict=True))

    def _decode(self, slot: int, room: int) -> tuple[Name, tuple[int, int, bool]]:
        batch = self.batch
        sample = batch.samples[slot]
        assert sample is not None
        size, first = self.scheduler.pool.page_size, int(batch.num_tokens[slot])
        pages, tokens = batch.pages(slot), batch.token_ids[slot]
        assert batch.num_computed[slot] == first - 1
        self._check(pages, tokens, first - 1)
        num_new = min(1 + self._hash(slot, 2) % (room + 1), int(batch.max_tokens[slot]) - first)
        for position in range(first, first + num_new):
            tokens[position] = self._hash(slot, 3 + position) % 50
        batch.num_tokens[slot] = first + num_new
        batch.num_computed[slot] = first + num_new - 1
        self._write(pages, tokens, first - 1, first + num_new - 1)
        for position in range(first + num_new - 1, first + room):  # rejected drafts
            self.kv[int(pages[position // size]), position % size] = ()
        finished = bool(batch.num_tokens[slot] == batch.max_tokens[slot])
        if finished:
            self.scheduler.finish(sample)
            del self.live[slot]
            self.scheduler.check_integrity()
        return name_of(sample), (room, num_new, finished)

    def _hash(self, slot: int, what: int) -> int:
        return hash((int(self.batch.rng_keys[slot]), int(self.batch.num_tokens[slot]), what)) // 7

    def _check(self, pages: Int32Array, tokens: Int32Array, count: int) -> None:
        size = self.scheduler.pool.page_size
        for position in range(count):
            found = self.kv[int(pages[position // size]), position % size]
            assert found == tuple(tokens[: position + 1].tolist())

    def _write(self, pages: Int32Array, tokens: Int32Array, first: int, end: int) -> None:
        size = self.scheduler.pool.page_size
        for position in range(first, end):
            self.kv[int(pages[position // size]), position % size] = tuple(tokens[: position + 1].tolist())
