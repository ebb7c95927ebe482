"""A drafter with a pretrained attention head, whose entries lie in pages of the same numbers as the policy's KV.

So entries are shared, kept between turns and given up with the KV of their positions. That of position t needs the
token t + 1: a prompt's shared pages end before its last token, a chunk of a prompt comes with the token after it, and
the last token of a turn is computed together with its observation. While the head guesses, its entries are made of its
own states. Those of accepted guesses are computed again, from the policy's: a moved one would be wrong, which no token
shows, only acceptance.

Letters as in `attention_head.py`; C sequences that are drafted for, P pages of a page table.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from srtrl.cuda.shapes import padded_rows
from srtrl.cuda.tiles import AttentionScratch
from srtrl.engine.cpu_runner import CpuRunner
from srtrl.engine.runner import PAGE_SIZE, EngineOptions, Runner, page_bytes
from srtrl.engine.step_inputs import Int32Array, Int64Array
from srtrl.features.attention_head import AttentionHead
from srtrl.features.head_drafter import HeadDrafter
from srtrl.model.attention import AttentionPlan, copy_to_device
from srtrl.model.paged_attention import KVCache, PagedPlan, TreeRows
from srtrl.model.transformer import Transformer


class AttentionGuesser:
    """An attention head with its entries; see `Guesser`."""

    def __init__(self, head: AttentionHead, runner: Runner, options: EngineOptions) -> None:
        """For an engine with this runner and these options."""
        self.head, self.token_ids, self._runner, self._size = head, head.token_ids, runner, runner.page_size
        self.cache: KVCache
        """Cache of one layer, with the pages of the runner and after them one for the guesses of each sequence."""
        self._num_pages = 0
        limit = runner.model.config.max_position_embeddings
        longest = options.longest_sequence(limit) + options.max_draft_nodes + 1
        num_chains, device = padded_rows(options.slots), head.norm.device
        # Written in place: CUDA graphs hold their addresses.
        self._positions = torch.zeros(num_chains, dtype=torch.int32, device=device)
        """[C], of the rows of `aim`."""
        self._pages = self._positions.new_zeros(num_chains, -(-longest // self._size) + 1)
        """[C, P], their page tables, which go on with a page for guesses."""
        self._limit = self._pages.shape[1] * self._size
        self._make_plan: Callable[[KVCache, TreeRows], AttentionPlan] = PagedPlan
        if not isinstance(runner, CpuRunner):
            from srtrl.features.attention_drafter_cuda import EntryPlan

            self._make_plan = partial(EntryPlan, scratch=AttentionScratch(head.config.layer.head_dim, device))

    def refresh(self, policy: Transformer) -> None:
        """See `Guesser`; there may be another number of pages, too."""
        self.head.refresh(policy)
        num_pages = self._runner.num_pages + len(self._pages)
        if num_pages != self._num_pages:
            self.cache, self._num_pages = self._runner.make_cache(self.head.config.layer, num_pages), num_pages

    def add(self, rows: Int64Array, next_tokens: Int32Array) -> None:
        """Compute the entries of rows of the last step [N], from the tokens after them [N]."""
        inputs = self._runner.inputs
        numbers, offsets = np.divmod(inputs.positions[rows], self._size)
        pages = inputs.page_tables[inputs.row_tables[rows], numbers]
        arrays = np.stack((rows, next_tokens, inputs.positions[rows], pages * self._size + offsets))
        of_rows, tokens, positions, places = copy_to_device(torch.from_numpy(arrays), self._pages.device)
        with torch.inference_mode():
            states = self.head.fuse(self._states[of_rows])
            self.cache.write(0, places, *self.head.keys_values(states, tokens, positions, self._limit))

    @property
    def _states(self) -> Tensor:
        """States that the head reads, of all rows of the last step: [N, A D], or [N, D] final hidden states."""
        return self._runner.states if self.head.config.reads else self._runner.hidden

    def aim(self, runner: Runner, rows: Int64Array) -> Tensor:
        """See `Guesser`; a sequence may come again, as padding."""
        inputs, chains = runner.inputs, np.arange(len(rows))
        positions = inputs.positions[rows]
        pages = np.pad(inputs.page_tables[inputs.row_tables[rows]], ((0, 0), (0, 1)))
        pages[chains, positions // self._size + 1] = runner.num_pages + chains
        for tensor, array in ((self._positions[: len(rows)], positions), (self._pages[: len(rows)], pages)):
            tensor[..., : array.shape[-1]] = copy_to_device(torch.from_numpy(array), tensor.device)
        return self._states

    def unroll(self, hidden: Tensor, last: Tensor, k: int, take_best: Callable[[int, Tensor], Tensor]) -> None:
        """See `DraftHead.unroll`: guess after the rows of `aim`, from the states [C, A D] that the head reads there."""
        assert k <= self._size, "the guesses of a sequence have one page of their own"
        states = self.head.fuse(hidden)
        for depth in range(k):
            states, logits = self.head(states, last, self._plan(last, depth))
            last = take_best(depth, logits)

    def _plan(self, token_ids: Tensor, depth: int) -> AttentionPlan:
        """The plan of one entry of each sequence, `depth` positions after the row of `aim`; it is written, too."""
        pages, positions = self._pages[: len(token_ids)], self._positions[: len(token_ids)] + depth
        [own] = pages.gather(1, (positions // self._size).long()[:, None]).T
        rows = TreeRows(
            token_ids=token_ids,
            positions=positions,
            kv_indices=own * self._size + positions % self._size,
            context_lengths=positions + 1,
            row_tables=torch.arange(len(pages), dtype=torch.int32, device=pages.device),
            ancestors=torch.zeros_like(pages[:, :1]),
            page_tables=pages,
        )
        return self._make_plan(self.cache, rows)


class AttentionDrafter(HeadDrafter):
    """Any `DrafterBase`, with an attention head's guesses in its trees; see `HeadDrafter`.

    Its engine's runner keeps the states that the head reads.
    """

    reads_states = True
    head: AttentionGuesser

    def computed(self, rows: Int64Array, next_tokens: Int32Array) -> None:
        """See `DrafterBase`: the entries of tokens that stay are made of the policy's states."""
        self.head.add(rows, next_tokens)


def entry_bytes(head: AttentionHead) -> int:
    """Memory of a page of the head's entries, beside each page of the policy's KV."""
    return page_bytes(head.config.layer, head.norm.dtype, head.norm.device, PAGE_SIZE)
