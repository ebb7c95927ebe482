"""Every kernel compiles for Ampere and Hopper, without a GPU, just as the runner launches it for real models.

The tests' own process interprets kernels where there is no CUDA device; so the compiler runs in another one, which is
this file as a program: the runner takes its steps on CPU tensors through Triton's own binder, a driver that stands for
a device says which one it is, and what would be launched is compiled only. Matrix products are left out.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SHARED_MEMORY_LIMITS = {80: 99 * 1024, 90: 227 * 1024}
"""Bytes a program may have by compute capability; the smaller Ampere chips have 99 KiB."""

KERNELS = {
    *("attend_tiles", "combine_splits", "add_rms_norm_rows", "rope_and_store_heads"),
    *("rank_blocks", "finish_rows"),
}

WIDE, MANY = (
    {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": width}
    for heads, kv_heads, width in ((8, 2, 256), (16, 16, 80))
)
MODELS: dict[str, tuple[str, dict[str, Any], str, tuple[tuple[int, int], ...]]] = {
    "qwen2.5-1.5b": ("qwen2.5-1.5b", {}, "bfloat16", ((1, 1), (256, 256), (512, 64), (2048, 256))),
    "qwen2.5-0.5b, float32": ("qwen2.5-0.5b", {}, "float32", ((8, 1),)),
    "qwen3-8b": ("qwen3-8b", {}, "bfloat16", ((64, 8),)),
    "heads of 256": ("qwen2.5-1.5b", WIDE, "bfloat16", ((64, 8),)),
    "heads of 80": ("qwen2.5-1.5b", MANY, "bfloat16", ((64, 8),)),
}
"""Name -> shape and changes of its config, dtype, and the steps: (rows, sequences).

The first has all kinds of steps, the others one with the highest blocks and with splits: it needs the most memory.
"""


def main() -> None:
    """Print what was compiled: a list of {model, kernel, capability, shared, fetches_ahead}."""
    import torch
    from torch.nn import Linear
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from srtrl.bench.shapes import SHAPES
    from srtrl.engine.cuda_runner import CudaRunner
    from srtrl.engine.runner import EngineOptions
    from srtrl.model.hf_config import config_from_hf
    from srtrl.model.transformer import Transformer

    found: dict[tuple[str, str, int, int], dict[str, Any]] = {}

    class Device:
        """As much of a driver as a launch asks for; the index of the device is its compute capability."""

        capability = 80

        def get_current_device(self) -> int:
            return self.capability

        def get_current_stream(self, device: int) -> int:
            return 0

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", self.capability, 32)

    device = Device()
    launch = JITFunction.run

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        compiled = launch(kernel, *args, grid=grid, warmup=True, **options)
        found[model, kernel.__name__, device.capability, id(compiled)] = {
            "model": model,
            "kernel": kernel.__name__,
            "capability": device.capability,
            "shared": compiled.metadata.shared,
            "fetches_ahead": "async_copy" in compiled.asm["ttgir"],
        }
        return compiled

    driver.set_active(device)
    JITFunction.run = compile_only
    torch.mm = lambda left, right, out: out  # type: ignore[assignment]
    Linear.forward = lambda self, hidden: hidden.new_empty(len(hidden), len(self.weight))  # type: ignore[method-assign, assignment]
    for model, (shape, changes, dtype, steps) in MODELS.items():  # noqa: B007
        policy = Transformer(
            config_from_hf(SHAPES[shape] | {"num_hidden_layers": 1} | changes), getattr(torch, dtype), "cpu"
        )
        runner = CudaRunner(policy, EngineOptions(cuda_graphs=False, slots=512), 16_000)
        runner.allocate_pages(4)
        for device.capability in SHARED_MEMORY_LIMITS:
            for num_rows, num_sequences in steps:
                runner.time_step(num_rows, 30, num_sequences=num_sequences)
    json.dump(list(found.values()), sys.stdout)


@pytest.fixture(scope="module")
def compiled() -> list[dict[str, Any]]:
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = Path(__file__).resolve().parent.parent
    environment["PYTHONPATH"] = os.pathsep.join([str(root), environment.get("PYTHONPATH", "")])
    program = [sys.executable, str(Path(__file__))]
    result = subprocess.run(program, capture_output=True, text=True, env=environment, check=False)
    assert result.returncode == 0, result.stderr[-4000:]
    kernels: list[dict[str, Any]] = json.loads(result.stdout)
    return kernels


@pytest.mark.parametrize("capability", list(SHARED_MEMORY_LIMITS))
@pytest.mark.parametrize("model", list(MODELS))
def test_kernels_compile_as_they_are_launched(model: str, capability: int, compiled: list[dict[str, Any]]) -> None:
    found = [one for one in compiled if (one["model"], one["capability"]) == (model, capability)]
    assert {one["kernel"] for one in found} == KERNELS
    for one in found:
        assert one["shared"] <= SHARED_MEMORY_LIMITS[capability], one
        assert one["fetches_ahead"] or one["kernel"] != "attend_tiles", one


def test_one_engine_compiles_few_variants(compiled: list[dict[str, Any]]) -> None:
    """Numbers that differ from step to step make no other kernels, but for block heights, with splits and without."""
    counts: dict[str, int] = {}
    for one in compiled:
        if (one["model"], one["capability"]) == ("qwen2.5-1.5b", 90):
            counts[one["kernel"]] = counts.get(one["kernel"], 0) + 1
    assert counts.pop("attend_tiles") <= 6
    assert counts.pop("combine_splits") <= 3
    assert counts.pop("add_rms_norm_rows") == 2
    assert set(counts.values()) == {1}


if __name__ == "__main__":
    main()
