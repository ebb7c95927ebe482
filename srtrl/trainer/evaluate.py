"""Held-out accuracy with a confidence interval, through the same decoder and graders as training."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import fmean, stdev
from typing import TYPE_CHECKING, get_args

from srtrl.rollout.collect import CollectProgress, collect_rollouts
from srtrl.rollout.stage_timer import StageTimer
from srtrl.types import GradeOutcome, Prompt, RolloutGroup, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from srtrl.engine.engine import Engine
    from srtrl.recipe import Recipe
    from srtrl.tasks.base import Task
    from srtrl.tasks.grading import Grader

Z_95 = 1.959963984540054
"""The 97.5% quantile of the normal distribution."""


@dataclass(kw_only=True, slots=True, frozen=True)
class EvalResult:
    """How a policy did on held-out problems."""

    num_problems: int
    num_samples: int
    """Samples of each problem, N."""
    accuracy: float
    """Share of samples that are right: avg@N, the estimate of pass@1. A failed grading counts as not right."""
    interval: tuple[float, float]
    """95% confidence interval of `accuracy`; see `confidence_interval`."""
    solved_any: float
    """Share of problems with at least one right sample: pass@N."""
    reward: float
    """Mean reward of a sample."""
    mean_length: float
    """Mean response length in tokens."""
    max_length: int
    truncated_share: float
    """Share of samples that reached the length limit."""
    outcomes: dict[GradeOutcome, int]
    """Number of samples by how grading ended, every outcome present."""
    num_tokens: int
    """Response tokens in all."""
    seconds: float

    def metrics(self) -> dict[str, float]:
        """The row of `metrics.jsonl`: `eval/...` (and `time/eval`)."""
        row = {
            "eval/accuracy": self.accuracy,
            "eval/accuracy_low": self.interval[0],
            "eval/accuracy_high": self.interval[1],
            "eval/solved_any": self.solved_any,
            "eval/reward": self.reward,
            "eval/length/mean": self.mean_length,
            "eval/length/max": self.max_length,
            "eval/length/truncated_share": self.truncated_share,
            "eval/num_problems": self.num_problems,
            "eval/num_samples": self.num_samples,
            "eval/tokens": self.num_tokens,
            "time/eval": self.seconds,
        }
        return row | {f"eval/grading/{outcome}": count for outcome, count in self.outcomes.items()}


def held_out_prompts(task: Task, recipe: Recipe) -> list[Prompt]:
    """The first `eval.num_problems` held-out problems of the task (all by default).

    Raises:
        ValueError: the task has none.
    """
    available = len(task.eval_prompts)
    if available == 0:
        raise ValueError(
            f"task {recipe.task.name} has no held-out problems: name some in task.options, or train without evaluation "
            "(eval.before_and_after=false, no eval.every_steps)"
        )
    count = available if recipe.eval.num_problems is None else min(recipe.eval.num_problems, available)
    return [task.eval_prompts[index] for index in range(count)]


def evaluate(
    engine: Engine,
    grader: Grader,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    *,
    num_samples: int,
    sampling: SamplingParams,
    seed: int,
    on_progress: Callable[[CollectProgress], None] | None = None,
) -> EvalResult:
    """Sample every problem `num_samples` times and grade.

    The streams are those of purpose `eval` and step 0, whatever the training step: training noise is untouched, and two
    policies are compared on the same noise (common random numbers: their difference varies less than each accuracy).

    Raises:
        ValueError: a problem that the engine can never serve.
    """
    assert prompts, "nothing to evaluate"
    timer = StageTimer()
    groups = collect_rollouts(
        engine,
        grader,
        tokenizer,
        list(enumerate(prompts)),
        num_samples=num_samples,
        sampling=sampling,
        seed=seed,
        purpose="eval",
        step=0,
        on_progress=on_progress,
        timer=timer,
    )
    return summarise(groups, sum(timer.take().values()))


def summarise(groups: Sequence[RolloutGroup], seconds: float) -> EvalResult:
    """The figures of an evaluation's graded groups, all of the same number of samples."""
    rollouts = list(chain.from_iterable(group.rollouts for group in groups))
    shares = [fmean(rollout.grade.outcome == "correct" for rollout in group.rollouts) for group in groups]
    num_samples = len(groups[0].rollouts)
    counts = Counter(rollout.grade.outcome for rollout in rollouts)
    lengths = [len(rollout.token_ids) for rollout in rollouts]
    return EvalResult(
        num_problems=len(groups),
        num_samples=num_samples,
        accuracy=fmean(shares),
        interval=confidence_interval(shares, num_samples),
        solved_any=fmean(share > 0 for share in shares),
        reward=fmean(rollout.grade.reward for rollout in rollouts),
        mean_length=fmean(lengths),
        max_length=max(lengths),
        truncated_share=fmean(rollout.finish_reason == "length" for rollout in rollouts),
        outcomes={outcome: counts[outcome] for outcome in get_args(GradeOutcome)},
        num_tokens=sum(lengths),
        seconds=seconds,
    )


def confidence_interval(shares: Sequence[float], num_samples: int) -> tuple[float, float]:
    """95% confidence interval of the mean share of right samples; problems are the independent units.

    With one sample a problem: the Wilson score interval (Wilson 1927; Brown, Cai and DasGupta 2001, section 3.1.1).
    With more: mean +- z s / sqrt(n) over the n problems' shares, the standard error clustered by problem of Miller
    2024, "Adding Error Bars to Evals" (arXiv 2411.00640), section 2.2, cut to [0, 1]. Where the shares do not vary (all
    right, all wrong, one problem) s says nothing, and Wilson's interval for n problems is used, which is the wider one.

    Args:
        shares: Share of right samples of each problem.
        num_samples: Samples a problem.
    """
    mean, n = fmean(shares), len(shares)
    spread = stdev(shares) if n > 1 else 0.0
    if num_samples == 1 or spread == 0.0:
        return wilson_interval(mean, n)
    half = Z_95 * spread / math.sqrt(n)
    return max(0.0, mean - half), min(1.0, mean + half)


def wilson_interval(share: float, n: int) -> tuple[float, float]:
    """Wilson's 95% score interval of a proportion `share` seen in `n` independent trials."""
    z2 = Z_95 * Z_95
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = Z_95 / (1 + z2 / n) * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)
