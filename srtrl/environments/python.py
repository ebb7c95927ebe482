"""Python as a tool: each call runs in a sandboxed interpreter of its own; nothing is kept between two calls."""

import os
from contextlib import AbstractContextManager
from typing import Literal

from pydantic import Field

from srtrl.environments.base import Tool, ToolCall, ToolEnvironment
from srtrl.environments.python_sandbox import PythonSandbox, SandboxLimits, ToolResult
from srtrl.recipe import Section


class PythonOptions(Section):
    """Options of the environment `python`: where code runs, and what a call may use."""

    sandbox: Literal["auto", "sandlock", "bubblewrap", "none"] = "auto"
    """`auto`: sandlock where the kernel has what it needs (Linux 6.12), else bubblewrap; `none` protects nothing."""
    num_workers: int | None = Field(default=None, ge=1, le=1024)
    """Interpreters, and so calls that run at the same time; by default one for each CPU core, at most 8."""
    cpu_seconds: int = Field(default=5, ge=1, le=3600)
    """CPU time of a call."""
    wall_seconds: float = Field(default=60.0, gt=0, le=3600)
    """Wall-clock time of a call: a last resort, for code that sleeps."""
    memory_mb: int = Field(default=1024, ge=16, le=1_000_000)
    """Memory of a call, in MiB, beyond that of the interpreter."""
    output_bytes: int = Field(default=65536, ge=64, le=2**30)
    """Of a call that prints more, the rest is lost and the call ends."""


class Environment(ToolEnvironment):
    """See `srtrl.environments.base.EnvironmentBase`."""

    Options = PythonOptions
    shared: PythonSandbox
    tools = (
        Tool(
            name="python",
            description="Runs a complete Python program (numpy and sympy are there) and returns what it prints.",
            parameters={"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
        ),
    )

    @classmethod
    def open(cls, options: Section) -> AbstractContextManager[PythonSandbox]:
        """Start the interpreters."""
        assert isinstance(options, PythonOptions)
        num_workers = cls.max_parallel(options)
        limits = SandboxLimits(**options.model_dump(exclude={"sandbox", "num_workers"}))
        return PythonSandbox(limits, num_workers=num_workers, sandbox=options.sandbox)

    @classmethod
    def max_parallel(cls, options: Section) -> int:
        """A call for each interpreter, so that none waits for one within its time limit."""
        assert isinstance(options, PythonOptions)
        return options.num_workers or min(8, os.cpu_count() or 1)

    def call(self, call: ToolCall) -> tuple[str, str]:
        """What the code printed, and how it ended."""
        result = self.shared.run(call.arguments["code"])
        return describe(result), "truncated" if result.is_truncated else result.status


def describe(result: ToolResult) -> str:
    """What the policy reads of a call: what was printed, then how it ended where that was not well."""
    lines = [result.stdout.rstrip("\n")] if result.stdout.strip() else []
    if result.is_truncated:
        lines.append("[more output than allowed; the rest is lost]")
    elif result.status == "error":
        lines.append((result.stderr.strip() or f"exit code {result.exit_code}").rpartition("\n")[2])
    elif result.status != "ok":
        why = {"timeout": "the time limit was exceeded", "memory": "the memory limit was exceeded"}
        lines.append(f"[{why.get(result.status, 'the program was killed')}]")
    return "\n".join(lines) if lines else "[no output]"
