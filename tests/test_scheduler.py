"""The scheduler without a model: a fake step computes what was scheduled and appends one token a sample."""

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_cases import compute, request

from srtrl.engine.admission import WaitingLine
from srtrl.engine.page_pool import PagePool
from srtrl.engine.scheduler import Scheduler
from srtrl.engine.sequence import PromptPages, Sequence


@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_everything_finishes_and_pages_stay_consistent(data: st.DataObject) -> None:
    page_size = data.draw(st.integers(1, 8), "page_size")
    lengths = data.draw(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=5), "lengths")
    num_samples = data.draw(st.integers(1, 4), "num_samples")
    largest = max(-(-(prompt + new) // page_size) for prompt, new in lengths)
    pool = PagePool(largest + data.draw(st.integers(0, 10), "spare pages"), page_size)
    scheduler = Scheduler(
        pool,
        num_slots=data.draw(st.integers(1, 8), "slots"),
        prefill_chunk_tokens=data.draw(st.integers(1, 16), "chunk"),
        admission=data.draw(st.sampled_from(["breadth_first", "depth_first"]), "admission"),
        long_first=data.draw(st.booleans(), "long first"),
    )
    requests = [request(d, s, prompt, new) for d, (prompt, new) in enumerate(lengths) for s in range(num_samples)]
    for sequence_id, item in enumerate(requests):
        scheduler.add(sequence_id, item)
    finished: list[int] = []
    num_steps = 0
    while scheduler.has_work:
        step = scheduler.schedule()
        scheduler.check_integrity()
        assert sum(chunk.count for chunk in step.prefills) <= scheduler.prefill_chunk_tokens
        assert len({id(chunk.holder) for chunk in step.prefills}) == len(step.prefills)
        done = compute(scheduler, step, num_drafts=data.draw(st.integers(0, 3)))
        finished.extend(sequence.sequence_id for sequence in done)
        scheduler.check_integrity()
        num_steps += 1
        assert num_steps < 10_000
    assert sorted(finished) == list(range(len(requests)))
    assert pool.num_used == 0


def test_admission_is_breadth_first() -> None:
    scheduler = Scheduler(PagePool(100, 4), num_slots=3, prefill_chunk_tokens=100)
    for number, (draw, sample) in enumerate([(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]):
        scheduler.add(number, request(draw, sample, 5, 2))
    scheduler.schedule()
    assert [s.request.draw_index for s in scheduler.running] == [0, 1, 2]
    assert [s.request.sample_index for s in scheduler.running] == [0, 0, 0]


def waiting_sequence(draw: int, sample: int) -> Sequence:
    asked = request(draw, sample, 5, 8)
    return Sequence(
        token_ids=list(asked.prompt_token_ids), sequence_id=100 * draw + sample, request=asked, prompt=PromptPages([])
    )


def admitted(scheduler: Scheduler) -> list[tuple[int, int]]:
    """(draw, sample) in the order of first admission, until all have finished."""
    order: list[tuple[int, int]] = []
    while scheduler.has_work:
        step = scheduler.schedule()
        keys = [(s.request.draw_index, s.request.sample_index) for s in scheduler.running]
        order += [key for key in keys if key not in order]
        compute(scheduler, step)
    return order


def test_depth_first_admits_all_samples_of_a_prompt_then_the_next() -> None:
    scheduler = Scheduler(PagePool(100, 4), num_slots=2, prefill_chunk_tokens=100, admission="depth_first")
    for sample in (2, 0, 1):
        for draw in (1, 0, 2):
            scheduler.add(10 * draw + sample, request(draw, sample, 5, 1 + draw), expected_tokens=draw)
    assert admitted(scheduler) == [(draw, sample) for draw in range(3) for sample in range(3)]


def test_what_a_drafter_expects_orders_the_first_wave() -> None:
    for long_first, expected in ((True, [2, 1, 0]), (False, [0, 1, 2])):
        scheduler = Scheduler(PagePool(100, 4), num_slots=1, prefill_chunk_tokens=100, long_first=long_first)
        for draw, tokens in enumerate([10.0, 20.0, 30.0]):
            scheduler.add(draw, request(draw, 0, 5, 12), expected_tokens=tokens)
        assert [draw for draw, _ in admitted(scheduler)] == expected


def test_unknown_prompts_wait_where_an_average_one_would() -> None:
    line = WaitingLine()
    for draw in range(6):
        line.add(waiting_sequence(draw, 0))
    for draw, expected in ((0, 10.0), (2, 30.0), (3, 19.0), (5, 21.0)):
        line.expect(waiting_sequence(draw, 0).request.prompt_token_ids, expected)
    assert [line.pop_first([]).request.draw_index for _ in range(6)] == [2, 5, 1, 4, 3, 0]
    assert not line


def test_scouts_that_finished_long_or_still_run_call_their_siblings_early() -> None:
    scheduler = Scheduler(PagePool(200, 4), num_slots=4, prefill_chunk_tokens=1000)
    lengths = [3, 12, 5, 20]  # draw 3 is the longest: its scout still runs when the others have finished
    for draw, length in enumerate(lengths):
        for sample in range(2):
            scheduler.add(10 * draw + sample, request(draw, sample, 5, length))
    order = admitted(scheduler)
    assert order[:4] == [(0, 0), (1, 0), (2, 0), (3, 0)]
    # After 3 tokens nothing but draw 0's length is known, and the running ones are as long: data order decides. After 5
    # tokens the scouts of 1 and 3 have said more than draw 2's whole response.
    assert order[4:] == [(0, 1), (1, 1), (3, 1), (2, 1)]


def test_a_long_wave_is_not_sorted_for_each_sample_that_finishes(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    sort = WaitingLine._sort

    def counting(self: WaitingLine, wave: list[Sequence], running: Iterable[Sequence]) -> None:
        sizes.append(len(wave))
        sort(self, wave, running)

    monkeypatch.setattr(WaitingLine, "_sort", counting)
    line = WaitingLine()
    for draw in range(640):
        line.add(waiting_sequence(draw, 0))
    while line:
        line.expect(line.pop_first([]).request.prompt_token_ids, 5.0)
    assert sum(sizes) < 30 * 640
    assert sizes[-1] == 1  # a short wave follows each change


def test_a_preempted_sample_comes_before_an_expected_long_one() -> None:
    line = WaitingLine()
    line.add(waiting_sequence(0, 0))
    line.expect(waiting_sequence(0, 0).request.prompt_token_ids, 1000.0)
    preempted = [waiting_sequence(1, 3), waiting_sequence(2, 3)]
    preempted[0].admission, preempted[1].admission = 7, 4
    for sequence in preempted:
        line.put_back(sequence)
    assert len(line) == 3
    assert {id(one) for one in line} >= {id(one) for one in preempted}
    assert [line.pop_first([]).request.draw_index for _ in range(3)] == [2, 1, 0]


def test_siblings_share_the_prompts_full_pages_and_it_is_computed_once() -> None:
    pool = PagePool(100, 4)
    scheduler = Scheduler(pool, num_slots=4, prefill_chunk_tokens=100)
    for sample in range(4):
        scheduler.add(sample, request(0, sample, 10, 3))  # 9 shared positions: two full pages and one more position
    step = scheduler.schedule()
    assert [(type(c.holder), c.start, c.count) for c in step.prefills] == [(PromptPages, 0, 9)]
    assert step.decodes == []
    compute(scheduler, step)
    step = scheduler.schedule()
    assert step.prefills == []
    assert len(step.decodes) == 4
    assert len({tuple(s.page_ids[:2]) for s in step.decodes}) == 1
    assert len({s.page_ids[2] for s in step.decodes}) == 4
    assert len(step.page_copies) == 4
    assert pool.num_used == 3 + 4


def test_the_last_of_a_group_takes_the_prompts_pages_without_a_copy() -> None:
    scheduler = Scheduler(PagePool(100, 4), num_slots=1, prefill_chunk_tokens=100)
    scheduler.add(0, request(0, 0, 10, 1))
    compute(scheduler, scheduler.schedule())
    step = scheduler.schedule()
    assert len(step.decodes) == 1
    assert step.page_copies == []


def test_preemption_takes_the_newest_and_it_comes_back_first() -> None:
    pool = PagePool(6, 2)
    scheduler = Scheduler(pool, num_slots=3, prefill_chunk_tokens=100)
    for draw in range(3):
        scheduler.add(draw, request(draw, 0, 1, 8))
    order: list[int] = []
    preempted = False
    while scheduler.has_work:
        step = scheduler.schedule()
        scheduler.check_integrity()
        if scheduler.num_preemptions and not preempted:
            preempted = True
            assert [s.sequence_id for s in scheduler.running] == [0, 1]
        order.extend(s.sequence_id for s in compute(scheduler, step))
    assert preempted
    assert order[0] == 0
    assert pool.num_used == 0
