"""Reference-counted pages against a plain dictionary of counts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from srtrl.engine.page_pool import PagePool


@given(
    num_pages=st.integers(1, 12),
    actions=st.lists(st.tuples(st.sampled_from(["take", "share", "drop"]), st.integers(0, 5), st.integers(1, 4))),
)
def test_any_sequence_of_operations_keeps_the_pool_consistent(
    num_pages: int, actions: list[tuple[str, int, int]]
) -> None:
    pool = PagePool(num_pages, page_size=4)
    holders: list[list[int]] = []
    for action, which, count in actions:
        if action == "take":
            free_before = pool.num_free
            pages = pool.allocate(count)
            assert (pages is None) == (count > free_before)
            if pages is not None:
                assert len(set(pages)) == count
                holders.append(pages)
        elif holders and action == "share":
            pages = holders[which % len(holders)]
            pool.share(pages)
            holders.append(list(pages))
        elif holders:
            pool.release(holders.pop(which % len(holders)))
        pool.check_integrity(holders)
        held = {page for pages in holders for page in pages}
        assert pool.num_used == len(held)
        for page in held:
            assert pool.is_shared(page) == (sum(page in pages for pages in holders) > 1)


def test_check_integrity_sees_a_lost_and_a_stolen_page() -> None:
    pool = PagePool(4, page_size=4)
    pages = pool.allocate(2)
    assert pages is not None
    with pytest.raises(AssertionError, match="1 references and 0 holders"):
        pool.check_integrity([])
    with pytest.raises(AssertionError, match="references and 2 holders"):
        pool.check_integrity([pages, pages])


def test_releasing_a_free_page_is_an_error() -> None:
    pool = PagePool(2, page_size=4)
    pages = pool.allocate(1)
    assert pages is not None
    pool.release(pages)
    with pytest.raises(AssertionError, match="released more often"):
        pool.release(pages)


def test_pages_for_rounds_up() -> None:
    pool = PagePool(2, page_size=16)
    assert [pool.pages_for(n) for n in (0, 1, 16, 17, 32, 33)] == [0, 1, 1, 2, 2, 3]
