"""Run-aheads in idle slots: the primaries' schedule is the same without them, and they use what is left, no more."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_cases import FakeRunner, make, name_of, names, request, run_ahead

from srtrl.engine.batch import Sample
from srtrl.engine.scheduler import ScheduledStep, Scheduler
from srtrl.types import Request


class Run:
    """One scheduler with its fake runner; primaries come as (step of arrival, request)."""

    def __init__(
        self, primaries: list[tuple[int, Request]], run_aheads: list[Request], options: dict[str, int]
    ) -> None:
        self.scheduler, self.runner = make(**options)
        for asked in run_aheads:
            self.scheduler.add(asked)
        self.arriving = primaries
        self.num_steps = 0

    def step(self, max_run_ahead: int) -> tuple[object, ...]:
        """One decode step; returns what concerns primaries."""
        scheduler = self.scheduler
        for arrival, asked in self.arriving:
            if arrival == self.num_steps:
                scheduler.add(asked)
                assert all(one.request.rng_key != asked.rng_key for one in scheduler.run_aheads.running)
                scheduler.check_integrity()
        self.num_steps += 1
        waits = scheduler.num_waiting > 0
        # The runner hears of those that were ended by their samples with the next step's, as a drafter does.
        step = self.runner.schedule(max_run_ahead)
        assert not (waits and scheduler.num_waiting and any(one.request.is_run_ahead for one in step.started))
        chunks = [
            (name_of(h) if isinstance(h, Sample) else h.token_ids.tolist(), c.start, c.token_ids.tolist())
            for h, c in zip(step.holders, step.chunks, strict=True)
            if h not in scheduler.run_aheads.running
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


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_primaries_are_scheduled_exactly_as_without_run_aheads(data: st.DataObject) -> None:
    shape = st.tuples(st.integers(1, 14), st.integers(1, 20))
    shapes = data.draw(st.lists(shape, min_size=1, max_size=4), "primaries")
    ahead = data.draw(st.lists(st.tuples(st.integers(0, 6), shape), max_size=8), "run-aheads")
    page_size = data.draw(st.integers(1, 6), "page size")
    primaries = [
        request(draw, sample, prompt, new)
        for draw, (prompt, new) in enumerate(shapes)
        for sample in range(data.draw(st.integers(1, 3), "samples"))
    ]
    run_aheads = [
        # Draws below len(shapes) have a primary's prompt.
        run_ahead(draw, number, shapes[draw][0] if draw < len(shapes) else prompt, new)
        for number, (draw, (prompt, new)) in enumerate(ahead)
    ]
    for number in range(len(run_aheads)):  # of some the sample comes in this rollout, opened early
        keys = [run_aheads[number].rng_key, *(one.rng_key for one in primaries)]
        run_aheads[number] = replace(run_aheads[number], rng_key=data.draw(st.sampled_from(keys), "rng_key"))
    largest = max(-(-(len(r.prompt_token_ids) + r.sampling.max_new_tokens) // page_size) for r in primaries)
    options = {
        "num_pages": largest + data.draw(st.integers(0, 30), "spare pages"),
        "page_size": page_size,
        "num_slots": data.draw(st.integers(1, 8), "slots"),
        "chunk": data.draw(st.integers(1, 16), "chunk"),
        "nodes": data.draw(st.integers(0, 7), "nodes"),
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
    assert sorted(crowded.scheduler.clear()) == sorted(crowded.runner.live)
    assert crowded.scheduler.pool.num_used == 0


def started_ahead(step: ScheduledStep) -> list[tuple[int, int]]:
    return names(sample for sample in step.started if sample.request.is_run_ahead)


def running_ahead(scheduler: Scheduler) -> list[int]:
    """Draws of the running run-aheads, in the order of admission."""
    return [sample.request.draw_index for sample in scheduler.run_aheads.running]


def dropped_by(runner: FakeRunner, max_run_ahead: int) -> list[int]:
    """Do a step; returns the draws of the run-aheads that lost their slots."""
    before = dict(runner.live)
    step = runner.step(max_run_ahead)
    return [before[slot][0] for slot in step.ended if before[slot][2]]


def test_run_aheads_take_only_slots_that_no_primary_wants() -> None:
    scheduler, runner = make(num_slots=3)
    scheduler.add(run_ahead(7, 0, 5, 50))
    scheduler.add(run_ahead(8, 0, 5, 50))
    assert not scheduler.has_work
    for draw in range(3):
        scheduler.add(request(draw, 0, 5, 2 + 6 * draw))
    seen: list[int] = []
    while scheduler.has_work:
        seen.append(len(started_ahead(runner.step(100))))
    assert seen == [0, 0, 0, 1, 0, 0, 0, 0, 0, 1, *[0] * 5]  # a step for the prompts, then a slot after 2 and 8 tokens
    assert running_ahead(scheduler) == [7, 8]
    assert len(scheduler.clear()) == 2
    assert scheduler.pool.num_used == 0


def test_without_a_limit_from_the_engine_there_is_no_run_ahead() -> None:
    scheduler, runner = make()
    scheduler.add(request(0, 0, 5, 4))
    scheduler.add(run_ahead(1, 0, 5, 4))
    assert scheduler.may_run_ahead
    while scheduler.has_work:
        assert started_ahead(runner.step()) == []
    assert scheduler.clear() == []  # it never had a slot: nobody heard of it


def test_a_sample_ends_the_run_aheads_on_its_rng_key_running_or_waiting() -> None:
    scheduler, runner = make(num_slots=4)
    scheduler.add(request(0, 0, 5, 30))
    for draw in (1, 2, 3, 1):  # on the key of 1 once more: that one waits, for there is no slot left
        scheduler.add(run_ahead(draw, 0, 5, 30))
    for _ in range(3):
        runner.step(12)
    assert running_ahead(scheduler) == [1, 2, 3]
    num_free = scheduler.pool.num_free
    ended = scheduler.run_aheads.running[0].slot
    num_pages = int(scheduler.batch.num_pages[ended])
    assert scheduler.run_aheads.end_rng_key(7) == []
    sample = request(1, 5, 5, 30, rng_key=run_ahead(1, 0, 5, 30).rng_key)
    scheduler.add(sample)
    scheduler.check_integrity()
    assert scheduler.pool.num_free == num_free + num_pages > num_free
    assert running_ahead(scheduler) == [2, 3]
    step = runner.step(12)
    assert step.ended == [ended]
    assert runner.live[ended] == (1, 5, False), "the sample has the slot of its run-ahead"
    for _ in range(3):
        runner.step(12)
        assert running_ahead(scheduler) == [2, 3], "the second run-ahead on its key is gone as well"


def test_rows_bound_roots_and_prompt_tokens_and_the_newest_pause() -> None:
    scheduler, runner = make()
    scheduler.add(request(0, 0, 1, 90))
    for draw in (1, 2):
        scheduler.add(run_ahead(draw, 0, 8, 90))  # 7 prompt tokens before the root
    work = []
    for limit in (3, 3, 3, 3, 3, 3, 1, 2, 0, 4):
        step = runner.schedule(limit)
        rows = [runner.live[slot][0] for slot in step.slots[step.num_primaries :].tolist()]
        work.append((sorted(rows), [len(chunk.token_ids) for chunk in step.chunks]))
        runner.run(step)
        assert step.ended == []
    assert work[:6] == [([], [3]), ([], [3]), ([], [1, 2]), ([1], [2]), ([1], [2]), ([1], [1])]
    assert work[6:] == [([1], []), ([1, 2], []), ([], []), ([1, 2], [])]


def test_pages_go_to_primaries_first_and_what_is_dropped_does_not_come_back() -> None:
    scheduler, runner = make(num_pages=20, nodes=4)
    scheduler.add(request(0, 0, 1, 70))  # up to 18 pages
    for draw in (1, 2, 3):
        scheduler.add(run_ahead(draw, 0, 5, 60))
    dropped: list[int] = []
    most = 0
    while scheduler.has_work:
        dropped += dropped_by(runner, 3)
        assert not set(running_ahead(scheduler)) & set(dropped)
        most = max(most, len(scheduler.run_aheads.running))
    assert most == 3
    assert dropped == [3, 2, 1]  # the newest first
    assert scheduler.num_preemptions == 0


def test_paused_run_aheads_give_way_to_a_primarys_drafts() -> None:
    scheduler, runner = make(num_pages=12, num_slots=2, nodes=4)
    scheduler.add(request(0, 0, 1, 40))
    scheduler.add(run_ahead(1, 0, 5, 60))
    dropped: list[int] = []
    for number in range(100):
        if not scheduler.has_work:
            break
        before = dict(runner.live)
        step = runner.schedule(6 if number < 5 else 0)
        dropped += [before[slot][0] for slot in step.ended]
        wanted = step.slots[: step.num_primaries]
        assert scheduler.grow_for_drafts(wanted, wanted * 0 + 4).tolist() == [4] * len(wanted)
        runner.run(step)
        assert scheduler.run_aheads.running or number >= 5
    assert dropped == [1]
