"""`srtrl rollouts`: the samples of a training step, to read in a terminal or as JSON rows."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from srtrl.environments.base import count_turns, segment_titles
from srtrl.types import GRADED_OUTCOMES

if TYPE_CHECKING:
    from srtrl.report.runs import Run

MAX_TOKEN_REWARDS = 8
"""Rewards on tokens in the terminal; --json shows all."""
MAX_CHARACTERS = 2000
"""Characters of a text in the terminal; --full shows all."""
NOT_TO_READ = {
    *("token_ids", "prompt_token_ids", "rollout_logprobs", "policy_versions"),
    *("segment_kinds", "segment_lengths", "segment_texts", "token_rewards"),
}
"""Columns that are left out; the Parquet files have them."""


def command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    *,
    step: Annotated[
        int | None, typer.Option(min=1, help="The step. [default: the last, with --prompt the last that sampled it]")
    ] = None,
    prompt: Annotated[str | None, typer.Option(metavar="ID", help="Samples of this prompt alone.")] = None,
    sort: Annotated[
        Literal["reward", "-reward", "length", "-length"] | None,
        typer.Option(help="Lowest first, with a minus highest first. [default: groups with unequal rewards first]"),
    ] = None,
    by_prompt: Annotated[
        bool, typer.Option("--by-prompt", help="For each prompt the mean reward at its first and its last step.")
    ] = False,
    limit: Annotated[int | None, typer.Option(min=1, help="Maximum number of samples. [default: 4]")] = None,
    full: Annotated[bool, typer.Option("--full", help="Show long texts whole.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON row per sample, texts whole, without tokens and log-probs.")
    ] = False,
) -> None:
    """Show samples of a training step.

    Each with prompt, response, reference answer, reward with its parts, and advantage; equal responses are shown once.
    They are read from the run's folder, also while the run continues.
    """
    from srtrl.report.runs import read_run

    if by_prompt:
        if (step, prompt, sort, limit, full, as_json) != (None, None, None, None, False, False):
            raise ValueError("--by-prompt: expected no other option")
        print_visits(read_run(run))
        return
    samples = read_samples(read_run(run), step=step, prompt_id=prompt)
    if sort is None:
        rewards: dict[int, set[float]] = {}
        for sample in samples:
            rewards.setdefault(sample["draw_index"], set()).add(sample["reward"])
        samples.sort(key=lambda sample: len(rewards[sample["draw_index"]]) == 1)
    else:
        samples.sort(key=lambda sample: sample[sort.removeprefix("-")], reverse=sort.startswith("-"))
    limit = 4 if limit is None else limit
    if as_json:
        for sample in samples[:limit]:
            print(json.dumps(sample, ensure_ascii=False))
    else:
        samples = merge_equal(samples)
        print_samples(samples[:limit], max_characters=None if full else MAX_CHARACTERS)
    if len(samples) > limit:
        print(f"... {len(samples) - limit} more samples; --limit shows more", file=sys.stderr if as_json else None)


def read_samples(run: "Run", *, step: int | None = None, prompt_id: str | None = None) -> list[dict[str, Any]]:
    """The samples of a step, in the order of the data: the columns of the file, with lengths in place of tokens.

    Args:
        run: The run.
        step: The step; by default the last with saved rollouts, and with `prompt_id` the last that sampled the prompt.
        prompt_id: Only this prompt's samples.

    Raises:
        ValueError: there are none.
    """
    from srtrl.report.runs import find_rollouts, read_rollouts

    files = find_rollouts(run, step, prompt_id)
    step = list(files)[-1] if step is None else step
    return [
        {"step": step, "answer": None, "advantage": None}
        | {name: value for name, value in row.items() if name not in NOT_TO_READ}
        | {"length": len(row["token_ids"]), "prompt_length": len(row["prompt_token_ids"])}
        | {"segments": _segments(row)}
        | ({"token_rewards": _nonzero(row["token_rewards"])} if row.get("token_rewards") else {})
        for row in read_rollouts(files[step], prompt_id=prompt_id).to_pylist()
    ]


def merge_equal(samples: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Samples of a draw with the same text and grade become the first of them, with their number."""
    merged: dict[str, dict[str, Any]] = {}
    for sample in samples:
        key = str([sample[name] for name in ("draw_index", "text", "segments", "reward", "outcome")])
        merged.setdefault(key, {**sample, "num_equal": 0})["num_equal"] += 1
    return [*merged.values()]


def print_visits(run: "Run") -> None:
    """Print for each prompt the mean reward at the first and the last step that drew it, largest loss first."""
    import pyarrow
    import pyarrow.compute

    from srtrl.report.runs import find_rollouts, read_rollouts

    visits: dict[str, list[tuple[int, float]]] = {}
    for step, path in find_rollouts(run).items():
        table = read_rollouts(path, ["prompt_id", "reward", "outcome"])
        graded = table.filter(pyarrow.compute.is_in(table["outcome"], pyarrow.array(GRADED_OUTCOMES)))
        for row in graded.group_by("prompt_id").aggregate([("reward", "mean")]).to_pylist():
            visits.setdefault(row["prompt_id"], []).append((step, row["reward_mean"]))
    for name, of_prompt in sorted(visits.items(), key=lambda item: item[1][-1][1] - item[1][0][1]):
        (first, before), (last, after) = of_prompt[0], of_prompt[-1]
        rewards = f"{before:.3f} at step {first}, {after:.3f} at step {last}"
        print(f"{after - before:+.3f}  {printable(name)}: {rewards}, visits: {len(of_prompt)}")


def _segments(row: Mapping[str, Any]) -> list[dict[str, str]] | None:
    """Kind and text of the parts of a sample of several turns; None: a single turn."""
    kinds, texts = row.get("segment_kinds"), row.get("segment_texts")
    if not (kinds and texts):
        return None
    return [{"kind": kind, "text": text} for kind, text in zip(kinds, texts, strict=True)]


def _nonzero(numbers: Sequence[float]) -> dict[str, float]:
    """Index -> number, of those that are not 0."""
    return {str(index): number for index, number in enumerate(numbers) if number}


def token_rewards_text(sample: Mapping[str, Any]) -> str:
    """Where the reward of a sample stands, `on tokens 12: 0.5, 40: -0.25`; empty if it is one number."""
    if "token_rewards" not in sample:
        return ""
    parts = [f"{index}: {number:.3g}" for index, number in sample["token_rewards"].items()]
    return f"on tokens {', '.join(parts[:MAX_TOKEN_REWARDS])}{', ...' if len(parts) > MAX_TOKEN_REWARDS else ''}"


def print_samples(samples: Sequence[Mapping[str, Any]], *, max_characters: int | None) -> None:
    """Print samples; a text longer than `max_characters` says how much is left out, a prompt is printed once."""
    from rich.console import Console
    from rich.text import Text

    console = Console(soft_wrap=True, highlight=False)
    shown: set[str] = set()

    def show(title: str, text: str) -> None:
        console.print(Text(title, "bold cyan"))
        console.print(Text(printable(text[:max_characters]).rstrip("\n")))
        if num_hidden := len(text) - len(text[:max_characters]):
            console.print(Text(f"... {num_hidden:,} more characters; --full shows all", "dim"))

    for sample in samples:
        console.print(Text(printable(heading(sample)), "bold green" if sample["outcome"] == "correct" else "bold red"))
        if sample["prompt_id"] not in shown:
            shown.add(sample["prompt_id"])
            show("prompt", sample["prompt"])
        if (segments := sample["segments"]) is None:
            show("response", sample["text"])
        for title, segment in zip(segment_titles(part["kind"] for part in segments or ()), segments or (), strict=True):
            show(f"--- {title} ---", segment["text"].strip("\n"))
        if sample["answer"]:
            show("reference answer", sample["answer"])
        console.print()


def heading(sample: Mapping[str, Any]) -> str:
    """Everything about a sample that is not a text, on one line."""
    parts = [
        f"{name.removeprefix('reward_')} {value:.3g}"
        for name, value in sample.items()
        if name.startswith("reward_") and value is not None
    ]
    advantage = "not learned from" if sample["advantage"] is None else f"advantage {sample['advantage']:.3g}"
    turns = f", {count_turns(sample['num_turns'], sample['stop_reason'])}" if sample["segments"] else ""
    on_tokens = f"; {text}" if (text := token_rewards_text(sample)) else ""
    equal = f" ({sample['num_equal']} equal)" if sample["num_equal"] > 1 else ""
    return (
        f"step {sample['step']}, prompt {sample['prompt_id']}, sample {sample['sample_index']}{equal}: "
        f"reward {sample['reward']:.3g} ({', '.join(parts)}{on_tokens}), {advantage}, {sample['outcome']}, "
        f"{sample['length']} tokens, finish reason: {sample['finish_reason']}{turns}"
    )


def printable(text: str) -> str:
    """The text without control characters, which would steer the terminal."""
    return "".join(character if character.isprintable() or character in "\n\t" else "·" for character in text)
