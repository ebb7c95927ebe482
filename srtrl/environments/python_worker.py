"""The program that a sandboxed interpreter runs: a fresh fork for each call. It imports nothing of ours.

It imports numpy and sympy once. Then it reads a request per line, forks, and the fork runs the code: one process, one
thread, with its limits kept by the kernel, and a seccomp filter that allows it the system calls that such code needs:
no new processes and threads, and nothing that one process can do to another. So killing that one process ends the code,
always. The parent never runs a line of the code; it reads the two pipes, waits for the end, and reports it, so the code
has no part in that.
"""

import ast
import builtins
import contextlib
import ctypes
import errno
import gc
import json
import linecache
import mmap
import os
import platform
import random
import resource
import select
import signal
import struct
import sys
import time
import traceback
import types
from types import TracebackType
from typing import Any, NoReturn

import numpy as np
import numpy.random  # which numpy itself imports at its first use: not in each call
import sympy  # noqa: F401  for the calls: each fork finds it imported

MEMORY_EXIT_CODE = 71
"""Exit code of a call that ended with a MemoryError."""
CHUNK_BYTES = 1 << 16
NUM_FILES = 64
"""File descriptors that a call may have open."""
SOURCE_NAME = "<tool>"

ALLOWED_CALLS = """
read 0 63, write 1 64, writev 20 66, pread64 17 67, lseek 8 62, open 2 -, openat 257 56, close 3 57,
close_range 436 436, dup 32 23, dup2 33 -, dup3 292 24, pipe 22 -, pipe2 293 59, stat 4 -, fstat 5 80, lstat 6 -,
newfstatat 262 79, statx 332 291, access 21 -, faccessat 269 48, faccessat2 439 439, getdents64 217 61, getcwd 79 17,
poll 7 -, ppoll 271 73, select 23 -, pselect6 270 72, epoll_create1 291 20, epoll_ctl 233 21, epoll_wait 232 -,
epoll_pwait 281 22, epoll_pwait2 441 441, eventfd2 290 19, sendto 44 206, recvfrom 45 207, shutdown 48 210,
getsockname 51 204, getsockopt 55 209, mmap 9 222, munmap 11 215, mprotect 10 226, mremap 25 216, madvise 28 233,
brk 12 214, futex 202 98, set_robust_list 273 99, rseq 334 293, membarrier 324 283, sched_yield 24 124,
rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139, rt_sigpending 127 136, rt_sigtimedwait 128 137,
rt_sigsuspend 130 133, sigaltstack 131 132, pause 34 -, alarm 37 -, setitimer 38 103, getitimer 36 102,
restart_syscall 219 128, clock_gettime 228 113, clock_getres 229 114, clock_nanosleep 230 115, nanosleep 35 101,
gettimeofday 96 169, time 201 -, times 100 153, getrandom 318 278, getpid 39 172, getppid 110 173, gettid 186 178,
getpgrp 111 -, getuid 102 174, geteuid 107 175, getgid 104 176, getegid 108 177, getgroups 115 158, getresuid 118 148,
getresgid 120 150, uname 63 160, sysinfo 99 179, getrusage 98 165, getrlimit 97 163, setrlimit 160 164, exit 60 93,
exit_group 231 94
"""
"""System calls that a call may make, with their numbers on x86_64 and aarch64 (`-`: there is none): what Python, numpy
and sympy need. Files stay those that sandlock or bubblewrap shows. Any other one is answered as an old kernel would
(ENOSYS), so that the C library of a newer system takes the older call instead."""
ALLOWED_VALUES = """
fcntl 72 25 1 0x0 0x1 0x2 0x3 0x4 0x406, ioctl 16 29 1 0x5401 0x5421 0x5451, socketpair 53 199 1 0x1 0x80001,
prlimit64 302 261 0 0x0, sched_getaffinity 204 123 0 0x0, getpgid 121 155 0 0x0
"""
"""The same with values of one argument (index, values): F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC;
TCGETS, FIONBIO, FIOCLEX; SOCK_STREAM (with SOCK_CLOEXEC), because a pair of datagram sockets can send to others; the
process itself."""
LIBC = ctypes.CDLL(None, use_errno=True)
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Column of the tables above, and the kernel's number of the machine."""


def seccomp_program(machine: str) -> bytes:
    """The filter as instructions of classic BPF: (code, jump if true, jump if false, operand) each.

    Raises:
        ValueError: a machine without a column in the tables.
    """
    if machine not in MACHINES:
        raise ValueError(f"the Python sandbox supports {', '.join(MACHINES)}, not {machine}")
    column, audit_number = MACHINES[machine]
    load, if_equal = 0x20, 0x15
    refuse, allow, kill = ((0x06, 0, 0, action) for action in (0x00050000 | errno.ENOSYS, 0x7FFF0000, 0x80000000))
    program = [(load, 0, 0, 4), (if_equal, 1, 0, audit_number), kill, (load, 0, 0, 0)]
    for row in ALLOWED_CALLS.split(","):
        number = row.split()[1 + column]
        program += [(if_equal, 0, 1, int(number)), allow] if number != "-" else []
    for row in ALLOWED_VALUES.split(","):
        _, *numbers, argument = (fields := row.split())[:4]
        checks = [(load, 0, 0, 16 + 8 * int(argument))]
        for value in fields[4:]:
            checks += [(if_equal, 0, 1, int(value, 16)), allow]
        program += [(if_equal, 0, len(checks) + 1, int(numbers[column])), *checks, refuse]
    return b"".join(struct.pack("HBBI", *instruction) for instruction in [*program, refuse])


def call(function: str, *arguments: Any) -> int:
    """Call a function of the C library; a negative result raises its OSError."""
    result: int = LIBC[function](*arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{function}: {os.strerror(ctypes.get_errno())}")
    return result


def enter_own_domain() -> None:
    """From now on this process neither traces nor signals one outside it, nor follows /proc/PID/fd of its parent."""
    ruleset = call("syscall", 444, struct.pack("QQQ", 0, 0, 3), 24, 0)  # landlock_create_ruleset: sockets, signals
    call("prctl", 38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    call("syscall", 446, ruleset, 0)  # landlock_restrict_self


def install_filter(program: bytes) -> None:
    """From now on this process makes only the allowed system calls."""
    instructions = ctypes.create_string_buffer(program, len(program))
    call("prctl", 38, 1, 0, 0, 0)
    header = struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(instructions))
    call("prctl", 22, 2, header, 0, 0)  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER


def mapped_bytes() -> int:
    """Address space of this process to the next MiB, by trial: /proc cannot be read here."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    low, high = 0, 1 << 47
    while high - low > 1 << 20:
        middle = (low + high) // 2
        resource.setrlimit(resource.RLIMIT_AS, (middle, limits[1]))
        try:
            mmap.mmap(-1, mmap.PAGESIZE).close()
            high = middle
        except (OSError, MemoryError):
            low = middle
        finally:
            resource.setrlimit(resource.RLIMIT_AS, limits)
    return high


class Calls:
    """Runs one call after the other, each in a fork.

    Args:
        limits: The fields of `SandboxLimits`; `has_landlock`: whether to use it (bubblewrap shows no /proc at all).
        trainer: File descriptor that hangs up when the trainer is gone.
    """

    def __init__(self, limits: dict[str, Any], trainer: int) -> None:
        self._limits = limits
        self._trainer = trainer
        self._filter = seccomp_program(platform.machine())
        call("capset", struct.pack("Ii", 0x20080522, 0), bytes(24))  # root's rights: to raise limits, to trace
        self._base_bytes = mapped_bytes()

    def run_forked(self, code: str) -> dict[str, Any]:
        """Run `code`; returns the fields of its `ToolResult`."""
        pipes = [os.pipe(), os.pipe()]
        own_pid = os.getpid()
        begun = time.monotonic()
        pid = os.fork()
        if pid == 0:
            self._prepare(own_pid, [write_end for _, write_end in pipes])
            execute(code)
        for _, write_end in pipes:
            os.close(write_end)
        outputs = {read_end: bytearray() for read_end, _ in pipes}
        status, is_truncated = self._watch(pid, outputs, begun + self._limits["wall_seconds"])
        _, wait_status, usage = os.wait4(pid, 0)
        exit_code = os.waitstatus_to_exitcode(wait_status)
        if status is None and exit_code < 0:
            # By its CPU limit, and not by the system for want of memory; the kernel counts coarser for the limit.
            spent_cpu = usage.ru_utime + usage.ru_stime > 0.5 * self._limits["cpu_seconds"]
            status = "timeout" if spent_cpu and exit_code in (-signal.SIGKILL, -signal.SIGXCPU) else "killed"
        result = {
            "status": status or {0: "ok", MEMORY_EXIT_CODE: "memory"}.get(exit_code, "error"),
            "exit_code": exit_code,
            "seconds": time.monotonic() - begun,
            "is_truncated": is_truncated,
        }
        for name, read_end in zip(("stdout", "stderr"), outputs, strict=True):
            result[name] = outputs[read_end].decode("utf-8", "replace")
            os.close(read_end)
        return result

    def _watch(self, pid: int, outputs: dict[int, bytearray], deadline: float) -> tuple[str | None, bool]:
        """Read the output until the process has ended; kill it when it prints too much or takes too long.

        Returns:
            The status if this has killed the process, else None; whether output is missing.
        """
        process = call("syscall", 434, pid, 0)  # pidfd_open, which not every build of Python has
        poll = select.poll()
        poll.register(self._trainer, 0)  # only its end
        for descriptor in (process, *outputs):
            poll.register(descriptor, select.POLLIN)
        status, is_truncated, num_open, room = None, False, 1 + len(outputs), self._limits["output_bytes"]
        while num_open:
            events = poll.poll(max(0.0, deadline - time.monotonic()) * 1000 if status is None else None)
            reason = None if events else "timeout"
            for descriptor, _ in events:
                chunk = os.read(descriptor, CHUNK_BYTES) if descriptor in outputs else b""
                if not chunk:
                    poll.unregister(descriptor)
                    num_open -= descriptor != self._trainer
                    reason = "killed" if descriptor == self._trainer else reason
                    continue
                outputs[descriptor] += chunk
                if len(outputs[descriptor]) > room:
                    is_truncated, reason = True, "killed"
                    del outputs[descriptor][room:]
            if reason is not None and status is None:
                status = reason
                os.kill(pid, signal.SIGKILL)
        os.close(process)
        return status, is_truncated

    def _prepare(self, parent: int, outputs: list[int]) -> None:
        """Make this fork what the code may have: three file descriptors and its limits."""
        call("prctl", 1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG: it does not outlive the interpreter
        if os.getppid() != parent:
            os._exit(1)
        own_input = os.open(os.devnull, os.O_RDONLY)  # of its own: flags are shared with all that have the same one
        for descriptor, source in enumerate((own_input, *outputs)):
            os.dup2(source, descriptor)
        if self._limits["has_landlock"]:
            enter_own_domain()
        os.closerange(3, 1 << 20)
        for kind, value in (
            (resource.RLIMIT_CPU, self._limits["cpu_seconds"]),
            (resource.RLIMIT_AS, self._base_bytes + self._limits["memory_mb"] * 2**20),
            (resource.RLIMIT_NOFILE, NUM_FILES),
            (resource.RLIMIT_FSIZE, 0),
            (resource.RLIMIT_CORE, 0),
        ):
            resource.setrlimit(kind, (value, value))
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.urandom = random._urandom = random.Random(0).randbytes  # type: ignore[attr-defined]  # what seeds come from
        random.seed(0)
        np.random.seed(0)
        install_filter(self._filter)


def execute(code: str) -> NoReturn:
    """Run `code` as a script, print the value of a final expression, and end the process."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    linecache.cache[SOURCE_NAME] = (len(code), None, code.splitlines(keepends=True), SOURCE_NAME)
    with contextlib.ExitStack() as stack:
        stack.push(finish)
        tree = ast.parse(code, SOURCE_NAME)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, SOURCE_NAME, "exec"), module.__dict__)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), SOURCE_NAME, "eval"), module.__dict__)
            if value is not None:
                print(repr(value))
    raise AssertionError("`finish` does not return")


def finish(_kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> NoReturn:
    """End the process as the interpreter does: print a traceback, of the code's own lines, and set the exit code."""
    exit_code = 1
    try:
        if isinstance(error, SystemExit):
            exit_code = error.code & 0xFF if isinstance(error.code, int) else int(error.code is not None)
            if exit_code == 1 and not isinstance(error.code, int):
                print(error.code, file=sys.stderr)
        elif error is not None:
            exit_code = MEMORY_EXIT_CODE if isinstance(error, MemoryError) else 1
            while trace is not None and trace.tb_frame.f_code.co_filename != SOURCE_NAME:
                trace = trace.tb_next
            traceback.print_exception(error.with_traceback(trace))
        else:
            exit_code = 0
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(exit_code)


def main() -> None:
    """Answer requests until the trainer closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    requests, replies = os.dup(0), os.dup(0)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):
        os.dup2(nothing, descriptor)
    sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]
    vars(builtins).update(exit=sys.exit, quit=sys.exit)  # of `site`, which is not imported
    calls = Calls(json.loads(sys.argv[1]), requests)
    gc.collect()
    gc.freeze()
    with os.fdopen(requests, "rb") as lines, os.fdopen(replies, "wb") as answers:
        answers.write(b'"ready"\n')
        answers.flush()
        for line in lines:
            answers.write(json.dumps(calls.run_forked(json.loads(line))).encode("ascii") + b"\n")
            answers.flush()


if __name__ == "__main__":
    main()
