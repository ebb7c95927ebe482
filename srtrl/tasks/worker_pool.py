"""Worker processes, each with a pipe and a thread of its own.

Each worker has one job at a time. When it dies its pipe ends, after everything that it sent: no other job dies with it.
(A pool with shared queues, such as pebble's, must work out which job a dead worker had; in a trial with a busy main
thread 2 of 60 crashing jobs broke the whole pool.)
"""

import os
import queue
import signal
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.context import SpawnProcess

from srtrl.tasks.reward_input import RewardInput
from srtrl.tasks.worker import MEMORY_EXIT_CODE, MEMORY_LIMIT_BYTES, Failure, Graded, IsolatedFunctions, serve

WALL_SECONDS_PER_CPU_SECOND = 20
"""A job may take this many times its CPU limit in wall-clock time: a backstop for one that sleeps or waits."""
START_SECONDS = 120.0
"""Limit of the time that a worker takes to import its functions, from the first sample on."""
REAP_SECONDS = 5.0
"""Limit of the time that a worker whose pipe is closed takes to end by itself."""

_process_lock = threading.Lock()
"""multiprocessing reaps children without a lock of its own; starting and reaping from several threads needs one."""


class Worker:
    """One worker process, replaced when it ends; used by one thread at a time, but for `close`."""

    def __init__(self, functions: IsolatedFunctions, cpu_seconds: float) -> None:
        self._functions = functions
        self._cpu_seconds = cpu_seconds
        self._is_closed = False
        self._process: SpawnProcess | None = None
        """None where it has ended and is reaped: another process may have its number by now."""
        self._launch()

    def grade(self, sample: RewardInput) -> Graded | Failure:
        """Grade one sample; where that ends the process, once more in one that has graded nothing else.

        Raises:
            RuntimeError: a process ends before its first sample or does not start in time, or the worker is closed.
        """
        reply = self._attempt(sample)
        if self._process is None:
            reply = self._attempt(sample)
            if isinstance(reply, Failure):
                reply = replace(reply, detail=f"{reply.detail}, also when retried alone")
        return reply

    def close(self) -> None:
        """Kill the process, from any thread; one that waits in `grade` then returns."""
        with _process_lock:
            self._is_closed = True
            if self._process is not None:
                _kill_group(self._process)

    def reap(self, seconds: float = REAP_SECONDS) -> int | None:
        """Wait for the end of the process, and kill it after `seconds`; returns its exit code."""
        with _process_lock:
            process, self._process = self._process, None
            if process is None:
                return None
            process.join(seconds)
            _kill_group(process)
            process.join()
        self._connection.close()
        return process.exitcode

    def _launch(self) -> None:
        context = get_context("spawn")  # a fork would inherit the locks of torch's and the decoder's threads
        self._is_ready = False
        with _process_lock:
            if self._is_closed:
                raise RuntimeError("the grader is closed")
            self._connection, other_end = context.Pipe()
            arguments = (other_end, self._functions, self._cpu_seconds)
            process = context.Process(target=serve, args=arguments, name="srtrl-grading", daemon=True)
            # Ctrl-C reaches all processes, also one that has not come to ignore it yet: it inherits the blocked signal.
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            process.start()
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            self._process = process
        other_end.close()

    def _attempt(self, sample: RewardInput) -> Graded | Failure:
        if self._process is None:
            self._launch()
        if not self._is_ready:
            self._await_start()
        wall_seconds = WALL_SECONDS_PER_CPU_SECOND * self._cpu_seconds
        try:
            self._connection.send(sample)
            if self._connection.poll(wall_seconds):
                reply: Graded | Failure = self._connection.recv()
                return reply
        except (EOFError, OSError):
            exit_code = self.reap()
            if exit_code == -signal.SIGPROF:
                return Failure(outcome="timeout", detail=f"more than {self._cpu_seconds:g} CPU seconds")
            if exit_code == MEMORY_EXIT_CODE:
                return Failure(outcome="crash", detail=f"more than {MEMORY_LIMIT_BYTES / 1024**3:g} GiB of memory")
            return Failure(outcome="crash", detail=f"the worker process ended with exit code {exit_code}")
        self.reap(0.0)
        return Failure(outcome="timeout", detail=f"no answer within {wall_seconds:g} seconds of wall-clock time")

    def _await_start(self) -> None:
        """Wait until the process has imported the functions."""
        problem = f"it is not ready after {START_SECONDS:g} seconds"
        try:
            if self._connection.poll(START_SECONDS):
                self._connection.recv()
                self._is_ready = True
                return
            self.reap(0.0)
        except (EOFError, OSError):
            problem = f"it ended with exit code {self.reap()}; see its message above"
        modules = ", ".join(self._functions.modules)
        raise RuntimeError(f"a grading worker that imports {modules} did not start: {problem}")


def _kill_group(process: SpawnProcess) -> None:
    """Kill a process and what its rewards have started: the process group that `serve` has made."""
    process.kill()
    assert process.pid is not None
    with suppress(ProcessLookupError):  # it has none yet, or all of it is gone
        os.killpg(process.pid, signal.SIGKILL)


class WorkerPool:
    """A thread for each worker: it sends a sample and waits for the answer."""

    def __init__(self, functions: IsolatedFunctions, num_workers: int, cpu_seconds: float) -> None:
        self._workers = [Worker(functions, cpu_seconds) for _ in range(num_workers)]
        self._idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="srtrl-grading")

    def submit(self, sample: RewardInput) -> "Future[Graded | Failure]":
        """Grade one sample as soon as a worker is free."""
        return self._threads.submit(self._run, sample)

    def close(self) -> None:
        """End all workers now; jobs that wait are dropped."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.close()
        self._threads.shutdown(wait=True)
        for worker in self._workers:
            worker.reap()

    def _run(self, sample: RewardInput) -> Graded | Failure:
        worker = self._idle.get()  # never waits: there are as many workers as threads
        try:
            return worker.grade(sample)
        finally:
            self._idle.put(worker)
