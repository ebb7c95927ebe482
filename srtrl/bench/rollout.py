"""`srtrl bench rollout`: drafters, or our decoder beside `transformers`, in whole rollouts.

From the prompts to all tokens on the host. Weights are random where a shape is named: time does not depend on their
values, and acceptance is that of the recorded (or generated) tokens, which the engine takes in place of those that it
samples; each run was checked to give exactly these. Whole rollouts alternate, after one of each to warm up, each with a
new drafter; the engines live on, as in training. Seconds are medians, `times as fast` is the median over pairs of runs
with a 95% interval (from the lowest pair to the highest, where there are few). `transformers` is `generate` of that
library in static batches padded on the left, with SDPA attention, a dynamic cache and no log-probs: a batch runs
until its longest sequence has ended, and only tokens of the samples count.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, Literal

import torch
import typer
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig

from srtrl.bench import options
from srtrl.bench.alternate import alternate, paired_ratio
from srtrl.bench.shapes import SHAPES
from srtrl.bench.tables import Row, publish, read_environment
from srtrl.bench.workload import Trace, check_completions, load_workload, make_engine, prepare
from srtrl.engine.engine import Engine
from srtrl.model.cpu_threads import set_cpu_threads
from srtrl.model.hf_config import config_from_hf
from srtrl.model.transformer import Transformer
from srtrl.model.weights import init_model, load_model, save_model
from srtrl.resolve import suggestion
from srtrl.types import Request

PEER = "transformers"
"""In place of a drafter: `generate` of that library."""
PAD_TOKEN_ID = 0
COUNTED = ("engine/decode_steps", "engine/tokens_per_decode_step", "engine/verified_per_decode_step")


class HuggingFaceGenerate:
    """`generate` with a dynamic cache and SDPA attention; it samples at temperature 1 and computes no log-probs."""

    def __init__(self, policy: Transformer) -> None:
        """Have the same weights as the policy, on its device and in its type."""
        with tempfile.TemporaryDirectory() as folder:
            save_model(policy, folder)
            model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=policy.dtype, attn_implementation="sdpa")
        self.model = model.to(policy.device).eval()
        # In place of the model's own: no end token, no penalty, no top-k or top-p from there.
        self.model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
            do_sample=True, temperature=1.0, top_k=0, top_p=1.0, eos_token_id=None, pad_token_id=PAD_TOKEN_ID
        )

    @torch.inference_mode()
    def generate(self, requests: Sequence[Request]) -> Tensor:
        """New tokens of each sequence, on the host: [B, longest], until the longest has all its `max_new_tokens`.

        Shorter sequences continue beside it, as they do (with padding) in a static batch; that does not make it slower.
        """
        prompts = [request.prompt_token_ids for request in requests]
        width = max(len(prompt) for prompt in prompts)
        rows = [(PAD_TOKEN_ID,) * (width - len(prompt)) + prompt for prompt in prompts]
        masks = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        output: Tensor = self.model.generate(
            torch.tensor(rows, device=self.model.device),
            attention_mask=torch.tensor(masks, device=self.model.device),
            max_new_tokens=max(request.sampling.max_new_tokens for request in requests),
        )
        return output[:, width:].cpu()


def command(
    *,
    trace: options.TraceFile = None,
    tokenizer: options.TokenizerFolder = None,
    drafters: options.Drafters = "",
    history: Annotated[
        float, typer.Option(min=0, max=1, help="Share of each prompt's samples that the drafter has seen before.")
    ] = 0.0,
    prompts_used: Annotated[
        int | None, typer.Option(min=1, help="Use only the first prompts. [default: all of the trace, or 1]")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=8, help="Truncate samples to this many tokens. [default with no trace: 128]")
    ] = None,
    slots: options.Slots = "",
    model: Annotated[str | None, typer.Option(help="Hugging Face folder or hub name, instead of a shape.")] = None,
    model_shape: Annotated[str, typer.Option(help=f"Random weights of this shape: {', '.join(SHAPES)}.")] = "small",
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option(help="Type of the weights.")] = "float32",
    threads: options.Threads = None,
    repeats: options.Repeats = 5,
    json_file: options.JsonFile = None,
    write_docs: options.WriteDocs = None,
) -> None:
    """Measure the speed of whole rollouts: prefill, decoding and sampling of all sequences.

    With --trace: recorded rollouts, by default with the drafters `none` and `srt`. Without: generated rollouts, by
    default with `transformers` (its `generate`, one static batch) and `none`. --drafters chooses others. The default of
    --slots is the number of samples.
    """
    names = options.parse_drafters(drafters or (f"{PEER},none" if trace is None else "none,srt"), PEER)
    if model_shape not in SHAPES:
        near = suggestion(model_shape, SHAPES) or ";"
        raise ValueError(f"--model-shape: no shape {model_shape!r}{near} known: {', '.join(SHAPES)}")
    counts = options.parse_counts("--slots", slots) if slots else ()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    weights: torch.dtype = getattr(torch, dtype)
    set_cpu_threads(threads)
    environment = read_environment(device)
    if model:
        policy = load_model(model, dtype=weights, device=device)
    else:
        policy = init_model(config_from_hf(SHAPES[model_shape], model_shape), 0, weights, device)
    max_tokens = max_tokens or (sys.maxsize if trace else 128)
    workload = load_workload(trace, policy.config, tokenizer=tokenizer, max_tokens=max_tokens, history=history)
    workload = workload.first_prompts(prompts_used or (len(workload.history) if trace else 1))
    counts = counts or (len(workload.requests),)
    rows = compare_rollouts(policy, workload, names, counts, repeats)
    source = f"Drafters on a trace: {trace.name}" if trace else "Rollouts: generated"
    seen = f"{history:g} as history" if history else "no history"
    where = f"{model or model_shape}, {dtype}, {device.type}, {environment['threads']} threads"
    title = f"{source}, {seen}, {where}, {', '.join(map(str, counts))} slots"
    publish(title, {"rows": rows}, __doc__, environment, json_file, write_docs)


def compare_rollouts(
    policy: Transformer,
    trace: Trace,
    names: Sequence[str],
    slot_counts: Sequence[int],
    repeats: int,
    **changes: Any,
) -> list[Row]:
    """Decode the trace with each drafter (or `PEER`) of `names`, whole rollouts in turns; one row for each, and count.

    `changes` are fields of `EngineOptions`.
    """
    peer = HuggingFaceGenerate(policy) if PEER in names else None
    rows: list[Row] = []
    for num_slots in slot_counts:
        candidates: dict[str, Callable[[], dict[str, float]]] = {}
        for name in names:
            if name == PEER and peer is not None:
                candidates[name] = partial(run_peer, peer, trace, num_slots)
            else:
                engine = make_engine(policy, num_slots, trace.max_sequence_tokens, **changes)
                candidates[name] = partial(run_engine, engine, name, trace)
        runs = alternate(candidates, repeats)
        baseline = [run["seconds"] for run in runs[names[0]]]
        for name, of_one in runs.items():
            seconds = [run["seconds"] for run in of_one]
            median = statistics.median(seconds)
            row: dict[str, Any] = {
                "slots": num_slots,
                "sequences": len(trace.requests),
                "drafter": name,
                "seconds": median,
                "tokens_per_second": trace.num_tokens / median,
            }
            if name != PEER:
                num_steps, *means = (statistics.fmean(run[metric] for run in of_one) for metric in COUNTED)
                row["ms_per_step"] = 1000 * median / num_steps
                row["tokens_per_step"], row["verified_per_step"] = means
            if name != names[0]:
                row["times_as_fast"] = paired_ratio(baseline, seconds)
            rows.append(row | {"runs": of_one})
    return rows


def run_engine(engine: Engine, drafter: str, trace: Trace) -> dict[str, float]:
    """One rollout, from the prompts to all tokens on the host: its seconds, and what the engine counted."""
    prepare(engine, drafter, trace)
    started = time.perf_counter()
    completions = list(engine.generate(trace.requests))
    seconds = time.perf_counter() - started
    check_completions(completions, trace)
    return {"seconds": seconds, **engine.take_metrics()}


def run_peer(peer: HuggingFaceGenerate, trace: Trace, num_slots: int) -> dict[str, float]:
    """One rollout of the same prompts to the same lengths, a batch of `num_slots` after the other: its seconds."""
    started = time.perf_counter()
    for first in range(0, len(trace.requests), num_slots):
        peer.generate(trace.requests[first : first + num_slots])
    return {"seconds": time.perf_counter() - started}
