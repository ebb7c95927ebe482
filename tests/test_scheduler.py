"""The scheduler without a model: a fake runner computes what was scheduled, and knows what each page holds."""

from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_cases import FakeRunner, make, names, request

from srtrl.engine.batch import Batch, PromptPages, Sample
from srtrl.engine.page_pool import PagePool
from srtrl.engine.scheduler import Scheduler, WaitingLine


@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_everything_finishes_and_pages_stay_consistent(data: st.DataObject) -> None:
    page_size = data.draw(st.integers(1, 8), "page_size")
    lengths = data.draw(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=5), "lengths")
    num_samples = data.draw(st.integers(1, 4), "num_samples")
    largest = max(-(-(prompt + new) // page_size) for prompt, new in lengths)
    scheduler, runner = make(
        largest + data.draw(st.integers(0, 10), "spare pages"),
        page_size,
        num_slots=data.draw(st.integers(1, 8), "slots"),
        chunk=data.draw(st.integers(1, 16), "chunk"),
        nodes=data.draw(st.integers(0, 3), "nodes"),
    )
    requests = [request(d, s, prompt, new) for d, (prompt, new) in enumerate(lengths) for s in range(num_samples)]
    for one in requests:
        scheduler.add(one)
    finished: list[tuple[int, int]] = []
    num_steps = 0
    while scheduler.has_work:
        results = runner.run(runner.schedule())
        finished += [name[:2] for name, (_, _, has_finished) in results.items() if has_finished]
        num_steps += 1
        assert num_steps < 10_000
    assert sorted(finished) == sorted((one.draw_index, one.sample_index) for one in requests)
    assert scheduler.pool.num_used == 0


def admitted(scheduler: Scheduler, runner: FakeRunner) -> list[tuple[int, int]]:
    """(draw, sample) in the order of first admission, until all have finished."""
    order: list[tuple[int, int]] = []
    while scheduler.has_work:
        step = runner.schedule()
        order += [name for name in names(scheduler.running) if name not in order]
        runner.run(step)
    return order


def test_admission_is_breadth_first() -> None:
    scheduler, _ = make(num_slots=3)
    for draw, sample in [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]:
        scheduler.add(request(draw, sample, 5, 2))
    scheduler.schedule()
    assert names(scheduler.running) == [(0, 0), (1, 0), (2, 0)]


def test_what_a_drafter_expects_orders_the_first_wave() -> None:
    scheduler, runner = make(num_slots=1)
    for draw, tokens in enumerate([10.0, 20.0, 30.0]):
        scheduler.add(request(draw, 0, 5, 12), expected_tokens=tokens)
    assert [draw for draw, _ in admitted(scheduler, runner)] == [2, 1, 0]


def test_scouts_that_finished_long_or_still_run_call_their_siblings_early() -> None:
    scheduler, runner = make(200, num_slots=4, chunk=1000)
    for draw, length in enumerate([3, 12, 5, 20]):  # the scout of 3 still runs when the others have finished
        for sample in range(2):
            scheduler.add(request(draw, sample, 5, length))
    order = admitted(scheduler, runner)
    assert order[:4] == [(0, 0), (1, 0), (2, 0), (3, 0)]
    # After 3 tokens nothing but draw 0's length is known, and the running ones are as long: data order decides. After 5
    # tokens the scouts of 1 and 3 have said more than draw 2's whole response.
    assert order[4:] == [(0, 1), (1, 1), (3, 1), (2, 1)]


class Line(WaitingLine):
    """A waiting line beside an empty batch."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []
        """Of the line, at each sort."""

    def put(self, draw: int, sample: int, admission: int = -1) -> None:
        asked = request(draw, sample, 5, 8)
        self.add(Sample(asked, PromptPages(Batch(1, 8, PagePool(1, 4), 0).token_ids[0]), admission=admission))

    def expect_draw(self, draw: int, num_tokens: float) -> None:
        self.expect(request(draw, 0, 5, 8).prompt_token_ids, num_tokens)

    def take(self) -> int:
        draw = self.first([], Batch(1, 8, PagePool(1, 4), 0)).request.draw_index
        self.pop()
        return draw

    def _sort(self, running: list[Sample], batch: Batch) -> None:
        self.sizes.append(len(self))
        super()._sort(running, batch)


def test_unknown_prompts_wait_where_an_average_one_would() -> None:
    line = Line()
    for draw in range(6):
        line.put(draw, 0)
    for draw, expected in ((0, 10.0), (2, 30.0), (3, 19.0), (5, 21.0)):
        line.expect_draw(draw, expected)
    assert [line.take() for _ in range(6)] == [2, 5, 1, 4, 3, 0]
    assert len(line) == 0


def test_a_long_wave_is_not_sorted_for_each_sample_that_finishes() -> None:
    line = Line()
    for draw in range(640):
        line.put(draw, 0)
    while line:
        line.expect_draw(line.take(), 5.0)
    assert sum(line.sizes) < 30 * 640
    assert line.sizes[-1] == 1  # a short wave follows each change


def test_a_preempted_sample_comes_before_an_expected_long_one() -> None:
    line = Line()
    line.put(0, 0)
    line.expect_draw(0, 1000.0)
    line.put(1, 3, admission=7)
    line.put(2, 3, admission=4)
    assert len(line) == 3
    assert [line.take() for _ in range(3)] == [2, 1, 0]


def test_siblings_share_the_prompts_full_pages_and_it_is_computed_once() -> None:
    scheduler, runner = make()
    for sample in range(4):
        scheduler.add(request(0, sample, 10, 3))  # 9 shared positions: two full pages and one more position
    step = runner.step()
    assert [(type(h), c.start, len(c.token_ids)) for h, c in zip(step.holders, step.chunks, strict=True)] == [
        (PromptPages, 0, 9)
    ]
    assert not len(step.slots)
    step = runner.schedule()
    assert step.chunks == []
    assert len(step.slots) == 4
    assert len({tuple(scheduler.batch.pages(slot)[:2]) for slot in step.slots}) == 1
    assert len({int(scheduler.batch.pages(slot)[2]) for slot in step.slots}) == 4
    assert len(step.page_copies) == 4
    assert scheduler.pool.num_used == 3 + 4


def test_the_last_of_a_group_takes_the_prompts_pages_without_a_copy() -> None:
    scheduler, runner = make(num_slots=1)
    scheduler.add(request(0, 0, 10, 1))
    runner.step()
    step = runner.schedule()
    assert len(step.slots) == 1
    assert step.page_copies == []


def test_preemption_takes_the_newest_and_it_comes_back_first() -> None:
    scheduler, runner = make(6, 2, num_slots=3)
    for draw in range(3):
        scheduler.add(request(draw, 0, 1, 8))
    order: list[tuple[int, int]] = []
    preempted = False
    while scheduler.has_work:
        step = runner.schedule()
        if scheduler.num_preemptions and not preempted:
            preempted = True
            assert names(scheduler.running) == [(0, 0), (1, 0)]
        order += [name[:2] for name, (_, _, finished) in runner.run(step).items() if finished]
    assert preempted
    assert order[0] == (0, 0)
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
    scheduler.check_integrity()
    (room,) = scheduler.grow_for_drafts(second, second * 0 + 4)
    assert room == 4
    scheduler.check_integrity()


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
    scheduler.check_integrity()
