"""`srtrl bench gpu`: is the CUDA path correct (`pytest -m "gpu and not slow"`), and how fast is it?

Random weights; medians. Decode steps: the engine without drafts, sampling and log-probs included. `device ms` is the
runner alone, from launch to result, `host ms` what the host does but for waiting; the memory limit reads weights and KV
once. Drafts: one sample for each slot; the drafter has seen the other half of each prompt's samples. Each run of ours
was checked to give exactly the recorded (or generated) tokens; whole rollouts alternate, and `times as fast` is the
median over pairs of runs, with the lowest and the highest. Update: sequences that the engine decoded, the final norm
sharpened so that the log-probs are as uneven as those of a trained policy; AdamW included. The share of the matmul rate
counts model FLOPs, nothing twice. Differences are absolute, of the log-probs of decoder and trainer with the same
weights.
"""

import gc
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Annotated

import numpy as np
import torch
import typer
from accelerate import Accelerator

from srtrl.bench import options
from srtrl.bench.rollout import PEER, compare_rollouts
from srtrl.bench.shapes import SHAPES
from srtrl.bench.tables import Row, publish, read_environment
from srtrl.bench.workload import Trace, load_workload, make_engine, make_request, random_prompts
from srtrl.model.hf_config import config_from_hf
from srtrl.model.transformer import ModelConfig, Transformer, model_flops
from srtrl.model.weights import init_model
from srtrl.recipe.schema import Recipe
from srtrl.trainer.optimizer import build_optimizer
from srtrl.trainer.update import update_policy
from srtrl.types import Request, TrainSequence

REPEATS = 12
"""Measurements on the device of which the median counts, after three to warm up."""
TURNS = 3
"""Rollouts of each drafter, after one to warm up."""
SHARPNESS = 6.0
"""The final norm of random weights is multiplied by this: as uneven as those of a trained policy."""
UPDATE_BATCHES = 4
"""Micro-batches of an update."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Sizes:
    """How large everything is."""

    shape: str = "qwen2.5-1.5b"
    dtype: torch.dtype = torch.bfloat16
    copy_bytes: int = 4 << 30
    matmul_width: int = 8192
    slots: tuple[int, ...] = (64, 256, 640)
    """Sequences of a decode step, beside 1; and of the comparison of drafters, one sample for each slot."""
    context: int = 512
    """Tokens of a sequence of decode steps and of the update."""
    num_steps: int = 48
    """Decode steps that are timed."""
    max_tokens: int = 512
    """Of a sample in the comparison of drafters."""
    update_tokens: int = 8192
    """Of a micro-batch."""
    draft_budget: int | str = "auto"


SMOKE = Sizes(
    shape="tiny",
    dtype=torch.float32,
    copy_bytes=1 << 20,
    matmul_width=64,
    slots=(4, 8),
    context=32,
    num_steps=2,
    max_tokens=16,
    update_tokens=64,
    draft_budget=4,  # drafts at any cost
)


def command(
    *,
    trace: options.TraceFile = None,
    tokenizer: options.TokenizerFolder = None,
    checks: Annotated[bool, typer.Option(help="Run the repository's tests for a GPU first.")] = True,
    smoke: Annotated[bool, typer.Option("--smoke", help="Run everything at a tiny size on the CPU.")] = False,
    json_file: options.JsonFile = None,
    write_docs: options.WriteDocs = None,
) -> None:
    """Check the CUDA path, then measure it: limits, decode steps, drafts, log-probs, the update.

    Drafters are compared on generated rollouts; with --trace on recorded ones, if there is one per slot. Exit code 1: a
    check or a section failed.
    """
    if not smoke and not torch.cuda.is_available():
        raise ValueError(
            f"srtrl bench gpu measures a CUDA device, and torch {torch.__version__} sees none; --smoke runs every line "
            "of it on the CPU, tiny"
        )
    sizes, device = (SMOKE, torch.device("cpu")) if smoke else (Sizes(), torch.device("cuda", 0))
    config = config_from_hf(SHAPES[sizes.shape], sizes.shape)
    workloads = choose_workloads(sizes, config, None if smoke else trace, tokenizer)
    environment = read_environment(device)
    checked = run_checks(Path(__file__).resolve().parents[2] / "tests") if checks and not smoke else "not run"
    policy = init_model(config, 0, sizes.dtype, device)
    limits = measure_limits(sizes, device)
    tables: dict[str, Sequence[Row]] = {"checks": [{"result": checked}], "limits": [limits]}
    sections: dict[str, Callable[[], Sequence[Row]]] = {
        "decode_steps": lambda: measure_steps(sizes, policy, limits["terabytes_per_second"]),
        "drafts": lambda: compare_drafters(sizes, policy, workloads),
        "update": lambda: [measure_update(sizes, policy, limits["teraflops"])],
    }
    for name, section in sections.items():
        print(f"{name} ...", file=sys.stderr, flush=True)
        try:
            tables[name] = section()
        except (RuntimeError, ValueError, AssertionError) as error:  # time on a GPU is scarce: continue with the others
            traceback.print_exc()
            tables[name] = [{"failed": f"{type(error).__name__}: {error}".splitlines()[0]}]
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    where = "smoke test on a CPU: the figures say nothing" if smoke else environment["processor"]
    title = f"The CUDA path: {sizes.shape}, {where}"
    publish(title, tables, __doc__, environment, json_file, write_docs)
    if checked.startswith("FAILED") or any("failed" in rows[0] for rows in tables.values()):
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


def seconds_of(work: Callable[[], object], device: torch.device, *, warm_up: int = 3, repeats: int = REPEATS) -> float:
    """Median seconds from an idle device to an idle device."""
    seconds = []
    for _ in range(warm_up + repeats):
        started = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started)
    return median(seconds[warm_up:])


def random_requests(policy: Transformer, count: int, num_prompt_tokens: int, num_new_tokens: int) -> list[Request]:
    """Samples of random prompts."""
    prompts = random_prompts(count, num_prompt_tokens, num_prompt_tokens, policy.config.vocab_size)
    return [make_request(prompt, draw, 0, num_new_tokens) for draw, prompt in enumerate(prompts)]


def measure_limits(sizes: Sizes, device: torch.device) -> dict[str, float]:
    """What the device can do: reading memory, matrix products."""
    memory = torch.rand(sizes.copy_bytes // 4, device=device)
    left, right = (torch.randn(sizes.matmul_width, sizes.matmul_width, device=device).to(sizes.dtype) for _ in range(2))
    out = torch.empty_like(left)
    return {
        "terabytes_per_second": 1e-12 * sizes.copy_bytes / seconds_of(memory.sum, device),
        "teraflops": 2e-12 * sizes.matmul_width**3 / seconds_of(lambda: torch.mm(left, right, out=out), device),
    }


def measure_steps(sizes: Sizes, policy: Transformer, terabytes_per_second: float) -> list[Row]:
    """Decode steps without drafts, beside the time in which weights and KV are read once."""
    new_tokens = 4 * sizes.num_steps
    engine = make_engine(policy, max(sizes.slots), sizes.context + new_tokens, prefill_chunk_tokens=8192)
    weight_bytes = sum(weight.numel() * weight.element_size() for weight in policy.parameters())
    if policy.head is not None:  # else the embedding is the head, and read as such
        weight_bytes -= policy.embedding.numel() * policy.embedding.element_size()
    rows: list[Row] = []
    for count in (1, *sizes.slots):
        with engine.rollout("train"):
            for request in random_requests(policy, count, sizes.context, new_tokens):
                engine.add(request)
            while engine.scheduler.num_waiting or int(engine.batch.is_decoding.sum()) < count:
                engine.step()
            for _ in range(3):  # kernels are compiled, graphs captured
                engine.step()
            engine.take_metrics()
            seconds = []
            for _ in range(sizes.num_steps):
                started = time.perf_counter()
                engine.step()
                seconds.append(time.perf_counter() - started)
            host = engine.take_metrics().get("engine/host_seconds")  # nothing is waited for on a CPU
        device = median(engine.runner.time_step(count, sizes.context, count) for _ in range(REPEATS))
        kv_bytes = count * sizes.context * engine.runner.page_bytes // engine.options.page_size
        limit = 1e-12 * (weight_bytes + kv_bytes) / terabytes_per_second
        rows.append(
            {
                "sequences": count,
                "step_ms": 1000 * median(seconds),
                "device_ms": 1000 * device,
                "host_ms": None if host is None else 1000 * host / sizes.num_steps,
                "memory_limit_ms": 1000 * limit,
                "times_the_limit": median(seconds) / limit,
            }
        )
    return rows


def choose_workloads(
    sizes: Sizes, config: ModelConfig, trace: Path | None, tokenizer: str | None
) -> list[tuple[str, Trace]]:
    """For each number of slots the source of the samples and they themselves, half of each prompt's being history.

    They are those of the trace where it has one for each slot, else generated.
    """

    @cache
    def load(source: Path | None) -> Trace:
        return load_workload(source, config, tokenizer=tokenizer, max_tokens=sizes.max_tokens, history=0.5)

    chosen = []
    for slots in sizes.slots:
        for source in (trace, None):
            whole = load(source)
            if len(whole.requests) >= slots:
                break
        chosen.append((source.name if source else "generated", whole.first_samples(slots)))
    return chosen


def compare_drafters(sizes: Sizes, policy: Transformer, workloads: Sequence[tuple[str, Trace]]) -> list[Row]:
    """`srt` against `none`, and with the fewest slots `transformers`, too."""
    rows: list[Row] = []
    for slots, (source, trace) in zip(sizes.slots, workloads, strict=True):
        names = ("none", "srt", *((PEER,) if slots == min(sizes.slots) else ()))
        found = compare_rollouts(
            policy, trace, names, [slots], TURNS, draft_budget=sizes.draft_budget, prefill_chunk_tokens=8192
        )
        rows += [{"samples": source, **row} for row in found]
    return rows


def measure_update(sizes: Sizes, policy: Transformer, teraflops: float) -> Row:
    """Decode, then learn from it: decoder against trainer with the same weights, and the update's share of the rate."""
    random = np.random.default_rng(0)
    count, num_prompt = UPDATE_BATCHES * sizes.update_tokens // sizes.context, sizes.context // 4
    with torch.no_grad():
        policy.final_norm.mul_(SHARPNESS)
    engine = make_engine(policy, min(sizes.slots), sizes.context, prefill_chunk_tokens=8192)
    requests = random_requests(policy, count, num_prompt, sizes.context - num_prompt)
    sequences = [
        TrainSequence(
            token_ids=np.array([*one.request.prompt_token_ids, *one.token_ids], np.int64),
            targets=np.arange(num_prompt, num_prompt + len(one.token_ids)),
            draw_index=one.request.draw_index // 2,
            rollout_logprobs=np.array(one.rollout_logprobs, np.float32),
            advantages=np.full(len(one.token_ids), random.standard_normal(), np.float32),
        )
        for one in engine.generate(requests)
    ]
    sequences.sort(key=lambda one: one.draw_index)
    train = {
        "num_steps": 1,
        "micro_batch_tokens": sizes.update_tokens,
        "max_logprob_difference": 1e9,
        "max_logprob_kl": 1e9,
    }
    rollout = {"num_prompts": count // 2, "num_samples": 2, "max_prompt_tokens": 1, "max_new_tokens": 1}
    recipe = Recipe.model_validate(
        {"name": "bench", "model": {"path": "-"}, "task": {"name": "-"}, "rollout": rollout, "train": train}
    )
    optimizer = build_optimizer(policy, learning_rate=1e-6, weight_decay=0.0, betas=(0.9, 0.99), eps=1e-8)
    accelerator = Accelerator(cpu=policy.device.type == "cpu", mixed_precision="no")

    def update() -> dict[str, float]:
        return update_policy(policy, optimizer, accelerator, sequences, recipe=recipe, step=1, kl_coefficient=0.0)

    found = update()  # both still have the same weights
    seconds = seconds_of(update, policy.device, warm_up=0, repeats=TURNS)
    num_tokens, num_targets = count * sizes.context, count * (sizes.context - num_prompt)
    rate = model_flops(policy.config, [sizes.context] * count, num_targets=num_targets) / seconds
    return {
        "tokens": num_tokens,
        "tokens_per_second": num_tokens / seconds,
        "share_of_matmul_rate": 1e-12 * rate / teraflops,
        **{f"logprob_difference_{name}": found[f"logprob_difference/{name}"] for name in ("mean", "max", "kl")},
    }
