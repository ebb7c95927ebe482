"""Decode steps on a CPU: the model in PyTorch, attention and sampling in one Numba kernel each."""

import logging
from collections.abc import Sequence
from dataclasses import fields
from functools import cache, cached_property

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from srtrl.engine.runner import EngineOptions, RowFilters, Runner, SampledRows
from srtrl.engine.sampling import filter_top_k_top_p, row_logprobs, sample_rows_on_cpu, top_tokens_on_cpu
from srtrl.engine.step_inputs import (
    Int32Array,
    Int64Array,
    StepInputs,
    StepShape,
    StepSize,
    num_ancestor_words,
    num_elements,
)
from srtrl.model.cpu_threads import set_cpu_threads
from srtrl.model.paged_attention import PagedPlan, TreeRows
from srtrl.model.transformer import Transformer, layer_states
from srtrl.types import TopTokens

logger = logging.getLogger(__name__)

ROW_MULTIPLE = 8
"""At other row counts matrix products can give a row other bits (measured; see docs/LOG.md).

On some processors also at 8 rows itself, but not at 16 and more: see `CpuRunner.min_rows`.
"""

COMPARED_ROWS = (16, 24, 32, 40, 48, 64, 96, 128, 192, 256, 384, 512)
"""Row counts at which `CpuRunner.check_products` compares."""
COMPARED_WORK = 2**29
"""Multiply-adds of such a product, at most: 10 to 20 ms."""


class CpuRunner(Runner):
    """`Runner` on a CPU: `launch` computes the whole step."""

    is_asynchronous = False

    def __init__(self, policy: Transformer, options: EngineOptions) -> None:
        super().__init__(policy, options)
        self.num_words = num_ancestor_words(options.max_draft_nodes)
        self._buffer: Int32Array = np.empty(0, np.int32)
        self._sampled: SampledRows | None = None
        self._last: tuple[Tensor, SampledRows] | None = None
        """Logits [L, V] of the last step, and what was sampled from them."""

    def row_edges(self, max_rows: int) -> list[int]:
        """See `Runner`."""
        return list(range(ROW_MULTIPLE, max_rows + ROW_MULTIPLE, ROW_MULTIPLE))

    def warm_up(self, *, compiles: bool) -> None:
        """See `Runner`: set the threads of the kernels, and find row counts of equal products."""
        set_cpu_threads()
        self.check_products()

    def inputs_for(self, size: StepSize) -> StepInputs:
        """See `Runner`."""
        shape = StepShape(
            num_rows=self._padded(size.num_rows),
            num_sampled=size.num_sampled,
            num_words=self.num_words,
            table_width=size.max_pages,
            num_tables=len(size.rows_per_sequence),
        )
        if num_elements(shape.fields()) > len(self._buffer):
            self._buffer = np.zeros(2 * num_elements(shape.fields()), np.int32)
        return StepInputs.of(self._buffer, shape)

    @torch.inference_mode()
    def launch(self, inputs: StepInputs, filters: RowFilters | None) -> None:
        """See `Runner`."""
        rows = TreeRows(**{field.name: torch.from_numpy(getattr(inputs, field.name)) for field in fields(TreeRows)})
        width = len(self._state_layers) * self.model.config.hidden_size
        self.states = self.model.embedding.new_empty(len(rows.token_ids), width)
        states = layer_states(self._state_layers, self.states)
        hidden = self.model(rows.token_ids.long(), PagedPlan(self.cache, rows), states)  # [N, D]
        self.inputs, self.hidden = inputs, hidden
        num_sampled = inputs.shape.num_sampled
        self._last = None  # its logits make room
        logits = self.model.logits(hidden[: self._padded(num_sampled)])[:num_sampled]  # [L, V]
        keys, positions = inputs.rng_keys.view(np.uint64), inputs.sample_positions.astype(np.int64)
        token_ids, logprobs = sample_rows_on_cpu(logits, inputs.temperatures, keys, positions)
        if filters is not None:
            filtered = np.flatnonzero((filters.top_k > 0) | (filters.top_p < 1))  # the others keep their bits
            some, temperatures = logits[torch.from_numpy(filtered)], torch.from_numpy(inputs.temperatures[filtered])
            top_k, top_p = torch.from_numpy(filters.top_k[filtered]), torch.from_numpy(filters.top_p[filtered])
            kept = filter_top_k_top_p(some, temperatures, top_k, top_p)
            token_ids[filtered], _ = sample_rows_on_cpu(
                kept, inputs.temperatures[filtered], keys[filtered], positions[filtered]
            )
            taken = torch.from_numpy(token_ids[filtered]).long()
            logprobs[filtered] = row_logprobs(some, temperatures, taken).numpy()
        self._sampled = SampledRows(token_ids=token_ids, logprobs=logprobs)
        self._last = logits, self._sampled

    def wait(self, num_sampled: int) -> SampledRows:
        """See `Runner`."""
        sampled, self._sampled = self._sampled, None
        assert sampled is not None, "no step was launched"
        assert len(sampled.token_ids) == num_sampled
        return sampled

    def top_tokens(self, rows: Int64Array, num: int) -> TopTokens:
        """See `Runner`."""
        assert self._last is not None, "no step was launched"
        logits, sampled = self._last
        arrays = self.inputs.temperatures, sampled.token_ids, sampled.logprobs
        temperatures, token_ids, logprobs = (torch.from_numpy(array[rows]) for array in arrays)
        return top_tokens_on_cpu(logits[torch.from_numpy(rows)], temperatures, token_ids, logprobs, num)

    @torch.inference_mode()
    def move_kv(self, moves: Int32Array) -> None:
        """See `Runner`."""
        if len(moves):
            self.cache.move_indices(moves[:, 0], moves[:, 1])

    @cached_property
    def min_rows(self) -> int:
        """The fewest rows of a step: `ROW_MULTIPLE`, or twice as many where this machine's products need them."""
        few, more = ROW_MULTIPLE, 2 * ROW_MULTIPLE
        return more if any(_unequal((few, more), weight) for weight in self._weights()) else few

    def check_products(self) -> None:
        """Log a line where a row of the policy's products has other bits among other numbers of rows.

        Steps with a whole chunk of prompts have as many rows as are compared, or more; of large matrices fewer are.
        """
        unequal: set[int] = set()
        for weight in self._weights():
            unequal |= _unequal([num for num in COMPARED_ROWS if num * weight.numel() <= COMPARED_WORK], weight)
        if unequal:
            warn_of_rounding(str(self.model.dtype).removeprefix("torch."), *sorted(unequal))

    def _weights(self) -> list[Tensor]:
        """One of each shape of the policy's matrices."""
        return [*{weight.shape: weight for weight in self.model.parameters() if weight.dim() == 2}.values()]

    def _padded(self, num_rows: int) -> int:
        return max(self.min_rows, -(-num_rows // ROW_MULTIPLE) * ROW_MULTIPLE)


@torch.no_grad()
def _unequal(row_counts: Sequence[int], weight: Tensor) -> set[int]:
    """Those of the ascending `row_counts` with which rows have other products with `weight` than with the last one."""
    most = row_counts[-1] if row_counts else 0
    rows = torch.randn(most, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight.dtype)
    products = functional.linear(rows, weight)
    return {num for num in row_counts if not torch.equal(functional.linear(rows[:num], weight), products[:num])}


@cache
def warn_of_rounding(dtype: str, *row_counts: int) -> None:
    """Log once that products with `row_counts` rows round differently from products with more rows."""
    logger.warning(
        "model.dtype: %s products of %s rows are rounded otherwise here than those of more rows; so drafts, slots and "
        "timing can change samples and weights, by rounding (docs/exactness.md)",
        *(dtype, ", ".join(map(str, row_counts))),
    )
