"""`transformers`' `generate` as a contender: one static batch, padded on the left, at its best settings."""

import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, StoppingCriteria, StoppingCriteriaList

from srtrl.bench.engine_run import RunTime
from srtrl.bench.workload import Workload

PAD_TOKEN_ID = 0


class _StopAtOwnLength(StoppingCriteria):
    """Ends each row at its own length. Its batch goes on, with padding in that row, until the last row has ended."""

    eos_token_id = None
    """Having the attribute tells `generate` to fill ended rows with padding, as it does behind an end token."""

    def __init__(self, prompt_width: int, new_tokens: Tensor) -> None:
        self.ends = prompt_width + new_tokens  # [B], width at which a row ends

    def __call__(self, input_ids: Tensor, scores: object, **_: object) -> Tensor:
        """Whether each row of `input_ids` [B, L] has ended, [B]."""
        return self.ends <= input_ids.shape[1]


class HuggingFaceGenerate:
    """`generate` with a dynamic cache and SDPA attention; it samples at temperature 1 and computes no log-probs."""

    name = "transformers"

    def __init__(self, folder: Path, *, dtype: torch.dtype, device: torch.device) -> None:
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
        self.model = model.to(device).eval()
        # In place of the model's own: no end token, no penalty, no top-k or top-p from there.
        self.model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
            do_sample=True, temperature=1.0, top_k=0, top_p=1.0, eos_token_id=None, pad_token_id=PAD_TOKEN_ID
        )

    def run(self, workload: Workload) -> RunTime:
        """Decode the whole workload once, as one batch."""
        started = time.perf_counter()
        output = self.generate(workload)
        seconds = time.perf_counter() - started
        assert output.shape == (len(workload.requests), workload.longest)
        return RunTime(seconds=seconds, num_tokens=workload.num_tokens)

    @torch.inference_mode()
    def generate(self, workload: Workload) -> Tensor:
        """New tokens of each sequence, on the host, padded on the right: [B, longest]."""
        prompts = [request.prompt_token_ids for request in workload.requests]
        width = max(len(prompt) for prompt in prompts)
        rows = [(PAD_TOKEN_ID,) * (width - len(prompt)) + prompt for prompt in prompts]
        masks = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        device = self.model.device
        new_tokens = torch.tensor([request.sampling.max_new_tokens for request in workload.requests], device=device)
        output: Tensor = self.model.generate(
            torch.tensor(rows, device=device),
            attention_mask=torch.tensor(masks, device=device),
            max_new_tokens=workload.longest,
            stopping_criteria=StoppingCriteriaList([_StopAtOwnLength(width, new_tokens)]),
        )
        return output[:, width:].cpu()
