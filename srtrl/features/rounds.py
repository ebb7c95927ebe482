"""What the off-policy modes share: samples that later steps go on from, and rounds of draws.

docs/off_policy.md says what each mode learns from, and its bias.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file
from safetensors.numpy import save as to_safetensors

from srtrl.environments.record import digest_of
from srtrl.metrics import write_atomic
from srtrl.rollout.collect import Collector
from srtrl.tasks.base import TaskBase
from srtrl.trainer.credit import groups_to_learn_from
from srtrl.trainer.sampling import Collected, RolloutContext, Sampler
from srtrl.types import FinishReason, Prompt, Response, RolloutGroup, SampleKey, TrainSequence

FILE = "earlier_samples.safetensors"
"""Of a checkpoint, where there are any."""
PER_TOKEN = ("token_ids", "rollout_logprobs", "policy_versions")
"""Fields of a response with a number for each token."""
REASONS: tuple[FinishReason | None, ...] = (None, "stop", "length")
"""Finish reasons, as they are numbered in the file."""


class RoundsSampler(Sampler):
    """Takes a step's groups in rounds, from samples of earlier steps too. A subclass says what a round is."""

    def __init__(self, context: RolloutContext, task: TaskBase) -> None:
        """See `Sampler`."""
        super().__init__(context, task)
        self.earlier: dict[SampleKey, Response] = {}
        """Samples that later steps go on from, or begin with, by the key of the mode."""

    def going_on(self) -> list[int]:
        """Draws of earlier steps that a round has before new ones."""
        return []

    def round(self, step: int, draws: list[tuple[int, Prompt]], collector: Collector) -> list[RolloutGroup]:
        """The groups of a round; changes `earlier`."""
        raise NotImplementedError

    def collect(self, step: int, collector: Collector) -> Collected:
        """See `Sampler`.

        A round has as many draws as the batch still lacks, first those that go on. There is one round; with dynamic
        sampling as many as it takes to keep `num_wanted` groups or to open `rollout.max_draws`: where all groups of a
        round are complete, these are the groups that `DrawsUntilFull` keeps.
        """
        recipe, end = self.context.recipe, self.num_draws + self.max_draws
        groups: list[RolloutGroup] = []
        kept: list[RolloutGroup] = []
        while True:
            going_on = self.going_on()
            num_new = max(0, recipe.rollout.num_prompts - len(kept) - len(going_on))  # a resume may ask for fewer
            new = range(self.num_draws, min(self.num_draws + num_new, end))
            self.announce(step, new, collector)
            self.num_draws = new.stop
            found = self.round(step, self.draws([*going_on, *new]), collector)
            groups = groups + found
            kept = kept + groups_to_learn_from(found, recipe.algorithm)
            if not recipe.rollout.dynamic_sampling or len(kept) >= self.num_wanted or new.stop == end:
                break
            collector = replace(collector)
        groups, kept = (sorted(some, key=lambda group: group.draw_index) for some in (groups, kept))
        return Collected(groups, kept, collector)

    def credit_metrics(self, sequences: Sequence[TrainSequence]) -> dict[str, float]:
        """See `Sampler`."""
        return off_policy_metrics(sequences)

    def save(self, folder: Path) -> None:
        """Write `earlier`."""
        save_earlier(folder, earlier=self.earlier)

    def load(self, folder: Path) -> None:
        """Read what `save` has written."""
        self.earlier = load_earlier(folder)


def save_earlier(folder: Path, earlier: Mapping[SampleKey, Response]) -> None:
    """Write samples of earlier steps; nothing where there are none."""
    if not earlier:
        return
    prefixes = earlier.values()
    arrays = {
        "keys": np.array(list(earlier), np.int64),
        "lengths": np.array([len(prefix.token_ids) for prefix in prefixes], np.int64),
        "finish_reasons": np.array([REASONS.index(prefix.finish_reason) for prefix in prefixes], np.int64),
        **{name: np.concatenate([getattr(prefix, name) for prefix in prefixes]) for name in PER_TOKEN},
        "turns": np.frombuffer(json.dumps([(p.extensions, p.answers) for p in prefixes]).encode(), np.uint8),
    }
    write_atomic(folder / FILE, to_safetensors(arrays))


def load_earlier(folder: Path) -> dict[SampleKey, Response]:
    """Read what `save_earlier` has written (a resume has compared the file with its checksum)."""
    if not (folder / FILE).is_file():
        return {}
    arrays = load_file(folder / FILE)
    ends = np.cumsum(arrays["lengths"])[:-1]
    parts = zip(*(np.split(arrays[name], ends) for name in PER_TOKEN), strict=True)
    reasons = [REASONS[number] for number in arrays["finish_reasons"].tolist()]
    turns = json.loads(arrays["turns"].tobytes()) if "turns" in arrays else [((), {})] * len(reasons)
    return {
        (first, second): Response(
            **dict(zip(PER_TOKEN, part, strict=True)),
            finish_reason=reason,
            extensions=tuple((start, stop) for start, stop in extensions),
            answers=answers,
        )
        for (first, second), part, reason, (extensions, answers) in zip(
            arrays["keys"].tolist(), parts, reasons, turns, strict=True
        )
    }


def with_own_answers(response: Response) -> Response:
    """The response with the answers to turns that end in it: what was cut off depends on time."""
    if not response.answers:
        return response
    ends = [*(start for start, _ in response.extensions), len(response.token_ids)]
    own = [digest_of(response.token_ids[:end]) for end in ends]
    answers = {digest: response.answers[digest] for digest in own if digest in response.answers}
    return replace(response, answers=answers)


def truncated(prefix: Response, length: int, max_tokens: int) -> Response:
    """The first `length` tokens, but no more than `max_tokens`, with which a response is whole.

    An observation up to or beyond `max_tokens` does not fit: the response ends with the turn before it.
    """
    stop, finish_reason = min(length, max_tokens), None
    if stop == max_tokens:
        finish_reason = prefix.cut(stop).finish_reason or "length"
        for first, last in prefix.extensions:
            if first <= max_tokens <= last:
                stop, finish_reason = first, "stop"
    part = prefix.cut(stop)
    return part if finish_reason is None else replace(part, finish_reason=finish_reason)


def off_policy_metrics(sequences: Sequence[TrainSequence]) -> dict[str, float]:
    """Ages and importance weights of the tokens that a step learns from; see docs/metrics.md.

    `sequences`: With `old_logprobs` by the policy of this step.
    """
    ages = np.concatenate([np.zeros(len(s.targets), np.int32) if s.ages is None else s.ages for s in sequences])
    log_weights = np.concatenate([s.old_logprobs - s.rollout_logprobs for s in sequences if s.old_logprobs is not None])
    weights = np.exp(log_weights.astype(np.float64))
    bins = np.bincount(np.frexp(ages)[1])  # 0, 1, 2-3, 4-7, ...
    return {
        "off_policy/stale_share": float((ages > 0).mean()),
        **{f"off_policy/age_{2 ** (number - 1)}": float(bins[number] / len(ages)) for number in range(1, len(bins))},
        "off_policy/weight_mean": float(weights.mean()),
        "off_policy/weight_max": float(weights.max()),
    }
