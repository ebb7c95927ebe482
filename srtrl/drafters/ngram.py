"""Prompt look-up: the tokens after the latest earlier occurrence of the sequence's last few tokens in its own text.

As in A. Saxena, "Prompt Lookup Decoding" (2023), but the latest occurrence counts, and the response is
searched too, among the newest places of `srtrl.drafters.texts`.
"""

from collections.abc import Sequence
from typing import Self

import numpy as np
from pydantic import Field, model_validator

from srtrl.drafters.base import DrafterBase, Int32Array, Int64Array, end_to_end
from srtrl.drafters.draft_tree import EMPTY_TREE, DraftTree, DraftTrees
from srtrl.drafters.texts import START_TOKEN, TextStore
from srtrl.recipe.schema import Section
from srtrl.types import Request


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
        self._store = TextStore()
        self._num_texts = 0

    def start(self, slots: Int64Array, requests: Sequence[Request]) -> None:
        """Begin texts of their own with the prompts."""
        self._store.start(slots, list(range(self._num_texts, self._num_texts + len(slots))))
        self._num_texts += len(slots)
        self._store.extend(slots, *end_to_end([[START_TOKEN, *request.prompt_token_ids] for request in requests]))

    def propose(self, slots: Int64Array, max_nodes: Int64Array, min_score: float) -> DraftTrees:
        """Return a chain for each slot whose ending has occurred before."""
        return DraftTrees.of(
            self._chain(slot, min(limit, self.options.max_tokens))
            for slot, limit in zip(slots.tolist(), max_nodes.tolist(), strict=True)
        )

    def observe(self, slots: Int64Array, token_ids: Int32Array, offsets: Int64Array) -> None:
        """Append the committed tokens."""
        self._store.extend(slots, token_ids, offsets)

    def end_step(self) -> None:
        """Forget all texts."""
        self._store.clear()

    def _chain(self, slot: int, max_tokens: int) -> DraftTree:
        """The tokens after the latest occurrence of the longest ending that has occurred before; else an empty tree."""
        places, matches = self._store.find(slot)
        matches = matches.clip(max=self.options.max_ngram)
        n = int(matches.max(initial=0))
        if n < self.options.min_ngram:
            return EMPTY_TREE
        positions = self._store.positions(slot)
        first = int(np.searchsorted(positions, places[matches == n].max()))
        tokens = self._store.arrays.tokens[positions[first : first + max_tokens]]
        acceptance = self.options.acceptance / (1 + (self.options.max_ngram - n) / 4)
        return DraftTree(
            token_ids=tokens,
            parents=np.arange(-1, len(tokens) - 1, dtype=np.int32),
            scores=(acceptance ** np.arange(1, len(tokens) + 1)).astype(np.float32),
        )
