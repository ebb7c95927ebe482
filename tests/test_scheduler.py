"""The scheduler without a model: a fake runner computes what was scheduled, and knows what each page holds."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import chain, repeat

import numpy as np
from engine_cases import make_request
from hypothesis import given, settings
from hypothesis import strategies as st
from page_cases import check_pages

from srtrl.engine.batch import Batch, Sample, ScheduledStep
from srtrl.engine.page_pool import PagePool
from srtrl.engine.rows import Int32Array, Int64Array, PrefillChunk
from srtrl.engine.scheduler import Scheduler
from srtrl.types import Request

Name = tuple[int, int, bool]
"""Draw, sample, and whether it is a run-ahead."""


def request(
    draw: int,
    sample: int,
    prompt_length: int,
    max_new_tokens: int,
    *,
    rng_key: int | None = None,
    is_run_ahead: bool = False,
    has_turns: bool = False,
) -> Request:
    """A sample of a prompt of its draw's own, which ends at its length limit; run-aheads have keys of their own."""
    own_key = 10**6 * is_run_ahead + 1000 * draw + sample
    found = make_request(
        draw,
        sample,
        range(100 * draw, 100 * draw + prompt_length),
        rng_key=own_key if rng_key is None else rng_key,
        is_run_ahead=is_run_ahead,
        max_new_tokens=max_new_tokens,
    )
    return replace(found, has_turns=has_turns)


def name_of(sample: Sample) -> Name:
    """What a sample is called in these tests."""
    return sample.request.draw_index, sample.request.sample_index, sample.request.is_run_ahead


def names(samples: Iterable[Sample]) -> list[tuple[int, int]]:
    """(draw, sample) of each."""
    return [name_of(sample)[:2] for sample in samples]


def make(
    num_pages: int = 100, page_size: int = 4, *, num_slots: int = 4, chunk: int = 100, nodes: int = 0
) -> tuple[Scheduler, "FakeRunner"]:
    """A scheduler for sequences of up to 120 tokens, and the runner of its steps; `nodes`: draft nodes of a sample."""
    batch = Batch(num_slots, 120, PagePool(num_pages, page_size), nodes)
    scheduler = Scheduler(batch, prefill_chunk_tokens=chunk, max_draft_nodes=nodes)
    return scheduler, FakeRunner(scheduler)


class FakeRunner:
    """Keeps for each position of each page what a KV cache would: which prefix it was computed from.

    A sample's next tokens depend on its RNG key and its prefix alone, as a policy's do, and so does the number of its
    accepted drafts, up to the room that it got. Without drafts each sample gets one token per step. With turns, the
    same holds for where a turn ends, for how many steps an environment takes, and for what it answers.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.batch = scheduler.batch
        self.kv = np.zeros((self.batch.pool.num_pages, self.batch.pool.page_size), np.int64)
        """[pages, page_size], hashes of prefixes."""
        self.live: dict[int, Name] = {}
        """Slot -> sample: as a drafter hears of them."""
        self.finished: list[Name] = []
        self.num_steps = 0
        self.calls: list[tuple[int, Sample]] = []
        """Paused samples, and the number of steps after which their environment answers."""

    def step(self, max_run_ahead: int = 0) -> ScheduledStep:
        """Schedule a step, check it, and compute it."""
        step = self.schedule(max_run_ahead)
        self.run(step)
        return step

    def schedule(self, max_run_ahead: int = 0) -> ScheduledStep:
        """The next step, checked, but not computed."""
        scheduler, batch = self.scheduler, self.batch
        step = scheduler.schedule(max_run_ahead)
        check_pages(scheduler)
        for slot in step.ended:
            del self.live[slot]
        for sample in step.started:
            assert sample.slot not in self.live, "a slot is started twice"
            self.live[sample.slot] = name_of(sample)
        running = [*scheduler.running, *scheduler.run_aheads.running]
        assert self.live == {sample.slot: name_of(sample) for sample in running}
        assert sum(len(chunk.token_ids) for chunk in step.chunks) <= scheduler.prefill_chunk_tokens
        slots = [self.slot_of(chunk) for chunk in step.chunks]
        assert len(set(slots)) == len(slots)
        assert batch.is_run_ahead[step.slots].tolist() == [i >= step.num_primaries for i in range(len(step.slots))]
        of_run_aheads = [
            len(chunk.token_ids) for slot, chunk in zip(slots, step.chunks, strict=True) if batch.is_run_ahead[slot]
        ]
        assert len(step.slots) - step.num_primaries + sum(of_run_aheads) <= max_run_ahead
        return step

    def slot_of(self, chunk: PrefillChunk) -> int:
        """The slot whose KV a chunk computes: its pages are a view of the slot's."""
        (slot,) = (slot for slot in self.live if np.shares_memory(chunk.page_ids, self.batch.page_table[slot]))
        return slot

    def run(self, step: ScheduledStep) -> dict[Name, tuple[int, int, bool]]:
        """Compute the step; returns room for drafts, new tokens, and whether it finished, of each decoding sample."""
        self.num_steps += 1
        chunks = [(chunk, self.batch.token_ids[self.slot_of(chunk)]) for chunk in step.chunks]
        for chunk, tokens in chunks:  # all are written before any is read
            end = chunk.start + len(chunk.token_ids)
            assert chunk.token_ids.tolist() == tokens[chunk.start : end].tolist()
            self._write(chunk.page_ids, tokens, chunk.start, end)
        for chunk, tokens in chunks:
            self._check(chunk.page_ids, tokens, chunk.start + len(chunk.token_ids))
        most = self.scheduler.max_draft_nodes
        primaries = step.slots[: step.num_primaries]
        wanted = np.array([self._hash(slot, 1) % (most + 1) for slot in primaries.tolist()], np.int64)
        rooms = self.scheduler.grow_for_drafts(primaries, wanted)
        assert (rooms >= 0).all()
        assert (rooms <= wanted).all()
        check_pages(self.scheduler)
        rooms = np.append(rooms, np.zeros(len(step.slots) - step.num_primaries, np.int64))
        return dict(self._decode(slot, room) for slot, room in zip(step.slots.tolist(), rooms.tolist(), strict=True))

    def _decode(self, slot: int, room: int) -> tuple[Name, tuple[int, int, bool]]:
        batch = self.batch
        sample = batch.samples[slot]
        assert sample is not None
        first = int(batch.num_tokens[slot])
        pages, tokens = batch.pages(slot), batch.token_ids[slot]
        assert batch.num_computed[slot] == first - 1
        self._check(pages, tokens, first - 1)
        num_new = min(1 + self._hash(slot, 2) % (room + 1), int(batch.max_tokens[slot]) - first)
        for position in range(first, first + num_new):
            tokens[position] = self._hash(slot, 3 + position) % 50
        batch.num_tokens[slot] = first + num_new
        batch.num_computed[slot] = first + num_new - 1
        self._write(pages, tokens, first - 1, first + num_new - 1)
        self.kv[self._places(pages, first + num_new - 1, first + room)] = 0  # rejected drafts
        finished = bool(batch.num_tokens[slot] == batch.max_tokens[slot])
        if sample.request.has_turns and (finished or self._hash(slot, 4) % 3 == 0):
            self.calls.append((self.num_steps + self._hash(slot, 5) % 40, sample))
            self.scheduler.pause(sample)
            del self.live[slot]
        elif finished:
            self.scheduler.finish(sample)
            self.finished.append(name_of(sample))
            del self.live[slot]
        check_pages(self.scheduler)
        return name_of(sample), (room, num_new, finished)

    def answer(self) -> None:
        """Let the paused samples continue, or end, whose environments have answered by now."""
        due = [sample for when, sample in self.calls if when <= self.num_steps]
        self.calls = [call for call in self.calls if call[0] > self.num_steps]
        for sample in due:
            key = sample.request.rng_key
            room = sample.request.sampling.max_new_tokens - len(sample.token_ids) - 1
            if room < 1:
                self.scheduler.end(key)
                self.finished.append(name_of(sample))
            else:
                self.scheduler.extend(key, np.full(1 + hash((key, room)) % min(room, 7), 50, np.int32))
            check_pages(self.scheduler)

    def _hash(self, slot: int, what: int) -> int:
        return hash((int(self.batch.rng_keys[slot]), int(self.batch.num_tokens[slot]), what)) // 7

    def _places(self, pages: Int32Array, first: int, end: int) -> tuple[Int32Array, Int64Array]:
        positions = np.arange(first, end)
        return pages[positions // self.kv.shape[1]], positions % self.kv.shape[1]

    def _check(self, pages: Int32Array, tokens: Int32Array, count: int) -> None:
        found = self.kv[self._places(pages, 0, count)].tolist()
        assert found == [hash(tokens[: position + 1].tobytes()) for position in range(count)]

    def _write(self, pages: Int32Array, tokens: Int32Array, first: int, end: int) -> None:
        prefixes = [hash(tokens[: position + 1].tobytes()) for position in range(first, end)]
        self.kv[self._places(pages, first, end)] = prefixes


class Run:
    """One scheduler with its fake runner; primaries come as (step of arrival, request)."""

    def __init__(
        self, primaries: list[tuple[int, Request]], run_aheads: list[Request], options: dict[str, int]
    ) -> None:
        self.scheduler, self.runner = make(**options)
        for asked in run_aheads:
            self.scheduler.add(asked)
        self.arriving = primaries
        self.arrived: set[int] = set()
        """RNG keys of primaries: their run-aheads have ended, running or waiting."""
        self.num_steps = 0

    def step(self, max_run_ahead: int) -> tuple[object, ...]:
        """One decode step; returns what concerns primaries."""
        scheduler = self.scheduler
        for arrival, asked in self.arriving:
            if arrival == self.num_steps:
                scheduler.add(asked)
                self.arrived.add(asked.rng_key)
                check_pages(scheduler)
        self.num_steps += 1
        self.runner.answer()
        assert self.arrived.isdisjoint(one.request.rng_key for one in scheduler.run_aheads.running)
        waits = scheduler.num_waiting > 0
        # The runner hears of those that were ended by their samples with the next step's, as a drafter does.
        step = self.runner.schedule(max_run_ahead)
        assert self.arrived.isdisjoint(one.request.rng_key for one in scheduler.run_aheads.running), "from the line"
        assert not (waits and scheduler.num_waiting and any(one.request.is_run_ahead for one in step.started))
        slots = [(chunk, self.runner.slot_of(chunk)) for chunk in step.chunks]
        chunks = [
            (self.runner.live[slot], chunk.start, chunk.token_ids.tolist())
            for chunk, slot in slots
            if not scheduler.batch.is_run_ahead[slot]
        ]
        results = self.runner.run(step)
        assert all(room == 0 for name, (room, _, _) in results.items() if name[2])
        return (
            [(name_of(sample), sample.admission) for sample in scheduler.running],
            chunks,
            {name: result for name, result in results.items() if not name[2]},
            scheduler.num_preemptions,
            sorted(p.token_ids.tolist() for p in scheduler._prompts.values() if len(p.page_ids)),
        )


def compare_with_alone(
    arriving: list[tuple[int, Request]], run_aheads: list[Request], options: dict[str, int], limit: Callable[[], int]
) -> None:
    """Decode with and without run-aheads: every step of the primaries must be the same; `limit`: the next step's."""
    alone, crowded = Run(arriving, [], options), Run(arriving, run_aheads, options)
    last = max(step for step, _ in arriving)
    while alone.scheduler.has_work or alone.scheduler.paused or alone.num_steps <= last:
        assert crowded.scheduler.has_work == alone.scheduler.has_work
        assert crowded.step(limit()) == alone.step(0)
        assert alone.num_steps < 2000
    assert not crowded.scheduler.has_work
    assert sorted(alone.runner.finished) == sorted((one.draw_index, one.sample_index, False) for _, one in arriving)
    assert sorted(crowded.scheduler.clear()) == sorted(crowded.runner.live)
    assert crowded.scheduler.pool.num_used == alone.scheduler.pool.num_used == 0


@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_all_primaries_finish_exactly_as_without_run_aheads(data: st.DataObject) -> None:
    """Also that pages hold what they should after every step: see `FakeRunner`."""
    shape = st.tuples(st.integers(1, 14), st.integers(1, 20))
    shapes = data.draw(st.lists(shape, min_size=1, max_size=5), "primaries")
    ahead = data.draw(st.lists(st.tuples(st.integers(0, 6), shape), max_size=8), "run-aheads")
    page_size = data.draw(st.integers(1, 8), "page size")
    has_turns = data.draw(st.booleans(), "has turns")
    primaries = [
        request(draw, sample, prompt, new, has_turns=has_turns)
        for draw, (prompt, new) in enumerate(shapes)
        for sample in range(data.draw(st.integers(1, 4), "samples"))
    ]
    run_aheads = []
    keys = [one.rng_key for one in primaries]
    for number, (draw, (prompt, new)) in enumerate(ahead):
        # Of some the sample comes in this rollout. Draws below len(shapes) have a primary's prompt.
        key = data.draw(st.sampled_from([None, *keys]), "rng_key")
        keys = [one for one in keys if one != key]  # one run-ahead of a sample
        length = shapes[draw][0] if draw < len(shapes) else prompt
        run_aheads.append(request(draw, number, length, new, rng_key=key, is_run_ahead=True))
    largest = max(-(-(prompt + new) // page_size) for prompt, new in shapes)
    options = {
        "num_pages": largest + data.draw(st.integers(0, 30), "spare pages"),
        "page_size": page_size,
        "num_slots": data.draw(st.integers(1, 8), "slots"),
        "chunk": data.draw(st.integers(1, 16), "chunk"),
        "nodes": data.draw(st.integers(0, 7), "nodes"),
    }
    late = st.one_of(st.just(0), st.integers(0, 30))
    arriving = [(data.draw(late, "arrival"), asked) for asked in primaries]
    compare_with_alone(arriving, run_aheads, options, lambda: data.draw(st.integers(0, 12), "max_run_ahead"))


def test_pages_of_rejected_drafts_stay_as_long_beside_run_aheads() -> None:
    """Found by the test before: a prompt was evicted later where run-aheads waited."""
    shapes, samples = [(3, 1), (1, 1), (4, 11), (1, 8), (1, 1)], [1, 1, 4, 1, 1]
    primaries = [request(draw, sample, *shapes[draw]) for draw in range(5) for sample in range(samples[draw])]
    arriving = [(0 if number else 5, asked) for number, asked in enumerate(primaries)]
    options = {"num_pages": 24, "page_size": 2, "num_slots": 6, "chunk": 2, "nodes": 5}
    compare_with_alone(arriving, [request(0, 0, 3, 1, is_run_ahead=True)], options, lambda: 0)


def test_kept_pages_are_evicted_in_the_same_order_beside_run_aheads() -> None:
    """Found by the property test: samples that pause in one step do so in the order of their slots."""
    shapes = {0: (1, 11), 1: (2, 1), 2: (1, 1), 3: (1, 3), 4: (4, 17)}
    first = [(0, 0), (0, 1), (1, 1), (3, 0), (4, 1)]
    second = [(0, 2), (0, 3), (4, 2)]
    third = [(1, 0), (1, 2), (2, 0), (2, 1), (4, 0)]
    arriving = [
        (step, request(draw, sample, *shapes[draw], has_turns=(draw, sample) in {(0, 2), (4, 1)}))
        for step, group in ((0, first), (2, second), (3, third))
        for draw, sample in group
    ]
    run_aheads = [request(0, number, 1, 1, is_run_ahead=True) for number in range(2)]
    options = {"num_pages": 12, "page_size": 4, "num_slots": 6, "chunk": 4, "nodes": 4}
    limits = chain([0, 1], repeat(0))
    compare_with_alone(arriving, run_aheads, options, lambda: next(limits))


def admitted(scheduler: Scheduler, runner: FakeRunner) -> list[tuple[int, int]]:
    """(draw, sample) in the order of first admission, until all have finished."""
    order: list[tuple[int, int]] = []
    while scheduler.has_work:
        step = runner.schedule()
        order += [name for name in names(scheduler.running) if name not in order]
        runner.run(step)
    return order


def test_admission_is_breadth_first_and_the_longest_by_history_come_first() -> None:
    scheduler, runner = make(num_slots=1)
    for draw, tokens in enumerate([10.0, None, 30.0, 15.0, None, 21.0]):
        for sample in range(2):
            scheduler.add(request(draw, sample, 5, 2), expected_tokens=tokens)
    assert admitted(scheduler, runner) == [(draw, sample) for sample in range(2) for draw in (2, 5, 3, 0, 1, 4)]


def test_siblings_share_the_prompts_full_pages_and_it_is_computed_once() -> None:
    """In one step, in which all of them decode, where the budget of prompt tokens is large enough."""
    for chunk, expected in (
        (100, [[(0, 9), (8, 1), (8, 1), (8, 1)]]),
        (6, [[(0, 6)], [(6, 3), (8, 1), (8, 1), (8, 1)]]),
    ):
        scheduler, runner = make(chunk=chunk)
        for sample in range(4):
            scheduler.add(request(0, sample, 10, 3))  # 9 positions before the root: two full pages and one more
        for work in expected:
            step = runner.schedule()
            assert [(part.start, len(part.token_ids)) for part in step.chunks] == work
            assert len(step.slots) == (4 if work is expected[-1] else 0)
            runner.run(step)
        held = [scheduler.batch.pages(sample.slot).tolist() for sample in scheduler.running]
        assert len({tuple(pages[:2]) for pages in held}) == 1
        assert len({pages[2] for pages in held}) == 4
        assert scheduler.pool.num_used == 2 + 4


def test_preemption_takes_the_newest_and_it_comes_back_before_an_expected_long_one() -> None:
    scheduler, runner = make(6, 2, num_slots=3)
    for draw in range(3):
        scheduler.add(request(draw, 0, 1, 8))
    order = names(runner.step().started)
    scheduler.add(request(3, 0, 1, 8), expected_tokens=1000.0)
    finished: list[Name] = []
    while scheduler.has_work:
        step = runner.schedule()
        order += names(step.started)
        if scheduler.num_preemptions == 1 and len(order) == 3:
            assert names(scheduler.running) == [(0, 0), (1, 0)]
        finished += [name for name, (_, _, has_finished) in runner.run(step).items() if has_finished]
    assert scheduler.num_preemptions > 0
    assert finished[0] == (0, 0, False)
    assert order[:3] == [(0, 0), (1, 0), (2, 0)]
    assert order.index((3, 0)) > 3, "preempted samples come first"
    assert scheduler.pool.num_used == 0


def test_pages_of_rejected_drafts_are_given_back_when_pages_run_short() -> None:
    scheduler, runner = make(8, 1, num_slots=2, nodes=4)
    for draw in range(2):
        scheduler.add(request(draw, 0, 1, 3))
    step = runner.schedule()
    first, second = step.slots[:1], step.slots[1:]
    (room,) = scheduler.grow_for_drafts(first, step.slots[:1] * 0 + 4)
    assert room == 4
    assert scheduler.pool.num_free == 2
    # Nothing of the first one's was accepted: the pages of its drafts are there for the other's.
    check_pages(scheduler)
    (room,) = scheduler.grow_for_drafts(second, second * 0 + 4)
    assert room == 4
    check_pages(scheduler)


def test_where_pages_are_short_the_oldest_samples_get_room_for_drafts_whatever_their_slots() -> None:
    scheduler, runner = make(3, 8, num_slots=2)
    for draw, length in enumerate([1, 20, 20]):
        scheduler.add(request(draw, 0, 1, length))
    while names(scheduler.running) != [(1, 0), (2, 0)]:
        runner.step()
    slots = runner.schedule().slots
    assert [runner.live[slot][0] for slot in slots.tolist()] == [2, 1]
    assert scheduler.pool.num_free == 1, "each has one page and wants one more"
    rooms = scheduler.grow_for_drafts(slots, slots * 0 + 8)
    assert rooms[1] == 8
    assert rooms[0] < 8
    check_pages(scheduler)


def five_that_hold_all_pages() -> tuple[Scheduler, FakeRunner]:
    """Five running samples of two pages each."""
    scheduler, runner = make(10, 6, num_slots=5)
    for draw in range(5):
        scheduler.add(request(draw, 0, 1, 20))
    for _ in range(7):
        runner.step()
    return scheduler, runner


def test_samples_between_two_turns_lose_their_pages_to_waiting_ones_where_few_run() -> None:
    """That which was admitted last, and no more than are needed; what was evicted is computed again."""
    scheduler, runner = five_that_hold_all_pages()
    _, *others = scheduler.running
    scheduler.add(request(5, 0, 4, 3))  # two more pages
    for num_paused, sample in enumerate(others, start=1):
        del runner.live[sample.slot]
        scheduler.pause(sample)
        runner.calls.append((runner.num_steps + 20, sample))
        assert scheduler.pool.num_free == 0
        started = names(runner.step().started)
        kept = [len(one.page_ids) for one in others[:num_paused]]
        if num_paused < 4:  # beside two that run
            assert (started, kept) == ([], [2] * num_paused)
        else:
            assert (started, kept) == ([(5, 0)], [2, 2, 2, 0])
    while scheduler.has_work or scheduler.paused:
        runner.answer()
        runner.step()
    assert len(runner.finished) == 6
    assert scheduler.pool.num_used == 0


def test_a_sample_that_waits_for_a_slot_again_does_not_lose_its_own_pages_for_itself() -> None:
    """Also where it was admitted last."""
    scheduler, runner = five_that_hold_all_pages()
    _, *others = scheduler.running
    for sample in others:
        del runner.live[sample.slot]
        scheduler.pause(sample)
    scheduler.extend(others[-1].request.rng_key, np.full(6, 50, np.int32))  # one more page
    assert scheduler.pool.num_free == 0
    step = runner.step()
    assert names(step.started) == [(4, 0)]
    assert [len(chunk.token_ids) for chunk in step.chunks] == [6]
    assert [len(one.page_ids) for one in others[:-1]] == [2, 2, 0]


def running_ahead(scheduler: Scheduler) -> list[int]:
    """Draws of the running run-aheads, in the order of admission."""
    return [sample.request.draw_index for sample in scheduler.run_aheads.running]


def test_rows_bound_roots_and_prompt_tokens_and_the_newest_pause() -> None:
    scheduler, runner = make()
    scheduler.add(request(0, 0, 1, 90))
    for draw in (1, 2):
        scheduler.add(request(draw, 0, 8, 90, is_run_ahead=True))  # 7 prompt tokens before the root
    work = []
    for limit in (3, 3, 3, 3, 3, 3, 1, 2, 0, 4):
        step = runner.schedule(limit)
        rows = [runner.live[slot][0] for slot in step.slots[step.num_primaries :].tolist()]
        work.append((sorted(rows), [len(chunk.token_ids) for chunk in step.chunks]))
        runner.run(step)
        assert not step.ended
    assert work[:6] == [([], [3]), ([], [3]), ([], [1, 2]), ([1], [2]), ([1], [2]), ([1], [1])]
    assert work[6:] == [([1], []), ([1, 2], []), ([], []), ([1, 2], [])]


def test_pages_go_to_primaries_first_and_what_is_dropped_does_not_come_back() -> None:
    scheduler, runner = make(num_pages=20, nodes=4)
    scheduler.add(request(0, 0, 1, 70))  # up to 18 pages
    for draw in (1, 2, 3):
        scheduler.add(request(draw, 0, 5, 60, is_run_ahead=True))
    dropped: list[int] = []
    most = 0
    while scheduler.has_work:
        before = dict(runner.live)
        step = runner.step(3)
        dropped += [before[slot][0] for slot in step.ended if before[slot][2]]
        assert not set(running_ahead(scheduler)) & set(dropped)
        most = max(most, len(scheduler.run_aheads.running))
    assert most == 3
    assert dropped == [3, 2, 1]  # the newest first
    assert scheduler.num_preemptions == 0
