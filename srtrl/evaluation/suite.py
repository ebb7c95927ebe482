"""Suites: benchmarks that are evaluated in one go, each with its data, its fields, its options, and its recipe.

A suite is a YAML file in `srtrl/evaluation/suites/`, named without its ending, or one of the user's own. Of the values
in a recipe, what is more specific comes first: the command line, then the recipe of a run on the task `math`, then the
suite. So a policy is prompted as it was trained unless the user chooses otherwise. The settings are in the table and in
the JSON.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from pydantic import Field, model_validator

from srtrl.checks import build_checked
from srtrl.recipe.file import RecipeError, RecipeSource, build_recipe, read_source, validate_section
from srtrl.recipe.schema import Recipe, Section
from srtrl.resolve import suggestion
from srtrl.tasks.rows import RowError, RowSource, check_source, read_rows

FOLDER = Path(__file__).parent / "suites"
FILE_ENDINGS = (".jsonl", ".parquet", "_test.jsonl", "_test.parquet")
"""Endings that `--data-dir` looks for after a benchmark's name, in this order."""
PROMPT_OPTIONS = ("prompt_template", "chat_template", "chat_template_options", "system_prompt")
"""Options of the task `math` for the text of the prompt."""


class SuiteError(RecipeError):
    """All mistakes in a suite."""

    subject = "suite"


class Benchmark(Section):
    """One benchmark, which is evaluated as the task `math`."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_]*$")
    """For `--only`, `--data-dir` and the output."""
    data: RowSource
    """The place of the problems, unless `--data-dir` is given."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the task `math`; where one is a list of fields, the first that the rows have counts."""
    max_new_tokens: int | None = Field(default=None, ge=1)
    """Instead of the suite's."""
    num_samples: int | None = Field(default=None, ge=1)
    """Instead of the suite's."""


class Suite(Section):
    """Benchmarks, and what holds for each of them that does not say otherwise."""

    benchmarks: list[Benchmark] = Field(min_length=1)
    """In the order of the table."""
    prompt_template: str = "{problem}\nPlease reason step by step, and put your final answer within \\boxed{}.\n"
    """Text of the prompt, where the policy has no recipe that says how it was asked."""
    temperature: float = Field(default=1.0, ge=0)
    """Temperature of the sampling; 0 is greedy, with one sample of each problem."""
    max_prompt_tokens: int = Field(default=2048, ge=1)
    """Longer prompts are left out, and counted."""
    max_new_tokens: int = Field(default=4096, ge=1)
    """Longest response."""
    num_samples: int = Field(default=1, ge=1)
    """Samples of each problem."""

    @model_validator(mode="after")
    def check_names(self) -> Self:
        """Refuse two benchmarks of one name."""
        names = [benchmark.name for benchmark in self.benchmarks]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two benchmarks are named {name}")
        return self


def open_suite(name: str, *, only: str | None = None, data_dir: Path | None = None) -> Suite:
    """Read a suite and find the data of its benchmarks, see `locate`.

    Args:
        name: Of the suite, or a YAML file.
        only: Names of benchmarks, with commas between them; all of the suite's by default.
        data_dir: Folder of the data; the hub is then not used.

    Raises:
        ValueError: an option is incorrect, or a benchmark's data is not available.
    """
    suite = load_suite(name)
    names = [benchmark.name for benchmark in suite.benchmarks]
    wanted = names if only is None else only.split(",")
    for benchmark in wanted:
        if benchmark not in names:
            near = suggestion(benchmark, names) or ";"
            raise ValueError(f"--only: no benchmark `{benchmark}`{near} expected one of {', '.join(names)}")
    located = [locate(benchmark, data_dir) for benchmark in suite.benchmarks if benchmark.name in wanted]
    return suite.model_copy(update={"benchmarks": located})


def load_suite(name: str) -> Suite:
    """The suite of that name, or that of a YAML file.

    Raises:
        ValueError: there is none, or the file is no suite; each problem with its line.
    """
    known = sorted(path.stem for path in FOLDER.glob("*.yaml"))
    path = FOLDER / f"{name}.yaml" if name in known else Path(name)
    if not path.is_file():
        raise ValueError(
            f"--suite: {name} is neither a suite{suggestion(name, known) or ';'} known: {', '.join(known)}; "
            f"nor a file (in {Path.cwd()})"
        )
    source = read_source(path)
    try:
        return validate_section(Suite, source.data)
    except RecipeError as error:
        raise SuiteError(*source.located(error).problems) from error


def locate(benchmark: Benchmark, folder: Path | None) -> Benchmark:
    """The benchmark with its data found, and of the names of each field the first that the first row has.

    Where it has none of them, the first name stays, which loading the data refuses.

    Raises:
        ValueError: there is no file for it in the folder (`--data-dir`), or the hub does not give the data.
    """
    source = benchmark.data
    if folder is not None:
        names = [f"{benchmark.name}{ending}" for ending in FILE_ENDINGS]
        files = [str(folder / name) for name in names if (folder / name).is_file()]
        if not files:
            raise ValueError(
                f"--data-dir: {folder} has no data of {benchmark.name}; expected one of {', '.join(names)}; choose "
                "other benchmarks with --only"
            )
        source = RowSource(files=files[:1])
    try:
        check_source(source, f"benchmark {benchmark.name}")
        first = next(read_rows(source), None)
    except ValueError as error:
        raise ValueError(f"{error}; choose other benchmarks with --only, or files with --data-dir") from error
    # Where the first row is damaged, loading the data reports it.
    fields = {} if first is None or isinstance(first.fields, RowError) else first.fields
    options = benchmark.options.copy()
    for option, names in options.items():
        if isinstance(names, list):
            present = [name for name in names if fields.get(str(name).partition(".")[0]) is not None]
            options[option] = next(iter(present or names), None)
    return benchmark.model_copy(update={"data": source, "options": options})


# --- Recipes ----------------------------------------------------------------------------------------------------------


def bare_source(model: str, max_prompt_tokens: int = 1024, max_new_tokens: int = 1024) -> RecipeSource:
    """The smallest recipe that an evaluation needs, with values for training that no length conflicts with.

    Prompts and responses have up to these numbers of tokens, or half of the model's positions where that is less.
    """
    rollout = {"num_prompts": 1, "num_samples": 2, **_lengths(model, max_prompt_tokens, max_new_tokens)}
    train = {"num_steps": 1, "micro_batch_tokens": 1 << 30}
    data = {"name": "eval", "model": {"path": model}, "rollout": rollout, "train": train}
    return RecipeSource(Path(f"defaults for {model}"), data)


def suite_recipe(
    suite: Suite, benchmark: Benchmark, model: str, run: RecipeSource | None, overrides: Sequence[str]
) -> Recipe:
    """The evaluation of one benchmark of a suite.

    Args:
        suite: Its values hold where neither the command line nor `run` has any.
        benchmark: One of its benchmarks, located.
        model: The policy, as a folder or a name.
        run: The recipe of the run; None for a model.
        overrides: Of the command line.

    Raises:
        RecipeError: a value cannot be used.
    """
    where = f"benchmark {benchmark.name}"
    lengths = (suite.max_prompt_tokens, benchmark.max_new_tokens or suite.max_new_tokens)
    options = {"prompt_template": suite.prompt_template, **benchmark.options}
    if run is None:
        source = bare_source(model, *lengths)
        source.put(("eval",), {"temperature": suite.temperature}, where)
    else:
        source = copy.deepcopy(run)
        source.put(("train", "micro_batch_tokens"), 1 << 30, where)  # only training reads it
        trained = build_recipe(run)
        if trained.task.name == "math":  # only then its prompts and lengths fit the suite's problems
            options = {name: value for name, value in options.items() if name not in PROMPT_OPTIONS}
            options |= {name: value for name, value in trained.task.options.items() if name in PROMPT_OPTIONS}
        else:
            for name, value in _lengths(model, *lengths).items():
                source.put(("rollout", name), value, where)
    options["eval"] = benchmark.data.model_dump(exclude_defaults=True)
    source.put(("task",), {"name": "math", "options": options}, where)
    source.put(("rewards",), [{"name": "correct"}], where)
    source.override(overrides)
    is_greedy = build_recipe(source).eval.temperature == 0  # then all samples are the same
    source.put(("eval", "num_samples"), 1 if is_greedy else benchmark.num_samples or suite.num_samples, where)
    source.put(("eval", "num_problems"), None, where)
    source.override(overrides)
    return build_checked(source)


def _lengths(model: str, max_prompt_tokens: int, max_new_tokens: int) -> dict[str, int]:
    """These numbers of tokens, or half of the model's positions where that is less."""
    from srtrl.model.weights import read_config

    half = read_config(model).max_position_embeddings // 2
    return {"max_prompt_tokens": min(half, max_prompt_tokens), "max_new_tokens": min(half, max_new_tokens)}
