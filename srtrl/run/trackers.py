"""What trackers are told beside the metrics: the recipe, at the start, and now and then a few samples."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from inspect import signature
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING, Any

from srtrl.environments.base import mark_segments
from srtrl.recipe.file import dump_recipe
from srtrl.recipe.schema import LogSection, Recipe
from srtrl.resolve import describe_error
from srtrl.run.folder import flatten, rollout_rows, run_path
from srtrl.tasks.worker import Caught
from srtrl.types import RolloutGroup

if TYPE_CHECKING:
    from accelerate import Accelerator

NUM_SAMPLES = 8
"""Samples that trackers show of a step: the first of as many prompts."""
SAMPLE_TEXTS = ("prompt", "text", "answer")
SAMPLE_COLUMNS = ("step", "prompt_id", *SAMPLE_TEXTS, "reward", "advantage", "outcome", "finish_reason")
"""Of these samples, beside the parts of the reward."""
COMPARED_METRICS = ("reward/mean", "accuracy", "eval/accuracy", "length/mean")
"""What TensorBoard lists beside the hyperparameters of each run."""


def check_trackers(log: LogSection) -> None:
    """Refuse trackers that accelerate does not know or that are not installed, and options of a tracker not in use.

    Raises:
        ValueError: naming the tracker, and the known ones or what to install.
    """
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

    available = {str(getattr(tracker, "value", tracker)) for tracker in get_available_trackers()}
    for name in log.trackers:
        if name not in LOGGER_TYPE_TO_CLASS:
            raise ValueError(
                f"log.trackers: unknown tracker {name!r}; known: {', '.join(sorted(LOGGER_TYPE_TO_CLASS))}"
            )
        if name not in available:
            raise ValueError(f"log.trackers: {name} is not installed here: `pip install {name}`, or take it out")
    if "tensorboard" in log.tracker_options:
        try:  # now, and not when the folder of an earlier run has been deleted
            signature(import_module("torch.utils.tensorboard").SummaryWriter).bind_partial(
                **log.tracker_options["tensorboard"]
            )
        except TypeError as error:
            raise ValueError(f"log.tracker_options.tensorboard: {error}") from error
    for name in log.tracker_options:
        if name not in log.trackers:
            raise ValueError(
                f"log.tracker_options: {name!r} is not in log.trackers, which has {', '.join(log.trackers) or 'none'}"
            )


def run_name(recipe: Recipe) -> str:
    """The run's name in the trackers."""
    return recipe.log.run_name or recipe.name


def tracker_folder(recipe: Recipe) -> Path:
    """Where trackers write their files: the run's folder, or a folder of the run's name in `log.folder`."""
    return run_path(recipe) if recipe.log.folder is None else Path(recipe.log.folder) / run_name(recipe)


def start_trackers(accelerator: Accelerator, recipe: Recipe, *, step: int) -> None:
    """Start the trackers of a run that has done `step` steps, and tell them the recipe.

    Raises:
        ValueError: a tracker does not know one of its `log.tracker_options`, or cannot start.
    """
    folder = tracker_folder(recipe)
    folder.mkdir(parents=True, exist_ok=True)
    options: dict[str, dict[str, Any]] = {
        "wandb": {"name": run_name(recipe), "dir": str(folder)},
        "tensorboard": {"purge_step": step + 1},  # hides what a killed run logged after its checkpoint
    }
    for name, given in recipe.log.tracker_options.items():
        options[name] = options.get(name, {}) | given
    with Caught() as caught:  # each library has exceptions of its own: not logged in, no network
        accelerator.init_trackers(recipe.log.project, init_kwargs=options)
    if caught.error is not None:
        option = "tracker_options" if isinstance(caught.error, TypeError) else "trackers"
        raise ValueError(f"log.{option}: {describe_error(caught.error)}") from caught.error
    config = {
        key: value if value is None or isinstance(value, bool | int | float | str) else json.dumps(value)
        for key, value in flatten(recipe.model_dump())
    }
    for tracker in accelerator.trackers:
        if tracker.name == "tensorboard":
            summaries = import_module("torch.utils.tensorboard.summary")
            # Not `add_hparams`, which would make a further run, without metrics, at each start.
            for summary in summaries.hparams(config, dict.fromkeys(COMPARED_METRICS, 0.0))[:2]:
                tracker.writer.file_writer.add_summary(summary)
            tracker.log({"recipe": indent(dump_recipe(recipe), "    ", lambda line: True)}, step=0)
        else:
            tracker.store_init_configuration(config)


def log_samples(
    accelerator: Accelerator,
    recipe: Recipe,
    step: int,
    groups: Sequence[RolloutGroup],
    advantages: Mapping[tuple[int, int], float],
) -> None:
    """Show the first sample of some prompts, as a table or text, in trackers that can, if `log.samples_every` asks."""
    every = recipe.log.samples_every
    if every is None or not (step == 1 or step % every == 0) or not groups:
        return
    chosen = [replace(group, rollouts=group.rollouts[:1]) for group in groups[:NUM_SAMPLES]]
    rows = rollout_rows(step, chosen, advantages)
    for row, group in zip(rows, chosen, strict=True):
        if (talk := group.rollouts[0].conversation) is not None:
            row["text"] = mark_segments([kind for kind, _ in talk.segments], talk.texts)
    columns = [*SAMPLE_COLUMNS, *(name for name in rows[0] if name.startswith("reward_"))]
    for tracker in accelerator.trackers:
        if hasattr(tracker, "log_table"):
            data = [[row.get(name) for name in columns] for row in rows]
            tracker.log_table("samples", columns=columns, data=data, step=step)
        elif tracker.name == "tensorboard":
            tracker.log({"samples": "\n\n".join(_as_markdown(row, columns) for row in rows)}, step=step)


def _as_markdown(row: Mapping[str, object], columns: Sequence[str]) -> str:
    """Figures on one line, then the texts as blocks of code: nothing in them is markup."""
    figures = ((name, row.get(name)) for name in columns if name not in SAMPLE_TEXTS)
    shown = (f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in figures)
    parts = [", ".join(shown)]
    parts += [f"{name}:\n\n{indent(str(row[name]), '    ', lambda line: True)}" for name in SAMPLE_TEXTS]
    return "\n\n".join(parts)
