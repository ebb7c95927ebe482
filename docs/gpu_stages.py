"""The first run on a GPU, unattended (`make bench-gpu`): what is right, then what is fast, within nine minutes.

Each stage is a process of its own with a limit; its result is printed when it ends, also where an earlier one failed,
and the table of all of them comes last. `--write-docs FILE` puts it between the marks of that file.
`--device cpu` takes the same path with a tiny model under Triton's interpreter, to test this program.
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
TOTAL_SECONDS = 540
STAGES = {
    "versions": 60,
    "values": 120,
    "graphs": 90,
    "synchronisations": 60,
    "decode": 120,
    "training": 200,
    "rollouts": 200,
    "draft_head": 60,
    "transformers": 90,
    "tests": TOTAL_SECONDS,
}
"""Stage -> seconds it may take, of what is left of all. The tests come last: they compile hundreds of kernels."""

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
    from srtrl.model.shapes import SHAPES
    from srtrl.model.weights import init_model

    shape = SHAPES["qwen2.5-1.5b"] | {"num_hidden_layers": num_layers}
    if device == "cpu":
        tiny = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
        shape |= tiny | {"vocab_size": 64, "head_dim": 8, "num_hidden_layers": 1}
    return init_model(config_from_hf(shape), 0, torch.bfloat16, device)


def versions(device: str) -> list[Row]:
    """The machine and its libraries."""
    import torch
    import triton

    if device == "cpu":
        return [{"device": "cpu", "torch": torch.__version__, "triton": triton.__version__}]
    properties = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info()
    return [
        {
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


def tests(device: str) -> list[Row]:
    """The repository's fast tests for a GPU."""
    marker = "gpu and not slow" if device == "cuda" else "not gpu and not slow"
    paths = ["tests"] if device == "cuda" else ["tests/test_cuda_graphs.py"]
    workers = ["--numprocesses", str(min(8, os.cpu_count() or 1)), "--dist", "loadfile"]  # compiling takes the time
    return [run_pytest(["-m", marker, *workers, *paths])]


def run_pytest(arguments: list[str]) -> Row:
    """Its last line; what it prints goes to stderr, line by line: the last one says where it was when it was killed."""
    program = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *arguments]
    lines = ["no output"]
    with subprocess.Popen(program, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.strip())
            print(line, end="", file=sys.stderr, flush=True)
    return {"passed": process.returncode == 0, "summary": lines[-1]}


def graphs(device: str) -> list[Row]:
    """One step kernel by kernel and as a graph: tokens and log-probs are equal."""
    import numpy as np

    from srtrl.engine.runner import timed_step

    rows = []
    for num_rows, num_sequences in ((64, 64), (512, 64), (256, 256)) if device == "cuda" else ((8, 2),):
        found = []
        for cuda_graphs in (False, True):
            runner = build(device, num_layers=4, slots=num_sequences, cuda_graphs=cuda_graphs)
            for _ in range(3):  # computed, captured, replayed
                runner.launch(timed_step(runner, num_rows, 30, num_sequences), None)
                sampled = runner.wait(num_rows)
            found.append(sampled)
        eager, replayed = found
        difference = float(np.abs(eager.logprobs - replayed.logprobs).max())
        equal = bool((eager.token_ids == replayed.token_ids).all())
        rows.append({"rows": num_rows, "passed": equal and difference == 0, "log-prob difference": difference})
    return rows


def values(device: str) -> list[Row]:
    """Small steps with trees on the device and under the interpreter, on the same weights."""
    import numpy as np

    program = [sys.executable, __file__, "--stage", "small_steps", "--device"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}
    interpreted = subprocess.run([*program, "cpu"], env=environment, stdout=subprocess.PIPE, text=True, check=True)
    expected, found = json.loads(interpreted.stdout), small_steps(device)
    difference = float(np.abs(np.subtract(found[0]["logprobs"], expected[0]["logprobs"])).max())
    equal = found[0]["token_ids"] == expected[0]["token_ids"]
    return [{"passed": equal and difference < 2e-4, "tokens equal": equal, "log-prob difference": difference}]


def small_steps(device: str) -> list[Row]:
    """Tokens and log-probs of the cases that the tests of the runners decode."""
    import numpy as np
    from runner_cases import Samples, cuda_runner, random_trees, runner_policy

    runner = cuda_runner(runner_policy())
    samples = Samples(runner, runner.model)
    samples.prefill()
    token_ids: list[int] = []
    logprobs: list[float] = []
    for seed, path in enumerate(([], [1], [0, 3])):
        trees = random_trees(np.random.default_rng(seed), [5, 4, 4])
        sampled = samples.step([0, 1, 2], trees)
        token_ids += sampled.token_ids.tolist()
        logprobs += sampled.logprobs.tolist()
        samples.accept([0, 1, 2], trees, [path, [], path])
    return [{"token_ids": token_ids, "logprobs": logprobs}]


def synchronisations(device: str) -> list[Row]:
    """Filling and launching a step asks the device nothing; an error where it does."""
    import torch

    from srtrl.engine.runner import timed_step

    runner = build(device, num_layers=2, slots=64)
    for mode in ("default", "default", "default", "error"):
        if device == "cuda":
            torch.cuda.set_sync_debug_mode(mode)
        runner.launch(timed_step(runner, 64, 30, 64), None)
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
        runner.wait(64)
    return [{"passed": True, "synchronisations in a launch": 0}]


def decode(device: str) -> list[Row]:
    """Milliseconds of a decode step beside the price that benchmarks without a device calculate with."""
    import numpy as np
    from h200 import H200_CURVE

    rows = []
    steps = ((64, 64), (512, 64), (256, 256), (512, 256)) if device == "cuda" else ((8, 2),)
    runner = build(device, num_layers=28, slots=256)
    for num_rows, num_sequences in steps:
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

    from srtrl.engine.runner import timed_step
    from srtrl.features.draft_head import DraftHead, draft_chains
    from srtrl.features.draft_head_cuda import CudaGuesses

    rows = []
    runner = build(device, num_layers=2, slots=256)
    policies = (runner.model, copy.deepcopy(runner.model).cpu())
    head, on_cpu = (DraftHead(policy, policy.dtype, vocabulary=16_384, seed=0) for policy in policies)
    head.refresh(policies[0])
    on_cpu.refresh(policies[1])
    for num in (8, 64, 256) if device == "cuda" else (2,):
        runner.launch(timed_step(runner, num, 30, num), None)
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


def transformers(device: str) -> list[Row]:
    """`generate` of that library, 64 sequences of 32 prompt tokens: milliseconds of a token of all of them."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from srtrl.model.shapes import SHAPES

    shape = dict(SHAPES["qwen2.5-1.5b"])
    if device == "cpu":
        shape |= {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64, "head_dim": 4}
    config = AutoConfig.for_model(shape.pop("model_type"), **shape)
    with torch.device(device):  # a CPU would draw the weights for a quarter of a minute
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()  # type: ignore[no-untyped-call]
    prompts = torch.ones(64, 32, dtype=torch.long, device=device)
    num_tokens, seconds = 64 if device == "cuda" else 4, []
    for _ in range(3):
        started = time.perf_counter()
        model.generate(prompts, do_sample=True, min_new_tokens=num_tokens, max_new_tokens=num_tokens, pad_token_id=0)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return [{"sequences": 64, "ms of a token of each": round(1e3 * statistics.median(seconds) / num_tokens, 2)}]


def rollouts(device: str) -> list[Row]:
    """Whole rollouts without drafts and with `srt`, which has seen half of each prompt's samples."""
    shape = ("qwen2.5-1.5b", "bfloat16", "64,256", "512") if device == "cuda" else ("tiny", "float32", "2", "16")
    program = [sys.executable, "docs/bench_rollout.py", "--model-shape", shape[0], "--dtype", shape[1]]
    options = ["--slots", shape[2], "--max-tokens", shape[3], "--prompts-used", "80", "--history", "0.5"]
    options += ["--repeats", "3", "--json"]
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
    found = json.loads(result.stdout)
    keep = ("slots", "drafter", "tokens_per_second", "tokens_per_step", "times_as_fast", "lowest", "highest")
    return [{name: row[name] for name in keep if name in row} for row in found["rows"]]


def training(device: str) -> list[Row]:
    """Two training steps of `grpo_gsm8k` at its own sizes: they fit, and agree with the decoder."""
    return two_steps(device, "grpo_gsm8k", mean_tokens=300)


def training_math(device: str) -> list[Row]:
    """The same of `grpo_math`, which takes longer."""
    return two_steps(device, "grpo_math", mean_tokens=700)


def two_steps(device: str, recipe_name: str, mean_tokens: int) -> list[Row]:
    """A row per step, with random weights of the recipe's model's shape, which needs no download; tiny on a CPU.

    Lengths of responses are geometric with this mean, which the end tokens decide: random weights sample nearly
    uniformly. Compare the peak with the table of docs/performance.md.
    """
    import torch

    from srtrl.build import run_training
    from srtrl.metrics import read_metrics
    from srtrl.model.folders import load_tokenizer
    from srtrl.model.hf_config import config_from_hf
    from srtrl.model.shapes import SHAPES
    from srtrl.model.weights import init_model
    from srtrl.planner import DEFAULT_GPU_GIB, MAX_SHARE, find_config
    from srtrl.recipe.file import load_recipe
    from srtrl.run.checkpoint import save_policy

    changes = ["log.trackers=[]", "eval={before_and_after: false}", "train.num_steps=2", "train.warmup_steps=0"]
    if device == "cpu":
        changes += ["rollout.num_prompts=4", "rollout.num_samples=2", "rollout.max_new_tokens=30"]
        changes += ["model.dtype=float32", "device=cpu", "num_threads=1"]
        mean_tokens = 10
    file = ROOT / "recipes" / f"{recipe_name}.yaml"
    config = config_from_hf(SHAPES["tiny"]) if device == "cpu" else find_config(load_recipe(file).model.path)[0]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = init_model(config, 0, torch.bfloat16, "cpu")
        ends = torch.arange(0, config.vocab_size, mean_tokens).tolist()  # one token in `mean_tokens` ends a response
        save_policy(folder / "model", model=model, tokenizer=load_tokenizer("bundled:tiny"), end_ids=ends)
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
    parser.add_argument("--stage", choices=(*STAGES, "small_steps", "training_math"))
    parser.add_argument("--write-docs", type=Path)
    options = parser.parse_args()
    if options.stage:
        json.dump(globals()[options.stage](options.device), sys.stdout)
        return 0
    started, results = time.monotonic(), dict[str, list[Row]]()
    for stage, limit in STAGES.items():
        began = time.monotonic()
        seconds = min(limit, TOTAL_SECONDS - (began - started))
        results[stage] = run_stage(stage, options.device, seconds)
        for row in results[stage]:
            print(f"{stage} ({time.monotonic() - began:.0f} s): {row}", flush=True)
    table = f"{time.strftime('%Y-%m-%d')}, `python docs/gpu_stages.py`\n\n{table_of(results)}\n"
    print(table)
    if options.write_docs:
        text = options.write_docs.read_text(encoding="utf-8")
        head, tail = text.split(MARKS[0])[0], text.split(MARKS[1])[1]
        options.write_docs.write_text(f"{head}{MARKS[0]}{table}{MARKS[1]}{tail}", encoding="utf-8")
    return int(any(row.get("passed") is False for rows in results.values() for row in rows))


def run_stage(stage: str, device: str, seconds: float) -> list[Row]:
    """Its rows, or one that says how it failed. No process of it is left: it would disturb the stages that follow."""
    if seconds <= 0:
        return [{"passed": False, "error": "no time was left"}]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
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
    if process.returncode:
        lines = errors.strip().splitlines() or ["no message"]
        print(*lines[-TAIL:], sep="\n", file=sys.stderr, flush=True)
        return [{"passed": False, "error": reason or lines[-1]}]
    rows: list[Row] = json.loads(printed.splitlines()[-1])
    return rows


if __name__ == "__main__":
    sys.exit(main())
