"""Every Triton kernel compiles for Ampere and Hopper, without a GPU, within the shared memory these have.

The tests' own process interprets kernels where there is no CUDA device; so the compiler runs in another one, which is
this file as a program.
"""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from kernel_cases import COMPILE_CASES, CompileCase

SHARED_MEMORY_LIMITS = {80: 99 * 1024, 90: 227 * 1024}
"""Bytes a program may have by compute capability; the smaller Ampere chips have 99 KiB."""


def compile_case(case: CompileCase, capability: int) -> dict[str, Any]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(importlib.import_module(case.module), case.kernel)
    types = {name: case.signature.get(name, "constexpr") for name in kernel.arg_names}
    assert set(case.signature) | set(case.constants) == set(types), (case.name, types)
    # As at a launch, where every tensor begins at a multiple of 16 bytes.
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(types.values()) if kind.startswith("*")}
    source = ASTSource(fn=kernel, signature=types, constexprs=dict(case.constants), attrs=aligned)
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages} | dict(case.options)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return {"shared": compiled.metadata.shared, "fetches_ahead": "async_copy" in compiled.asm["ttgir"]}


def main() -> None:
    """Compile all cases; print what was found, by the case's name and the capability."""
    found = {
        case.name: {capability: compile_case(case, capability) for capability in SHARED_MEMORY_LIMITS}
        for case in COMPILE_CASES
    }
    json.dump(found, sys.stdout)


@pytest.fixture(scope="module")
def compiled() -> Any:
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    program = [sys.executable, str(Path(__file__))]
    result = subprocess.run(program, capture_output=True, text=True, env=environment, check=False)
    assert result.returncode == 0, result.stderr[-4000:]
    return json.loads(result.stdout)


@pytest.mark.parametrize("case", COMPILE_CASES, ids=lambda case: case.name)
def test_kernels_compile_for_each_chip(case: CompileCase, compiled: Any) -> None:
    for capability, limit in SHARED_MEMORY_LIMITS.items():
        found = compiled[case.name][str(capability)]
        assert found["shared"] <= limit, f"compute capability {capability}"
        assert found["fetches_ahead"] or not case.fetches_ahead


if __name__ == "__main__":
    main()
