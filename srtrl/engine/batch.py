"""The samples that have a slot, as one struct of arrays: each stage of a decode step is one call over its rows.

A Python object for a sample (`Sample`) exists while it waits, and beside its slot for what a step does not touch. All
that changes from step to step is in the arrays.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from srtrl.drafters.draft_tree import ranges
from srtrl.engine.page_pool import PagePool
from srtrl.engine.step_inputs import BatchArrays, Int32Array, Int64Array, PrefillChunk, StepSize
from srtrl.types import Request

NO_SLOT = -1
NO_TOKEN = -1
"""Padding of end tokens."""


@dataclass(slots=True, eq=False)
class PromptPages:
    """KV of the full pages of one prompt, shared by the samples of a group.

    Its other positions are each sample's own. The last prompt token is a sample's first root: it gives the first
    sampled token, on the same code path as every later one.
    """

    token_ids: Int32Array
    page_ids: Int32Array = field(default_factory=lambda: np.empty(0, np.int32))
    """Empty until a sample has computed them, and after they were evicted."""
    num_users: int = 0
    """Unfinished samples of this prompt, waiting ones included."""


@dataclass(slots=True, eq=False)
class Sample:
    """One request, from when it is queued until it is finished."""

    request: Request
    prompt: PromptPages
    slot: int = NO_SLOT
    """Row of the batch; `NO_SLOT` while it waits."""
    admission: int = -1
    """Counts admissions; of the running samples the one with the highest is preempted first."""
    token_ids: Int32Array = field(default_factory=lambda: np.empty(0, np.int32))
    """Without a slot: the response so far."""
    logprobs: npt.NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))
    """Their log-probs."""
    page_ids: Int32Array = field(default_factory=lambda: np.empty(0, np.int32))
    """Pages that a paused sample keeps without a slot, until others need them."""
    num_computed: int = 0
    """Positions whose KV is in these pages."""
    extensions: list[tuple[int, int]] = field(default_factory=list)
    """Start and stop of each part of the response that was not sampled."""
    is_run_ahead: bool = False
    """Whether it belongs to the engine's run-ahead, and not to this rollout (a primary)."""

    @property
    def turn_start(self) -> int:
        """Index in the response of the first sampled token of the current turn."""
        return self.extensions[-1][1] if self.extensions else 0


@dataclass(slots=True)
class ScheduledStep:
    """The work of one decode step."""

    slots: Int64Array = field(default_factory=lambda: np.empty(0, np.int64))
    """[B], those that sample at least one token; run-aheads come after all primaries."""
    num_primaries: int = 0
    """The first slots: primaries."""
    chunks: list[PrefillChunk] = field(default_factory=list)
    ended: dict[int, Sample] = field(default_factory=dict)
    """Samples that were preempted or dropped, by the slot that they had; it may be in `started` again."""
    started: list[Sample] = field(default_factory=list)
    """Samples that took a slot."""
    is_run_ahead: bool = False
    """Whether no primary has a part in it."""

    @property
    def num_prompt_rows(self) -> int:
        """Rows of all chunks."""
        return sum(len(chunk.token_ids) for chunk in self.chunks)

    def end(self, sample: Sample) -> None:
        """A sample loses its slot. If it started in this step, undo the start."""
        if sample in self.started:
            self.started.remove(sample)
        else:
            self.ended[sample.slot] = sample


class Batch:
    """Arrays with a row for each slot."""

    def __init__(self, num_slots: int, max_tokens: int, pool: PagePool, max_draft_nodes: int) -> None:
        """Empty slots for sequences of up to `max_tokens`, and `max_draft_nodes` more while they are verified."""
        max_pages = pool.pages_for(max_tokens + max_draft_nodes + 1)

        def array(dtype: Any, *shape: int) -> npt.NDArray[Any]:
            return np.zeros((num_slots, *shape), dtype)

        self.num_slots = num_slots
        self.pool = pool
        self.samples: list[Sample | None] = [None] * num_slots
        self.token_ids: Int32Array = array(np.int32, max_tokens)
        """[slots, max_tokens], prompt and response."""
        self.logprobs: npt.NDArray[np.float32] = array(np.float32, max_tokens)
        """[slots, max_tokens], of the response: token i of it at index i."""
        self.num_tokens: Int64Array = array(np.int64)
        """[slots], prompt and generated tokens. The last one is the root of the next draft tree: its KV is computed
        together with the tree's."""
        self.num_prompt_tokens: Int64Array = array(np.int64)
        self.num_computed: Int64Array = array(np.int64)
        """[slots], positions whose KV is in the pages: always a prefix."""
        self.max_tokens: Int64Array = array(np.int64)
        """[slots], at this number of tokens the sample ends."""
        self.rng_keys: npt.NDArray[np.uint64] = array(np.uint64)
        self.temperatures: npt.NDArray[np.float32] = array(np.float32)
        self.top_k: Int64Array = array(np.int64)
        self.top_p: npt.NDArray[np.float64] = array(np.float64)
        self.has_stop_strings: npt.NDArray[np.bool_] = array(np.bool_)
        self.end_tokens: Int32Array = array(np.int32, 1)
        """[slots, maximum number of end tokens], padded with `NO_TOKEN`."""
        self.page_table: Int32Array = array(np.int32, max_pages)
        """[slots, max_pages], pages by position."""
        self.num_pages: Int64Array = array(np.int64)
        """[slots], pages that are held."""
        self.is_decoding: npt.NDArray[np.bool_] = array(np.bool_)
        """[slots], whether only the root's KV is missing, so that the next step samples."""
        self.is_run_ahead: npt.NDArray[np.bool_] = array(np.bool_)
        self.admissions: Int64Array = array(np.int64)
        """[slots], see `Sample.admission`."""
        self._free = list(range(num_slots - 1, -1, -1))

    @property
    def arrays(self) -> BatchArrays:
        """The arrays that kernels read and write."""
        return BatchArrays._make(getattr(self, name) for name in BatchArrays._fields)

    @property
    def num_free(self) -> int:
        """Slots without a sample."""
        return len(self._free)

    def pages(self, slot: int) -> Int32Array:
        """The pages that a slot's sample holds, by position (a view)."""
        return self.page_table[slot, : self.num_pages[slot]]

    def set_pages(self, slot: int, page_ids: Int32Array) -> None:
        """Let a slot's sample hold these pages (references are the caller's business)."""
        self.num_pages[slot] = len(page_ids)
        self.page_table[slot, : len(page_ids)] = page_ids

    def missing_pages(self, slots: Int64Array, num_positions: Int64Array) -> Int64Array:
        """[B], pages that each of the slots lacks for its number of positions; negative where it holds more."""
        missing: Int64Array = -(-num_positions // self.pool.page_size) - self.num_pages[slots]
        return missing

    def grow(self, slots: Int64Array, counts: Int64Array) -> None:
        """Give each of the slots a number of pages more; the pool must have them."""
        pages = self.pool.allocate(int(counts.sum()))
        self.page_table[np.repeat(slots, counts), ranges(self.num_pages[slots], counts)] = pages
        self.num_pages[slots] += counts

    def trim(self) -> None:
        """Give back the pages after the root of each decoding sample: rejected drafts leave nothing."""
        slots = np.flatnonzero(self.is_decoding)
        extra = np.maximum(-self.missing_pages(slots, self.num_tokens[slots]), 0)
        self.num_pages[slots] -= extra
        self.pool.release(self.page_table[np.repeat(slots, extra), ranges(self.num_pages[slots], extra)])

    def chunk(self, slot: int, max_tokens: int) -> PrefillChunk:
        """The next positions of a sample that are computed before it decodes: at most `max_tokens`, before its root."""
        start = int(self.num_computed[slot])
        stop = min(start + max_tokens, int(self.num_tokens[slot]) - 1)
        tokens = self.token_ids[slot]
        return PrefillChunk(tokens[start:stop], start, self.pages(slot), int(tokens[stop]))

    def step_size(self, step: ScheduledStep, num_nodes: Int64Array) -> StepSize:
        """The size of a step that verifies this many draft nodes of each of its slots."""
        num_chunk_rows = np.array([len(chunk.token_ids) for chunk in step.chunks], np.int64)
        starts = np.array([chunk.start for chunk in step.chunks], np.int64)
        return StepSize(
            rows_per_sequence=np.concatenate([1 + num_nodes, num_chunk_rows]),
            num_keys=np.concatenate([self.num_tokens[step.slots] + num_nodes, starts + num_chunk_rows]),
            num_sampled=len(step.slots) + int(num_nodes.sum()),
            page_size=self.pool.page_size,
        )

    def put(self, sample: Sample) -> None:
        """Give a sample a free slot, with the tokens that it has so far; without pages."""
        slot = sample.slot = self._free.pop()
        request, sampling = sample.request, sample.request.sampling
        num_prompt, num_generated = len(sample.prompt.token_ids), len(sample.token_ids)
        self.samples[slot] = sample
        self.admissions[slot] = sample.admission
        self.token_ids[slot, :num_prompt] = sample.prompt.token_ids
        self.token_ids[slot, num_prompt : num_prompt + num_generated] = sample.token_ids
        self.logprobs[slot, :num_generated] = sample.logprobs
        self.num_tokens[slot] = num_prompt + num_generated
        self.num_prompt_tokens[slot] = num_prompt
        self.num_computed[slot] = 0
        self.max_tokens[slot] = num_prompt + sampling.max_new_tokens
        self.rng_keys[slot] = request.rng_key
        self.temperatures[slot] = sampling.temperature
        self.top_k[slot], self.top_p[slot] = sampling.top_k, sampling.top_p
        self.has_stop_strings[slot] = bool(sampling.stop_strings)
        missing = len(sampling.end_token_ids) - self.end_tokens.shape[1]
        if missing > 0:
            self.end_tokens = np.pad(self.end_tokens, ((0, 0), (0, missing)), constant_values=NO_TOKEN)
        self.end_tokens[slot] = NO_TOKEN
        self.end_tokens[slot, : len(sampling.end_token_ids)] = sampling.end_token_ids
        self.num_pages[slot] = 0
        if len(sample.page_ids):  # it was paused
            self.set_pages(slot, sample.page_ids)
            self.num_computed[slot] = sample.num_computed
            sample.page_ids = sample.page_ids[:0]
        self.is_decoding[slot] = False
        self.is_run_ahead[slot] = sample.is_run_ahead

    def take_out(self, sample: Sample) -> None:
        """Free a sample's slot and the pages that it does not keep; its response so far stays with it."""
        slot = sample.slot
        sample.token_ids = self.generated(slot).copy()
        sample.logprobs = self.logprobs[slot, : len(sample.token_ids)].copy()
        self.pool.release(self.pages(slot)[len(sample.page_ids) :])
        self.samples[slot] = None
        self.is_decoding[slot] = False
        self.num_pages[slot] = 0
        sample.slot = NO_SLOT
        self._free.append(slot)

    def generated(self, slot: int) -> Int32Array:
        """Tokens of the response so far (a view)."""
        return self.token_ids[slot, self.num_prompt_tokens[slot] : self.num_tokens[slot]]
