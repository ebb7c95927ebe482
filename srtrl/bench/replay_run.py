"""A replay from its options to its table."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from srtrl.bench.replay_loop import Replay, ReplayCounts, ReplaySettings, num_history_samples_of, warm_up
from srtrl.drafters.base import DrafterBase
from srtrl.recipe_file import RecipeError, RecipeSource, validate_section
from srtrl.resolve import resolve_class
from srtrl.rollout.recorded import Recording, load_recorded_tokenizer, read_recorded
from srtrl.trainer.run_folder import RunProgress

PLAIN_WIDTH = 120
"""Columns of the table where there is no terminal to fit it to."""


@dataclass(kw_only=True, slots=True, frozen=True)
class ReplayRow:
    """What was counted in one file, or in all of them."""

    num_prompts: int
    num_samples: int
    """Samples that were decoded; the history's are not among them."""
    num_history_samples: int
    num_run_ahead_tokens: int
    """Tokens of the history that idle slots decoded, where it is not known beforehand."""
    num_cut: int
    """Samples that lost their end to `max_tokens`."""
    num_tokens: int
    """Tokens that decode steps gave: all of a sample but its first."""
    num_sequence_steps: int
    """Decode steps, each counted once for every sequence in it."""
    tokens_per_step: float
    """Tokens that a sequence gets from a decode step; 1 without drafts."""
    verified_per_step: float
    """Tokens that a sequence brings into a decode step: its draft's nodes, and one."""
    draft_us: float
    """Microseconds of drafting for one sequence and step, with the nodes that `min_score` takes out again, and of what
    the drafter takes in when it is asked (`srt` and `history` build and fill their tries then)."""
    insert_us_per_token: float
    """Microseconds of all the drafter's other work, for one token it was shown."""
    acceptance_by_depth: list[float]
    """Share of the sequence-steps in which at least 1, 2, 3, ... drafted tokens were accepted."""
    steps: int | None
    """Decode steps until all samples were done; with `slots` only, as the next two."""
    steps_without_drafts: int | None
    speedup: float | None
    """Of the second to the first: how much faster, if a step took no longer for what it verifies."""
    approximate: bool
    """Whether tokens were made from text, which may give others than were sampled."""


@dataclass(kw_only=True, slots=True, frozen=True)
class ReplayResult:
    """All that one `srtrl replay` found."""

    drafter: str
    drafter_options: dict[str, Any]
    """Every option of the drafter, defaults too."""
    settings: ReplaySettings
    max_tokens: int
    total: ReplayRow
    files: dict[str, ReplayRow]
    drafter_metrics: dict[str, dict[str, float]]
    """For each file, what the drafter itself reports."""

    def to_json(self) -> str:
        """One line."""
        values = asdict(self)
        settings = values.pop("settings")
        total = values.pop("total")
        slots, order = settings["slots"], settings["order"]
        values |= {
            "draft_budget": settings["max_nodes"],
            "min_score": settings["min_score"],
            "history": settings["history"],
            "history_as": settings["history_as"],
            "slots": slots,
            "order": order if slots is not None else None,
        }
        metrics = values.pop("drafter_metrics")
        rows = [{"path": path, **row, "drafter_metrics": metrics[path]} for path, row in values.pop("files").items()]
        return json.dumps({**values, **total, "files": rows})

    def to_table(self) -> Table:
        """One row a file, and a total where there are several."""
        table = Table(title=f"Replay: {self.drafter}, {_describe(self.settings)}", caption=self._caption())
        table.caption_justify = "left"
        table.add_column("file", overflow="fold")
        headings = ["samples", "tokens\na step", "verified\na step", "us a\ndraft", "us a\ntoken"]
        if self.settings.slots is not None:
            headings += ["steps", "without\ndrafts", "ratio"]
        for heading in headings:
            table.add_column(heading, justify="right")
        for path, row in self.files.items():
            table.add_row(Path(path).name, *_cells(row))
        if len(self.files) > 1:
            table.add_section()
            table.add_row("all", *_cells(self.total))
        return table

    def _caption(self) -> str:
        sentences = [
            "Recorded tokens through the drafter under the decoder's rule, without a model: a decode step gives a "
            "sequence so many tokens on average for so many verified (the root included); without drafts it is 1 for "
            "1. The first token of each sample is given, not drafted.",
            "`us a draft` is the time of drafting, `us a token` that of all the drafter's other work for each token it "
            "was shown.",
        ]
        if self.settings.slots is not None:
            sentences.append("The ratio of steps is the speed-up if a step takes no longer for what it verifies.")
        if self.total.approximate:
            sentences.append("Texts were tokenised again: an approximation of the tokens that were sampled.")
        if self.total.num_cut:
            sentences.append(f"{self.total.num_cut} samples were cut to {self.max_tokens} tokens.")
        return " ".join(sentences)


def replay_files(
    files: Sequence[Path],
    settings: ReplaySettings,
    *,
    drafter_name: str,
    drafter_options: Sequence[str],
    tokenizer: str | None,
    max_tokens: int,
    step_prompts: int | None = None,
) -> ReplayResult:
    """Replay each file with a new drafter.

    Raises:
        ValueError: An unknown drafter or option, a file that cannot be used or is given twice, or nothing to decode.
    """
    if len(set(files)) < len(files):
        twice = next(path for path, count in Counter(files).items() if count > 1)
        raise ValueError(f"{twice}: given twice")
    make_drafter, options = find_drafter(drafter_name, drafter_options)
    if settings.history_as == "run-ahead" and not make_drafter().uses_run_aheads:
        raise ValueError(f"--history-as: run-ahead, but the drafter {drafter_name} does not draft from run-aheads")
    try:
        loaded = load_recorded_tokenizer(tokenizer) if tokenizer is not None else None
    except ValueError as error:
        raise ValueError(f"--tokenizer: {error}") from error
    total = ReplayCounts()
    num_cut = 0
    rows: dict[str, ReplayRow] = {}
    metrics: dict[str, dict[str, float]] = {}
    with RunProgress("replay", len(files), console=Console(stderr=True), plain_every=len(files) + 1) as progress:
        for number, path in enumerate(files, start=1):
            recording = in_steps(read_recorded(path, tokenizer=loaded, max_tokens=max_tokens), step_prompts)
            if settings.history_as == "run-ahead" and len(recording.steps) < 2:
                raise ValueError(f"{path}: one training step, and nothing to run ahead for; give --step-prompts")
            drafter = make_drafter()
            counts = _replay_recording(recording, make_drafter, drafter, settings, progress)
            rows[str(path)] = make_row(
                counts, settings, num_cut=recording.num_cut, approximate=recording.is_retokenised
            )
            metrics[str(path)] = drafter.take_metrics()
            total.add(counts)
            num_cut += recording.num_cut
            if number < len(files):
                progress.step(number, "")
    return ReplayResult(
        drafter=drafter_name,
        drafter_options=options,
        settings=settings,
        max_tokens=max_tokens,
        total=make_row(total, settings, num_cut=num_cut, approximate=any(row.approximate for row in rows.values())),
        files=rows,
        drafter_metrics=metrics,
    )


def in_steps(recording: Recording, step_prompts: int | None) -> Recording:
    """The same prompts in the same order, so many a step; None leaves the steps as they were recorded."""
    if step_prompts is None:
        return recording
    prompts = recording.prompts()
    steps = [prompts[first : first + step_prompts] for first in range(0, len(prompts), step_prompts)]
    return replace(recording, steps=steps)


def find_drafter(name: str, overrides: Sequence[str]) -> tuple[Callable[[], DrafterBase], dict[str, Any]]:
    """A function that makes the drafter, and its options written out.

    Raises:
        ValueError: No such drafter, or an option of it is wrong.
    """
    try:
        drafter_class = resolve_class("srtrl.drafters", name, "Drafter")
    except ValueError as error:
        raise ValueError(f"--drafter: {error}") from error
    source = RecipeSource(Path("--drafter-options"))
    try:
        source.override(overrides)
        options = validate_section(drafter_class.Options, source.data)
    except RecipeError as error:
        raise ValueError(f"--drafter-options: {source.located(error)}") from error
    return lambda: drafter_class(options), options.model_dump()


def _replay_recording(
    recording: Recording,
    make_drafter: Callable[[], DrafterBase],
    drafter: DrafterBase,
    settings: ReplaySettings,
    progress: RunProgress,
) -> ReplayCounts:
    """Replay one file.

    Raises:
        ValueError: History leaves no token to decode.
    """
    sizes = [len(prompt.samples) for step in recording.steps for prompt in step]
    num_total = sum(sizes) - sum(num_history_samples_of(size, settings.history) for size in sizes)
    num_done = 0

    def on_sample() -> None:
        nonlocal num_done
        num_done += 1
        progress.stage(recording.path.name, num_done, num_total)

    warm_up(make_drafter(), settings, recording)
    replay = Replay(drafter, settings)
    replay.run(recording, on_sample)
    if replay.counts.num_sequence_steps == 0:
        raise ValueError(f"{recording.path}: nothing to decode: each sample has one token, and the first one is given")
    return replay.counts


def make_row(counts: ReplayCounts, settings: ReplaySettings, *, num_cut: int, approximate: bool) -> ReplayRow:
    """Averages of what was counted."""
    num_sequence_steps = counts.num_sequence_steps
    has_slots = settings.slots is not None
    longest = max(counts.accepted, default=0)
    num_with_more = num_sequence_steps
    acceptance = []
    for depth in range(longest):
        num_with_more -= counts.accepted[depth]
        acceptance.append(num_with_more / num_sequence_steps)
    return ReplayRow(
        num_prompts=counts.num_prompts,
        num_samples=counts.num_samples,
        num_history_samples=counts.num_history_samples,
        num_run_ahead_tokens=counts.num_run_ahead_tokens,
        num_cut=num_cut,
        num_tokens=counts.num_tokens,
        num_sequence_steps=num_sequence_steps,
        tokens_per_step=counts.num_tokens / num_sequence_steps,
        verified_per_step=1 + counts.num_nodes / num_sequence_steps,
        draft_us=1e6 * counts.draft_seconds / num_sequence_steps,
        insert_us_per_token=1e6 * counts.insert_seconds / counts.num_observed_tokens,
        acceptance_by_depth=acceptance,
        steps=counts.num_steps if has_slots else None,
        steps_without_drafts=counts.num_steps_without_drafts if has_slots else None,
        speedup=counts.num_steps_without_drafts / counts.num_steps if has_slots else None,
        approximate=approximate,
    )


def print_result(result: ReplayResult, *, as_json: bool) -> None:
    """Write to standard output."""
    if as_json:
        print(result.to_json())
    else:
        console = Console()
        wide = console if console.is_terminal else Console(width=PLAIN_WIDTH)
        wide.print(result.to_table())


def _cells(row: ReplayRow) -> list[str]:
    cells = [
        f"{row.num_samples:,}",
        f"{row.tokens_per_step:.2f}",
        f"{row.verified_per_step:.1f}",
        f"{row.draft_us:.1f}",
        f"{row.insert_us_per_token:.2f}",
    ]
    if row.steps is not None and row.steps_without_drafts is not None and row.speedup is not None:
        cells += [f"{row.steps:,}", f"{row.steps_without_drafts:,}", f"{row.speedup:.2f}"]
    return cells


def _describe(settings: ReplaySettings) -> str:
    parts = [f"at most {settings.max_nodes} nodes"]
    if settings.min_score is not None:
        parts.append(f"scores of at least {settings.min_score:g}")
    how = "" if settings.history_as == "complete" else f" as {settings.history_as}"
    parts.append(f"history {settings.history:g}{how}")
    if settings.slots is not None:
        parts.append(f"{settings.slots} slots, {settings.order}-first")
    return ", ".join(parts)
