"""What the off-policy modes keep from step to step, what they reuse of it, and how old what is learned is.

docs/off_policy.md says what each mode learns from, and its bias.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors.numpy import load_file
from safetensors.numpy import save as to_safetensors

from srtrl.engine.sampling import uniform_noise
from srtrl.metrics import write_atomic
from srtrl.model.transformer import Transformer
from srtrl.trainer.objective import logprobs_column
from srtrl.trainer.passes import UpdateContext, fill
from srtrl.types import FinishReason, Prefix, Request, SampleKey, TrainSequence

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
        "turns": np.frombuffer(json.dumps([(p.extensions, p.answers) for p in prefixes]).encode(), np.uint8),
    }
    write_atomic(folder / FILE, to_safetensors(arrays))


def load_earlier(folder: Path) -> dict[SampleKey, Prefix]:
    """Read what `save_earlier` has written (a resume has compared the file with its checksum)."""
    if not (folder / FILE).is_file():
        return {}
    arrays = load_file(folder / FILE)
    ends = np.cumsum(arrays["lengths"])[:-1]
    parts = zip(*(np.split(arrays[name], ends) for name in PER_TOKEN), strict=True)
    reasons = [REASONS[number] for number in arrays["finish_reasons"].tolist()]
    turns = json.loads(arrays["turns"].tobytes()) if "turns" in arrays else [((), {})] * len(reasons)
    return {
        (first, second): Prefix(
            **dict(zip(PER_TOKEN, part, strict=True)),
            finish_reason=reason,
            extensions=tuple((start, stop) for start, stop in extensions),
            answers=answers,
        )
        for (first, second), part, reason, (extensions, answers) in zip(
            arrays["keys"].tolist(), parts, reasons, turns, strict=True
        )
    }


def accept_prefixes(
    requests: Sequence[Request], offered: Sequence[Prefix], policy: Transformer, context: UpdateContext
) -> dict[SampleKey, Prefix]:
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
    accepted: dict[SampleKey, Prefix] = {}
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


def truncated(prefix: Prefix, length: int, max_tokens: int) -> Prefix:
    """The first `length` tokens, but no more than `max_tokens`, with which a response is whole.

    An observation up to or beyond `max_tokens` does not fit: the response ends with the turn before it.
    """
    stop = min(length, max_tokens)
    finish_reason = prefix.finish_reason if stop == len(prefix.token_ids) else None
    if stop == max_tokens:
        finish_reason = finish_reason or "length"
        for first, last in prefix.extensions:
            if first <= max_tokens <= last:
                stop, finish_reason = first, "stop"
    per_token = {name: getattr(prefix, name)[:stop] for name in PER_TOKEN}
    extensions = tuple(part for part in prefix.extensions if part[1] <= stop)
    return replace(prefix, **per_token, extensions=extensions, finish_reason=finish_reason)


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
