"""SPEC-RL (arXiv 2509.23232): a sample begins with the part of an earlier response that the policy still accepts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from srtrl.engine.sampling import uniform_noise
from srtrl.features.rounds import RoundsSampler, truncated, with_own_answers
from srtrl.model.transformer import Transformer
from srtrl.rollout.collect import Collector, FixedDraws, collect_rollouts
from srtrl.trainer.objective import logprobs_column
from srtrl.trainer.passes import UpdateContext, fill
from srtrl.trainer.sampling import Collected
from srtrl.types import Prompt, Request, Response, Rollout, RolloutGroup, SampleKey, TrainSequence

ACCEPTANCE = 0x5D2C_A8B1_93E6_470F
"""Flipped in an RNG key: the numbers that decide on acceptance are not the noise that samples tokens."""


class SpecRlSampler(RoundsSampler):
    """The sampler of `rollout.mode: spec_rl`; `earlier` has the newest response of each prompt and sample."""

    _num_offered = 0
    _num_accepted = 0

    def round(self, step: int, draws: list[tuple[int, Prompt]], collector: Collector) -> list[RolloutGroup]:
        """See `RoundsSampler`."""
        engine = self.context.engine
        requests = [request for request in collector.requests(draws) if self._key(request) in self.earlier]
        offered = [self.earlier[self._key(request)] for request in requests]
        with collector.timer.stage("acceptance"):
            context = UpdateContext(recipe=self.context.recipe, step=step)
            collector.prefixes = accept_prefixes(requests, offered, engine.runner.model, context)
        self._num_offered += sum(len(prefix.sampled) for prefix in offered)
        self._num_accepted += sum(len(prefix.sampled) for prefix in collector.prefixes.values())
        found = collect_rollouts(engine, collector, FixedDraws(draws))
        self.earlier |= {self._key(r): as_decoded(r) for group in found for r in group.rollouts}
        return found

    def collect(self, step: int, collector: Collector) -> Collected:
        """See `Sampler`; counts what was accepted."""
        self._num_offered = self._num_accepted = 0
        collected = super().collect(step, collector)
        share = self._num_accepted / max(1, self._num_offered)
        return collected._replace(metrics={"off_policy/accepted_share": share})

    def _key(self, sample: Request | Rollout) -> SampleKey:
        """Number of the prompt, and sample index: what an earlier response is found by."""
        return self.order.prompt_of(sample.draw_index), sample.sample_index


def as_decoded(rollout: Rollout) -> Response:
    """A response that has ended, with the finish reason that the decoder gave it and the answers to its own turns."""
    response = with_own_answers(rollout.response)
    if rollout.conversation is None or rollout.conversation.stop_reason != "observation":
        return response
    return replace(response, finish_reason="stop")


def accept_prefixes(
    requests: Sequence[Request], offered: Sequence[Response], policy: Transformer, context: UpdateContext
) -> dict[SampleKey, Response]:
    """The part of an earlier response with which each new sample begins: SPEC-RL's rule (arXiv 2509.23232).

    Token by token, each is accepted with probability min(1, lenience x p_new / p_old), up to the first that is not.
    p_old is that of the policy that sampled the token, p_new the current policy's, by one pass over the whole response.
    A response of which every token is accepted stays whole. What was not sampled is accepted with all before it.

    Args:
        requests: The new samples.
        offered: An earlier response of the same prompt for each.
        policy: The policy as it is now.
        context: Its recipe has `rollout.lenience`; all ranks make the same call and get the same.
    """
    sequences = [
        TrainSequence(
            token_ids=np.concatenate([np.array(request.prompt_token_ids, np.int64), prefix.token_ids]),
            targets=len(request.prompt_token_ids) + prefix.sampled,
            draw_index=request.draw_index,
            rollout_logprobs=prefix.rollout_logprobs[prefix.sampled],
            advantages=np.zeros(len(prefix.sampled), np.float32),
        )
        for request, prefix in zip(requests, offered, strict=True)
    ]
    accepted: dict[SampleKey, Response] = {}
    column = logprobs_column("acceptance", "old_logprobs", policy, context.recipe.rollout.temperature)
    computed = fill(column, sequences, context) if sequences else []
    for request, prefix, sequence in zip(requests, offered, computed, strict=True):
        assert sequence.old_logprobs is not None
        log_ratio = sequence.old_logprobs - sequence.rollout_logprobs
        number = num_accepted(request.rng_key, log_ratio, context.recipe.rollout.lenience)
        if number:
            length = int(np.append(prefix.sampled, len(prefix.token_ids))[number])
            part = truncated(prefix, length, request.sampling.max_new_tokens)
            accepted[request.draw_index, request.sample_index] = part
    return accepted


def num_accepted(rng_key: int, log_ratio: npt.NDArray[np.float32], lenience: float) -> int:
    """Number of tokens before the first one that is not accepted; `log_ratio` is log p_new - log p_old, [L]."""
    key, positions = np.full(len(log_ratio), rng_key ^ ACCEPTANCE, np.uint64), torch.arange(len(log_ratio))
    u = uniform_noise(torch.from_numpy(key.view(np.int64)), positions, 1)[:, 0].numpy()  # [L]
    is_accepted = u <= np.exp(np.minimum(0.0, log_ratio + np.log(lenience))) if lenience else np.zeros(len(u), np.bool_)
    return int(np.append(is_accepted, False).argmin())
