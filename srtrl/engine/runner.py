"""The device side of a decode step: one forward pass, and the compaction of accepted drafts."""

import time
from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from srtrl.drafters.draft_tree import DraftTrees
from srtrl.engine.options import EngineOptions
from srtrl.engine.rows import build_rows, dummy_rows, pad_tables, slots_of
from srtrl.engine.sequence import ScheduledStep
from srtrl.engine.step_cost import StepCost
from srtrl.engine.verify import Walk
from srtrl.model.paged_attention import Int32Array, KVCache, PagedPlan, PagedRows
from srtrl.model.transformer import Transformer

if TYPE_CHECKING:
    from srtrl.engine.device_runner import DeviceRunner

ROW_MULTIPLE = 8
"""Deterministic mode: at other row counts matrix products can give a row other bits (measured; see docs/LOG.md)."""


class ModelRunner:
    """Owns the decoder's view of the weights and the KV cache."""

    token_major: bool | None = None
    """Layout of the cache; see `KVCache`."""
    attention_note: str | None = None
    """What attends in plain decode steps on a CUDA device, and why not something else, where that was tried."""

    def __init__(
        self,
        policy: Transformer,
        *,
        num_pages: int,
        page_size: int,
        decode_dtype: torch.dtype | None,
        deterministic: bool,
    ) -> None:
        """`num_pages` may be 0: `allocate_pages` must then follow."""
        self.policy = policy
        self.deterministic = deterministic
        self.model = policy
        if decode_dtype is not None and decode_dtype != policy.dtype:
            self.model = Transformer(policy.config, decode_dtype, policy.device).requires_grad_(False)
            self._copy_weights()
        self.page_size = page_size
        self.was_prepared = True
        """Whether the last step took no more than such steps do; else it included compiling, capturing, or the rest of
        a step before it."""
        self.cache = self._new_cache(num_pages)

    def step_cost(self, max_rows: int) -> StepCost:
        """The (unknown) cost of this runner's steps of up to so many rows, with the row counts at which it rises."""
        return StepCost.padded_to(ROW_MULTIPLE if self.deterministic else 1, max_rows)

    def allocate_pages(self, num_pages: int) -> None:
        """Have so many pages, none of the old ones being in use; what they held is lost.

        Raises:
            torch.OutOfMemoryError: There is no memory for them; there are none then.
        """
        self.release_pages()
        self.cache = self._new_cache(num_pages)

    def release_pages(self) -> None:
        """Give the memory of the pages back."""
        self.cache = self._new_cache(0)

    @property
    def num_pages(self) -> int:
        """Pages of the cache."""
        return self.cache.key_pages.shape[1]

    @property
    def page_bytes(self) -> int:
        """Memory of one page, all layers, keys and values."""
        return page_bytes_of(self.model, self.page_size)

    def _new_cache(self, num_pages: int) -> KVCache:
        config = self.policy.config
        return KVCache(
            num_layers=config.num_hidden_layers,
            num_pages=num_pages,
            page_size=self.page_size,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            dtype=self.model.dtype,
            device=self.model.device,
            token_major=self.token_major,
        )

    def refresh_weights(self) -> None:
        """The policy's weights have changed: let the decoder have them."""
        self._copy_weights()

    def _copy_weights(self) -> None:
        """Copy the policy's weights into the cast copy, in place; nothing to do where the tensors are shared."""
        if self.model is not self.policy:
            with torch.no_grad():
                for target, source in zip(self.model.parameters(), self.policy.parameters(), strict=True):
                    target.copy_(source)

    @torch.inference_mode()
    def execute(self, step: ScheduledStep, trees: DraftTrees) -> Tensor:
        """Run the step's forward pass; returns logits [roots and nodes, V], each root followed by its nodes."""
        self._copy_pages(step)
        token_ids, rows = build_rows(step.decodes, trees, step.prefills, self.cache.page_size)
        return self._forward(token_ids, rows, num_logits=len(step.decodes) + trees.num_nodes)

    def _copy_pages(self, step: ScheduledStep) -> None:
        if step.page_copies:
            self.cache.copy_pages(
                [source for source, _ in step.page_copies], [target for _, target in step.page_copies]
            )

    @torch.inference_mode()
    def commit(self, walks: SequenceOf[Walk]) -> None:
        """Make the accepted path's KV contiguous behind the root: one gather and one scatter for all sequences.

        The sequences hold their new tokens already: root, accepted nodes and bonus token end `token_ids`.
        """
        for walk in walks:
            walk.sequence.num_computed = len(walk.sequence.token_ids) - 1
        drafted = [walk for walk in walks if walk.accepted]
        if not drafted:
            return
        counts = np.array([len(walk.accepted) for walk in drafted])
        nodes = np.array([node for walk in drafted for node in walk.accepted])
        roots = np.array([walk.sequence.num_computed for walk in drafted]) - 1 - counts  # positions
        levels = np.arange(len(nodes)) - np.repeat(np.cumsum(counts) - counts, counts)  # depth - 1 of each node
        moved = np.flatnonzero(nodes != levels)
        if not len(moved):
            return
        tables = pad_tables([walk.sequence.page_table for walk in drafted])
        owners = np.repeat(np.arange(len(drafted)), counts)[moved]
        sources, targets = (
            slots_of(tables, owners, roots[owners] + 1 + places[moved], self.cache.page_size)
            for places in (nodes, levels)
        )
        self._move_slots(sources, targets, owners)

    def _move_slots(self, sources: Int32Array, targets: Int32Array, owners: npt.NDArray[Any]) -> None:
        """Move single positions, [M] each; `owners` [M], ascending: which walk's they are."""
        self.cache.move_slots(sources, targets)

    @torch.inference_mode()
    def time_forward(
        self, num_rows: int, context_tokens: int, num_logits: int, *, num_sequences: int | None = None
    ) -> float:
        """Seconds of one forward pass over random rows, to learn what a decode step costs.

        The rows lie as draft rows do, in sequences of about equally many rows that each have pages of their own (as far
        as there are pages). What the pages hold is overwritten: no page may be in use.

        Args:
            num_rows: Roots and nodes together.
            context_tokens: Positions that each row sees, at least 1.
            num_logits: For how many of the rows logits are computed.
            num_sequences: By default one for every row, as without drafts.
        """
        token_ids, rows = self._dummy_rows(num_rows, context_tokens, num_sequences)
        self._synchronise()
        started = time.perf_counter()
        self._forward(token_ids, rows, num_logits)
        self._synchronise()
        return time.perf_counter() - started

    def _dummy_rows(
        self, num_rows: int, context_tokens: int, num_sequences: int | None
    ) -> tuple[Int32Array, PagedRows]:
        """See `time_forward`."""
        rows = dummy_rows(num_rows, context_tokens, num_sequences or num_rows, self.num_pages, self.page_size)
        return np.arange(num_rows, dtype=np.int32) % np.int32(self.policy.config.vocab_size), rows

    def _forward(self, token_ids: Int32Array, rows: PagedRows, num_logits: int) -> Tensor:
        """Logits [num_logits, V] of the first rows."""
        padded = np.zeros(self._padded(len(token_ids)), np.int64)
        padded[: len(token_ids)] = token_ids
        plan = PagedPlan(self.cache, rows, num_padded_rows=len(padded))
        hidden = self.model(torch.from_numpy(padded).to(self.model.device), plan)  # [N padded, D]
        logits = self.model.logits(hidden[: self._padded(num_logits)])
        return logits[:num_logits]

    def _synchronise(self) -> None:
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)

    def _padded(self, num_rows: int) -> int:
        return -(-num_rows // ROW_MULTIPLE) * ROW_MULTIPLE if self.deterministic else num_rows


def page_bytes_of(model: Transformer, page_size: int) -> int:
    """Memory of one page of the KV of `model`, all layers, keys and values."""
    return KVCache.bytes_per_page(
        num_layers=model.config.num_hidden_layers,
        page_size=page_size,
        num_kv_heads=model.config.num_key_value_heads,
        head_dim=model.config.head_dim,
        dtype=model.dtype,
    )


def make_runner(policy: Transformer, options: EngineOptions) -> ModelRunner:
    """The runner for a CPU, without pages yet.

    Raises:
        ValueError: An option is for CUDA devices only.
    """
    if options.attention not in ("auto", "triton"):
        raise ValueError(
            f"rollout.attention: {options.attention} is for decoding on a CUDA device, but the policy is on the "
            f"{policy.device.type}: leave the option out"
        )
    return ModelRunner(
        policy,
        num_pages=0,
        page_size=options.page_size,
        decode_dtype=options.decode_dtype,
        deterministic=True if options.deterministic is None else options.deterministic,
    )


def make_device_runner(policy: Transformer, options: EngineOptions, max_sequence_tokens: int) -> "DeviceRunner | None":
    """The runner for a CUDA device, without pages yet; None where the policy is on a CPU.

    Raises:
        ValueError: Triton is not installed, or the attention that the options name cannot be had.
    """
    on_cpu = policy.device.type == "cpu"
    if options.as_on_cuda is False or (options.as_on_cuda is None and on_cpu):
        return None
    try:
        from srtrl.engine.device_runner import DeviceRunner
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise ValueError(
            "decoding on a CUDA device needs Triton, which PyTorch's CUDA builds for Linux bring along and this "
            "installation lacks: `pip install triton`, or run with device=cpu"
        ) from error

    return DeviceRunner(
        policy,
        num_pages=0,
        page_size=options.page_size,
        decode_dtype=options.decode_dtype,
        deterministic=on_cpu if options.deterministic is None else options.deterministic,
        max_sequence_tokens=max_sequence_tokens,
        max_draft_nodes=options.max_draft_nodes,
        cuda_graphs=options.cuda_graphs,
        attention=options.attention,
    )
