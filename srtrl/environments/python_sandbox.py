"""Python as a tool: a pool of sandboxed interpreters, each with a thread that hands it one call at a time.

`srtrl/environments/python_worker.py` runs inside. Results are data that its trusted parent process wrote; the code of a
call can neither write to that pipe nor reach the process that does.
"""

import ctypes
import json
import logging
import os
import signal
import subprocess
import sys
import sysconfig
import time
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, Self

from pydantic import Field

from srtrl.recipe.schema import Section
from srtrl.tasks.worker_pool import Worker, WorkerPool

logger = logging.getLogger(__name__)

SandboxKind = Literal["landlock", "none"]
ToolStatus = Literal["ok", "error", "timeout", "memory", "killed"]

WORKER_FILE = Path(__file__).with_name("python_worker.py")
PACKAGES = ("numpy", "sympy", "mpmath")
"""Packages of the interpreters; a call can read and import everything in the folders where these are installed."""
SYSTEM_PATHS = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/dev/null", "/dev/urandom")
MAX_CODE_CHARACTERS = 200_000
"""Longer code is an error: its syntax tree alone would take hundreds of megabytes."""
GRACE_SECONDS = 10.0
"""Time after `wall_seconds` within which an interpreter must report, before it is killed itself."""


class SandboxLimits(Section):
    """The limits of one call."""

    cpu_seconds: int = Field(default=5, ge=1, le=3600)
    """CPU time of a call, in whole seconds, kept by the kernel."""
    wall_seconds: float = Field(default=60.0, gt=0, le=240)
    """Wall-clock time of a call: a safety net for code that sleeps; generous, because a loaded machine is slow. All
    calls of a turn together have 300 seconds."""
    memory_mb: int = Field(default=1024, ge=16, le=1_000_000)
    """Memory of a call: MiB of address space, beyond what the interpreter has when the call begins."""
    output_bytes: int = Field(default=65536, ge=64, le=2**30)
    """Maximum size of standard output, and of standard error. A call that prints more ends, and the rest is lost."""


@dataclass(kw_only=True, slots=True, frozen=True)
class ToolResult:
    """The output of a call and its end."""

    status: ToolStatus
    """`ok`: exit code 0; `error`: another one, with the traceback in `stderr`; `timeout`: CPU or wall-clock time;
    `memory`: a MemoryError; `killed`: by a signal, for too much output, or because its interpreter ended."""
    stdout: str
    stderr: str
    exit_code: int
    """Minus the number of the signal, if that ended it."""
    seconds: float
    """Wall-clock time."""
    is_truncated: bool = False
    """Whether it printed more than `output_bytes`; the rest is lost."""


class PythonSandbox(WorkerPool):
    """Runs Python code in sandboxed interpreters. Use it as a context manager: leaving it ends all of them.

    Args:
        limits: Of each call.
        num_workers: Number of interpreters, and so of calls at the same time.
        sandbox: `landlock`, the kernel's own, or `none`, which protects nothing.

    Raises:
        ValueError: the kernel has no Landlock.
        RuntimeError: an interpreter does not start; with its message.
    """

    def __init__(self, limits: SandboxLimits, *, num_workers: int = 2, sandbox: SandboxKind = "landlock") -> None:
        if sandbox == "none":
            logger.warning(
                "sandbox: none. Code that the policy writes runs with the rights of this user: it can read and write "
                "your files and, for example, your credentials. Only its CPU time, memory and output are limited"
            )
        command, environment = _command(sandbox, limits)
        super().__init__([Interpreter(command, environment, limits) for _ in range(num_workers)], "srtrl-python")
        try:
            list(self._threads.map(Interpreter.start, self._workers))
        except RuntimeError:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def run(self, code: str) -> ToolResult:
        """Run `code` and wait for its end; `submit` returns at once.

        Raises:
            RuntimeError: an interpreter had ended, and another does not start.
        """
        result: ToolResult = self.submit(code).result()
        return result


class Interpreter(Worker):
    """One interpreter, replaced when it ends."""

    def __init__(self, command: list[str], environment: dict[str, str], limits: SandboxLimits) -> None:
        max_reply_bytes = 12 * limits.output_bytes + 10_000  # a byte is at most six characters of JSON
        nothing, pipe = subprocess.DEVNULL, subprocess.PIPE
        super().__init__(max_reply_bytes, stdout=nothing, stderr=pipe, env=environment, cwd="/")
        self._command = command
        self._wall_seconds = limits.wall_seconds

    def start(self) -> None:
        """Start the interpreter, and wait until it has imported its packages; the errors are those of `launch`."""
        self.launch(self._command, b"", "a sandboxed interpreter")

    def run(self, code: str) -> ToolResult:
        """Run one call.

        Raises:
            RuntimeError: as `launch`, if the interpreter had to be replaced.
        """
        if len(code) > MAX_CODE_CHARACTERS:
            stderr = f"SyntaxError: the code has {len(code)} characters, more than {MAX_CODE_CHARACTERS}\n"
            return ToolResult(status="error", stdout="", stderr=stderr, exit_code=1, seconds=0.0)
        if self._process is None:
            self.start()
        begun = time.monotonic()
        with suppress(OSError, ValueError):  # it has ended, or does not answer: killed
            request = json.dumps(code).encode() + b"\n"
            return ToolResult(**self.exchange(request, self._wall_seconds + GRACE_SECONDS))
        _, message = self.reap()
        if not self._is_closed:
            logger.warning("a sandboxed interpreter ended during a call, starting another: %s", message or "no message")
        seconds = time.monotonic() - begun
        return ToolResult(status="killed", stdout="", stderr="", exit_code=-signal.SIGKILL, seconds=seconds)


def landlock_version() -> int:
    """The version of the kernel's Landlock; below 1 where there is none."""
    return int(ctypes.CDLL(None).syscall(444, None, 0, 1))  # landlock_create_ruleset, LANDLOCK_CREATE_RULESET_VERSION


def _command(sandbox: SandboxKind, limits: SandboxLimits) -> tuple[list[str], dict[str, str]]:
    """The command that starts an interpreter, and all of its environment variables.

    Raises:
        ValueError: the kernel has no Landlock.
    """
    version = landlock_version() if sandbox == "landlock" else 0
    if version < 1 and sandbox == "landlock":
        raise ValueError(
            "no sandbox for the Python tool: this kernel, or the container around this program, has no Landlock "
            "(Linux 5.13 and later have it). Write sandbox: none to run the code without protection"
        )
    folders = []
    for spec in map(find_spec, PACKAGES):
        assert spec is not None, "srtrl depends on it"
        assert spec.origin is not None
        folders.append(str(Path(spec.origin).parent.parent))
    folders = list(dict.fromkeys(folders))
    environment = {
        "PYTHONPATH": os.pathsep.join(folders),
        "PYTHONHASHSEED": "0",
        "LC_ALL": "C.UTF-8",
        "OMP_NUM_THREADS": "1",  # a fork has no other threads, so the interpreter must have none
        "MALLOC_ARENA_MAX": "1",
    }
    libraries = [str(Path(sys.base_prefix) / "lib"), sysconfig.get_path("stdlib"), *folders]
    readable = [path for path in (*SYSTEM_PATHS, *libraries) if Path(path).exists()]
    options = json.dumps(limits.model_dump() | {"landlock": version, "readable": readable})
    python = os.path.realpath(sys.executable)
    return [python, "-S", "-P", "-s", "-B", "-X", "utf8", str(WORKER_FILE), options], environment
