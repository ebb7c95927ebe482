"""Records that trackers get beside the metrics: the recipe at the start, and at times a table of samples."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from textwrap import indent
from typing import TYPE_CHECKING, Any

from srtrl.environments.base import mark_segments
from srtrl.recipe.file import dump_recipe
from srtrl.recipe.schema import LogSection, Recipe
from srtrl.run.folder import flatten, rollout_rows
from srtrl.types import RolloutGroup

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker

SAMPLES_EVERY = 10
"""Steps between two tables of samples; there is one after step 1, too."""
NUM_SAMPLES = 8
"""Samples in a table: the first of as many prompts."""
SAMPLE_COLUMNS = ("step", "prompt_id", "prompt", "text", "answer", "reward", "advantage", "outcome", "finish_reason")
"""Columns of these samples, beside the parts of the reward."""


def check_trackers(log: LogSection) -> None:
    """Refuse trackers that accelerate would leave out without a word; `ValueError` names them."""
    if not log.trackers:
        return
    from accelerate.tracking import get_available_trackers

    packages = {"tensorboard": "'srtrl[tensorboard]'"}
    available = {str(getattr(tracker, "value", tracker)) for tracker in get_available_trackers()}
    if missing := sorted(set(log.trackers) - available):
        raise ValueError(
            f"log.trackers: {', '.join(missing)} is not installed, or accelerate has no such tracker; available here: "
            f"{', '.join(sorted(available)) or 'none'}; to install it: "
            f"pip install {' '.join(packages.get(name, name) for name in missing)}"
        )


def start_trackers(recipe: Recipe, *, step: int) -> list[GeneralTracker]:
    """The trackers of a run that has done `step` steps, started; they have the recipe. On the main rank.

    Raises:
        Exception: that of a tracker that cannot start (not logged in, no network): each library has its own.
    """
    if not recipe.log.trackers:
        return []
    from accelerate.state import PartialState
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    PartialState()  # which accelerate's trackers ask where they are
    options: dict[str, dict[str, Any]] = {
        "wandb": {
            "name": os.environ.get("WANDB_NAME", recipe.name),
            "dir": os.environ.get("WANDB_DIR", str(recipe.folder)),
        },
        "tensorboard": {"purge_step": step + 1},  # hides the rows that a killed run logged after its checkpoint
    }
    trackers = []
    for name in recipe.log.trackers:
        tracker_class = LOGGER_TYPE_TO_CLASS[name]
        folder = [str(recipe.folder / "tensorboard")] if tracker_class.requires_logging_directory else []
        trackers.append(tracker_class(recipe.log.project, *folder, **options.get(name, {})))
        trackers[-1].start()
    config = {
        key: value if value is None or isinstance(value, bool | int | float | str) else json.dumps(value)
        for key, value in flatten(recipe.model_dump())
    }
    for tracker in trackers:
        if tracker.name == "tensorboard":  # its `store_init_configuration` would begin a further run, without metrics
            tracker.log({"recipe": indent(dump_recipe(recipe), "    ", lambda line: True)}, step=0)
        else:
            tracker.store_init_configuration(config)
    return trackers


def log_samples(
    trackers: Sequence[GeneralTracker],
    step: int,
    groups: Sequence[RolloutGroup],
    advantages: Mapping[tuple[int, int], float],
) -> None:
    """Give the first sample of some prompts to trackers that show tables, after step 1 and every `SAMPLES_EVERY`."""
    trackers = [tracker for tracker in trackers if hasattr(tracker, "log_table")]
    if not trackers or not groups or not (step == 1 or step % SAMPLES_EVERY == 0):
        return
    shown = [replace(group, rollouts=group.rollouts[:1]) for group in groups[:NUM_SAMPLES]]
    rows = rollout_rows(step, shown, advantages)
    for row, group in zip(rows, shown, strict=True):
        if (conversation := group.rollouts[0].conversation) is not None:
            row["text"] = mark_segments([kind for kind, _ in conversation.segments], conversation.texts)
    columns = [*SAMPLE_COLUMNS, *(name for name in rows[0] if name.startswith("reward_"))]
    data = [[row.get(name) for name in columns] for row in rows]
    for tracker in trackers:
        tracker.log_table("samples", columns=columns, data=data, step=step)
