"""Requests and steps for tests of the scheduler without a model."""

from srtrl.engine.scheduler import Scheduler
from srtrl.engine.sequence import ScheduledStep, Sequence
from srtrl.types import Request, SamplingParams


def request(draw: int, sample: int, prompt_length: int, max_new_tokens: int) -> Request:
    """A sample of a prompt of its draw's own, which ends at its length limit."""
    prompt = tuple(range(100 * draw, 100 * draw + prompt_length))
    return Request(
        prompt_id=str(draw),
        prompt_token_ids=prompt,
        draw_index=draw,
        sample_index=sample,
        rng_key=0,
        sampling=SamplingParams(max_new_tokens=max_new_tokens),
    )


def compute(scheduler: Scheduler, step: ScheduledStep, *, num_drafts: int = 0) -> list[Sequence]:
    """Do what a runner would: KV of the scheduled positions, and one token a decoding sample."""
    finished = []
    for chunk in step.prefills:
        assert chunk.start == chunk.holder.num_computed
        assert len(chunk.holder.page_ids) * scheduler.pool.page_size >= chunk.start + chunk.count
        chunk.holder.num_computed += chunk.count
    for sequence in step.decodes:
        assert sequence.num_computed == len(sequence.token_ids) - 1
        assert len(sequence.page_ids) * scheduler.pool.page_size >= len(sequence.token_ids)
        (room,) = scheduler.grow_for_drafts([sequence], [num_drafts])
        assert 0 <= room <= num_drafts
        scheduler.check_integrity()
        sequence.num_computed += 1
        sequence.token_ids.append(7)
        sequence.rollout_logprobs.append(0.0)
        if sequence.num_remaining == 0:
            finished.append(sequence)
        else:
            scheduler.trim(sequence)
    for sequence in finished:
        scheduler.finish(sequence)
    return finished


class FakeRunner:
    """Keeps for each position of each page what a KV cache would: which prefix it was computed from.

    A sample's next tokens depend on its rng_key and its prefix alone, as a policy's do, and so does the number of its
    accepted drafts, up to the room that it got.
    """

    def __init__(self, scheduler: Scheduler, *, max_draft_nodes: int) -> None:
        self.scheduler = scheduler
        self.max_draft_nodes = max_draft_nodes
        self.kv: dict[tuple[int, int], tuple[int, ...]] = {}

    def run(self, step: ScheduledStep) -> list[tuple[int, int, int, bool]]:
        """Compute the step; returns (sequence id, room for drafts, new tokens, finished) of each decoding sample."""
        page_size = self.scheduler.pool.page_size
        assert len({target for _, target in step.page_copies}) == len(step.page_copies)
        copied = {
            (target, offset): self.kv[source, offset]
            for source, target in step.page_copies
            for offset in range(page_size)
            if (source, offset) in self.kv
        }
        self.kv.update(copied)
        for chunk in step.prefills:
            self._check(chunk.holder.page_ids, chunk.holder.token_ids, chunk.start)
            self._write(chunk.holder.page_ids, chunk.holder.token_ids, chunk.start, chunk.start + chunk.count)
            chunk.holder.num_computed += chunk.count
        wanted = [self._hash(sequence, 1) % (self.max_draft_nodes + 1) for sequence in step.decodes]
        rooms = self.scheduler.grow_for_drafts(step.decodes, wanted)
        self.scheduler.check_integrity()
        return [self._decode(sequence, room) for sequence, room in zip(step.decodes, rooms, strict=True)]

    def _decode(self, sequence: Sequence, room: int) -> tuple[int, int, int, bool]:
        assert sequence.num_missing == 0
        self._check(sequence.page_ids, sequence.token_ids, sequence.num_computed)
        num_new = min(1 + self._hash(sequence, 2) % (room + 1), sequence.num_remaining)
        for _ in range(num_new):
            sequence.token_ids.append(self._hash(sequence, 3) % 50)
            sequence.rollout_logprobs.append(0.0)
        first = sequence.num_computed
        sequence.num_computed += num_new
        self._write(sequence.page_ids, sequence.token_ids, first, sequence.num_computed)
        finished = sequence.num_remaining == 0
        if finished:
            self.scheduler.finish(sequence)
        else:
            self.scheduler.trim(sequence)
        return sequence.sequence_id, room, num_new, finished

    def _hash(self, sequence: Sequence, what: int) -> int:
        return hash((sequence.request.rng_key, len(sequence.token_ids), what)) // 7

    def _check(self, page_ids: list[int], token_ids: list[int], count: int) -> None:
        size = self.scheduler.pool.page_size
        for position in range(count):
            found = self.kv[page_ids[position // size], position % size]
            assert found == tuple(token_ids[: position + 1])

    def _write(self, page_ids: list[int], token_ids: list[int], first: int, end: int) -> None:
        size = self.scheduler.pool.page_size
        for position in range(first, end):
            self.kv[page_ids[position // size], position % size] = tuple(token_ids[: position + 1])
