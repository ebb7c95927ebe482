"""The first run on a GPU, unattended (`make bench-gpu`): what is right, then what is fast.

Each stage is a process of its own with a limit; its result is printed when it ends, also where an earlier one failed,
and the table of all of them comes last. `--minutes` is the time of all together (9; 55 for a rented hour), `--stages`
names those to run, `--logs FOLDER` keeps what each one prints, `--write-docs FILE` puts the table between the marks of
that file. `--device cpu` takes the same path with a tiny model under Triton's interpreter, to test this program.
"""

import argparse
import functools
import gzip
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests"))  # the cases of the runners' tests
STAGES = {
    "versions": 60,
    "graphs": 120,
    "values": 200,
    "synchronisations": 60,
    "profile": 120,
    "decode": 120,
    "update": 60,
    "training": 200,
    "rollouts": 300,
    "live": 400,
    "vllm": 400,
    "draft_head": 60,
    "tests": 400,
}
"""Stage -> seconds it may take, of what is left of all. The other tests come last: they compile hundreds of kernels."""

KERNEL_TESTS = (
    "triton_attention",
    "triton_layers",
    "triton_sampling",
    "runners",
    "gpu_update",
    "engine_cuda",
    "cuda_runner",
)
"""Tests of the stage `values`."""

TAIL = 8
"""Lines that are shown of a stage that failed."""

MARKS = ("<!-- gpu stages -->\n", "<!-- end of gpu stages -->")
Row = dict[str, Any]


def build(device: str, *, num_layers: int, slots: int, cuda_graphs: bool = True) -> Any:
    """A CUDA runner of Qwen2.5-1.5B with random weights, or of a tiny model on a CPU."""
    from srtrl.cuda.runner import CudaRunner
    from srtrl.engine.runner import EngineOptions

    runner = CudaRunner(random_policy(device, num_layers), EngineOptions(slots=slots, cuda_graphs=cuda_graphs), 4096)
    runner.allocate_pages(slots * 48 if device == "cuda" else 64)
    return runner


@functools.cache
def random_policy(device: str, num_layers: int) -> Any:
    """The policy of all runners of a stage: to draw its weights takes the CPU seconds."""
    import torch

    from srtrl.model.hf_config import config_from_hf
    from srtrl.model.published_shapes import SHAPES
    from srtrl.model.weights import init_model

    shape = SHAPES["qwen2.5-1.5b"] | {"num_hidden_layers": num_layers}
    if device == "cpu":
        tiny = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
        shape |= tiny | {"vocab_size": 64, "head_dim": 8, "num_hidden_layers": 1}
    return init_model(config_from_hf(shape), 0, torch.bfloat16, device, drawn_on=device)


def versions(device: str) -> list[Row]:
    """The machine and its libraries."""
    import torch
    import triton

    if device == "cpu":
        return [{"device": "cpu", "torch": torch.__version__, "triton": triton.__version__}]
    properties = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info()
    numbers = torch.randn(2**30, device=device, dtype=torch.bfloat16)
    copied = median_seconds(device, numbers.clone)
    matrix = numbers[: 2**26].view(8192, 8192)
    multiplied = median_seconds(device, lambda: matrix @ matrix)
    query = ["nvidia-smi", "--query-gpu=driver_version,power.limit,clocks.max.sm", "--format=csv,noheader"]
    driver, power, clock = subprocess.run(query, check=True, capture_output=True, text=True).stdout.strip().split(", ")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)  # noqa: PLW1510  none in an archive
    return [
        {
            "commit": commit.stdout.strip(),
            "driver": driver,
            "power limit": power,
            "SM clock": clock,
            "copied TB/s": round(2 * numbers.nbytes / copied / 1e12, 2),
            "product of 8192 TFLOP/s": round(2 * 8192**3 / multiplied / 1e12),
            "device": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "free GiB": round(free / 2**30, 1),
            "total GiB": round(total / 2**30, 1),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "triton": triton.__version__,
        }
    ]


def median_seconds(device: str, work: Any, repeats: int = 10) -> float:
    """Median time of a call and all that it launches."""
    import torch

    found = []
    for _ in range(repeats + 2):
        if device == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - started)
    return statistics.median(found[2:])


def values(device: str) -> list[Row]:
    """Every kernel, the steps of the runner and the update against plain PyTorch, in bfloat16 and float32."""
    names = KERNEL_TESTS if device == "cuda" else KERNEL_TESTS[2:3]
    return [run_pytest(device, *(f"tests/test_{name}.py" for name in names))]


def tests(device: str) -> list[Row]:
    """The repository's other fast tests for a GPU."""
    ignored = [f"--ignore=tests/test_{name}.py" for name in KERNEL_TESTS]
    return [run_pytest(device, *(["tests", *ignored] if device == "cuda" else ["tests/test_cuda_graphs.py"]))]


def run_pytest(device: str, *paths: str) -> Row:
    """Its last line, and of each test that failed the name and the first line of its error.

    What it prints goes to stderr, line by line: the last one says where it was when it was killed.
    """
    marker = f"{'' if device == 'cuda' else 'not '}gpu and not slow"
    workers = ["--numprocesses", str(min(12, os.cpu_count() or 1)), "--dist", "loadgroup"]  # compiling takes the time
    options = ["-v", "-rfE", "--tb=short", "-p", "no:cacheprovider", "-m", marker, *workers]
    lines = ["no output"]
    command = [sys.executable, "-m", "pytest", *options, *paths]
    environment = os.environ | {"COLUMNS": "300"}  # a terminal in which pytest cuts no reason off
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.strip())
            print(line, end="", file=sys.stderr, flush=True)
    failed = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
    row: Row = {"passed": process.returncode == 0, "summary": lines[-1].strip("= ")}
    return row | ({"failed": failed} if failed else {})


def graphs(device: str) -> list[Row]:
    """One step kernel by kernel, captured and replayed: tokens and log-probs are equal."""
    from srtrl.engine.runner import timing_inputs

    rows = []
    for num_rows, num_sequences in ((64, 64), (512, 64), (256, 256)) if device == "cuda" else ((8, 2),):
        found = []
        for cuda_graphs in (False, True):
            runner = build(device, num_layers=4, slots=num_sequences, cuda_graphs=cuda_graphs)
            for _ in range(4):
                runner.launch(timing_inputs(runner, num_rows, 30, num_sequences), None)
                sampled = runner.wait(num_rows)
                found.append((sampled.token_ids.tolist(), sampled.logprobs.tolist()))
        rows.append({"rows": num_rows, "passed": all(result == found[0] for result in found)})
    return rows


def synchronisations(device: str) -> list[Row]:
    """Filling and launching a step asks the device nothing; an error if it does."""
    import torch

    from srtrl.engine.runner import timing_inputs

    runner = build(device, num_layers=2, slots=64)
    for mode in ("default", "default", "default", "error"):
        if device == "cuda":
            torch.cuda.set_sync_debug_mode(mode)
        runner.launch(timing_inputs(runner, 64, 30, 64), None)
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
        runner.wait(64)
    return [{"passed": True, "synchronisations in a launch": 0}]


def profile(device: str) -> list[Row]:
    """Microseconds by kernel of a decode step and of one micro-batch of the update, the longest first."""
    import torch
    from torch.profiler import ProfilerActivity

    def by_kernel(name: str, work: Any) -> list[Row]:
        work()
        activity = ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU
        with torch.profiler.profile(activities=[activity]) as recorded:
            work()
            if device == "cuda":
                torch.cuda.synchronize()
        which = "self_device_time_total" if device == "cuda" else "self_cpu_time_total"
        events = sorted(recorded.key_averages(), key=lambda event: -getattr(event, which))
        total = sum(getattr(event, which) for event in events)
        rows: list[Row] = [{"of": name, "kernels": sum(event.count for event in events), "us": round(total)}]
        return rows + [
            {"kernel": event.key[:70], "times": event.count, "us": round(getattr(event, which), 1)}
            for event in events[:PROFILED]
        ]

    rows = []
    runner = build(device, num_layers=28, slots=256, cuda_graphs=False)
    for num_rows, num_sequences in ((64, 64), (512, 64)) if device == "cuda" else ((8, 2),):
        step = functools.partial(runner.time_step, num_rows, 512, num_sequences)
        rows += by_kernel(f"decode step, {num_rows} rows, {num_sequences} sequences", step)
    return rows + by_kernel("micro-batch of 16 x 1,024", update_of(device, 1024 if device == "cuda" else 16))


PROFILED = 14
"""Kernels that `profile` shows of each."""


def update_of(device: str, length: int = 1024) -> Any:
    """Return a function that computes the gradients of one micro-batch of 16 sequences; an eighth of it is prompt."""
    import torch

    from srtrl.cuda.update import fuse_update
    from srtrl.model.attention import PackedPlan
    from srtrl.model.logprobs import token_logprobs

    policy = random_policy(device, 28)
    if device == "cuda":
        fuse_update(policy)
    plan = PackedPlan([length] * 16, torch.device(device))
    tokens = torch.randint(policy.config.vocab_size, (16 * length,), device=device)
    targets = tokens[: 14 * length]

    def work() -> None:
        policy.zero_grad(set_to_none=True)
        hidden = policy(tokens, plan)[: len(targets)]
        logprobs, _ = token_logprobs(hidden, policy.head_weight, targets, temperature=1.0, softmax=policy.softmax)
        logprobs.sum().backward()  # type: ignore[no-untyped-call]

    return work


def update(device: str) -> list[Row]:
    """Arithmetic per second of the update's gradients, beside that of large products."""
    import torch

    from srtrl.run.step_metrics import model_flops

    rows, length = [], 1024 if device == "cuda" else 16
    policy, work = random_policy(device, 28), update_of(device, length)
    matrix = torch.randn(8192 if device == "cuda" else 64, 8192, device=device).bfloat16()
    multiplied = 2 * matrix.numel() * len(matrix) / median_seconds(device, lambda: matrix @ matrix.t())
    flops = model_flops(policy.config, [length] * 16, num_targets=14 * length)
    for recomputes in (False, "half", True):
        policy.gradient_checkpointing = recomputes
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        rate = flops / median_seconds(device, work, 5)
        row = {
            "checkpointing": recomputes,
            "TFLOP/s": round(rate / 1e12, 1),
            "of products": round(rate / multiplied, 3),
        }
        rows.append(row | {"peak GiB": round(torch.cuda.max_memory_allocated() / 2**30, 1) if device == "cuda" else 0})
    return rows


def decode(device: str) -> list[Row]:
    """Milliseconds of a decode step beside the price that benchmarks without a device calculate with."""
    import numpy as np
    import torch
    from h200 import H200_CURVE

    rows: list[Row] = []
    steps = ((8, 8), (64, 8), (64, 64), (256, 64), (512, 64), (256, 256), (512, 256), (1024, 256), (2048, 256))
    runner = build(device, num_layers=28, slots=256)
    if device == "cuda":
        free, started = torch.cuda.mem_get_info()[0], time.perf_counter()
        runner.warm_up(compiles=True)
        torch.cuda.synchronize()
        row = {"graphs": len(runner._graphs), "seconds to capture them": round(time.perf_counter() - started, 2)}
        rows.append(row | {"GiB": round((free - torch.cuda.mem_get_info()[0]) / 2**30, 2)})
    for num_rows, num_sequences in steps if device == "cuda" else ((8, 2),):
        seconds = [runner.time_step(num_rows, 512, num_sequences) for _ in range(20 if device == "cuda" else 1)]
        priced = float(np.interp(num_rows, [rows for rows, _ in H200_CURVE], [seconds for _, seconds in H200_CURVE]))
        measured = statistics.median(seconds)
        rows.append(
            {
                "sequences": num_sequences,
                "rows": num_rows,
                "ms": round(1e3 * measured, 3),
                "priced ms": round(1e3 * priced, 3),
                "of price": round(measured / priced, 2),
            }
        )
    return rows


def draft_head(device: str) -> list[Row]:
    """A draft head's guesses after a step: the same by single launches, as a graph, and on the CPU but for rounding."""
    import copy

    import numpy as np

    from srtrl.engine.runner import timing_inputs
    from srtrl.features.draft_head import DraftHead, draft_chains
    from srtrl.features.draft_head_cuda import CudaGuesses

    rows = []
    runner = build(device, num_layers=2, slots=256)
    policies = (runner.model, copy.deepcopy(runner.model).cpu())
    head, on_cpu = (DraftHead(policy, policy.dtype, vocabulary=16_384, seed=0) for policy in policies)
    head.refresh(policies[0])
    on_cpu.refresh(policies[1])
    for num in (8, 64, 256) if device == "cuda" else (2,):
        runner.launch(timing_inputs(runner, num, 30, num), None)
        runner.wait(num)
        noise = (np.ones(num, np.int32), np.ones(num, np.float32), np.arange(num, dtype=np.uint64), np.arange(num))
        guesses, found, seconds = CudaGuesses(head, runner, k=3, slots=num), [], []
        for _ in range(20 if device == "cuda" else 2):
            started = time.perf_counter()
            guesses.launch(np.arange(num), *noise)
            found.append(guesses.wait()[0])
            seconds.append(time.perf_counter() - started)
        is_same = all((tokens == found[0]).all() for tokens in found)
        like_cpu = float((found[0] == draft_chains(on_cpu, runner.hidden[:num].cpu(), *noise, k=3)[0]).mean())
        row = {"sequences": num, "passed": bool(is_same and like_cpu > 0.9), "as on the CPU": round(like_cpu, 3)}
        rows.append(row | {"ms": round(1e3 * statistics.median(seconds), 3)})
    return rows


ROLLOUTS = ((8, 12, 0.5, None), (64, 60, 0.5, None), (64, 60, 0.5, 1), (256, 100, 0.5, None), (512, 100, 0.25, None))
"""Sequences at a time, prompts of the recording, the share of their eight samples that is known before, and threads."""


def rollouts(device: str) -> list[Row]:
    """Whole rollouts without drafts and with `srt`, which has seen half of each prompt's samples."""
    rows = []
    for slots, prompts, history, threads in ROLLOUTS if device == "cuda" else ((2, 2, 0.5, 1),):
        rows += rollout(device, slots, prompts, history, threads)
    return rows


def rollout(device: str, slots: int, prompts: int, history: float, threads: int | None) -> list[Row]:
    """A row for each drafter."""
    shape = ("qwen2.5-1.5b", "bfloat16", "512") if device == "cuda" else ("tiny", "float32", "16")
    program = [sys.executable, "docs/bench_rollout.py", "--model-shape", shape[0], "--dtype", shape[1]]
    options = ["--slots", str(slots), "--max-tokens", shape[2], "--prompts-used", str(prompts)]
    options += ["--history", str(history), "--repeats", "3", "--json"]
    options += [] if threads is None else ["--threads", str(threads)]
    trace, tokenizer = os.environ.get("TRACE"), os.environ.get("TOKENIZER")
    with tempfile.TemporaryDirectory() as unpacked:
        if trace:
            options += ["--trace", trace]
        if trace and tokenizer:
            shutil.copytree(tokenizer, unpacked, dirs_exist_ok=True)
            for packed in Path(unpacked).glob("tokenizer.json.gz"):
                packed.with_suffix("").write_bytes(gzip.decompress(packed.read_bytes()))
            options += ["--tokenizer", unpacked]
        result = subprocess.run([*program, *options], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    print(result.stdout, file=sys.stderr)
    keep = ["slots", "tokens_per_second", "ms_per_step", "tokens_per_step", "verified_per_step", "prepared_share"]
    keep += ["times_as_fast", "lowest", "highest"]
    rows = []
    for row in json.loads(result.stdout)["rows"]:
        found: Row = {name: round(row[name], 3) for name in keep if name in row}
        share = statistics.fmean(run.get("engine/host_share", 0.0) for run in row["runs"])
        rows.append({"drafter": row["drafter"], "threads": threads, **found, "host share": round(share, 3)})
    return rows


def vllm(device: str) -> list[Row]:
    """Tokens per second of fixed lengths without drafts, beside those of vLLM, if a program of it is at hand.

    vLLM needs other versions of torch, so an environment of its own: `VLLM=its/bin/vllm`, or one that is found. It
    gets random weights, too, and the hub's config and tokenizer.
    """
    import numpy as np
    import torch
    from bench_rollout import make_engine, run_engine, share_out

    from srtrl.bench.recorded import RecordedPrompt, RecordedSample

    rows, generator = [], np.random.default_rng(0)
    program = os.environ.get("VLLM") or shutil.which("vllm")
    prompt_tokens, tokens, per_slot = (128, 512, 4) if device == "cuda" else (4, 8, 1)
    policy = random_policy(device, 28)
    for slots in (64, 256) if device == "cuda" else (2,):
        texts = generator.integers(0, policy.config.vocab_size, (per_slot * slots, prompt_tokens + tokens))
        prompts = [
            RecordedPrompt(
                prompt_id=str(number),
                prompt_token_ids=tuple(text[:prompt_tokens].tolist()),
                samples=[RecordedSample(tokens=text[prompt_tokens:].astype(np.int32))],
            )
            for number, text in enumerate(texts)
        ]
        workload = share_out(prompts, history=0.0)
        engine = make_engine(policy, slots, workload.max_sequence_tokens, prefill_chunk_tokens=2048)
        seconds = min(run_engine(engine, "none", workload)["seconds"] for _ in range(3))
        row: Row = {"sequences": slots, "tokens per second": round(texts.shape[0] * tokens / seconds)}
        del engine
        if program is not None and device == "cuda":
            torch.cuda.empty_cache()
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / "result.json"
                options = {"model": "Qwen/Qwen2.5-1.5B", "load-format": "dummy", "dataset-name": "random"}
                options |= {
                    "input-len": str(prompt_tokens),
                    "output-len": str(tokens),
                    "num-prompts": str(len(prompts)),
                }
                options |= {"max-num-seqs": str(slots), "gpu-memory-utilization": "0.5", "output-json": str(file)}
                command = [program, "bench", "throughput", *(f"--{name}={value}" for name, value in options.items())]
                subprocess.run(command, check=True, stdout=sys.stderr)
                found = json.loads(file.read_text(encoding="utf-8"))
            row["of vLLM"] = round(found["num_requests"] * tokens / found["elapsed_time"])
        rows.append(row)
    return rows


def live(device: str) -> list[Row]:
    """The quickstart on the device, without drafts and with `srt`, from the same seed."""
    import torch
    from safetensors.torch import load_file

    from srtrl.metrics import read_metrics

    rows, weights = [], []
    with tempfile.TemporaryDirectory() as name:
        for drafter in ("none", "srt"):
            run, started = Path(name) / drafter, time.perf_counter()
            changes = [f"device={device}", f"rollout.drafter={drafter}", f"output_dir={name}", f"name={drafter}"]
            changes += [] if device == "cuda" else ["train.num_steps=1", "eval.num_problems=4", "rollout.num_prompts=2"]
            command = [sys.executable, "-m", "srtrl", "train", "recipes/quickstart.yaml", *changes]
            subprocess.run(command, cwd=ROOT, check=True, stdout=sys.stderr)
            seconds = time.perf_counter() - started
            steps = [row for row in read_metrics(run / "metrics.jsonl") if "reward/mean" in row]
            policy = sorted(run.glob("checkpoints/*/model.safetensors"))[-1]
            weights.append(load_file(policy))
            found: Row = {"drafter": drafter, "seconds": round(seconds, 1)}
            for shown in ("time/rollout", "time/update", "engine/decode_steps"):
                found[f"sum of {shown}"] = round(sum(row.get(shown, 0.0) for row in steps), 2)
            for shown in ("reward/mean", "logprob_difference/mean", "engine/tokens_per_decode_step"):
                found[f"last {shown}"] = round(steps[-1].get(shown, 0.0), 5)
            rows.append(found)
    both = [torch.cat([one[key].float().flatten() for key in sorted(one)]) for one in weights]
    rows[-1]["difference of the weights"] = float((both[0] - both[1]).norm() / both[0].norm())
    return rows


def training(device: str) -> list[Row]:
    """Two training steps of `grpo_gsm8k` at its own sizes: they fit, and agree with the decoder."""
    return two_steps(device, "grpo_gsm8k", mean_tokens=300)


def training_math(device: str) -> list[Row]:
    """The same of `grpo_math`, which takes longer."""
    return two_steps(device, "grpo_math", mean_tokens=700)


def training_lora(device: str) -> list[Row]:
    """The same of `lora_math_7b`, with shorter responses; its weights take 15 GB on the disk."""
    return two_steps(device, "lora_math_7b", 300, "rollout.max_new_tokens=1024")


def two_steps(device: str, recipe_name: str, mean_tokens: int, *others: str) -> list[Row]:
    """A row per step, with random weights of the recipe's model's shape, which needs no download; tiny on a CPU.

    Lengths of responses are geometric with this mean, which the end tokens decide: random weights sample nearly
    uniformly. Compare the peak with the table of docs/performance.md.
    """
    import torch

    from srtrl.build import run_training
    from srtrl.metrics import read_metrics
    from srtrl.model.folders import load_tokenizer
    from srtrl.model.hf_config import config_from_hf
    from srtrl.model.published_shapes import SHAPES
    from srtrl.model.weights import init_model
    from srtrl.planner import MAX_SHARE, find_config
    from srtrl.recipe.file import load_recipe
    from srtrl.run.checkpoint import PolicyFiles
    from srtrl.run.estimate import DEFAULT_GPU_GIB

    changes = [
        *others,
        "log.trackers=[]",
        "eval={before_and_after: false}",
        "train.num_steps=2",
        "train.warmup_steps=0",
    ]
    if device == "cpu":
        changes += ["rollout.num_prompts=4", "rollout.num_samples=2", "rollout.max_new_tokens=30"]
        changes += ["model.dtype=float32", "device=cpu", "num_threads=1"]
        mean_tokens = 10
    file = ROOT / "recipes" / f"{recipe_name}.yaml"
    config = config_from_hf(SHAPES["tiny"]) if device == "cpu" else find_config(load_recipe(file).model.path)[0]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = init_model(config, 0, torch.bfloat16, device, drawn_on=device)
        ends = torch.arange(0, config.vocab_size, mean_tokens).tolist()  # one token in `mean_tokens` ends a response
        PolicyFiles(model=model, tokenizer=load_tokenizer("bundled:tiny"), end_ids=ends).save(folder / "model")
        del model
        rows = [json.dumps({"prompt": f"{number} + {number * number} = " * 6}) for number in range(1000)]
        (folder / "prompts.jsonl").write_text("\n".join(rows), encoding="utf-8")
        changes += [f"output_dir={folder}", f"model.path={folder / 'model'}", "rewards=[{name: 'tiny_run:digits'}]"]
        changes.append(f"task={{name: prompts, options: {{train: {{files: [{folder / 'prompts.jsonl'}]}}}}}}")
        run_training(load_recipe(file, changes))
        steps = read_metrics(folder / recipe_name / "metrics.jsonl")[-2:]
    shown = ("tokens/", "time/", "memory/", "logprob_difference/")
    found = []
    for step in steps:
        agrees = step["logprob_difference/mean"] <= 0.01 and step["logprob_difference/kl"] <= 1e-3
        fits = step.get("memory/peak_gib", 0.0) < MAX_SHARE * DEFAULT_GPU_GIB
        row: Row = {"recipe": recipe_name, "step": step["step"], "passed": agrees and fits}
        found.append(row | {name: round(value, 5) for name, value in step.items() if name.startswith(shown)})
    return found


def table_of(results: dict[str, list[Row]]) -> str:
    """Markdown: a line for each row of each stage."""
    lines = ["| stage | result |", "| --- | --- |"]
    for stage, rows in results.items():
        lines += [f"| {stage} | " + ", ".join(f"{name} {value}" for name, value in row.items()) + " |" for row in rows]
    return "\n".join(lines)


def main() -> int:
    """Run a stage, or all; the exit code is 1 where one failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--stage", help="in this process, as JSON")
    parser.add_argument("--stages", help=f"by default {','.join(STAGES)}; also training_math, training_lora")
    parser.add_argument("--minutes", type=float, default=9)
    parser.add_argument("--logs", type=Path)
    parser.add_argument("--write-docs", type=Path)
    options = parser.parse_args()
    if options.stage:
        json.dump(globals()[options.stage](options.device), sys.stdout)
        return 0
    stages = options.stages.split(",") if options.stages else [*STAGES]
    if unknown := set(stages) - {*STAGES, "training_math", "training_lora"}:
        parser.error(f"--stages: no stage {', '.join(sorted(unknown))}; there are {', '.join(STAGES)}")
    started, results = time.monotonic(), dict[str, list[Row]]()
    for stage in stages:
        began = time.monotonic()
        seconds = min(STAGES.get(stage, 300), 60 * options.minutes - (began - started))
        results[stage] = run_stage(stage, options.device, seconds, options.logs)
        for row in results[stage]:
            print(f"{stage} ({time.monotonic() - began:.0f} s): {row}", flush=True)
    table = f"{time.strftime('%Y-%m-%d')}, `python docs/gpu_stages.py`\n\n{table_of(results)}\n"
    print(table)
    if options.write_docs:
        text = options.write_docs.read_text(encoding="utf-8")
        head, tail = text.split(MARKS[0])[0], text.split(MARKS[1])[1]
        options.write_docs.write_text(f"{head}{MARKS[0]}{table}{MARKS[1]}{tail}", encoding="utf-8")
    return int(any(row.get("passed") is False for rows in results.values() for row in rows))


def run_stage(stage: str, device: str, seconds: float, logs: Path | None = None) -> list[Row]:
    """Its rows, or one that says how it failed. No process of it is left: it would disturb the stages that follow."""
    if seconds <= 0:
        return [{"passed": False, "error": "no time was left"}]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    if device == "cpu":
        environment |= {"TRITON_INTERPRET": "1"}
    program = [sys.executable, __file__, "--stage", stage, "--device", device]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(program, cwd=ROOT, env=environment, start_new_session=True, **pipes) as process:
        reason = None
        try:
            printed, errors = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            reason = f"took more than {seconds:.0f} s"
        finally:
            with suppress(ProcessLookupError):  # of a group that has ended
                os.killpg(process.pid, signal.SIGKILL)
        if reason is not None:
            printed, errors = process.communicate()
    if logs:
        logs.mkdir(parents=True, exist_ok=True)
        (logs / f"{stage}.log").write_text(f"{errors}\n{printed}", encoding="utf-8")
    if process.returncode:
        lines = errors.strip().splitlines() or ["no message"]
        print(*lines[-TAIL:], sep="\n", file=sys.stderr, flush=True)
        return [{"passed": False, "error": reason or lines[-1]}]
    rows: list[Row] = json.loads(printed.splitlines()[-1])
    return rows


if __name__ == "__main__":
    sys.exit(main())
