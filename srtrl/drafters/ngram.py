"""Prompt look-up: what followed the sequence's last few tokens when they last occurred in its own text.

As in A. Saxena, "Prompt Lookup Decoding" (2023), but the latest occurrence counts, and the response is searched too.
"""

from collections.abc import Sequence
from typing import Self

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from srtrl.drafters.base import DrafterBase
from srtrl.drafters.draft_tree import DraftTrees
from srtrl.drafters.ngram_kernel import EMPTY, WIDTH, append_tokens, index_text, look_up
from srtrl.recipe_base import Section
from srtrl.types import Completion, Request


class NgramOptions(Section):
    """Options of the drafter `ngram`."""

    max_ngram: int = Field(default=4, ge=1, lt=WIDTH)
    """Longest ending of the text that is looked for."""
    min_ngram: int = Field(default=2, ge=1, lt=WIDTH)
    """Shortest ending that is worth a draft."""
    max_tokens: int = Field(default=10, ge=1)
    """Longest draft."""
    acceptance: float = Field(default=0.6, gt=0, lt=1)
    """Guessed chance of each drafted token behind an ending of `max_ngram` tokens.

    Behind one that is m tokens shorter it is `acceptance` / (1 + m / 4). A node's score is the product along its path.
    """

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.min_ngram > self.max_ngram:
            raise ValueError(f"min_ngram is {self.min_ngram}, expected at most max_ngram ({self.max_ngram})")
        return self


class Drafter(DrafterBase):
    """See `srtrl.drafters.base.DrafterBase`. Texts of the decoding samples are rows of one array, so is their index."""

    Options = NgramOptions
    options: NgramOptions
    has_kernels = True

    def __init__(self, options: Section | None = None) -> None:
        super().__init__(options)
        short_by = np.arange(self.options.max_ngram, -1, -1)
        self._acceptance = (self.options.acceptance / (1 + short_by / 4)).astype(np.float32)
        self._acceptance[: self.options.min_ngram] = 0
        self._waiting: dict[int, tuple[int, ...]] = {}  # prompts of samples that have not drafted yet
        self._rows: dict[int, int] = {}
        self._free: list[int] = []
        self._lengths = np.zeros(0, np.int64)
        self._texts = np.empty((0, 0), np.int32)
        self._tables = np.empty((0, 0), np.int64)
        self._resize(num_rows=1, capacity=64)

    def start(self, sequence_id: int, request: Request) -> None:
        """Remember the prompt; it takes memory for its index with its first draft."""
        self._waiting[sequence_id] = request.prompt_token_ids

    def propose(self, sequence_ids: Sequence[int], max_nodes: Sequence[int]) -> DraftTrees:
        """Return a chain for each sequence whose ending has occurred before."""
        self._admit(sequence_ids)
        most = np.minimum(np.asarray(max_nodes, np.int64), self.options.max_tokens)
        token_ids = np.empty(int(most.sum()), np.int32)
        parents = np.empty(len(token_ids), np.int32)
        scores = np.empty(len(token_ids), np.float32)
        offsets = np.empty(len(sequence_ids) + 1, np.int64)
        rows = self._rows_of(sequence_ids)
        look_up(
            self._texts, self._tables, self._lengths, rows, most, self._acceptance, token_ids, parents, scores, offsets
        )
        end = int(offsets[-1])
        return DraftTrees(token_ids=token_ids[:end], parents=parents[:end], scores=scores[:end], offsets=offsets)

    def observe(self, sequence_ids: Sequence[int], token_ids: Sequence[Sequence[int]]) -> None:
        """Append what was committed."""
        self._admit(sequence_ids)
        self._append(self._rows_of(sequence_ids), token_ids)

    def finish(self, sequence_id: int, completion: Completion | None) -> None:
        """Forget the sample."""
        self._waiting.pop(sequence_id, None)
        row = self._rows.pop(sequence_id, None)
        if row is not None:
            self._lengths[row] = 0
            self._tables[row] = EMPTY
            self._free.append(row)

    def _rows_of(self, sequence_ids: Sequence[int]) -> npt.NDArray[np.int64]:
        return np.array([self._rows[sequence_id] for sequence_id in sequence_ids], np.int64)

    def _admit(self, sequence_ids: Sequence[int]) -> None:
        """Give rows to those that have none, and index their prompts."""
        new = [sequence_id for sequence_id in sequence_ids if sequence_id in self._waiting]
        if not new:
            return
        while len(self._free) < len(new):
            self._resize(num_rows=2 * len(self._lengths), capacity=self._texts.shape[1])
        prompts = [self._waiting.pop(sequence_id) for sequence_id in new]
        self._rows.update((sequence_id, self._free.pop()) for sequence_id in new)
        self._append(self._rows_of(new), prompts)

    def _append(self, rows: npt.NDArray[np.int64], token_ids: Sequence[Sequence[int]]) -> None:
        counts = [len(tokens) for tokens in token_ids]
        offsets = np.cumsum([0, *counts])
        longest = int((self._lengths[rows] + counts).max(initial=0))
        if longest > self._texts.shape[1]:
            self._resize(num_rows=len(self._lengths), capacity=max(longest, 2 * self._texts.shape[1]))
        flat = np.fromiter((token for tokens in token_ids for token in tokens), np.int32, int(offsets[-1]))
        shortest, longest_ngram = self.options.min_ngram, self.options.max_ngram
        append_tokens(self._texts, self._tables, self._lengths, rows, flat, offsets, shortest, longest_ngram)

    def _resize(self, *, num_rows: int, capacity: int) -> None:
        """More rows, or longer ones: the tables are then made anew from the texts."""
        shortest, longest = self.options.min_ngram, self.options.max_ngram
        num_slots = 1 << (2 * capacity * (longest - shortest + 1)).bit_length()
        texts, tables, lengths = self._texts, self._tables, self._lengths
        num_old = len(lengths)
        self._texts = np.zeros((num_rows, capacity), np.int32)
        self._texts[:num_old, : texts.shape[1]] = texts
        self._lengths = np.zeros(num_rows, np.int64)
        self._lengths[:num_old] = lengths
        self._tables = np.full((num_rows, num_slots), EMPTY, np.int64)
        if tables.shape[1] == num_slots:
            self._tables[:num_old] = tables
        else:
            for row in self._rows.values():
                index_text(self._texts[row], self._tables[row], 0, int(lengths[row]), shortest, longest)
        self._free += range(num_rows - 1, num_old - 1, -1)
