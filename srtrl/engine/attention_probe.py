"""Other libraries' attention in decode steps of one row a sequence: does it run, does it agree, is it faster?

A backend must run on a small step first, give what our kernel gives, and follow its inputs when it was captured in a
graph. Then it is timed beside our kernel on steps as they come in a rollout, in the buckets that the engine would give
them. What speaks against a backend is kept as a reason. What follows from all that: `attention_choice.py`.
"""

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from srtrl.engine.buckets import BucketPlanner, longest_keys
from srtrl.engine.graphs import CudaCapturer, was_out_of_memory
from srtrl.engine.rows import slots_of
from srtrl.model.attention_backends import OURS, BackendChoice, PlainAttention
from srtrl.model.device_plan import AttentionScratch, DevicePlan, choose_split_keys
from srtrl.model.device_rows import fill_rows, view_rows
from srtrl.model.paged_attention import KVCache, PagedRows
from srtrl.model.varlen_attention import first_line

TRIAL = (3, 300)
"""Sequences and most keys of the first step that a backend is tried on: too small to need memory worth speaking of."""

TOLERANCE = 0.02
"""Of a row's difference, as a share of its norm. Rounding to bfloat16 makes some 0.002 of it; a key too few or too
many 0.08 and more up to 4,096 keys, see `PlainStep.draw_lengths`."""

LOUD_SCORE = 6.0
"""Score of the keys that are made to matter; those of others are of the size of 1."""

ROUNDS = 9
WARM_UP = 2
LAYERS = 4
"""Attended one behind the other when it is timed, each with keys and values of its own, as in a model."""

MAX_LAYER_BYTES = 256 << 20
"""Of the pages of one layer: more than any cache of a device holds. Sequences that need more share pages."""

COLD_BYTES = 256 << 20
"""Written before each measurement, so that no key is in the device's cache: in a model the weights pass between."""

FAULTS = (RuntimeError, TypeError, ValueError, AssertionError, AttributeError, ImportError)
"""What libraries raise for what they do not support, in C++ (RuntimeError, NotImplementedError is one) or in Python."""


class Stopwatch(Protocol):
    """How work on a device is captured and timed."""

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """What repeats all that `work` does on the device, which was done before; it may be called, too."""

    def seconds(self, work: Callable[[], None]) -> float:
        """Seconds of `work` on the device."""

    def synchronise(self) -> None:
        """Wait for the device."""


class CudaStopwatch:
    """Graphs and events."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cold = torch.empty(COLD_BYTES, dtype=torch.uint8, device=device)

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """See `Stopwatch`."""
        return CudaCapturer(self._device).capture(work).replay

    def seconds(self, work: Callable[[], None]) -> float:
        """See `Stopwatch`."""
        self._cold.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        work()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    def synchronise(self) -> None:
        """See `Stopwatch`."""
        torch.cuda.synchronize(self._device)


class HostStopwatch:
    """The same for a CPU: nothing is captured."""

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """See `Stopwatch`."""
        return work

    def seconds(self, work: Callable[[], None]) -> float:
        """See `Stopwatch`."""
        started = time.perf_counter()
        work()
        return time.perf_counter() - started

    def synchronise(self) -> None:
        """See `Stopwatch`."""


class PlainStep:
    """A decode step of one row a sequence over random pages, padded as the planner's bucket says."""

    def __init__(
        self,
        planner: BucketPlanner,
        cache: KVCache,
        num_sequences: int,
        most_keys: int,
        *,
        use_kernels: bool = True,
    ) -> None:
        """Draw lengths from `most_keys / 2` to `most_keys` and pages of the cache, as far as they go, for each."""
        device, dtype = cache.key_pages.device, cache.key_pages.dtype
        self.num_sequences, self.most_keys = num_sequences, most_keys
        self._planner = replace(planner, backends=BackendChoice())
        self._cache = cache
        self._use_kernels = use_kernels
        pages_each = -(-most_keys // planner.page_size)
        self._counts = np.ones(num_sequences, np.int64)
        self.shape = self._planner.shape(self._counts, num_logits=0, table_width=pages_each, depth=0)
        sizes = self.shape.sizes(self.shape.num_rows)
        self._host = torch.zeros(sizes.num_elements, dtype=torch.int32)
        self._device = torch.zeros(sizes.num_elements, dtype=torch.int32, device=device)
        self._host_rows, self._rows = view_rows(self._host, sizes), view_rows(self._device, sizes)
        self._random = np.random.default_rng(0)
        pages = np.resize(self._random.permutation(cache.key_pages.shape[1]), num_sequences * pages_each)
        self._page_tables = pages.astype(np.int32).reshape(num_sequences, pages_each)
        self._scratch = AttentionScratch(
            num_rows=self.shape.num_rows,
            num_heads=planner.num_heads,
            head_dim=planner.head_dim,
            num_lanes=AttentionScratch.lanes_for(
                num_tiles=self.shape.num_tiles, num_kv_heads=planner.num_kv_heads, launch=self.shape.launch
            ),
            dtype=dtype,
            device=device,
        )
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn(self.shape.num_rows, planner.num_heads, planner.head_dim, generator=generator)
        self._noise = noise.to(device)
        self._queries = self._noise.to(dtype)
        self.draw_lengths()

    def __str__(self) -> str:
        return f"{self.num_sequences} sequences of up to {self.most_keys} keys"

    def draw_lengths(self) -> None:
        """Give the sequences other lengths, in the same place on the device.

        Queries are made to look at the first key, the newest one, and the one behind it, which they must not see: who
        is wrong by one position is wrong by a lot.
        """
        count, most_keys = self.num_sequences, self.most_keys
        lengths = self._random.integers(-(-most_keys // 2), most_keys + 1, count).astype(np.int32)
        rows = PagedRows(
            positions=lengths.astype(np.int64) - 1,
            write_slots=np.full(count, -1, np.int32),
            page_tables=self._page_tables,
            row_tables=np.arange(count, dtype=np.int32),
            context_lengths=lengths,
            path_slots=np.zeros((count, 0), np.int32),
            path_lengths=np.zeros(count, np.int32),
        )
        launch = self.shape.launch
        fill_rows(
            self._host_rows,
            rows,
            rows_per_tile=launch.rows_per_tile(self._planner.group),
            split_keys=choose_split_keys(longest=longest_keys(self._counts, lengths), launch=launch),
        )
        self._device.copy_(self._host)
        self.num_keys = int(lengths.sum())
        behind = np.minimum(lengths, self._page_tables.shape[1] * self._planner.page_size - 1)
        places = np.stack((np.zeros_like(lengths), lengths - 1, behind))  # [3, B]
        slots = slots_of(self._page_tables, np.arange(count), places, self._planner.page_size)
        keys = self._cache.kernel_keys(0).flatten(0, 1)[torch.from_numpy(slots).to(self._device.device).long()]
        loud = (LOUD_SCORE / keys.shape[3] ** 0.5) * keys.float().sum(0)  # [B, K, E]
        queries = self._noise[:count] + loud.repeat_interleave(self._planner.group, dim=1)
        self._queries[:count] = queries.to(self._queries.dtype)

    def attend(self, backend: PlainAttention | None, layer: int = 0) -> Tensor:
        """[N, H, E] by that backend, or by our kernel; see `DevicePlan.attend_stored`."""
        plan = DevicePlan(
            self._cache,
            self._rows,
            num_positions=self._planner.max_positions,
            launch=replace(self.shape.launch, backend=backend),
            scratch=self._scratch,
            use_kernels=self._use_kernels,
        )
        return plan.attend_stored(layer, self._queries)

    @property
    def num_layers(self) -> int:
        """Of the cache."""
        return len(self._cache.key_pages)

    def attend_layers(self, backend: PlainAttention | None) -> None:
        """All layers of the cache."""
        for layer in range(self.num_layers):
            self.attend(backend, layer)

    def agrees(self, found: Tensor) -> bool:
        """Whether every row is what our kernel gives, but for rounding, and padding is finite."""
        expected = self.attend(None)[: self.num_sequences].float()
        difference = (found[: self.num_sequences].float() - expected).flatten(1).norm(dim=1)
        is_close = difference <= TOLERANCE * expected.flatten(1).norm(dim=1)  # False where one is NaN
        return bool(is_close.all()) and bool(found.isfinite().all())


@dataclass(kw_only=True, slots=True, frozen=True)
class Timing:
    """How long one layer of a step takes."""

    num_sequences: int
    most_keys: int
    num_keys: int
    """Of all sequences together."""
    seconds: Mapping[str, float]
    """Backend, or `OURS` -> median seconds."""

    def ratio(self, name: str) -> float:
        """Its time as a share of our kernel's."""
        return self.seconds[name] / self.seconds[OURS]


@dataclass(kw_only=True, slots=True, frozen=True)
class Probe:
    """What was found out."""

    usable: Mapping[str, PlainAttention]
    """Name -> backend that runs and agrees."""
    reasons: Mapping[str, str]
    """Name -> why it cannot be used, as a clause."""
    timings: tuple[Timing, ...]


def random_cache(
    planner: BucketPlanner,
    steps: Sequence[tuple[int, int]],
    *,
    dtype: torch.dtype,
    device: torch.device,
    num_layers: int,
) -> KVCache:
    """Pages for each of `steps` (sequences, most keys) by itself, as far as `MAX_LAYER_BYTES` a layer go."""
    sizes = {"page_size": planner.page_size, "num_kv_heads": planner.num_kv_heads, "head_dim": planner.head_dim}
    pages_each = [-(-most_keys // planner.page_size) for _, most_keys in steps]
    wanted = max(count * pages for (count, _), pages in zip(steps, pages_each, strict=True))
    affordable = MAX_LAYER_BYTES // KVCache.bytes_per_page(num_layers=1, dtype=dtype, **sizes)
    cache = KVCache(
        num_layers=num_layers,
        num_pages=max(min(wanted, affordable), *pages_each),
        dtype=dtype,
        device=device,
        token_major=True,
        **sizes,
    )
    generator = torch.Generator(device).manual_seed(0)
    for pages in (cache.key_pages, cache.value_pages):
        pages.normal_(generator=generator)
    return cache


def find_fault(backend: PlainAttention, step: PlainStep, watch: Stopwatch) -> str | None:
    """Try a backend on a step, launched and captured; returns what is wrong with it, as a clause, or None.

    Raises:
        torch.OutOfMemoryError: That says nothing of the backend.
    """
    outputs: list[Tensor] = []

    def attend() -> None:
        outputs.append(step.attend(backend))

    step.attend(None)  # an error of ours is none of the backend's
    watch.synchronise()
    try:
        attend()
        watch.synchronise()
        replay = watch.capture(attend)
    except FAULTS as error:
        if was_out_of_memory(error):
            raise
        return f"it failed on {step}: {first_line(error)}"
    if not step.agrees(outputs[0]):
        return f"it gave other numbers than our kernel on {step}"
    step.draw_lengths()
    replay()
    if not step.agrees(outputs[-1]):
        return f"captured in a graph it gave other numbers than our kernel on {step}"
    return None


def time_step(backends: Mapping[str, PlainAttention], step: PlainStep, watch: Stopwatch) -> Timing:
    """Our kernel and the backends, one after the other and again, in turns."""
    works: dict[str, Callable[[], None]] = {}
    for name, backend in {OURS: None, **backends}.items():
        step.attend_layers(backend)
        watch.synchronise()
        works[name] = watch.capture(functools.partial(step.attend_layers, backend))
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(WARM_UP + ROUNDS):
        for name in works if turn % 2 else reversed(works):
            found = watch.seconds(works[name])
            if turn >= WARM_UP:
                seconds[name].append(found)
    return Timing(
        num_sequences=step.num_sequences,
        most_keys=step.most_keys,
        num_keys=step.num_keys,
        seconds={name: median(values) / step.num_layers for name, values in seconds.items()},
    )


@torch.inference_mode()
def probe_backends(
    planner: BucketPlanner,
    found: Mapping[str, PlainAttention | str],
    *,
    dtype: torch.dtype,
    device: torch.device,
    watch: Stopwatch,
    sizes: Sequence[int],
    lengths: Sequence[int],
    with_ours_alone: bool = False,
    use_kernels: bool = True,
) -> Probe:
    """Try what was found (see `find_backends`), and time what works.

    Args:
        planner: Of the engine.
        found: Backends, or reasons why there is none.
        dtype: Of queries, keys and values.
        device: Of the decoder.
        watch: Times and captures on it.
        sizes: Sequences of the steps that are timed.
        lengths: Most keys of these.
        with_ours_alone: Time our kernel also where there is nothing to compare it with.
        use_kernels: See `DevicePlan`.

    Raises:
        torch.OutOfMemoryError: It needs some 1.5 GiB on a CUDA device, once a backend has passed the first step.
    """
    reasons = {name: backend for name, backend in found.items() if isinstance(backend, str)}
    usable = {name: backend for name, backend in found.items() if not isinstance(backend, str)}

    def make_cache(steps: Sequence[tuple[int, int]], num_layers: int) -> KVCache:
        return random_cache(planner, steps, dtype=dtype, device=device, num_layers=num_layers)

    def drop_faulty(step: PlainStep) -> None:
        for name, backend in list(usable.items()):
            fault = find_fault(backend, step, watch)
            if fault is not None:
                reasons[name] = fault
                del usable[name]

    if usable:
        drop_faulty(PlainStep(planner, make_cache([TRIAL], 1), *TRIAL, use_kernels=use_kernels))
    timings = []
    steps = [(num_sequences, most_keys) for num_sequences in sizes for most_keys in lengths]
    cache = make_cache(steps, LAYERS) if usable or with_ours_alone else None
    for num_sequences, most_keys in steps:
        if cache is not None and (usable or with_ours_alone):
            step = PlainStep(planner, cache, num_sequences, most_keys, use_kernels=use_kernels)
            drop_faulty(step)
            timings.append(time_step(usable, step, watch))
    return Probe(usable=usable, reasons=reasons, timings=tuple(timings))
