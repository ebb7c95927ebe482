"""The side of the engine that computes, on a CUDA device: one copy there, one graph, one copy back, and one wait.

The host writes a step into pinned memory (`inputs_for`), `launch` queues its copy, the forward pass with sampling, and
the copy of the results, and returns while the device computes; `wait` brings the tokens and log-probs. Kernels find all
inputs at fixed addresses, so that a captured graph can be replayed. The same path runs on a CPU under Triton's
interpreter, kernel by kernel, for tests. Letters: see `srtrl/engine/rows.py`; V vocabulary, D width of the model.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

from srtrl.engine.cuda_graphs import CudaCapturer, StepGraphs, was_out_of_memory
from srtrl.engine.cuda_layouts import H200_MULTIPROCESSORS, MAX_GRAPH_ROWS, LayoutPlanner, StepShape, row_edges
from srtrl.engine.rows import ALIGNMENT, Int32Array, StepInputs, StepLayout, StepSize, aligned
from srtrl.engine.runner import (
    RowFilters,
    SampledRows,
    decoder_model,
    kv_cache_for,
    page_bytes_of,
    refresh_copy,
    timed_step,
)
from srtrl.engine.sampling import filter_top_k_top_p, row_logprobs_reference
from srtrl.model.attention import copy_to_device
from srtrl.model.paged_attention import TreeRows
from srtrl.model.transformer import Transformer
from srtrl.model.tree_attention import AttentionScratch, choose_split_keys

LOGITS_AT_ONCE = 1024
"""Rows whose logits exist at the same time: with a vocabulary of 152 thousand in bfloat16 they take 0.3 GB."""

FILTERED_AT_ONCE = 64
"""Rows that are sorted at the same time for top-k and top-p: in float32, with indices, they take 0.4 GB."""


class _PinnedCopy:
    """An int32 array on the host, pinned where the device is a CUDA device, and its twin there."""

    def __init__(self, length: int, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self.host = torch.zeros(length, dtype=torch.int32, pin_memory=is_cuda)
        self.device = torch.zeros(length, dtype=torch.int32, device=device)
        self._done = torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]

    def upload(self, length: int) -> None:
        """Queue the copy of the first elements to the device."""
        self._copy(self.host[:length], self.device[:length])

    def download(self, length: int) -> None:
        """Queue the copy of the first elements to the host."""
        self._copy(self.device[:length], self.host[:length])

    def wait(self) -> None:
        """Return when the last copy is done, so that the host's array may be read or written."""
        if self._done is not None:
            self._done.synchronize()

    def _copy(self, source: Tensor, target: Tensor) -> None:
        target.copy_(source, non_blocking=True)
        if self._done is not None:
            self._done.record()


@dataclass(kw_only=True, slots=True, frozen=True)
class CudaStep:
    """The views of one shape of step, which are kept: to make them takes longer than to fill them."""

    shape: StepShape
    inputs: StepInputs
    """On the host."""
    found: SampledRows
    """The results on the host, [L]."""
    rows: TreeRows
    """On the device, as all that follow."""
    temperatures: Tensor
    """[L] float32."""
    rng_keys: Tensor
    """[L] int64."""
    sample_positions: Tensor
    """[L] int32."""
    hidden: Tensor
    """[N, D], written."""
    tokens: Tensor
    """[L] int32, written."""
    logprobs: Tensor
    """[L] float32, written."""


class _StepMemory:
    """What lies at fixed addresses for steps up to some size: inputs, results and hidden states."""

    def __init__(self, model: Transformer, *, max_rows: int, max_elements: int) -> None:
        """Allocate for steps of `max_rows` rows and `max_elements` int32 elements of inputs."""
        self.max_rows = max_rows
        self.max_elements = max_elements
        self.staging = _PinnedCopy(max_elements, model.device)
        self.results = _PinnedCopy(2 * (max_rows + ALIGNMENT), model.device)
        self.hidden = torch.zeros(max_rows, model.config.hidden_size, dtype=model.dtype, device=model.device)
        self.steps: dict[StepShape, CudaStep] = {}

    def make_step(self, shape: StepShape, layout: StepLayout, rows_per_tile: int) -> CudaStep:
        """Views of a step, kept from now on."""
        dtypes: dict[Any, torch.dtype] = {np.int32: torch.int32, np.int64: torch.int64, np.float32: torch.float32}
        slices = layout.slices()
        views = {
            name: self.staging.device[slices[name]].view(dtypes[dtype]).view(size)
            for name, (dtype, size) in layout.fields().items()
        }
        width = aligned(shape.num_sampled)  # log-probs, too, begin where kernels expect it
        (host_tokens, host_logprobs), (tokens, logprobs) = (
            results[: 2 * width].view(2, width)[:, : shape.num_sampled]
            for results in (self.results.host, self.results.device)
        )
        step = self.steps[shape] = CudaStep(
            shape=shape,
            inputs=StepInputs.of(self.staging.host.numpy(), layout, rows_per_tile),
            found=SampledRows(token_ids=host_tokens.numpy(), logprobs=host_logprobs.view(torch.float32).numpy()),
            rows=TreeRows(**{field.name: views[field.name] for field in fields(TreeRows)}),
            temperatures=views["temperatures"],
            rng_keys=views["rng_keys"],
            sample_positions=views["sample_positions"],
            hidden=self.hidden[: shape.num_rows],
            tokens=tokens,
            logprobs=logprobs.view(torch.float32),
        )
        return step


class CudaRunner:
    """`srtrl.engine.runner.Runner` with fused kernels, fixed shapes and sampling on the device."""

    is_asynchronous = True

    def __init__(
        self,
        policy: Transformer,
        *,
        page_size: int,
        decode_dtype: torch.dtype | None,
        deterministic: bool | None,
        max_sequence_tokens: int,
        max_draft_nodes: int,
        cuda_graphs: bool,
    ) -> None:
        """For a policy on a CUDA device, or on a CPU under Triton's interpreter; without pages yet.

        Args:
            policy: Its weights are where the steps are computed.
            page_size: Positions of a page.
            decode_dtype: Of the decoder's weights and KV; None: the policy's own tensors.
            deterministic: `rollout.deterministic`.
            max_sequence_tokens: Longest prompt and response together.
            max_draft_nodes: Of one sequence in one step.
            cuda_graphs: Capture graphs (on a CUDA device only).

        Raises:
            ValueError: Triton is not installed, or deterministic mode was asked for.
        """
        if deterministic:
            raise ValueError(
                "rollout.deterministic: true is for decoding on a CPU: on a CUDA device kernels sum a row in an order "
                "that depends on the batch. Leave it out; drafts still do not change the distribution of the tokens"
            )
        if find_spec("triton") is None:
            raise ValueError(
                "decoding on a CUDA device needs Triton, which PyTorch's CUDA builds for Linux bring along and this "
                "installation lacks: `pip install triton`, or run with device=cpu"
            )
        from srtrl.engine.triton_sampling import SamplingScratch

        config, device = policy.config, policy.device
        is_cuda = device.type == "cuda"
        self.policy = policy
        self.model = decoder_model(policy, decode_dtype)
        num_multiprocessors = H200_MULTIPROCESSORS  # on a CPU: tests see the launches of a real device
        if is_cuda:
            num_multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        self.planner = LayoutPlanner.for_model(
            config,
            page_size=page_size,
            max_sequence_tokens=max_sequence_tokens,
            max_draft_nodes=max_draft_nodes,
            num_multiprocessors=num_multiprocessors,
        )
        self.cache = kv_cache_for(self.model, 0, page_size, token_major=True)
        self.compute: Callable[[CudaStep], None] = self._compute_by_kernels
        """What a step does on the device; tests replace it by plain PyTorch."""
        self._graphs = StepGraphs(CudaCapturer(device) if is_cuda and cuda_graphs else None)
        self._memory = _StepMemory(
            self.model, max_rows=MAX_GRAPH_ROWS, max_elements=self.planner.largest_captured().num_elements
        )
        """For all steps that can be captured; larger ones make it grow."""
        # A table of its own: the model's is made anew when the update needs a longer one, and graphs hold its address.
        self._rotary = policy.rotary.build(self.planner.max_positions, self.model.dtype, device)
        # Steps run one after the other, so that all of them share these.
        self._logits = torch.empty(LOGITS_AT_ONCE, config.vocab_size, dtype=self.model.dtype, device=device)
        self._sampling = SamplingScratch(LOGITS_AT_ONCE, config.vocab_size, device)
        num_lanes = AttentionScratch.lanes_for(group=self.planner.group, num_multiprocessors=num_multiprocessors)
        self._attention = AttentionScratch(num_lanes=num_lanes, head_dim=config.head_dim, device=device)
        self._addresses: tuple[int, ...] = ()
        self._step: CudaStep | None = None
        self._was_awaited = self.was_prepared = True

    @property
    def num_pages(self) -> int:
        """See `Runner`."""
        return self.cache.key_pages.shape[1]

    @property
    def page_bytes(self) -> int:
        """See `Runner`."""
        return page_bytes_of(self.model, self.planner.page_size)

    def row_edges(self, max_rows: int) -> list[int]:
        """See `Runner`."""
        return row_edges(max_rows)

    def allocate_pages(self, num_pages: int) -> None:
        """See `Runner`."""
        self.release_pages()
        self.cache = kv_cache_for(self.model, num_pages, self.planner.page_size, token_major=True)
        self._drop_graphs_if_moved()  # the allocator may well give the same addresses again

    def release_pages(self) -> None:
        """See `Runner`; graphs stay, for the pages may come back to the same place."""
        self.cache = kv_cache_for(self.model, 0, self.planner.page_size, token_major=True)
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()  # whole, not in the pieces that other tensors would leave of it

    def refresh_weights(self) -> None:
        """See `Runner`."""
        refresh_copy(self.model, self.policy)
        self._drop_graphs_if_moved()

    @torch.inference_mode()
    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """See `Runner`."""
        self.cache.copy_pages(list(sources), list(targets))

    def inputs_for(self, size: StepSize) -> StepInputs:
        """See `Runner`. Waits until the device has read the inputs of the step before."""
        shape = self.planner.shape(size)
        step = self._memory.steps.get(shape)
        if step is None:
            step = self._new_step(shape)
        self._memory.staging.wait()
        step.inputs.split_keys[0] = choose_split_keys(max_keys=size.max_keys, num_splits=shape.num_splits)
        self._step = step
        return step.inputs

    def launch(self, inputs: StepInputs, filters: RowFilters | None) -> None:
        """See `Runner`."""
        step = self._step
        assert step is not None
        assert step.inputs is inputs, "these are not the inputs that were asked for last"
        can_capture = step.shape.num_rows <= MAX_GRAPH_ROWS
        try:
            self._memory.staging.upload(inputs.layout.num_elements)
            is_prepared = self._graphs.run(step.shape.graph_key, partial(self.compute, step), can_capture=can_capture)
            if filters is not None:
                self._sample_filtered(step, filters)
        except RuntimeError as error:
            if not was_out_of_memory(error):
                raise
            raise _out_of_memory(step.shape) from error
        # What is left of a step that nobody waited for counts as this step's time.
        self.was_prepared = is_prepared and self._was_awaited
        if step.shape.num_sampled:
            self._memory.results.download(2 * aligned(step.shape.num_sampled))

    def wait(self, num_sampled: int) -> SampledRows:
        """See `Runner`."""
        step = self._step
        assert step is not None, "no step was launched"
        if num_sampled:
            self._memory.results.wait()
        self._was_awaited = num_sampled > 0
        found = step.found
        return SampledRows(token_ids=found.token_ids[:num_sampled].copy(), logprobs=found.logprobs[:num_sampled].copy())

    @torch.inference_mode()
    def move_kv(self, sources: Int32Array, targets: Int32Array) -> None:
        """See `Runner`. The host does not wait for the moves."""
        self.cache.move_indices(sources, targets)

    def time_step(self, num_rows: int, context_tokens: int, num_sequences: int) -> float:
        """See `Runner`; what compiling and capturing take is not part of it."""
        self._was_awaited = True
        while True:
            inputs = timed_step(self, num_rows, context_tokens, num_sequences, self.planner.page_size)
            if self.model.device.type == "cuda":
                torch.cuda.synchronize(self.model.device)
            started = time.perf_counter()
            self.launch(inputs, None)
            self.wait(num_rows)
            if self.was_prepared:
                return time.perf_counter() - started

    @torch.inference_mode()
    def _compute_by_kernels(self, step: CudaStep) -> None:
        """Forward pass and sampling; fills `step.hidden`, `tokens` and `logprobs`, padding rows with anything.

        It asks the device nothing and allocates nothing whose size depends on data: a graph can hold it.
        """
        from srtrl.model.triton_layers import fused_forward

        fused_forward(
            self.model,
            self.cache,
            step.rows,
            rotary=self._rotary,
            block_m=step.shape.block_m,
            num_splits=step.shape.num_splits,
            scratch=self._attention,
            out=step.hidden,
        )
        for first in range(0, step.shape.num_sampled, LOGITS_AT_ONCE):
            rows = slice(first, min(first + LOGITS_AT_ONCE, step.shape.num_sampled))
            logits = self._logits[: rows.stop - first]
            torch.mm(step.hidden[rows], self.model.head_weight.t(), out=logits)
            self._sample(step, rows, logits)

    @torch.inference_mode()
    def _sample_filtered(self, step: CudaStep, filters: RowFilters) -> None:
        """Sample the rows of a computed step once more under top-k and top-p; log-probs are those without them.

        Plain PyTorch with a sort, outside the graph: training never asks for it.
        """
        device = step.hidden.device
        top_k, top_p = (copy_to_device(torch.from_numpy(array), device) for array in (filters.top_k, filters.top_p))
        for first in range(0, len(top_k), FILTERED_AT_ONCE):
            rows = slice(first, min(first + FILTERED_AT_ONCE, len(top_k)))
            temperatures = step.temperatures[rows]
            logits = step.hidden[rows] @ self.model.head_weight.t()
            filtered = filter_top_k_top_p(logits, temperatures, top_k[rows], top_p[rows])
            self._sample(step, rows, filtered)
            step.logprobs[rows] = row_logprobs_reference(logits, temperatures, step.tokens[rows].long())

    def _sample(self, step: CudaStep, rows: slice, logits: Tensor) -> None:
        from srtrl.engine.triton_sampling import sample_rows_triton

        noise = (step.temperatures[rows], step.rng_keys[rows], step.sample_positions[rows])
        sample_rows_triton(logits, *noise, step.tokens[rows], step.logprobs[rows], self._sampling)

    def _new_step(self, shape: StepShape) -> CudaStep:
        """Views of a step whose shape is new, or dropped; one that is larger than all before moves the memory."""
        layout, memory = self.planner.layout(shape), self._memory
        if layout.num_rows > memory.max_rows or layout.num_elements > memory.max_elements:
            max_rows = max(layout.num_rows, memory.max_rows)
            max_elements = max(layout.num_elements, memory.max_elements)
            try:
                memory = self._memory = _StepMemory(self.model, max_rows=max_rows, max_elements=max_elements)
            except torch.OutOfMemoryError as error:
                raise _out_of_memory(shape) from error
            self._graphs.drop()
        return memory.make_step(shape, layout, shape.block_m // self.planner.group)

    def _drop_graphs_if_moved(self) -> None:
        """Drop them where weights or pages lie elsewhere; with fewer pages all layers but the first have moved."""
        tensors = [*self.model.parameters(), self.cache.key_pages, self.cache.value_pages]
        addresses = (self.num_pages, *(tensor.data_ptr() for tensor in tensors))
        if self.num_pages and addresses != self._addresses:  # without pages: when they are back
            self._addresses = addresses
            self._graphs.drop()


def _out_of_memory(shape: StepShape) -> ValueError:
    return ValueError(
        f"a decode step of {shape.num_rows} rows ({shape.num_sampled} of them sampled) did not find the memory that it "
        "needs on the device: lower rollout.kv_memory_share (or rollout.kv_memory_gib), which shrinks the KV cache, "
        "or rollout.slots and rollout.prefill_chunk_tokens, which make steps smaller"
    )
