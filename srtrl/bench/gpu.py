"""`srtrl bench gpu`: how fast is the CUDA path? One command, a few minutes, one table; `pytest -m gpu`: is it right?"""

import os
import time
from pathlib import Path
from typing import Annotated

import typer

from srtrl.bench.rollout_options import check_output, parse_names

SECTIONS = ("limits", "decode", "trace", "peers", "update", "logprobs")
"""In the order in which they run; what is left out for lack of time is at the end."""


def command(
    *,
    max_minutes: Annotated[float, typer.Option(help="Of the clock, for everything.")] = 9.0,
    only: Annotated[str | None, typer.Option(metavar="NAME,...", help=f"Some of {', '.join(SECTIONS)}.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Recorded rollouts, for `none` against `srt`.")] = None,
    tokenizer: Annotated[str | None, typer.Option(metavar="DIR", help="Tokenizer, for a trace of texts.")] = None,
    smoke: Annotated[
        bool, typer.Option("--smoke", help="Tiny and on the CPU, kernels interpreted: does every line run?")
    ] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write everything to this file, too.")] = None,
    write_docs: Annotated[
        Path | None, typer.Option(help="Put the result into this Markdown file, in place of an older one.")
    ] = None,
) -> None:
    """Measure the CUDA path: decoding, speculation, the update. Whether it is right is for `pytest -m gpu`.

    Goals stand beside the figures. Files are written after every section. Exit code 1: a section failed.
    """
    started = time.perf_counter()
    names = SECTIONS if only is None else parse_names("--only", only, SECTIONS)
    if "limits" not in names and {"decode", "update"} & set(names):  # they compare with what it measures
        names = ("limits", *names)
    names = tuple(name for name in SECTIONS if name in names)
    if max_minutes <= 0:
        raise ValueError(f"--max-minutes: expected a number above 0, found {max_minutes:g}")
    if trace is not None and not trace.is_file():
        raise ValueError(f"--trace: there is no file {trace}")
    check_output("--json", json_file)
    check_output("--write-docs", write_docs)
    if smoke:  # before Triton is imported: a kernel is interpreted or compiled from its definition on
        os.environ["TRITON_INTERPRET"] = "1"
    import torch

    if not smoke and not torch.cuda.is_available():
        raise ValueError(
            f"srtrl bench gpu measures a CUDA device, and torch {torch.__version__} sees none; --smoke runs every line "
            "of it on the CPU, tiny"
        )
    from srtrl.bench.cuda.run import GpuRun

    run = GpuRun(
        sections=names,
        ends=started + 60 * max_minutes,
        smoke=smoke,
        trace=trace,
        tokenizer=tokenizer,
        json_file=json_file,
        write_docs=write_docs,
    )
    if run.measure():
        raise typer.Exit(1)
