"""Seconds of a decode step, beside what reading the weights and the KV once would take; and where the time goes."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median

import torch
from torch.profiler import ProfilerActivity, profile

from srtrl.bench.cuda.limits import describe_options, kv_bytes, step_flops, weight_bytes
from srtrl.bench.cuda.plan import GpuBench, Limits
from srtrl.bench.cuda.report import SectionReport
from srtrl.bench.drafter_tables import aligned
from srtrl.bench.tables import Grid
from srtrl.bench.workload import make_workload, random_prompts
from srtrl.engine.engine import Engine, EngineOptions

GOAL_RATIO = 1.5
GOAL_SEQUENCES = 64
GOAL_HOST_SECONDS = 0.3e-3

ROWS_EACH = (1, 2, 4, 8, 16)
"""Roots and draft nodes of a sequence."""
TREE_REPEATS = 5

PARTS: dict[str, tuple[str, ...]] = {
    "attention": ("attend", "combine_splits"),
    "matmuls": ("gemm", "gemv", "nvjet", "cutlass", "xmma", "splitk", "cublas", "aten::mm", "aten::addmm"),
    "sampling": ("rank_blocks", "finish_rows", "sample"),
}
"""Part -> what names of its kernels contain, in lower case; anything else is `rest`."""


@dataclass(kw_only=True, slots=True, frozen=True)
class StepTime:
    """Decode steps of one size."""

    num_sequences: int
    context: float
    """Tokens that a row sees, on average."""
    seconds: float
    """Of a step by the host's clock, median."""
    host_seconds: float
    """Of a step in which the host did anything but wait, by the engine's own count; NaN where it does not wait."""
    parts: dict[str, float] | None
    """Part -> seconds of the device in a step, from a profile of other steps; None where none could be made."""

    @property
    def device_seconds(self) -> float | None:
        """Of a step in which the device was at work."""
        return sum(self.parts.values()) if self.parts else None

    @property
    def idle_seconds(self) -> float:
        """Of a step in which no kernel ran: the host was at work, or a kernel was about to begin."""
        device = self.device_seconds
        return float("nan") if device is None else max(0.0, self.seconds - device)


@dataclass(kw_only=True, slots=True, frozen=True)
class StepLimits:
    """How fast the step could be."""

    bandwidth: float
    """Seconds in which weights and KV are read once."""
    matmul: float
    """Seconds of its operations at the measured rate."""

    @property
    def larger(self) -> float:
        """No step is faster than this."""
        return max(self.bandwidth, self.matmul)


class StepBench:
    """One engine whose batch grows; the sequences stay until all sizes are measured."""

    def __init__(self, bench: GpuBench, options: EngineOptions, context: int) -> None:
        self._bench = bench
        self._context = context
        self.engine = Engine(bench.policy, options)
        self._prompts = random_prompts(
            options.slots, shortest=context, longest=context, vocab_size=bench.policy.config.vocab_size, seed=0
        )
        self._num_sequences = 0

    def grow(self, num_sequences: int, num_steps: int) -> None:
        """Add sequences, compute their prompts, and let all have a token."""
        length = self.engine.max_sequence_tokens - self._context
        workload = make_workload("equal", [length] * num_sequences, self._prompts, num_samples=1, seed=0)
        for request in workload.requests[self._num_sequences :]:
            self.engine.add(request)
        self._num_sequences = num_sequences
        while self.engine.scheduler.num_waiting or self._is_prefilling():
            self.engine.step()
        for _ in range(num_steps):  # kernels are compiled, graphs captured
            self.engine.step()

    def measure(self, num_steps: int, *, with_profile: bool) -> StepTime:
        """Time that many steps, then profile as many others."""
        self.engine.take_metrics()
        seconds = []
        for _ in range(num_steps):
            started = time.perf_counter()
            self.engine.step()
            seconds.append(time.perf_counter() - started)
        metrics = self.engine.take_metrics()
        contexts = [len(sequence.token_ids) for sequence in self.engine.scheduler.running]
        assert len(contexts) == self._num_sequences, "sequences ended or were preempted while steps were timed"
        parts = profile_parts(self.engine.step, num_steps, self._bench.device) if with_profile else None
        return StepTime(
            num_sequences=self._num_sequences,
            context=sum(contexts) / len(contexts),
            seconds=median(seconds),
            host_seconds=metrics.get("engine/host_seconds", float("nan")) / num_steps,
            parts=parts,
        )

    def _is_prefilling(self) -> bool:
        return any(sequence.num_generated == 0 for sequence in self.engine.scheduler.running)


def profile_parts(step: Callable[[], object], num_steps: int, device: torch.device) -> dict[str, float] | None:
    """Seconds of a step by part, from a profile; None where the profiler saw no work (it may be forbidden).

    On a CUDA device these are kernels and copies, which run one after the other; on a CPU the operators' own seconds.
    """
    is_cuda = device.type == "cuda"
    activities = [ProfilerActivity.CUDA] if is_cuda else [ProfilerActivity.CPU]
    with profile(activities=activities) as profiler:
        for _ in range(num_steps):
            step()
        if is_cuda:
            torch.cuda.synchronize(device)
    if is_cuda:
        microseconds = [
            (event.name, event.time_range.elapsed_us())
            for event in profiler.events() or ()
            if event.device_type.name == "CUDA" and not getattr(event, "is_user_annotation", False)
        ]
    else:
        microseconds = [(event.key, event.self_cpu_time_total) for event in profiler.key_averages()]
    parts = by_part(microseconds)
    return {part: total / 1e6 / num_steps for part, total in parts.items()} if any(parts.values()) else None


def by_part(seconds: Sequence[tuple[str, float]]) -> dict[str, float]:
    """Sum (name of a kernel, time) by part; see `PARTS`."""
    parts = dict.fromkeys((*PARTS, "rest"), 0.0)
    for name, time_of_one in seconds:
        lower = name.lower()
        part = next((part for part, words in PARTS.items() if any(word in lower for word in words)), "rest")
        parts[part] += time_of_one
    return parts


def step_limits(bench: GpuBench, limits: Limits, step: StepTime) -> StepLimits:
    """The two limits of a decode step of one token a sequence."""
    config, num_keys = bench.policy.config, round(step.num_sequences * step.context)
    num_bytes = weight_bytes(bench.policy) + kv_bytes(config, num_keys, bench.sizes.dtype)
    return StepLimits(
        bandwidth=num_bytes / limits.bandwidth,
        matmul=step_flops(config, step.num_sequences, num_keys) / limits.matmul_rate,
    )


def measure_decode(bench: GpuBench, report: SectionReport) -> None:
    """The section: batches of growing size, one long context, and the same without graphs."""
    sizes = bench.sizes
    cells: list[tuple[str, ...]] = []
    graphs = bench.engine_options(slots=max(sizes.batches), max_sequence_tokens=_tokens_needed(sizes.context, bench))
    _measure_batches(bench, report, graphs, sizes.batches, sizes.context, cells)
    num_long, long_context = sizes.long_batch
    long = replace(graphs, slots=num_long, max_sequence_tokens=_tokens_needed(long_context, bench))
    _measure_batches(bench, report, long, (num_long,), long_context, cells)
    eager = replace(graphs, cuda_graphs=False, slots=_goal_batch(bench))
    _measure_batches(bench, report, eager, (1, _goal_batch(bench)), sizes.context, cells)
    _measure_trees(bench, report, graphs)
    report.notes.append(
        "Whole decode steps of the engine without drafts, sampling and log-probs included, by the host's clock "
        f"(medians of {sizes.num_steps}). The bandwidth limit is weights and KV read once at the larger measured "
        "bandwidth; the matmul limit all operations at the measured rate. Parts are seconds of the device, from a "
        "profile of other steps; `host` is how long the host did not wait for the device, `no kernel` the step less "
        "the parts."
    )


def _measure_trees(bench: GpuBench, report: SectionReport, options: EngineOptions) -> None:
    """What it costs to verify drafts: forward pass and sampling of several rows a sequence."""
    bench.free_memory()
    runner = Engine(bench.policy, options).runner
    count, context = _goal_batch(bench), bench.sizes.context
    milliseconds = []
    for rows_each in ROWS_EACH:
        rows = count * rows_each
        timed = [runner.time_step(rows, context, num_sequences=count) for _ in range(1 + TREE_REPEATS)]
        milliseconds.append(1e3 * median(timed[1:]))
    names = "/".join(map(str, ROWS_EACH))
    figures = "/".join(f"{value:.2f}" for value in milliseconds)
    report.add(f"{count} x {context}, forward and sampling of {names} rows each", f"{figures} ms")
    report.values["trees"] = {"sequences": count, "rows_each": ROWS_EACH, "milliseconds": milliseconds}


def _tokens_needed(context: int, bench: GpuBench) -> int:
    """Longest sequence of a `StepBench`: it goes on while later sequences are computed and all sizes measured."""
    sizes = bench.sizes
    prompts = max(sizes.batches) * sizes.context
    num_steps = (len(sizes.batches) + 1) * (4 * sizes.num_steps + 2) + 2 * (prompts // sizes.prefill_tokens + 2)
    return context + num_steps + len(sizes.batches) * 4


def _goal_batch(bench: GpuBench) -> int:
    return GOAL_SEQUENCES if GOAL_SEQUENCES in bench.sizes.batches else max(bench.sizes.batches)


def _measure_batches(
    bench: GpuBench,
    report: SectionReport,
    options: EngineOptions,
    batches: Sequence[int],
    context: int,
    cells: list[tuple[str, ...]],
) -> None:
    """One row a batch; `cells` are those of the detailed table, which is made anew each time."""
    assert bench.limits is not None, "the section `limits` comes first"
    bench.free_memory()
    steps = StepBench(bench, options, context)
    mode = describe_options(options)
    for num_sequences in batches:
        what = f"{num_sequences} x {context}, {mode}"
        if bench.time_left() < 0:
            report.add(what, "not run: time")
            continue
        bench.tell(f"decode steps: {what}")
        steps.grow(num_sequences, num_steps=max(2, bench.sizes.num_steps // 4))
        step = steps.measure(bench.sizes.num_steps, with_profile=True)
        limits = step_limits(bench, bench.limits, step)
        ratio = step.seconds / limits.bandwidth
        is_goal = num_sequences == GOAL_SEQUENCES and context == bench.sizes.context and options.cuda_graphs
        figure = (
            f"{1e3 * step.seconds:.2f} ms; limits: bandwidth {1e3 * limits.bandwidth:.2f}, matmul "
            f"{1e3 * limits.matmul:.2f}; host {1e3 * step.host_seconds:.2f}"
        )
        if is_goal:
            report.add(what, figure)
            report.add(
                f"{num_sequences} x {context}, against its bandwidth limit",
                f"{ratio:.2f}x",
                f"at most {GOAL_RATIO}x",
                bench.judge(ratio <= GOAL_RATIO),
            )
            report.add(
                f"{num_sequences} x {context}, host in a step",
                f"{1e3 * step.host_seconds:.2f} ms; no kernel ran for {1e3 * step.idle_seconds:.2f} ms",
                f"at most {1e3 * GOAL_HOST_SECONDS:.1f} ms",
                bench.judge(step.host_seconds <= GOAL_HOST_SECONDS),
            )
        else:
            report.add(what, f"{figure}; {step.seconds / limits.larger:.2f}x")
        cells.append(_cells(what, step, limits))
        report.grids[:] = [_grid(cells)]
        report.values.setdefault("steps", []).append(
            {"mode": mode, "prompt_tokens": context, **asdict(step), "limits": asdict(limits), "ratio": ratio}
        )


def _cells(what: str, step: StepTime, limits: StepLimits) -> tuple[str, ...]:
    parts = step.parts or {}
    seconds = (
        *(step.seconds, limits.bandwidth, limits.matmul, step.host_seconds, step.idle_seconds),
        *(parts.get(part, float("nan")) for part in (*PARTS, "rest")),
    )
    return (
        what,
        f"{step.context:.0f}",
        *(f"{1e3 * value:.3f}" for value in seconds),
        f"{step.seconds / limits.bandwidth:.2f}",
        f"{step.seconds / limits.larger:.2f}",
    )


def _grid(cells: Sequence[tuple[str, ...]]) -> Grid:
    milliseconds = ("step", "bandwidth limit", "matmul limit", "host", "no kernel", *PARTS, "rest")
    return Grid(
        caption="Decode steps, milliseconds: sequences x prompt tokens",
        columns=("steps of", "context", *milliseconds, "of bandwidth", "of the larger"),
        alignments=aligned(0, len(milliseconds) + 3, 0),
        rows=tuple(cells),
        group_by=0,
    )
