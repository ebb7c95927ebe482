"""`srtrl bench gpu`: the CUDA path: whether it is correct (`pytest -m "gpu and not slow"`), then how fast it is.

Whole rollouts with random weights, as `srtrl bench rollout` measures them: a sample for each slot; the drafter has seen
the other half of each prompt's samples. Each run was checked to give exactly the recorded (or generated) tokens; runs
alternate, and `times as fast` is the median over pairs of runs, with the lowest and the highest. `transformers` is
`generate` of that library in one static batch padded on the left, with SDPA attention, a dynamic cache and no
log-probs: it runs until the longest sequence has ended, and only tokens of the samples count.
"""

import gc
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from srtrl.bench import options
from srtrl.bench.rollout import compare_rollouts
from srtrl.bench.shapes import SHAPES
from srtrl.bench.tables import Row, publish, read_environment
from srtrl.bench.workload import Trace, load_workload
from srtrl.model.hf_config import config_from_hf
from srtrl.model.transformer import Transformer
from srtrl.model.weights import init_model, save_model

REPEATS = 3
"""Rollouts of each, after one to warm up."""
PAD_TOKEN_ID = 0


@dataclass(kw_only=True, slots=True, frozen=True)
class Sizes:
    """How large everything is."""

    shape: str = "qwen2.5-1.5b"
    dtype: torch.dtype = torch.bfloat16
    slots: tuple[int, ...] = (64, 256, 640)
    """Sequences at a time, a table row for each drafter; with the fewest `transformers` is compared, too."""
    max_tokens: int = 512
    """Of a sample."""
    draft_budget: int | str = "auto"


SMOKE = Sizes(shape="tiny", dtype=torch.float32, slots=(4, 8), max_tokens=16, draft_budget=4)  # drafts at any cost


def command(
    *,
    trace: options.TraceFile = None,
    tokenizer: options.TokenizerFolder = None,
    checks: Annotated[bool, typer.Option(help="Run the repository's tests for a GPU first.")] = True,
    smoke: Annotated[bool, typer.Option("--smoke", help="Run everything at a tiny size on the CPU.")] = False,
    json_file: options.JsonFile = None,
    write_docs: options.WriteDocs = None,
) -> None:
    """Check the CUDA path, then measure the speed of its rollouts with and without drafts.

    Drafters are compared on generated rollouts; with --trace on recorded ones, if there is one per slot. Exit code 1: a
    check or a measurement failed.
    """
    if not smoke and not torch.cuda.is_available():
        raise ValueError(
            f"srtrl bench gpu measures a CUDA device, and torch {torch.__version__} sees none; --smoke runs every line "
            "of it on the CPU, tiny"
        )
    sizes, device = (SMOKE, torch.device("cpu")) if smoke else (Sizes(), torch.device("cuda", 0))
    environment = read_environment(device)
    checked = run_checks(Path(__file__).resolve().parents[2] / "tests") if checks and not smoke else "not run"
    policy = init_model(config_from_hf(SHAPES[sizes.shape], sizes.shape), 0, sizes.dtype, device)
    rows: list[Row] = []
    for slots in sizes.slots:
        print(f"{slots} slots ...", file=sys.stderr, flush=True)
        try:
            rows += measure(policy, sizes, slots, None if smoke else trace, tokenizer)
        except (RuntimeError, ValueError, AssertionError) as error:  # time on a GPU is scarce: continue with the others
            traceback.print_exc()
            rows.append({"slots": slots, "failed": f"{type(error).__name__}: {error}".splitlines()[0]})
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    where = "smoke test on a CPU: the figures say nothing" if smoke else environment["processor"]
    tables: dict[str, Sequence[Row]] = {"checks": [{"result": checked}], "rollouts": rows}
    publish(f"The CUDA path: {sizes.shape}, {where}", tables, __doc__, environment, json_file, write_docs)
    if checked.startswith("FAILED") or any("failed" in row for row in rows):
        raise typer.Exit(1)


def run_checks(tests: Path) -> str:
    """Run the repository's fast tests for a GPU; returns the result in words: FAILED is first where one failed."""
    if not tests.is_dir() or find_spec("pytest") is None:
        return "not run: this needs a checkout of the repository with its tests/, and pytest"
    program = [sys.executable, "-m", "pytest", "-m", "gpu and not slow", "-q", "-p", "no:cacheprovider", str(tests)]
    result = subprocess.run(program, cwd=tests.parent, capture_output=True, text=True, check=False)
    print(result.stdout, result.stderr, file=sys.stderr, flush=True)
    summary = (result.stdout.strip().splitlines() or ["no output"])[-1]
    return summary if result.returncode == 0 else f"FAILED: {summary}"


def measure(policy: Transformer, sizes: Sizes, slots: int, trace: Path | None, tokenizer: str | None) -> list[Row]:
    """`none`, `srt` and, with the fewest slots, `transformers`, on the first samples of the trace if it has enough."""
    for source in (trace, None):
        whole = load_workload(source, policy.config, tokenizer=tokenizer, max_tokens=sizes.max_tokens, history=0.5)
        if len(whole.requests) >= slots:
            break
    others = {"transformers": transformers_generate(policy)} if slots == min(sizes.slots) else {}
    changes = {"draft_budget": sizes.draft_budget, "prefill_chunk_tokens": 8192}
    rows = compare_rollouts(policy, whole.first_samples(slots), ("none", "srt"), slots, REPEATS, others, **changes)
    return [{"samples": source.name if source else "generated", **row} for row in rows]


def transformers_generate(policy: Transformer) -> Callable[[Trace], object]:
    """A function that samples a trace's prompts with the same weights, to the same lengths, in one static batch."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    with tempfile.TemporaryDirectory() as folder:
        save_model(policy, folder)
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=policy.dtype, attn_implementation="sdpa")
    model = model.to(policy.device).eval()
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, eos_token_id=None, pad_token_id=PAD_TOKEN_ID
    )

    @torch.inference_mode()
    def generate(trace: Trace) -> torch.Tensor:
        prompts = [request.prompt_token_ids for request in trace.requests]
        width = max(map(len, prompts))
        rows = [(PAD_TOKEN_ID,) * (width - len(prompt)) + prompt for prompt in prompts]
        masks = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        output: torch.Tensor = model.generate(
            torch.tensor(rows, device=model.device),
            attention_mask=torch.tensor(masks, device=model.device),
            max_new_tokens=max(request.sampling.max_new_tokens for request in trace.requests),
        )
        return output.cpu()

    return generate
