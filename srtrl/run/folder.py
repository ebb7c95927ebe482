"""The folder of a run: who may write into it, what a resume finds there, and its files."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import chain, count
from pathlib import Path
from typing import Unpack

import numpy as np

from srtrl.files import is_temporary, shown_path, sync_folder, write_atomic
from srtrl.metrics import MetricLog, read_metrics
from srtrl.recipe.file import RecipeSource, build_recipe, dump_recipe, read_source
from srtrl.recipe.schema import Recipe
from srtrl.resolve import cut, first_lines
from srtrl.run.checkpoint import delete, num_log_bytes
from srtrl.run.columns import ROLLOUT_COLUMNS, TOKEN_COLUMNS, TURN_COLUMNS, VERSION_COLUMNS, column_type
from srtrl.run.place import StartFlags, check_place, is_empty, is_rows
from srtrl.run.steps import latest_checkpoint, list_checkpoints, numbered, step_of
from srtrl.types import RolloutGroup

LOCKED_KEYS: tuple[str, ...] = (
    *("seed", "model.path", "model.tokenizer", "model.dtype", "model.lora"),
    *("model.lora.rank", "model.lora.alpha", "model.lora.targets*"),
    *("critic", "task", "task.*", "data.order", "rewards", "rollout.environment*", "rollout.mode"),
)
"""Options, as patterns, that cannot change within a run: its start, its data, and their order."""

ROLLOUT_SUFFIX = r"\.parquet"
OBSERVATIONS = "observations"
"""Folder of what environments said in the steps since the oldest checkpoint: a step that is repeated reads it."""
OBSERVATIONS_SUFFIX = r"(\.rank\d+)?\.jsonl"
CHECKSUM = "# SHA-256 of the lines below: "
"""First line of `recipe.yaml`."""


@dataclass(kw_only=True, slots=True)
class RunFolder:
    """An open run folder, locked for this process."""

    path: Path
    checkpoint: Path | None
    """The checkpoint to resume from; None starts from the recipe's model."""
    log: MetricLog
    moved_to: Path | None = None
    """The folder that was here, where `overwrite` has renamed one."""
    has_begun: bool = False

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / "checkpoints"

    def drop_observations(self) -> None:
        """Delete the observations of steps that no checkpoint would repeat."""
        oldest = step_of(list_checkpoints(self.checkpoints)[0])
        for path in numbered(self.path / OBSERVATIONS, OBSERVATIONS_SUFFIX):
            if step_of(path) <= oldest:
                path.unlink()

    def begin(self, recipe: Recipe) -> None:
        """Take the folder back to its checkpoint and write the recipe; call this when nothing can refuse any more.

        Rows, rollouts and checkpoints of later steps are deleted: the steps will be repeated. So are the temporary
        files of a killed run. Files with names that srtrl does not give stay.
        """
        rollouts = self.path / "rollouts"
        for folder in (self.checkpoints, rollouts):
            folder.mkdir(exist_ok=True)
        step, num_bytes = (step_of(self.checkpoint), num_log_bytes(self.checkpoint)) if self.checkpoint else (-1, 0)
        self.log.truncate(num_bytes)
        write_atomic(self.path / "recipe.yaml", _with_checksum(dump_recipe(recipe)))
        self.has_begun = True
        files = chain.from_iterable(map(Path.iterdir, (self.path, self.checkpoints, rollouts)))
        unfinished = [path for path in files if is_temporary(path)]
        repeated = [*list_checkpoints(self.checkpoints), *numbered(rollouts, ROLLOUT_SUFFIX)]
        for path in (*unfinished, *(path for path in repeated if step_of(path) > step)):
            delete(path)
        sync_folder(self.path)


def check_run_folder(recipe: Recipe, **flags: Unpack[StartFlags]) -> list[str]:
    """Refuse what `open_run_folder` would refuse; changes nothing, so that it can run before anything else.

    Returns:
        With `resume`, a line for each option that differs from the run's recipe.

    Raises:
        ValueError: as `check_place`; `resume` of a folder that is no run, whose recipe has changed, that has lost its
            checkpoints, or with another value of one of `LOCKED_KEYS`.
    """
    check_place(recipe, **flags)
    folder = recipe.folder
    return [] if is_empty(folder) or flags.get("overwrite") else _check_resume(folder, recipe)


@contextmanager
def open_run_folder(recipe: Recipe, **flags: Unpack[StartFlags]) -> Iterator[RunFolder]:
    """Make the run's folder, or open an existing one to resume; locked inside the `with` block.

    Until `RunFolder.begin` is called, no file of a run to resume is changed, and an error ends with everything as it
    was: a new folder is removed, and one that `overwrite` has renamed gets its name back.

    Raises:
        ValueError: as `check_run_folder`, or another process holds the folder.
    """
    check_run_folder(recipe, **flags)
    folder, moved_to = recipe.folder, None
    if flags.get("overwrite") and not is_empty(folder):
        with _locked(folder):
            moved_to = move_aside(folder)
        folder.mkdir(exist_ok=True)
        for rows in filter(is_rows, [*moved_to.iterdir()]):  # named by the recipes of both
            shutil.copyfile(rows, folder / rows.name)
    from_step = flags.get("from_step")
    with _locked(folder), ExitStack() as stack:
        if is_new := is_empty(folder):
            write_atomic(folder / "recipe.yaml", _with_checksum(dump_recipe(recipe)))
        checkpoints = [
            path for path in list_checkpoints(folder / "checkpoints") if from_step is None or step_of(path) <= from_step
        ]
        log = stack.enter_context(MetricLog(folder / "metrics.jsonl"))
        run = RunFolder(path=folder, checkpoint=checkpoints[-1] if checkpoints else None, log=log, moved_to=moved_to)
        try:
            yield run
        finally:
            if is_new and not run.has_begun:
                shutil.rmtree(folder)
                if moved_to is not None:
                    moved_to.rename(folder)


def move_aside(folder: Path) -> Path:
    """Rename a folder, whole, to the first free one of `NAME.1`, `NAME.2` and so on beside it; returns that."""
    names = (folder.with_name(f"{folder.name}.{number}") for number in count(1))
    return folder.rename(next(name for name in names if not os.path.lexists(name)))


def _check_resume(folder: Path, recipe: Recipe) -> list[str]:
    """The part of `check_run_folder` about the run that is to be resumed."""
    folder = shown_path(folder)
    if not (file := folder / "recipe.yaml").is_file():
        raise ValueError(f"--resume: {folder} holds no recipe.yaml, so it is not a run; take another name")
    source, log = read_source(file), folder / "metrics.jsonl"
    heading, _, text = file.read_text(encoding="utf-8").partition("\n")
    if heading.startswith(CHECKSUM) and f"{heading}\n{text}" != _with_checksum(text):  # earlier versions have none
        raise ValueError(
            f"--resume: {file} is not as it was written: restore it, and change options by "
            f"`srtrl train {folder} --resume SECTION.KEY=VALUE`"
        )
    old = build_recipe(source)
    if log.is_file() and latest_checkpoint(folder / "checkpoints") is None:
        num_steps = max([0, *(row["step"] for row in read_metrics(log))])
        if num_steps > old.train.checkpoint_every:  # no run gets so far without one
            raise ValueError(
                f"--resume: {folder / 'checkpoints'} holds no checkpoint of this run of {num_steps} steps: restore one "
                "from a copy, or begin again with --overwrite"
            )
    return _compare_recipes(old, recipe, source)


def _with_checksum(recipe: str) -> str:
    """The text of a recipe below a comment with its SHA-256, by which a resume sees that the file has changed."""
    return f"{CHECKSUM}{hashlib.sha256(recipe.encode()).hexdigest()}\n{recipe}"


def _compare_recipes(old: Recipe, new: Recipe, source: RecipeSource) -> list[str]:
    """A line for each option that differs; ValueError where one is locked, with its place in the source of `old`."""
    refused: list[str] = []
    changes: list[str] = []
    before, now = ({key: repr(value) for key, value in flatten(recipe.model_dump())} for recipe in (old, new))
    for key in sorted(before.keys() | now.keys()):
        if (old_value := before.get(key, "nothing")) != (value := now.get(key, "nothing")):
            line = f"{key}: the run has {cut(old_value)}, now {cut(value)}"
            if any(fnmatchcase(key, pattern) for pattern in LOCKED_KEYS):
                refused.append(f"{source.locate(key)}: {line}")
            else:
                changes.append(line)
    if refused:
        heading = "--resume: these options cannot change within a run; undo the change, or start a run with name=OTHER:"
        raise ValueError("\n  ".join([heading, *first_lines(refused)]))
    return changes


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Make the folder if needed, and hold it; the system releases the lock of a process that ends."""
    file = folder / ".lock"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        raise ValueError(
            f"{file} cannot be made or opened ({error.strerror}): change `name` or `output_dir`"
        ) from error
    with os.fdopen(descriptor, "rb") as lock:
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # a POSIX lock: forked graders do not inherit it
        except OSError as error:
            raise ValueError(f"{folder} is in use by another srtrl process") from error
        yield


def flatten(value: object, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Dotted keys and leaf values; a list is a leaf."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from flatten(item, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, value


# --- Files of a step --------------------------------------------------------------------------------------------------


def step_file_name(step: int) -> str:
    """File name of the rollouts of `step`."""
    return f"step_{step:06d}.parquet"


def write_rollouts(path: Path, groups: Sequence[RolloutGroup], advantages: Mapping[tuple[int, int], float]) -> None:
    """Write all samples of a step, as they were learned from; the file is whole or not there.

    Args:
        path: The file, named by `step_file_name`.
        groups: All groups of the step, those that a filter dropped too.
        advantages: Advantage of (draw, sample); a sample without one was dropped by a filter and gets a null.
    """
    import pyarrow
    import pyarrow.parquet

    rows = rollout_rows(step_of(path), groups, advantages)
    rewards = [name for name in chain.from_iterable(rows) if name.startswith("reward_")]
    turns = TURN_COLUMNS if any("segment_kinds" in row for row in rows) else {}
    further = [name for name in (*TOKEN_COLUMNS, *VERSION_COLUMNS) if any(name in row for row in rows)]
    names = dict.fromkeys((*ROLLOUT_COLUMNS, *turns, *further, *rewards))
    schema = pyarrow.schema([(name, column_type(name)) for name in names])
    sink = pyarrow.BufferOutputStream()
    table = pyarrow.Table.from_pylist(rows, schema=schema)
    pyarrow.parquet.write_table(table, sink, compression="zstd", write_page_checksum=True)
    write_atomic(path, sink.getvalue().to_pybytes())


def rollout_rows(
    step: int, groups: Sequence[RolloutGroup], advantages: Mapping[tuple[int, int], float]
) -> list[dict[str, object]]:
    """One row a sample, with the columns that `write_rollouts` describes."""
    rows: list[dict[str, object]] = []
    for rollout in chain.from_iterable(group.rollouts for group in groups):
        response = rollout.response
        given: dict[str, object] = {
            **{name: getattr(response, name) for name in ("token_ids", "rollout_logprobs", "finish_reason")},
            "step": step,
            "prompt_id": rollout.prompt.prompt_id,
            "prompt": rollout.prompt.text,
            "prompt_token_ids": rollout.prompt.token_ids,
            "answer": rollout.prompt.answer,
            "advantage": advantages.get((rollout.draw_index, rollout.sample_index)),
            "reward": rollout.grade.reward,
            "outcome": rollout.grade.outcome,
            **{f"reward_{name}": value for name, value in rollout.grade.parts.items()},
        }
        if rollout.grade.token_rewards is not None:
            given["token_rewards"] = on_tokens = np.zeros(len(response.token_ids))
            on_tokens[response.sampled] = rollout.grade.token_rewards
        if (response.policy_versions != rollout.policy_version).any():
            given["policy_versions"] = response.policy_versions
        if (conversation := rollout.conversation) is not None:
            kinds, lengths = zip(*conversation.segments, strict=True)
            given |= {
                "segment_kinds": kinds,
                "segment_lengths": lengths,
                "segment_texts": conversation.texts,
                "num_turns": conversation.num_turns,
                "stop_reason": conversation.stop_reason,
            }
        rows.append({name: getattr(rollout, name) for name in ROLLOUT_COLUMNS if name not in given} | given)
    return rows
