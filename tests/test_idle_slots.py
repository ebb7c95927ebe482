"""Run-aheads in idle slots: the primaries' schedule is the same without them, and they use what is left, no more."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_cases import FakeRunner, compute, request

from srtrl.engine.page_pool import PagePool
from srtrl.engine.scheduler import Scheduler
from srtrl.types import Request


def run_ahead(draw: int, sample: int, prompt_length: int, max_new_tokens: int, *, active: bool = False) -> Request:
    asked = request(draw, sample, prompt_length, max_new_tokens)
    return replace(asked, rng_key=1000 + 10 * draw + sample, is_run_ahead=True, ends_with_prompt=active)


class Run:
    """One scheduler with its fake runner; primaries come as (step of arrival, request)."""

    def __init__(
        self, primaries: list[tuple[int, Request]], run_aheads: list[Request], options: dict[str, int]
    ) -> None:
        pool = PagePool(options["num_pages"], options["page_size"])
        nodes = options["max_draft_nodes"]
        self.scheduler = Scheduler(
            pool,
            num_slots=options["num_slots"],
            prefill_chunk_tokens=options["prefill_chunk_tokens"],
            max_draft_nodes=nodes,
        )
        self.runner = FakeRunner(self.scheduler, max_draft_nodes=nodes)
        for number, asked in enumerate(run_aheads):
            self.scheduler.add(1000 + number, asked)
        self.arriving = [(step, number, asked) for number, (step, asked) in enumerate(primaries)]
        self.num_steps = 0
        self.told: set[int] = set()
        """Run-aheads that the drafter has heard of and that have not ended."""

    def step(self, max_run_ahead: int) -> tuple[object, ...]:
        """One decode step; returns what concerns primaries."""
        scheduler = self.scheduler
        for arrival, sequence_id, asked in self.arriving:
            if arrival == self.num_steps:
                ended = scheduler.idle_slots.end_rng_key(asked.rng_key)
                assert set(ended) <= self.told
                self.told -= set(ended)
                scheduler.check_integrity()
                scheduler.add(sequence_id, asked)
        self.num_steps += 1
        waits = bool(scheduler._waiting)
        running_before = {s.sequence_id for s in scheduler.idle_slots.running}
        step = scheduler.schedule(max_run_ahead)
        scheduler.check_integrity()
        rows_of_run_aheads = len(step.decodes) - step.num_primaries
        chunks = [c for c in step.prefills if c.holder not in scheduler.idle_slots.running]
        rows_of_run_aheads += sum(c.count for c in step.prefills if c not in chunks)
        assert rows_of_run_aheads <= max_run_ahead
        assert sum(c.count for c in step.prefills) <= scheduler.prefill_chunk_tokens
        assert not any(s.is_run_ahead for s in step.decodes[: step.num_primaries])
        assert all(s.is_run_ahead for s in step.decodes[step.num_primaries :])
        assert not (waits and scheduler._waiting and step.admitted_run_aheads)
        dropped = scheduler.take_dropped()
        self.told |= {s.sequence_id for s in step.admitted_run_aheads}
        assert set(dropped) <= running_before <= self.told
        self.told -= set(dropped)
        results = self.runner.run(step)
        scheduler.check_integrity()
        of_primaries, of_others = results[: step.num_primaries], results[step.num_primaries :]
        self.told -= {sequence_id for sequence_id, _, _, finished in of_others if finished}
        assert self.told == {s.sequence_id for s in scheduler.idle_slots.running}
        return (
            [(s.sequence_id, s.admission) for s in scheduler.running],
            [(c.holder.token_ids[: c.start], c.start, c.count) for c in chunks],
            of_primaries,
            scheduler.num_preemptions,
            sorted(tuple(p.token_ids) for p in scheduler._prompts.values() if p.page_ids),
        )


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_primaries_are_scheduled_exactly_as_without_run_aheads(data: st.DataObject) -> None:
    shape = st.tuples(st.integers(1, 14), st.integers(1, 20))
    shapes = data.draw(st.lists(shape, min_size=1, max_size=4), "primaries")
    ahead = data.draw(st.lists(st.tuples(st.integers(0, 6), shape, st.booleans()), max_size=8), "run-aheads")
    page_size = data.draw(st.integers(1, 6), "page size")
    primaries = [
        replace(request(draw, sample, prompt, new), rng_key=10 * draw + sample)
        for draw, (prompt, new) in enumerate(shapes)
        for sample in range(data.draw(st.integers(1, 3), "samples"))
    ]
    run_aheads = [
        # Draws below len(shapes) have a primary's prompt: its KV is copied where it is there.
        run_ahead(draw, number, shapes[draw][0] if draw < len(shapes) else prompt, new, active=active)
        for number, (draw, (prompt, new), active) in enumerate(ahead)
    ]
    for number in range(len(run_aheads)):  # of some the sample comes in this rollout: coupled, and opened early
        rng_key = data.draw(
            st.sampled_from([run_aheads[number].rng_key, *(one.rng_key for one in primaries)]), "rng_key"
        )
        run_aheads[number] = replace(run_aheads[number], rng_key=rng_key)
    largest = max(-(-(len(r.prompt_token_ids) + r.sampling.max_new_tokens) // page_size) for r in primaries)
    options = {
        "num_pages": largest + data.draw(st.integers(0, 30), "spare pages"),
        "page_size": page_size,
        "num_slots": data.draw(st.integers(1, 8), "slots"),
        "prefill_chunk_tokens": data.draw(st.integers(1, 16), "chunk"),
        "max_draft_nodes": data.draw(st.integers(0, 7), "nodes"),
    }
    late = st.one_of(st.just(0), st.integers(0, 30))
    arriving = [(data.draw(late, "arrival"), asked) for asked in primaries]
    alone, crowded = Run(arriving, [], options), Run(arriving, run_aheads, options)
    while alone.scheduler.has_work or alone.num_steps <= max(step for step, _ in arriving):
        assert crowded.scheduler.has_work == alone.scheduler.has_work
        limit = data.draw(st.integers(0, 12), "max_run_ahead")
        assert crowded.step(limit) == alone.step(limit)
        assert alone.num_steps < 2000
    assert not crowded.scheduler.has_work
    assert set(crowded.scheduler.clear()) == crowded.told
    assert crowded.scheduler.pool.num_used == 0
    assert crowded.scheduler.take_dropped() == []


def make(num_pages: int = 100, *, num_slots: int = 4, chunk: int = 100) -> Scheduler:
    return Scheduler(PagePool(num_pages, 4), num_slots=num_slots, prefill_chunk_tokens=chunk, max_draft_nodes=4)


def test_run_aheads_take_only_slots_that_no_primary_wants() -> None:
    scheduler = make(num_slots=3)
    scheduler.add(0, run_ahead(7, 0, 5, 50))
    scheduler.add(1, run_ahead(8, 0, 5, 50))
    assert not scheduler.has_work
    for draw in range(3):
        scheduler.add(10 + draw, request(draw, 0, 5, 2 + 6 * draw))
    seen: list[int] = []
    while scheduler.has_work:
        step = scheduler.schedule(100)
        scheduler.check_integrity()
        seen.append(len(step.admitted_run_aheads))
        compute(scheduler, step)
    assert seen == [0, 0, 0, 1, 0, 0, 0, 0, 0, 1, *[0] * 5]  # a step for the prompts, then a slot after 2 and 8 tokens
    assert sorted(scheduler.clear()) == [0, 1]
    assert scheduler.pool.num_used == 0


def test_without_a_limit_from_the_engine_there_is_no_run_ahead() -> None:
    scheduler = make()
    scheduler.add(0, request(0, 0, 5, 4))
    scheduler.add(1, run_ahead(1, 0, 5, 4))
    while scheduler.has_work:
        step = scheduler.schedule()
        assert step.admitted_run_aheads == []
        compute(scheduler, step)
    assert scheduler.clear() == []  # it never had a slot: nobody was told of it


def test_a_sample_ends_the_run_aheads_on_its_stream_running_or_waiting() -> None:
    scheduler = make(num_slots=4)
    scheduler.add(0, request(0, 0, 5, 30))
    for number, asked in enumerate([run_ahead(1, 0, 5, 30), run_ahead(2, 0, 5, 30), run_ahead(3, 0, 5, 30)], 1):
        scheduler.add(number, asked)
    scheduler.add(4, run_ahead(1, 0, 5, 30))  # on the rng_key of 1 once more: it waits, for there is no row left
    for _ in range(3):
        compute(scheduler, scheduler.schedule(12))
    idle = scheduler.idle_slots
    assert [s.sequence_id for s in idle.running] == [1, 2, 3]
    assert idle.num_waiting == 1
    num_free = scheduler.pool.num_free
    num_pages = len(idle.running[0].page_ids)
    assert idle.end_rng_key(run_ahead(1, 0, 5, 30).rng_key) == [1]
    scheduler.check_integrity()
    assert scheduler.pool.num_free == num_free + num_pages > num_free
    assert [s.sequence_id for s in idle.running] == [2, 3]
    assert idle.num_waiting == 0
    assert idle.end_rng_key(7) == []
    assert scheduler.take_dropped() == []  # whoever ended it knows


def test_rows_bound_roots_and_prompt_tokens_and_the_newest_pause() -> None:
    scheduler = make()
    scheduler.add(0, request(0, 0, 1, 90))
    for draw in (1, 2):
        scheduler.add(draw, run_ahead(draw, 0, 8, 90))  # 7 prompt tokens before the root
    work = []
    for limit in (3, 3, 3, 3, 3, 3, 1, 2, 0, 4):
        step = scheduler.schedule(limit)
        scheduler.check_integrity()
        rows = [s.sequence_id for s in step.decodes[step.num_primaries :]]
        work.append((rows, [chunk.count for chunk in step.prefills]))
        compute(scheduler, step)
    assert work[:6] == [([], [3]), ([], [3]), ([], [1, 2]), ([1], [2]), ([1], [2]), ([1], [1])]
    assert work[6:] == [([1], []), ([1, 2], []), ([], []), ([1, 2], [])]
    assert scheduler.take_dropped() == []


def test_a_run_ahead_copies_the_prompt_of_a_running_sample_instead_of_computing_it() -> None:
    scheduler = make()
    runner = FakeRunner(scheduler, max_draft_nodes=2)
    scheduler.add(0, request(0, 0, 10, 30))
    for _ in range(3):
        runner.run(scheduler.schedule(8))
    scheduler.add(1, run_ahead(0, 1, 10, 30))
    step = scheduler.schedule(8)
    assert [s.sequence_id for s in step.decodes] == [0, 1]
    assert step.decodes[1:] == step.admitted_run_aheads
    assert step.prefills == []
    assert len(step.page_copies) == 3  # 9 positions, all into pages of its own
    runner.run(step)  # checks the copied KV
    scheduler.check_integrity()


def test_samples_of_a_finished_prompt_are_of_no_use() -> None:
    scheduler = make(num_slots=3)
    scheduler.add(0, request(0, 0, 5, 4))
    scheduler.add(1, request(1, 0, 5, 20))
    scheduler.add(2, run_ahead(0, 1, 5, 50, active=True))
    scheduler.add(3, run_ahead(0, 2, 5, 50, active=True))
    scheduler.add(4, run_ahead(0, 3, 5, 50))  # the next step draws the same prompt: that one stays
    dropped = []
    while scheduler.has_work:
        step = scheduler.schedule(10)
        dropped += scheduler.take_dropped()
        compute(scheduler, step)
    assert dropped == [2]
    assert scheduler.clear() == [4]


def test_pages_go_to_primaries_first_and_what_is_dropped_does_not_come_back() -> None:
    scheduler = make(num_pages=20, num_slots=4)
    scheduler.add(0, request(0, 0, 1, 70))  # up to 18 pages
    for draw in (1, 2, 3):
        scheduler.add(draw, run_ahead(draw, 0, 5, 60))
    dropped: list[int] = []
    most = 0
    while scheduler.has_work:
        step = scheduler.schedule(3)
        scheduler.check_integrity()
        dropped += scheduler.take_dropped()
        assert not {s.sequence_id for s in scheduler.idle_slots.running} & set(dropped)
        most = max(most, len(scheduler.idle_slots.running))
        if scheduler.idle_slots.running:
            assert scheduler.pool.num_free >= 1  # for the drafts of the primary
        compute(scheduler, step)
    assert most == 3
    assert dropped == [3, 2, 1]  # the newest first
    assert scheduler.num_preemptions == 0


def test_paused_run_aheads_give_way_to_a_primarys_drafts() -> None:
    scheduler = make(num_pages=12, num_slots=2)
    scheduler.add(0, request(0, 0, 1, 40))
    scheduler.add(1, run_ahead(1, 0, 5, 60))
    rooms: list[int] = []
    for number in range(40):
        step = scheduler.schedule(6 if number < 10 else 0)
        rooms += scheduler.grow_for_drafts(step.decodes[:1], [4])
        scheduler.check_integrity()
        compute(scheduler, step)
        assert scheduler.idle_slots.running or number > 10
    assert rooms == [4] * 40
    assert scheduler.take_dropped() == [1]
