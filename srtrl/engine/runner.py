"""What the engine needs of the side that computes: one forward pass with sampling, and the KV cache.

`cpu_runner.py` and `cuda_runner.py` implement it. A step: `inputs_for` gives the arrays, the engine fills them,
`launch` queues the step, `wait` brings the sampled tokens, `move_kv` makes accepted drafts' KV contiguous.
"""

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt
import torch

from srtrl.drafters.draft_tree import ROOT, DraftTrees, ranges
from srtrl.engine.rows import BatchArrays, Int32Array, Int64Array, StepInputs, StepSize, fill_inputs
from srtrl.model.paged_attention import KVCache
from srtrl.model.transformer import Transformer

PAGE_SIZE = 16
"""Tokens of a page of the KV cache: with 8 the CPU's attention kernel takes 1.4 to 2 times as long."""


@dataclass(kw_only=True, slots=True, frozen=True)
class EngineOptions:
    """How an engine decodes; see `RolloutSection` of the recipe for the fields of the same name."""

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
    run_ahead_max_slowdown: float | None = 0.03


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
    """Whether the last step took no longer than such steps do: no compilation, no graph capture."""

    def __init__(self, policy: Transformer, options: EngineOptions, *, token_major: bool = False) -> None:
        """Without pages: `allocate_pages` must follow. For `token_major` see `KVCache`."""
        self.page_size = options.page_size
        self.model = policy
        """The policy itself: decoder and update share its tensors."""
        self._token_major = token_major
        self._may_have_moved = True
        """Whether weights or pages may lie elsewhere than in the last step."""
        self.cache = kv_cache_for(policy, 0, options.page_size, token_major=token_major)

    @abstractmethod
    def row_edges(self, max_rows: int) -> list[int]:
        """Ascending row counts up to at least `max_rows`: steps are padded to the next one, so the cost rises there."""

    @abstractmethod
    def inputs_for(self, size: StepSize) -> StepInputs:
        """Arrays for a step of this size, to fill (`rows.fill_inputs`) before `launch`; valid until the next call."""

    @abstractmethod
    def launch(self, inputs: StepInputs, filters: RowFilters | None) -> None:
        """Queue the step: forward pass and sampling. `filters`: None where no row has top-k or top-p."""

    @abstractmethod
    def wait(self, num_sampled: int) -> SampledRows:
        """Wait for the launched step; returns the first `num_sampled` rows. Does not wait for 0 of them."""

    @property
    def num_pages(self) -> int:
        """Pages of the KV cache."""
        return self.cache.key_pages.shape[1]

    @property
    def page_bytes(self) -> int:
        """Memory of one page, all layers, keys and values."""
        return page_bytes_of(self.model, self.page_size)

    def allocate_pages(self, num_pages: int) -> None:
        """Have this many pages, no page being in use; raises `torch.OutOfMemoryError`."""
        self._may_have_moved = True
        self.cache = kv_cache_for(self.model, num_pages, self.page_size, token_major=self._token_major)

    def weights_changed(self) -> None:
        """The policy's weights have changed; those of a sharded policy may lie elsewhere now."""
        self._may_have_moved = True

    @torch.inference_mode()
    def move_kv(self, sources: Int32Array, targets: Int32Array) -> None:
        """Copy single positions in all layers, KV indices [n]; every source is read before any target is written.

        The host does not wait for it.
        """
        self.cache.move_indices(sources, targets)

    def time_step(self, num_rows: int, context_tokens: int, num_sequences: int) -> float:
        """Seconds of a step of `num_rows` sampled rows, roots of sequences of `context_tokens` and chains after them.

        A sequence has at most as many rows as one step may verify of it. What compiling and capturing take is not part
        of it. No page may be in use: they are overwritten.
        """
        while True:
            inputs = timed_step(self, num_rows, context_tokens, num_sequences, self.page_size)
            if self.model.device.type == "cuda":
                torch.cuda.synchronize(self.model.device)
            started = time.perf_counter()
            self.launch(inputs, None)
            self.wait(num_rows)
            if self.was_prepared:
                return time.perf_counter() - started


def kv_cache_for(model: Transformer, num_pages: int, page_size: int, *, token_major: bool = False) -> KVCache:
    """A cache of `num_pages` for the decoder's model; for `token_major` see `KVCache`."""
    config = model.config
    return KVCache(
        num_layers=config.num_hidden_layers,
        num_pages=num_pages,
        page_size=page_size,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        dtype=model.dtype,
        device=model.device,
        token_major=token_major,
    )


def page_bytes_of(model: Transformer, page_size: int) -> int:
    """Memory of one page of the KV of `model`, all layers, keys and values."""
    config = model.config
    num_numbers = config.num_hidden_layers * page_size * config.num_key_value_heads * config.head_dim
    dtype = torch.promote_types(model.dtype, torch.float32) if model.device.type == "cpu" else model.dtype
    return 2 * num_numbers * dtype.itemsize


def timed_step(runner: Runner, num_rows: int, context_tokens: int, num_sequences: int, page_size: int) -> StepInputs:
    """Inputs of a step that is only timed: chains of draft nodes after `context_tokens` zeros each, on any pages."""
    rows_each = np.diff(np.arange(num_sequences + 1) * num_rows // num_sequences)
    offsets = np.concatenate([[0], (rows_each - 1).cumsum()])
    parents = ranges(np.full(num_sequences, ROOT), rows_each - 1)
    trees = DraftTrees(
        token_ids=np.zeros(len(parents), np.int32),
        parents=parents.astype(np.int32),
        scores=np.ones(len(parents), np.float32),
        offsets=offsets,
    )
    size = StepSize(
        rows_per_sequence=rows_each,
        num_sampled=num_rows,
        max_keys=context_tokens + int(rows_each.max()) - 1,
        page_size=page_size,
    )
    pages = np.arange(num_sequences * size.max_pages, dtype=np.int32) % np.int32(runner.num_pages)
    batch = BatchArrays(
        token_ids=np.zeros((num_sequences, context_tokens), np.int32),
        logprobs=np.zeros((num_sequences, context_tokens), np.float32),
        num_tokens=np.full(num_sequences, context_tokens),
        num_prompt_tokens=np.ones(num_sequences, np.int64),
        max_tokens=np.full(num_sequences, context_tokens),
        rng_keys=np.arange(num_sequences, dtype=np.uint64),
        temperatures=np.ones(num_sequences, np.float32),
        end_tokens=np.zeros((num_sequences, 1), np.int32),
        page_table=pages.reshape(num_sequences, size.max_pages),
    )
    inputs = runner.inputs_for(size)
    fill_inputs(inputs, batch, np.arange(num_sequences), trees, [], page_size)
    return inputs
