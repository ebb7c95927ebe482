"""Whether pages and those that hold them agree."""

from collections import Counter
from collections.abc import Iterable

from srtrl.engine.page_pool import PagePool, Pages
from srtrl.engine.scheduler import Scheduler


def check_pool(pool: PagePool, holders: Iterable[Pages]) -> None:
    """Assert that the references are exactly those of `holders` (the pages of all that hold pages)."""
    held: Counter[int] = Counter()
    for pages in holders:
        assert len(set(pages.tolist())) == len(pages), f"a holder has a page twice: {pages}"
        held.update(pages.tolist())
    free = set(pool._free[: pool.num_free].tolist())
    assert len(free) == pool.num_free, "a page is on the free list twice"
    for page, references in enumerate(pool._num_references.tolist()):
        assert references == held[page], f"page {page} has {references} references and {held[page]} holders"
        assert (references == 0) == (page in free), f"page {page} with {references} references: wrong free list"


def check_pages(scheduler: Scheduler) -> None:
    """Assert that pages and their holders agree, and that no page is shared that will be written."""
    batch, pool = scheduler.batch, scheduler.pool
    running = [*scheduler.running, *getattr(scheduler.run_ahead, "running", [])]
    assert len(running) + batch.num_free == batch.num_slots
    assert all(batch.samples[sample.slot] is sample for sample in running)
    pages = [batch.pages(sample.slot) for sample in running]
    kept = [sample.page_ids for sample in scheduler._paused_with_kv]
    check_pool(pool, [*pages, *kept, *(prompt.page_ids for prompt in scheduler._prompts.values())])
    for sample, held in zip(running, pages, strict=True):
        num_computed = batch.num_computed[sample.slot]
        assert len(held) * pool.page_size >= num_computed
        writable = held[num_computed // pool.page_size :]
        assert pool.num_unshared(writable) == len(writable), "a page that will be written is shared"
