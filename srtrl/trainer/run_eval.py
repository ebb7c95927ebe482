"""Evaluation outside training: a policy on the held-out problems of one task, or of several, one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from srtrl.model.cpu_threads import set_cpu_threads
from srtrl.recipe import Recipe
from srtrl.trainer.checkpoint import checkpoint_name, latest_checkpoint, list_checkpoints

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedTokenizerBase

    from srtrl.engine.engine import Engine
    from srtrl.rollout.collect import CollectProgress
    from srtrl.tasks.base import Task
    from srtrl.trainer.evaluate import EvalResult
    from srtrl.types import Prompt, RolloutGroup


@dataclass(kw_only=True, slots=True, frozen=True)
class EvalSource:
    """What `srtrl eval MODEL_OR_RUN` names."""

    model: str
    """A checkpoint of the run, or the model as given."""
    recipe_path: Path | None
    """The run's recipe; None for a model."""


def resolve_eval_source(model_or_run: str, *, step: int | None = None) -> EvalSource:
    """A run folder (one with `recipe.yaml`) becomes its newest checkpoint, or that of `step`; else it is a model.

    Raises:
        ValueError: the run has no checkpoint (of that step), or `step` is given for a model.
    """
    folder = Path(model_or_run)
    recipe_path = folder / "recipe.yaml"
    if not recipe_path.is_file():
        if step is not None:
            raise ValueError(f"--step: {model_or_run} is not a run folder (it has no recipe.yaml)")
        return EvalSource(model=model_or_run, recipe_path=None)
    checkpoints = folder / "checkpoints"
    if step is not None:
        chosen: Path | None = checkpoints / checkpoint_name(step)
    else:
        chosen = latest_checkpoint(checkpoints)
    if chosen is None or not chosen.is_dir():
        known = ", ".join(path.name for path in list_checkpoints(checkpoints)) or "none"
        raise ValueError(f"{folder} has no checkpoint{'' if step is None else f' of step {step}'}; there: {known}")
    return EvalSource(model=str(chosen), recipe_path=recipe_path)


@dataclass(kw_only=True, slots=True, frozen=True)
class EvalJob:
    """One set of held-out problems, and how the policy is asked about them."""

    name: str
    recipe: Recipe
    """Task, rewards, lengths, grading, decoder and evaluation options; all jobs of a run share device and decoder."""


@dataclass(kw_only=True, slots=True, frozen=True)
class EvalOutcome:
    """What came of one job."""

    job: EvalJob
    task: Task
    groups: list[RolloutGroup]
    result: EvalResult

    @property
    def num_left_out(self) -> int:
        """Problems whose prompt is longer than `rollout.max_prompt_tokens`."""
        return self.task.load_report.get("eval/overlong", 0)


def run_eval(model: str, recipe: Recipe, *, on_progress: Callable[[CollectProgress], None] | None = None) -> EvalResult:
    """Evaluate the policy `model` on the recipe's task, as its `eval`, `rollout` and `rewards` sections say.

    Args and errors are those of `run_evals`.
    """
    show = None if on_progress is None else lambda _, progress: on_progress(progress)
    [outcome] = run_evals(model, [EvalJob(name=recipe.task.name, recipe=recipe)], on_progress=show)
    return outcome.result


def run_evals(
    model: str, jobs: Sequence[EvalJob], *, on_progress: Callable[[EvalJob, CollectProgress], None] | None = None
) -> Iterator[EvalOutcome]:
    """Evaluate the policy `model` on each job, with one decoder; an outcome as soon as its job is done.

    All problems are loaded before the weights, so that what is wrong with the last job's is not said after hours.

    Args:
        model: Hugging Face folder, hub name, `bundled:tiny`, or a checkpoint. `recipe.model.path` is not read;
            `recipe.model.tokenizer` is, where it is set.
        jobs: At least one.
        on_progress: Called after each completion.

    Raises:
        ValueError: the model or a task cannot be loaded, or a task has no held-out problems.
    """
    from srtrl.tasks.base import check_task, load_task
    from srtrl.trainer import build
    from srtrl.trainer.evaluate import held_out_prompts

    recipes = [_with_model(job.recipe, model) for job in jobs]
    for recipe in recipes:
        check_task(recipe)
    base = max(recipes, key=_longest_sequence)
    set_cpu_threads(base.num_threads)
    tokenizer = build.build_tokenizer(base)
    tasks = [load_task(recipe, tokenizer) for recipe in recipes]
    prompts = [held_out_prompts(task, recipe) for task, recipe in zip(tasks, recipes, strict=True)]
    policy = build.build_policy(base, model, build.choose_device(base))
    engine = build.build_engine(base, policy, tokenizer)
    for job, recipe, task, problems in zip(jobs, recipes, tasks, prompts, strict=True):
        show = None if on_progress is None else lambda progress, job=job: on_progress(job, progress)
        groups, result = _evaluate(model, recipe, task, problems, engine, tokenizer, show)
        yield EvalOutcome(job=job, task=task, groups=groups, result=result)


def _evaluate(
    model: str,
    recipe: Recipe,
    task: Task,
    prompts: Sequence[Prompt],
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    on_progress: Callable[[CollectProgress], None] | None,
) -> tuple[list[RolloutGroup], EvalResult]:
    from srtrl.tasks.grading import Grader
    from srtrl.trainer import build
    from srtrl.trainer.eval_statistics import estimate
    from srtrl.trainer.evaluate import sample_and_grade
    from srtrl.trainer.majority import vote

    with Grader(task, recipe.rewards, recipe.grading, recipe.rollout.max_new_tokens) as grader:
        graded = sample_and_grade(
            engine,
            grader,
            tokenizer,
            prompts,
            num_samples=recipe.eval.num_samples,
            sampling=build.eval_sampling(recipe, build.response_end_ids(model, tokenizer)),
            seed=recipe.seed,
            on_progress=on_progress,
        )
    scores = vote(graded.groups, task.verifier, recipe.grading)
    return graded.groups, graded.summarise(majority=None if scores is None else estimate(scores))


def _with_model(recipe: Recipe, model: str) -> Recipe:
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"path": model})})


def _longest_sequence(recipe: Recipe) -> int:
    return recipe.rollout.max_prompt_tokens + recipe.rollout.max_new_tokens
