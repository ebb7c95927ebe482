"""What the decoders of a benchmark are given: prompts, and how many tokens each sequence gets."""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from srtrl.engine.sampling import make_rng_key
from srtrl.types import Request, SamplingParams

Lengths = Literal["equal", "long-tailed", "recorded", "sampled"]
"""`recorded`: those of a trace; `sampled`: a policy ends its samples itself."""

TAIL_SIGMA = 0.8
"""Standard deviation of the log-lengths in the long-tailed case; 0.78 in published GRPO groups of a Qwen2.5-0.5B on
GSM8K (the `curious` traces of the shared data), 0.25 to 0.38 in those of three stronger models."""
TAIL_MEDIAN_SHARE = 1 / 8
"""The median length as a share of the longest allowed: in the same groups the longest is 11 times the median."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Workload:
    """One rollout to measure: every sequence ends at its own `max_new_tokens` and nowhere else."""

    lengths: Lengths
    requests: tuple[Request, ...]
    slots: int = 0
    """Sequences that our engine decodes at once; 0: what the contender was told."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """What tells it from the benchmark's other workloads: column of a table -> cell."""

    def __str__(self) -> str:
        slots = f" in {self.slots} slots" if self.slots else ""
        return f"{len(self.requests)} sequences{slots}, {self.lengths}"

    @property
    def num_tokens(self) -> int:
        """Tokens that all sequences generate together."""
        return sum(request.sampling.max_new_tokens for request in self.requests)

    @property
    def longest(self) -> int:
        """Tokens that the longest sequence generates."""
        return max(request.sampling.max_new_tokens for request in self.requests)

    @property
    def max_sequence_tokens(self) -> int:
        """The longest prompt and response together."""
        return max(len(request.prompt_token_ids) + request.sampling.max_new_tokens for request in self.requests)


def draw_lengths(lengths: Lengths, num_sequences: int, *, equal: int, longest: int, seed: int) -> list[int]:
    """New tokens of each sequence: `equal` for all, or log-normal (see above), at least 1 and at most `longest`."""
    if lengths == "equal":
        return [equal] * num_sequences
    generator = random.Random(f"lengths/{seed}")
    median = longest * TAIL_MEDIAN_SHARE
    draws = [generator.lognormvariate(math.log(median), TAIL_SIGMA) for _ in range(num_sequences)]
    return [min(longest, max(1, round(draw))) for draw in draws]


def random_prompts(
    num_prompts: int, *, shortest: int, longest: int, vocab_size: int, seed: int
) -> list[tuple[int, ...]]:
    """Prompts of random token ids whose numbers of tokens are uniform from `shortest` to `longest`."""
    generator = random.Random(f"prompts/{seed}")
    sizes = [generator.randint(shortest, longest) for _ in range(num_prompts)]
    return [tuple(generator.randrange(vocab_size) for _ in range(size)) for size in sizes]


def make_workload(
    lengths: Lengths, new_tokens: Sequence[int], prompts: Sequence[tuple[int, ...]], *, num_samples: int, seed: int
) -> Workload:
    """Sequence i is sample i % num_samples of prompt i // num_samples and generates `new_tokens[i]` tokens."""
    assert len(prompts) * num_samples >= len(new_tokens)
    requests = []
    for i, max_new_tokens in enumerate(new_tokens):
        draw, sample = divmod(i, num_samples)
        requests.append(
            Request(
                prompt_id=str(draw),
                prompt_token_ids=prompts[draw],
                draw_index=draw,
                sample_index=sample,
                rng_key=make_rng_key(seed, "generate", draw, sample),
                sampling=SamplingParams(max_new_tokens=max_new_tokens),
            )
        )
    return Workload(lengths=lengths, requests=tuple(requests))
