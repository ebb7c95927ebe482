"""srtrl from Python: `from srtrl import load_recipe, train, generate`; the same checks as on the command line."""

import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from functools import wraps
from operator import methodcaller
from pathlib import Path
from traceback import extract_tb
from types import ModuleType
from typing import Any, ParamSpec, TypeVar, Unpack

from srtrl.build import run_training
from srtrl.checks import build_checked
from srtrl.files import write_atomic
from srtrl.generation import Generated
from srtrl.generation import generate as complete_prompts
from srtrl.live_run import with_live_run
from srtrl.recipe.file import Overrides, Problem, RecipeError, RecipeSource, read_source
from srtrl.recipe.schema import Recipe
from srtrl.resolve import FROM_PYTHON, Caught, is_message, is_ours
from srtrl.run.place import StartFlags, TrainingResult
from srtrl.tasks.base import NAME_SOME
from srtrl.trainer.trainer import TrainingStoppedError

__all__ = ["Generated", "TrainingResult", "generate", "load_recipe", "train"]

RecipeLike = Recipe | Mapping[str, Any] | str | Path
Rows = Iterable[Mapping[str, Any]]
P = ParamSpec("P")
T = TypeVar("T")


def with_messages(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function: messages to the user name its arguments, and have no frames of srtrl but this.

    Frames stay where some are the user's own, and with SRTRL_TRACEBACK=1.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except (ValueError, TrainingStoppedError) as error:
            if not is_message(error):
                raise
            error.args = (in_python(str(error)),)
            if all(is_ours(frame) for frame in extract_tb(error.__traceback__)):
                raise error.with_traceback(None) from error.__cause__
            raise

    return call


generate = with_messages(complete_prompts)


@with_messages
def load_recipe(
    recipe: RecipeLike,
    overrides: Overrides = (),
    *,
    rewards: Any = None,
    rows: Rows | None = None,
    eval_rows: Rows | None = None,
    downloads: bool = False,
) -> Recipe:
    """Read a recipe and check every name, option and local path in it; no weights are loaded.

    Where a recipe names a function or a class, a dictionary may have the function or the class itself.

    Args:
        recipe: A YAML file, the name of a recipe that comes with srtrl ("quickstart"), a dictionary with the same
            sections, or a `Recipe`.
        overrides: `{"train.num_steps": 20, "rollout.slots": 32}`, or as on the command line `["train.num_steps=20"]`.
        rewards: Of a recipe without a section `rewards`, one or a list: functions, names, or dictionaries such as
            `{"name": FUNCTION, "weight": 0.2, "options": {...}}`. Beside rewards of the recipe they are refused: an
            override `{"rewards": [...]}` replaces those, and takes the same.
        rows: Rows to train on, in place of files: a list, a `datasets.Dataset` or another iterable of dictionaries.
            They are written to `rows_<hash>.jsonl` in the run's folder, so that the run can be resumed and evaluated
            from a shell, too. Without a section `task` the task is `prompts`. Beside rows of the recipe
            (`task.options.train`) they are refused.
        eval_rows: Held-out rows (`task.options.eval`).
        downloads: Download the models that the recipe names on the hub, and check them, too.

    Raises:
        ValueError: naming file, line and option, what was expected and what to do.
    """
    if isinstance(recipe, str | Path):
        source = read_source(Path(recipe))
    elif isinstance(recipe, Recipe | Mapping):
        data = recipe.model_dump(exclude_unset=True) if isinstance(recipe, Recipe) else deepcopy(dict(recipe))
        source = RecipeSource(Path("the recipe"), data)
    else:
        raise ValueError(f"expected a recipe: a YAML file, a dictionary or a Recipe, found {type(recipe).__name__}")
    if isinstance(overrides, Mapping):
        overrides = {key: _terms(value) if key == "rewards" else value for key, value in overrides.items()}
    source.override(overrides)
    if rewards is not None:
        _refuse_second(source, "rewards", "rewards")
        source.put(["rewards"], _terms(rewards), "argument `rewards`")
    for split, name, given in (("train", "rows", rows), ("eval", "eval_rows", eval_rows)):
        if given is not None:
            _refuse_second(source, name, f"task.options.{split}")
            folder = Path(source.data.get("output_dir", "runs"), str(source.data.get("name", "")))
            file = _write_rows(name, given, folder)
            source.put(["task", "options", split], {"files": [str(file)]}, f"argument `{name}`")
            source.data["task"].setdefault("name", "prompts")
    functions: dict[str, Any] = {}
    module = f"{FROM_PYTHON}.{source.data.get('name')}"
    source.data = _plain(source.data, module, functions)
    vars(sys.modules.setdefault(module, ModuleType(module))).update(functions)
    return build_checked(source, downloads=downloads)


@with_messages
def train(
    recipe: RecipeLike,
    overrides: Overrides = (),
    *,
    rewards: Any = None,
    rows: Rows | None = None,
    eval_rows: Rows | None = None,
    on_step: Callable[..., Any] = lambda *_: None,
    **flags: Unpack[StartFlags],
) -> TrainingResult:
    """Train as a recipe says, into the folder `<output_dir>/<name>`.

    The first arguments are those of `load_recipe`; the flags `resume`, `overwrite` and `from_step`, and the errors are
    those of `run_training`, whose messages name the arguments. `on_step` is a function of (step, metrics, run), called
    on all ranks after each training step and its checkpoint, and after a resume once more for the step of the
    checkpoint: the metrics are those of docs/metrics.md, `run` is a `LiveRun`, and a dictionary of numbers that it
    returns is logged, with names below `user/`.
    """
    loaded = load_recipe(recipe, overrides, rewards=rewards, rows=rows, eval_rows=eval_rows, downloads=True)
    return run_training(loaded, on_step=with_live_run(on_step), **flags)


def _refuse_second(source: RecipeSource, argument: str, key: str) -> None:
    """Refuse an argument beside a value of the recipe (or of an override), which it would replace without a word."""
    value: Any = source.data
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    if value is not None:
        problem = f'the recipe has its own: to replace them, also give the override {{"{key}": None}}'
        where = f"argument `{argument}` and {source.locate(key)}"
        raise RecipeError(Problem(key, f"{problem}; to add to them, put both into the argument", where))


def _terms(rewards: Any) -> Any:
    """Items of the section `rewards`: of one or a list of functions, names and dictionaries."""
    listed = rewards if isinstance(rewards, list | tuple) else [rewards]
    return None if rewards is None else [item if isinstance(item, Mapping) else {"name": item} for item in listed]


def in_python(message: str) -> str:
    """A message with arguments in place of the options of the command line; commands, in backticks, stay."""
    parts = message.replace(NAME_SOME, "give `eval_rows=`").split("`")
    for number in range(0, len(parts), 2):
        parts[number] = re.sub(r"--checkpoint (\d+)", r"from_step=\1", parts[number])
        parts[number] = re.sub(r"--(resume|overwrite)", r"\1=True", parts[number].replace("--checkpoint", "from_step"))
    return "`".join(parts)


def _plain(value: Any, module: str, functions: dict[str, Any]) -> Any:
    """A value as YAML would have it: functions and classes by name; into `functions` those that no file has by a name.

    These are named as those of a `module` of the run, so that recipes of several runs do not take each other's.
    """
    if isinstance(value, Mapping):
        return {key: _plain(item, module, functions) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, module, functions) for item in value]
    if not callable(value):
        return str(value) if isinstance(value, Path) else value
    home, name = getattr(value, "__module__", None), getattr(value, "__qualname__", type(value).__name__)
    if home != "__main__" and getattr(sys.modules.get(str(home)), name, None) is value:
        return f"{home}:{name}"
    name = name.rpartition(".")[2]
    if not name.isidentifier():
        code = getattr(value, "__code__", None)
        place = f" ({Path(code.co_filename).name}:{code.co_firstlineno})" if code else ""
        raise ValueError(f"{value!r:.80}{place} has no name: write it with `def`")
    if functions.setdefault(name, value) is not value:
        raise ValueError(f"two functions of the recipe are named `{name}`: rename one")
    return f"{module}:{name}"


def _write_rows(name: str, rows: Rows, folder: Path) -> Path:
    """Write rows as JSONL into a file that is named after its content; returns its path."""
    lines = []
    for index, row in enumerate(rows if isinstance(rows, Iterable) else [rows]):
        if not isinstance(row, Mapping):
            raise ValueError(
                f"{name}: expected a list, a `datasets.Dataset` or another iterable of dictionaries; item {index} is "
                f'{row!r:.80} (of a DatasetDict take a split, data["train"]; of a DataFrame .to_dict("records"))'
            )
        with Caught() as caught:
            lines.append(json.dumps(dict(row), default=methodcaller("tolist")) + "\n")  # of NumPy and torch
        if (error := caught.error) is not None:
            raise ValueError(f"{name}: item {index} is no JSON: {error}; leave such fields out") from error
    if not lines:
        raise ValueError(f"{name}: there are none (an iterator gives its rows only once)")
    text = "".join(lines)
    path = folder / f"rows_{hashlib.sha256(text.encode()).hexdigest()[:16]}.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(path, text)
    return path
