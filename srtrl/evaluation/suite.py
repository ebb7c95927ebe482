"""Suites: benchmarks that are evaluated in one go, each with its data, its fields and its options.

A suite is a YAML file in `srtrl/evaluation/suites/`, named without its ending, or one of the user's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from pydantic import Field, model_validator

from srtrl.recipe import Section
from srtrl.recipe_file import RecipeError, read_source, validate_section
from srtrl.resolve import suggestion
from srtrl.tasks.rows import MissingDataError, RowError, RowSource, check_source, get_field, read_rows

FOLDER = Path(__file__).parent / "suites"
FILE_ENDINGS = ("{name}.jsonl", "{name}.parquet", "{name}_test.jsonl", "{name}_test.parquet")
"""What `--data-dir` looks for, in this order."""
LOOKED_AT_ROWS = 100
"""Rows looked at, at most, to find one that tells what the fields are called."""


class Benchmark(Section):
    """One benchmark; where a field has several names, the first that the rows have counts."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_]*$")
    """For `--only` and `--data`, and in the output."""
    title: str
    """In the table."""
    data: RowSource
    """Where the problems are, unless `--data` or `--data-dir` says otherwise."""
    num_rows: int | None = Field(default=None, ge=1)
    """How many problems it is known to have; the table says where the data has another number."""
    problem_field: list[str] = Field(default=["problem", "question"], min_length=1)
    """Field of the problem's text."""
    answer_field: list[str] = Field(default=["answer"], min_length=1)
    """Field of the reference answer, or of a text that contains it."""
    answer_pattern: str | None = None
    """As in the options of the task `math`."""
    answer_boxed: bool = False
    """As in the options of the task `math`."""
    choices_field: list[str] = Field(default_factory=list)
    """Multiple choice: field of the choices; the answer is a letter, or an index that counts from 0."""
    solution_field: list[str] = Field(default_factory=list)
    """Field of the worked solution, for `--check-grader`."""
    id_field: list[str] = Field(default_factory=list)
    """Field of a unique name for each row; by default its file and line."""
    prompt_template: str | None = None
    """Instead of the suite's."""
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
    system_prompt: str | None = None
    """System message, where the chat template is used."""
    temperature: float = Field(default=1.0, ge=0)
    """Of the sampling; 0 is greedy, with one sample of each problem."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Keep the smallest set of most likely tokens with this mass."""
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


@dataclass(kw_only=True, slots=True, frozen=True)
class LocatedBenchmark:
    """A benchmark with its data found and its fields known."""

    benchmark: Benchmark
    source: RowSource
    options: dict[str, Any]
    """Of the task `math`: source and fields, but not how the prompt reads."""

    @property
    def place(self) -> str:
        """Where the data is from, for people."""
        if self.source.hub is None:
            return ", ".join(self.source.files)
        return f"hub: {self.source.hub} ({self.source.split})"


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
        raise source.located(error) from error


def choose(suite: Suite, only: Sequence[str]) -> list[Benchmark]:
    """The benchmarks named in `only`, in the suite's order; all where it is empty.

    Raises:
        ValueError: a name that the suite does not have.
    """
    check_names("--only", only, suite)
    return [benchmark for benchmark in suite.benchmarks if not only or benchmark.name in only]


def check_names(flag: str, names: Sequence[str], suite: Suite) -> None:
    """Raise ValueError, naming the flag, for a name that is no benchmark of the suite."""
    known = [benchmark.name for benchmark in suite.benchmarks]
    for name in names:
        if name not in known:
            raise ValueError(
                f"{flag}: no benchmark `{name}` in this suite{suggestion(name, known) or ';'} known: {', '.join(known)}"
            )


def locate(benchmark: Benchmark, files: Mapping[str, str], folder: Path | None) -> LocatedBenchmark:
    """Find the benchmark's data and see what its fields are called.

    With a folder nothing is asked of the hub: what is not there is missing.

    Args:
        benchmark: One of a suite.
        files: Benchmark -> file, of `--data`; it goes before the folder.
        folder: Of `--data-dir`.

    Raises:
        MissingDataError: there is no such file, or the hub does not give the data.
        ValueError: the rows have no such fields.
    """
    source = _source_of(benchmark, files, folder)
    fields = _example(benchmark, source)
    options: dict[str, Any] = {
        "eval": source.model_dump(exclude_defaults=True),
        "problem_field": _pick(benchmark, "problem_field", fields),
        "answer_field": _pick(benchmark, "answer_field", fields),
        "answer_pattern": benchmark.answer_pattern,
        "answer_boxed": benchmark.answer_boxed,
    }
    if benchmark.choices_field:
        options["choices_field"] = _pick(benchmark, "choices_field", fields)
    for option in ("solution_field", "id_field"):
        present = [name for name in getattr(benchmark, option) if _has(fields, name)]
        options |= {option: present[0]} if present else {}
    return LocatedBenchmark(benchmark=benchmark, source=source, options=options)


def _source_of(benchmark: Benchmark, files: Mapping[str, str], folder: Path | None) -> RowSource:
    name = benchmark.name
    if name in files:
        source = RowSource(files=[files[name]])
        check_source(source, f"--data {name}")
        return source
    if folder is None:
        if benchmark.data.files:
            check_source(benchmark.data, "data")
        return benchmark.data
    candidates = [folder / ending.format(name=name) for ending in FILE_ENDINGS]
    found = [path for path in candidates if path.is_file()]
    if not found:
        names = ", ".join(path.name for path in candidates)
        raise MissingDataError(f"--data-dir: {folder} has no data of benchmark {name}; looked for {names}")
    return RowSource(files=[str(found[0])])


def _example(benchmark: Benchmark, source: RowSource) -> Mapping[str, Any]:
    """The fields of the first row that is an object."""
    reason = "there are no rows"
    for number, row in enumerate(read_rows(source)):
        if not isinstance(row.fields, RowError):
            return row.fields
        reason = f"{row.place}: {row.fields}"
        if number == LOOKED_AT_ROWS:
            break
    raise ValueError(f"benchmark {benchmark.name}: no row can be used; {reason}")


def _pick(benchmark: Benchmark, option: str, fields: Mapping[str, Any]) -> str:
    names: list[str] = getattr(benchmark, option)
    for name in names:
        if _has(fields, name):
            return name
    raise ValueError(
        f"benchmark {benchmark.name}: its rows have no field {' or '.join(f'`{name}`' for name in names)} "
        f"({option}); their fields are {', '.join(fields)}"
    )


def _has(fields: Mapping[str, Any], name: str) -> bool:
    try:
        return get_field(fields, name) is not None
    except RowError:
        return False
