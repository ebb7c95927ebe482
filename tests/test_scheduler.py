"""The scheduler without a model: a fake runner computes what was scheduled, and knows what each page holds."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import chain, repeat

import numpy as np
import pytest
from engine_cases import make_request
from hypothesis import given
from hypothesis import strategies as st
from page_cases import check_pages

from srtrl.drafters.none import Drafter as NoDrafter
from srtrl.engine.batch import Batch, Sample, ScheduledStep
from srtrl.engine.draft_budget import StepCost
from srtrl.engine.page_pool import PagePool
from srtrl.engine.scheduler import Scheduler
from srtrl.engine.step_inputs import Int32Array, Int64Array, PrefillChunk
from srtrl.features.run_ahead import RunAhead
from srtrl.types import Request


def request(
    draw: int,
    sample: int,
    prompt_length: int,
    max_new_tokens: int,
    *,
    rng_key: int | None = None,
    has_turns: bool = False,
) -> Request:
    """A sample of a prompt of its draw's own, which ends at its length limit."""
    own_key = 1000 * draw + sample
    found = make_request(
        draw,
        sample,
        range(100 * draw, 100 * draw + prompt_length),
        rng_key=own_key if rng_key is None else rng_key,
        max_new_tokens=max_new_tokens,
    )
    return replace(found, has_turns=has_turns)


def run_ahead(draw: int, sample: int, prompt_length: int, max_new_tokens: int, rng_key: int | None = None) -> Request:
    """A request for a run-ahead; without the RNG key of a primary it has one of its own."""
    own_key = 10**6 + 1000 * draw + sample
    return request(draw, sample, prompt_length, max_new_tokens, rng_key=own_key if rng_key is None else rng_key)


def name_of(sample: Sample | Request) -> str:
    """Its draw and sample, and "'" for a run-ahead."""
    asked, is_run_ahead = (sample, False) if isinstance(sample, Request) else (sample.request, sample.is_run_ahead)
    return f"{asked.draw_index}.{asked.sample_index}" + "'" * is_run_ahead


def make(
    num_pages: int = 100, page_size: int = 4, *, num_slots: int = 4, chunk: int = 100, nodes: int = 0
) -> tuple[Scheduler, "FakeRunner"]:
    """A scheduler for sequences of up to 120 tokens, and the runner of its steps; `nodes`: draft nodes of a sample."""
    batch = Batch(num_slots, 120, PagePool(num_pages, page_size), nodes)
    run_ahead = RunAhead(batch, StepCost(), NoDrafter(), max_slowdown=0.03)
    scheduler = Scheduler(batch, prefill_chunk_tokens=chunk, max_draft_nodes=nodes, run_ahead=run_ahead)
    return scheduler, FakeRunner(scheduler)


def run_aheads_of(scheduler: Scheduler) -> RunAhead:
    assert isinstance(scheduler.run_ahead, RunAhead)
    return scheduler.run_ahead


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
        self.live: dict[int, str] = {}
        """Slot -> sample: as a drafter hears of them."""
        self.finished: list[str] = []
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
        running = [*scheduler.running, *run_aheads_of(scheduler).running]
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

    def run(self, step: ScheduledStep) -> dict[str, tuple[int, int, bool]]:
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

    def _decode(self, slot: int, room: int) -> tuple[str, tuple[int, int, bool]]:
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


Arrivals = list[tuple[int, Request]]
"""The step of arrival, and the request."""


class Run:
    """One scheduler with its fake runner; primaries come as (step of arrival, request)."""

    def __init__(self, arriving: Arrivals, run_aheads: list[Request], options: dict[str, int]) -> None:
        self.scheduler, self.runner = make(**options)
        for asked in run_aheads:
            self.scheduler.run_ahead.add([asked])
        self.arriving = arriving
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
        assert self.arrived.isdisjoint(one.request.rng_key for one in run_aheads_of(scheduler).running)
        waits = bool(scheduler._waiting)
        # The runner hears of those that were ended by their samples with the next step's, as a drafter does.
        step = self.runner.schedule(max_run_ahead)
        assert self.arrived.isdisjoint(one.request.rng_key for one in run_aheads_of(scheduler).running), "from the line"
        assert not (waits and scheduler._waiting and any(one.is_run_ahead for one in step.started))
        slots = [(chunk, self.runner.slot_of(chunk)) for chunk in step.chunks]
        chunks = [
            (self.runner.live[slot], chunk.start, chunk.token_ids.tolist())
            for chunk, slot in slots
            if not scheduler.batch.is_run_ahead[slot]
        ]
        results = self.runner.run(step)
        assert all(room == 0 for name, (room, _, _) in results.items() if "'" in name)
        return (
            [(name_of(sample), sample.admission) for sample in scheduler.running],
            chunks,
            {name: result for name, result in results.items() if "'" not in name},
            scheduler.num_preemptions,
            sorted(p.token_ids.tolist() for p in scheduler._prompts.values() if len(p.page_ids)),
        )


def compare_with_alone(
    arriving: Arrivals, run_aheads: list[Request], options: dict[str, int], limit: Callable[[], int]
) -> None:
    """Decode with and without run-aheads: every step of the primaries must be the same; `limit`: the next step's."""
    alone, crowded = Run(arriving, [], options), Run(arriving, run_aheads, options)
    last = max(step for step, _ in arriving)
    while alone.scheduler.has_work or alone.scheduler.paused or alone.num_steps <= last:
        assert crowded.scheduler.has_work == alone.scheduler.has_work
        assert crowded.step(limit()) == alone.step(0)
        assert alone.num_steps < 2000
    assert not crowded.scheduler.has_work
    assert sorted(alone.runner.finished) == sorted(name_of(one) for _, one in arriving)
    assert sorted(crowded.scheduler.clear()) == sorted(crowded.runner.live)
    assert crowded.scheduler.pool.num_used == alone.scheduler.pool.num_used == 0


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
        run_aheads.append(run_ahead(draw, number, length, new, rng_key=key))
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


def test_what_the_property_test_once_found() -> None:
    # A prompt was evicted later where run-aheads waited.
    shapes = [(0, 3, 1), (0, 1, 1), (0, 4, 11), (1, 4, 11), (2, 4, 11), (3, 4, 11), (0, 1, 8), (0, 1, 1)]
    draws = [0, 1, 2, 2, 2, 2, 3, 4]
    arriving = [(0 if draw else 5, request(draw, *shape)) for draw, shape in zip(draws, shapes, strict=True)]
    run_aheads = [run_ahead(0, 0, 3, 1)]
    options = {"num_pages": 24, "page_size": 2, "num_slots": 6, "chunk": 2, "nodes": 5}
    compare_with_alone(arriving, run_aheads, options, lambda: 0)
    # Samples that paused in one step were evicted by their slots.
    by_draw = {0: (1, 11), 1: (2, 1), 2: (1, 1), 3: (1, 3), 4: (4, 17)}
    groups = {
        0: [(0, 0), (0, 1), (1, 1), (3, 0), (4, 1)],
        2: [(0, 2), (0, 3), (4, 2)],
        3: [(1, 0), (1, 2), (2, 0), (2, 1), (4, 0)],
    }
    arriving = [
        (step, request(*name, *by_draw[name[0]], has_turns=name in {(0, 2), (4, 1)}))
        for step, group in groups.items()
        for name in group
    ]
    run_aheads = [run_ahead(0, number, 1, 1) for number in range(2)]
    options = {"num_pages": 12, "page_size": 4, "num_slots": 6, "chunk": 4, "nodes": 4}
    limits = chain([0, 1], repeat(0))
    compare_with_alone(arriving, run_aheads, options, lambda: next(limits))


Asked = list[tuple[int | None, Request, float | None]]
"""The step of arrival, the request, and its expected tokens; without a step it is a run-ahead."""
LENGTHS = (10.0, None, 30.0, 15.0, None, 21.0)
# 9 positions before the root: two full pages and one more.
SIBLINGS: Asked = [(0, request(0, sample, 10, 3), None) for sample in range(4)]
SHORT: Asked = [(0, request(draw, 0, 1, 8), None) for draw in range(3)]
ROWS = (
    "[0:3] >0.0 | [3:6] >0.0 | [6:7] [0:2] >0.0 | [2:4] >0.0 >1.0' | [4:6] >0.0 >1.0' | [6:7] >0.0 >1.0' | "
    ">0.0 >1.0' | >0.0 >1.0' >2.0' | >0.0 | >0.0 >1.0' >2.0' | 10 pages"
)


def ahead(prompt: int, new: int, *draws: int) -> Asked:
    return [(None, run_ahead(draw, 0, prompt, new), None) for draw in draws]


@pytest.mark.parametrize(
    ("asked", "limits", "options", "kinds", "trace"),
    [
        (
            [(0, request(draw, sample, 5, 2), LENGTHS[draw]) for draw in range(6) for sample in range(2)],
            repeat(0),
            {"num_slots": 1},
            "+",
            "+2.0 | +5.0 | +3.0 | +0.0 | +1.0 | +4.0 | +2.1 | +5.1 | +3.1 | +0.1 | +1.1 | +4.1 | 0 pages",
        ),
        (SIBLINGS, [0], {}, "[>", "[0:9] [8:9] [8:9] [8:9] >0.0 >0.1 >0.2 >0.3 | 6 pages"),
        (SIBLINGS, [0, 0], {"chunk": 6}, "[>", "[0:6] | [6:9] [8:9] [8:9] [8:9] >0.0 >0.1 >0.2 >0.3 | 6 pages"),
        (
            [*SHORT, (1, request(3, 0, 1, 8), 1000.0)],
            repeat(0),
            {"num_pages": 6, "page_size": 2, "num_slots": 3},
            "+-",
            "+0.0 +1.0 +2.0 | -2.0 | -1.0 | +1.0 | +2.0 +3.0 | 0 pages",
        ),
        ([(0, request(0, 0, 1, 90), None), *ahead(8, 90, 1, 2)], [3, 3, 3, 3, 3, 3, 1, 2, 0, 4], {}, "-[>", ROWS),
        (
            [(0, request(0, 0, 1, 70), None), *ahead(5, 60, 1, 2, 3)],
            repeat(3),
            {"num_pages": 20, "nodes": 4},
            "+-",
            "+0.0 +1.0' | +2.0' | +3.0' | -3.0' | -2.0' | -1.0' | 0 pages",
        ),
    ],
    ids=[
        "admission is breadth-first, and the longest by history come first",
        "siblings share the prompt's full pages, computed once, and decode in that step",
        "siblings wait where the budget of prompt tokens is small",
        "preemption takes the newest, and it comes back before an expected long one",
        "rows bound the roots and prompt tokens of run-aheads, of which the newest pause",
        "pages go to primaries first, and what is dropped, the newest first, does not come back",
    ],
)
def test_what_is_scheduled(
    asked: Asked, limits: Iterable[int], options: dict[str, int], kinds: str, trace: str
) -> None:
    """`kinds` are shown: `+` started, `-` dropped or preempted, `[` chunks, `>` decoding samples; then used pages."""
    scheduler, runner = make(**options)
    for arrival, one, _ in asked:
        if arrival is None:
            scheduler.run_ahead.add([one])
    steps = []
    for number, limit in enumerate(limits):
        for arrival, one, expected_tokens in asked:
            if arrival == number:
                scheduler.add(one, expected_tokens)
        if not scheduler.has_work:
            break
        step = runner.schedule(limit)
        events = [
            *("+" + name_of(sample) for sample in step.started),
            *("-" + name_of(sample) for sample in step.ended.values()),
            *(f"[{chunk.start}:{chunk.start + len(chunk.token_ids)}]" for chunk in step.chunks),
            *(">" + runner.live[slot] for slot in step.slots.tolist()),
        ]
        steps.append(" ".join(event for event in events if event[0] in kinds))
        runner.run(step)
    assert " | ".join([*filter(None, steps), f"{scheduler.pool.num_used} pages"]) == trace


def test_drafts_get_pages_of_rejected_ones_and_where_these_are_short_the_oldest_samples_come_first() -> None:
    scheduler, runner = make(8, 1, num_slots=2, nodes=4)
    for draw in range(2):
        scheduler.add(request(draw, 0, 1, 3))
    slots = runner.schedule().slots
    for slot, num_free in zip(slots, (2, 0), strict=True):  # nothing of the first one's was accepted
        assert scheduler.grow_for_drafts(slot[None], np.array([4])) == [4]
        assert scheduler.pool.num_free >= num_free
        check_pages(scheduler)
    scheduler, runner = make(3, 8, num_slots=2)
    for draw, length in enumerate([1, 20, 20]):
        scheduler.add(request(draw, 0, 1, length))
    while [name_of(sample) for sample in scheduler.running] != ["1.0", "2.0"]:
        runner.step()
    slots = runner.schedule().slots
    assert [runner.live[slot] for slot in slots.tolist()] == ["2.0", "1.0"]
    assert scheduler.pool.num_free == 1, "each has one page and wants one more"
    newer, older = scheduler.grow_for_drafts(slots, slots * 0 + 8)
    assert newer < older == 8
    check_pages(scheduler)


@pytest.mark.parametrize("waits", ["a new sample", "the last to pause"])
def test_samples_between_two_turns_lose_their_pages_to_waiting_ones_where_few_run(waits: str) -> None:
    """That which was admitted last, and no more than are needed; what was evicted is computed again.

    A sample that waits for a slot again does not lose its own pages for itself, even if it was admitted last.
    """
    scheduler, runner = make(10, 6, num_slots=5)
    for draw in range(5):  # two pages each: all pages
        scheduler.add(request(draw, 0, 1, 20))
    for _ in range(7):
        runner.step()
    others = scheduler.running[1:]
    if waits == "a new sample":
        scheduler.add(request(5, 0, 4, 3))  # two more pages
    for num_paused, sample in enumerate(others, start=1):
        del runner.live[sample.slot]
        scheduler.pause(sample)
        runner.calls.append((runner.num_steps + 20, sample))
        assert scheduler.pool.num_free == 0
        if num_paused < 4:  # two run, or more
            assert not runner.step().started
            assert [len(one.page_ids) for one in others[:num_paused]] == [2] * num_paused
    if waits == "the last to pause":
        scheduler.extend(others[-1].request.rng_key, np.full(6, 50, np.int32))  # one more page
        runner.calls.pop()
    step = runner.step()
    kept = {"a new sample": [2, 2, 2, 0], "the last to pause": [2, 2, 0, 0]}
    assert [len(one.page_ids) for one in others] == kept[waits]
    assert [name_of(one) for one in step.started] == [{"a new sample": "5.0", "the last to pause": "4.0"}[waits]]
    if waits == "the last to pause":
        assert [len(chunk.token_ids) for chunk in step.chunks] == [6], "its own pages were lost"
    while scheduler.has_work or scheduler.paused:
        runner.answer()
        runner.step()
    assert len(runner.finished) == 5 + (waits == "a new sample")
    assert scheduler.pool.num_used == 0
