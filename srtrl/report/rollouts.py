"""`srtrl rollouts`: the samples of a training step, to read in a terminal or as JSON rows."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from srtrl.report.runs import Run

MAX_CHARACTERS = 2000
"""Of a text in the terminal; --full shows all."""
NOT_TO_READ = {"token_ids", "prompt_token_ids", "rollout_logprobs"}
"""Columns that `--json` leaves out; the Parquet files have them."""


def command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    *,
    step: Annotated[
        int | None, typer.Option(min=1, help="The step. [default: the last, with --prompt the last that sampled it]")
    ] = None,
    prompt: Annotated[str | None, typer.Option(metavar="ID", help="Samples of this prompt alone.")] = None,
    sort: Annotated[
        Literal["reward", "-reward", "length", "-length"] | None,
        typer.Option(help="Lowest first, with a minus highest first. [default: in the order of the data]"),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of samples.")] = 4,
    full: Annotated[
        bool, typer.Option("--full", help=f"Show texts of more than {MAX_CHARACTERS} characters whole.")
    ] = (False),
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON row per sample, texts whole, without tokens and log-probs.")
    ] = False,
) -> None:
    """Show samples of a step: prompt, response, reference answer, reward with its parts, advantage.

    They are read from the run's folder, also while the run continues.
    """
    from srtrl.report.runs import read_run

    samples = read_samples(read_run(run), step=step, prompt_id=prompt)
    if sort is not None:
        samples.sort(key=lambda sample: sample[sort.removeprefix("-")], reverse=sort.startswith("-"))
    if as_json:
        for sample in samples[:limit]:
            print(
                json.dumps(
                    {name: value for name, value in sample.items() if name not in NOT_TO_READ}, ensure_ascii=False
                )
            )
    else:
        print_samples(samples[:limit], max_characters=None if full else MAX_CHARACTERS)
    if len(samples) > limit:
        print(f"... {len(samples) - limit} more samples; --limit shows more", file=sys.stderr if as_json else None)


def read_samples(run: "Run", *, step: int | None = None, prompt_id: str | None = None) -> list[dict[str, Any]]:
    """The samples of a step, in the order of the data, with `length` in tokens beside the columns of the file.

    Args:
        run: The run.
        step: The step; by default the last with saved rollouts, and with `prompt_id` the last that sampled the prompt.
        prompt_id: Only this prompt's samples.

    Raises:
        ValueError: there are none.
    """
    from srtrl.report.runs import listing, read_rollouts, saved_rollouts
    from srtrl.resolve import suggestion

    files = saved_rollouts(run, step)
    known: dict[str, None] = {}
    for number in reversed(files) if step is None else [step]:
        rows = read_rollouts(files[number], prompt_id=prompt_id).to_pylist()
        if rows or prompt_id is None:
            return [
                {"step": number, "answer": None, "advantage": None} | row | {"length": len(row["token_ids"])}
                for row in rows
            ]
        known |= dict.fromkeys(read_rollouts(files[number], ["prompt_id"])["prompt_id"].to_pylist())
    where = run.folder if step is None else f"step {step} of {run.folder}"
    assert prompt_id is not None
    near = suggestion(prompt_id, known)
    raise ValueError(f"--prompt: {where} has no rollouts of `{prompt_id}`{near}; it has those of {listing(known)}")


def print_samples(samples: Sequence[Mapping[str, Any]], *, max_characters: int | None) -> None:
    """Print samples; a text longer than `max_characters` says how much is left out, a prompt is printed once."""
    from rich.console import Console
    from rich.text import Text

    console = Console(soft_wrap=True, highlight=False)
    shown: set[str] = set()

    def show(title: str, text: str, style: str = "") -> None:
        console.print(Text(title, "bold cyan"))
        console.print(Text(printable(text[:max_characters]).rstrip("\n"), style))
        if len(text) > len(text[:max_characters]):
            console.print(
                Text(f"... {len(text) - len(text[:max_characters]):,} more characters; --full shows all", "dim")
            )

    for sample in samples:
        console.print(Text(printable(heading(sample)), "bold green" if sample["outcome"] == "correct" else "bold red"))
        if sample["prompt_id"] not in shown:
            shown.add(sample["prompt_id"])
            show("prompt", sample["prompt"])
        show("response", sample["text"])
        if sample["answer"] is not None:
            show("reference answer", sample["answer"])
        console.print()


def heading(sample: Mapping[str, Any]) -> str:
    """Everything about a sample that is not a text, on one line."""
    parts = [
        f"{name.removeprefix('reward_')} {value:.3g}"
        for name, value in sample.items()
        if name.startswith("reward_") and value is not None
    ]
    advantage = (
        "no advantage (not learned from)" if sample["advantage"] is None else f"advantage {sample['advantage']:.3g}"
    )
    return (
        f"step {sample['step']}, prompt {sample['prompt_id']}, sample {sample['sample_index']}: "
        f"reward {sample['reward']:.3g} ({', '.join(parts)}), {advantage}, {sample['outcome']}, "
        f"{sample['length']} tokens, finish reason: {sample['finish_reason']}"
    )


def printable(text: str) -> str:
    """The text without control characters, which would steer the terminal."""
    return "".join(character if character.isprintable() or character in "\n\t" else "·" for character in text)
