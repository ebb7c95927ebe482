"""The device side of a decode step on a CUDA device: one copy there, one graph, one copy back, and no wait but for it.

`launch` queues a step and returns while the device computes; `wait` brings the tokens and log-probs of all its rows.
The same path runs on a CPU under Triton's interpreter, kernel by kernel, for tests.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from srtrl.drafters.draft_tree import DraftTrees
from srtrl.engine.attention_choice import choose_backends
from srtrl.engine.buckets import MAX_GRAPH_ROWS, ROWS_AT_ONCE, BucketPlanner, StepShape, longest_keys, padded_depth
from srtrl.engine.determinism import ensure_deterministic_products
from srtrl.engine.device_step import DeviceStep, StepMemory
from srtrl.engine.graphs import CudaCapturer, EagerSteps, GraphedSteps, StepExecutor, addresses
from srtrl.engine.options import AttentionOption
from srtrl.engine.row_sampling import ForcedTokens, Int32Array, Int64Array, RowSampling
from srtrl.engine.rows import PageTables, build_rows
from srtrl.engine.runner import ModelRunner
from srtrl.engine.sequence import ScheduledStep, Sequence
from srtrl.engine.step_buffers import ResultBuffer, StagingBuffer, fill_inputs, num_elements
from srtrl.engine.step_cost import StepCost
from srtrl.engine.tree_rows import root_rows
from srtrl.model.device_plan import AttentionLaunch, choose_split_keys
from srtrl.model.device_rows import ALIGNMENT, count_words
from srtrl.model.paged_attention import PagedRows
from srtrl.model.transformer import Transformer


@dataclass(slots=True, frozen=True)
class _Pending:
    """A step that is under way."""

    results: ResultBuffer
    num_logits: int
    num_sampled: int
    """The real rows among them."""


class DeviceRunner(ModelRunner):
    """`ModelRunner` with fused kernels, fixed shapes and sampling on the device."""

    token_major = True

    def __init__(
        self,
        policy: Transformer,
        *,
        num_pages: int,
        page_size: int,
        decode_dtype: torch.dtype | None,
        deterministic: bool,
        max_sequence_tokens: int,
        max_draft_nodes: int,
        cuda_graphs: bool,
        attention: AttentionOption = "triton",
    ) -> None:
        """`num_pages` may be 0: `allocate_pages` must then follow. Graphs are captured on a CUDA device only.

        Raises:
            ValueError: `attention` cannot be had.
        """
        super().__init__(
            policy,
            num_pages=num_pages,
            page_size=page_size,
            decode_dtype=decode_dtype,
            deterministic=deterministic,
        )
        config, device = policy.config, policy.device
        is_cuda = device.type == "cuda"
        self.planner = BucketPlanner(
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            page_size=page_size,
            max_positions=max_sequence_tokens + max_draft_nodes + 1,
            max_draft_nodes=max_draft_nodes,
            num_multiprocessors=torch.cuda.get_device_properties(device).multi_processor_count if is_cuda else 1,
            deterministic=deterministic,
            rows_at_once=ROWS_AT_ONCE,
        )
        backends, self.attention_note = choose_backends(attention, self.planner, dtype=self.model.dtype, device=device)
        self.planner = replace(self.planner, backends=backends)
        if is_cuda and deterministic:
            ensure_deterministic_products(self.model, ROWS_AT_ONCE)
        self.device_step = DeviceStep(self.model, self.cache, self.planner)
        self.executor: StepExecutor = EagerSteps(self.device_step.compute)
        if is_cuda and cuda_graphs:
            self.executor = GraphedSteps(self.device_step.compute, CudaCapturer(device))
        largest = _largest_captured(self.planner)
        self._memory = StepMemory(
            self.model,
            max_rows=MAX_GRAPH_ROWS,
            max_elements=num_elements(largest, MAX_GRAPH_ROWS),
        )
        """For all steps that can be captured: it never moves."""
        self._large_memory: StepMemory | None = None
        """For larger steps; made anew when one does not fit."""
        self._moves = StagingBuffer(4096, device)
        self._addresses = self._find_addresses()
        self._pending: _Pending | None = None
        self._sampled_ids: list[int] = []
        self._sampling = RowSampling.of([])
        self._page_tables = PageTables()
        self._was_awaited = True
        self.wait_seconds = 0.0
        """How long the last `wait` waited."""

    def step_cost(self, max_rows: int) -> StepCost:
        """See `ModelRunner.step_cost`: all rows of a bucket cost the same, padding or not."""
        edges = self.planner.row_edges(max_rows)
        return StepCost(edges, widest_stair=max(high - low for low, high in pairwise([0, *edges])))

    def refresh_weights(self) -> None:
        """See `ModelRunner.refresh_weights`."""
        super().refresh_weights()
        self._drop_graphs_if_moved()

    def allocate_pages(self, num_pages: int) -> None:
        """See `ModelRunner.allocate_pages`."""
        super().allocate_pages(num_pages)
        self.device_step.cache = self.cache
        self._drop_graphs_if_moved()  # the allocator may well give the same addresses again

    def release_pages(self) -> None:
        """See `ModelRunner.release_pages`; graphs stay, for the pages may come back to the same place."""
        super().release_pages()
        self.device_step.cache = self.cache
        self._large_memory = None
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()  # whole, not in the pieces that other tensors would leave of it

    @torch.inference_mode()
    def launch(self, step: ScheduledStep, trees: DraftTrees, forced: ForcedTokens | None) -> None:
        """Queue the step's forward pass and the sampling of all rows of `step.decodes` and their `trees`."""
        self._copy_pages(step)
        token_ids, rows = build_rows(step.decodes, trees, step.prefills, self.page_size, self._page_tables)
        num_sampled = len(step.decodes) + trees.num_nodes
        owners, depths = rows.row_tables[:num_sampled], rows.path_lengths[:num_sampled]
        upcoming = None
        if forced is not None and num_sampled:
            upcoming = forced.upcoming(step.decodes, trees)[root_rows(trees)[owners] + depths]
        self._pending = self._start(token_ids, rows, self._sampling_of(step.decodes).take(owners, depths), upcoming)

    def wait(self) -> tuple[Int64Array, npt.NDArray[np.float32]]:
        """Wait for the launched step; returns the tokens and log-probs of the sampled rows, as they were laid out.

        Where nothing is sampled there is nothing to wait for, and the host prepares the next step.
        """
        assert self._pending is not None, "no step was launched"
        pending, self._pending = self._pending, None
        started = time.perf_counter()
        result = pending.results.wait(pending.num_logits, pending.num_sampled)
        self._was_awaited = pending.num_sampled > 0
        self.wait_seconds = time.perf_counter() - started
        return result

    @torch.inference_mode()
    def time_forward(
        self, num_rows: int, context_tokens: int, num_logits: int, *, num_sequences: int | None = None
    ) -> float:
        """See `ModelRunner.time_forward`; sampling and the copies are part of it, compiling and capturing are not.

        A sequence has as many rows as a root and `max_draft_nodes` at most, and context and rows together as many
        positions as the engine was made for.
        """
        rows_each = -(-num_rows // (num_sequences or num_rows))
        assert rows_each <= 1 + self.planner.max_draft_nodes, f"{rows_each} rows a sequence"
        assert context_tokens + rows_each <= self.planner.max_positions, (context_tokens, rows_each)
        token_ids, rows = self._dummy_rows(num_rows, context_tokens, num_sequences)
        sampling = RowSampling(
            temperatures=np.ones(num_logits, np.float32),
            rng_keys=np.arange(num_logits).astype(np.uint64),
            positions=np.zeros(num_logits, np.int64),
            top_k=np.zeros(num_logits, np.int64),
            top_p=np.ones(num_logits),
        )
        self._was_awaited = True
        while True:
            self._synchronise()
            started = time.perf_counter()
            self._start(token_ids, rows, sampling, None)
            self._synchronise()
            if self.was_prepared:
                return time.perf_counter() - started

    def _sampling_of(self, sequences: list[Sequence]) -> RowSampling:
        """`RowSampling.of`, most of which stays as it was where the same samples decode as in the step before."""
        ids = [sequence.sequence_id for sequence in sequences]
        if ids != self._sampled_ids:
            self._sampled_ids, self._sampling = ids, RowSampling.of(sequences)
            return self._sampling
        return replace(self._sampling, positions=np.array([len(s.rollout_logprobs) for s in sequences], np.int64))

    def _start(
        self, token_ids: Int32Array, rows: PagedRows, sampling: RowSampling, forced: Int32Array | None
    ) -> "_Pending":
        """Queue a step whose first rows are sampled as `sampling` says."""
        counts = np.bincount(rows.row_tables)
        shape = self.planner.shape(
            counts,
            num_logits=len(sampling.rng_keys),
            table_width=rows.page_tables.shape[1],
            depth=rows.path_slots.shape[1],
        )
        num_tables = shape.num_tables(len(rows.page_tables))
        with _explain_out_of_memory(shape):
            memory = self._memory_for(shape, num_tables)
            step = memory.step(shape, num_tables)
            memory.staging.wait_until_free()
            fill_inputs(
                step.host,
                token_ids,
                rows,
                sampling,
                forced,
                rows_per_tile=shape.launch.rows_per_tile(self.planner.group),
                split_keys=choose_split_keys(longest=longest_keys(counts, rows.context_lengths), launch=shape.launch),
            )
            memory.staging.upload(step.num_elements)
            # What is left of a step that nobody waited for counts as this step's time.
            self.was_prepared = self.executor.run(step) and self._was_awaited
            if sampling.is_filtered.any():
                self.device_step.sample_again(step, sampling)
            memory.results.start_fetch(shape.num_logits)
        return _Pending(memory.results, shape.num_logits, len(sampling.rng_keys))

    def _copy_pages(self, step: ScheduledStep) -> None:
        """See `ModelRunner._copy_pages`. Slot by slot in any order, unless a copy reads what another one writes."""
        if not step.page_copies:
            return
        pages = np.array(step.page_copies, np.int32)  # [C, 2]
        if np.isin(pages[:, 0], pages[:, 1]).any():
            super()._copy_pages(step)
            return
        slots = pages.T[:, :, None] * np.int32(self.page_size) + np.arange(self.page_size, dtype=np.int32)
        sources, targets = slots.reshape(2, -1)
        self._move(np.arange(len(sources) + 1), sources, targets)

    def _move_slots(self, sources: Int32Array, targets: Int32Array, owners: npt.NDArray[Any]) -> None:
        """See `ModelRunner._move_slots`."""
        self._move(np.searchsorted(owners, np.arange(owners[-1] + 2)), sources, targets)

    def _move(self, *arrays: npt.NDArray[Any]) -> None:
        """`move_kv` with these starts, sources and targets. Queued: the device moves while the host goes on."""
        from srtrl.model.triton_layers import move_kv

        offsets = np.cumsum([0, *(-(-len(array) // ALIGNMENT) * ALIGNMENT for array in arrays)]).tolist()
        if offsets[-1] > len(self._moves):
            self._moves = StagingBuffer(2 * offsets[-1], self.model.device)
        self._moves.wait_until_free()
        host = self._moves.host.numpy()
        parts = []
        for offset, array in zip(offsets, arrays, strict=False):
            host[offset : offset + len(array)] = array
            parts.append(self._moves.device[offset : offset + len(array)])
        self._moves.upload(offsets[-1])
        move_kv(self.cache, *parts)

    def _memory_for(self, shape: StepShape, num_tables: int) -> StepMemory:
        if self._memory.holds(shape, num_tables):
            return self._memory
        assert not shape.can_be_captured, "a graph's inputs must not move"
        large = self._large_memory
        if large is None or not large.holds(shape, num_tables):
            max_rows, max_elements = shape.num_rows, num_elements(shape, num_tables)
            if large is not None:
                max_rows, max_elements = max(max_rows, large.max_rows), max(max_elements, len(large.staging))
            large = self._large_memory = None  # the old one's memory is free before the new one is made
            large = self._large_memory = StepMemory(self.model, max_rows=max_rows, max_elements=max_elements)
        return large

    def _find_addresses(self) -> tuple[int, ...]:
        """Where weights and pages lie. Layers lie behind each other, so how many pages there are matters, too."""
        return (self.num_pages, *addresses([*self.model.parameters(), self.cache.key_pages, self.cache.value_pages]))

    def _drop_graphs_if_moved(self) -> None:
        if self.num_pages == 0:
            return  # looked at when they are back
        found = self._find_addresses()
        if found != self._addresses:
            self._addresses = found
            self.executor.drop()


@contextmanager
def _explain_out_of_memory(shape: StepShape) -> Iterator[None]:
    """Turn torch's error inside the `with` block into a ValueError that says what helps."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ValueError(
            f"a decode step of {shape.num_rows} rows ({shape.num_logits} of them sampled) did not find the memory it "
            "needs on the device: lower rollout.kv_memory_share (or rollout.kv_memory_gib), which leaves the KV cache "
            "less, or rollout.slots and rollout.prefill_chunk_tokens, which make steps smaller"
        ) from error


def _largest_captured(planner: BucketPlanner) -> StepShape:
    """A shape that no captured step exceeds in any of its sizes."""
    deterministic = planner.deterministic
    return StepShape(
        num_rows=MAX_GRAPH_ROWS,
        num_logits=MAX_GRAPH_ROWS,
        num_tiles=MAX_GRAPH_ROWS,
        table_width=planner.max_table_width,
        depth=padded_depth(planner.max_draft_nodes) if deterministic else 0,
        num_words=0 if deterministic else count_words(planner.max_draft_nodes),
        launch=AttentionLaunch(block_m=16, num_splits=1, deterministic=deterministic),
    )
