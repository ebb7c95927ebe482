"""The Python sandbox: what it gives back, and that nothing gets out of it, stops it, or stays."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import Any

import pytest
from sandbox_attacks import ATTACKS, PROGRAMS, REPRESENTATIVES
from task_cases import processes_of, wait_until

from srtrl.environments import python_sandbox
from srtrl.environments.python_sandbox import (
    WORKER_FILE,
    PythonSandbox,
    SandboxLimits,
    landlock_version,
)

NEEDS_LANDLOCK = pytest.mark.skipif(landlock_version() < 1, reason="the kernel has no Landlock")
PROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"
LIMITS = SandboxLimits(cpu_seconds=1, wall_seconds=4.0 + os.getpid() * 1e-6, memory_mb=256, output_bytes=4096)
OWN_LIMITS = LIMITS.model_copy(
    update={"wall_seconds": LIMITS.wall_seconds + 200.5}
)  # not a number that ends with the other one
"""Limits of pools that a test makes for itself. The odd numbers of seconds mark processes in the system's list."""
SLEEP = "import time\ntime.sleep(1000)"


def worker_pids(limits: SandboxLimits = OWN_LIMITS) -> set[int]:
    """All processes of the pools with these limits: interpreters, calls, and their forks."""
    return processes_of(str(limits.wall_seconds).encode())


def interpreter_of(pool: PythonSandbox) -> int:
    """The process of the first interpreter."""
    return int(pool._workers[0]._process.pid)


@dataclass
class World:
    """A pool, what its calls may name, and the check that nothing got out, nothing stays, and the pool works."""

    pool: PythonSandbox
    names: dict[str, object]
    check: Callable[[], None]


@pytest.fixture(
    scope="module",
    params=[  # the kernel's own, and the oldest, whose rules each kernel knows
        pytest.param(landlock_version(), id="landlock", marks=NEEDS_LANDLOCK),
        pytest.param(1, id="old landlock", marks=[NEEDS_LANDLOCK, pytest.mark.slow]),
    ],
)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("world")
    token = f"srtrl{token_hex(8)}"
    secret, home_secret = folder / "secret", Path.home() / f".srtrl-test-{token_hex(8)}"
    listeners = [socket.create_server(("127.0.0.1", 0))]
    port = listeners[0].getsockname()[1]
    addresses: list[tuple[int, int, Any]] = [
        (socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", port)),
        (socket.AF_UNIX, socket.SOCK_STREAM, str(folder / "s")),
        (socket.AF_UNIX, socket.SOCK_DGRAM, str(folder / "d")),
        (socket.AF_UNIX, socket.SOCK_STREAM, f"\0{token}"),
    ]
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setenv("SRTRL_TEST_SECRET", token)
        patch.setattr(python_sandbox, "landlock_version", lambda: request.param)
        for path in (secret, home_secret):
            path.write_text(token)
            path.chmod(0o644)
            stack.callback(path.unlink)
        for family, kind, address in addresses:
            listeners.append(socket.socket(family, kind))
            listeners[-1].bind(address)
            if kind == socket.SOCK_STREAM:
                listeners[-1].listen()
        for listener in listeners:
            stack.enter_context(listener).setblocking(False)
        pool = stack.enter_context(PythonSandbox(LIMITS, num_workers=2))
        pids, stats = worker_pids(LIMITS), {path: path.stat() for path in (secret, home_secret)}

        def check() -> None:
            for listener in listeners:
                with pytest.raises(BlockingIOError):
                    listener.recv(1) if listener.type == socket.SOCK_DGRAM else listener.accept()
            for path, stat in stats.items():
                now = path.stat()
                assert path.read_text() == token
                assert (now.st_mode, now.st_mtime, now.st_nlink) == (stat.st_mode, stat.st_mtime, stat.st_nlink)
            for place in (Path("/tmp"), Path("/var/tmp"), Path("/dev/shm"), Path("/"), Path.home(), PROJECT.parent):
                assert not list(place.glob(f"*{token}*"))
            replies = pool.submit("print(6 * 7)\nrepr(2)"), pool.submit("print(6 * 7)\nrepr(2)")  # of both workers
            assert [(reply.result().status, reply.result().stdout) for reply in replies] == [("ok", "42\n'2'\n")] * 2
            assert worker_pids(LIMITS) == pids

        names = {"token": token, "secret": str(secret), "home": str(Path.home()), "home_secret": str(home_secret)}
        names |= {"project": str(PROJECT), "worker_file": str(WORKER_FILE), "port": port}
        names |= {"unix_socket": str(folder / "s"), "unix_datagrams": str(folder / "d")}
        yield World(pool, names | {"trainer": os.getpid()}, check)
    assert worker_pids(LIMITS) == set()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in REPRESENTATIVES else pytest.mark.slow) for name in ATTACKS]
)
def test_no_attack_gets_through(world: World, name: str) -> None:
    attack = ATTACKS[name]
    result = world.pool.run(attack.code.format(**world.names) if "{" in attack.code else attack.code)
    output = result.stdout + result.stderr
    assert result.status in attack.status.split("|"), result
    assert attack.output in output, result
    assert "BREACH" not in result.stdout, result
    assert str(world.names["token"]) not in result.stdout
    assert "[build-system]" not in output
    assert result.is_truncated == attack.is_truncated
    assert max(len(result.stdout), len(result.stderr)) <= LIMITS.output_bytes
    world.check()


def test_the_attacks_are_real(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """Without a sandbox they do get through, and a warning is logged at the start."""
    with PythonSandbox(LIMITS, num_workers=1, sandbox="none") as pool:
        for name in ("read the project", "read the home folder", "list the root"):
            assert "BREACH" in pool.run(ATTACKS[name].code.format(**world.names)).stdout
    assert ["sandbox: none" in record.message for record in caplog.records] == [True]


def test_output_and_value(world: World) -> None:
    for code, stdout in PROGRAMS["values"]:
        result = world.pool.run(code)
        assert (result.status, result.stdout, result.stderr, result.exit_code) == ("ok", stdout, "", 0), code
        assert not result.is_truncated
        assert result.seconds > 0


def test_an_error_shows_the_codes_own_lines(world: World) -> None:
    result = world.pool.run("print('before')\ndef f(x):\n    return 1 / x\nf(0)\nprint('after')")
    assert (result.status, result.stdout, result.exit_code) == ("error", "before\n", 1)
    lines = result.stderr.splitlines()
    assert lines[1:3] == ['  File "<tool>", line 4, in <module>', "    f(0)"]
    assert lines[-1] == "ZeroDivisionError: division by zero"
    assert "python_worker" not in result.stderr


def test_the_same_code_gives_the_same_result_in_every_call(world: World) -> None:
    results = [future.result() for future in [world.pool.submit(PROGRAMS["randomness"]) for _ in range(6)]]
    assert {result.status for result in results} == {"ok"}
    assert len({result.stdout for result in results}) == 1


def test_output_is_truncated_at_the_limit(world: World) -> None:
    exact = world.pool.run(f"print('x' * {LIMITS.output_bytes - 1})")
    assert (exact.status, exact.is_truncated, len(exact.stdout)) == ("ok", False, LIMITS.output_bytes)
    more = world.pool.run(f"print('x' * {LIMITS.output_bytes})")
    assert (more.status, more.is_truncated, more.stdout) == ("killed", True, "x" * LIMITS.output_bytes)


def test_memory_is_that_of_the_call(world: World) -> None:
    """The interpreter's own, with numpy and sympy, does not count."""
    assert world.pool.run(f"x = bytearray({200 * 2**20})\nlen(x)").stdout == f"{200 * 2**20}\n"
    assert world.pool.run(f"x = bytearray({260 * 2**20})").status == "memory"


def test_a_process_killed_from_outside_costs_only_its_call() -> None:
    with PythonSandbox(OWN_LIMITS, num_workers=1) as pool:
        for whom in ("call", "interpreter"):
            before = worker_pids()
            future = pool.submit(SLEEP)
            wait_until(lambda before=before: worker_pids() > before)  # type: ignore[misc]
            os.kill(max(worker_pids() - before) if whom == "call" else interpreter_of(pool), signal.SIGKILL)
            assert future.result(timeout=60).status == "killed"
            wait_until(lambda before=before: worker_pids() <= before)  # type: ignore[misc]
            assert pool.run("6 * 7").stdout == "42\n"
    wait_until(lambda: not worker_pids())


def test_an_interpreter_that_hangs_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = OWN_LIMITS.model_copy(update={"wall_seconds": 200.03125})  # no other process has this in its command line
    with PythonSandbox(limits, num_workers=1) as pool, monkeypatch.context() as patch:
        os.kill(interpreter_of(pool), signal.SIGSTOP)
        patch.setattr(python_sandbox, "GRACE_SECONDS", 0.2 - limits.wall_seconds)
        assert pool.run("6 * 7").status == "killed"
        patch.undo()
        assert pool.run("6 * 7").stdout == "42\n"


def test_submit_returns_at_once_calls_overlap_and_closing_ends_them() -> None:
    with PythonSandbox(OWN_LIMITS, num_workers=2) as pool:
        idle = worker_pids()
        futures = [pool.submit(SLEEP) for _ in range(3)]
        wait_until(lambda: len(worker_pids() - idle) == 2)
        assert not any(future.done() for future in futures)
    assert [future.cancelled() or future.result(timeout=60).status for future in futures] == ["killed", "killed", True]
    wait_until(lambda: not worker_pids())
    pool.close()


def test_nothing_outlives_a_killed_trainer() -> None:
    program = (
        "from srtrl.environments.python_sandbox import *\n"
        f"pool = PythonSandbox({OWN_LIMITS!r}, num_workers=2)\n"
        f"print([pool.submit({SLEEP!r}) for _ in range(2)][0].result())"
    )
    with subprocess.Popen([sys.executable, "-c", program]) as trainer:
        try:
            wait_until(lambda: len(worker_pids() - {trainer.pid}) >= 4)  # of each: the interpreter, the call
        finally:
            trainer.kill()
    wait_until(lambda: not worker_pids())


def test_an_interpreter_that_does_not_start_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "worker.py"
    broken.write_text("raise ImportError('no sympy for you')")
    monkeypatch.setattr(python_sandbox, "WORKER_FILE", broken)
    with pytest.raises(RuntimeError, match=r"did not start: .*: Traceback(.|\n)*no sympy for you"):
        PythonSandbox(OWN_LIMITS, num_workers=2)


def test_a_kernel_without_landlock_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(python_sandbox, "landlock_version", lambda: -1)
    with pytest.raises(ValueError, match=r"has no Landlock .*sandbox: none"):
        PythonSandbox(OWN_LIMITS)
