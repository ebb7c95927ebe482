"""Held-out accuracy and reward with confidence intervals, through the same decoder and graders as training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from statistics import fmean, median

from srtrl.metrics import StageTimer
from srtrl.recipe.schema import Recipe
from srtrl.rollout.collect import FixedDraws, OnProgress, collect_rollouts
from srtrl.run.step_metrics import turn_metrics
from srtrl.statistics import Estimate, estimate, mean_interval, pass_at_k, pass_at_ks
from srtrl.tasks.base import NO_HELD_OUT, TaskBase
from srtrl.trainer.sampling import RolloutContext, train_sampling
from srtrl.types import VERIFIED_OUTCOMES, GradeOutcome, Prompt, Purpose, RolloutGroup, SamplingParams

TURN_METRICS = ("environment/turns_mean", "environment/call_share", "environment/valid_call_share")
"""Metrics of `turn_metrics` that evaluations log."""


def held_out_prompts(task: TaskBase, recipe: Recipe) -> list[Prompt]:
    """The first `eval.num_problems` held-out problems of the task (all by default).

    Raises:
        ValueError: the task has none.
    """
    if not task.eval_prompts:
        raise ValueError(NO_HELD_OUT.format(recipe.task.name))
    return list(task.eval_prompts[: recipe.eval.num_problems])


def training_evals(task: TaskBase, recipe: Recipe) -> tuple[bool, list[Prompt]]:
    """Whether the first and the last policy of a run are evaluated, and the problems of all its evaluations.

    `eval.before_and_after: auto` evaluates them if the task has held-out problems.

    Raises:
        ValueError: there are to be evaluations, and the task has no such problems.
    """
    choice = recipe.eval.before_and_after
    at_ends = bool(task.eval_prompts) if choice == "auto" else choice
    has_evals = at_ends or recipe.eval.every_steps is not None
    return at_ends, held_out_prompts(task, recipe) if has_evals else []


def evaluate(
    context: RolloutContext, prompts: Sequence[Prompt], *, purpose: Purpose = "eval", on_progress: OnProgress
) -> tuple[list[RolloutGroup], dict[str, float]]:
    """Sample every problem `eval.num_samples` times and grade; returns one group per problem, in order, and metrics.

    The RNG keys are those of `purpose`, at any training step: training noise is untouched, and two policies
    are compared on the same noise (common random numbers: their difference varies less than each accuracy). The
    drafter works as in training, on a cache of its own for that purpose: the samples of a problem draft from each
    other, and from those of earlier evaluations. The engine's metrics since they were last taken are taken here.

    Raises:
        ValueError: a problem that the engine can never serve.
    """
    assert prompts, "nothing to evaluate"
    sampling, timer = eval_sampling(context.recipe, context.end_ids), StageTimer()
    collector = context.collector(purpose, context.recipe.eval.num_samples, sampling, on_progress, timer)
    draws = list(enumerate(map(context.started, prompts)))
    groups = collect_rollouts(context.engine, collector, FixedDraws(draws))
    context.turns.check_not_all_raised("evaluation")
    seconds = sum(timer.take().values())
    context.take_engine_metrics()  # of evaluation: the next training step must not report them
    metrics = eval_metrics(groups, seconds, context.grader.outcomes)
    for label, some in context.grader.by_task(groups).items():
        of_task = eval_metrics(some, seconds, context.grader.outcomes)
        metrics |= {f"{name}/{label}": of_task[name] for name in ("eval/accuracy", "eval/reward")}
    return groups, metrics


def eval_metrics(
    groups: Sequence[RolloutGroup], seconds: float, grade_outcomes: Sequence[GradeOutcome] = VERIFIED_OUTCOMES
) -> dict[str, float]:
    """The metrics `eval/...` and `time/eval` of graded groups of the same size (docs/metrics.md).

    A failed grading counts as incorrect, and in no mean of rewards (0 where all failed). Without `correct` among
    `grade_outcomes` (how grading can end) there is no accuracy.
    """
    rollouts = list(chain.from_iterable(group.rollouts for group in groups))
    num_samples = len(groups[0].rollouts)
    graded = [[rollout.grade.reward for rollout in group.graded] for group in groups]
    rewards = [fmean(some) for some in graded if some] or [0.0]
    counts = Counter(rollout.grade.outcome for rollout in rollouts)
    lengths = [len(rollout.response.token_ids) for rollout in rollouts]
    metrics: dict[str, float] = {}
    if "correct" in grade_outcomes:
        shares = correct_shares(groups)
        metrics |= {f"eval/{name}": share.value for name, share in shares.items()}
        metrics |= {f"eval/accuracy_{end}": getattr(shares["accuracy"], end) for end in ("low", "high")}
        metrics["eval/solved_any"] = fmean(count_correct(group) > 0 for group in groups)
    of_samples = [*chain.from_iterable(graded)] or [0.0]
    low, high = mean_interval(rewards)
    metrics["eval/reward"] = fmean(of_samples)
    metrics["eval/reward_low"], metrics["eval/reward_high"] = max(low, min(of_samples)), min(high, max(of_samples))
    metrics |= {
        "eval/length/mean": fmean(lengths),
        "eval/length/median": float(median(lengths)),
        "eval/length/max": max(lengths),
        "eval/length/truncated_share": fmean(rollout.response.finish_reason == "length" for rollout in rollouts),
        "eval/num_problems": len(groups),
        "eval/num_samples": num_samples,
        "eval/tokens": sum(lengths),
        "time/eval": seconds,
    }
    turns = turn_metrics(rollouts)
    metrics |= {f"eval/{name}": turns[name] for name in TURN_METRICS if name in turns}
    return metrics | {f"eval/grading/{outcome}": counts[outcome] for outcome in grade_outcomes}


def correct_shares(groups: Sequence[RolloutGroup]) -> dict[str, Estimate]:
    """`accuracy` and `pass_at_2`, `pass_at_4`, ... of graded groups of the same size, with 95% intervals."""
    num_samples, num_correct = len(groups[0].rollouts), [count_correct(group) for group in groups]
    shares = {"accuracy": estimate([count / num_samples for count in num_correct])}
    for k in pass_at_ks(num_samples):
        shares[f"pass_at_{k}"] = estimate([pass_at_k(num_samples, count, k) for count in num_correct])
    return shares


def count_correct(group: RolloutGroup) -> int:
    """Number of samples that the verifier accepted."""
    return sum(rollout.grade.outcome == "correct" for rollout in group.rollouts)


def eval_sampling(recipe: Recipe, end_ids: tuple[int, ...]) -> SamplingParams:
    """Sampling of held-out problems: with the `eval` section's temperature, top-k and top-p."""
    section = recipe.eval
    return replace(
        train_sampling(recipe, end_ids), temperature=section.temperature, top_k=section.top_k, top_p=section.top_p
    )
