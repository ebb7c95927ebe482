"""Held-out accuracy and reward with confidence intervals, through the same decoder and graders as training.

In training it is `evaluate`; outside of it (`srtrl eval`) `run_evals`: a policy on the held-out problems of one task,
or of several, one after the other. At the end of the file are its statistics: pass@k, means with a 95% confidence
interval, and maj@N, whether the answer that most of a problem's samples give is right (Wang et al. 2022, arXiv
2203.11171).
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from statistics import fmean, median, stdev
from typing import TYPE_CHECKING

from srtrl.model.cpu_threads import set_cpu_threads
from srtrl.ranks.processes import ONE_RANK, Ranks
from srtrl.recipe.schema import Recipe
from srtrl.rollout.collect import Collector, OnProgress, collect_rollouts
from srtrl.run.checkpoint import MANIFEST, check_policy, checkpoint_name, latest_checkpoint, list_checkpoints
from srtrl.run.metrics import turn_metrics
from srtrl.tasks.base import Task, load_task
from srtrl.tasks.final_answer import extractor
from srtrl.tasks.grading import Grader
from srtrl.trainer import build
from srtrl.types import VERIFIED_OUTCOMES, GradeOutcome, Prompt, RolloutGroup

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from srtrl.engine.engine import Engine
    from srtrl.environments.conversations import Conversations

Z_95 = 1.959963984540054
"""The 97.5% quantile of the normal distribution."""
INTEGER = re.compile(r"-?[0-9]{1,18}")


@dataclass(kw_only=True, slots=True, frozen=True)
class Estimate:
    """A share, with its 95% confidence interval."""

    value: float
    low: float
    high: float


@dataclass(kw_only=True, slots=True, frozen=True)
class EvalResult:
    """How a policy did on held-out problems."""

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
    """How the turns went, by the names of the metrics `environment/...`; empty where samples are single turns."""

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
    groups = collect_rollouts(engine, collector, list(enumerate(prompts)))
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


# --- srtrl eval -------------------------------------------------------------------------------------------------------


def resolve_eval_source(model_or_run: str, *, step: int | None = None) -> tuple[str, Path | None]:
    """What `srtrl eval MODEL_OR_RUN` names: a run's newest checkpoint, or that of `step`, and its recipe; or a model.

    Returns:
        The model as given and None; for a run folder (one with `recipe.yaml`) the checkpoint and its recipe's path.

    Raises:
        ValueError: the run has no checkpoint (of that step), or the policy in it is damaged, or `step` is given for a
            model.
    """
    folder = Path(model_or_run)
    recipe_path = folder / "recipe.yaml"
    if not recipe_path.is_file():
        if step is not None:
            raise ValueError(f"--step: {model_or_run} is not a run folder (it has no recipe.yaml)")
        if folder.name.startswith("step_") and (folder / MANIFEST).is_file():  # the checkpoint of a run
            check_policy(folder)
        return model_or_run, None
    checkpoints = folder / "checkpoints"
    chosen = latest_checkpoint(checkpoints) if step is None else checkpoints / checkpoint_name(step)
    if chosen is None or not chosen.is_dir():
        known = ", ".join(path.name for path in list_checkpoints(checkpoints)) or "none"
        raise ValueError(f"{folder} has no checkpoint{'' if step is None else f' of step {step}'}; there: {known}")
    check_policy(chosen)
    return str(chosen), recipe_path


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


def run_evals(
    model: str,
    jobs: Sequence[EvalJob],
    *,
    on_progress: Callable[[str, int, int], None] = lambda *_: None,
    on_compile: OnProgress = lambda *_: None,
    ranks: Ranks = ONE_RANK,
) -> Iterator[EvalOutcome]:
    """Evaluate the policy `model` on each job, with one decoder; an outcome as soon as its job is done.

    All problems are loaded before the weights, so that what is wrong with the last job's is not said after hours.

    Args:
        model: Hugging Face folder, hub name, `bundled:tiny`, or a checkpoint. `recipe.model.path` is not read;
            `recipe.model.tokenizer` is, where it is set.
        jobs: At least one.
        on_progress: Called after each completion, with the job's name, the number of completions so far and of those
            that are requested.
        on_compile: See `Engine.warm_up`.
        ranks: Share the samples; each of them has all outcomes.

    Raises:
        ValueError: the model or a task cannot be loaded, or a task has no held-out problems.
    """
    recipes = [
        job.recipe.model_copy(update={"model": job.recipe.model.model_copy(update={"path": model})}) for job in jobs
    ]
    base = max(recipes, key=lambda one: one.rollout.max_prompt_tokens + one.rollout.max_new_tokens)
    set_cpu_threads(base.num_threads)
    tokenizer = build.build_tokenizer(base)
    talks = [build.build_conversations(recipe, tokenizer) for recipe in recipes]
    tasks = [
        load_task(recipe, tokenizer, tools=talk.tools if talk else ())
        for recipe, talk in zip(recipes, talks, strict=True)
    ]
    prompts = [held_out_prompts(task, recipe) for task, recipe in zip(tasks, recipes, strict=True)]
    policy = build.build_policy(base, model, build.choose_device(base))
    num_samples = max(
        len(problems) * recipe.eval.num_samples for recipe, problems in zip(recipes, prompts, strict=True)
    )
    engine = build.build_engine(base, policy, tokenizer, num_samples=num_samples)
    engine.warm_up(on_compile)
    for job, recipe, task, problems, talk in zip(jobs, recipes, tasks, prompts, talks, strict=True):
        grader = Grader(task, recipe.rewards, recipe.grading, recipe.rollout.max_new_tokens)
        with grader, talk or contextlib.nullcontext():
            show = functools.partial(on_progress, job.name)
            end_ids = build.response_end_ids(model, tokenizer)
            groups, result = evaluate(
                recipe, problems, engine, grader, tokenizer, end_ids, on_progress=show, conversations=talk, ranks=ranks
            )
        extract = extractor(task.verifier)
        if extract is not None and recipe.eval.num_samples > 1:
            result = replace(result, majority=estimate(majority_scores(groups, extract)))
        yield EvalOutcome(job=job, task=task, groups=groups, result=result)


# --- Statistics -------------------------------------------------------------------------------------------------------


def estimate(scores: Sequence[float]) -> Estimate:
    """The mean of one score in [0, 1] for each problem; problems are the independent units (`confidence_interval`)."""
    low, high = confidence_interval(scores)
    return Estimate(value=fmean(scores), low=low, high=high)


def confidence_interval(scores: Sequence[float]) -> tuple[float, float]:
    """95% confidence interval of the mean of the problems' scores.

    Where every score is 0 or 1 (one sample a problem, pass@N of N samples): the Wilson score interval (Wilson 1927;
    Brown, Cai and DasGupta 2001, section 3.1.1). Else mean +- z s / sqrt(n) over the n problems' scores, the standard
    error clustered by problem of Miller 2024, "Adding Error Bars to Evals" (arXiv 2411.00640), section 2.2,
    clipped to [0, 1]. Where the scores do not vary (or there is one problem) s does not estimate the error, and
    Wilson's interval for n problems is used, which is wider.
    """
    mean, n = fmean(scores), len(scores)
    spread = stdev(scores) if n > 1 else 0.0
    if spread == 0.0 or all(score in (0.0, 1.0) for score in scores):
        return wilson_interval(mean, n)
    low, high = mean_interval(scores)
    return max(0.0, low), min(1.0, high)


def mean_interval(scores: Sequence[float]) -> tuple[float, float]:
    """95% confidence interval of the mean of any numbers, one for each problem: mean +- z s / sqrt(n).

    Without spread, or for one problem, it is the mean alone, which does not say that there is no error.
    """
    mean, n = fmean(scores), len(scores)
    half = Z_95 * (stdev(scores) if n > 1 else 0.0) / math.sqrt(n)
    return mean - half, mean + half


def wilson_interval(share: float, n: int) -> tuple[float, float]:
    """Wilson's 95% score interval of a proportion `share` seen in `n` independent trials."""
    z2 = Z_95 * Z_95
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = Z_95 / (1 + z2 / n) * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Chance that at least one of k of a problem's samples is right, estimated without bias from `num_samples` of them.

    1 - C(n - c, k) / C(n, k): Chen et al. 2021, "Evaluating Large Language Models Trained on Code" (arXiv 2107.03374),
    equation 1; with whole numbers, so exact but for the last division.
    """
    assert 1 <= k <= num_samples
    assert 0 <= num_correct <= num_samples
    return 1 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def pass_at_ks(num_samples: int) -> list[int]:
    """The k that are reported for N samples: 1, 2, 4, ... and N itself."""
    return sorted({*(2**power for power in range(num_samples.bit_length())), num_samples})


def macro_average(estimates: Sequence[Estimate]) -> Estimate:
    """The mean over benchmarks, each of the same weight, of any size.

    The benchmarks are fixed and their problems independent, so squared errors add. The two arms of each benchmark's
    interval stand for its error below and above, which differ near 0% and 100% (MOVER: Zou and Donner 2008,
    "Construction of confidence limits about effect measures", section 2); for symmetric intervals this is the standard
    error sqrt(sum of se^2) / number of benchmarks.
    """
    value = fmean(one.value for one in estimates)
    below = math.hypot(*(one.value - one.low for one in estimates)) / len(estimates)
    above = math.hypot(*(one.high - one.value for one in estimates)) / len(estimates)
    return Estimate(value=value, low=max(0.0, value - below), high=min(1.0, value + above))


def majority_scores(groups: Sequence[RolloutGroup], extract: Callable[[str], str | None]) -> list[float]:
    """For each problem, the chance that its most frequent answer is right.

    The votes are the samples with a final answer whose grading did not fail; the others abstain. Samples that the
    verifier accepted give the same answer, the reference; wrong samples vote for the text that `extract` returns. Of n
    most frequent answers each is taken with chance 1/n, so a tie that the right one is in counts 1/n; where nobody
    votes, the score is 0.
    """
    scores = []
    for group in groups:
        num_right = sum(rollout.grade.outcome == "correct" for rollout in group.rollouts)
        answers = [extract(rollout.said) for rollout in group.rollouts if rollout.grade.outcome == "wrong"]
        sizes = list(Counter(_plain(answer) for answer in answers if answer is not None).values())
        wins = num_right > 0 and num_right >= max(sizes, default=0)
        scores.append(wins / (1 + sizes.count(num_right)))
    return scores


def _plain(answer: str) -> str:
    """An answer without spaces, an integer without leading zeros: what is written differently alone is equal."""
    answer = "".join(answer.split())
    return str(int(answer)) if INTEGER.fullmatch(answer) else answer
