"""What a live policy decodes, step by step: prompts, requests, run-aheads, and the small changes that updates make."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from srtrl.bench.peers_run import encode_prompts
from srtrl.bench.rollout_options import LengthsChoice, RolloutBench
from srtrl.bench.workload import draw_lengths
from srtrl.model.attention import PackedPlan
from srtrl.model.transformer import Transformer
from srtrl.model.weights import end_token_ids, load_tokenizer
from srtrl.rollout.collect import sample_requests
from srtrl.rollout.run_ahead import run_ahead_requests
from srtrl.tasks.arithmetic import ArithmeticOptions, Task
from srtrl.types import Completion, Prompt, Request, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DEFAULT_PROMPTS = 32
DEFAULT_MAX_TOKENS = 96
"""As in recipes/quickstart.yaml."""
MAX_PROMPT_TOKENS = 256
KL_SEQUENCES = 16
"""Sequences over which the change of the policy is measured."""


@dataclass(kw_only=True, slots=True, frozen=True)
class LiveWorkload:
    """Steps over a pool of prompts, which are visited in order, again and again."""

    prompts: tuple[Prompt, ...]
    step_prompts: int
    """Prompts of a step; divides their number."""
    num_steps: int
    num_samples: int
    sampling: SamplingParams
    """Of the samples; where lengths are drawn, `max_new_tokens` is the longest."""
    lengths: LengthsChoice = "both"
    """`both`: the policy ends its samples itself; else their lengths are drawn and end tokens are not heeded."""
    seed: int

    @property
    def max_sequence_tokens(self) -> int:
        """The longest prompt and the longest response together."""
        return max(len(prompt.token_ids) for prompt in self.prompts) + self.sampling.max_new_tokens

    def draws(self, step: int) -> list[tuple[int, Prompt]]:
        """(draw index in the run, prompt) of a step from 1 on; none behind the last."""
        if step > self.num_steps:
            return []
        first = (step - 1) * self.step_prompts
        return [(draw, self.prompts[draw % len(self.prompts)]) for draw in range(first, first + self.step_prompts)]

    def requests(self, step: int) -> list[Request]:
        """The samples of a step, on the rng_keys that training gives them."""
        requests = sample_requests(
            self.draws(step),
            num_samples=self.num_samples,
            sampling=self.sampling,
            seed=self.seed,
            purpose="train",
        )
        return [self._with_length(request) for request in requests]

    def run_ahead(self, mode: str, step: int) -> list[Request]:
        """Samples of the next step for this one's idle slots; none where `mode` is `off`."""
        requests = run_ahead_requests(
            "off" if mode == "off" else "next_step",
            current_draws=self.draws(step),
            next_draws=self.draws(step + 1),
            num_samples=self.num_samples,
            sampling=self.sampling,
            seed=self.seed,
            coupled=mode == "coupled",
        )
        return [self._with_length(request) for request in requests]

    def _with_length(self, request: Request) -> Request:
        """The request with a length drawn for its RNG key, where lengths are drawn."""
        if self.lengths == "both":
            return request
        most = self.sampling.max_new_tokens
        (length,) = draw_lengths(self.lengths, 1, equal=most, longest=most, seed=request.rng_key)
        return replace(request, sampling=replace(request.sampling, max_new_tokens=length, end_token_ids=()))

    def next_uses(self, step: int) -> list[tuple[int, ...]]:
        """Prompts from this step on, in order, as far as they differ."""
        start = (step - 1) * self.step_prompts % len(self.prompts)
        return [prompt.token_ids for prompt in (*self.prompts[start:], *self.prompts[:start])]


def make_live_workload(bench: RolloutBench, num_prompts: int, folder: Path) -> LiveWorkload:
    """The steps that the options ask for.

    Raises:
        ValueError: Too few prompts, or steps that do not divide them.
    """
    tokenizer = load_tokenizer(folder)
    step_prompts = bench.step_prompts or num_prompts
    if num_prompts % step_prompts:
        raise ValueError(f"--step-prompts: {step_prompts} does not divide the {num_prompts} prompts of an epoch")
    max_new_tokens = bench.max_tokens or DEFAULT_MAX_TOKENS
    return LiveWorkload(
        prompts=tuple(_prompts(bench, num_prompts, folder, tokenizer)),
        step_prompts=step_prompts,
        num_steps=bench.num_epochs * (num_prompts // step_prompts),
        num_samples=bench.num_samples,
        sampling=SamplingParams(max_new_tokens=max_new_tokens, end_token_ids=end_token_ids(folder, tokenizer)),
        lengths=bench.lengths,
        seed=bench.seed,
    )


def _prompts(
    bench: RolloutBench, num_prompts: int, folder: Path, tokenizer: "PreTrainedTokenizerBase"
) -> Iterator[Prompt]:
    if bench.prompts is not None:
        for index, token_ids in enumerate(encode_prompts(bench.prompts, num_prompts, folder)):
            yield Prompt(prompt_id=str(index), text="", token_ids=token_ids, answer="")
        return
    options = ArithmeticOptions(num_train=num_prompts, num_eval=1)
    yield from Task(options, tokenizer=tokenizer, max_prompt_tokens=MAX_PROMPT_TOKENS).train_prompts


class PolicyChanges:
    """Noise on all weights between steps, and what it did to the policy."""

    def __init__(self, policy: Transformer, sigma: float, seed: int) -> None:
        self.policy = policy
        self.sigma = sigma
        self.seed = seed
        self.kls: list[float] = []
        """KL per token of the policy before to the policy after each change, over tokens that it had sampled."""

    @contextmanager
    def series(self) -> Iterator[torch.Generator]:
        """The changes of a series of steps, the same in each; the weights are as before when it is over."""
        saved = [parameter.detach().clone() for parameter in self.policy.parameters()] if self.sigma else []
        try:
            yield torch.Generator().manual_seed(self.seed)
        finally:
            with torch.no_grad():
                for parameter, value in zip(self.policy.parameters(), saved, strict=False):
                    parameter.copy_(value)

    @torch.inference_mode()
    def change(self, generator: torch.Generator, completions: Sequence[Completion]) -> None:
        """Add noise to each weight matrix and vector, `sigma` times its own standard deviation."""
        if not self.sigma:
            return
        before = _logprobs(self.policy, completions[:KL_SEQUENCES])
        for parameter in self.policy.parameters():
            noise = torch.randn(parameter.shape, generator=generator).to(parameter)
            parameter.add_(noise * (self.sigma * parameter.float().std(correction=0).item()))
        after = _logprobs(self.policy, completions[:KL_SEQUENCES])
        self.kls.append(float((before.exp() * (before - after)).sum(-1).mean()))


def _logprobs(policy: Transformer, completions: Sequence[Completion]) -> torch.Tensor:
    """Log-probs of all tokens at each position of the responses, [R, V] float64."""
    parts = []
    for completion in completions:
        prompt = completion.request.prompt_token_ids
        token_ids = torch.tensor([*prompt, *completion.token_ids[:-1]], device=policy.device)
        hidden = policy(token_ids, PackedPlan.from_lengths([len(token_ids)], policy.device))
        parts.append(policy.logits(hidden[len(prompt) - 1 :]).double().log_softmax(-1))
    return torch.cat(parts)
