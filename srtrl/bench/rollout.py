"""`srtrl bench rollout`: drafters in whole rollouts, from the prompts to all tokens on the host.

Weights are random: time does not depend on their values, and acceptance is that of the recorded (or generated) tokens,
which replace those that the engine samples; each run was checked to give exactly these. Whole rollouts alternate, after
one of each to warm up, each with a new drafter; the engines live on, as in training. Seconds are medians, `times as
fast` is the median over pairs of runs with a 95% interval (from the lowest pair to the highest, where there are few).
"""

import statistics
import sys
import time
from functools import partial
from typing import Annotated, Any, Literal

import torch
import typer

from srtrl.bench import measure
from srtrl.bench.measure import Row, alternate, paired_ratio, publish, read_environment
from srtrl.bench.workload import Trace, check_completions, load_workload, make_engine, prepare
from srtrl.engine.engine import Engine
from srtrl.model.cpu_threads import set_cpu_threads
from srtrl.model.hf_config import config_from_hf
from srtrl.model.shapes import SHAPES
from srtrl.model.weights import init_model
from srtrl.resolve import suggestion
from srtrl.trainer.build import PREFILL_TOKENS

COUNTED = ("engine/decode_steps", "engine/tokens_per_decode_step", "engine/verified_per_decode_step")


def command(
    *,
    trace: measure.TraceFile = None,
    tokenizer: measure.TokenizerFolder = None,
    drafters: measure.Drafters = "none,srt",
    history: Annotated[
        float, typer.Option(min=0, max=1, help="Share of each prompt's samples that the drafter has seen before.")
    ] = 0.0,
    prompts_used: Annotated[
        int | None, typer.Option(min=1, help="Use only the first prompts. [default: all of the trace, or 1]")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=8, help="Truncate samples to this many tokens. [default with no trace: 128]")
    ] = None,
    slots: measure.Slots = "",
    model_shape: Annotated[str, typer.Option(help=f"Random weights of this shape: {', '.join(SHAPES)}.")] = "small",
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option(help="Type of the weights.")] = "float32",
    threads: measure.Threads = None,
    repeats: measure.Repeats = 5,
    json_file: measure.JsonFile = None,
    force: measure.Force = False,
) -> None:
    """Measure the speed of whole rollouts: prefill, decoding and sampling of all sequences.

    With --trace: recorded rollouts; without: generated ones. The default of --slots is the number of samples.
    """
    names = measure.parse_drafters(drafters)
    if model_shape not in SHAPES:
        near = suggestion(model_shape, SHAPES) or ";"
        raise ValueError(f"--model-shape: no shape {model_shape!r}{near} known: {', '.join(SHAPES)}")
    counts = measure.parse_counts("--slots", slots) if slots else ()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    set_cpu_threads(threads)
    environment = read_environment(device, json_file, force=force)
    policy = init_model(config_from_hf(SHAPES[model_shape], model_shape), 0, getattr(torch, dtype), device)
    max_tokens = max_tokens or (sys.maxsize if trace else 128)
    workload = load_workload(trace, policy.config, tokenizer=tokenizer, max_tokens=max_tokens, history=history)
    workload = workload.first_prompts(prompts_used or (len(workload.history) if trace else 1))
    counts = counts or (len(workload.requests),)
    rows = []
    for num_slots in counts:
        candidates = {}
        for name in names:
            prefill = PREFILL_TOKENS[device.type]
            engine = make_engine(policy, num_slots, workload.max_sequence_tokens, prefill_chunk_tokens=prefill)
            candidates[name] = partial(run_engine, engine, name, workload)
        rows += rows_of(alternate(candidates, repeats), num_slots, workload)
    source = f"Drafters on a trace: {trace.name}" if trace else "Rollouts: generated"
    seen = f"{history:g} as history" if history else "no history"
    where = f"{model_shape}, {dtype}, {device.type}, {environment['threads']} threads"
    title = f"{source}, {seen}, {where}, {', '.join(map(str, counts))} slots"
    publish(title, {"rows": rows}, __doc__, environment, json_file)


def run_engine(engine: Engine, drafter: str, trace: Trace) -> dict[str, float]:
    """One rollout, from the prompts to all tokens on the host: its seconds, and the engine's counts."""
    prepare(engine, drafter, trace)
    started = time.perf_counter()
    completions = list(engine.generate(trace.requests))
    seconds = time.perf_counter() - started
    check_completions(completions, trace)
    return {"seconds": seconds, **engine.take_metrics()}


def rows_of(runs: dict[str, list[dict[str, float]]], num_slots: int, trace: Trace) -> list[Row]:
    """A row for each drafter; the first one is the baseline."""
    rows: list[Row] = []
    baseline: list[float] = []
    for name, of_name in runs.items():
        seconds = [run["seconds"] for run in of_name]
        median = statistics.median(seconds)
        num_steps, *means = (statistics.fmean(run[metric] for run in of_name) for metric in COUNTED)
        row: dict[str, Any] = {
            "slots": num_slots,
            "sequences": len(trace.requests),
            "drafter": name,
            "seconds": median,
            "tokens_per_second": trace.num_tokens / median,
            "ms_per_step": 1000 * median / num_steps,
            "tokens_per_step": means[0],
            "verified_per_step": means[1],
        }
        if baseline:
            row["times_as_fast"] = paired_ratio(baseline, seconds)
        baseline = baseline or seconds
        rows.append(row | {"runs": of_name})
    return rows
