"""`transformers`' `generate`, to compare with: one static batch, padded on the left, at its best settings."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, StoppingCriteria, StoppingCriteriaList

from srtrl.bench.alternate import RunTime
from srtrl.types import Request

PAD_TOKEN_ID = 0


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
