"""From the command line of `srtrl eval` to its tables."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from srtrl.evaluation import grader_check, settings, tables
from srtrl.evaluation.sample_rows import SampleWriter, check_output
from srtrl.evaluation.suite import LocatedBenchmark, Suite, check_names, choose, load_suite, locate
from srtrl.recipe_file import read_source
from srtrl.tasks.rows import MissingDataError
from srtrl.trainer.evaluate import EvalJob, EvalOutcome, resolve_eval_source, run_evals

if TYPE_CHECKING:
    from srtrl.recipe import Recipe
    from srtrl.rollout.collect import CollectProgress


@dataclass(kw_only=True, slots=True, frozen=True)
class SuiteChoice:
    """Which benchmarks of which suite, and where their data is."""

    name: str
    suite: Suite
    only: Sequence[str]
    files: Mapping[str, str]
    """Benchmark -> file, of `--data`."""
    data_dir: Path | None
    skip_missing: bool

    @classmethod
    def of(
        cls, name: str | None, *, only: str | None, data: Sequence[str], data_dir: Path | None, skip_missing: bool
    ) -> Self | None:
        """Check the options of the command line; None where no suite is named.

        Raises:
            ValueError: an option is wrong, or needs a suite.
        """
        if name is None:
            given = {"--only": only, "--data": data, "--data-dir": data_dir, "--skip-missing": skip_missing}
            for flag, value in given.items():
                if value:
                    raise ValueError(f"{flag}: it needs --suite")
            return None
        suite = load_suite(name)
        files = dict(_data_of(text) for text in data)
        check_names("--data", list(files), suite)
        if data_dir is not None and not data_dir.is_dir():
            raise ValueError(f"--data-dir: there is no folder {data_dir}")
        names = [part.strip() for part in (only or "").split(",") if part.strip()]
        if only is not None and not names:
            raise ValueError("--only: expected names of benchmarks, such as gsm8k,math500")
        check_names("--only", names, suite)
        for one in files:
            if names and one not in names:
                raise ValueError(
                    f"--data {one}: --only leaves that benchmark out; add it there, or give no file for it"
                )
        return cls(name=name, suite=suite, only=names, files=files, data_dir=data_dir, skip_missing=skip_missing)

    def locate(self) -> Found:
        """Find the data of the benchmarks that are wanted.

        Raises:
            MissingDataError: a benchmark's is not to be had, and `--skip-missing` is not given; or that of none is.
            ValueError: the data does not fit its benchmark.
        """
        found = Found()
        for benchmark in choose(self.suite, self.only):
            try:
                found.benchmarks.append(locate(benchmark, self.files, self.data_dir))
            except MissingDataError as error:
                if not self.skip_missing:
                    hint = (
                        f"give a file with --data {benchmark.name}=FILE, choose others with --only, or --skip-missing"
                    )
                    raise MissingDataError(f"benchmark {benchmark.name}: {error}; {hint}") from error
                found.missing[benchmark.name] = str(error)
        if not found.benchmarks:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in found.missing.items())
            raise MissingDataError(f"--skip-missing: no benchmark is left: {reasons}")
        return found


@dataclass(slots=True)
class Found:
    """What `SuiteChoice.locate` found."""

    benchmarks: list[LocatedBenchmark] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    """Benchmark -> why its data is not to be had."""


def _data_of(text: str) -> tuple[str, str]:
    name, equals, file = text.partition("=")
    if not equals or not name or not file:
        raise ValueError(f"--data: expected NAME=FILE, found {text!r}")
    return name, file


# --- A policy ---------------------------------------------------------------------------------------------------------


def evaluate(
    model_or_run: str | None,
    step: int | None,
    recipe: Path | None,
    chosen: SuiteChoice | None,
    flags: settings.EvalFlags,
    *,
    output: Path | None,
    as_json: bool,
) -> None:
    """Evaluate a policy and print what came of it.

    Raises:
        ValueError: an option, the recipe, the data or the model is wrong.
    """
    if model_or_run is None:
        raise ValueError("MODEL_OR_RUN is missing: name a model or the folder of a run (--check-grader needs neither)")
    if chosen is not None and flags.task is not None:
        raise ValueError("--task and --suite: choose one")
    if output is not None:
        check_output(output)
    evaluated = resolve_eval_source(model_or_run, step=step)
    recipe_path = recipe or evaluated.recipe_path
    source = read_source(recipe_path) if recipe_path else None
    if source is not None:
        source.put(("model", "path"), evaluated.model, "MODEL_OR_RUN")
    if chosen is not None:
        found = chosen.locate()
        jobs = [settings.suite_job(chosen.suite, one, evaluated.model, source, flags) for one in found.benchmarks]
        outcomes = list(_run(evaluated.model, jobs, output))
        report = _suite_report(evaluated.model, chosen, found, jobs, outcomes)
        _print(tables.suite_table(report), report.as_record(), as_json=as_json)
        return
    if source is None and flags.task is None:
        raise ValueError(
            f"{model_or_run} is not a run folder: say what to evaluate on, with --suite NAME, --task NAME or "
            "--recipe FILE"
        )
    job = settings.task_job(source or settings.bare_source(evaluated.model), flags)
    [outcome] = _run(evaluated.model, [job], output)
    asked = tables.TaskReport(
        model=evaluated.model,
        task=job.recipe.task.name,
        seed=job.recipe.seed,
        temperature=job.recipe.eval.temperature,
        top_k=job.recipe.eval.top_k,
        top_p=job.recipe.eval.top_p,
        max_prompt_tokens=job.recipe.rollout.max_prompt_tokens,
        max_new_tokens=job.recipe.rollout.max_new_tokens,
        num_left_out=outcome.num_left_out,
    )
    record = {**asdict(asked), **asdict(outcome.result)}
    _print(tables.eval_table(evaluated.model, outcome.result, asked), record, as_json=as_json)


def _run(model: str, jobs: Sequence[EvalJob], output: Path | None) -> Iterator[EvalOutcome]:
    """Evaluate, showing progress on standard error and writing each job's rows when it is done."""
    from rich.console import Console

    from srtrl.trainer.run_folder import RunProgress

    with ExitStack() as stack:
        progress = stack.enter_context(RunProgress("eval", len(jobs), console=Console(stderr=True)))
        writer = stack.enter_context(SampleWriter(output)) if output is not None else None

        def show(job: EvalJob, done: CollectProgress) -> None:
            progress.stage(job.name, done.num_done, done.num_total)

        for number, outcome in enumerate(run_evals(model, jobs, on_progress=show), start=1):
            if writer is not None:
                writer.write(outcome)
            if len(jobs) > 1:
                progress.step(number, f"{outcome.job.name}: {outcome.result.accuracy:.1%}")
            yield outcome


def _suite_report(
    model: str, chosen: SuiteChoice, found: Found, jobs: Sequence[EvalJob], outcomes: Sequence[EvalOutcome]
) -> tables.SuiteReport:
    benchmarks = []
    for one, outcome in zip(found.benchmarks, outcomes, strict=True):
        recipe = outcome.job.recipe
        options = _math_options(recipe)
        benchmarks.append(
            tables.BenchmarkReport(
                name=one.benchmark.name,
                title=one.benchmark.title,
                place=one.place,
                num_rows=outcome.task.load_report["eval/rows"],
                expected_rows=one.benchmark.num_rows,
                num_left_out=outcome.num_left_out,
                max_prompt_tokens=recipe.rollout.max_prompt_tokens,
                max_new_tokens=recipe.rollout.max_new_tokens,
                prompt_template=options.prompt_template,
                chat_template=options.chat_template,
                system_prompt=options.system_prompt,
                temperature=recipe.eval.temperature,
                top_k=recipe.eval.top_k,
                top_p=recipe.eval.top_p,
                result=outcome.result,
            )
        )
    return tables.SuiteReport(
        model=model, suite=chosen.name, seed=jobs[0].recipe.seed, benchmarks=benchmarks, missing=found.missing
    )


# --- A grader ---------------------------------------------------------------------------------------------------------


def check_graders(
    model_or_run: str | None,
    recipe: Path | None,
    chosen: SuiteChoice | None,
    flags: settings.EvalFlags,
    *,
    as_json: bool,
) -> None:
    """Grade the reference solutions of a suite's data, or of a recipe's task, and print where the grader disagrees.

    Raises:
        ValueError: an option, the recipe or the data is wrong.
    """
    if model_or_run is not None and "=" in model_or_run:  # there is no model: that was an override
        flags = replace(flags, overrides=(model_or_run, *flags.overrides))
        model_or_run = None
    missing: Mapping[str, str] = {}
    if chosen is not None:
        found = chosen.locate()
        missing = found.missing
        reports = [_check_benchmark(one, flags.problems) for one in found.benchmarks]
    else:
        run_recipe = None if model_or_run is None else resolve_eval_source(model_or_run).recipe_path
        path = recipe or run_recipe
        if path is None:
            raise ValueError(
                "--check-grader: say what to check, with --suite NAME, --recipe FILE or the folder of a run"
            )
        source = read_source(path)
        flags.put(source)
        reports = [_check_task(settings.build_checked(source))]
    record = grader_check.as_record(reports)
    _print(grader_check.grader_table(reports), record, as_json=as_json)
    if not as_json:
        for line in grader_check.disagreement_lines(reports):
            print(line)
    for name, reason in missing.items():
        print(f"{name}: no data: {reason}", file=sys.stderr if as_json else sys.stdout)


def _check_benchmark(located: LocatedBenchmark, num_rows: int | None) -> grader_check.GraderReport:
    """The rows are read without a tokenizer, so that no model is needed."""
    from srtrl.recipe import GradingSection
    from srtrl.recipe_file import validate_section
    from srtrl.tasks.math import MathOptions, read_problems, solution_of

    options = validate_section(MathOptions, located.options)
    rows = [
        grader_check.ReferenceRow(
            prompt_id=problem.prompt_id,
            answer=problem.answer,
            solution=solution_of(options, problem) if "solution_field" in located.options else None,
        )
        for problem in read_problems(options, located.source, "eval", Counter())
    ]
    name = located.benchmark.name
    return grader_check.check_grader(name, located.place, rows[:num_rows], options.verifier, GradingSection())


def _check_task(recipe: Recipe) -> grader_check.GraderReport:
    """The held-out problems of a recipe's task, or those to train on where it has no others."""
    from srtrl.tasks.base import load_task
    from srtrl.trainer.build import build_tokenizer

    task = load_task(recipe, build_tokenizer(recipe))
    prompts = task.eval_prompts or task.train_prompts
    rows = [
        grader_check.ReferenceRow(prompt_id=prompt.prompt_id, answer=prompt.answer, solution=task.solution(prompt))
        for prompt in prompts[: recipe.eval.num_problems]
    ]
    place = f"task {recipe.task.name}"
    return grader_check.check_grader(recipe.task.name, place, rows, task.verifier, recipe.grading)


def _math_options(recipe: Recipe) -> Any:
    from srtrl.recipe_file import validate_section
    from srtrl.tasks.math import MathOptions

    return validate_section(MathOptions, dict(recipe.task.options))


def _print(table: Any, record: Any, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(record))
        return
    from rich.console import Console

    console = Console()
    if not console.is_terminal:  # a file or a pipe has no width; a narrow table would cut its own figures
        console = Console(width=max(console.width, 160), file=sys.stdout)
    console.print(table)
