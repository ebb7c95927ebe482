"""What the off-policy modes keep from step to step, what they reuse of it, and how old what is learned is.

docs/off_policy.md says what each mode learns from, and its bias.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file
from safetensors.numpy import save as to_safetensors

from srtrl.engine.sampling import uniform_noise
from srtrl.metrics import write_atomic
from srtrl.model.transformer import Transformer
from srtrl.trainer.passes import UpdateContext
from srtrl.trainer.update import with_logprobs
from srtrl.types import FinishReason, Prefix, Request, Rollout, SampleKey, TrainSequence

FILE = "earlier_samples.safetensors"
"""Of a checkpoint, where there are any."""
PER_TOKEN = ("token_ids", "rollout_logprobs", "policy_versions")
"""Fields of a prefix with a number for each token."""
REASONS: tuple[FinishReason | None, ...] = (None, "stop", "length")
"""Finish reasons, as they are numbered in the file."""
ACCEPTANCE = 0x5D2C_A8B1_93E6_470F
"""Flipped in an RNG key: the numbers that decide on acceptance are not the noise that samples tokens."""


def save_earlier(folder: Path, earlier: Mapping[SampleKey, Prefix]) -> None:
    """Write samples of earlier steps; nothing where there are none."""
    if not earlier:
        return
    prefixes = earlier.values()
    arrays = {
        "keys": np.array(list(earlier), np.int64),
        "lengths": np.array([len(prefix.token_ids) for prefix in prefixes], np.int64),
        "finish_reasons": np.array([REASONS.index(prefix.finish_reason) for prefix in prefixes], np.int64),
        **{name: np.concatenate([getattr(prefix, name) for prefix in prefixes]) for name in PER_TOKEN},
    }
    write_atomic(folder / FILE, to_safetensors(arrays))


def load_earlier(folder: Path) -> dict[SampleKey, Prefix]:
    """Read what `save_earlier` has written; raises ValueError naming a damaged file."""
    file = folder / FILE
    if not file.is_file():
        return {}
    try:
        arrays = load_file(file)
        ends = np.cumsum(arrays["lengths"])[:-1]
        parts = zip(*(np.split(arrays[name], ends) for name in PER_TOKEN), strict=True)
        reasons = [REASONS[number] for number in arrays["finish_reasons"].tolist()]
        keys = [(first, second) for first, second in arrays["keys"].tolist()]
    except (SafetensorError, LookupError, ValueError) as error:
        raise ValueError(f"{file} is damaged ({error}): resume from another checkpoint") from error
    return {
        key: Prefix(token_ids=tokens, rollout_logprobs=logprobs, policy_versions=versions, finish_reason=reason)
        for key, (tokens, logprobs, versions), reason in zip(keys, parts, reasons, strict=True)
    }


def accept_prefixes(
    earlier: Sequence[tuple[Request, Prefix]], policy: Transformer, lenience: float, context: UpdateContext
) -> dict[SampleKey, Prefix]:
    """The part of each earlier response with which its prompt's new sample begins: SPEC-RL's rule (arXiv 2509.23232).

    Token by token, each is accepted with probability min(1, lenience x p_new / p_old), up to the first that is not.
    p_old is that of the policy that sampled the token, p_new the present policy's, by one pass over the whole response.
    A response of which every token is accepted stays whole.

    Args:
        earlier: New requests, and responses of the same prompt.
        policy: The policy as it is now.
        lenience: At 0 nothing is accepted.
        context: See `with_logprobs`; all ranks make the same call and get the same.
    """
    if not earlier:
        return {}
    sequences = [
        TrainSequence(
            token_ids=np.concatenate([np.array(request.prompt_token_ids, np.int64), prefix.token_ids]),
            targets=len(request.prompt_token_ids) + np.arange(len(prefix.token_ids)),
            draw_index=request.draw_index,
            rollout_logprobs=prefix.rollout_logprobs,
            advantages=np.zeros(len(prefix.token_ids), np.float32),
        )
        for request, prefix in earlier
    ]
    accepted: dict[SampleKey, Prefix] = {}
    for (request, prefix), sequence in zip(
        earlier, with_logprobs("old_logprobs", policy, sequences, context), strict=True
    ):
        assert sequence.old_logprobs is not None
        length = num_accepted(request.rng_key, sequence.old_logprobs, prefix.rollout_logprobs, lenience)
        if length:
            accepted[request.draw_index, request.sample_index] = truncated(
                prefix, length, request.sampling.max_new_tokens
            )
    return accepted


def num_accepted(
    rng_key: int, new_logprobs: npt.NDArray[np.float32], old_logprobs: npt.NDArray[np.float32], lenience: float
) -> int:
    """Number of tokens before the first one that is not accepted; the log-probs are [L]."""
    if lenience == 0:
        return 0
    bits = np.array(rng_key ^ ACCEPTANCE, np.uint64).view(np.int64).item()
    positions = torch.arange(len(new_logprobs))
    u = uniform_noise(torch.full_like(positions, bits), positions, 1)[:, 0].numpy()  # [L]
    log_ratio = new_logprobs.astype(np.float64) - old_logprobs + math.log(lenience)
    rejected = np.flatnonzero(np.log(u) > np.minimum(0.0, log_ratio))
    return int(rejected[0]) if len(rejected) else len(u)


def truncated(prefix: Prefix, length: int, max_tokens: int) -> Prefix:
    """The first `length` tokens, but no more than `max_tokens`, with which a response is whole."""
    stop = min(length, max_tokens)
    finish_reason = prefix.finish_reason if stop == len(prefix.token_ids) else None
    if stop == max_tokens:
        finish_reason = finish_reason or "length"
    return replace(prefix, **{name: getattr(prefix, name)[:stop] for name in PER_TOKEN}, finish_reason=finish_reason)


def whole_prefix(rollout: Rollout) -> Prefix:
    """A rollout's response, to begin another sample with."""
    return Prefix(
        token_ids=rollout.token_ids,
        rollout_logprobs=rollout.rollout_logprobs,
        policy_versions=rollout.policy_versions,
        finish_reason=rollout.finish_reason,
    )


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
