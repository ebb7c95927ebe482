"""A policy on held-out problems outside of training (`srtrl eval`): which one, on which tasks, and the majority vote.

maj@N is whether the answer that most of a problem's samples give is right (Wang et al. 2022, arXiv 2203.11171).
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from srtrl import build, build_models
from srtrl.model.cpu_threads import set_cpu_threads
from srtrl.recipe.file import load_recipe
from srtrl.recipe.schema import Recipe
from srtrl.run.checkpoint import MANIFEST, check_policy
from srtrl.run.machine import choose_device
from srtrl.run.progress import describe_prompt
from srtrl.run.steps import best_step, checkpoint_name, latest_checkpoint, list_checkpoints
from srtrl.tasks.base import TaskBase, load_task
from srtrl.tasks.final_answer import as_judged
from srtrl.tasks.grading import Grader
from srtrl.trainer.evaluate import count_correct, evaluate, held_out_prompts
from srtrl.trainer.sampling import RolloutContext
from srtrl.types import RolloutGroup

INTEGER = re.compile(r"-?[0-9]{1,18}")


def resolve_eval_source(model_or_run: str, *, step: int | None = None, best: bool = False) -> tuple[str, Path | None]:
    """Policy and recipe of `srtrl eval NAME`: of a run its newest checkpoint, that of `step` or the best; or a model.

    Returns:
        The model as given and None; for a run folder (one with `recipe.yaml`) the checkpoint and its recipe's path.

    Raises:
        ValueError: the run has no checkpoint (of that step, or with the metric of `train.keep_best`), or the policy in
            it is damaged, or `step` or `best` is given for a model, or both are.
    """
    folder = Path(model_or_run)
    recipe_path = folder / "recipe.yaml"
    if not recipe_path.is_file():
        if step is not None or best:
            option = "--best" if best else "--step"
            raise ValueError(f"{option}: {model_or_run} is not a run folder (it has no recipe.yaml)")
        if folder.name.startswith("step_") and (folder / MANIFEST).is_file():  # the checkpoint of a run
            check_policy(folder)
        return model_or_run, None
    checkpoints = folder / "checkpoints"
    if best:
        step = _best_step(folder, step)
    chosen = latest_checkpoint(checkpoints) if step is None else checkpoints / checkpoint_name(step)
    if chosen is None or not chosen.is_dir():
        known = ", ".join(path.name for path in list_checkpoints(checkpoints)) or "none"
        raise ValueError(f"{folder} has no checkpoint{'' if step is None else f' of step {step}'}; there: {known}")
    check_policy(chosen)
    return str(chosen), recipe_path


def _best_step(run: Path, step: int | None) -> int:
    """The step of the checkpoint that `train.keep_best` has kept; ValueError if there is none, or `step` is given."""
    if step is not None:
        raise ValueError("--step and --best: choose one")
    metric = load_recipe(run / "recipe.yaml").train.keep_best
    if metric is None:
        raise ValueError(f"--best: {run} was trained without train.keep_best: choose a checkpoint with --step")
    best = best_step(run, metric)
    if best is None:
        raise ValueError(f"--best: {run} has no checkpoint of a step with {metric} yet")
    return best


@dataclass(kw_only=True, slots=True, frozen=True)
class EvalOutcome:
    """The evaluation of one task or benchmark."""

    name: str
    recipe: Recipe
    task: TaskBase
    groups: list[RolloutGroup]
    """One per problem, in order."""
    metrics: dict[str, float]
    """`eval/...` and `time/eval`, as in a run's metrics.jsonl."""


def run_evals(
    model: str,
    recipes: Mapping[str, Recipe],
    *,
    on_progress: Callable[[str, int, int], None] = lambda *_: None,
    on_prompt: Callable[[str], None] = lambda _: None,
) -> Iterator[EvalOutcome]:
    """Evaluate the policy `model` on the task of each recipe, with one decoder; an outcome as soon as it is there.

    All problems are loaded before the weights, so that a mistake in the last recipe is reported at once. The ranks
    share the samples; each of them has all outcomes.

    Args:
        model: Hugging Face folder, hub name, `bundled:tiny`, or a checkpoint. `recipe.model.path` is not read;
            `recipe.model.tokenizer` is, where it is set.
        recipes: Name -> task, rewards, lengths, grading, decoder and evaluation options; all with the same device and
            decoder.
        on_progress: Called after each completion, with the name, the number of completions so far and of those that are
            requested.
        on_prompt: Called with a text that shows the first prompt, before each evaluation.

    Raises:
        ValueError: the model or a task cannot be loaded, or a task has no held-out problems.
    """
    recipes = {
        name: recipe.model_copy(update={"model": recipe.model.model_copy(update={"path": model})})
        for name, recipe in recipes.items()
    }
    base = max(recipes.values(), key=lambda recipe: recipe.rollout.max_prompt_tokens + recipe.rollout.max_new_tokens)
    device = choose_device(base)
    set_cpu_threads(base.num_threads, device=device.type)
    tokenizer = build.build_tokenizer(base)
    loaded = []
    for name, recipe in recipes.items():
        turns = build.build_turns(recipe, tokenizer)
        task = load_task(recipe, tokenizer, tools=turns.tools)
        loaded.append((name, recipe, turns, task, held_out_prompts(task, recipe)))
    policy = build_models.build_policy(base, model, device)
    num_samples = max(len(prompts) * recipe.eval.num_samples for _, recipe, _, _, prompts in loaded)
    engine = build.build_engine(base, policy, tokenizer, num_samples=num_samples)
    engine.warm_up()
    end_ids = build.response_end_ids(model, tokenizer)
    for name, recipe, turns, task, prompts in loaded:
        grader = Grader(task, recipe.rewards, recipe.grading)
        with grader, turns:
            context = RolloutContext(
                recipe=recipe,
                engine=engine,
                grader=grader,
                tokenizer=tokenizer,
                end_ids=end_ids,
                turns=turns,
                ranks=build.choose_ranks(),
            )
            on_prompt(describe_prompt(context.started(prompts[0]), tokenizer, f"first prompt of {name}"))
            groups, metrics = evaluate(context, prompts, on_progress=functools.partial(on_progress, name))
        yield EvalOutcome(name=name, recipe=recipe, task=task, groups=groups, metrics=metrics)


def majority_scores(groups: Sequence[RolloutGroup], extract: Callable[[str], str | None]) -> list[float]:
    """For each problem, the chance that its most frequent answer is right.

    The votes are the samples with a final answer whose grading did not fail; the others abstain. Samples that the
    verifier accepted give the same answer, the reference; wrong samples vote for the text that `extract` returns. Of n
    most frequent answers each is taken with chance 1/n, so a tie that the right one is in counts 1/n; without
    votes the score is 0.
    """
    scores = []
    for group in groups:
        num_right = count_correct(group)
        votes = [extract(as_judged(it.prompt, it.policy_text)) for it in group.rollouts if it.grade.outcome == "wrong"]
        sizes = list(Counter(_plain(answer) for answer in votes if answer is not None).values())
        wins = num_right > 0 and num_right >= max(sizes, default=0)
        scores.append(wins / (1 + sizes.count(num_right)))
    return scores


def _plain(answer: str) -> str:
    """An answer without spaces, an integer without leading zeros: spelling makes no difference."""
    answer = "".join(answer.split())
    return str(int(answer)) if INTEGER.fullmatch(answer) else answer
