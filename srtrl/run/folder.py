"""The folder of a run: who may write into it, what a resume finds there, its files, and what a run says of itself."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import Path
from typing import Self, TypedDict, Unpack

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from srtrl.engine.warm_up import COMPILE_MESSAGE
from srtrl.metrics import MetricLog, read_metrics, sync_folder, write_atomic
from srtrl.recipe.file import dump_recipe, load_recipe
from srtrl.recipe.schema import Recipe
from srtrl.run.checkpoint import delete_folder, drop_checkpoints, latest_checkpoint, list_checkpoints, num_log_bytes
from srtrl.trainer.build import choose_device, is_deterministic
from srtrl.types import RolloutGroup

FREE_KEYS = (
    "name",
    "output_dir",
    "log.*",
    "grading.num_workers",
    "train.checkpoint_every",
    "train.keep_checkpoints",
    "train.peak_tflops",
    "train.sharding",
)
"""Options, as patterns, that a resumed run may change: they do not touch what is learned."""

FREE_KEYS_IF_DETERMINISTIC = (
    "rollout.slots",
    "rollout.num_pages",
    "rollout.kv_*",
    "rollout.cuda_graphs",
    "rollout.prefill_chunk_tokens",
    "rollout.draft*",
    "rollout.run_ahead*",
)
"""Options that change nothing learned in the decoder's deterministic mode (`rollout.deterministic`)."""

FREE_KEYS_ON_CUDA = (
    "model.gradient_checkpointing",
    "train.micro_batch_tokens",
    "rollout.kv_memory_gib",
    "rollout.kv_memory_share",
    "rollout.kv_across_update",
)
"""What a run that ran out of memory may change. It changes what is learned by rounding alone, and the backward pass of
attention on CUDA adds up in no fixed order anyway."""

CHANGEABLE_KEYS = (
    *("train.learning_rate", "train.warmup_steps", "train.schedule", "train.num_steps", "train.max_grad_norm"),
    *("train.max_logprob_difference", "train.max_logprob_kl", "critic.learning_rate"),
    *("algorithm.entropy_coefficient", "algorithm.kl.coefficient"),
)
"""What `--change` may change in a resumed run: it learns in another way from there on."""

MARK = b"srtrl made this folder: --overwrite may delete its files of a run\n"
"""Content of `.lock` in a folder that a run made; earlier versions left it empty. A warm start adds what it wrote."""

FOLDERS = ("checkpoints", "rollouts")
OBSERVATIONS = "observations"
"""Folder of what environments said in the steps since the oldest checkpoint: a step that is repeated reads it."""
OUTPUTS = (*FOLDERS, OBSERVATIONS, "tensorboard", "wandb", "metrics.jsonl", "summary.json", "report.html")
"""What `--overwrite` deletes: what a run, or its report, writes anew."""
REPLACED = ".overwritten"
"""Folder of these in a run that `--overwrite` begins again, until that has begun."""


class StartFlags(TypedDict, total=False):
    """How a run begins; without any, in a new folder."""

    resume: bool
    """Continue from the last checkpoint of the run's folder; a run that is not there is begun."""
    overwrite: bool
    """Delete the files of the run in its folder, and begin again."""
    changed: Collection[str]
    """With `resume`, keys (of `CHANGEABLE_KEYS`) whose values may differ from those of the run."""
    from_step: int | None
    """With `resume`, continue from the checkpoint of this step, and delete later ones."""


@dataclass(kw_only=True, slots=True, frozen=True)
class RunFolder:
    """An open run folder, locked for this process."""

    path: Path
    checkpoint: Path | None
    """What to resume from; None starts from the recipe's model."""
    log: MetricLog

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / "checkpoints"

    def has_begun(self) -> None:
        """Nothing that can fail early is left: delete what `--overwrite` replaces."""
        if (self.path / REPLACED).is_dir():
            delete_folder(self.path / REPLACED)


def run_path(recipe: Recipe) -> Path:
    """Where the run of this recipe lives."""
    return Path(recipe.output_dir) / recipe.name


def check_run_folder(recipe: Recipe, **flags: Unpack[StartFlags]) -> list[str]:
    """Refuse what `open_run_folder` would refuse; changes nothing, so that it can run before anything else.

    Returns:
        For each key of `changed` that has another value than in the run, a line that says so.

    Raises:
        ValueError: flags that exclude each other; a folder that exists without any; `overwrite` of a folder that no run
            made, or of a link; `resume` with a recipe that would learn something else.
    """
    folder, changed = run_path(recipe), flags.get("changed", ())
    resume, overwrite = flags.get("resume", False), flags.get("overwrite", False)
    if resume and overwrite:
        raise ValueError("--resume and --overwrite exclude each other: continue the run, or begin it again")
    if not resume and (changed or flags.get("from_step") is not None):
        raise ValueError("--change and --checkpoint need --resume; a new run takes its values as SECTION.KEY=VALUE")
    if unsafe := sorted(set(changed).difference(CHANGEABLE_KEYS)):
        raise ValueError(f"--change: {unsafe[0]} cannot change within a run; these can: {', '.join(CHANGEABLE_KEYS)}")
    if not folder.exists():
        return []
    if not folder.is_dir():
        raise ValueError(f"{folder} is a file; the run's folder would be there: change `name` or `output_dir`")
    if not (resume or overwrite) and any(folder.iterdir()):
        raise ValueError(
            f"{folder} exists: --resume continues that run, --overwrite deletes it and begins again, "
            "name=OTHER starts a run of its own"
        )
    if all(path.name.startswith(".") for path in folder.iterdir()):  # a run killed at its start left a lock
        return []
    if resume:
        return _check_resume(folder, recipe, changed)
    lock = folder / ".lock"
    if folder.is_symlink() or not lock.is_file() or lock.read_bytes() != MARK:
        reason = "is a link" if folder.is_symlink() else "has no mark of srtrl (as in runs of earlier versions)"
        raise ValueError(f"--overwrite: {folder} {reason}; delete it yourself if you wish, or take another name")
    return []


@contextmanager
def open_run_folder(recipe: Recipe, **flags: Unpack[StartFlags]) -> Iterator[RunFolder]:
    """Make the run's folder, or take an existing one back to its last checkpoint; locked inside the `with` block.

    With `resume`, rows and rollouts later than the checkpoint are dropped (the steps will be done again, with the same
    numbers); without any checkpoint the run starts from step 0, and without a folder it is a new run. With `overwrite`,
    the files of the old run come back unless `RunFolder.has_begun` is called.

    Raises:
        ValueError: as `check_run_folder`, or another process holds the folder.
    """
    check_run_folder(recipe, **flags)
    folder = run_path(recipe)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("ab") as lock, ExitStack() as stack:  # the system releases it at the end
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # a POSIX lock: forked graders do not inherit it
        except OSError as error:
            raise ValueError(f"{folder} is in use by another srtrl process") from error
        if flags.get("overwrite"):
            stack.callback(_put_back, folder)
            _set_aside(folder)
        if not (folder / "recipe.yaml").exists():  # a new run; a resumed one of an earlier version stays unmarked
            lock.truncate(0)
            lock.write(MARK)
            lock.flush()
        write_atomic(folder / "recipe.yaml", dump_recipe(recipe))
        for name in FOLDERS:
            (folder / name).mkdir(exist_ok=True)
        from_step = flags.get("from_step")
        found = [
            one for one in list_checkpoints(folder / "checkpoints") if from_step is None or step_of(one) <= from_step
        ]
        checkpoint = found[-1] if found else None
        step = -1 if checkpoint is None else step_of(checkpoint)
        with MetricLog(folder / "metrics.jsonl") as log:
            log.truncate(step, None if checkpoint is None else num_log_bytes(checkpoint))  # raises before any deletion
            drop_checkpoints(folder / "checkpoints", after=from_step)
            _drop_later_files(folder, step)
            run = RunFolder(path=folder, checkpoint=checkpoint, log=log)
            yield run
        run.has_begun()


def step_of(path: Path) -> int:
    """The step in the name of a checkpoint or a rollout file, `step_000010...`; ValueError where there is none."""
    digits = path.name.removeprefix("step_").split(".")[0]
    if not digits.isdecimal():
        raise ValueError(f"{path}: no step in this name, such as step_000010: move the file away")
    return int(digits)


def _set_aside(folder: Path) -> None:
    """Move what a run writes into the folder `REPLACED`; of a link the link alone. Files of the user's own stay."""
    shutil.rmtree(folder / REPLACED, ignore_errors=True)  # of a start that was killed
    (folder / REPLACED).mkdir()
    for path in (folder / name for name in (*OUTPUTS, "recipe.yaml")):
        if path.exists() or path.is_symlink():
            path.rename(folder / REPLACED / path.name)


def _put_back(folder: Path) -> None:
    """Where a start has failed: the files of `_set_aside` in place of what it wrote."""
    if not (folder / REPLACED).is_dir():
        return
    for path in (folder / name for name in OUTPUTS):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    for path in (folder / REPLACED).iterdir():
        path.replace(folder / path.name)
    (folder / REPLACED).rmdir()


def _drop_later_files(folder: Path, step: int) -> None:
    """Delete what the steps after `step` wrote, and the end-of-run files."""
    for file in chain.from_iterable((folder / name).glob("step_*.parquet") for name in FOLDERS):
        if step_of(file) > step:
            file.unlink()
    for name in ("summary.json", "report.html"):
        (folder / name).unlink(missing_ok=True)
    sync_folder(folder)


def _check_resume(folder: Path, recipe: Recipe, changed: Collection[str]) -> list[str]:
    """See `check_run_folder`."""
    if not ((folder / ".lock").is_file() and (folder / "recipe.yaml").is_file()):
        raise ValueError(f"--resume: {folder} holds no recipe.yaml or no .lock, so it is not a run; take another name")
    if files := [folder / name for name in FOLDERS if (folder / name).is_file()]:
        raise ValueError(f"--resume: {files[0]} is a file; expected a folder of the run: move it away")
    old, log = load_recipe(folder / "recipe.yaml"), folder / "metrics.jsonl"
    if log.is_file() and latest_checkpoint(folder / "checkpoints") is None:
        num_steps = max([0, *(row["step"] for row in read_metrics(log))])
        if num_steps > old.train.checkpoint_every:  # no run comes so far without one
            raise ValueError(
                f"--resume: {folder / 'checkpoints'} holds no checkpoint of this run of {num_steps} steps: restore one "
                "from a copy, or begin again with --overwrite"
            )
    return _check_same_run(old, recipe, folder, changed)


def _check_same_run(old: Recipe, new: Recipe, folder: Path, changeable: Collection[str]) -> list[str]:
    """Refuse to continue with a recipe that would not have learned what the run has learned so far.

    Returns:
        A line for each key of `changeable` that differs.
    """
    device = choose_device(old)
    free = FREE_KEYS + (FREE_KEYS_IF_DETERMINISTIC if is_deterministic(old, device) else ())
    free += FREE_KEYS_ON_CUDA if device.type == "cuda" else ()
    old_values, new_values = dict(flatten(old.model_dump())), dict(flatten(new.model_dump()))
    changed: list[str] = []
    wanted: list[str] = []
    for key in sorted(old_values.keys() | new_values.keys()):
        before, after = old_values.get(key), new_values.get(key)
        if before == after or any(fnmatchcase(key, pattern) for pattern in free):
            continue
        if key == "train.num_steps" and new.train.schedule == "constant" and new.train.num_steps > old.train.num_steps:
            continue
        (wanted if key in changeable else changed).append(f"{key}: the run has {before!r}, now {after!r}")
    if changed:
        raise ValueError(
            f"--resume: the recipe differs from {folder / 'recipe.yaml'}; the run would not continue as it began:\n  "
            + "\n  ".join(changed)
            + f"\nUndo the change (`srtrl train {folder} --resume` does), use --change, or start a run with name=OTHER"
        )
    return wanted


def flatten(value: object, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Dotted keys and leaf values; a list is a leaf."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from flatten(item, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, value


# --- Files of a step --------------------------------------------------------------------------------------------------

ROLLOUT_COLUMNS = {
    "step": "int32",
    "prompt_id": "string",
    "draw_index": "int32",
    "sample_index": "int32",
    "prompt": "string",
    "prompt_token_ids": "list<int32>",
    "token_ids": "list<int32>",
    "text": "string",
    "answer": "string",
    "rollout_logprobs": "list<float>",
    "advantage": "float",
    "reward": "float",
    "outcome": "string",
    "finish_reason": "string",
    "policy_version": "int32",
}
"""Columns of `rollouts/step_000001.parquet`, one row a sample; beside them a `reward_<name>` (unweighted) for each
reward of the recipe. `text` is the response, `answer` the reference answer; runs from before the first hour have
neither `step` nor `answer`."""


TURN_COLUMNS = {
    "segment_kinds": "list<string>",
    "segment_lengths": "list<int32>",
    "segment_texts": "list<string>",
    "num_turns": "int32",
    "stop_reason": "string",
}
"""Further columns where samples have several turns: see `Conversation` in `srtrl/types.py`."""


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
    rows = rollout_rows(step_of(path), groups, advantages)
    rewards = [name for name in chain.from_iterable(rows) if name.startswith("reward_")]
    turns = TURN_COLUMNS if any("segment_kinds" in row for row in rows) else {}
    _write_table(path, rows, ROLLOUT_COLUMNS | turns | dict.fromkeys(rewards, "float"))


def rollout_rows(
    step: int, groups: Sequence[RolloutGroup], advantages: Mapping[tuple[int, int], float]
) -> list[dict[str, object]]:
    """One row a sample, with the columns that `write_rollouts` describes."""
    rows: list[dict[str, object]] = []
    for rollout in chain.from_iterable(group.rollouts for group in groups):
        given: dict[str, object] = {
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


def _write_table(path: Path, rows: Sequence[Mapping[str, object]], columns: Mapping[str, str]) -> None:
    """A Parquet file with these columns; Arrow's names of their types, `list<...>` for lists."""
    import pyarrow
    import pyarrow.parquet

    types = {
        "list<int32>": pyarrow.list_(pyarrow.int32()),
        "list<float>": pyarrow.list_(pyarrow.float32()),
        "list<string>": pyarrow.list_(pyarrow.string()),
    }
    schema = pyarrow.schema([(name, types.get(kind, kind)) for name, kind in columns.items()])
    sink = pyarrow.BufferOutputStream()
    table = pyarrow.Table.from_pylist(rows, schema=schema)
    pyarrow.parquet.write_table(table, sink, compression="zstd", write_page_checksum=True)
    write_atomic(path, sink.getvalue().to_pybytes())


# --- What a run says -----------------------------------------------------------------------------------------------


class RunProgress:
    """A line for each step; on a terminal also two bars: steps of the run, and how far the running stage is."""

    def __init__(self, title: str, num_steps: int, *, console: Console | None = None, plain_every: int = 1) -> None:
        """Show `num_steps` steps.

        Args:
            title: Name of the outer bar.
            num_steps: Steps of the whole run.
            console: Where to write; standard output by default.
            plain_every: Print a line every this many steps (and the last).
        """
        self.console = console if console is not None else Console()
        self._num_steps = num_steps
        self._plain_every = plain_every
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[count]}", justify="right"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[text]}"),
            TimeRemainingColumn(),
            console=self.console,
            speed_estimate_period=3600,  # seconds: a step may take many minutes
            disable=not self.console.is_terminal,
        )
        self._outer = self._bars.add_task(title, total=num_steps, count=f"0/{num_steps}", text="")
        self._inner = self._bars.add_task("", count="", text="", visible=False)
        self._stage = ""

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.update(self._inner, visible=False)
        self._bars.stop()

    def step(self, step: int, text: str) -> None:
        """Step `step` (1-based) is done; `text` says how it went."""
        self._bars.update(self._outer, completed=step, count=f"{step}/{self._num_steps}", text="left:")
        self._bars.update(self._inner, visible=False)
        if step % self._plain_every == 0 or step == self._num_steps:
            self.say(f"step {step}/{self._num_steps}  {text}")

    def stage(self, name: str, num_done: int = 0, num_total: int = 0) -> None:
        """Show how far the running stage is (a terminal only); without `num_total` only that it runs."""
        if num_done == num_total and name == "rollout":
            name, num_done, num_total = "grading", 0, 0  # of what is decoded; there is nothing to count
        count = f"{f'{num_done}/{num_total}' if num_total else '':>9}"  # of one width, so that the bars stay in place
        if name != self._stage:
            self._stage = name
            self._bars.remove_task(self._inner)
            self._inner = self._bars.add_task(f"  {name:<12}", total=num_total or None, count=count, text="")
        self._bars.update(self._inner, completed=num_done, total=num_total or None, count=count, visible=True)

    def compiling(self, num_done: int, num_total: int) -> None:
        """A CPU kernel is being compiled: say once what takes so long."""
        if num_done == 1:
            self.say(COMPILE_MESSAGE)
        self.stage("compile", num_done, num_total)

    def say(self, text: str) -> None:
        """Print one line, above the bars."""
        self.console.print(text, soft_wrap=True, highlight=False, markup=False)
