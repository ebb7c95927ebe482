"""The interface of the device that computes: one forward pass with sampling, and the KV cache.

`cpu_runner.py` and `srtrl/cuda/runner.py` implement it. A step: `inputs_for` gives the arrays, the engine fills them,
`launch` queues the step, `wait` brings the sampled tokens, `move_kv` makes accepted drafts' KV contiguous.
"""

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from srtrl.drafters.draft_tree import ROOT, DraftTrees, ranges
from srtrl.engine.batch import Batch
from srtrl.engine.page_pool import PagePool
from srtrl.engine.step_inputs import Int32Array, Int64Array, StepInputs, StepSize, fill_inputs
from srtrl.model.paged_attention import KVCache
from srtrl.model.transformer import ModelConfig, Transformer
from srtrl.types import TopTokens

PAGE_SIZE = 16
"""Tokens of a page of the KV cache: with 8 the CPU's attention kernel takes 1.4 to 2 times as long."""


@dataclass(kw_only=True, slots=True, frozen=True)
class EngineOptions:
    """Settings of an engine; see `RolloutSection` of the recipe for the fields of the same name."""

    slots: int = 64
    page_size: int = PAGE_SIZE
    num_pages: int | None = None
    """For tests and benchmarks: this number of pages; None: as many as are needed and `kv_memory_gib` holds."""
    kv_memory_gib: float | Literal["auto"] = "auto"
    kv_reserved_bytes: int = 0
    """Memory of the device that the update will take beside what it has already; for `kv_memory_gib` auto."""
    cuda_graphs: bool = True
    prefill_chunk_tokens: int = 512
    """Prompt tokens computed in one decode step at most, beside the decoding sequences."""
    max_sequence_tokens: int | None = None
    """Longest prompt and response together; by default what the model was made for."""
    draft_budget: Literal["auto"] | int = "auto"
    max_draft_nodes: int = 128
    """Largest number of draft nodes of one sequence in one step."""
    num_top: int = 0
    """Most likely tokens that the drafter wants of each sampled row; for runners that take them while they sample."""
    state_layers: tuple[int, ...] = ()
    """Numbers of layers after which the drafter wants the residual stream of each row; see `Runner.states`."""
    drafter_page_bytes: int = 0
    """Memory that the drafter takes beside each page, for layers of its own."""

    def longest_sequence(self, model_limit: int) -> int:
        """Longest prompt and response together; ValueError where the model was made for less."""
        num_tokens = self.max_sequence_tokens or model_limit
        if num_tokens > model_limit:
            raise ValueError(
                f"sequences of up to {num_tokens} tokens are asked for, but the model was made for {model_limit} "
                "(max_position_embeddings in its config.json, or the limit of its family in docs/models.md): lower "
                "rollout.max_prompt_tokens or rollout.max_new_tokens"
            )
        return num_tokens


@dataclass(kw_only=True, slots=True, frozen=True)
class SampledRows:
    """A token and its log-prob for each sampled row, in the order of the rows."""

    token_ids: Int32Array
    """[L real]."""
    logprobs: npt.NDArray[np.float32]
    """[L real], of the tempered distribution without top-k or top-p; not finite where the logits are not."""


@dataclass(kw_only=True, slots=True, frozen=True)
class RowFilters:
    """Top-k and top-p of each sampled row: evaluation and `generate` only."""

    top_k: Int64Array
    """[L real], 0 keeps all."""
    top_p: npt.NDArray[np.float64]
    """[L real], 1 keeps all."""


class Runner(ABC):
    """Computes decode steps; owns the decoder's view of the weights and the KV cache."""

    is_asynchronous: ClassVar[bool]
    """Whether `launch` returns before the step is computed."""
    was_prepared = True
    """Whether the last step, with what was run after it, took no longer than such steps do: nothing was compiled."""
    cache: KVCache
    num_graphs_dropped = 0
    """Captured steps that were dropped because weights or pages had moved; `Engine.take_metrics` resets it."""
    inputs: StepInputs
    """The arrays of the last step."""
    hidden: Tensor
    """[at least N, D], after the final norm, of the rows of the last step, on the device; the next overwrites them."""
    states: Tensor
    """[at least N, len(state_layers) D], likewise: the residual stream after these layers."""

    def __init__(self, policy: Transformer, options: EngineOptions, *, token_major: bool = False) -> None:
        """A runner without pages: `allocate_pages` must follow. `token_major`: see `KVCache`."""
        self.page_size = options.page_size
        self.model = policy
        """The policy itself: decoder and update share its tensors."""
        self._state_layers = options.state_layers
        self._token_major = token_major

    @abstractmethod
    def row_edges(self, max_rows: int) -> list[int]:
        """Ascending row counts up to at least `max_rows`: steps are padded to the next one, so the cost rises there."""

    @abstractmethod
    def warm_up(self, *, compiles: bool) -> None:
        """Do once what the first steps would wait for; no page is in use.

        `compiles`: also compile the kernels of a device; False where the first steps may do so.
        """

    @abstractmethod
    def inputs_for(self, size: StepSize) -> StepInputs:
        """Arrays for a step of this size, to fill (`rows.fill_inputs`) before `launch`; valid until the next call."""

    @abstractmethod
    def launch(self, inputs: StepInputs, filters: RowFilters | None) -> None:
        """Queue the step: forward pass and sampling. `filters`: None where no row has top-k or top-p."""

    @abstractmethod
    def wait(self, num_sampled: int) -> SampledRows:
        """Wait for the launched step; returns the first `num_sampled` rows. Does not wait for 0 of them."""

    def top_tokens(self, rows: Int64Array, num: int) -> TopTokens | None:
        """The `num` most likely tokens in some sampled rows of the last step, as `wait` numbers them.

        None: this runner does not offer them. Call it after `wait`.
        """
        return None

    @property
    def num_pages(self) -> int:
        """Pages of the KV cache."""
        return self.cache.key_pages.shape[1]

    def allocate_pages(self, num_pages: int) -> None:
        """Have this many pages, no page being in use; raises `torch.OutOfMemoryError`."""
        self.cache = self.make_cache(self.model.config, num_pages)
        self._may_have_moved = True
        """Whether weights or pages may lie elsewhere than in the last step."""

    def make_cache(self, config: ModelConfig, num_pages: int) -> KVCache:
        """An empty cache for layers of this shape, in the layout and type that this runner's kernels read."""
        return KVCache(
            num_layers=config.num_hidden_layers,
            num_pages=num_pages,
            page_size=self.page_size,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            dtype=self.model.dtype,
            device=self.model.device,
            token_major=self._token_major,
        )

    def weights_changed(self) -> None:
        """The policy's weights have changed; those of a sharded policy may lie elsewhere now."""
        self._may_have_moved = True

    @abstractmethod
    def move_kv(self, moves: Int32Array) -> None:
        """Copy single positions in all layers, `verify.plan_moves` [n, 3], before the next step reads or writes any."""

    def time_step(self, num_rows: int, context_tokens: int, num_sequences: int) -> float:
        """Seconds of a step of `num_rows` sampled rows, roots of sequences of `context_tokens` and chains after them.

        A sequence has at most as many rows as one step may verify of it. What compiling and capturing take is not part
        of it. No page may be in use: they are overwritten.
        """
        while True:
            inputs = timing_inputs(self, num_rows, context_tokens, num_sequences)
            if self.model.device.type == "cuda":
                torch.cuda.synchronize(self.model.device)
            started = time.perf_counter()
            self.launch(inputs, None)
            self.wait(num_rows)
            if self.was_prepared:
                return time.perf_counter() - started


def page_bytes_of(model: Transformer, page_size: int) -> int:
    """Memory of one page of the KV of `model`, all layers, keys and values."""
    return page_bytes(model.config, model.dtype, model.device, page_size)


def page_bytes(config: ModelConfig, dtype: torch.dtype, device: torch.device, page_size: int) -> int:
    """Memory of one page of the KV of a model of this shape, type and device."""
    num_numbers = config.num_hidden_layers * page_size * config.num_key_value_heads * config.head_dim
    kept = torch.promote_types(dtype, torch.float32) if device.type == "cpu" else dtype
    return 2 * num_numbers * kept.itemsize


def timing_inputs(runner: Runner, num_rows: int, context_tokens: int, num_sequences: int) -> StepInputs:
    """Inputs of a step that is only timed: chains of draft nodes after `context_tokens` zeros each, on any pages."""
    num_nodes = np.diff(np.arange(num_sequences + 1) * num_rows // num_sequences) - 1
    parents = ranges(np.full(num_sequences, ROOT), num_nodes).astype(np.int32)
    trees = DraftTrees(
        token_ids=np.zeros_like(parents),
        parents=parents,
        scores=np.ones(len(parents), np.float32),
        offsets=np.concatenate([[0], num_nodes.cumsum()]),
    )
    max_nodes = int(num_nodes.max())
    size = StepSize(
        rows_per_sequence=1 + num_nodes,
        num_sampled=num_rows,
        num_keys=context_tokens + num_nodes,
        page_size=runner.page_size,
    )
    batch = Batch(num_sequences, context_tokens, PagePool(1, runner.page_size), max_nodes)
    batch.num_tokens[:] = context_tokens
    batch.temperatures[:] = 1
    batch.page_table[:] = np.arange(batch.page_table.size).reshape(batch.page_table.shape) % runner.num_pages
    inputs = runner.inputs_for(size)
    fill_inputs(inputs, batch.arrays, np.arange(num_sequences), trees, [], runner.page_size)
    return inputs
