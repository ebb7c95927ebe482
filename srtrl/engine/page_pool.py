"""Reference-counted pages of the KV cache: pure accounting, no tensors.

A page holds `page_size` token positions of one or more sequences. A page that several hold is read-only: whoever wants
to write to it takes a copy first (the caller copies the tensors; see `Scheduler`).
"""

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np


class PagePool:
    """Free list and reference counts of `num_pages` pages."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        assert page_size > 0
        self.page_size = page_size
        self._set_pages(num_pages)

    def resize(self, num_pages: int) -> None:
        """Have so many pages from now on; none may be in use."""
        assert self.num_used == 0
        if num_pages != self.num_pages:
            self._set_pages(num_pages)

    def _set_pages(self, num_pages: int) -> None:
        assert num_pages > 0
        self.num_pages = num_pages
        self._num_references = np.zeros(num_pages, dtype=np.int64)
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Pages that somebody holds."""
        return self.num_pages - len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that `num_tokens` positions need."""
        return -(-num_tokens // self.page_size)

    def allocate(self, count: int) -> list[int] | None:
        """Return `count` pages with one reference each, or None (and no page) where fewer are free."""
        if count > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(count)]
        self._num_references[pages] = 1
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """Add one reference to each page."""
        for page in pages:
            assert self._num_references[page] > 0, f"page {page} is free and cannot be shared"
            self._num_references[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Drop one reference of each page; a page without references is free again."""
        for page in pages:
            assert self._num_references[page] > 0, f"page {page} is released more often than it was taken"
            self._num_references[page] -= 1
            if self._num_references[page] == 0:
                self._free.append(page)

    def is_shared(self, page: int) -> bool:
        """Whether more than one holder reads this page, so that a writer must copy it first."""
        return bool(self._num_references[page] > 1)

    def check_integrity(self, holders: Iterable[Sequence[int]]) -> None:
        """Assert that the references are exactly those of `holders` (the page lists of all that hold pages)."""
        held: Counter[int] = Counter()
        for pages in holders:
            assert len(set(pages)) == len(pages), f"a holder has a page twice: {pages}"
            held.update(pages)
        free = set(self._free)
        assert len(free) == len(self._free), "a page is on the free list twice"
        for page in range(self.num_pages):
            references = int(self._num_references[page])
            assert references == held[page], f"page {page} has {references} references and {held[page]} holders"
            assert (references == 0) == (page in free), f"page {page} with {references} references: wrong free list"
