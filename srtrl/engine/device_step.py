"""What a decode step does on a CUDA device: forward pass and sampling of all rows, from inputs at fixed addresses.

`DeviceStep.compute` asks the device nothing and allocates nothing whose size depends on data: it can be captured in a
graph. Letters: see `srtrl/types.py`; L rows with logits.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from srtrl.engine.buckets import BucketPlanner, StepShape
from srtrl.engine.row_sampling import RowSampling
from srtrl.engine.step_buffers import HostInputs, ResultBuffer, StagingBuffer, StepInputs, num_elements, view_inputs
from srtrl.engine.triton_filter import Cuts, find_cuts
from srtrl.engine.triton_sampling import SamplingScratch, sample_rows_triton
from srtrl.model.device_copy import copy_to_device
from srtrl.model.device_plan import AttentionScratch, DevicePlan
from srtrl.model.fused_forward import fused_forward, rotary_table
from srtrl.model.paged_attention import KVCache
from srtrl.model.transformer import Transformer

MAX_SCRATCH_BYTES = 64 << 20
"""Of the attention's partial results; what would need more is done in several launches."""

LOGITS_AT_ONCE = 1024
"""Most rows whose logits exist at a time: with a vocabulary of 152 thousand in bfloat16 they take 0.3 GB."""

MAX_VIEWS = 256
"""Of the views of different steps, so many are kept."""


class StepMemory:
    """What lies at fixed addresses for steps up to some size: inputs, results, hidden states and scratch memory."""

    def __init__(self, model: Transformer, *, max_rows: int, max_elements: int) -> None:
        """Allocate for steps of so many rows and elements of inputs."""
        config, device = model.config, model.device
        self.max_rows = max_rows
        self._steps: dict[tuple[StepShape, int], StepTensors] = {}
        self.staging = StagingBuffer(max_elements, device)
        self.results = ResultBuffer(max_rows, device)
        self.hidden = torch.empty(max_rows, config.hidden_size, dtype=model.dtype, device=device)
        self.attention = AttentionScratch(
            num_rows=max_rows,
            num_heads=config.num_attention_heads,
            head_dim=config.head_dim,
            num_lanes=MAX_SCRATCH_BYTES // (4 * (config.head_dim + 2)),
            dtype=model.dtype,
            device=device,
        )

    def holds(self, shape: StepShape, num_tables: int) -> bool:
        """Whether a step fits."""
        return (shape, num_tables) in self._steps or (
            shape.num_rows <= self.max_rows and num_elements(shape, num_tables) <= len(self.staging)
        )

    def step(self, shape: StepShape, num_tables: int) -> "StepTensors":
        """The views of a step with so many page tables; kept, for making them takes longer than filling them."""
        step = self._steps.get((shape, num_tables))
        if step is None:
            if len(self._steps) >= MAX_VIEWS:
                self._steps.clear()
            assert self.holds(shape, num_tables)
            tokens, logprobs = self.results.views(shape.num_logits)
            step = self._steps[shape, num_tables] = StepTensors(
                shape=shape,
                num_elements=num_elements(shape, num_tables),
                host=HostInputs.of(view_inputs(self.staging.host, shape, num_tables)),
                device=view_inputs(self.staging.device, shape, num_tables),
                hidden=self.hidden[: shape.num_rows],
                tokens=tokens,
                logprobs=logprobs,
                attention=self.attention,
            )
        return step


@dataclass(kw_only=True, slots=True, frozen=True)
class StepTensors:
    """One step's views of a `StepMemory`."""

    shape: StepShape
    num_elements: int
    """Length of the inputs."""
    host: HostInputs
    device: StepInputs
    hidden: Tensor
    """[N, D], written."""
    tokens: Tensor
    """[L] int32, written."""
    logprobs: Tensor
    """[L] float32, written."""
    attention: AttentionScratch


class DeviceStep:
    """The computation of a step, on one model and one cache.

    Logits of all steps go through one buffer, `LOGITS_AT_ONCE` rows at a time: steps run one after the other.
    """

    def __init__(self, model: Transformer, cache: KVCache, planner: BucketPlanner) -> None:
        self.model = model
        self.cache = cache
        self.num_positions = planner.max_positions
        self.rows_at_once = planner.rows_at_once if planner.deterministic else None
        # A table of its own: the model's is made anew when the update needs a longer one, and graphs hold its address.
        self.rotary = rotary_table(model, self.num_positions)
        vocab_size = model.config.vocab_size
        self.logits = torch.empty(LOGITS_AT_ONCE, vocab_size, dtype=model.dtype, device=model.device)
        self.sampling = SamplingScratch.allocate(LOGITS_AT_ONCE, vocab_size, model.device)

    @torch.inference_mode()
    def compute(self, step: StepTensors) -> None:
        """Forward pass and sampling; fills `step.hidden`, `tokens` and `logprobs`, padding rows with anything."""
        plan = DevicePlan(
            self.cache,
            step.device.rows,
            num_positions=self.num_positions,
            launch=step.shape.launch,
            scratch=step.attention,
            rows_at_once=self.rows_at_once,
        )
        fused_forward(self.model, step.device.token_ids, plan, rotary=self.rotary, out=step.hidden)
        self._sample(step)

    @torch.inference_mode()
    def sample_again(self, step: StepTensors, sampling: RowSampling) -> None:
        """Sample the rows of a computed step once more, some of them with top-k or top-p (`sampling` [L real]).

        Apart from `compute`, for training never asks for it.
        """
        num_logits, num_sampled = step.shape.num_logits, len(sampling.rng_keys)
        device = step.tokens.device
        top_k = torch.zeros(num_logits, dtype=torch.int32)
        top_p = torch.ones(num_logits, dtype=torch.float32)
        top_k[:num_sampled] = torch.from_numpy(sampling.top_k)
        top_p[:num_sampled] = torch.from_numpy(sampling.top_p)
        self._sample(step, copy_to_device(top_k, device), copy_to_device(top_p, device))

    def _sample(self, step: StepTensors, top_k: Tensor | None = None, top_p: Tensor | None = None) -> None:
        """Logits and sampling of the step's first rows; `top_k` [L] int32 and `top_p` [L] float32 as in `find_cuts`."""
        inputs, num_logits = step.device, step.shape.num_logits
        for first in range(0, num_logits, LOGITS_AT_ONCE):
            rows = slice(first, min(first + LOGITS_AT_ONCE, num_logits))
            logits = self.logits[: rows.stop - first]
            write_logits(step.hidden[rows], self.model.head_weight, logits, self.rows_at_once)
            cuts = None
            if top_k is not None and top_p is not None:
                cuts = Cuts.allocate(len(logits), logits.device)
                find_cuts(logits, inputs.temperatures[rows], top_k[rows], top_p[rows], cuts)
            sample_rows_triton(
                logits,
                inputs.temperatures[rows],
                inputs.rng_keys[rows],
                inputs.places[rows],
                inputs.forced[rows],
                step.tokens[rows],
                step.logprobs[rows],
                self.sampling,
                cuts=cuts,
            )


def write_logits(hidden: Tensor, head_weight: Tensor, logits: Tensor, rows_at_once: int | None) -> None:
    """Write `hidden` [L, D] times `head_weight` [V, D], transposed, into `logits` [L, V], so many rows at a time."""
    rows_at_once = rows_at_once or len(hidden)
    for first in range(0, len(hidden), rows_at_once):
        rows = slice(first, first + rows_at_once)
        torch.mm(hidden[rows], head_weight.t(), out=logits[rows])
