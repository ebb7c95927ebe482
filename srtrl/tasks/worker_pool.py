"""Worker processes, each with a socket and a thread of its own.

Each worker has one job at a time. When it dies its socket ends, after everything that it sent: no other job dies with
it. (A pool with shared queues, such as pebble's, must work out which job a dead worker had; in a trial with a busy main
thread 2 of 60 crashing jobs broke the whole pool.)

What comes from a worker is read as data, since rewards may run any code there: one reply for each request, with its
number. A worker that sends anything else is replaced, so no reply is taken for that of another sample.
"""

import json
import os
import pickle
import queue
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any

from srtrl.tasks.reward_input import RewardInput, characters
from srtrl.tasks.worker import (
    MEMORY_EXIT_CODE,
    MEMORY_LIMIT_BYTES,
    READY,
    TOKEN_TEXTS,
    Failure,
    Graded,
    IsolatedFunctions,
    check_rewards,
)

WALL_SECONDS_PER_CPU_SECOND = 20
"""A job may take this many times its CPU limit in wall-clock time: a backstop for one that sleeps or waits."""
START_SECONDS = 120.0
"""Limit of the time that a worker takes to import what it needs."""
PROGRAM = "import sys; sys.path[:] = {path}; from srtrl.tasks.worker import serve; serve()"
"""Program of a grading worker. It does not import the running program, as multiprocessing would: that may train."""
BLOCK_BYTES = 1 << 16
"""Maximum number of bytes per read."""
MAX_REPLY_BYTES = 1 << 24
"""Longest line that is read from a grading worker: it may have a number for each token."""


class Worker:
    """A process that does one job at a time, with a socket as its stdin; used by one thread, but for `close`.

    It sends lines of JSON, `READY` the first. It leads a session of its own, which is killed as a whole; Ctrl-C does
    not reach it.
    """

    def __init__(self, max_reply_bytes: int, **options: Any) -> None:
        """Start nothing yet.

        Args:
            max_reply_bytes: Longest line that is read from it.
            options: For `subprocess.Popen`.
        """
        self._max_reply_bytes = max_reply_bytes
        self._options = options
        self._lock = threading.Lock()
        self._is_closed = False
        self._process: subprocess.Popen[bytes] | None = None
        """None if it has ended and is reaped: another process may have its number by now."""

    def launch(self, command: Sequence[str], first: bytes, what: str) -> None:
        """Start the process, send it `first`, and wait until it is ready.

        Raises:
            RuntimeError: it ended before that, or took too long, or the worker is closed; it begins with `what`.
        """
        self._received = b""
        with self._lock:
            if self._is_closed:
                raise RuntimeError("the worker is closed")
            self._socket, other_end = socket.socketpair()
            with other_end:
                self._process = subprocess.Popen(
                    command, stdin=other_end.fileno(), start_new_session=True, **self._options
                )
        try:
            if self.exchange(first, START_SECONDS) == READY:
                return
        except TimeoutError:
            self.reap()
            problem = f"it is not ready after {START_SECONDS:g} seconds"
        except (OSError, ValueError):
            exit_code, message = self.reap()
            problem = f"it ended with exit code {exit_code}: {message or 'see its message above'}"
        raise RuntimeError(f"{what} did not start: {problem}")

    def exchange(self, request: bytes, seconds: float) -> Any:
        """Send a request, and return the line that answers it; the errors are those of `receive`."""
        self._socket.settimeout(seconds)
        self._socket.sendall(request)
        return self.receive(seconds)

    def receive(self, seconds: float) -> Any:
        """The next line from the process, as JSON.

        Raises:
            TimeoutError: there is none within `seconds`.
            OSError: the process has ended.
            ValueError: it is no JSON, or too long.
        """
        deadline = time.monotonic() + seconds
        while b"\n" not in self._received:
            self._socket.settimeout(max(1e-3, deadline - time.monotonic()))
            chunk = self._socket.recv(BLOCK_BYTES)
            if not chunk:
                raise ConnectionResetError
            self._received += chunk
            if len(self._received) > self._max_reply_bytes:
                raise ValueError(f"more than {self._max_reply_bytes} bytes")
        line, _, self._received = self._received.partition(b"\n")
        try:
            return json.loads(line)
        except RecursionError as error:
            raise ValueError("brackets in brackets") from error

    def close(self) -> None:
        """Kill the process, from any thread; a job that runs then ends."""
        with self._lock:
            self._is_closed = True
            if self._process is not None:
                _kill_group(self._process)
                with suppress(OSError):  # a process that has left the group may still hold the other end
                    self._socket.shutdown(socket.SHUT_RDWR)

    def reap(self) -> tuple[int, str]:
        """Kill the process, unless it has ended, and wait for its end.

        Returns:
            Its exit code, and the end of its standard error if that is a pipe.
        """
        with self._lock:
            process, self._process = self._process, None
            if process is None:
                return 0, ""
            _kill_group(process)
        _, message = process.communicate()
        self._socket.close()
        return process.returncode, (message or b"").decode("utf-8", "replace").strip()[-1000:]


class GradingWorker(Worker):
    """A worker that grades; its process is started for the first sample and after its end."""

    def __init__(self, functions: Mapping[str, IsolatedFunctions], cpu_seconds: float) -> None:
        super().__init__(MAX_REPLY_BYTES)
        self._functions = functions
        self._cpu_seconds = cpu_seconds

    def run(self, job: tuple[str, RewardInput]) -> Graded | Failure:
        """Grade a sample by the functions of its label; if the process ends, once more in one that has graded nothing.

        Raises:
            RuntimeError: a process ends before its first sample or does not start in time, or the worker is closed.
        """
        reply = self._attempt(*job)
        if self._process is None:
            reply = self._attempt(*job)
            if isinstance(reply, Failure):
                reply = replace(reply, detail=f"{reply.detail}, also when retried alone")
        return reply

    def _start(self) -> None:
        """Start a process and wait until it has imported the functions."""
        modules = sorted({name for functions in self._functions.values() for name in functions.modules})
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # inherited, until it is ignored there
        try:
            self.launch(
                [sys.executable, "-c", PROGRAM.format(path=sys.path)],
                pickle.dumps((self._functions, self._cpu_seconds)),
                f"a grading worker that imports {', '.join(modules)}",
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def _attempt(self, label: str, sample: RewardInput) -> Graded | Failure:
        if self._process is None:
            self._start()
        number, seconds = secrets.randbits(63), WALL_SECONDS_PER_CPU_SECOND * self._cpu_seconds
        try:
            reply = self.exchange(pickle.dumps((number, label, replace(sample, texts_of=characters))), seconds)
            if reply == TOKEN_TEXTS:
                reply = self.exchange(pickle.dumps(sample.token_texts), seconds)
            verdict = self._read(reply, number, self._functions[label], sample)
            if self.receive(seconds) != READY:
                raise ValueError("it sent more than that")
        except TimeoutError:
            self.reap()
            return Failure(outcome="timeout", detail=f"no answer within {seconds:g} seconds of wall-clock time")
        except ValueError as error:
            self.reap()
            return Failure(outcome="error", detail=f"the worker process did not send one grade: {error}")
        except OSError:
            exit_code, _ = self.reap()
            if exit_code == -signal.SIGPROF:
                return Failure(outcome="timeout", detail=f"more than {self._cpu_seconds:g} CPU seconds")
            if exit_code == MEMORY_EXIT_CODE:
                return Failure(outcome="crash", detail=f"more than {MEMORY_LIMIT_BYTES / 1024**3:g} GiB of memory")
            return Failure(outcome="crash", detail=f"the worker process ended with exit code {exit_code}")
        return verdict

    @staticmethod
    def _read(reply: Any, number: int, functions: IsolatedFunctions, sample: RewardInput) -> Graded | Failure:
        """The verdict in a reply; ValueError if it is none, or one of another request."""
        match reply:
            case {"number": int(found), "outcome": "error", "detail": str(detail)} if found == number:
                return Failure(outcome="error", detail=detail)
            case {"number": int(found), "correct": bool() | None as correct, "parts": dict(parts)} if found == number:
                if functions.verifier is None:
                    correct = sample.correct
                return Graded(
                    correct=correct,
                    parts={name: check_rewards(name, parts.get(name), sample) for name, _ in functions.rewards},
                )
        raise ValueError("it sent something else, or the reply to another request")


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a process, which leads a group, and what its rewards have started."""
    with suppress(ProcessLookupError):  # all of it is gone
        os.killpg(process.pid, signal.SIGKILL)


class WorkerPool:
    """A thread for each worker: it hands over one job at a time.

    Args:
        workers: Each has `run(job)`, `close()`, which ends a job that runs, from any thread, and `reap()`.
        name: Of the threads.
    """

    def __init__(self, workers: Sequence[Any], name: str) -> None:
        self._workers = workers
        self._idle: queue.SimpleQueue[Any] = queue.SimpleQueue()
        for worker in workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(len(workers), thread_name_prefix=name)

    def submit(self, job: Any) -> "Future[Any]":
        """Run a job as soon as a worker is free; returns at once."""
        return self._threads.submit(self._run, job)

    def close(self) -> None:
        """End all workers now; jobs that wait are dropped."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.close()
        self._threads.shutdown(wait=True)
        for worker in self._workers:
            worker.reap()

    def _run(self, job: Any) -> Any:
        worker = self._idle.get()  # never waits: there are as many workers as threads
        try:
            return worker.run(job)
        finally:
            self._idle.put(worker)
