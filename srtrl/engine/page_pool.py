"""Reference-counted pages of the KV cache: pure accounting, no tensors.

A page holds `page_size` token positions of one or more sequences. A page that several hold is full and only read.
"""

import numpy as np
import numpy.typing as npt

Pages = npt.NDArray[np.int32]


class PagePool:
    """Free list and reference counts of `num_pages` pages."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        assert page_size > 0
        assert num_pages > 0
        self.page_size = page_size
        self.num_pages = num_pages
        self._num_references = np.zeros(num_pages, np.int64)
        self._free = np.arange(num_pages - 1, -1, -1, dtype=np.int32)
        """A stack: the first `num_free` entries."""
        self.num_free = num_pages
        """Pages without a reference."""

    @property
    def num_used(self) -> int:
        """Pages with a reference."""
        return self.num_pages - self.num_free

    def pages_for(self, num_tokens: int) -> int:
        """Pages that `num_tokens` positions need."""
        return -(-num_tokens // self.page_size)

    def allocate(self, count: int) -> Pages:
        """Return `count` pages with one reference each; there must be as many free ones."""
        assert count <= self.num_free, f"{count} pages wanted, {self.num_free} free"
        self.num_free -= count
        pages = self._free[self.num_free : self.num_free + count][::-1].copy()
        self._num_references[pages] = 1
        return pages

    def share(self, pages: Pages) -> None:
        """Add one reference to each page."""
        assert (self._num_references[pages] > 0).all(), "a free page cannot be shared"
        self._num_references[pages] += 1

    def release(self, pages: Pages) -> None:
        """Drop one reference of each page, all different; a page without references is free again."""
        assert (self._num_references[pages] > 0).all(), "a page is released more often than it was taken"
        self._num_references[pages] -= 1
        freed = pages[self._num_references[pages] == 0]
        self._free[self.num_free : self.num_free + len(freed)] = freed
        self.num_free += len(freed)

    def num_unshared(self, pages: Pages) -> int:
        """Number of the pages that have one reference only."""
        return int((self._num_references[pages] == 1).sum())
