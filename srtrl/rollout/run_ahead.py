"""What idle slots decode: text that later samples draft from. None of it is ever learned from.

A *coupled* run-ahead is a sample of the next training step, decoded early by the present policy, on the very random
rng_key that the sample will have. The next step's policy is nearly the same and its noise is the same, so that the
sample repeats a good part of the run-ahead word for word: a draft of many tokens. The sample itself is decoded by the
policy of its own step, and what is drafted never changes what is sampled, so it stays exact and on-policy.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from srtrl.engine.sampling import make_rng_key
from srtrl.rollout.collect import sample_requests
from srtrl.types import Prompt, Request, SamplingParams

RunAheadMode = Literal["off", "next_step", "active", "both"]
"""See `rollout.run_ahead` of the recipe."""


def run_ahead_requests(
    mode: RunAheadMode,
    *,
    current_draws: Sequence[tuple[int, Prompt]],
    next_draws: Sequence[tuple[int, Prompt]],
    num_samples: int,
    sampling: SamplingParams,
    seed: int,
    coupled: bool = True,
) -> list[Request]:
    """Run-aheads of one training step, in the order in which they shall take idle slots.

    The order is breadth-first, as that of the samples: one of every prompt, then the second of every prompt. With
    `both`, such a wave of this step's prompts comes before each wave of the next step's.

    Args:
        mode: `next_step`: the samples of the next step; `active`: further samples of this step's prompts, of use while
            the prompt has unfinished ones; `both`; or `off`.
        current_draws: `(draw_index, prompt)` of this step.
        next_draws: Those of the next step; empty in the last one.
        num_samples: Samples of each draw.
        sampling: As in training.
        seed: The run's seed.
        coupled: Whether the next step's run-aheads have the rng_keys of their samples; else rng_keys of their own.
    """
    requests: list[Request] = []
    if mode in ("next_step", "both"):
        ahead = sample_requests(next_draws, num_samples=num_samples, sampling=sampling, seed=seed, purpose="train")
        requests += [request if coupled else _decoupled(request, seed) for request in ahead]
    if mode in ("active", "both"):
        present = sample_requests(current_draws, num_samples=num_samples, sampling=sampling, seed=seed, purpose="train")
        for request in present:
            further = replace(request, sample_index=num_samples + request.sample_index, ends_with_prompt=True)
            requests.append(_decoupled(further, seed))
    requests.sort(key=lambda one: (one.sample_index % num_samples, not one.ends_with_prompt, one.draw_index))
    return [replace(request, is_run_ahead=True) for request in requests]


def _decoupled(request: Request, seed: int) -> Request:
    """The request on an RNG key that no sample of training has: the purpose in its name is another."""
    return replace(request, rng_key=make_rng_key(seed, "run_ahead", request.draw_index, request.sample_index))
