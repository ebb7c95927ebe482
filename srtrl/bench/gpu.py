"""`srtrl bench gpu`: is the CUDA path right (`pytest -m gpu`), and how fast is it? One command, one table."""

import gc
import math
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import torch
import typer
from accelerate import Accelerator

from srtrl.bench.alternate import EngineRun, paired_ratio, take_turns, tell
from srtrl.bench.environment import read_environment
from srtrl.bench.options import JsonFile, TokenizerFolder, TraceFile, WriteDocs, check_output
from srtrl.bench.shapes import SHAPES
from srtrl.bench.tables import Document, Grid, publish
from srtrl.bench.workload import (
    SAMPLES_OF_A_PROMPT,
    check_completions,
    drafter_maker,
    generated_prompts,
    make_request,
    prepare,
    random_prompts,
    read_trace,
    share_out,
)
from srtrl.engine.engine import Engine, EngineOptions
from srtrl.model.hf_config import config_from_hf
from srtrl.model.transformer import Transformer, model_flops
from srtrl.model.weights import init_model
from srtrl.recipe import Recipe
from srtrl.rollout.recorded import RecordedPrompt
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
    slots: tuple[int, ...] = (64, 256)
    """Sequences of a decode step, beside 1; and of the comparison of drafters, one sample for each slot."""
    context: int = 512
    """Tokens of a sequence of decode steps and of the update."""
    num_steps: int = 48
    """Decode steps that are timed."""
    max_tokens: int = 1024
    """Of a sample in the comparison of drafters."""
    update_tokens: int = 8192
    """Of a micro-batch."""


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
)


@dataclass(kw_only=True, slots=True)
class GpuBench:
    """What the sections share, and what they found."""

    sizes: Sizes
    policy: Transformer
    prompts: list[RecordedPrompt]
    """Of the comparison of drafters."""
    bandwidth: float = math.nan
    """Bytes read per second."""
    matmul_rate: float = math.nan
    """Operations per second."""
    rows: list[tuple[str, str, str]] = field(default_factory=list)
    """Of the table: section, what, figure."""
    values: dict[str, Any] = field(default_factory=dict)
    """For programs."""

    @property
    def device(self) -> torch.device:
        """Where everything is measured."""
        return self.policy.device

    def add(self, section: str, what: str, figure: str, **values: Any) -> None:
        """One row of the table, and its numbers (None for NaN: JSON has no word for it)."""
        self.rows.append((section, what, figure))
        known = {
            name: None if isinstance(value, float) and math.isnan(value) else value for name, value in values.items()
        }
        self.values.setdefault(section, []).append({"what": what, **known})
        tell(f"{section}: {what}: {figure}")

    def synchronise(self) -> None:
        """Wait until the device is idle."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds_of(self, work: Callable[[], object], *, warm_up: int = 3, repeats: int = REPEATS) -> float:
        """Median seconds from an idle device to an idle device."""
        seconds = []
        for _ in range(warm_up + repeats):
            self.synchronise()
            started = time.perf_counter()
            work()
            self.synchronise()
            seconds.append(time.perf_counter() - started)
        return median(seconds[warm_up:])

    def engine(self, slots: int, max_sequence_tokens: int) -> Engine:
        """An engine on the policy."""
        options = EngineOptions(
            slots=slots,
            max_sequence_tokens=max_sequence_tokens,
            kv_memory_gib=12.0,
            prefill_chunk_tokens=8192,
            draft_budget="auto" if self.device.type == "cuda" else 4,  # a smoke test drafts at any cost
        )
        return Engine(self.policy, options)

    def requests(self, count: int, num_prompt_tokens: int, num_new_tokens: int) -> list[Request]:
        """Samples of random prompts."""
        vocab_size = self.policy.config.vocab_size
        prompts = random_prompts(
            count, shortest=num_prompt_tokens, longest=num_prompt_tokens, vocab_size=vocab_size, seed=0
        )
        return [make_request(prompt, draw, 0, num_new_tokens) for draw, prompt in enumerate(prompts)]


def command(
    *,
    trace: TraceFile = None,
    tokenizer: TokenizerFolder = None,
    checks: Annotated[bool, typer.Option(help="Run `pytest -m gpu` of the repository first.")] = True,
    smoke: Annotated[bool, typer.Option("--smoke", help="Tiny and on the CPU: does every line run?")] = False,
    json_file: JsonFile = None,
    write_docs: WriteDocs = None,
) -> None:
    """Check the CUDA path, then measure it: decode steps, drafts, log-probs, the update.

    Without --trace the rollouts that drafters are compared on are generated. Exit code 1: a check or a section failed.
    """
    check_output("--json", json_file)
    check_output("--write-docs", write_docs)
    if not smoke and not torch.cuda.is_available():
        raise ValueError(
            f"srtrl bench gpu measures a CUDA device, and torch {torch.__version__} sees none; --smoke runs every line "
            "of it on the CPU, tiny"
        )
    sizes, device = (SMOKE, torch.device("cpu")) if smoke else (Sizes(), torch.device("cuda", 0))
    checked = run_checks(Path(__file__).resolve().parents[2] / "tests") if checks and not smoke else "not run"
    environment = read_environment(device)
    config = config_from_hf(SHAPES[sizes.shape] | {"hidden_act": "silu"}, sizes.shape)
    prompts = (
        generated_prompts(
            -(-2 * max(sizes.slots) // SAMPLES_OF_A_PROMPT), max_tokens=sizes.max_tokens, vocab_size=config.vocab_size
        )
        if trace is None or smoke
        else read_trace(trace, tokenizer=tokenizer, max_tokens=sizes.max_tokens)
    )
    bench = GpuBench(sizes=sizes, policy=init_model(config, 0, sizes.dtype, device), prompts=prompts)
    bench.add("checks", "pytest -m gpu", checked, result=checked)
    for section in (measure_limits, measure_steps, compare_drafters, measure_update):
        try:
            section(bench)
        except (RuntimeError, ValueError, AssertionError) as error:  # time on a GPU is scarce: go on with the others
            traceback.print_exc()
            failure = f"FAILED: {type(error).__name__}: {error}".splitlines()[0]
            bench.add(section.__name__, "all of it", failure, result=failure)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    source = "generated rollouts" if trace is None or smoke else trace.name
    where = "smoke test on a CPU: the figures say nothing" if smoke else environment.processor
    grid = Grid(columns=("section", "what", "figure"), rows=tuple(bench.rows))
    notes = _notes(sizes, source)
    values = {"sections": bench.values}
    title = f"The CUDA path: {sizes.shape}, {where}"
    document = Document(title=title, environment=environment, notes=notes, grids=(grid,), values=values)
    publish(document, json_file, write_docs)
    if any(figure.startswith("FAILED") for _, _, figure in bench.rows):
        raise typer.Exit(1)


def run_checks(tests: Path) -> str:
    """Run the repository's tests for a GPU; returns their result in words, beginning with FAILED where one failed."""
    if not tests.is_dir() or find_spec("pytest") is None:
        return "not run: this needs a checkout of the repository with its tests/, and pytest"
    program = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", str(tests)]
    result = subprocess.run(program, cwd=tests.parent, capture_output=True, text=True, check=False)
    tell(result.stdout + result.stderr)
    summary = (result.stdout.strip().splitlines() or ["no output"])[-1]
    return summary if result.returncode == 0 else f"FAILED: {summary}"


def measure_limits(bench: GpuBench) -> None:
    """What the device can do: reading memory, matrix products."""
    sizes, device = bench.sizes, bench.device
    memory = torch.rand(sizes.copy_bytes // 4, device=device)
    bench.bandwidth = sizes.copy_bytes / bench.seconds_of(memory.sum)
    left, right = (torch.randn(sizes.matmul_width, sizes.matmul_width, device=device).to(sizes.dtype) for _ in range(2))
    out = torch.empty_like(left)
    bench.matmul_rate = 2 * sizes.matmul_width**3 / bench.seconds_of(lambda: torch.mm(left, right, out=out))
    bench.add("limits", "reading memory", f"{bench.bandwidth / 1e12:.3g} TB/s", per_second=bench.bandwidth)
    what = f"matrix products, {sizes.dtype}".replace("torch.", "")
    bench.add("limits", what, f"{bench.matmul_rate / 1e12:.3g} TFLOP/s", per_second=bench.matmul_rate)


def measure_steps(bench: GpuBench) -> None:
    """Decode steps without drafts, beside the time in which weights and KV are read once."""
    sizes, policy = bench.sizes, bench.policy
    new_tokens = 4 * sizes.num_steps
    engine = bench.engine(max(sizes.slots), sizes.context + new_tokens)
    for count in (1, *sizes.slots):
        engine.begin_rollout("train")
        for request in bench.requests(count, sizes.context, new_tokens):
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
        host = engine.take_metrics().get("engine/host_seconds", math.nan) / sizes.num_steps
        engine.end_rollout()
        device = median(engine.runner.time_step(count, sizes.context, count) for _ in range(REPEATS))
        num_bytes = sum(weight.numel() * weight.element_size() for weight in policy.parameters())
        if policy.head is not None:
            num_bytes -= policy.embedding.numel() * policy.embedding.element_size()
        num_bytes += count * sizes.context * engine.runner.page_bytes // engine.options.page_size
        limit = num_bytes / bench.bandwidth
        values = {"step": median(seconds), "launch_to_result": device, "host": host, "memory_limit": limit}
        figures = ", ".join(f"{name.replace('_', ' ')} {1e3 * value:.2f}" for name, value in values.items())
        what = f"{count} sequences of {sizes.context} tokens, ms"
        bench.add("decode step", what, f"{figures}; {median(seconds) / limit:.2f}x the limit", **values)


def compare_drafters(bench: GpuBench) -> None:
    """`srt` against `none` with half of each prompt's samples as history, side by side step by step."""
    sizes = bench.sizes
    whole = share_out(bench.prompts, history=0.5)
    for slots in sizes.slots:
        if len(whole.requests) < slots:
            raise ValueError(
                f"--trace: {slots} samples are decoded, but half of each prompt's are {len(whole.requests)}"
            )
        trace = whole.first_prompts(whole.requests[slots - 1].draw_index + 1)
        trace.check_model(bench.policy.config)
        engines = {name: bench.engine(slots, trace.max_sequence_tokens) for name in ("none", "srt")}
        seconds: dict[str, list[float]] = {name: [] for name in engines}
        metrics: dict[str, float] = {}
        for turn in range(1 + TURNS):
            names = list(engines)[:: 1 if turn % 2 == 0 else -1]
            for name in names:
                prepare(engines[name], drafter_maker(name)(), trace)
            taken = take_turns([EngineRun(engines[name], trace.requests) for name in names])
            for name, (run, completions) in zip(names, taken, strict=True):
                check_completions(completions, trace, name)
                tell(f"{slots} slots, {name}, {f'run {turn}' if turn else 'warm-up'}: {run.seconds:.3f} s")
                seconds[name] += [run.seconds] if turn else []
                metrics |= {f"{name}/{key}": value for key, value in run.metrics.items()}
        ratio = paired_ratio(seconds["none"], seconds["srt"])
        hosts = [
            1e3 * metrics.get(f"{name}/engine/host_seconds", math.nan) / metrics[f"{name}/engine/decode_steps"]
            for name in engines
        ]
        figure = (
            f"{ratio}; {metrics['srt/engine/tokens_per_decode_step']:.2f} tokens and "
            f"{metrics['srt/engine/verified_per_decode_step']:.2f} verified per step; host {hosts[0]:.2f} and "
            f"{hosts[1]:.2f} ms per step"
        )
        bench.add("drafts", f"{slots} slots, srt to none", figure, ratio=ratio.value, seconds=seconds, metrics=metrics)


def measure_update(bench: GpuBench) -> None:
    """Decode, then learn from it: decoder against trainer with the same weights, and the update's share of the rate."""
    sizes, policy, random = bench.sizes, bench.policy, np.random.default_rng(0)
    count, num_prompt = UPDATE_BATCHES * sizes.update_tokens // sizes.context, sizes.context // 4
    with torch.no_grad():
        policy.final_norm.mul_(SHARPNESS)
    requests = bench.requests(count, num_prompt, sizes.context - num_prompt)
    sequences = [
        TrainSequence(
            token_ids=np.array([*one.request.prompt_token_ids, *one.token_ids], np.int64),
            num_prompt_tokens=num_prompt,
            draw_index=one.request.draw_index // 2,
            rollout_logprobs=np.array(one.rollout_logprobs, np.float32),
            advantages=np.full(len(one.token_ids), random.standard_normal(), np.float32),
        )
        for one in bench.engine(max(sizes.slots), sizes.context).generate(requests)
    ]
    sequences.sort(key=lambda one: one.draw_index)
    train = {"num_steps": 1, "micro_batch_tokens": sizes.update_tokens, "max_logprob_difference": 1e9}
    rollout = {"num_prompts": count // 2, "num_samples": 2, "max_prompt_tokens": 1, "max_new_tokens": 1}
    recipe = Recipe.model_validate(
        {"name": "bench", "model": {"path": "-"}, "task": {"name": "-"}, "rollout": rollout, "train": train}
    )
    optimizer = build_optimizer(policy, learning_rate=1e-6, weight_decay=0.0, betas=(0.9, 0.99), eps=1e-8)
    accelerator = Accelerator(cpu=bench.device.type == "cpu", mixed_precision="no")

    def update() -> dict[str, float]:
        return update_policy(policy, optimizer, accelerator, sequences, recipe=recipe, step=1, kl_coefficient=0.0)

    found = update()  # both still have the same weights
    values = {name: found[f"logprob_difference/{name}"] for name in ("mean", "max", "kl")}
    figure = ", ".join(f"{name} {value:.2g}" for name, value in values.items())
    bench.add("log-probs", "decoder against trainer, absolute difference", figure, **values)
    seconds, lengths = bench.seconds_of(update, warm_up=0, repeats=3), [sizes.context] * count
    rate = model_flops(policy.config, lengths, num_targets=count * (sizes.context - num_prompt)) / seconds
    values = {"tokens_per_second": sum(lengths) / seconds, "matmul_share": rate / bench.matmul_rate}
    figure = f"{values['tokens_per_second']:,.0f} tokens/s, {values['matmul_share']:.0%} of the matmul rate"
    bench.add("update", f"{sum(lengths)} tokens", figure, **values)


def _notes(sizes: Sizes, source: str) -> tuple[str, ...]:
    return (
        f"Random weights of the shape {sizes.shape}, {sizes.dtype}".replace("torch.", "") + ". Medians.",
        "Decode step: the engine without drafts, sampling and log-probs included. `launch to result` is the runner "
        "alone, `host` what the host does but for waiting; the memory limit reads weights and KV once.",
        f"Drafts: {source}, cut to {sizes.max_tokens} tokens, one sample for each slot; the drafter has seen the other "
        "half of each prompt's samples. Both engines take turns step by step and give exactly the recorded tokens.",
        f"Log-probs and update: {UPDATE_BATCHES} micro-batches of {sizes.update_tokens} tokens in sequences of "
        f"{sizes.context}, which the engine decoded, the final norm times {SHARPNESS:g}; AdamW included. The share "
        "counts model FLOPs, nothing twice.",
    )
