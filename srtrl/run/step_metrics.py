"""The metrics of a step, one line about it, and the figures of a run.

The figures of a run are computed from `metrics.jsonl`, so that those of a resumed run are complete.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from statistics import fmean, pstdev
from typing import TYPE_CHECKING

import numpy as np

from srtrl.metrics import MetricRow
from srtrl.recipe.schema import Recipe
from srtrl.types import VERIFIED_OUTCOMES, GradeOutcome, Rollout, StepRollouts, TrainSequence

if TYPE_CHECKING:
    import torch

    from srtrl.model.transformer import ModelConfig

NO_STAGES = frozenset({"step", "tokens_per_second", "update_tokens_per_second", "update_tflops"})
"""Names under `time/` that are not the seconds of a stage: their total, and speeds."""
MANY_TRUNCATED = 0.5
"""With a larger share of truncated responses there is a notice."""
IN_EACH_STEP = (
    *("reward/mean", "data/epoch", "engine/tokens", "engine/decode_steps", "engine/tokens_per_decode_step"),
    *("time/rollout", "time/step"),
)
"""Metrics of each training step that `run_figures` and the report read."""
TRAINING_REWARD, TIME = "training reward, first to last", "time of all stages"
"""Figures of a run."""


def rollout_metrics(step: StepRollouts, grade_outcomes: Sequence[GradeOutcome] = VERIFIED_OUTCOMES) -> dict[str, float]:
    """The metrics of a step's rollouts, before any filter but for `groups/kept` and `groups/dropped`.

    `reward/mean` and `reward/std` are of the weighted sum, `reward/<name>` is each reward's own unweighted mean: over
    the samples that could be graded, 0 where there is none. `accuracy` is the share of all samples that were graded
    correct (a failed grading is not correct); `groups/all_right` and `groups/all_wrong` count groups
    whose samples are all correct, or none of them; these three are absent where `grade_outcomes` (how grading can end)
    has no `correct`. Lengths in response tokens; `tokens/prompt` counts a draw's prompt once, for its pages are shared
    by the samples.
    """
    groups = step.groups
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    lengths = [len(rollout.response.token_ids) for rollout in rollouts]
    outcomes = Counter(rollout.grade.outcome for rollout in rollouts)
    grades = [rollout.grade for rollout in rollouts if rollout.grade.is_graded] or [rollouts[0].grade]
    rewards = [grade.reward for grade in grades]
    metrics = {"reward/mean": fmean(rewards), "reward/std": pstdev(rewards)}
    for name in dict.fromkeys(chain(*(grade.parts for grade in grades))):
        metrics[f"reward/{name}"] = fmean(grade.parts[name] for grade in grades if name in grade.parts)
    if "correct" in grade_outcomes:
        right = [[rollout.grade.outcome == "correct" for rollout in group.rollouts] for group in groups]
        metrics |= {
            "groups/all_right": sum(map(all, right)),
            "groups/all_wrong": len(right) - sum(map(any, right)),
            "accuracy": outcomes["correct"] / len(rollouts),
        }
    metrics |= {
        "length/mean": fmean(lengths),
        "length/max": max(lengths),
        "length/truncated_share": fmean(rollout.response.finish_reason == "length" for rollout in rollouts),
        "tokens/prompt": sum(len(group.prompt.token_ids) for group in groups),
        "tokens/response": sum(lengths),
        "data/draws": len(groups),
        "groups/kept": len(step.kept),
        "groups/dropped": len(groups) - len(step.kept),
    }
    metrics |= {f"grading/{outcome}": outcomes[outcome] for outcome in grade_outcomes}
    metrics |= step.metrics
    return metrics | turn_metrics([rollout for rollout in rollouts if rollout.conversation is not None])


def turn_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Metrics of the turns of a step's samples, `environment/...`; nothing where samples are single turns.

    Calls are those that the format found, read or not; a valid one could be read and is of a known tool. The seconds of
    tools depend on timing: `engine/tool_seconds_median` and `engine/tool_seconds_p99`.
    """
    talks = [rollout.conversation for rollout in rollouts if rollout.conversation is not None]
    if not talks:
        return {}
    outcomes = Counter(outcome for talk in talks for outcome in talk.outcomes)
    num_calls = sum(outcomes.values())
    num_valid = num_calls - outcomes["malformed"] - outcomes["unknown_tool"] - outcomes["not_run"]
    stops = Counter(talk.stop_reason for talk in talks)
    tokens: Counter[str] = Counter()
    for kind, length in (segment for talk in talks for segment in talk.segments):
        tokens[kind] += length
    own: defaultdict[str, list[float]] = defaultdict(list)
    for name, value in (pair for talk in talks for pair in talk.metrics):
        own[name].append(value)
    seconds = [second for talk in talks for second in talk.tool_seconds]
    metrics = {
        "environment/turns_mean": fmean(talk.num_turns for talk in talks),
        "environment/turns_max": max(talk.num_turns for talk in talks),
        "environment/call_share": fmean(bool(talk.outcomes) for talk in talks),
        "environment/calls": num_calls,
        **{f"environment/outcome_{name}": count for name, count in sorted(outcomes.items())},
        **{f"environment/stop_{name}": count / len(talks) for name, count in sorted(stops.items())},
        **{f"tokens/{kind}": tokens[kind] for kind in ("model", "observation", "boundary")},
        **{f"environment/own/{name}": fmean(values) for name, values in sorted(own.items())},
    }
    if num_calls:
        metrics["environment/valid_call_share"] = num_valid / num_calls
    if seconds:
        metrics["engine/tool_seconds_median"] = float(np.median(seconds))
        metrics["engine/tool_seconds_p99"] = float(np.quantile(seconds, 0.99))
    return metrics


def model_flops(
    config: ModelConfig, lengths: Sequence[int], *, num_targets: int | None = None, shared: Sequence[int] = ()
) -> float:
    """Operations of one forward and backward pass over sequences of these lengths, packed without padding.

    A matrix product of [m, k] and [k, n] is 2 m k n operations, and its backward pass two such products:

        forward  = 2 N T + 2 V D R + sum over layers of 4 H E x sum of (pairs of L - pairs of C)
        in all   = 3 x forward

    with N weights of the layers' matrices, R tokens whose logits are computed, L tokens of a sequence, of which C are
    computed in another, and T the sum of L - C. The last term is attention: q k' and weights x v over the pairs that
    causality and the layer's window leave: n (n + 1) / 2 in n tokens without a window. Norms, rotary embedding and
    softmax are left out, and so is what `model.gradient_checkpointing` computes twice: this is what the model needs
    ("model FLOPs"), not what was done.

    Chowdhery et al., "PaLM" (2022), appendix B, which counts L x L of attention, masked half included, and the head for
    every token.

    Args:
        config: shape of the model.
        lengths: tokens of each sequence.
        num_targets: response tokens, for which alone the update computes logits; by default all tokens. 0 for a critic.
        shared: C of each sequence; by default 0.
    """
    num_tokens = sum(lengths) - sum(shared)
    num_targets = num_tokens if num_targets is None else num_targets
    width, attention_width = config.hidden_size, config.num_attention_heads * config.head_dim
    layer_weights = width * (attention_width + 2 * config.num_key_value_heads * config.head_dim)  # q, k, v
    layer_weights += attention_width * width  # output
    layer_weights += 3 * width * config.intermediate_size  # gate, up, down
    num_pairs = sum(
        number * (_num_pairs(lengths, window) - _num_pairs(shared, window))
        for window, number in Counter(kind.window for kind in config.layer_kinds).items()
    )
    forward = 2 * config.num_hidden_layers * layer_weights * num_tokens
    forward += 2 * config.vocab_size * width * num_targets
    forward += 4 * attention_width * num_pairs
    return 3.0 * forward


def _num_pairs(lengths: Sequence[int], window: int | None) -> int:
    """Pairs (token, token it sees) in sequences of these lengths, under a window."""
    outside = [max(0, length - window) if window else 0 for length in lengths]
    return sum(n * (n + 1) // 2 for n in lengths) - sum(n * (n + 1) // 2 for n in outside)


def update_flops(recipe: Recipe, config: ModelConfig, sequences: Sequence[TrainSequence]) -> float:
    """Operations of a policy update on these sequences, in all epochs; a common beginning of samples counts once."""
    from srtrl.rollout.packing import shared_tokens, sharing_order

    sequences = [sequences[index] for index in sharing_order(sequences)]
    flops = model_flops(
        config,
        [len(sequence.token_ids) for sequence in sequences],
        num_targets=sum(len(sequence.rollout_logprobs) for sequence in sequences),
        shared=shared_tokens(sequences),
    )
    return recipe.train.num_epochs * flops


def memory_metrics(device: torch.device) -> dict[str, float]:
    """`memory/peak_gib`: most that tensors took since the last call; nothing where the device is no CUDA device."""
    if device.type != "cuda":
        return {}
    import torch

    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return {"memory/peak_gib": peak / 2**30}


def time_metrics(
    seconds: Mapping[str, float],
    metrics: Mapping[str, float],
    num_update_flops: float,
) -> dict[str, float]:
    """`time/<stage>` and their sum `time/step` (evaluation included) in seconds; the speeds of decoder and update.

    Args:
        seconds: by stage.
        metrics: the step's row so far.
        num_update_flops: see `update_flops`; of no use where `metrics` has no `tokens/update`.
    """
    timed = {f"time/{stage}": value for stage, value in seconds.items()}
    timed["time/step"] = sum(seconds.values()) + metrics.get("time/eval", 0.0)
    timed["time/tokens_per_second"] = metrics["engine/tokens"] / seconds["rollout"]
    if "tokens/update" in metrics:
        timed["time/update_tokens_per_second"] = metrics["tokens/update"] / seconds["update"]
        timed["time/update_tflops"] = num_update_flops / seconds["update"] / 1e12
    return timed


def describe_step(metrics: MetricRow) -> str:
    """A few words about a training step beside its reward: the accuracy where it is not the reward; what drafts save.

    Of drafts nothing is said while they save nothing, as in a first epoch with few samples of a prompt at a time.
    """
    parts = []
    if abs(metrics.get("accuracy", metrics["reward/mean"]) - metrics["reward/mean"]) > 1e-9:
        parts.append(f"accuracy {metrics['accuracy']:.1%}")
    time = f"{metrics['time/step']:.1f} s"
    if (seconds := metrics.get("time/compile", 0)) >= 1:
        time += f" ({seconds:.1f} s compiling)"
    elif (drafted := drafted_steps([metrics])) and (rate := _tokens_per_decode(drafted)) >= 1.005:
        parts.append(f"{rate:.2f} tokens per decode step")
    return "  ".join([*parts, time])


def has_graded(metrics: MetricRow) -> bool:
    """Whether a sample of the training step could be graded."""
    return any(metrics.get(f"grading/{outcome}") for outcome in ("correct", "wrong", "graded"))


def step_problems(metrics: MetricRow) -> str:
    """Problems of a training step that a reader must know; empty if there is none."""
    parts = []
    failed = sum(metrics[f"grading/{outcome}"] for outcome in ("timeout", "crash", "error"))
    if failed:
        parts.append(f"{failed:.0f} grading{'s' if failed > 1 else ''} failed: left out")
    if num_raised := metrics.get("environment/outcome_raised"):
        parts.append(f"the environment raised in {num_raised:.0f} turn{'s' if num_raised > 1 else ''}")
    if metrics.get("tokens/unknown"):
        parts.append(f"{metrics['tokens/unknown']:.0f} tokens that the tokenizer does not have")
    if metrics["groups/dropped"]:
        parts.append(f"{metrics['groups/kept']:.0f} of {metrics['data/draws']:.0f} groups kept")
    if metrics["length/truncated_share"] > MANY_TRUNCATED:
        parts.append(f"{metrics['length/truncated_share']:.0%} of the samples reached rollout.max_new_tokens")
    if metrics["groups/short"]:
        parts.append(f"{metrics['groups/short']:.0f} groups too few: rollout.max_draws reached")
    if "critic/grad_norm" in metrics and "grad_norm" not in metrics:
        parts.append("critic warm-up: no update of the policy")
    elif "grad_norm" not in metrics:
        parts.append(f"no update: the filters {'and failed gradings ' if failed else ''}left no sample")
    elif metrics.get("groups/zero_advantage_share") == 1 and metrics["grad_norm"] == 0:
        parts.append("nothing learned: all advantages are 0")
    return "; ".join(parts)


def run_figures(rows: Sequence[MetricRow]) -> dict[str, str]:
    """The figures of a whole run by their names, for people, from the rows of `metrics.jsonl`.

    The first and the last evaluation with their 95% intervals, the training rewards, tokens and decode steps, and the
    seconds by stage.

    Raises:
        ValueError: a row lacks a metric that those of each training step, or of each evaluation, have.
    """
    steps = [row for row in rows if row["step"] > 0]
    for row in steps:
        _check_has(row, IN_EACH_STEP)
    evals = _evaluations(rows)
    figures: dict[str, str] = {}
    if evals:
        before, after, name = evals[0], evals[-1], main_figure(evals[-1])
        figures["held-out problems x samples"] = "{num_problems} x {num_samples}".format_map(after)
        for held_out in (before, after)[before is after :]:
            when = f"after step {held_out['step']}" if held_out["step"] else "before training"
            figures[f"held-out {name} {when}"] = with_interval(held_out)
        if before is not after:
            gain = round(after[name], 3) - round(before[name], 3)  # of the digits that are printed
            figures["gain"] = f"{100 * gain:+.1f} points" if name == "accuracy" else f"{gain:+.3f}"
    if steps:
        first, last = (row["reward/mean"] for row in (steps[0], steps[-1]))
        figures[TRAINING_REWARD] = f"{first:.3f} to {last:.3f}"
    if steps and (share := fmean(row.get("length/truncated_share", 0) for row in steps)) > MANY_TRUNCATED:
        figures["reached rollout.max_new_tokens"] = f"{share:.0%} of the samples"
    if num_skipped := sum("grad_norm" not in row and "critic/grad_norm" not in row for row in steps):
        figures["steps with nothing to learn from"] = str(num_skipped)
    if steps:
        num_tokens, num_steps = (
            int(sum(row[f"engine/{name}"] for row in steps)) for name in ("tokens", "decode_steps")
        )
        num_samples = sum(map(_num_decodes, steps)) / max(num_steps, 1)
        figures["sampled tokens"] = f"{num_tokens:,} in {num_steps:,} decode steps of {num_samples:.1f} samples"
        figures |= draft_figures(steps)
    stages = longest_stages(rows)
    total = sum(seconds for _, seconds in stages)
    shares = ", ".join(f"{name} {seconds / max(total, 1e-9):.0%}" for name, seconds in stages if 200 * seconds > total)
    minutes, seconds = divmod(round(total), 60)
    time = f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min {seconds} s"
    figures[TIME] = f"{time} ({shares})"
    return figures


def drafted_steps(steps: Sequence[MetricRow]) -> list[MetricRow]:
    """Those of these training steps whose rollouts had a drafter, not `none`."""
    return [row for row in steps if "engine/cache_hit_rate" in row]


def draft_figures(steps: Sequence[MetricRow]) -> dict[str, str]:
    """Savings of drafts in these training steps, for people, exact but for the seconds; empty if none was drafted.

    Steps of earlier versions have no `engine/drafting_seconds`.
    """
    if not (steps := drafted_steps(steps)):
        return {}
    figures = {"tokens per decode step": f"{_tokens_per_decode(steps):.2f} (1 without drafts)"}
    first, last = (
        [row for row in steps if int(row["data/epoch"]) == int(end["data/epoch"])] for end in (steps[0], steps[-1])
    )
    if first != last:
        figures["tokens per decode step, by epoch"] = (
            f"{_tokens_per_decode(first):.2f} in the first, {_tokens_per_decode(last):.2f} in the last"
        )
    counted = [row for row in steps if "engine/verified_per_decode_step" in row]
    if num_nodes := round(sum((row["engine/verified_per_decode_step"] - 1) * _num_decodes(row) for row in counted)):
        num_accepted = round(sum(row["engine/tokens"] - _num_decodes(row) for row in counted))
        figures["accepted of verified draft nodes"] = (
            f"{num_accepted:,} of {num_nodes:,} ({num_accepted / num_nodes:.0%})"
        )
    timed = [row for row in steps if "engine/drafting_seconds" in row]
    if seconds := sum(row["engine/drafting_seconds"] for row in timed):
        share = seconds / sum(row["time/rollout"] for row in timed)
        figures["time of drafting"] = f"{seconds:.1f} s, {share:.1%} of the rollouts' time"
    return figures


def headline(figures: Mapping[str, str]) -> dict[str, str]:
    """The first of `run_figures` to see: what drafts save, the last evaluation or the training reward, the time."""
    held_out = [name for name in figures if name.startswith(("held-out accuracy", "held-out reward"))]
    names = ("tokens per decode step", *(held_out[-1:] or [TRAINING_REWARD]), TIME)
    shown = {name: figures[name] for name in names if name in figures}
    return shown | {TIME: figures[TIME].partition(" (")[0]}  # the stages have a bar of their own


def _evaluations(rows: Sequence[MetricRow]) -> list[MetricRow]:
    """Those among the rows of `metrics.jsonl`, as `held_out_figures`; ValueError as of `run_figures`."""
    evaluations = [held_out_figures(row) for row in rows if "eval/accuracy" in row or "eval/reward" in row]
    for row in evaluations:
        _check_has(row, ("num_problems", "num_samples", *(f"{main_figure(row)}{end}" for end in ("", "_low", "_high"))))
    return evaluations


def _check_has(row: MetricRow, names: Iterable[str]) -> None:
    """Raise ValueError if a row of `metrics.jsonl` lacks one of these metrics."""
    if missing := [name for name in names if name not in row]:
        raise ValueError(f"metrics.jsonl: the row of step {row['step']:g} has no {missing[0]}: was the file changed?")


def longest_stages(rows: Sequence[MetricRow]) -> list[tuple[str, float]]:
    """The stages with their seconds in all rows, the longest first."""
    seconds = {stage: sum(row.get(f"time/{stage}", 0.0) for row in rows) for stage in sorted(timed_stages(rows))}
    return sorted(seconds.items(), key=lambda pair: -pair[1])


def _num_decodes(row: MetricRow) -> float:
    """Samples in the decode steps of a training step, each counted once for every decode step."""
    return row["engine/tokens"] / max(row["engine/tokens_per_decode_step"], 1e-9)


def _tokens_per_decode(steps: Sequence[MetricRow]) -> float:
    """New tokens of a sample in a decode step, on average over these training steps."""
    return sum(row["engine/tokens"] for row in steps) / max(sum(map(_num_decodes, steps)), 1)


def held_out_figures(row: Mapping[str, float]) -> MetricRow:
    """The evaluation in a row of `metrics.jsonl`, without `eval/`, and its step."""
    figures = {name.removeprefix("eval/"): value for name, value in row.items() if name.startswith("eval/")}
    return {"step": row.get("step", 0), **figures}


def describe_held_out(metrics: Mapping[str, float]) -> str:
    """The main one of these `eval/...` metrics: `held-out accuracy 50.7% (95%: 48.1% to 53.3%)`, or the reward."""
    held_out = held_out_figures(metrics)
    return f"held-out {main_figure(held_out)} {with_interval(held_out)}"


def main_figure(held_out: Mapping[str, float]) -> str:
    """The figure that says how good a policy is; without a verifier there is no accuracy."""
    return "accuracy" if "accuracy" in held_out else "reward"


def with_interval(held_out: Mapping[str, float]) -> str:
    """That figure with its 95% interval: `50.7% (95%: 48.1% to 53.3%)`."""
    name = main_figure(held_out)
    digits = ".1%" if name == "accuracy" else ".3f"
    value, low, high = (format(held_out[f"{name}{end}"], digits) for end in ("", "_low", "_high"))
    is_known = held_out[f"{name}_low"] < held_out[f"{name}_high"]  # not for one problem, or where all are alike
    return f"{value} (95%: {low} to {high})" if is_known else value


def timed_stages(rows: Iterable[Mapping[str, float]]) -> set[str]:
    """Names of the stages whose seconds are in these rows of `metrics.jsonl`, without `time/`."""
    return {name.removeprefix("time/") for row in rows for name in row if name.startswith("time/")} - NO_STAGES
