"""Every kernel compiles for Ampere to Blackwell, without a GPU, just as the runner launches it for real models.

The tests' own process interprets kernels where there is no CUDA device; so the compiler runs in another one, which is
this file as a program: the runner takes its steps on CPU tensors through Triton's own binder, a driver that stands for
a device says which one it is, and what would be launched is compiled only. What a kernel needs is read from its binary;
matrix products are only counted. By default that is one engine on one architecture; `slow`, and part of
`make check-gpu-static`: all models and architectures. `python tests/test_triton_compile.py --write-docs FILE`, too, is
part of it, and writes the table of docs/performance.md.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from srtrl.cuda.tiles import MAX_NUM_SPLITS

ROOT = Path(__file__).resolve().parent.parent

SHARED_MEMORY = {80: (99, 164), 89: (99, 100), 90: (227, 228), 100: (227, 228), 120: (99, 100)}
"""KiB by compute capability: what a program may have (the smaller Ampere chips: 99), and what a multiprocessor has."""

REGISTERS = 65_536
"""Of a multiprocessor."""

OF_THE_UPDATE = {"softmax_rows", "softmax_gradient_rows", "gated_gradient_rows"}
"""They take long, and begin when all before them has ended."""

KERNELS = {
    *OF_THE_UPDATE,
    *("attend_tiles", "combine_splits", "add_rms_norm_rows", "rope_and_store_heads", "gated_rows"),
    *("move_kv_paths", "rank_blocks", "finish_rows", "rank_listed"),
}

WIDE, MANY = (
    {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": width}
    for heads, kv_heads, width in ((8, 2, 256), (16, 16, 80))
)
GEMMA = {"model_type": "gemma3_text", "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 512}
MODELS: dict[str, tuple[str, dict[str, Any], str, tuple[tuple[int, int], ...]]] = {
    "qwen2.5-1.5b": ("qwen2.5-1.5b", {}, "bfloat16", ((64, 64), (1, 1), (256, 256), (512, 64), (2048, 256))),
    "qwen2.5-0.5b, float32": ("qwen2.5-0.5b", {}, "float32", ((8, 1),)),
    "qwen3-8b": ("qwen3-8b", {}, "bfloat16", ((64, 8), (8, 8))),
    "gemma 3": ("qwen2.5-1.5b", WIDE | GEMMA, "bfloat16", ((64, 8),)),
    "glm-4": ("qwen2.5-3b", {"model_type": "glm4", "pad_token_id": 0}, "bfloat16", ((64, 8),)),
    "heads of 80": ("qwen2.5-1.5b", MANY, "bfloat16", ((64, 8),)),
}
"""Name -> shape and changes of its config, dtype, and the steps: (rows, sequences).

The first has all kinds of steps, the others one with the highest blocks and with splits: it needs the most memory.
"""

FIRST, HOPPER = "qwen2.5-1.5b", 90

OF_A_LAYER = ("rope_and_store_heads", "attend_tiles", "combine_splits", "gated_rows")
ONCE = ("embedding", "zeros", "move_kv_paths", "mm", "rank_blocks", "finish_rows")
STEP = {"copy_": 2, "add_rms_norm_rows": 57, "linear": 112} | dict.fromkeys(OF_A_LAYER, 28) | dict.fromkeys(ONCE, 1)
"""What a step of 64 sequences without drafts launches for Qwen2.5-1.5B, 28 layers; all but the copies are its graph."""

DRAFT_TOKENS = 3
"""That a draft head guesses in a row: each is a launch of `rank_listed`."""


DEPENDENCIES = re.compile(r"griddepcontrol\.\w+|\b(?:ld|st|atom|red)\.[\w.:]*global|\bcp\.async\b|\bcp\.\w+\.tensor")
"""In the order of a kernel's code: what it has to do with the kernels before and after it, and with their memory."""


def targets(everything: bool) -> dict[tuple[str, int], list[tuple[int, int]]]:
    """(Model, compute capability) -> steps; Ada and Blackwell for one model only."""
    if not everything:
        return {(FIRST, HOPPER): [step for step in MODELS[FIRST][3] if step[1] < 256]}
    return {
        (model, capability): list(values[3])
        for model, values in MODELS.items()
        for capability in SHARED_MEMORY
        if capability in {80, HOPPER} or model == FIRST
    }


def main(everything: bool) -> None:
    """Print what was compiled and launched: {kernels: a list of {model, kernel, capability, ...}, step: counts}."""
    import numpy as np
    import torch
    import triton
    from torch.nn import Linear, functional
    from torch.utils._python_dispatch import TorchDispatchMode
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from srtrl.cuda.runner import CudaRunner
    from srtrl.cuda.tiles import DeviceLimits, programs_per_device
    from srtrl.cuda.update import FusedSoftmax, fused_gated
    from srtrl.engine.runner import EngineOptions
    from srtrl.features.draft_head import DraftHead
    from srtrl.features.draft_head_cuda import CudaGuesses
    from srtrl.model.hf_config import config_from_hf
    from srtrl.model.logprobs import Slopes
    from srtrl.model.shapes import SHAPES
    from srtrl.model.transformer import Transformer

    found: dict[tuple[str, str, int, int], dict[str, Any]] = {}
    launches: Counter[str] = Counter()
    read_resources = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"

    class Device:
        """As much of a driver as a launch asks for; the index of the device is its compute capability."""

        capability = 80

        def get_current_device(self) -> int:
            return self.capability

        def get_current_stream(self, device: int) -> int:
            return 0

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", self.capability, 32)

    class Launches(TorchDispatchMode):  # type: ignore[no-untyped-call]
        """Counts torch's own kernels; empty tensors and views have none."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = func.overloadpacket.__name__
            if name in {"embedding", "new_zeros", "silu", "mul", "add", "copy_", "index", "index_put_", "cat"}:
                launches[name.removeprefix("new_")] += 1
            return func(*args, **(kwargs or {}))

    device = Device()
    launch = JITFunction.run

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        compiled = launch(kernel, *args, grid=grid, warmup=True, **options)
        launches[kernel.__name__] += 1
        key = (model, kernel.__name__, device.capability, id(compiled))
        if key not in found:
            with tempfile.NamedTemporaryFile(suffix=".cubin") as binary:
                binary.write(compiled.asm["cubin"])
                binary.flush()
                command = [str(read_resources), "-res-usage", binary.name]
                usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            registers, stack, local = (
                int(re.findall(rf"{name}:(\d+)", usage)[-1]) for name in ("REG", "STACK", "LOCAL")
            )
            lanes = options.get("BLOCK_M", 16)
            limits = DeviceLimits(num_multiprocessors=1, shared_bytes=1024 * SHARED_MEMORY[device.capability][1])
            sizes = {"block_m": lanes, "head_dim": policy.config.head_dim, "dtype": policy.dtype}
            planned = programs_per_device(**sizes, device=limits)
            found[key] = {
                "model": model,
                "kernel": kernel.__name__,
                "lanes": lanes if kernel.__name__ in {"attend_tiles", "combine_splits"} else None,
                "capability": device.capability,
                "registers": registers,
                "spilled": stack + local,
                "shared": compiled.metadata.shared,
                "programs": programs_at_once(registers, compiled.metadata, device.capability),
                "planned": planned if kernel.__name__ == "attend_tiles" else 1,
                "fetches_ahead": "async_copy" in compiled.asm["ttgir"],
                "fuses": "enable_fp_fusion" in options,
                "overlaps": compiled.metadata.launch_pdl,
                "dependencies": DEPENDENCIES.findall(compiled.asm["ptx"]),
            }
        return compiled

    def linear(self: Linear, hidden: torch.Tensor) -> torch.Tensor:
        launches["linear"] += 1
        return hidden.new_empty(len(hidden), len(self.weight))

    def logits(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return hidden.new_empty(len(hidden), len(weight))

    def mm(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        launches["mm"] += 1
        return out

    def run_update() -> None:
        zeros = torch.zeros(8)
        for temperature, slope in ((1.0, None), (1.0, zeros), (0.7, zeros)):
            inputs = (policy.embedding[:8], policy.embedding, zeros.long(), temperature)
            FusedSoftmax().forward(*inputs, has_entropy=slope is not None)
            FusedSoftmax().gradient(*inputs, Slopes(zeros, zeros, zeros, slope))
        gate_up = policy.embedding.new_zeros(8, 2 * policy.config.intermediate_size, requires_grad=True)
        fused_gated(gate_up, policy.config.style).sum().backward()  # type: ignore[no-untyped-call]

    driver.set_active(device)
    functional.linear = logits  # type: ignore[assignment]
    JITFunction.run = compile_only
    torch.mm = mm  # type: ignore[assignment]
    Linear.forward = linear  # type: ignore[method-assign, assignment]
    counts: dict[str, int] = {}
    for (model, capability), steps in targets(everything).items():
        shape, changes, dtype, _ = MODELS[model]
        config = config_from_hf(SHAPES[shape] | {"num_hidden_layers": 1} | changes)
        policy = Transformer(config, getattr(torch, dtype), "cpu")
        runner = CudaRunner(policy, EngineOptions(cuda_graphs=False, slots=512, num_top=8), 16_000)
        runner.allocate_pages(4)
        device.capability = capability
        for num_rows, num_sequences in steps:
            launches.clear()
            with Launches():  # type: ignore[no-untyped-call]
                runner.time_step(num_rows, 30, num_sequences=num_sequences)
            counts = counts or {name: count // 2 for name, count in launches.items()}  # the first compiles
        run_update()
        head = DraftHead(policy, policy.dtype, vocabulary=2048, hidden=8, seed=0)
        head.read(policy)
        zeros: Any = np.zeros(64, np.int64)
        CudaGuesses(head, runner, k=DRAFT_TOKENS, slots=64).launch(zeros, zeros, zeros, zeros, zeros)
    json.dump({"kernels": list(found.values()), "step": counts}, sys.stdout)


def programs_at_once(registers: int, metadata: Any, capability: int) -> int:
    """How many programs of a kernel a multiprocessor holds; each takes 1 KiB of shared memory beside its own."""
    by_registers = REGISTERS // (32 * metadata.num_warps * 8 * -(-registers // 8))
    by_memory = 1024 * SHARED_MEMORY[capability][1] // (metadata.shared + 1024)
    return int(min(by_registers, by_memory, 64 // metadata.num_warps))


def run_without_interpreter(*program: str, timeout: int) -> str:
    """What a program prints, in a process that compiles."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    command = [sys.executable, *program]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=timeout)
    assert result.returncode == 0, result.stderr[-4000:]
    return result.stdout


def run_compiler(everything: bool) -> dict[str, Any]:
    """What `main` prints."""
    options = ["everything"] if everything else []
    printed = run_without_interpreter(__file__, "--compile", *options, timeout=280 if everything else 110)
    compiled: dict[str, Any] = json.loads(printed)
    return compiled


@pytest.fixture(
    scope="module",
    params=["one engine", pytest.param("everything", marks=[pytest.mark.slow, pytest.mark.timeout(300)])],
)
def compiled(request: pytest.FixtureRequest) -> dict[str, Any]:
    everything = request.param == "everything"
    return run_compiler(everything) | {"targets": targets(everything)}


def test_kernels_need_no_more_than_the_planner_counts_on(compiled: dict[str, Any]) -> None:
    kernels: dict[tuple[str, int], set[str]] = {}
    for row in compiled["kernels"]:
        model, capability, kernel = row["model"], row["capability"], row["kernel"]
        kernels.setdefault((model, capability), set()).add(kernel)
        assert row["shared"] <= 1024 * SHARED_MEMORY[capability][0], row
        assert row["programs"] >= row["planned"], row
        assert row["fetches_ahead"] or kernel not in {"attend_tiles", "softmax_rows"}, row
        assert row["fuses"], f"a later Triton has another default: {row}"
        if model != "qwen2.5-0.5b, float32":
            assert row["spilled"] <= (0 if capability == HOPPER or row["lanes"] != 64 else 72), row
    assert kernels == dict.fromkeys(compiled["targets"], KERNELS)


def test_from_hopper_on_every_kernel_of_a_step_waits_before_it_touches_memory(compiled: dict[str, Any]) -> None:
    """Else it would read and write what the kernel before it still does: it was launched before that one's end."""
    for row in compiled["kernels"]:
        is_late = HOPPER <= row["capability"] < 120 and row["kernel"] not in OF_THE_UPDATE
        assert row["overlaps"] == is_late, row
        first, *others = row["dependencies"][: 2 if is_late else 1]
        assert first == "griddepcontrol.wait" if is_late else first.endswith("global"), row
        assert others == ["griddepcontrol.launch_dependents"] * is_late, row
        count = sum(name.startswith("griddepcontrol") for name in row["dependencies"])
        assert count == 2 * is_late, row


def test_one_engine_compiles_few_variants(compiled: dict[str, Any]) -> None:
    """Numbers that differ from step to step make no other kernels, but for block heights and numbers of splits."""
    rows = [row for row in compiled["kernels"] if (row["model"], row["capability"]) == (FIRST, HOPPER)]
    counts = Counter(row["kernel"] for row in rows)
    heights = len({row["lanes"] for row in rows if row["kernel"] == "attend_tiles"})
    assert counts.pop("attend_tiles") <= 2 * heights
    assert counts.pop("combine_splits") <= MAX_NUM_SPLITS.bit_length() - 1
    assert counts.pop("add_rms_norm_rows") == 2
    assert counts.pop("softmax_rows") == counts.pop("softmax_gradient_rows") == 3, "with a temperature and entropies"
    assert set(counts.values()) == {1}


def test_a_step_launches_what_it_did(compiled: dict[str, Any]) -> None:
    per_layer = {name: count for name, count in compiled["step"].items() if STEP[name] >= 28}
    found = {name: count * 28 for name, count in per_layer.items() if name != "add_rms_norm_rows"}
    found["add_rms_norm_rows"] = (per_layer["add_rms_norm_rows"] - 1) * 28 + 1  # the last one is of no layer
    assert compiled["step"] | found == STEP


@pytest.mark.slow
def test_the_table_of_the_update_is_what_its_program_prints() -> None:
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    table = page.partition("<!-- update -->\n")[2].partition("<!-- end of update -->")[0]
    assert table == run_without_interpreter(str(ROOT / "docs" / "update_time.py"), timeout=60)


def write_docs(path: Path, compiled: dict[str, Any]) -> None:
    """Replace the table of kernels between its two marks."""
    launches = STEP | {"rank_listed": DRAFT_TOKENS}
    lines = [
        "| kernel | lanes | registers | spilled | shared KiB | programs | launches |",
        "| --- " + "| --: " * 6 + "|",
    ]
    for row in compiled["kernels"]:
        if (row["model"], row["capability"]) == (FIRST, HOPPER):
            cells = [f"`{row['kernel']}`", row["lanes"] or "", row["registers"], row["spilled"]]
            cells += [f"{row['shared'] / 1024:.0f}", row["programs"], launches.get(row["kernel"], "")]
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    begin, end = "<!-- kernels -->\n", "<!-- end of kernels -->"
    text = path.read_text(encoding="utf-8")
    head, tail = text.split(begin)[0], text.split(end)[1]
    path.write_text(f"{head}{begin}" + "\n".join(dict.fromkeys(lines)) + f"\n{end}{tail}", encoding="utf-8")


if __name__ == "__main__":
    if "--compile" in sys.argv:
        main(everything="everything" in sys.argv)
    else:
        write_docs(Path(sys.argv[-1]), run_compiler(everything=True))
