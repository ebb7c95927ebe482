"""What the scheduler moves around: the pages of a prompt, the samples that decode from them, and a step's work."""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from srtrl.types import Request


@dataclass(slots=True, eq=False)
class PageHolder:
    """Something whose KV lies in pages: position p is in `page_ids[p // page_size]`."""

    token_ids: list[int]
    page_ids: list[int] = field(default_factory=list)
    page_table: npt.NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    """`page_ids` once more, as the array that the attention plan wants."""
    num_computed: int = 0
    """Positions whose KV is in the pages: always a prefix."""

    def set_pages(self, page_ids: SequenceOf[int]) -> None:
        """Hold these pages instead of the present ones (references are the caller's business)."""
        self.page_ids = list(page_ids)
        self.page_table = np.array(self.page_ids, dtype=np.int32)

    def add_pages(self, page_ids: SequenceOf[int]) -> None:
        """Hold these pages, too, behind the present ones (the table is not made anew: it may be long)."""
        self.page_ids = [*self.page_ids, *page_ids]
        self.page_table = np.concatenate([self.page_table, np.array(page_ids, dtype=np.int32)])

    def cut_pages(self, num_pages: int) -> list[int]:
        """Hold the first `num_pages` only; returns the others, to be released."""
        cut = self.page_ids[num_pages:]
        self.page_ids = self.page_ids[:num_pages]
        self.page_table = self.page_table[:num_pages]
        return cut

    def drop_pages(self) -> list[int]:
        """Hold no page and no KV any more; returns the pages, to be released or handed on."""
        page_ids = self.page_ids
        self.set_pages([])
        self.num_computed = 0
        return page_ids


@dataclass(slots=True, eq=False)
class PromptPages(PageHolder):
    """KV of one prompt but for its last token, shared by the group's samples.

    The last prompt token is each sample's own first row: it gives the first sampled token, on the same code path as
    every later one.
    """

    num_users: int = 0
    """Unfinished samples of this prompt, waiting ones included."""

    @property
    def num_missing(self) -> int:
        """Positions whose KV is still to be computed."""
        return len(self.token_ids) - 1 - self.num_computed


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence(PageHolder):
    """One sample on its way. `token_ids` holds the prompt and the generated tokens.

    The last token is the root of the next draft tree: its KV is computed together with the tree's.
    """

    sequence_id: int
    request: Request
    prompt: PromptPages
    rollout_logprobs: list[float] = field(default_factory=list)
    has_started: bool = False
    """Whether the sample has its share of the prompt's pages (not while it waits, nor after a preemption)."""
    admission: int = -1
    """Counts admissions: the highest is the first to be preempted."""

    @property
    def is_run_ahead(self) -> bool:
        """Whether the sample is decoded for the sake of later drafts only."""
        return self.request.is_run_ahead

    @property
    def num_missing(self) -> int:
        """Positions before the root whose KV is still to be computed: of a preempted sample, or a new run-ahead's."""
        return len(self.token_ids) - 1 - self.num_computed

    @property
    def num_generated(self) -> int:
        """Number of generated tokens."""
        return len(self.rollout_logprobs)

    @property
    def generated_token_ids(self) -> list[int]:
        """Generated tokens only."""
        return self.token_ids[len(self.request.prompt_token_ids) :]

    def last_generated(self, num_tokens: int) -> list[int]:
        """The last generated tokens, `num_tokens` of them where there are as many."""
        return self.token_ids[max(len(self.request.prompt_token_ids), len(self.token_ids) - num_tokens) :]

    @property
    def num_remaining(self) -> int:
        """Tokens it may still generate; at least 1 while it is live."""
        return self.request.sampling.max_new_tokens - self.num_generated


@dataclass(slots=True, frozen=True)
class PrefillChunk:
    """Positions `start` to `start + count` of a prompt (or of a preempted sample) whose KV is computed in this step."""

    holder: PageHolder
    start: int
    count: int


@dataclass(slots=True)
class ScheduledStep:
    """The work of one decode step."""

    prefills: list[PrefillChunk] = field(default_factory=list)
    decodes: list[Sequence] = field(default_factory=list)
    """Samples whose root is computed and that sample at least one token; run-aheads come after all primaries."""
    num_primaries: int = 0
    """How many of `decodes`, from the first, are primaries."""
    page_copies: list[tuple[int, int]] = field(default_factory=list)
    """(source, target) pages to copy before the forward pass, all sources read before any target is written."""
    admitted_run_aheads: list[Sequence] = field(default_factory=list)
    """Run-aheads that took a slot in this step: the drafter hears of them now, not while they wait."""

    @property
    def num_prefill_tokens(self) -> int:
        """Rows of the step that are neither roots nor draft nodes."""
        return sum(chunk.count for chunk in self.prefills)
