"""What the engine needs of the side that computes: one forward pass with sampling, and the KV cache.

`cpu_runner.py` and `cuda_runner.py` implement it. A step: `inputs_for` gives the arrays, the engine fills them,
`launch` queues the step, `wait` brings the sampled tokens, `move_kv` makes accepted drafts' KV contiguous.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from srtrl.engine.rows import Int32Array, Int64Array, StepInputs, StepSize
from srtrl.model.paged_attention import KVCache
from srtrl.model.transformer import Transformer


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


class Runner(Protocol):
    """Computes decode steps; owns the decoder's view of the weights and the KV cache."""

    model: Transformer
    """The policy itself, or a copy in the decoder's dtype."""
    is_asynchronous: bool
    """Whether `launch` returns before the step is computed."""
    was_prepared: bool
    """Whether the last step took no longer than such steps do: no compilation, no graph capture."""
    wait_seconds: float
    """How long the last `wait` did nothing but wait."""

    @property
    def num_pages(self) -> int:
        """Pages of the KV cache."""

    @property
    def page_bytes(self) -> int:
        """Memory of one page, all layers, keys and values."""

    def row_edges(self, max_rows: int) -> list[int]:
        """Ascending row counts up to at least `max_rows`: steps are padded to the next one, so the cost rises there."""

    def allocate_pages(self, num_pages: int) -> None:
        """Have this many pages, no page being in use; raises `torch.OutOfMemoryError` and then has none."""

    def release_pages(self) -> None:
        """Give the memory of the pages back."""

    def refresh_weights(self) -> None:
        """The policy's weights have changed."""

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole pages in all layers before the next `launch`; sources are read before targets are written."""

    def inputs_for(self, size: StepSize) -> StepInputs:
        """Arrays for a step of this size, to be filled (`rows.fill_inputs`) before `launch`."""

    def launch(self, inputs: StepInputs, filters: RowFilters | None) -> None:
        """Queue the step: forward pass and sampling. `filters`: None where no row has top-k or top-p."""

    def wait(self, num_sampled: int) -> SampledRows:
        """Wait for the launched step; returns the first `num_sampled` rows. Does not wait for 0 of them."""

    def move_kv(self, sources: Int32Array, targets: Int32Array, starts: Int64Array) -> None:
        """Copy single positions in all layers (KV indices [n]); those of move group g are starts[g] to starts[g + 1].

        Within a group every source is read before any target is written; groups touch different pages.
        """

    def time_step(self, num_rows: int, context_tokens: int) -> float:
        """Seconds of a step of `num_rows` sampled rows that see `context_tokens` each; no page may be in use."""


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
    return KVCache.bytes_per_page(
        num_layers=model.config.num_hidden_layers,
        page_size=page_size,
        num_kv_heads=model.config.num_key_value_heads,
        head_dim=model.config.head_dim,
        dtype=model.dtype,
    )
