"""`srtrl bench rollout`: drafters in whole rollouts, from the prompts to all tokens on the host.

Weights are random: time does not depend on their values, and acceptance is that of the recorded (or generated) tokens,
which replace those that the engine samples; each run was checked to give exactly these. Whole rollouts alternate, after
one of each to warm up, each with a new drafter; the engines live on, as in training. Seconds are medians, `times as
fast` is the median over pairs of runs, beside the lowest and the highest pair.
"""

import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from srtrl.bench.replay import History, TokenizerFolder, check_history
from srtrl.model.shapes import SHAPES
from srtrl.recipe.schema import MAX_WIDTH
from srtrl.resolve import suggestion


def command(
    *,
    trace: Annotated[
        Path | None, typer.Option(help="Recorded rollouts to decode again: a run's folder, Parquet of one, or JSONL.")
    ] = None,
    tokenizer: TokenizerFolder = None,
    drafters: Annotated[
        str, typer.Option(metavar="NAME,NAME,...", help="Drafters to compare; the first is the baseline.")
    ] = "none,srt",
    history: History = 0.0,
    prompts_used: Annotated[
        int | None, typer.Option(min=1, help="Use only the first prompts. [default: all of the trace, or 1]")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=8, help="Truncate samples to this many tokens. [default with no trace: 128]")
    ] = None,
    slots: Annotated[
        str, typer.Option(metavar="N[,N...]", help="Sequences decoded at a time; one comparison for each number.")
    ] = "",
    model_shape: Annotated[str, typer.Option(help=f"Random weights of this shape: {', '.join(SHAPES)}.")] = "small",
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option(help="Type of the weights.")] = "float32",
    threads: Annotated[
        int | None, typer.Option(min=1, max=1024, help="CPU threads; by default torch's own choice.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each, alternating, after a warm-up run.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure the speed of whole rollouts.

    That is prefill, decoding and sampling of all sequences. With --trace: recorded rollouts; without: generated ones.
    The default of --slots is the number of samples.
    """
    counts = parse_counts(slots) if slots else ()
    check_history(history)
    if model_shape not in SHAPES:
        near = suggestion(model_shape, SHAPES) or ";"
        raise ValueError(f"--model-shape: no shape {model_shape!r}{near} known: {', '.join(SHAPES)}")
    import torch

    from srtrl.bench.measure import alternate, publish
    from srtrl.bench.workload import load_prompts, make_engine, rows_of, run_engine, share_out
    from srtrl.build import PREFILL_TOKENS
    from srtrl.drafters.base import resolve_drafter
    from srtrl.model.cpu_threads import set_cpu_threads
    from srtrl.model.hf_config import config_from_hf
    from srtrl.model.weights import init_model

    names = [name.strip() for name in drafters.split(",")]
    for name in names:
        resolve_drafter("--drafters", name)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    set_cpu_threads(threads)
    config = config_from_hf(SHAPES[model_shape], model_shape)
    max_tokens = max_tokens or (sys.maxsize if trace else 128)
    prompts = load_prompts(trace, config, tokenizer=tokenizer, max_tokens=max_tokens)
    workload = share_out(prompts[: prompts_used or (None if trace else 1)], history=history)
    policy = init_model(config, 0, getattr(torch, dtype), device)
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
    where = f"{model_shape}, {dtype}, {device.type}, {torch.get_num_threads()} threads"
    title = f"{source}, {seen}, {where}, {', '.join(map(str, counts))} slots"
    publish(title, rows, __doc__, device, as_json=as_json)


def parse_counts(slots: str) -> tuple[int, ...]:
    """Read `8,32,128`; ValueError if it is something else, or a number is below 1."""
    parts = slots.split(",")
    if not all(part.strip().isdecimal() and len(part) < 10 and 0 < int(part) <= MAX_WIDTH for part in parts):
        raise ValueError(f"--slots: expected counts like 8,32,128, at most {MAX_WIDTH}, found {slots[:80]!r}")
    return tuple(map(int, parts))
