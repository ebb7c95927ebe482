"""Held-out accuracy and reward with confidence intervals, through the same decoder and graders as training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from statistics import fmean, median
from typing import TYPE_CHECKING

from srtrl.ranks.processes import ONE_RANK, Ranks
from srtrl.recipe.schema import Recipe
from srtrl.rollout.collect import Collector, FixedDraws, OnProgress, collect_rollouts
from srtrl.run.metrics import turn_metrics
from srtrl.statistics import Estimate, confidence_interval, estimate, mean_interval, pass_at_k, pass_at_ks
from srtrl.tasks.base import Task
from srtrl.tasks.grading import Grader
from srtrl.trainer import build
from srtrl.types import VERIFIED_OUTCOMES, GradeOutcome, Prompt, RolloutGroup

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from srtrl.engine.engine import Engine
    from srtrl.environments.conversations import Conversations


@dataclass(kw_only=True, slots=True, frozen=True)
class EvalResult:
    """The figures of a policy on held-out problems."""

    num_problems: int
    num_samples: int
    """Samples of each problem, N."""
    accuracy: float | None
    """Share of samples that are right: avg@N, the estimate of pass@1. A failed grading counts as not right. None, as
    the next two, where the task has no verifier."""
    interval: tuple[float, float] | None
    """95% confidence interval of `accuracy`; see `confidence_interval`."""
    solved_any: float | None
    """Share of problems with at least one right sample: pass@N."""
    pass_at: dict[int, Estimate]
    """pass@k for k = 1, 2, 4, ..., N; see `pass_at_k`. Empty where the task has no verifier."""
    reward: float
    """Mean reward of a sample."""
    reward_interval: tuple[float, float]
    """95% confidence interval of `reward`; see `mean_interval`."""
    mean_length: float
    """Mean response length in tokens."""
    median_length: float
    max_length: int
    truncated_share: float
    """Share of samples that reached the length limit."""
    outcomes: dict[GradeOutcome, int]
    """Number of samples by how grading ended, every outcome of such a task present."""
    num_tokens: int
    """Response tokens in all."""
    seconds: float
    """Decoding, and waiting for the last graders."""
    tokens_per_decode_step: float | None = None
    """Tokens that one decode step brought a sequence: 1 without speculation. None where it was not measured."""
    majority: Estimate | None = None
    """Accuracy of the majority vote, maj@N; None where no vote was held."""
    environment: dict[str, float] = field(default_factory=dict)
    """Figures of the turns, by the names of the metrics `environment/...`; empty where samples are single turns."""

    def metrics(self) -> dict[str, float]:
        """The row of `metrics.jsonl`: `eval/...` (and `time/eval`)."""
        low, high = self.interval or (None, None)
        known = {
            "eval/accuracy": self.accuracy,
            "eval/accuracy_low": low,
            "eval/accuracy_high": high,
            "eval/solved_any": self.solved_any,
            "eval/reward": self.reward,
            "eval/reward_low": self.reward_interval[0],
            "eval/reward_high": self.reward_interval[1],
            "eval/length/mean": self.mean_length,
            "eval/length/median": self.median_length,
            "eval/length/max": self.max_length,
            "eval/length/truncated_share": self.truncated_share,
            "eval/num_problems": self.num_problems,
            "eval/num_samples": self.num_samples,
            "eval/tokens": self.num_tokens,
            "time/eval": self.seconds,
        }
        row = {name: value for name, value in known.items() if value is not None}
        row |= {f"eval/pass_at_{k}": share.value for k, share in self.pass_at.items() if k > 1}
        turns = ("turns_mean", "call_share", "valid_call_share")
        row |= {f"eval/environment/{name}": self.environment[name] for name in turns if name in self.environment}
        return row | {f"eval/grading/{outcome}": count for outcome, count in self.outcomes.items()}


def held_out_prompts(task: Task, recipe: Recipe) -> list[Prompt]:
    """The first `eval.num_problems` held-out problems of the task (all by default).

    Raises:
        ValueError: the task has none.
    """
    if not task.eval_prompts:
        raise ValueError(
            f"task {recipe.task.name} has no held-out problems: name some in task.options, or train without evaluation "
            "(eval.before_and_after=false, no eval.every_steps)"
        )
    return list(task.eval_prompts[: recipe.eval.num_problems])


def evaluate(
    recipe: Recipe,
    prompts: Sequence[Prompt],
    engine: Engine,
    grader: Grader,
    tokenizer: PreTrainedTokenizerBase,
    end_ids: tuple[int, ...],
    *,
    on_progress: OnProgress = lambda *_: None,
    conversations: Conversations | None = None,
    ranks: Ranks = ONE_RANK,
) -> tuple[list[RolloutGroup], EvalResult]:
    """Sample every problem `eval.num_samples` times and grade; the groups, one a problem in order, and their figures.

    The RNG keys are those of purpose `eval`, at any training step: training noise is untouched, and two policies
    are compared on the same noise (common random numbers: their difference varies less than each accuracy). The
    drafter works as in training, on a cache of its own for that purpose: the samples of a problem draft from each
    other, and from those of earlier evaluations. The engine's metrics since they were last taken are taken here.

    Raises:
        ValueError: a problem that the engine can never serve.
    """
    assert prompts, "nothing to evaluate"
    collector = Collector(
        grader,
        tokenizer,
        num_samples=recipe.eval.num_samples,
        sampling=build.eval_sampling(recipe, end_ids),
        seed=recipe.seed,
        purpose="eval",
        on_progress=on_progress,
        conversations=conversations,
        ranks=ranks,
    )
    if conversations is not None:
        prompts = [conversations.started(prompt, recipe.rollout.max_prompt_tokens) for prompt in prompts]
    groups = collect_rollouts(engine, collector, FixedDraws(list(enumerate(prompts))))
    if conversations is not None:
        conversations.check_not_all_raised("evaluation", ranks)
    seconds = sum(collector.timer.take().values())
    tokens_per_step = collector.engine_metrics(engine)["engine/tokens_per_decode_step"]
    return groups, summarise(groups, seconds, grader.outcomes, tokens_per_decode_step=tokens_per_step)


def summarise(
    groups: Sequence[RolloutGroup],
    seconds: float,
    grade_outcomes: Sequence[GradeOutcome] = VERIFIED_OUTCOMES,
    *,
    tokens_per_decode_step: float | None = None,
) -> EvalResult:
    """The figures of an evaluation's graded groups, all of the same number of samples.

    Without `correct` among `grade_outcomes` (how grading can end) there are no figures of correctness.
    """
    is_verified = "correct" in grade_outcomes
    rollouts = list(chain.from_iterable(group.rollouts for group in groups))
    num_samples = len(groups[0].rollouts)
    num_correct = [sum(rollout.grade.outcome == "correct" for rollout in group.rollouts) for group in groups]
    shares = [count / num_samples for count in num_correct]
    rewards = [fmean(rollout.grade.reward for rollout in group.rollouts) for group in groups]
    counts = Counter(rollout.grade.outcome for rollout in rollouts)
    lengths = [len(rollout.token_ids) for rollout in rollouts]
    return EvalResult(
        num_problems=len(groups),
        num_samples=num_samples,
        accuracy=fmean(shares) if is_verified else None,
        interval=confidence_interval(shares) if is_verified else None,
        solved_any=fmean(share > 0 for share in shares) if is_verified else None,
        pass_at={
            k: estimate([pass_at_k(num_samples, count, k) for count in num_correct])
            for k in (pass_at_ks(num_samples) if is_verified else ())
        },
        reward=fmean(rollout.grade.reward for rollout in rollouts),
        reward_interval=mean_interval(rewards),
        mean_length=fmean(lengths),
        median_length=float(median(lengths)),
        max_length=max(lengths),
        truncated_share=fmean(rollout.finish_reason == "length" for rollout in rollouts),
        outcomes={outcome: counts[outcome] for outcome in grade_outcomes},
        num_tokens=sum(lengths),
        seconds=seconds,
        tokens_per_decode_step=tokens_per_decode_step,
        environment={
            name.removeprefix("environment/"): value
            for name, value in turn_metrics(rollouts).items()
            if name.startswith("environment/")
        },
    )
