"""`srtrl bench rollout`: drafters in whole rollouts, from the prompts to all tokens on the host.

Weights are random where a shape is named: time does not depend on their values, and acceptance is that of the recorded
(or generated) tokens, which replace those that the engine samples; each run was checked to give exactly these. Whole
rollouts alternate, after one of each to warm up, each with a new drafter; the engines live on, as in training. Seconds
are medians, `times as fast` is the median over pairs of runs with a 95% interval (from the lowest pair to the highest,
where there are few).
"""

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, Literal

import torch
import typer

from srtrl.bench import options
from srtrl.bench.alternate import alternate, paired_ratio
from srtrl.bench.shapes import SHAPES
from srtrl.bench.tables import Row, publish, read_environment
from srtrl.bench.workload import Trace, check_completions, load_workload, make_engine, prepare
from srtrl.engine.engine import Engine
from srtrl.model.cpu_threads import set_cpu_threads
from srtrl.model.hf_config import config_from_hf
from srtrl.model.transformer import Transformer
from srtrl.model.weights import init_model, load_model
from srtrl.resolve import suggestion

COUNTED = ("engine/decode_steps", "engine/tokens_per_decode_step", "engine/verified_per_decode_step")


def command(
    *,
    trace: options.TraceFile = None,
    tokenizer: options.TokenizerFolder = None,
    drafters: options.Drafters = "none,srt",
    history: Annotated[
        float, typer.Option(min=0, max=1, help="Share of each prompt's samples that the drafter has seen before.")
    ] = 0.0,
    prompts_used: Annotated[
        int | None, typer.Option(min=1, help="Use only the first prompts. [default: all of the trace, or 1]")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=8, help="Truncate samples to this many tokens. [default with no trace: 128]")
    ] = None,
    slots: options.Slots = "",
    model: Annotated[str | None, typer.Option(help="Hugging Face folder or hub name, instead of a shape.")] = None,
    model_shape: Annotated[str, typer.Option(help=f"Random weights of this shape: {', '.join(SHAPES)}.")] = "small",
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option(help="Type of the weights.")] = "float32",
    threads: options.Threads = None,
    repeats: options.Repeats = 5,
    json_file: options.JsonFile = None,
) -> None:
    """Measure the speed of whole rollouts: prefill, decoding and sampling of all sequences.

    With --trace: recorded rollouts; without: generated ones. The default of --slots is the number of samples.
    """
    names = options.parse_drafters(drafters)
    if model_shape not in SHAPES:
        near = suggestion(model_shape, SHAPES) or ";"
        raise ValueError(f"--model-shape: no shape {model_shape!r}{near} known: {', '.join(SHAPES)}")
    counts = options.parse_counts("--slots", slots) if slots else ()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    weights: torch.dtype = getattr(torch, dtype)
    set_cpu_threads(threads)
    environment = read_environment(device)
    if model:
        policy = load_model(model, dtype=weights, device=device)
    else:
        policy = init_model(config_from_hf(SHAPES[model_shape], model_shape), 0, weights, device)
    max_tokens = max_tokens or (sys.maxsize if trace else 128)
    workload = load_workload(trace, policy.config, tokenizer=tokenizer, max_tokens=max_tokens, history=history)
    workload = workload.first_prompts(prompts_used or (len(workload.history) if trace else 1))
    counts = counts or (len(workload.requests),)
    rows = [row for count in counts for row in compare_rollouts(policy, workload, names, count, repeats)]
    source = f"Drafters on a trace: {trace.name}" if trace else "Rollouts: generated"
    seen = f"{history:g} as history" if history else "no history"
    where = f"{model or model_shape}, {dtype}, {device.type}, {environment['threads']} threads"
    title = f"{source}, {seen}, {where}, {', '.join(map(str, counts))} slots"
    publish(title, {"rows": rows}, __doc__, environment, json_file)


def compare_rollouts(
    policy: Transformer,
    trace: Trace,
    names: Sequence[str],
    num_slots: int,
    repeats: int,
    **changes: Any,
) -> list[Row]:
    """Decode the trace with each drafter of `names`, in turns; one row for each. `changes` are `EngineOptions`."""
    candidates: dict[str, Callable[[], dict[str, float]]] = {}
    for name in names:
        engine = make_engine(policy, num_slots, trace.max_sequence_tokens, **changes)
        candidates[name] = partial(run_engine, engine, name, trace)
    runs = alternate(candidates, repeats)
    baseline = [run["seconds"] for run in runs[names[0]]]
    rows: list[Row] = []
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
        if name != names[0]:
            row["times_as_fast"] = paired_ratio(baseline, seconds)
        rows.append(row | {"runs": of_name})
    return rows


def run_engine(engine: Engine, drafter: str, trace: Trace) -> dict[str, float]:
    """One rollout, from the prompts to all tokens on the host: its seconds, and the engine's counts."""
    prepare(engine, drafter, trace)
    started = time.perf_counter()
    completions = list(engine.generate(trace.requests))
    seconds = time.perf_counter() - started
    check_completions(completions, trace)
    return {"seconds": seconds, **engine.take_metrics()}
