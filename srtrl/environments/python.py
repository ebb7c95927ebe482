"""Python as a tool: each call runs in a fresh sandboxed process; nothing is kept between two calls."""

import os
from contextlib import AbstractContextManager

from pydantic import Field

from srtrl.environments.base import Step, Tool, ToolCall, ToolEnvironment, Turn
from srtrl.environments.python_sandbox import PythonSandbox, SandboxKind, SandboxLimits, ToolResult
from srtrl.recipe.schema import Section


class PythonOptions(SandboxLimits):
    """Options of the environment `python`: where code runs, and what a call may use."""

    sandbox: SandboxKind = "auto"
    """`auto`: sandlock where the kernel has what it needs (Linux 6.12), else bubblewrap; `none` protects nothing."""
    num_workers: int | None = Field(default=None, ge=1, le=1024)
    """Interpreters, and so calls that run at the same time; by default one for each CPU core, at most 8."""


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
        return PythonSandbox(options, num_workers=cls.max_parallel(options), sandbox=options.sandbox)

    @classmethod
    def max_parallel(cls, options: Section) -> int:
        """A call for each interpreter, so that none waits for one within its time limit."""
        assert isinstance(options, PythonOptions)
        return options.num_workers or min(8, os.cpu_count() or 1)

    def replay(self, turn: Turn, answer: Step) -> None:
        """Nothing is kept from call to call."""

    def call(self, call: ToolCall) -> tuple[str, str]:
        """The output of the code, and its end."""
        result = self.shared.run(call.arguments["code"])
        return describe(result), "truncated" if result.is_truncated else result.status


def describe(result: ToolResult) -> str:
    """The observation: the output, then the error or the limit that ended the call."""
    lines = [result.stdout.rstrip("\n")] if result.stdout.strip() else []
    if result.is_truncated:
        lines.append("[more output than allowed; the rest is lost]")
    elif result.status == "error":
        lines.append((result.stderr.strip() or f"exit code {result.exit_code}").rpartition("\n")[2])
    elif result.status != "ok":
        reasons = {"timeout": "the time limit was exceeded", "memory": "the memory limit was exceeded"}
        lines.append(f"[{reasons.get(result.status, 'the program was killed')}]")
    return "\n".join(lines) if lines else "[no output]"
