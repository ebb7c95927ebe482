"""`srtrl bench rollout`: drafters on recorded rollouts at the shape of a real model, or our decoder beside another.

Time does not depend on the values of the weights and acceptance is that of the recorded text, so the speed-up of a
drafter is measured without the policy's weights.
"""

import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
import typer

from srtrl.bench.alternate import Comparison, EngineRun, RunTime, make_engine, take_turns, tell
from srtrl.bench.environment import read_environment
from srtrl.bench.options import (
    JsonFile,
    StatedCost,
    Threads,
    TokenizerFolder,
    TraceFile,
    WriteDocs,
    check_output,
    parse_counts,
    parse_curve,
    parse_draft_budget,
    parse_names,
)
from srtrl.bench.peer_hf import HuggingFaceGenerate, compare_with_peer, describe_peer, draw_lengths
from srtrl.bench.shapes import write_random_model
from srtrl.bench.tables import Document, Grid, publish
from srtrl.bench.workload import (
    Trace,
    check_completions,
    drafter_maker,
    prepare,
    read_trace,
    share_out,
)
from srtrl.drafters.base import DrafterBase
from srtrl.engine.options import EngineOptions
from srtrl.model.cpu_threads import set_cpu_threads
from srtrl.model.transformer import Transformer
from srtrl.model.weights import load_model, locate, read_config
from srtrl.rollout.recorded import RecordedPrompt

OF_TRACE = ("tokenizer", "drafters", "history", "prompts_used", "max_tokens", "slots", "draft_budget", "price_as")
OF_PEER = ("sequences", "longest_tokens")
"""Parameters that are of use with `--trace` alone, and without it alone."""


def command(
    context: typer.Context,
    *,
    trace: TraceFile = None,
    tokenizer: TokenizerFolder = None,
    drafters: Annotated[
        str, typer.Option(metavar="NAME,NAME,...", help="Compare these with the first of them, on the trace.")
    ] = "none,srt",
    history: Annotated[
        float, typer.Option(min=0, max=1, help="Share of each prompt's samples that the drafter has seen before.")
    ] = 0.0,
    prompts_used: Annotated[
        str | None,
        typer.Option(metavar="N[,N...]", help="The first N prompts; or one N for each number of slots. [default: all]"),
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Cut samples to this many tokens.")] = None,
    slots: Annotated[
        str, typer.Option(metavar="N[,N...]", help="Sequences decoded at once, one comparison each; 0: all.")
    ] = "0",
    draft_budget: Annotated[str, typer.Option(metavar="auto|N", help="Draft nodes per sequence and step.")] = "auto",
    price_as: Annotated[
        str | None,
        typer.Option(
            metavar="CURVE",
            help="Price decode steps by a stated cost in place of the clock: ROWS:SECONDS,ROWS:SECONDS,... or the name "
            "of a curve.",
        ),
    ] = None,
    trace_note: Annotated[str | None, typer.Option(metavar="TEXT", help="What the trace is, for the report.")] = None,
    sequences: Annotated[
        str, typer.Option(metavar="N,N,...", help="Without --trace: sequences of a rollout.")
    ] = "8,32,128",
    longest_tokens: Annotated[
        int, typer.Option(min=8, help="Without --trace: maximum new tokens of a sequence.")
    ] = 256,
    model: Annotated[str | None, typer.Option(help="Hugging Face folder or hub name, in place of a shape.")] = None,
    model_shape: Annotated[str, typer.Option(help="Random weights of this shape.")] = "small",
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option(help="Type of the weights.")] = "float32",
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="Where to compute.")] = "auto",
    threads: Threads = None,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each candidate, after one to warm up.")] = 5,
    json_file: JsonFile = None,
    write_docs: WriteDocs = None,
) -> None:
    """Measure whole rollouts: prefill, decoding and sampling, from the prompts to the tokens of all sequences.

    With --trace, compare drafters on recorded rollouts; without, compare srtrl with `transformers`' generate.
    """
    _check_given(context, trace)
    counts = parse_counts("--slots", slots, least=0)
    num_sequences = parse_counts("--sequences", sequences)
    makers = {name: drafter_maker(name) for name in parse_names("--drafters", drafters)}
    curve = parse_curve("--price-as", price_as) if price_as else None
    check_output("--json", json_file)
    check_output("--write-docs", write_docs)
    place = _choose_device(device)
    options = EngineOptions(
        deterministic=True if place.type == "cpu" else None,
        draft_budget=parse_draft_budget(draft_budget),
        cost_points=curve.points if curve else None,
    )
    traces = []
    if trace is not None:
        prompts = read_trace(trace, tokenizer=tokenizer, max_tokens=max_tokens)
        traces = _traces(prompts, history, prompts_used, len(counts))
    set_cpu_threads(threads)
    environment = read_environment(place)
    with tempfile.TemporaryDirectory() as temporary:
        weights = getattr(torch, dtype)
        folder = locate(model) if model else write_random_model(model_shape, Path(temporary), weights)
        for one in traces:
            one.check_model(read_config(folder))
        policy = load_model(folder, dtype=weights, device=place)
        peer = HuggingFaceGenerate(folder, dtype=weights, device=place) if trace is None else None
    where = f"{model or model_shape}, {dtype}, {place.type}, {environment.threads}"
    notes = [_describe_model(policy)]
    if trace is not None:
        comparisons = [
            _compare_drafters(policy, options, one, count, makers, repeats)
            for count, one in zip(counts, traces, strict=True)
        ]
        seen = f"{history:g} as history" if history else "no history"
        priced = f", priced as {price_as}" if price_as else ""
        at = ", ".join(one.labels["slots"] for one in comparisons)
        title = f"Drafters on a trace: {trace.name}, {seen}, {where}, {at} slots{priced}"
        notes += _describe_trace(trace, trace_note, max_tokens, repeats, curve)
    else:
        assert peer is not None
        comparisons = [
            compare_with_peer(policy, peer, options, draw_lengths(count, longest_tokens), repeats)
            for count in num_sequences
        ]
        title = f"Rollouts: {where}"
        notes += describe_peer(repeats)
    publish(
        Document(
            title=title,
            environment=environment,
            notes=tuple(notes),
            grids=(_grid(comparisons),),
            values={
                "baseline": next(iter(comparisons[0].runs)),
                "comparisons": [one.to_values() for one in comparisons],
            },
        ),
        json_file,
        write_docs,
    )


def _check_given(context: typer.Context, trace: Path | None) -> None:
    """Raise ValueError for an option that would be ignored."""
    for name in OF_PEER if trace is not None else OF_TRACE:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            option = f"--{name.replace('_', '-')}"
            if trace is not None:
                raise ValueError(f"{option} has no meaning with --trace: it is for comparing srtrl with transformers")
            raise ValueError(f"{option} needs --trace FILE, recorded rollouts")


def _traces(prompts: Sequence[RecordedPrompt], history: float, prompts_used: str | None, num_slots: int) -> list[Trace]:
    """What is decoded at each number of slots."""
    counts = (len(prompts),) if prompts_used is None else parse_counts("--prompts-used", prompts_used)
    if len(counts) not in (1, num_slots):
        raise ValueError(
            f"--prompts-used: expected one number, or {num_slots}, one for each of --slots; found {len(counts)}"
        )
    if max(counts) > len(prompts):
        raise ValueError(f"--prompts-used: {max(counts)}, but the trace has {len(prompts)} prompts")
    whole = share_out(prompts, history=history)
    return [whole.first_prompts(count) for count in (counts * num_slots if len(counts) == 1 else counts)]


def _choose_device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device: cuda, but torch sees no CUDA device here; use cpu or auto")
    return torch.device(name if name != "auto" else "cuda" if torch.cuda.is_available() else "cpu")


# --- Drafters on a trace ----------------------------------------------------------------------------------------------


def _compare_drafters(
    policy: Transformer,
    options: EngineOptions,
    trace: Trace,
    num_slots: int,
    makers: Mapping[str, Callable[[], DrafterBase]],
    repeats: int,
) -> Comparison:
    """All drafters on one trace, their engines side by side step by step."""
    num_slots = num_slots or len(trace.requests)
    engines = {name: make_engine(policy, options, trace.requests, num_slots) for name in makers}
    runs: dict[str, list[RunTime]] = {name: [] for name in makers}
    for turn in range(repeats + 1):
        names = list(makers)[:: 1 if turn % 2 == 0 else -1]
        for name in names:
            prepare(engines[name], makers[name](), trace)
        taken = take_turns([EngineRun(engines[name], trace.requests) for name in names])
        for name, (run, completions) in zip(names, taken, strict=True):
            check_completions(completions, trace, name)
            tell(f"{num_slots} slots, {name}, {f'run {turn} of {repeats}' if turn else 'warm-up'}: {run.seconds:.3f} s")
            if turn:
                runs[name].append(run)
    num_tokens = sum(request.sampling.max_new_tokens for request in trace.requests)
    labels = {"slots": str(num_slots), "sequences": str(len(trace.requests))}
    return Comparison(labels=labels, num_tokens=num_tokens, runs=runs)


def _describe_model(policy: Transformer) -> str:
    config = policy.config
    millions = sum(parameter.numel() for parameter in policy.parameters()) / 1e6
    return (
        f"Model: {millions:,.1f} million parameters ({config.num_hidden_layers} layers of width {config.hidden_size}, "
        f"vocabulary {config.vocab_size:,})."
    )


def _describe_trace(
    trace: Path, note: str | None, max_tokens: int | None, repeats: int, curve: StatedCost | None
) -> list[str]:
    """How it was measured and what the columns mean, in sentences."""
    cut = f", each cut to {max_tokens} tokens" if max_tokens else ""
    notes = [
        f"The engine takes the recorded tokens of `{trace.name}`{cut}, in place of those that it samples; each run was "
        f"checked to give exactly these.{f' What the trace is: {note}.' if note else ''}",
        f"All drafters decode side by side: the one with the fewest tokens takes the next step. A warm-up, then "
        f"{repeats} runs of each with a new drafter; the engines live on, as in training. Seconds are medians, ratios "
        "medians over pairs of runs with a 95% interval (from the lowest pair to the highest, where there are few).",
    ]
    if curve is not None:
        notes.append(
            "Seconds are priced, not measured: each decode step costs what this curve states for its rows. "
            f"{curve.note}. All else costs nothing in it."
        )
    return notes


def _grid(comparisons: Sequence[Comparison]) -> Grid:
    """Seconds, and what a decode step took and brought."""
    rows, first = [], next(iter(comparisons[0].runs))
    for one in comparisons:
        for name in one.runs:
            median = statistics.median(one.seconds(name))
            rows.append(
                (
                    *one.labels.values(),
                    name,
                    f"{median:.3f}",
                    _cell(1000 * median / one.mean(name, "engine/decode_steps")),
                    f"{1000 * median / one.num_tokens:.3f}",
                    _cell(one.mean(name, "engine/tokens_per_decode_step")),
                    _cell(one.mean(name, "engine/verified_per_decode_step")),
                    "" if name == first else str(one.ratio(name, to=first)),
                )
            )
    columns = ("seconds", "ms/step", "ms/token", "tokens/step", "verified/step", f"against {first}")
    return Grid(columns=(*comparisons[0].labels, "", *columns), rows=tuple(rows))


def _cell(value: float) -> str:
    return "-" if np.isnan(value) else f"{value:.2f}"
