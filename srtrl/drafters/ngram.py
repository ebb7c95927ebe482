"""Prompt look-up: the tokens after the latest earlier occurrence of the sequence's last few tokens in its own text.

As in A. Saxena, "Prompt Lookup Decoding" (2023), but the latest occurrence counts, and the response is searched too.
"""

from collections.abc import Iterable, Sequence
from typing import Self

import numpy as np
from pydantic import Field, model_validator

from srtrl.drafters.base import DrafterBase, Int32Array, Int64Array
from srtrl.drafters.draft_tree import EMPTY_TREE, DraftTree, DraftTrees
from srtrl.recipe.schema import Section
from srtrl.types import Completion, Request


class NgramOptions(Section):
    """Options of the drafter `ngram`."""

    max_ngram: int = Field(default=4, ge=1)
    """Longest n-gram: the number of last tokens that are looked up in the text before."""
    min_ngram: int = Field(default=2, ge=1)
    """Shortest n-gram that makes a draft."""
    max_tokens: int = Field(default=10, ge=1)
    """Maximum number of tokens of a draft."""
    acceptance: float = Field(default=0.6, gt=0, lt=1)
    """Estimated chance that a drafted token is accepted, after an n-gram of `max_ngram` tokens.

    After one that is m tokens shorter it is `acceptance` / (1 + m / 4). A node's score is the product along its path.
    """

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.min_ngram > self.max_ngram:
            raise ValueError(f"min_ngram is {self.min_ngram}, expected at most max_ngram ({self.max_ngram})")
        return self


class Drafter(DrafterBase):
    """See `srtrl.drafters.base.DrafterBase`."""

    Options = NgramOptions
    options: NgramOptions

    def __init__(self, options: Section | None = None) -> None:
        super().__init__(options)
        self._texts: dict[int, list[int]] = {}
        """Of each live slot: prompt and response."""
        self._positions: dict[int, dict[tuple[int, ...], int]] = {}
        """Of each live slot: the position after the latest occurrence of each n-gram that a token followed."""

    def start(self, slots: Int64Array, requests: Sequence[Request]) -> None:
        """Index the prompts."""
        for slot, request in zip(slots.tolist(), requests, strict=True):
            self._texts[slot], self._positions[slot] = [], {}
            self._append(slot, request.prompt_token_ids)

    def propose(self, slots: Int64Array, max_nodes: Int64Array, min_score: float) -> DraftTrees:
        """Return a chain for each slot whose ending has occurred before."""
        return DraftTrees.of(
            self._chain(slot, min(limit, self.options.max_tokens))
            for slot, limit in zip(slots.tolist(), max_nodes.tolist(), strict=True)
        )

    def observe(self, slots: Int64Array, token_ids: Int32Array, offsets: Int64Array) -> None:
        """Append the committed tokens."""
        for row, slot in enumerate(slots.tolist()):
            self._append(slot, token_ids[offsets[row] : offsets[row + 1]].tolist())

    def finish(self, slots: Sequence[int], completions: Sequence[Completion | None]) -> None:
        """Forget the samples."""
        for slot in slots:
            del self._texts[slot], self._positions[slot]

    def _append(self, slot: int, token_ids: Iterable[int]) -> None:
        text, positions = self._texts[slot], self._positions[slot]
        for token in token_ids:
            for n in range(self.options.min_ngram, min(self.options.max_ngram, len(text)) + 1):
                positions[tuple(text[-n:])] = len(text)
            text.append(token)

    def _chain(self, slot: int, max_tokens: int) -> DraftTree:
        """The tokens after the latest occurrence of the longest ending that has occurred before; else an empty tree."""
        text, positions = self._texts[slot], self._positions[slot]
        lengths = range(min(self.options.max_ngram, len(text)), self.options.min_ngram - 1, -1)
        n = next((n for n in lengths if tuple(text[-n:]) in positions), None)
        if n is None:
            return EMPTY_TREE
        position = positions[tuple(text[-n:])]
        tokens = text[position : position + max_tokens]
        acceptance = self.options.acceptance / (1 + (self.options.max_ngram - n) / 4)
        return DraftTree(
            token_ids=np.array(tokens, np.int32),
            parents=np.arange(-1, len(tokens) - 1, dtype=np.int32),
            scores=(acceptance ** np.arange(1, len(tokens) + 1)).astype(np.float32),
        )
