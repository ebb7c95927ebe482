"""A drafter with a pretrained attention head, whose entries lie in pages of the same numbers as the policy's KV.

So entries are shared, kept between turns and given up with the KV of their positions. That of position t needs the
token t + 1: a prompt's shared pages end before its last token, a chunk of a prompt comes with the token after it, and
the last token of a turn is computed together with its observation. While the head guesses, its entries are made of its
own states. Those of accepted guesses are computed again, from the policy's: a moved one would be wrong, which no token
shows, only acceptance.

Letters as in `attention_head.py`; C sequences that are drafted for, P pages of a page table.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from srtrl.engine.runner import PAGE_SIZE, Runner, page_bytes
from srtrl.engine.step_inputs import Int32Array, Int64Array
from srtrl.features.attention_head import AttentionHead, RotaryPositions
from srtrl.features.draft_head import draft_chains
from srtrl.features.head_drafter import HeadDrafter
from srtrl.model.attention import AttentionPlan, copy_to_device
from srtrl.model.paged_attention import KVCache, PagedPlan, TreeRows


class AttentionGuesses:
    """The guesses of an attention head, and its entries."""

    token_major = False
    """Layout of its entries, that of the runner's own cache; see `KVCache`."""

    def __init__(self, head: AttentionHead, runner: Runner, *, k: int, slots: int) -> None:
        """For up to `slots` sequences; see `CpuGuesses`."""
        assert k <= runner.page_size, "the guesses of a sequence have one page of their own"
        self.head, self.k, self.slots, self._runner = head, k, slots, runner
        self.token_ids, self.device = head.token_ids, head.norm.device
        self.cache: KVCache | None = None
        """Of one layer, with the pages of the runner and after them one for the guesses of each sequence."""
        self._rows: Int64Array = np.empty(0, np.int64)

    def begin(self) -> None:
        """Take over the policy's weights and the number of pages."""
        self.head.refresh(self._runner.model)
        num_pages = self._runner.num_pages + self.slots
        if self.cache is None or self.cache.key_pages.shape[1] != num_pages:
            layer, model = self.head.config.layer, self._runner.model
            self.cache = KVCache(
                num_layers=1,
                num_pages=num_pages,
                page_size=self._runner.page_size,
                num_kv_heads=layer.num_key_value_heads,
                head_dim=layer.head_dim,
                dtype=model.dtype,
                device=self.device,
                token_major=self.token_major,
            )

    def add(self, rows: Int64Array, next_tokens: Int32Array) -> None:
        """Compute the entries of rows of the last step [N], from the tokens after them [N]."""
        inputs, page_size = self._runner.inputs, self._runner.page_size
        positions = inputs.positions[rows].astype(np.int64)
        pages, offsets = inputs.page_tables[inputs.row_tables[rows], positions // page_size], positions % page_size
        with torch.inference_mode():
            states = self.head.fuse(self._streams(rows))
            rotary = RotaryPositions(self._on_device(positions), int(positions.max()) + 1)
            keys, values = self.head.keys_values(states, self._on_device(next_tokens), rotary)
            self._write(self._on_device(pages), self._on_device(offsets), keys, values)

    def launch(self, rows: Int64Array, *noise: Any) -> bool:
        """See `CpuGuesses`."""
        self._rows = rows
        self._chains = draft_chains(self, self._streams(rows), *noise, k=self.k)
        return True

    def wait(self) -> tuple[Int32Array, npt.NDArray[np.float32]]:
        """See `CpuGuesses`."""
        return self._chains

    def unroll(self, streams: Tensor, last: Tensor, k: int, take_best: Callable[[int, Tensor], Tensor]) -> None:
        """See `DraftHead.unroll`: guess after the rows of `launch`, from the policy's streams [C, A D] there."""
        inputs, page_size = self._runner.inputs, self._runner.page_size
        positions = inputs.positions[self._rows]
        pages = np.pad(inputs.page_tables[inputs.row_tables[self._rows]], ((0, 0), (0, 1)))  # [C, P]
        chains = np.arange(len(pages))
        pages[chains, positions // page_size + 1] = self._runner.num_pages + chains
        states = self.head.fuse(streams)
        for depth in range(k):
            plan = self._plan(pages, positions + np.int32(depth))
            states, logits = self.head(states, last, plan)
            last = take_best(depth, logits)

    def _streams(self, rows: Int64Array) -> Tensor:
        """What the head reads of rows of the last step, [N, A D]."""
        return self._runner.states[self._on_device(rows)]

    def _plan(self, pages: Int32Array, positions: Int32Array) -> AttentionPlan:
        """The plan of one entry of each sequence, at `positions` [C] of its `pages` [C, P]; it is written, too."""
        assert self.cache is not None
        arrays = entry_rows(pages, positions, self.cache.page_size)
        return PagedPlan(self.cache, TreeRows(**{name: torch.from_numpy(array) for name, array in arrays.items()}))

    def _write(self, pages: Tensor, offsets: Tensor, keys: Tensor, values: Tensor) -> None:
        assert self.cache is not None, "`begin` comes first"
        cached = self.cache.key_pages.dtype
        self.cache.key_pages[0][pages, :, :, offsets] = keys.to(cached)
        self.cache.value_pages[0][pages, :, offsets] = values.to(cached)

    def _on_device(self, array: npt.NDArray[Any]) -> Tensor:
        return copy_to_device(torch.from_numpy(array.astype(np.int64)), self.device)


class AttentionDrafter(HeadDrafter):
    """Any `DrafterBase`, with an attention head's guesses in its trees; see `HeadDrafter`.

    Its engine's runner keeps the states that the head reads.
    """

    reads_states = True
    _guesses: AttentionGuesses

    def computed(self, rows: Int64Array, next_tokens: Int32Array) -> None:
        """See `DrafterBase`: the entries of tokens that stay are made of the policy's states."""
        self._guesses.add(rows, next_tokens)


class DrafterNeeds(NamedTuple):
    """What a drafter needs of its engine; see the fields of `EngineOptions`."""

    state_layers: tuple[int, ...] = ()
    page_bytes: int = 0


def needs_of(head: AttentionHead) -> DrafterNeeds:
    """What a drafter with this head needs."""
    weights = head.norm
    return DrafterNeeds(head.config.reads, page_bytes(head.config.layer, weights.dtype, weights.device, PAGE_SIZE))


def entry_rows(pages: Int32Array, positions: Int32Array, page_size: int) -> dict[str, Int32Array]:
    """Fields of `TreeRows` for one entry of each sequence, at `positions` [C] of its `pages` [C, P]."""
    chains = np.arange(len(pages), dtype=np.int32)
    return {
        "token_ids": np.zeros_like(positions),
        "positions": positions,
        "kv_indices": pages[chains, positions // page_size] * page_size + positions % page_size,
        "context_lengths": positions + 1,
        "row_tables": chains,
        "ancestors": np.zeros((len(pages), 1), np.int32),
        "page_tables": pages,
    }
