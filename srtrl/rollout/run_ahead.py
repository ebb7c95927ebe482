"""What idle slots decode: samples of the next training step, early. None of it is ever learned from.

A run-ahead is decoded by the present policy on the very RNG key that its sample will have. The next step's policy is
nearly the same and its noise is the same, so that the sample repeats a good part of the run-ahead word for word: a
draft of many tokens. The sample itself is decoded by the policy of its own step, and what is drafted never changes what
is sampled, so it stays exact and on-policy.
"""

from collections.abc import Sequence
from dataclasses import replace

from srtrl.rollout.collect import sample_requests
from srtrl.types import Prompt, Request, SamplingParams


def run_ahead_requests(
    next_draws: Sequence[tuple[int, Prompt]], *, num_samples: int, sampling: SamplingParams, seed: int
) -> list[Request]:
    """The next step's samples as run-aheads, in the order in which they take idle slots.

    The order is breadth-first, as that of the samples: one of every prompt, then the second of every prompt.

    Args:
        next_draws: `(draw_index, prompt)` of the next step; empty in the last one.
        num_samples: Samples of each draw.
        sampling: As in training.
        seed: The run's seed.
    """
    requests = sample_requests(next_draws, num_samples=num_samples, sampling=sampling, seed=seed, purpose="train")
    requests.sort(key=lambda request: (request.sample_index, request.draw_index))
    return [replace(request, is_run_ahead=True) for request in requests]
