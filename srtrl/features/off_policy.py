"""The off-policy modes of rollouts, whose steps learn from samples of earlier policies too (docs/off_policy.md).

`partial`: a rollout ends when a share of its groups is complete, and the other samples go on in the next one. Which
samples end is decided on a virtual clock: at tick t each sample has t new tokens, as if all decoded side by side, a
token at a time. A group is complete at the tick of its last sample, and the rollout ends at the tick at which as many
groups are complete as are wanted, at tick 1 at the earliest. So the end depends on policy, seed and data order alone,
where a number of decode steps would depend on slots, drafts, pages and ranks.

The real decoder does not keep that time. A sample may be ahead of the last tick when that is known: what it has beyond
it is no part of the rollout, even its end (its tokens are drafts for the next rollout, which samples them again). And
one that is behind is decoded up to that tick.

`spec_rl` (arXiv 2509.23232): a sample begins with the part of an earlier response that the policy still accepts.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numba
import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file
from safetensors.numpy import save as to_safetensors

from srtrl import ranks
from srtrl.files import write_atomic
from srtrl.model.noise import hash_row, uniform_of
from srtrl.model.transformer import Transformer
from srtrl.rollout.collect import Collector, FixedDraws, collect_rollouts, data_order
from srtrl.tasks.base import TaskBase
from srtrl.tasks.order import Order
from srtrl.trainer.credit import CreditAssigner
from srtrl.trainer.objective import logprobs_column
from srtrl.trainer.passes import UpdateContext, fill
from srtrl.trainer.sampling import RolloutContext, Sampler
from srtrl.types import (
    Completion,
    FinishReason,
    Prompt,
    Request,
    Response,
    Rollout,
    RolloutGroup,
    SampleKey,
    StepRollouts,
    TrainSequence,
)

if TYPE_CHECKING:
    from srtrl.engine.engine import Engine

FILE = "earlier_samples.safetensors"
"""File of a checkpoint; absent if there are no such samples."""
PER_TOKEN = ("token_ids", "rollout_logprobs", "policy_versions")
"""Fields of a response with a number for each token."""
REASONS: tuple[FinishReason | None, ...] = (None, "stop", "length")
"""Finish reasons, as they are numbered in the file."""
ACCEPTANCE = 0x5D2C_A8B1_93E6_470F
"""Flipped in an RNG key: the numbers that decide on acceptance are not the noise that samples tokens."""


class OffPolicySampler(Sampler):
    """Takes a step's groups in rounds, from samples of earlier steps too. A subclass says what a round is."""

    def __init__(
        self, context: RolloutContext, task: TaskBase, credit: CreditAssigner, order: Order | None = None
    ) -> None:
        """See `Sampler`."""
        super().__init__(context, task, credit, order)
        self.earlier: dict[SampleKey, Response] = {}
        """Samples that later steps go on from, or begin with, by the key of the mode."""

    def draws_going_on(self) -> list[int]:
        """Draws of earlier steps that a round has before new ones."""
        return []

    def round(self, draws: list[tuple[int, Prompt]], collector: Collector, step: int) -> list[RolloutGroup]:
        """The groups of a round; changes `earlier`."""
        raise NotImplementedError

    def mode_metrics(self) -> dict[str, float]:
        """Return the metrics of a step's rounds, after them."""
        raise NotImplementedError

    def collect(self, step: int, collector: Collector) -> StepRollouts:
        """See `Sampler`.

        A round has as many draws as the batch still lacks, first those that go on. There is one round; with dynamic
        sampling as many as it takes to keep `num_wanted` groups or to open `rollout.max_draws`: if all groups of a
        round are complete, these are the groups that `DrawsUntilFull` keeps.
        """
        recipe, end = self.context.recipe, self.num_draws + self.max_draws
        groups: list[RolloutGroup] = []
        kept: list[RolloutGroup] = []
        while True:
            going_on = self.draws_going_on()
            num_new = max(0, recipe.rollout.num_prompts - len(kept) - len(going_on))  # a resume may ask for fewer
            new = range(self.num_draws, min(self.num_draws + num_new, end))
            self.announce(step, new, collector)
            self.num_draws = new.stop
            found = self.round(self.draws([*going_on, *new]), collector, step)
            groups = groups + found
            kept = kept + self.credit.groups_to_learn_from(found)
            if not recipe.rollout.dynamic_sampling or len(kept) >= self.num_wanted or new.stop == end:
                break
        groups, kept = (sorted(some, key=lambda group: group.draw_index) for some in (groups, kept))
        return StepRollouts(groups=groups, kept=kept, metrics=self.mode_metrics())

    def save(self, folder: Path) -> None:
        """Write `earlier`; nothing if there are none."""
        if not self.earlier:
            return
        responses = self.earlier.values()
        arrays = {
            "keys": np.array(list(self.earlier), np.int64),
            "lengths": np.array([len(response.token_ids) for response in responses], np.int64),
            "finish_reasons": np.array([REASONS.index(response.finish_reason) for response in responses], np.int64),
            **{name: np.concatenate([getattr(response, name) for response in responses]) for name in PER_TOKEN},
        }
        write_atomic(folder / FILE, to_safetensors(arrays))

    def load(self, folder: Path) -> None:
        """Read what `save` has written (a resume has compared the file with its checksum)."""
        if not (folder / FILE).is_file():
            return
        arrays = load_file(folder / FILE)
        ends = np.cumsum(arrays["lengths"])[:-1]
        parts = zip(*(np.split(arrays[name], ends) for name in PER_TOKEN), strict=True)
        for key, reason, part in zip(arrays["keys"].tolist(), arrays["finish_reasons"].tolist(), parts, strict=True):
            fields = dict(zip(PER_TOKEN, part, strict=True))
            self.earlier[tuple(key)] = Response(**fields, finish_reason=REASONS[reason])


def age_metrics(sequences: Sequence[TrainSequence]) -> dict[str, float]:
    """Ages and importance weights of the tokens that a step learns from; see docs/metrics.md.

    Args:
        sequences: With `old_logprobs` by the policy of this step; if there are none, there are no metrics.
    """
    if not sequences:
        return {}
    ages = np.concatenate([np.zeros(len(s.targets), np.int32) if s.ages is None else s.ages for s in sequences])
    pairs = [(s.old_logprobs, s.rollout_logprobs) for s in sequences if s.old_logprobs is not None]
    weights = np.exp(np.concatenate([now - then for now, then in pairs]).astype(np.float64))
    bins = np.bincount(np.frexp(ages)[1]) / len(ages)  # 0, 1, 2-3, 4-7, ...
    return {
        "off_policy/stale_share": float((ages > 0).mean()),
        **{f"off_policy/age_{2**number}": float(share) for number, share in enumerate(bins[1:])},
        "off_policy/weight_mean": float(weights.mean()),
        "off_policy/weight_max": float(weights.max()),
    }


class PartialSampler(OffPolicySampler):
    """The sampler of `rollout.mode: partial`; `earlier` has the samples of incomplete groups, by draw and sample."""

    @property
    def num_wanted(self) -> int:
        """See `Sampler`."""
        rollout = self.context.recipe.rollout
        return share_of(rollout.num_prompts, rollout.min_complete)

    def draws_going_on(self) -> list[int]:
        """See `OffPolicySampler`."""
        return sorted({draw for draw, _ in self.earlier})

    def round(self, draws: list[tuple[int, Prompt]], collector: Collector, step: int) -> list[RolloutGroup]:
        """See `OffPolicySampler`."""
        engine, rollout = self.context.engine, self.context.recipe.rollout
        oldest = engine.policy_version - rollout.max_age
        prefixes = {key: truncated(part, rollout.max_new_tokens) for key, part in self.earlier.items()}
        due = {draw for (draw, _), prefix in self.earlier.items() if prefix.policy_versions[0] <= oldest}
        some = PartialDraws(draws, num_complete=share_of(len(draws), rollout.min_complete), due=due)
        found = collect_rollouts(engine, replace(collector, prefixes=prefixes), some)
        self.earlier = some.carried
        return found

    def mode_metrics(self) -> dict[str, float]:
        """The number of samples that go on."""
        return {"off_policy/carried": float(sum(part.finish_reason is None for part in self.earlier.values()))}


class PartialDraws(FixedDraws):
    """Draws of which the first complete ones are rolled out; the samples of the others are `carried`.

    With several ranks each sample that ends is published to all: a counter numbers them, and one counter for each
    number has the sample and its tick.
    """

    def __init__(self, draws: Sequence[tuple[int, Prompt]], *, num_complete: int, due: Collection[int] = ()) -> None:
        """All ranks make the same.

        Args:
            draws: See `FixedDraws`. Those with samples in `Collector.prefixes` go on.
            num_complete: Number of groups at whose completion the rollout ends; at least 1.
            due: Draws that are waited for beside that, because their samples are old.
        """
        super().__init__(draws)
        assert 1 <= num_complete <= len(draws)
        self.num_complete = num_complete
        self.due = set(due)
        self.carried: dict[SampleKey, Response] = {}
        """After the rollout: all samples of the draws that are not complete, finished ones too; on all ranks."""
        self._completions: dict[SampleKey, Completion] = {}
        """Completions of this rank, including interrupted ones."""
        self._ticks: dict[int, dict[int, int]] = {draw_index: {} for draw_index, _ in self.draws}
        """By draw and sample, of all ranks: new tokens of those that are finished."""
        self._num_read = 0
        self._last_tick: int | None = None
        """Tick at which the rollout ends, or the latest at which it may; None while any is possible."""

    def requests(self, engine: Engine, collector: Collector) -> Iterator[Request]:
        """See `Draws`; ends the samples that have reached the last tick first."""
        self._read_ticks(collector, collector.ranks.read("ended"))
        if self._last_tick is not None:
            for completion in engine.interrupt(self._last_tick):
                self._completions[data_order(completion.request)] = completion
                collector.ranks.add("finished")
        yield from super().requests(engine, collector)

    def complete(self, collector: Collector) -> Sequence[int]:
        """See `Draws`."""
        self._read_ticks(collector, collector.ranks.add("ended", 0))
        last = self._last_tick
        assert last is not None, "the rollout has not ended"
        return [draw for draw, tick in self._complete(collector).items() if tick <= last]

    def rollouts(self, collector: Collector) -> list[Rollout]:
        """See `Draws`; of the complete draws. Sets `carried`."""
        complete, last = self.complete(collector), self._last_tick
        assert last is not None
        carried: dict[SampleKey, Response] = {}
        for (draw, sample), completion in sorted(self._completions.items(), key=lambda item: item[0]):
            if draw not in complete:
                response = completion.response
                if self._ticks[draw].get(sample, last + 1) > last:
                    response = response.cut(completion.request.num_reused + last)
                carried[draw, sample] = response
        for part in ranks.gather(carried, "the samples that are carried over"):
            self.carried |= part
        return collector.take(complete)

    def ended(self, collector: Collector, completion: Completion) -> None:
        """See `Draws`: lets all ranks know the sample's tick."""
        draw, sample = key = data_order(completion.request)
        self._completions[key] = completion
        number = collector.ranks.add("ended")
        tick = len(completion.response.token_ids) - completion.request.num_reused
        place = (draw - self.draws[0][0]) * collector.num_samples + sample
        collector.ranks.add(f"ended {number}", 1 + (tick << 32) + place)
        super().ended(collector, completion)

    def _read_ticks(self, collector: Collector, num_ended: int) -> None:
        """Read what was published since the last call, and compute the last tick anew."""
        first = self._num_read
        while self._num_read < num_ended and (value := collector.ranks.add(f"ended {self._num_read}", 0)):
            draw, sample = divmod((value - 1) & 0xFFFFFFFF, collector.num_samples)
            self._ticks[self.draws[0][0] + draw][sample] = (value - 1) >> 32
            self._num_read += 1
        complete = self._complete(collector) if self._num_read > first else {}
        if len(complete) >= self.num_complete and self.due <= complete.keys():
            ticks = sorted(complete.values())
            self._last_tick = max([1, ticks[self.num_complete - 1], *(complete[draw] for draw in self.due)])

    def _complete(self, collector: Collector) -> dict[int, int]:
        """The draws all of whose samples are finished, as far as is known, in data order, and their ticks."""
        return {d: max(ticks.values()) for d, ticks in self._ticks.items() if len(ticks) == collector.num_samples}


class SpecRlSampler(OffPolicySampler):
    """The sampler of `rollout.mode: spec_rl`; `earlier` has the newest response of each prompt and sample."""

    _num_offered = 0
    _num_accepted = 0

    def round(self, draws: list[tuple[int, Prompt]], collector: Collector, step: int) -> list[RolloutGroup]:
        """See `OffPolicySampler`."""
        engine = self.context.engine
        requests = [request for request in collector.requests(draws) if self._key(request) in self.earlier]
        offered = [self.earlier[self._key(request)] for request in requests]
        with collector.timer.stage("acceptance"):
            context = UpdateContext(recipe=self.context.recipe, step=step)
            prefixes = accept_prefixes(requests, offered, engine.runner.model, context)
        self._num_offered += sum(len(response.token_ids) for response in offered)
        self._num_accepted += sum(len(prefix.token_ids) for prefix in prefixes.values())
        found = collect_rollouts(engine, replace(collector, prefixes=prefixes), FixedDraws(draws))
        self.earlier |= {self._key(rollout): rollout.response for group in found for rollout in group.rollouts}
        return found

    def mode_metrics(self) -> dict[str, float]:
        """The accepted share of the tokens that were offered."""
        share = self._num_accepted / max(1, self._num_offered)
        self._num_offered = self._num_accepted = 0
        return {"off_policy/accepted_share": share}

    def _key(self, sample: Request | Rollout) -> SampleKey:
        """Number of the prompt, and sample index: what an earlier response is found by."""
        return self.order.prompt_of(sample.draw_index), sample.sample_index


def accept_prefixes(
    requests: Sequence[Request], offered: Sequence[Response], policy: Transformer, context: UpdateContext
) -> dict[SampleKey, Response]:
    """The part of an earlier response with which each new sample begins: SPEC-RL's rule (arXiv 2509.23232).

    Token by token, each is accepted with probability min(1, lenience x p_new / p_old), up to the first that is not.
    p_old is that of the policy that sampled the token, p_new the current policy's, by one pass over the whole response.
    A response of which every token is accepted stays whole.

    Args:
        requests: The new samples.
        offered: An earlier response of the same prompt for each.
        policy: The policy as it is now.
        context: Its recipe has `rollout.lenience`; all ranks make the same call and get the same.
    """
    sequences = [
        TrainSequence(
            token_ids=np.concatenate([np.array(request.prompt_token_ids, np.int64), response.token_ids]),
            targets=len(request.prompt_token_ids) + np.arange(len(response.token_ids)),
            draw_index=request.draw_index,
            rollout_logprobs=response.rollout_logprobs,
            advantages=np.zeros(len(response.token_ids), np.float32),
        )
        for request, response in zip(requests, offered, strict=True)
    ]
    accepted: dict[SampleKey, Response] = {}
    column = logprobs_column("acceptance", "old_logprobs", policy, context.recipe.rollout.temperature)
    computed = fill(column, sequences, context) if sequences else []
    for request, response, sequence in zip(requests, offered, computed, strict=True):
        assert sequence.old_logprobs is not None
        log_ratio = sequence.old_logprobs - sequence.rollout_logprobs
        if number := num_accepted(request.rng_key, log_ratio, context.recipe.rollout.lenience):
            prefix = truncated(response.cut(number), request.sampling.max_new_tokens)
            accepted[data_order(request)] = prefix
    return accepted


@numba.njit(cache=True, nogil=True)
def _uniforms(rng_key: np.uint64, num_positions: int) -> npt.NDArray[np.float64]:
    """A uniform number for each of the first positions of a response, [num_positions]."""
    return np.array([uniform_of(hash_row(rng_key, position), 0) for position in range(num_positions)])


def num_accepted(rng_key: int, log_ratio: npt.NDArray[np.float32], lenience: float) -> int:
    """Number of tokens before the first one that is not accepted; `log_ratio` is log p_new - log p_old, [L]."""
    u = _uniforms(np.uint64(rng_key ^ ACCEPTANCE), len(log_ratio))  # [L]
    is_accepted = u <= np.exp(np.minimum(0.0, log_ratio + np.log(lenience))) if lenience else np.zeros(len(u), np.bool_)
    return int(np.append(is_accepted, False).argmin())


def share_of(count: int, share: float) -> int:
    """The smallest number that is at least this share of `count`, at least 1; rounding of the share apart."""
    return max(1, math.ceil(count * share - 1e-9))


def truncated(response: Response, max_tokens: int) -> Response:
    """Its first `max_tokens` tokens, with which a response is whole; a shorter one as it is."""
    part = response.cut(max_tokens)
    if len(part.token_ids) < max_tokens or part.finish_reason is not None:
        return part
    return replace(part, finish_reason="length")
