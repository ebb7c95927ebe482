"""The metrics of a step's rollouts, and one line about a step for people."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import get_args

from srtrl.model.transformer import ModelConfig, model_flops
from srtrl.recipe import Recipe
from srtrl.trainer.out_of_memory import GIB, PeakMemory
from srtrl.types import GradeOutcome, RolloutGroup, TrainSequence

NO_STAGES = frozenset({"step", "tokens_per_second", "update_tokens_per_second", "update_mfu"})
"""Names under `time/` that are not the seconds of a stage: the sum of all, and speeds."""


def rollout_metrics(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """What the policy did in a step, before any filter.

    `reward/mean` is the weighted sum, `reward/<name>` each reward's own unweighted mean; `accuracy` the share of
    samples graded correct (a failed grading is not correct); `groups/all_right` and `groups/all_wrong` count groups
    whose samples are all correct, or none of them; lengths in response tokens; `tokens/prompt` counts a draw's prompt
    once, for its pages are shared by the samples.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    lengths = [len(rollout.token_ids) for rollout in rollouts]
    outcomes = Counter(rollout.grade.outcome for rollout in rollouts)
    metrics = {"reward/mean": fmean(rollout.grade.reward for rollout in rollouts)}
    for name in rollouts[0].grade.parts:
        metrics[f"reward/{name}"] = fmean(rollout.grade.parts[name] for rollout in rollouts)
    right = [[rollout.grade.outcome == "correct" for rollout in group.rollouts] for group in groups]
    metrics |= {
        "groups/all_right": sum(map(all, right)),
        "groups/all_wrong": len(right) - sum(map(any, right)),
        "accuracy": outcomes["correct"] / len(rollouts),
        "length/mean": fmean(lengths),
        "length/max": max(lengths),
        "length/truncated_share": fmean(rollout.finish_reason == "length" for rollout in rollouts),
        "tokens/prompt": sum(len(group.prompt.token_ids) for group in groups),
        "tokens/response": sum(lengths),
    }
    return metrics | {f"grading/{outcome}": outcomes[outcome] for outcome in get_args(GradeOutcome)}


def with_update_metrics(row: Mapping[str, float], update: Mapping[str, float]) -> dict[str, float]:
    """A step's row and the metrics of its update; no name in both.

    Raises:
        ValueError: a name is in both. The objective has refused every name of ours, so that one is of the user's.
    """
    if taken := sorted(row.keys() & update.keys()):
        raise ValueError(
            f"two parts of a step log the metric `{taken[0]}`, the update (algorithm.loss) and another "
            "(rollout.drafter, for instance): rename one of them"
        )
    return {**row, **update}


def update_flops(recipe: Recipe, config: ModelConfig, sequences: Sequence[TrainSequence]) -> float:
    """Operations of a policy update on these sequences: all epochs, and the forward pass of `recompute`."""
    flops = model_flops(
        config,
        [len(sequence.token_ids) for sequence in sequences],
        num_targets=sum(len(sequence.rollout_logprobs) for sequence in sequences),
    )
    num_passes = recipe.train.num_epochs + (1 / 3 if recipe.algorithm.old_logprobs == "recompute" else 0)
    return num_passes * flops


def memory_metrics(memory: PeakMemory) -> dict[str, float]:
    """`memory/peak_gib`: most that tensors took since the last call; nothing where the device is no CUDA device."""
    return {"memory/peak_gib": memory.take() / GIB} if memory.device.type == "cuda" else {}


def timed_stages(rows: Iterable[Mapping[str, float]]) -> set[str]:
    """Names of the stages whose seconds are in these rows of `metrics.jsonl`, without `time/`."""
    return {name.removeprefix("time/") for row in rows for name in row if name.startswith("time/")} - NO_STAGES


def time_metrics(
    seconds: Mapping[str, float],
    metrics: Mapping[str, float],
    *,
    num_update_flops: float = 0.0,
    peak_tflops: float | None = None,
) -> dict[str, float]:
    """`time/<stage>` and their sum `time/step` (evaluation included) in seconds; the speeds of decoder and update.

    Args:
        seconds: by stage.
        metrics: the step's row so far.
        num_update_flops: see `update_flops`; of no use where `metrics` has no `tokens/update`.
        peak_tflops: `train.peak_tflops`.
    """
    timed = {f"time/{stage}": value for stage, value in seconds.items()}
    timed["time/step"] = sum(seconds.values()) + metrics.get("time/eval", 0.0)
    timed["time/tokens_per_second"] = metrics["tokens/response"] / seconds["rollout"]
    if "tokens/update" in metrics:
        timed["time/update_tokens_per_second"] = metrics["tokens/update"] / seconds["update"]
        if peak_tflops is not None:
            timed["time/update_mfu"] = num_update_flops / seconds["update"] / (1e12 * peak_tflops)
    return timed


def describe_step(metrics: Mapping[str, float]) -> str:
    """One line about a training step."""
    parts = [
        f"reward {metrics['reward/mean']:.3f}",
        f"accuracy {metrics['accuracy']:.1%}",
        f"length {metrics['length/mean']:.0f}",
        f"{metrics['time/tokens_per_second']:,.0f} tokens/s",
        f"{metrics['time/step']:.1f} s",
    ]
    failed = sum(metrics[f"grading/{outcome}"] for outcome in ("timeout", "crash", "error"))
    if failed:
        parts.append(f"{failed:.0f} gradings failed")
    if metrics["groups/dropped"]:
        parts.append(f"{metrics['groups/kept']:.0f} of {metrics['data/draws']:.0f} groups kept")
    if metrics["groups/short"]:
        parts.append(f"{metrics['groups/short']:.0f} groups too few: rollout.max_draws reached")
    if metrics["groups/kept"] == 0:
        parts.append("no group left by the filters: no update")
    elif "grad_norm" not in metrics and "critic/grad_norm" in metrics:
        parts.append("critic warm-up: the policy rests")
    elif "grad_norm" not in metrics:
        parts.append("all samples cut at the length limit (algorithm.overlong_filtering): no update")
    return "  ".join(parts)
