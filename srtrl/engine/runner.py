"""The device side of a decode step: rows, one forward pass, and the compaction of accepted drafts."""

from collections.abc import Sequence as SequenceOf

import numpy as np
import torch
from torch import Tensor

from srtrl.drafters.draft_tree import ROOT, DraftTree
from srtrl.engine.scheduler import PrefillChunk, ScheduledStep
from srtrl.engine.sequence import Sequence
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
    def execute(self, step: ScheduledStep, trees: SequenceOf[DraftTree]) -> Tensor:
        """Run the step's forward pass; returns logits [roots and nodes, V], each root followed by its nodes."""
        if step.page_copies:
            self.cache.copy_pages(
                [source for source, _ in step.page_copies], [target for _, target in step.page_copies]
            )
        token_ids, rows = build_rows(step.decodes, trees, step.prefills, self.cache.page_size)
        num_logits = len(step.decodes) + sum(tree.num_nodes for tree in trees)
        padded = np.zeros(self._padded(len(token_ids)), np.int64)
        padded[: len(token_ids)] = token_ids
        plan = PagedPlan(self.cache, rows, num_padded_rows=len(padded))
        hidden = self.model(torch.from_numpy(padded).to(self.model.device), plan)  # [N padded, D]
        logits = self.model.logits(hidden[: self._padded(num_logits)])
        return logits[:num_logits]

    @torch.inference_mode()
    def commit(self, walks: SequenceOf[Walk]) -> None:
        """Make the accepted path's KV contiguous behind the root: one gather and one scatter for all sequences.

        The sequences hold their new tokens already: root, accepted nodes and bonus token end `token_ids`.
        """
        sources: list[int] = []
        targets: list[int] = []
        page_size = self.cache.page_size
        for walk in walks:
            sequence = walk.sequence
            root = len(sequence.token_ids) - 2 - len(walk.accepted)
            for depth, node in enumerate(walk.accepted):
                source, target = root + 1 + node, root + 1 + depth
                if source != target:
                    sources.append(sequence.page_ids[source // page_size] * page_size + source % page_size)
                    targets.append(sequence.page_ids[target // page_size] * page_size + target % page_size)
            sequence.num_computed = len(sequence.token_ids) - 1
        if sources:
            self.cache.move_slots(np.array(sources, np.int32), np.array(targets, np.int32))

    def _padded(self, num_rows: int) -> int:
        return -(-num_rows // ROW_MULTIPLE) * ROW_MULTIPLE if self.deterministic else num_rows


def build_rows(
    decodes: SequenceOf[Sequence], trees: SequenceOf[DraftTree], prefills: SequenceOf[PrefillChunk], page_size: int
) -> tuple[Int32Array, PagedRows]:
    """Lay out the step's rows: for each decoding sequence its root and its nodes, then the prefill chunks.

    The i-th node of a tree writes its KV i + 1 positions behind the root, whatever its depth; `ModelRunner.commit`
    moves the accepted ones to where their depth belongs.

    Returns:
        Token ids [N], and what the attention plan needs.
    """
    holders = [*decodes, *(chunk.holder for chunk in prefills)]
    counts = np.array([1 + tree.num_nodes for tree in trees] + [chunk.count for chunk in prefills], np.int32)
    starts = np.array([len(s.token_ids) - 1 for s in decodes] + [chunk.start for chunk in prefills], np.int32)
    tokens: list[int] = []
    for sequence, tree in zip(decodes, trees, strict=True):
        tokens.append(sequence.token_ids[-1])
        tokens.extend(tree.token_ids.tolist())
    for chunk in prefills:
        tokens.extend(chunk.holder.token_ids[chunk.start : chunk.start + chunk.count])
    page_tables = np.zeros((len(holders), max(len(holder.page_table) for holder in holders)), np.int32)
    for i, holder in enumerate(holders):
        page_tables[i, : len(holder.page_table)] = holder.page_table
    first_rows = np.cumsum(counts, dtype=np.int32) - counts
    row_tables = np.repeat(np.arange(len(holders), dtype=np.int32), counts)  # [N]
    write_positions = np.arange(len(tokens), dtype=np.int32) + np.repeat(starts - first_rows, counts)  # [N]
    pages = page_tables[row_tables, write_positions // page_size]
    rows = PagedRows(
        positions=write_positions.astype(np.int64),
        write_slots=pages * np.int32(page_size) + write_positions % np.int32(page_size),
        page_tables=page_tables,
        row_tables=row_tables,
        context_lengths=write_positions + np.int32(1),
        path_slots=np.zeros(
            (len(tokens), max((int(t.depths().max()) for t in trees if t.num_nodes), default=0)), np.int32
        ),
        path_lengths=np.zeros(len(tokens), np.int32),
    )
    for tree, first_row in zip(trees, first_rows[: len(decodes)].tolist(), strict=True):
        if tree.num_nodes:
            _place_tree(rows, tree, first_row)
    return np.array(tokens, np.int32), rows


def _place_tree(rows: PagedRows, tree: DraftTree, root_row: int) -> None:
    """Fill the rows of a tree's nodes: each sees the context up to the root, and its own branch."""
    nodes = slice(root_row + 1, root_row + 1 + tree.num_nodes)
    depths = tree.depths()
    rows.positions[nodes] = rows.positions[root_row] + depths
    rows.context_lengths[nodes] = rows.context_lengths[root_row]
    rows.path_lengths[nodes] = depths
    for node, (parent, depth) in enumerate(zip(tree.parents.tolist(), depths.tolist(), strict=True)):
        row = root_row + 1 + node
        if parent != ROOT:
            rows.path_slots[row, : depth - 1] = rows.path_slots[root_row + 1 + parent, : depth - 1]
        rows.path_slots[row, depth - 1] = rows.write_slots[row]
