"""`transformers`' continuous batching as a contender: its manager lives on, as our engine does."""

import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from srtrl.bench.engine_run import RunTime
from srtrl.bench.workload import Workload

NAME = "transformers, continuous batching"
STOP_SECONDS = 10.0
POLL_SECONDS = 1.0


class NotAvailableError(RuntimeError):
    """This version of `transformers` has no such thing, or it does not run here."""


class ContinuousBatching:
    """The manager of `transformers`, with a paged cache and its own choice of CUDA graphs; `close` ends its thread."""

    name = NAME

    def __init__(self, folder: Path, *, dtype: torch.dtype, device: torch.device, **settings: Any) -> None:
        """Load the model in `folder` and start the manager.

        Args:
            folder: In the layout of Hugging Face.
            dtype: Of the weights.
            device: Where to compute.
            settings: Of its `ContinuousBatchingConfig`.

        Raises:
            NotAvailableError: It cannot be had here; the message says why.
        """
        try:
            from transformers import ContinuousBatchingConfig
        except ImportError as error:
            raise NotAvailableError(f"this transformers has another interface ({error})") from error
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
        self.model = model.to(device).eval()
        # -1: no end token. The rest is as in `HuggingFaceGenerate`.
        generation = GenerationConfig(  # type: ignore[no-untyped-call]
            do_sample=True, temperature=1.0, top_k=0, top_p=1.0, eos_token_id=-1, pad_token_id=0
        )
        self._num_runs = 0
        try:
            self._manager: Any = self.model.init_continuous_batching(
                generation_config=generation,
                continuous_batching_config=ContinuousBatchingConfig(**settings),
            )
            if device.type == "cuda":
                self._manager.warmup()  # graphs; on a CPU there are none
        except (RuntimeError, ValueError, TypeError, AttributeError, ImportError) as error:
            raise NotAvailableError(f"{type(error).__name__}: {error}") from error
        self._manager.start()

    def run(self, workload: Workload) -> RunTime:
        """Decode the whole workload once.

        Raises:
            NotAvailableError: A request failed, or the manager's thread has ended.
        """
        prompts = [list(request.prompt_token_ids) for request in workload.requests]
        self._num_runs += 1
        started = time.perf_counter()
        for index, (prompt, request) in enumerate(zip(prompts, workload.requests, strict=True)):
            self._manager.add_request(
                prompt, request_id=f"{self._num_runs}/{index}", max_new_tokens=request.sampling.max_new_tokens
            )
        num_tokens = sum(len(self._next_finished()) for _ in workload.requests)
        seconds = time.perf_counter() - started
        return RunTime(seconds=seconds, num_tokens=num_tokens)

    def close(self) -> None:
        """End the manager's thread and free its cache."""
        self._manager.stop(block=True, timeout=STOP_SECONDS, hard_stop=True)  # unfinished requests are dropped

    def _next_finished(self) -> list[int]:
        """New tokens of the next request that ends."""
        while True:
            result = self._manager.get_result(timeout=POLL_SECONDS)
            if result is None:
                if not self._manager.is_running():
                    raise NotAvailableError("its thread has ended; see the log above")
            elif result.error is not None:
                raise NotAvailableError(f"a request failed: {result.error}")
            elif result.is_finished():
                tokens: list[int] = result.generated_tokens
                return tokens
