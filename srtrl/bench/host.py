"""`srtrl bench host`: the host's work per decode step, with a device whose steps cost nothing."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import torch
import typer

from srtrl.bench.alternate import tell
from srtrl.bench.environment import read_environment
from srtrl.bench.host_runner import HostRunner
from srtrl.bench.options import (
    JsonFile,
    StatedCost,
    TokenizerFolder,
    TraceFile,
    WriteDocs,
    check_output,
    parse_counts,
    parse_curve,
    parse_names,
)
from srtrl.bench.shapes import SHAPES
from srtrl.bench.tables import Document, Grid, publish
from srtrl.bench.workload import (
    SAMPLES_OF_A_PROMPT,
    Trace,
    check_completions,
    drafter_maker,
    generated_prompts,
    prepare,
    read_trace,
    share_out,
)
from srtrl.drafters.base import DrafterBase
from srtrl.engine.engine import Engine
from srtrl.engine.options import EngineOptions
from srtrl.engine.stats import STAGES
from srtrl.model.cpu_threads import set_cpu_threads
from srtrl.model.hf_config import config_from_hf
from srtrl.model.transformer import Transformer
from srtrl.rollout.recorded import RecordedPrompt
from srtrl.trainer.trainer import long_lived_objects_left_alone

SHAPE = "qwen2.5-1.5b"
"""Its vocabulary, context length and head counts; weights are not made."""
OVERLAPPED = "forward"
"""The stage in which the engine does the bookkeeping of the last step, while a device computes."""


@dataclass(kw_only=True, slots=True, frozen=True)
class HostRun:
    """What one rollout took of the host."""

    num_steps: int
    """Those in which all slots decoded: what the first fields are about."""
    seconds: float
    by_stage: dict[str, float]
    """Seconds; `other` is what no stage has: queueing samples, the loop."""
    tokens_per_step: float
    """Of one sequence."""
    verified_per_step: float
    num_tokens: int
    """Of the whole rollout, as all that follow."""
    host_seconds: float
    overlapped_seconds: float
    device_seconds: float
    """As stated, not measured."""

    def rollout_seconds(self, *, with_host: bool = True, overlap: bool = True) -> float:
        """Seconds of the whole rollout, with the device's."""
        if not with_host:
            return self.device_seconds
        hidden = min(self.overlapped_seconds, self.device_seconds) if overlap else 0.0
        return self.device_seconds + self.host_seconds - hidden


def command(
    *,
    slots: Annotated[str, typer.Option(metavar="N[,N...]", help="Sequences decoded at once.")] = "64,256",
    drafters: Annotated[str, typer.Option(metavar="NAME,NAME,...", help="The first one is the baseline.")] = "none,srt",
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
    device_ms: Annotated[
        str,
        typer.Option(
            metavar="CURVE",
            help="The device's time per step by its rows, by which drafts are budgeted and speed-ups stated: "
            "ROWS:SECONDS,ROWS:SECONDS,... or the name of a curve.",
        ),
    ] = "h200-1.5b",
    trace: TraceFile = None,
    tokenizer: TokenizerFolder = None,
    max_tokens: Annotated[int, typer.Option(min=8, help="Maximum number of tokens of each sample.")] = 512,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each drafter, alternating, after one to warm up.")] = 5,
    json_file: JsonFile = None,
    write_docs: WriteDocs = None,
) -> None:
    """Measure the host's work per decode step: the real engine, recorded tokens, a device step of zero cost.

    The drafter has seen half of each prompt's samples before. Without --trace the samples are generated.
    """
    counts = parse_counts("--slots", slots)
    makers = {name: drafter_maker(name) for name in parse_names("--drafters", drafters)}
    curve = parse_curve("--device-ms", device_ms)
    check_output("--json", json_file)
    check_output("--write-docs", write_docs)
    set_cpu_threads(threads)
    environment = read_environment(torch.device("cpu"))
    policy = Transformer(config_from_hf(SHAPES[SHAPE], SHAPE), torch.float32, torch.device("meta"))
    prompts = (
        generated_prompts(
            -(-4 * max(counts) // SAMPLES_OF_A_PROMPT), max_tokens=max_tokens, vocab_size=policy.config.vocab_size
        )
        if trace is None
        else read_trace(trace, tokenizer=tokenizer, max_tokens=max_tokens)
    )
    runs: dict[tuple[int, str], list[HostRun]] = {}
    for num_slots in counts:
        workload = _workload(prompts, num_slots)
        workload.check_model(policy.config)
        for name, of_one in _measure(makers, policy, workload, num_slots, curve, repeats).items():
            runs[num_slots, name] = of_one
    source = f"{trace.name}, samples cut to {max_tokens} tokens" if trace else "generated tokens"
    publish(
        Document(
            title=f"Host work per decode step: {source}, {environment.threads}",
            environment=environment,
            notes=_notes(curve),
            grids=(_step_grid(runs), _speed_grid(runs, device_ms)),
            values={"rows": [_row(num_slots, name, of_one) for (num_slots, name), of_one in runs.items()]},
        ),
        json_file,
        write_docs,
    )


def _workload(prompts: Sequence[RecordedPrompt], num_slots: int) -> Trace:
    """Half of each prompt's samples are decoded: of as many prompts as give two samples to each slot."""
    trace = share_out(prompts, history=0.5)
    if len(trace.requests) < num_slots:
        raise ValueError(
            f"--slots: {num_slots}, but the trace has {len(trace.requests)} samples to decode, half of each prompt's"
        )
    last = trace.requests[min(2 * num_slots, len(trace.requests)) - 1]
    return trace.first_prompts(last.draw_index + 1)


def _measure(
    makers: dict[str, Callable[[], DrafterBase]],
    policy: Transformer,
    workload: Trace,
    num_slots: int,
    curve: StatedCost,
    repeats: int,
) -> dict[str, list[HostRun]]:
    """Alternating runs, each with a new drafter; the engine, and what it has learned of drafts, lives on."""
    options = EngineOptions(
        slots=num_slots,
        max_sequence_tokens=workload.max_sequence_tokens,
        kv_memory_gib=1.0,  # one byte each: all slots have pages for whole sequences
        cost_points=curve.points,
    )
    engines = {}
    for name, make in makers.items():
        runner = HostRunner(policy, options, workload.max_sequence_tokens)
        engines[name] = Engine(policy, options, drafter=make(), runner=runner)
    runs: dict[str, list[HostRun]] = {name: [] for name in makers}
    with long_lived_objects_left_alone():
        for turn in range(repeats + 1):
            for name in list(makers)[:: 1 if turn % 2 == 0 else -1]:
                run = decode(engines[name], makers[name](), workload, name)
                tell(f"{num_slots} slots, {name}: {1000 * run.seconds / run.num_steps:.3f} ms per step")
                if turn:
                    runs[name].append(run)
    return runs


def decode(engine: Engine, drafter: DrafterBase, workload: Trace, name: str) -> HostRun:
    """One rollout of the whole workload.

    Raises:
        AssertionError: The engine did not give the recorded tokens.
    """
    prepare(engine, drafter, workload)
    engine.take_metrics()
    engine.take_timeline()
    completions = []
    started = time.perf_counter()
    engine.begin_rollout("train")
    for request in workload.requests:
        engine.add(request)
    while engine.scheduler.num_waiting or not engine.batch.num_free:
        completions += engine.step()
    engine.take_timeline()  # the last step is counted, too
    seconds, stats = time.perf_counter() - started, engine.stats
    by_stage = {stage: stats.seconds.get(stage, 0.0) for stage in STAGES}
    num_steps, metrics = stats.num_steps, stats.metrics()
    while engine.has_work:
        completions += engine.step()
    engine.end_rollout()
    host_seconds = time.perf_counter() - started
    check_completions(completions, workload, name)
    return HostRun(
        num_steps=num_steps,
        seconds=seconds,
        by_stage=by_stage | {"other": seconds - sum(by_stage.values())},
        tokens_per_step=metrics["engine/tokens_per_decode_step"],
        verified_per_step=metrics["engine/verified_per_decode_step"],
        num_tokens=engine.stats.num_tokens,
        host_seconds=host_seconds,
        overlapped_seconds=engine.stats.seconds[OVERLAPPED],
        device_seconds=engine.stats.priced_seconds,
    )


def _median(runs: Sequence[HostRun], value: Callable[[HostRun], float]) -> float:
    return statistics.median(value(run) for run in runs)


def _row(num_slots: int, name: str, runs: Sequence[HostRun]) -> dict[str, Any]:
    """Medians of the runs, for programs."""
    return {
        "slots": num_slots,
        "drafter": name,
        "host_ms_per_step": _median(runs, lambda run: 1000 * run.seconds / run.num_steps),
        "by_stage": {
            stage: _median(runs, lambda run, stage=stage: 1000 * run.by_stage[stage] / run.num_steps)  # type: ignore[misc]
            for stage in runs[0].by_stage
        },
        "tokens_per_step": _median(runs, lambda run: run.tokens_per_step),
        "verified_per_step": _median(runs, lambda run: run.verified_per_step),
        "runs": [asdict(run) for run in runs],
    }


def _step_grid(runs: dict[tuple[int, str], list[HostRun]]) -> Grid:
    rows = []
    for (num_slots, name), of_one in runs.items():
        row = _row(num_slots, name, of_one)
        values = (row["host_ms_per_step"], *row["by_stage"].values())
        counts = (row["tokens_per_step"], row["verified_per_step"])
        rows.append(
            (str(num_slots), name, *(f"{value:.3f}" for value in values), *(f"{value:.2f}" for value in counts))
        )
    return Grid(
        caption="Milliseconds of the host per decode step in which all slots decode",
        columns=("slots", "drafter", "host", *STAGES, "other", "tokens/step", "verified/step"),
        rows=tuple(rows),
    )


def _speed_grid(runs: dict[tuple[int, str], list[HostRun]], device: str) -> Grid:
    """Tokens per second of the whole rollout and the ratio to the first drafter, for three ways to count the host."""
    baseline = next(iter(runs))[1]
    rows = []
    for (num_slots, name), of_one in runs.items():
        cells = []
        for settings in ({"with_host": False}, {"overlap": False}, {}):
            seconds = _median(of_one, lambda run, s=settings: run.rollout_seconds(**s))  # type: ignore[misc]
            slow = _median(runs[num_slots, baseline], lambda run, s=settings: run.rollout_seconds(**s))  # type: ignore[misc]
            cells += [f"{of_one[0].num_tokens / seconds:,.0f}", f"{slow / seconds:.2f}"]
        rows.append((str(num_slots), name, *cells))
    ways = ("device alone", "all host time added", "host time less what is overlapped")
    return Grid(
        caption=f"Tokens per second of the whole rollout on a device with steps of {device}, and as a multiple of "
        f"`{baseline}`",
        columns=("slots", "drafter", *(column for way in ways for column in (way, "ratio"))),
        rows=tuple(rows),
    )


def _notes(curve: StatedCost) -> tuple[str, ...]:
    return (
        "The real engine, all stages; the device's step takes no time and the recorded tokens are taken in place of "
        "sampled ones. What a CUDA runner itself takes to queue copies and to launch a graph is not in it.",
        "Half of each prompt's samples are decoded, two for each slot where there are as many; the drafter has seen "
        "the other half. Medians of alternating runs, after one to warm up.",
        f"Stated time of a device step: {curve.note}. Drafts are budgeted by it. While the device computes, the engine "
        f"does the bookkeeping of the last step: the stage `{OVERLAPPED}`.",
    )
