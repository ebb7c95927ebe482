"""`srtrl eval`: a policy on a task's held-out problems."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from srtrl.model.cpu_threads import set_cpu_threads
from srtrl.recipe import Recipe
from srtrl.trainer.checkpoint import checkpoint_name, latest_checkpoint, list_checkpoints

if TYPE_CHECKING:
    from collections.abc import Callable

    from srtrl.rollout.collect import CollectProgress
    from srtrl.trainer.evaluate import EvalResult


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


def run_eval(model: str, recipe: Recipe, *, on_progress: Callable[[CollectProgress], None] | None = None) -> EvalResult:
    """Evaluate the policy `model` on the recipe's task, as its `eval`, `rollout` and `rewards` sections say.

    Args:
        model: Hugging Face folder, hub name, `bundled:tiny`, or a checkpoint. `recipe.model.path` is not read;
            `recipe.model.tokenizer` is, where it is set.
        recipe: Task, rewards, lengths, decoder and evaluation options.
        on_progress: Called after each completion.

    Raises:
        ValueError: the model or the task cannot be loaded, or the task has no held-out problems.
    """
    from srtrl.tasks.base import check_task, load_task
    from srtrl.tasks.grading import Grader
    from srtrl.trainer import build
    from srtrl.trainer.evaluate import evaluate, held_out_prompts

    recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"path": model})})
    check_task(recipe)
    set_cpu_threads(recipe.num_threads)
    tokenizer = build.build_tokenizer(recipe)
    task = load_task(recipe, tokenizer)
    prompts = held_out_prompts(task, recipe)
    policy = build.build_policy(recipe, model, build.choose_device(recipe))
    engine = build.build_engine(recipe, policy, tokenizer)
    with Grader(task, recipe.rewards, recipe.grading, recipe.rollout.max_new_tokens) as grader:
        return evaluate(
            engine,
            grader,
            tokenizer,
            prompts,
            num_samples=recipe.eval.num_samples,
            sampling=build.eval_sampling(recipe, build.response_end_ids(model, tokenizer)),
            seed=recipe.seed,
            on_progress=on_progress,
        )


def eval_table(model: str, result: EvalResult) -> Table:
    """The result for people."""
    low, high = result.interval
    name = "pass@1" if result.num_samples == 1 else f"pass@1 (avg@{result.num_samples})"
    table = Table(title=f"{model}: {result.num_problems} problems x {result.num_samples}", show_header=False)
    table.add_row(name, f"{result.accuracy:.2%}  (95% interval {low:.2%} to {high:.2%})")
    if result.num_samples > 1:
        table.add_row(f"pass@{result.num_samples}", f"{result.solved_any:.2%}")
    table.add_row("reward, mean", f"{result.reward:.4f}")
    table.add_row("response length, mean / max", f"{result.mean_length:.1f} / {result.max_length} tokens")
    table.add_row("cut at the length limit", f"{result.truncated_share:.2%}")
    for outcome, count in result.outcomes.items():
        table.add_row(f"graded {outcome}", str(count))
    table.add_row("time", f"{result.seconds:.1f} s  ({result.num_tokens / result.seconds:,.0f} tokens/s)")
    return table
