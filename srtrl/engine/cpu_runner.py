"""Decode steps on a CPU: the model in PyTorch, attention and sampling in one Numba kernel each."""

import dataclasses
import time
from collections.abc import Sequence

import numpy as np
import torch

from srtrl.engine.rows import Int32Array, StepInputs, StepLayout, StepSize, num_ancestor_words
from srtrl.engine.runner import (
    RowFilters,
    SampledRows,
    decoder_model,
    kv_cache_for,
    page_bytes_of,
    refresh_copy,
    timed_step,
)
from srtrl.engine.sampling import filter_top_k_top_p, row_logprobs_reference, sample_rows_on_cpu
from srtrl.model.paged_attention import PagedPlan, ReferencePlan, TreeRows
from srtrl.model.transformer import Transformer

ROW_MULTIPLE = 8
"""Deterministic mode: at other row counts matrix products can give a row other bits (measured; see docs/LOG.md)."""


class CpuRunner:
    """See `srtrl.engine.runner.Runner`."""

    is_asynchronous = False
    was_prepared = True

    def __init__(
        self,
        policy: Transformer,
        *,
        page_size: int,
        max_draft_nodes: int,
        decode_dtype: torch.dtype | None = None,
        deterministic: bool = True,
    ) -> None:
        """Without pages: `allocate_pages` must follow."""
        self.policy = policy
        self.model = decoder_model(policy, decode_dtype)
        self.page_size = page_size
        self.row_multiple = ROW_MULTIPLE if deterministic else 1
        self.num_words = num_ancestor_words(max_draft_nodes)
        self.cache = kv_cache_for(self.model, 0, page_size)
        self._buffer: Int32Array = np.empty(0, np.int32)
        self._sampled: SampledRows | None = None

    @property
    def num_pages(self) -> int:
        """See `Runner`."""
        return self.cache.key_pages.shape[1]

    @property
    def page_bytes(self) -> int:
        """See `Runner`."""
        return page_bytes_of(self.model, self.page_size)

    def row_edges(self, max_rows: int) -> list[int]:
        """See `Runner`."""
        return list(range(self.row_multiple, max_rows + self.row_multiple, self.row_multiple))

    def allocate_pages(self, num_pages: int) -> None:
        """See `Runner`."""
        self.release_pages()
        self.cache = kv_cache_for(self.model, num_pages, self.page_size)

    def release_pages(self) -> None:
        """See `Runner`."""
        self.cache = kv_cache_for(self.model, 0, self.page_size)

    def refresh_weights(self) -> None:
        """See `Runner`."""
        refresh_copy(self.model, self.policy)

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """See `Runner`."""
        with torch.inference_mode():
            self.cache.copy_pages(list(sources), list(targets))

    def inputs_for(self, size: StepSize) -> StepInputs:
        """See `Runner`; valid until the next call."""
        layout = StepLayout(
            num_rows=self._padded(size.num_rows),
            num_sampled=size.num_sampled,
            num_words=self.num_words,
            num_tiles=0,
            table_width=size.max_pages,
            num_tables=len(size.rows_per_sequence),
        )
        if layout.num_elements > len(self._buffer):
            self._buffer = np.zeros(2 * layout.num_elements, np.int32)
        return StepInputs.of(self._buffer, layout)

    @torch.inference_mode()
    def launch(self, inputs: StepInputs, filters: RowFilters | None) -> None:
        """See `Runner`; computes the whole step."""
        rows = TreeRows(
            **{field.name: torch.from_numpy(getattr(inputs, field.name)) for field in dataclasses.fields(TreeRows)}
        )
        make_plan = ReferencePlan if self.model.dtype == torch.float64 else PagedPlan  # tests compute in float64
        hidden = self.model(rows.token_ids.long(), make_plan(self.cache, rows))  # [N, D]
        num_sampled = inputs.layout.num_sampled
        logits = self.model.logits(hidden[: self._padded(num_sampled)])[:num_sampled]  # [L, V]
        keys, positions = inputs.rng_keys.view(np.uint64), inputs.sample_positions.astype(np.int64)
        token_ids, logprobs = sample_rows_on_cpu(logits, inputs.temperatures, keys, positions)
        if filters is not None:
            filtered = np.flatnonzero((filters.top_k > 0) | (filters.top_p < 1))  # the others keep their bits
            logits, temperatures = logits[torch.from_numpy(filtered)], torch.from_numpy(inputs.temperatures[filtered])
            top_k, top_p = torch.from_numpy(filters.top_k[filtered]), torch.from_numpy(filters.top_p[filtered])
            kept = filter_top_k_top_p(logits, temperatures, top_k, top_p)
            token_ids[filtered], _ = sample_rows_on_cpu(
                kept, inputs.temperatures[filtered], keys[filtered], positions[filtered]
            )
            taken = torch.from_numpy(token_ids[filtered]).long()
            logprobs[filtered] = row_logprobs_reference(logits, temperatures, taken).numpy()
        self._sampled = SampledRows(token_ids=token_ids, logprobs=logprobs)

    def wait(self, num_sampled: int) -> SampledRows:
        """See `Runner`."""
        sampled, self._sampled = self._sampled, None
        assert sampled is not None, "no step was launched"
        assert len(sampled.token_ids) == num_sampled
        return sampled

    @torch.inference_mode()
    def move_kv(self, sources: Int32Array, targets: Int32Array) -> None:
        """See `Runner`."""
        self.cache.move_indices(sources, targets)

    def time_step(self, num_rows: int, context_tokens: int, num_sequences: int) -> float:
        """See `Runner`."""
        inputs = timed_step(self, num_rows, context_tokens, num_sequences, self.page_size)
        started = time.perf_counter()
        self.launch(inputs, None)
        self.wait(num_rows)
        return time.perf_counter() - started

    def _padded(self, num_rows: int) -> int:
        return -(-num_rows // self.row_multiple) * self.row_multiple
