"""The scheduler without a model: a fake step computes what was scheduled and appends one token a sample."""

from hypothesis import given, settings
from hypothesis import strategies as st

from srtrl.engine.page_pool import PagePool
from srtrl.engine.scheduler import ScheduledStep, Scheduler
from srtrl.engine.sequence import PromptPages, Sequence
from srtrl.types import Request, SamplingParams


def request(draw: int, sample: int, prompt_length: int, max_new_tokens: int) -> Request:
    prompt = tuple(range(100 * draw, 100 * draw + prompt_length))
    return Request(
        prompt_id=str(draw),
        prompt_token_ids=prompt,
        draw_index=draw,
        sample_index=sample,
        stream=0,
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
        room = scheduler.grow_for_drafts(sequence, num_drafts)
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
