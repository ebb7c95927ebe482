"""The device side of a decode step: one forward pass, and the compaction of accepted drafts."""

import time
from collections.abc import Sequence as SequenceOf

import numpy as np
import torch
from torch import Tensor

from srtrl.drafters.draft_tree import DraftTrees
from srtrl.engine.rows import build_rows, dummy_rows, pad_tables, slots_of
from srtrl.engine.sequence import ScheduledStep
from srtrl.engine.verify import Walk
from srtrl.model.paged_attention import Int32Array, KVCache, PagedPlan, PagedRows
from srtrl.model.transformer import Transformer

ROW_MULTIPLE = 8
"""Deterministic mode: at other row counts matrix products can give a row other bits (measured; see docs/LOG.md)."""


class ModelRunner:
    """Owns the decoder's view of the weights and the KV cache."""

    def __init__(
        self,
        policy: Transformer,
        *,
        num_pages: int,
        page_size: int,
        decode_dtype: torch.dtype | None,
        deterministic: bool,
    ) -> None:
        self.policy = policy
        self.deterministic = deterministic
        self.model = policy
        if decode_dtype is not None and decode_dtype != policy.dtype:
            self.model = Transformer(policy.config, decode_dtype, policy.device).requires_grad_(False)
            self.refresh_weights()
        config = policy.config
        self.cache = KVCache(
            num_layers=config.num_hidden_layers,
            num_pages=num_pages,
            page_size=page_size,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            dtype=self.model.dtype,
            device=self.model.device,
        )

    def refresh_weights(self) -> None:
        """Copy the policy's weights into the cast copy, in place; nothing to do where the tensors are shared."""
        if self.model is not self.policy:
            with torch.no_grad():
                for target, source in zip(self.model.parameters(), self.policy.parameters(), strict=True):
                    target.copy_(source)

    @torch.inference_mode()
    def execute(self, step: ScheduledStep, trees: DraftTrees) -> Tensor:
        """Run the step's forward pass; returns logits [roots and nodes, V], each root followed by its nodes."""
        if step.page_copies:
            self.cache.copy_pages(
                [source for source, _ in step.page_copies], [target for _, target in step.page_copies]
            )
        token_ids, rows = build_rows(step.decodes, trees, step.prefills, self.cache.page_size)
        return self._forward(token_ids, rows, num_logits=len(step.decodes) + trees.num_nodes)

    @torch.inference_mode()
    def commit(self, walks: SequenceOf[Walk]) -> None:
        """Make the accepted path's KV contiguous behind the root: one gather and one scatter for all sequences.

        The sequences hold their new tokens already: root, accepted nodes and bonus token end `token_ids`.
        """
        for walk in walks:
            walk.sequence.num_computed = len(walk.sequence.token_ids) - 1
        drafted = [walk for walk in walks if walk.accepted]
        if not drafted:
            return
        counts = np.array([len(walk.accepted) for walk in drafted])
        nodes = np.array([node for walk in drafted for node in walk.accepted])
        roots = np.array([walk.sequence.num_computed for walk in drafted]) - 1 - counts  # positions
        levels = np.arange(len(nodes)) - np.repeat(np.cumsum(counts) - counts, counts)  # depth - 1 of each node
        moved = np.flatnonzero(nodes != levels)
        if not len(moved):
            return
        tables = pad_tables([walk.sequence.page_table for walk in drafted])
        owners = np.repeat(np.arange(len(drafted)), counts)[moved]
        sources, targets = (
            slots_of(tables, owners, roots[owners] + 1 + places[moved], self.cache.page_size)
            for places in (nodes, levels)
        )
        self.cache.move_slots(sources, targets)

    @torch.inference_mode()
    def time_forward(
        self, num_rows: int, context_tokens: int, num_logits: int, *, num_sequences: int | None = None
    ) -> float:
        """Seconds of one forward pass over random rows, to learn what a decode step costs.

        The rows lie as draft rows do, in sequences of about equally many rows that each have pages of their own (as far
        as there are pages). What the pages hold is overwritten: no page may be in use.

        Args:
            num_rows: Roots and nodes together.
            context_tokens: Positions that each row sees, at least 1.
            num_logits: For how many of the rows logits are computed.
            num_sequences: By default one for every row, as without drafts.
        """
        rows = dummy_rows(
            num_rows, context_tokens, num_sequences or num_rows, self.cache.key_pages.shape[1], self.cache.page_size
        )
        token_ids = np.arange(num_rows, dtype=np.int32) % np.int32(self.policy.config.vocab_size)
        self._synchronise()
        started = time.perf_counter()
        self._forward(token_ids, rows, num_logits)
        self._synchronise()
        return time.perf_counter() - started

    def _forward(self, token_ids: Int32Array, rows: PagedRows, num_logits: int) -> Tensor:
        """Logits [num_logits, V] of the first rows."""
        padded = np.zeros(self._padded(len(token_ids)), np.int64)
        padded[: len(token_ids)] = token_ids
        plan = PagedPlan(self.cache, rows, num_padded_rows=len(padded))
        hidden = self.model(torch.from_numpy(padded).to(self.model.device), plan)  # [N padded, D]
        logits = self.model.logits(hidden[: self._padded(num_logits)])
        return logits[:num_logits]

    def _synchronise(self) -> None:
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)

    def _padded(self, num_rows: int) -> int:
        return -(-num_rows // ROW_MULTIPLE) * ROW_MULTIPLE if self.deterministic else num_rows
