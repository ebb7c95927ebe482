"""Decode steps on a CUDA device: one graph launch and one wait.

The host writes a step into pinned memory (`inputs_for`); `launch` queues its copy to the device, the moves of KV that
the step before has left, the forward pass with sampling, and the copy of the results, and returns while the device
computes; `wait` brings the tokens and log-probs. All lie at fixed addresses, so that one captured graph holds them.
The same path runs on a CPU under Triton's interpreter, kernel by kernel, for tests. Letters: see
`srtrl/engine/step_inputs.py`; V vocabulary, D width of the model, K most likely tokens.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from srtrl.cuda.graphs import StepGraphs
from srtrl.cuda.layers import fused_forward, move_kv
from srtrl.cuda.sampling import SamplingScratch, sample_rows_triton
from srtrl.cuda.shapes import LOGITS_AT_ONCE, LaunchShape, ShapePlanner, row_edges
from srtrl.cuda.tiles import H200, AttentionScratch, DeviceLimits, TiledRows, fill_tiles
from srtrl.engine.runner import EngineOptions, RowFilters, Runner, SampledRows
from srtrl.engine.sampling import filter_top_k_top_p, row_logprobs
from srtrl.engine.step_inputs import (
    Array,
    Int32Array,
    Int64Array,
    StepInputs,
    StepSize,
    aligned,
    num_elements,
    slices_of,
    views_of,
)
from srtrl.model.attention import copy_to_device
from srtrl.model.transformer import Transformer, layer_states
from srtrl.types import TopTokens

NO_MOVES = np.empty((0, 3), np.int32)

FILTERED_AT_ONCE = 64
"""Rows that are sorted at the same time for top-k and top-p: in float32, with indices, they take 0.4 GB."""


class PinnedCopy:
    """An int32 array on the host, pinned if the device is a CUDA device, and its twin there; a graph may copy it."""

    def __init__(self, length: int, device: torch.device) -> None:
        self.host = torch.zeros(length, dtype=torch.int32, pin_memory=device.type == "cuda")
        self.device = torch.zeros(length, dtype=torch.int32, device=device)

    def upload(self, length: int) -> None:
        """Queue the copy of the first elements to the device."""
        self.device[:length].copy_(self.host[:length], non_blocking=True)

    def download(self, length: int) -> None:
        """Queue the copy of the first elements to the host."""
        self.host[:length].copy_(self.device[:length], non_blocking=True)


class QueueMark:
    """A place in the device's queue of work; on a CPU, where nothing is queued, there is nothing to wait for."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def record(self) -> None:
        """Mark the end of what is queued now."""
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        """Return when all that was queued before the mark is done."""
        if self._event is not None:
            self._event.synchronize()


@dataclass(kw_only=True, slots=True, frozen=True)
class CudaStep:
    """The views of one shape of step, which are kept: to make them takes longer than to fill them."""

    shape: LaunchShape
    num_inputs: int
    """Elements of the arrays on the host, end to end."""
    num_results: int
    """Elements of the results, end to end."""
    host: dict[str, Array]
    """The arrays of `LaunchShape.fields` on the host; among them those of `inputs`."""
    inputs: StepInputs
    results: SampledRows
    """The results on the host, [L]."""
    rows: TiledRows
    """On the device, as all that follow."""
    temperatures: Tensor
    """[L] float32."""
    rng_keys: Tensor
    """[L] int64."""
    sample_positions: Tensor
    """[L] int32."""
    num_moves: Tensor
    """[1] int32."""
    moves: Tensor
    """[LaunchShape.max_moves, 3] int32, what the step before has left to move; see `verify.plan_moves`."""
    hidden: Tensor
    """[N, D], written."""
    tokens: Tensor
    """[L] int32, written."""
    logprobs: Tensor
    """[L] float32, written."""
    top: tuple[Tensor, Tensor]
    """[L, K] int32 and float32, written: see `TopTokens`."""
    host_top: tuple[Array, Array]
    """The same on the host."""


class CudaRunner(Runner):
    """`Runner` with fused kernels, fixed shapes and sampling on the device.

    Also for a policy on a CPU, under Triton's interpreter.
    """

    is_asynchronous = True

    def __init__(self, policy: Transformer, options: EngineOptions, max_sequence_tokens: int) -> None:
        """`max_sequence_tokens`: longest prompt and response together.

        Raises:
            ValueError: A window of the model is no longer than a draft tree may be deep.
        """
        super().__init__(policy, options, token_major=True)
        config, device = policy.config, policy.device
        windows = [kind.window for kind in config.layers if kind.window is not None]
        if min(windows, default=2**31) <= options.max_draft_nodes:
            raise ValueError(
                f"this model's window of {min(windows)} tokens must exceed the {options.max_draft_nodes} nodes that a "
                "draft tree may have on CUDA"
            )
        is_cuda = device.type == "cuda"
        # Else cuBLAS may add the parts of a product in bfloat16, if it is small: the decoder's alone, not the update's.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        limits = H200  # on a CPU: tests see the launches of a real device
        if is_cuda:
            properties = torch.cuda.get_device_properties(device)
            limits = DeviceLimits(
                num_multiprocessors=properties.multi_processor_count,
                shared_bytes=properties.shared_memory_per_multiprocessor,
            )
        self.planner = ShapePlanner(config, options, max_sequence_tokens, dtype=self.model.dtype, device=limits)
        self.compute: Callable[[CudaStep], None] = self._compute_by_kernels
        """Computation of a step on the device; tests replace it by plain PyTorch."""
        self._has_graphs = is_cuda and options.cuda_graphs
        self._graphs = StepGraphs(device if self._has_graphs else None)
        self._steps: dict[LaunchShape, CudaStep] = {}
        """Some 10 KiB each; there are as many as shapes."""
        # Steps run one after the other, so that all of them share what follows. It never moves: graphs hold addresses.
        largest = self.planner.largest()
        self._staging = PinnedCopy(num_elements(largest.fields()), device)
        self._num_top = options.num_top
        self._results = PinnedCopy(2 * (1 + self._num_top) * aligned(largest.step.num_sampled), device)
        self._end = QueueMark(device)
        """End of the step that was launched last."""
        num_rows, width = largest.step.num_rows, config.hidden_size
        self.hidden = torch.zeros(num_rows, width, dtype=self.model.dtype, device=device)
        self.states = self.hidden.new_zeros(num_rows if self._state_layers else 0, len(self._state_layers) * width)
        # Tables of its own: the model's are made anew when the update needs longer ones.
        self._rotary = [table.build(self.planner.max_positions, self.model.dtype, device) for table in policy.rotary]
        self._logits = torch.empty(LOGITS_AT_ONCE, config.vocab_size, dtype=self.model.dtype, device=device)
        self._sampling = SamplingScratch(LOGITS_AT_ONCE, config.vocab_size, device)
        self._attention = AttentionScratch(config.head_dim, device)
        self._moves: Int32Array = NO_MOVES
        self._addresses: tuple[int, ...] = ()
        self._step: CudaStep | None = None
        self._can_be_timed = True
        """Whether the next step takes its own time alone."""

    def row_edges(self, max_rows: int) -> list[int]:
        """See `Runner`."""
        return row_edges(max_rows)

    def warm_up(self, *, compiles: bool) -> None:
        """See `Runner`: capture the graphs of all steps that are worth one."""
        if not compiles:
            return
        if not self._has_graphs:
            self.time_step(1, 1, 1)
            return
        self._end.wait()
        self._staging.host.zero_()  # each is computed once before it is captured, without tiles
        self._drop_graphs_if_moved()
        shapes = self.planner.graph_shapes()
        self._graphs.prepare({shape: partial(self._run_step, self._make_step(shape)) for shape in shapes})
        self._end.record()

    def inputs_for(self, size: StepSize) -> StepInputs:
        """See `Runner`. Waits until the device is done with the step before."""
        shape = self.planner.shape(size)
        step = self._step = self._steps.get(shape) or self._make_step(shape)
        self._end.wait()
        step.host["split_keys"][0] = self.planner.split_keys(size, shape)
        step.host["num_moves"][0] = num_moves = len(self._moves)
        step.host["moves"][:num_moves] = self._moves
        self._moves, self._num_rows = NO_MOVES, size.num_rows
        return step.inputs

    def move_kv(self, moves: Int32Array) -> None:
        """See `Runner`; they are the first thing that the next step does."""
        assert not len(self._moves), "the last moves have not been launched"
        self._moves = moves

    def allocate_pages(self, num_pages: int) -> None:
        """See `Runner`."""
        self._moves = NO_MOVES  # of pages that are gone
        super().allocate_pages(num_pages)

    def launch(self, inputs: StepInputs, filters: RowFilters | None) -> None:
        """See `Runner`."""
        step = self._step
        assert step is not None
        assert step.inputs is inputs, "these are not the inputs that were asked for last"
        self.inputs, shape = inputs, inputs.shape
        fill_tiles(step.host["tiles"], inputs, self._num_rows, step.shape.rows_per_tile)
        if self._may_have_moved:
            self._drop_graphs_if_moved()
        try:
            can_capture = step.shape.is_captured
            is_prepared = self._graphs.run(step.shape, partial(self._run_step, step), can_capture=can_capture)
            if filters is not None:
                self._sample_filtered(step, filters)
        except torch.OutOfMemoryError as error:
            raise ValueError(
                f"a decode step of {shape.num_rows} rows ({shape.num_sampled} of them sampled) ran out of memory "
                "on the device: lower rollout.kv_memory_gib, which shrinks the KV cache, or rollout.slots, which makes "
                "steps smaller"
            ) from error
        self.was_prepared = is_prepared and self._can_be_timed
        self._end.record()

    def wait(self, num_sampled: int) -> SampledRows:
        """See `Runner`."""
        step = self._step
        assert step is not None, "no step was launched"
        if num_sampled:
            self._end.wait()
        self._can_be_timed = num_sampled > 0  # else the rest of this step counts as the next one's time
        results = step.results
        token_ids, logprobs = results.token_ids[:num_sampled].copy(), results.logprobs[:num_sampled].copy()
        return SampledRows(token_ids=token_ids, logprobs=logprobs)

    def top_tokens(self, rows: Int64Array, num: int) -> TopTokens | None:
        """See `Runner`."""
        assert self._step is not None, "no step was launched"
        assert num == self._num_top or not self._num_top, "the step did not take that number"
        token_ids, logprobs = self._step.host_top
        return TopTokens(token_ids=token_ids[rows], logprobs=logprobs[rows]) if self._num_top else None

    def run(self, key: Hashable, compute: Callable[[], None]) -> bool:
        """Compute something after the launched step; does not wait. See `StepGraphs.run`, also for what it returns."""
        is_prepared = self._graphs.run(key, compute)
        self.was_prepared &= is_prepared  # the host's time is part of this step, the device's of the next one
        self._can_be_timed &= is_prepared
        return is_prepared

    def _run_step(self, step: CudaStep) -> None:
        """Run a step as a graph has it: with the copies of inputs and results, each of which costs the host a call."""
        self._staging.upload(step.num_inputs)
        self.compute(step)
        self._results.download(step.num_results)

    @torch.inference_mode()
    def _compute_by_kernels(self, step: CudaStep) -> None:
        """Moves of KV, forward pass and sampling; fills `step.hidden`, `tokens`, `logprobs`, padding with anything.

        It asks the device nothing and allocates nothing whose size depends on data: a graph can hold it.
        """
        move_kv(self.cache, step.num_moves, step.moves)
        fused_forward(
            self.model,
            self.cache,
            step.rows,
            rotary=self._rotary,
            block_m=step.shape.block_m,
            num_splits=step.shape.num_splits,
            scratch=self._attention,
            out=step.hidden,
            states=layer_states(self._state_layers, self.states[: len(step.hidden)]),
        )
        for first in range(0, step.inputs.shape.num_sampled, LOGITS_AT_ONCE):
            rows = slice(first, min(first + LOGITS_AT_ONCE, step.inputs.shape.num_sampled))
            logits = self._logits[: rows.stop - first]
            torch.mm(step.hidden[rows], self.model.head_weight.t(), out=logits)
            self._sample(step, rows, logits, (step.top[0][rows], step.top[1][rows]) if self._num_top else None)

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
            step.logprobs[rows] = row_logprobs(logits, temperatures, step.tokens[rows].long())
        self._results.download(step.num_results)

    def _sample(self, step: CudaStep, rows: slice, logits: Tensor, top: tuple[Tensor, Tensor] | None = None) -> None:
        noise = (step.temperatures[rows], step.rng_keys[rows], step.sample_positions[rows])
        sample_rows_triton(logits, *noise, step.tokens[rows], step.logprobs[rows], self._sampling, top)

    def _make_step(self, shape: LaunchShape) -> CudaStep:
        """Views of a step of a new shape."""
        dtypes: dict[Any, torch.dtype] = {np.int32: torch.int32, np.int64: torch.int64, np.float32: torch.float32}
        layout = shape.fields()
        slices, host = slices_of(layout), views_of(self._staging.host.numpy(), layout)
        views = {
            name: self._staging.device[slices[name]].view(dtypes[dtype]).view(size)
            for name, (dtype, size) in layout.items()
        }
        num_sampled = shape.step.num_sampled
        width = aligned(num_sampled)  # log-probs, too, begin where kernels expect it
        k = self._num_top

        def parts(results: Tensor) -> tuple[Tensor, ...]:
            sampled, top = results[: 2 * width].view(2, width), results[2 * width : 2 * (1 + k) * width]
            token_ids, logprobs = top.view(2, width, k)[:, :num_sampled]
            tokens, of_tokens = sampled[:, :num_sampled]
            return tokens, of_tokens.view(torch.float32), token_ids, logprobs.view(torch.float32)

        host_tokens, host_logprobs, *host_top = (part.numpy() for part in parts(self._results.host))
        tokens, logprobs, *top = parts(self._results.device)
        step = self._steps[shape] = CudaStep(
            shape=shape,
            num_inputs=num_elements(layout),
            num_results=2 * (1 + k) * width,
            host=host,
            inputs=StepInputs(shape.step, *(host[name] for name in shape.step.fields())),
            results=SampledRows(token_ids=host_tokens, logprobs=host_logprobs),
            rows=TiledRows(**{field.name: views[field.name] for field in fields(TiledRows)}),
            temperatures=views["temperatures"],
            rng_keys=views["rng_keys"],
            sample_positions=views["sample_positions"],
            num_moves=views["num_moves"],
            moves=views["moves"],
            hidden=self.hidden[: shape.step.num_rows],
            tokens=tokens,
            logprobs=logprobs,
            top=(top[0], top[1]),
            host_top=(host_top[0], host_top[1]),
        )
        return step

    def _drop_graphs_if_moved(self) -> None:
        """Drop them where weights or pages lie elsewhere; with fewer pages all layers but the first have moved.

        Each is captured again by the first step that needs it: with sharded weights that may be so in each rollout.
        """
        tensors = [*self.model.parameters(), self.cache.key_pages, self.cache.value_pages]
        addresses = (self.num_pages, *(tensor.data_ptr() for tensor in tensors))
        if addresses != self._addresses:
            self._addresses = addresses
            self.num_graphs_dropped += len(self._graphs)
            self._graphs.drop()
        self._may_have_moved = False
