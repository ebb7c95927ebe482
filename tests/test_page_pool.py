"""Reference-counted pages against a plain dictionary of counts."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from page_cases import check_pool

from srtrl.engine.page_pool import PagePool, Pages


@given(
    num_pages=st.integers(1, 12),
    actions=st.lists(st.tuples(st.sampled_from(["take", "share", "drop"]), st.integers(0, 5), st.integers(1, 4))),
)
def test_any_sequence_of_operations_keeps_the_pool_consistent(
    num_pages: int, actions: list[tuple[str, int, int]]
) -> None:
    pool = PagePool(num_pages, page_size=4)
    holders: list[Pages] = []
    for action, which, count in actions:
        if action == "take" and count > pool.num_free:
            with pytest.raises(AssertionError, match="pages wanted"):
                pool.allocate(count)
        elif action == "take":
            holders.append(pool.allocate(count))
            assert len(set(holders[-1].tolist())) == count
        elif holders and action == "share":
            pool.share(holders[which % len(holders)])
            holders.append(holders[which % len(holders)].copy())
        elif holders:
            pool.release(holders.pop(which % len(holders)))
        check_pool(pool, holders)
        counts = Counter(page for pages in holders for page in pages.tolist())
        assert pool.num_used == len(counts)
        held = np.array(sorted(counts), np.int32)
        assert pool.num_unshared(held) == sum(count == 1 for count in counts.values())


def test_lost_and_stolen_pages_are_seen_and_free_ones_neither_released_nor_shared() -> None:
    pool = PagePool(2, page_size=4)
    pages = pool.allocate(1)
    for holders, message in (([], "1 references and 0 holders"), ([pages, pages], "1 references and 2 holders")):
        with pytest.raises(AssertionError, match=message):
            check_pool(pool, holders)
    pool.release(pages)
    with pytest.raises(AssertionError, match="released more often"):
        pool.release(pages)
    with pytest.raises(AssertionError, match="cannot be shared"):
        pool.share(pages)
    assert [pool.pages_for(count) for count in (0, 1, 4, 5, 8, 9)] == [0, 1, 1, 2, 2, 3], "rounded up"
    assert (pool.num_free, pool.num_used) == (2, 0)
