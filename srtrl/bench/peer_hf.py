"""Our decoder beside `transformers`' `generate`: one static batch, padded on the left, at its best settings."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, StoppingCriteria, StoppingCriteriaList

from srtrl.bench.alternate import Comparison, EngineRun, RunTime, make_engine, take_turns, tell
from srtrl.bench.workload import make_request, random_prompts
from srtrl.engine.options import EngineOptions
from srtrl.model.transformer import Transformer
from srtrl.types import Request

PAD_TOKEN_ID = 0
TAIL_SIGMA = 0.8
"""Standard deviation of the log-lengths in the long-tailed case; 0.78 in published GRPO groups of a Qwen2.5-0.5B on
GSM8K, 0.25 to 0.38 in those of three stronger models."""
TAIL_MEDIAN_SHARE = 1 / 8
"""The median length as a share of the longest allowed: in the same groups the longest is 11 times the median."""


class _StopAtOwnLength(StoppingCriteria):
    """Ends each row at its own length. Its batch goes on, with padding in that row, until the last row has ended."""

    eos_token_id = None
    """Having the attribute tells `generate` to fill ended rows with padding, as it does after an end token."""

    def __init__(self, prompt_width: int, new_tokens: Tensor) -> None:
        self.ends = prompt_width + new_tokens  # [B], width at which a row ends

    def __call__(self, input_ids: Tensor, scores: object, **_: object) -> Tensor:
        """Whether each row of `input_ids` [B, L] has ended, [B]."""
        return self.ends <= input_ids.shape[1]


class HuggingFaceGenerate:
    """`generate` with a dynamic cache and SDPA attention; it samples at temperature 1 and computes no log-probs."""

    def __init__(self, folder: Path, *, dtype: torch.dtype, device: torch.device) -> None:
        """Load the model in `folder`."""
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
        self.model = model.to(device).eval()
        # In place of the model's own: no end token, no penalty, no top-k or top-p from there.
        self.model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
            do_sample=True, temperature=1.0, top_k=0, top_p=1.0, eos_token_id=None, pad_token_id=PAD_TOKEN_ID
        )

    def run(self, requests: Sequence[Request]) -> RunTime:
        """Decode all of them once, as one batch; each ends at its `max_new_tokens`."""
        started = time.perf_counter()
        self.generate(requests)
        seconds = time.perf_counter() - started
        return RunTime(seconds=seconds, num_tokens=sum(request.sampling.max_new_tokens for request in requests))

    @torch.inference_mode()
    def generate(self, requests: Sequence[Request]) -> Tensor:
        """New tokens of each sequence, on the host, padded on the right: [B, longest]."""
        prompts = [request.prompt_token_ids for request in requests]
        width = max(len(prompt) for prompt in prompts)
        rows = [(PAD_TOKEN_ID,) * (width - len(prompt)) + prompt for prompt in prompts]
        masks = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        lengths = [request.sampling.max_new_tokens for request in requests]
        device = self.model.device
        output: Tensor = self.model.generate(
            torch.tensor(rows, device=device),
            attention_mask=torch.tensor(masks, device=device),
            max_new_tokens=max(lengths),
            stopping_criteria=StoppingCriteriaList([_StopAtOwnLength(width, torch.tensor(lengths, device=device))]),
        )
        return output[:, width:].cpu()


def compare_with_peer(
    policy: Transformer,
    peer: HuggingFaceGenerate,
    options: EngineOptions,
    new_tokens: Sequence[int],
    repeats: int,
) -> Comparison:
    """Both decode the same prompts to the same lengths, `new_tokens` [B], whole rollouts in turns."""
    num_sequences, vocab_size = len(new_tokens), policy.config.vocab_size
    prompts = random_prompts(num_sequences, shortest=16, longest=128, vocab_size=vocab_size, seed=0)
    requests = [
        make_request(prompt, draw, 0, length)
        for draw, (prompt, length) in enumerate(zip(prompts, new_tokens, strict=True))
    ]
    engine = make_engine(policy, options, requests, num_sequences)
    candidates: dict[str, Callable[[], RunTime]] = {
        "transformers": lambda: peer.run(requests),
        "srtrl": lambda: take_turns([EngineRun(engine, requests)])[0][0],
    }
    runs: dict[str, list[RunTime]] = {name: [] for name in candidates}
    for turn in range(repeats + 1):
        for name in list(candidates)[:: 1 if turn % 2 == 0 else -1]:
            run = candidates[name]()
            assert run.num_tokens == sum(new_tokens), f"{name} made {run.num_tokens} tokens"
            tell(f"{num_sequences} sequences, {name}: {run.seconds:.3f} s")
            if turn:
                runs[name].append(run)
    return Comparison(labels={"sequences": str(num_sequences)}, num_tokens=sum(new_tokens), runs=runs)


def describe_peer(repeats: int) -> list[str]:
    """How it was measured, in sentences."""
    return [
        "Prompts of 16 to 128 random tokens, temperature 1; each sequence ends at a length drawn beforehand "
        f"(log-normal, sigma {TAIL_SIGMA}), and only tokens within it count. `srtrl` has a slot for every sequence, "
        "drafts nothing, and computes the log-prob of every token.",
        "`transformers`: `generate` on one batch padded on the left, SDPA attention, dynamic cache, no log-probs; the "
        "batch goes on until its longest sequence has ended.",
        f"Whole rollouts in turns: one each to warm up, then {repeats}. Seconds are medians, ratios medians over pairs "
        "of neighbouring runs with a 95% interval (from the lowest pair to the highest, where there are few).",
    ]


def draw_lengths(num_sequences: int, longest: int, *, seed: int = 0) -> list[int]:
    """Long-tailed lengths: log-normal (see above), at least 1 and at most `longest`."""
    draws = np.random.default_rng(seed).lognormal(np.log(longest * TAIL_MEDIAN_SHARE), TAIL_SIGMA, num_sequences)
    return [int(length) for length in np.clip(draws.round(), 1, longest)]
