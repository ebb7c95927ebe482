"""Compile every kernel for Ampere to Blackwell, without a GPU, just as the runner launches it for real models.

What was found is printed as JSON, for tests/test_triton_compile.py, which checks it (`make check-gpu-static`).

The runner takes its steps on CPU tensors through Triton's own binder, a driver that stands for a device says which one
it is, and what would be launched is compiled only. What a kernel needs is read from its binary; matrix products are
only counted.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

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
from srtrl.cuda.update import FusedSoftmax, fused_gated, fused_rotate
from srtrl.engine.runner import EngineOptions
from srtrl.features.draft_head import DraftHead
from srtrl.features.draft_head_cuda import CudaGuesses
from srtrl.model.hf_config import config_from_hf
from srtrl.model.logprobs import Slopes
from srtrl.model.published_shapes import SHAPES
from srtrl.model.transformer import Transformer

SHARED_MEMORY = {80: (99, 164), 89: (99, 100), 90: (227, 228), 100: (227, 228), 120: (99, 100)}
"""KiB by compute capability: what a program may have (the smaller Ampere chips: 99), and what a multiprocessor has."""

REGISTERS = 65_536
"""Registers of a multiprocessor."""

OF_THE_UPDATE = {"softmax_rows", "softmax_gradient_rows", "gated_gradient_rows", "rotate_heads"}
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
    "heads of 80": ("qwen2.5-1.5b", MANY, "bfloat16", ((64, 8), (16, 2))),
}
"""Name -> shape and changes of its config, dtype, and the steps: (rows, sequences).

The first has all kinds of steps; the others have the highest blocks, which need the most memory, and splits.
"""

FIRST, HOPPER = "qwen2.5-1.5b", 90

OF_A_LAYER = ("rope_and_store_heads", "attend_tiles", "combine_splits", "gated_rows")
ONCE = ("embedding", "zeros", "move_kv_paths", "mm", "rank_blocks", "finish_rows")
STEP = {"copy_": 2, "add_rms_norm_rows": 57, "linear": 112} | dict.fromkeys(OF_A_LAYER, 28) | dict.fromkeys(ONCE, 1)
"""Launches of a step of 64 sequences without drafts for Qwen2.5-1.5B, 28 layers; all but the copies are its graph."""

DRAFT_TOKENS = 3
"""That a draft head guesses in a row: each is a launch of `rank_listed`."""


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


class Device:
    """As much of a driver as a launch asks for; the index of the device is its compute capability."""

    capability = 80

    def get_current_device(self) -> int:
        """Device of the launches that follow."""
        return self.capability

    def get_current_stream(self, device: int) -> int:
        """Nothing is launched."""
        return 0

    def get_current_target(self) -> GPUTarget:
        """Target of the compiler."""
        return GPUTarget("cuda", self.capability, 32)


def resources_of(compiled: Any) -> tuple[int, int]:
    """Registers of a compiled kernel, and bytes that it spills, read from its binary."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as binary:
        binary.write(compiled.asm["cubin"])
        binary.flush()
        program = str(Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump")
        command = [program, "-res-usage", binary.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack, local = (int(re.findall(rf"{name}:(\d+)", usage)[-1]) for name in ("REG", "STACK", "LOCAL"))
    return registers, stack + local


def compile_kernels(everything: bool) -> dict[str, Any]:
    """Compiled kernels and launches: {kernels: a list of {model, kernel, capability, ...}, step: counts}.

    By default for one engine on one architecture; else for all models and architectures.
    """
    found: dict[tuple[str, str, int, int], dict[str, Any]] = {}
    launches: Counter[str] = Counter()

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
            registers, spilled = resources_of(compiled)
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
                "spilled": spilled,
                "shared": compiled.metadata.shared,
                "programs": programs_at_once(registers, compiled.metadata, device.capability),
                "planned": planned if kernel.__name__ == "attend_tiles" else 1,
                "fetches_ahead": "async_copy" in compiled.asm["ttgir"],
                "fuses": "enable_fp_fusion" in options,
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
        run_update(policy)
        head = DraftHead(policy, policy.dtype, vocabulary=2048, seed=0)
        head.read(policy)
        zeros: Any = np.zeros(64, np.int64)
        CudaGuesses(head, runner, k=DRAFT_TOKENS, slots=64).launch(zeros, zeros, zeros, zeros, zeros)
    return {"kernels": list(found.values()), "step": counts}


def run_update(policy: Transformer) -> None:
    """Launch every kernel of the update."""
    zeros, config = torch.zeros(8), policy.config
    for temperature, slope in ((1.0, None), (1.0, zeros), (0.7, zeros)):
        inputs = (policy.embedding[:8], policy.embedding, zeros.long(), temperature)
        FusedSoftmax().forward(*inputs, has_entropy=slope is not None)
        FusedSoftmax().gradient(*inputs, Slopes(zeros, zeros, zeros, slope))
    gate_up = policy.embedding.new_zeros(8, 2 * config.intermediate_size, requires_grad=True)
    fused_gated(gate_up, config.style).sum().backward()  # type: ignore[no-untyped-call]
    heads = zeros.new_zeros(8, config.num_attention_heads + config.num_key_value_heads, config.head_dim)
    heads = heads.to(policy.dtype).requires_grad_()
    angles = policy.rotary[0].rows(zeros.long(), 1, policy.dtype)
    fused_rotate(heads, *angles, config.rotary_dim, config.style).sum().backward()  # type: ignore[no-untyped-call]


def programs_at_once(registers: int, metadata: Any, capability: int) -> int:
    """How many programs of a kernel a multiprocessor holds; each takes 1 KiB of shared memory beside its own."""
    by_registers = REGISTERS // (32 * metadata.num_warps * 8 * -(-registers // 8))
    by_memory = 1024 * SHARED_MEMORY[capability][1] // (metadata.shared + 1024)
    return int(min(by_registers, by_memory, 64 // metadata.num_warps))


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--everything", action="store_true", help="all models and architectures")
    json.dump(compile_kernels(parser.parse_args().everything), sys.stdout)


if __name__ == "__main__":
    main()
