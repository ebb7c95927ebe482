"""Held-out accuracy with a confidence interval, through the same decoder and graders as training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import fmean, median
from typing import TYPE_CHECKING, get_args

from srtrl.rollout.collect import CollectProgress, collect_rollouts
from srtrl.rollout.stage_timer import StageTimer
from srtrl.trainer.eval_statistics import Estimate, confidence_interval, estimate, pass_at_k, pass_at_ks
from srtrl.types import GradeOutcome, Prompt, RolloutGroup, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from srtrl.engine.engine import Engine
    from srtrl.recipe import Recipe
    from srtrl.tasks.base import Task
    from srtrl.tasks.grading import Grader


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
    pass_at: dict[int, Estimate]
    """pass@k for k = 1, 2, 4, ..., N; see `pass_at_k`."""
    reward: float
    """Mean reward of a sample."""
    mean_length: float
    """Mean response length in tokens."""
    median_length: float
    max_length: int
    truncated_share: float
    """Share of samples that reached the length limit."""
    outcomes: dict[GradeOutcome, int]
    """Number of samples by how grading ended, every outcome present."""
    num_tokens: int
    """Response tokens in all."""
    seconds: float
    """Decoding, and waiting for the last graders."""
    tokens_per_decode_step: float | None = None
    """Tokens that one decode step brought a sequence: 1 without speculation. None where it was not measured."""
    majority: Estimate | None = None
    """Accuracy of the majority vote, maj@N; None where no vote was held."""

    def metrics(self) -> dict[str, float]:
        """The row of `metrics.jsonl`: `eval/...` (and `time/eval`)."""
        row = {
            "eval/accuracy": self.accuracy,
            "eval/accuracy_low": self.interval[0],
            "eval/accuracy_high": self.interval[1],
            "eval/solved_any": self.solved_any,
            "eval/reward": self.reward,
            "eval/length/mean": self.mean_length,
            "eval/length/median": self.median_length,
            "eval/length/max": self.max_length,
            "eval/length/truncated_share": self.truncated_share,
            "eval/num_problems": self.num_problems,
            "eval/num_samples": self.num_samples,
            "eval/tokens": self.num_tokens,
            "time/eval": self.seconds,
        }
        row |= {f"eval/pass_at_{k}": share.value for k, share in self.pass_at.items() if k > 1}
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
    """Sample every problem `num_samples` times and grade: the figures of `sample_and_grade`.

    Raises:
        ValueError: a problem that the engine can never serve.
    """
    graded = sample_and_grade(
        engine,
        grader,
        tokenizer,
        prompts,
        num_samples=num_samples,
        sampling=sampling,
        seed=seed,
        on_progress=on_progress,
    )
    return graded.summarise()


@dataclass(kw_only=True, slots=True, frozen=True)
class GradedSamples:
    """What an evaluation decoded, before any figure is made of it."""

    groups: list[RolloutGroup]
    """One a problem, in order; all of the same number of samples."""
    seconds: float
    tokens_per_decode_step: float

    def summarise(self, majority: Estimate | None = None) -> EvalResult:
        """The figures, with those of a vote where one was held."""
        return summarise(
            self.groups, self.seconds, tokens_per_decode_step=self.tokens_per_decode_step, majority=majority
        )


def sample_and_grade(
    engine: Engine,
    grader: Grader,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    *,
    num_samples: int,
    sampling: SamplingParams,
    seed: int,
    on_progress: Callable[[CollectProgress], None] | None = None,
) -> GradedSamples:
    """Sample every problem `num_samples` times and grade.

    The streams are those of purpose `eval`, whatever the training step: training noise is untouched, and two policies
    are compared on the same noise (common random numbers: their difference varies less than each accuracy). The
    drafter works as in training, on a cache of its own for that purpose: the samples of a problem draft from each
    other, and from those of earlier evaluations. The engine's metrics since they were last taken are taken here.

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
        on_progress=on_progress,
        timer=timer,
    )
    return GradedSamples(
        groups=groups,
        seconds=sum(timer.take().values()),
        tokens_per_decode_step=engine.take_metrics()["engine/tokens_per_decode_step"],
    )


def summarise(
    groups: Sequence[RolloutGroup],
    seconds: float,
    *,
    tokens_per_decode_step: float | None = None,
    majority: Estimate | None = None,
) -> EvalResult:
    """The figures of an evaluation's graded groups, all of the same number of samples."""
    rollouts = list(chain.from_iterable(group.rollouts for group in groups))
    num_samples = len(groups[0].rollouts)
    num_correct = [sum(rollout.grade.outcome == "correct" for rollout in group.rollouts) for group in groups]
    shares = [count / num_samples for count in num_correct]
    counts = Counter(rollout.grade.outcome for rollout in rollouts)
    lengths = [len(rollout.token_ids) for rollout in rollouts]
    return EvalResult(
        num_problems=len(groups),
        num_samples=num_samples,
        accuracy=fmean(shares),
        interval=confidence_interval(shares),
        solved_any=fmean(share > 0 for share in shares),
        pass_at={
            k: estimate([pass_at_k(num_samples, count, k) for count in num_correct]) for k in pass_at_ks(num_samples)
        },
        reward=fmean(rollout.grade.reward for rollout in rollouts),
        mean_length=fmean(lengths),
        median_length=float(median(lengths)),
        max_length=max(lengths),
        truncated_share=fmean(rollout.finish_reason == "length" for rollout in rollouts),
        outcomes={outcome: counts[outcome] for outcome in get_args(GradeOutcome)},
        num_tokens=sum(lengths),
        seconds=seconds,
        tokens_per_decode_step=tokens_per_decode_step,
        majority=majority,
    )
