"""What `srtrl bench gpu` measures at, how its time is shared out, and what its sections have in common."""

import gc
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import Literal

import torch

from srtrl.bench.cuda.report import Verdict
from srtrl.bench.shapes import SHAPES
from srtrl.engine.engine import EngineOptions
from srtrl.engine.kv_memory import GIB, free_bytes
from srtrl.model.hf_config import config_from_hf
from srtrl.model.transformer import Transformer
from srtrl.model.weights import save_model

RESERVE_SECONDS = 10.0
"""Of the whole time, kept for the table and the files."""
HARD_FACTOR, HARD_SECONDS = 1.5, 10.0
"""A section that heeds no clock (a compiler at work) is broken off after 1.5 times its time and 10 seconds."""


def section_errors() -> tuple[type[Exception], ...]:
    """What may go wrong in one section without costing the others: time on the device is scarce.

    RuntimeError is that of CUDA and of torch, out-of-memory included; AssertionError and ValueError are ours; the next
    are what another version of torch, Triton or transformers gives; TritonError is that of a kernel which does not
    compile. Each is reported, and the run then fails.
    """
    kinds = (RuntimeError, AssertionError, ValueError, TypeError, LookupError, AttributeError, ImportError, OSError)
    try:
        from triton.errors import TritonError
    except ImportError:
        return kinds
    return (*kinds, TritonError)


class OutOfTimeError(BaseException):
    """A section has not ended in time. No error: whoever expects those, a library above all, must let it pass."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Sizes:
    """How large everything is."""

    shape: str
    dtype: torch.dtype
    kv_memory_gib: float
    """Most of one engine; less where the device has less (see `GpuBench.kv_memory_gib`)."""
    prefill_tokens: int
    """Prompt tokens of one step."""

    copy_bytes: int
    matmul_width: int
    num_launches: int

    batches: tuple[int, ...]
    """Sequences of a decode step."""
    context: int
    long_batch: tuple[int, int]
    """(sequences, context) of one long case."""
    num_steps: int
    """Decode steps that are timed together."""

    peer_sequences: int
    peer_prompt_tokens: tuple[int, int]
    peer_tokens: int
    """New tokens of each sequence."""

    trace_sequences: tuple[int, ...]
    """In order of importance."""
    trace_tokens: int
    """Samples of the trace are cut to their first so many tokens."""
    no_history_sequences: int
    draft_budget: Literal["auto"] | int
    """As in a recipe; a smoke test's is fixed, so that it drafts whatever a step happens to cost on the machine."""
    most_rounds: int

    update_tokens: int
    """Of a micro-batch."""
    update_lengths: int
    """Tokens of each sequence in it."""
    num_micro_batches: int
    """Of an optimizer step."""

    logprob_sequences: int
    logprob_tokens: int


FULL = Sizes(
    shape="qwen2.5-1.5b",
    dtype=torch.bfloat16,
    kv_memory_gib=24.0,
    prefill_tokens=8192,
    copy_bytes=4 << 30,
    matmul_width=8192,
    num_launches=1000,
    batches=(1, 4, 16, 64, 256, 640),
    context=512,
    long_batch=(16, 8192),
    num_steps=24,
    peer_sequences=64,
    peer_prompt_tokens=(16, 128),
    peer_tokens=256,
    trace_sequences=(64, 256, 640, 128, 16),
    trace_tokens=4096,
    no_history_sequences=64,
    draft_budget="auto",
    most_rounds=6,
    update_tokens=8192,
    update_lengths=512,
    num_micro_batches=4,
    logprob_sequences=16,
    logprob_tokens=256,
)
SMOKE = Sizes(
    shape="tiny",
    dtype=torch.bfloat16,
    kv_memory_gib=0.05,
    prefill_tokens=64,
    copy_bytes=1 << 20,
    matmul_width=64,
    num_launches=20,
    batches=(1, 3),
    context=20,
    long_batch=(2, 40),
    num_steps=2,
    peer_sequences=3,
    peer_prompt_tokens=(3, 8),
    peer_tokens=4,
    trace_sequences=(4, 6),
    trace_tokens=10,
    no_history_sequences=4,
    draft_budget=4,
    most_rounds=2,
    update_tokens=64,
    update_lengths=32,
    num_micro_batches=2,
    logprob_sequences=3,
    logprob_tokens=6,
)


@dataclass(kw_only=True, slots=True, frozen=True)
class Limits:
    """What the device can do, measured on the spot."""

    copy_bandwidth: float
    """Bytes a second of a device-to-device copy, read and written together."""
    read_bandwidth: float
    """Bytes a second of a sum over a large array."""
    matmul_rate: float
    """Floating-point operations a second of a large bfloat16 product of random matrices."""
    launch_seconds: float
    """Of the host, for one small kernel."""
    graph_node_seconds: float
    """Of the device, for one small kernel of a graph."""
    graph_launch_seconds: float
    """Of the host, for one graph."""

    @property
    def bandwidth(self) -> float:
        """The larger of the two: no kernel was seen to move bytes faster."""
        return max(self.copy_bandwidth, self.read_bandwidth)


@dataclass(kw_only=True)
class GpuBench:
    """What `srtrl bench gpu` was asked for, and what its sections share."""

    device: torch.device
    sizes: Sizes
    smoke: bool
    """On a CPU, tiny, for the sake of running every line; figures say nothing and goals are left out."""
    trace: Path | None
    tokenizer: str | None
    folder: Path
    """For temporary files."""
    limits: Limits | None = None
    """Measured by the section of this name."""
    section_ends: float = field(default=float("inf"))
    """`time.perf_counter()` at which the running section should have ended."""

    def tell(self, text: str) -> None:
        """A line of progress."""
        print(f"  {text}", file=sys.stderr, flush=True)

    def time_left(self) -> float:
        """Seconds that the running section still has."""
        return self.section_ends - time.perf_counter()

    def judge(self, reached: bool) -> Verdict:
        """Whether a goal is reached; goals are for the full sizes."""
        if self.smoke:
            return ""
        return "reached" if reached else "missed"

    def free_memory(self) -> None:
        """Give the device's memory back that nobody uses any more: engines and their graphs are in cycles."""
        if self.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()

    def synchronise(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @cached_property
    def policy(self) -> Transformer:
        """Random weights of the shape, without gradients, shared by all decoders."""
        return random_policy(self.sizes.shape, self.sizes.dtype, self.device)

    @cached_property
    def policy_folder(self) -> Path:
        """The same weights in a folder, for those who load them."""
        folder = self.folder / "policy"
        save_model(self.policy, folder)
        return folder

    @property
    def kv_memory_gib(self) -> float:
        """Of one engine: a third of the free memory at most, so that two fit beside what they compute."""
        free = free_bytes(self.device)
        return self.sizes.kv_memory_gib if free is None else min(self.sizes.kv_memory_gib, free / GIB / 3)

    def engine_options(self, *, slots: int, max_sequence_tokens: int | None = None) -> EngineOptions:
        """The decoder as it is measured: not deterministic, which is what `transformers` is, too."""
        return EngineOptions(
            slots=slots,
            kv_memory_gib=self.kv_memory_gib,
            prefill_chunk_tokens=self.sizes.prefill_tokens,
            deterministic=False,
            draft_budget=self.sizes.draft_budget,
            max_sequence_tokens=max_sequence_tokens,
        )


def random_policy(shape: str, dtype: torch.dtype, device: torch.device) -> Transformer:
    """A model of a shape of `SHAPES`, drawn on the device (where 1.5 billion numbers take no time)."""
    config = config_from_hf(SHAPES[shape] | {"hidden_act": "silu"}, shape)
    model = Transformer(config, dtype, device).requires_grad_(False)
    generator = torch.Generator(device).manual_seed(0)
    for name, parameter in model.named_parameters():
        if name.endswith("norm"):
            parameter.fill_(1)
        else:
            parameter.normal_(0, 0.02, generator=generator)
    return model


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise OutOfTimeError in this block once it has taken so long; only where the system has such an alarm.

    The exception comes between two lines of Python: a kernel that never ends is not helped by it.
    """
    can_alarm = hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread()
    if not can_alarm:
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise OutOfTimeError(f"not finished: broken off after {seconds:.0f} s")

    earlier = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.001))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, earlier)
