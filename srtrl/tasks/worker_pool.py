"""Worker processes, each with a pipe and a thread of its own.

Each worker has one job at a time. When it dies its pipe ends, after everything that it sent: no other job dies with it.
(A pool with shared queues, such as pebble's, has to find out which job a dead worker had; in a trial with a busy main
thread 2 of 60 crashing jobs broke the whole pool.)
"""

import logging
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

logger = logging.getLogger(__name__)

WALL_SECONDS_PER_CPU_SECOND = 20
"""A job may take this many times its CPU limit in wall-clock time: a backstop for one that sleeps or waits."""
REAP_SECONDS = 5.0
"""How long a worker whose pipe is closed may take to end by itself."""

_process_lock = threading.Lock()
"""multiprocessing reaps children without a lock of its own; starting and reaping from several threads needs one."""


class Worker:
    """One worker process, replaced when it dies; used by one thread at a time, but for `close`."""

    def __init__(self, functions: IsolatedFunctions, cpu_seconds: float) -> None:
        self._functions = functions
        self._cpu_seconds = cpu_seconds
        self._closed = False
        self._failed_starts = 0
        """In a row, the last ones."""
        self._start()

    def grade(self, sample: RewardInput) -> Graded | Failure:
        """Grade one sample; where that ends the process, once more in one that has graded nothing else.

        Raises:
            RuntimeError: two processes ended before their first sample (they could not import the functions), or the
                worker is closed.
        """
        reply = self._attempt(sample)
        if not self._alive:
            reply = self._attempt(sample)
            if isinstance(reply, Failure):
                reply = replace(reply, detail=f"{reply.detail}, also when retried alone")
        return reply

    def close(self) -> None:
        """Kill the process, from any thread; one that waits in `grade` then returns."""
        with _process_lock:
            self._closed = True
            self._kill()

    def _kill(self) -> None:
        """Kill the process and what its rewards have started: the process group that `serve` has made.

        Nothing where that was done already: another process may have the number by now.
        """
        if self._buried:
            return
        self._process.kill()
        assert self._process.pid is not None
        with suppress(ProcessLookupError):  # it has none yet, or all of it is gone
            os.killpg(self._process.pid, signal.SIGKILL)

    def _start(self) -> None:
        context = get_context("spawn")  # a fork would inherit the locks of torch's and the decoder's threads
        self._ready = False
        with _process_lock:
            if self._closed:
                raise RuntimeError("the grader is closed")
            self._connection, other_end = context.Pipe()
            arguments = (other_end, self._functions, self._cpu_seconds)
            self._process: SpawnProcess = context.Process(
                target=serve, args=arguments, name="srtrl-grading", daemon=True
            )
            # Ctrl-C reaches all processes, also one that has not come to ignore it yet: it inherits the blocked signal.
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            self._process.start()
            self._buried = False
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        other_end.close()
        self._alive = True

    def _attempt(self, sample: RewardInput) -> Graded | Failure:
        if not self._alive:
            self._start()
        wall_seconds = WALL_SECONDS_PER_CPU_SECOND * self._cpu_seconds
        try:
            if not self._ready:
                self._connection.recv()
                self._ready = True
                self._failed_starts = 0
            self._connection.send(sample)
            if self._connection.poll(wall_seconds):
                reply: Graded | Failure = self._connection.recv()
                return reply
        except (EOFError, OSError):
            return self._autopsy(sample)
        self._kill()
        self.reap()
        return Failure(outcome="timeout", detail=f"no answer within {wall_seconds:g} seconds of wall-clock time")

    def _autopsy(self, sample: RewardInput) -> Graded | Failure:
        """Tell from the exit code what ended the process; one that had not begun is replaced, once in a row."""
        exit_code = self.reap()
        if not self._ready:
            how = f"a grading worker ended at its start with exit code {exit_code}; see its message above"
            if self._failed_starts or self._closed:
                raise RuntimeError(f"{how}. The next one ended in the same way")
            logger.warning("%s. Starting another", how)
            self._failed_starts += 1
            return self._attempt(sample)
        if exit_code == -signal.SIGPROF:
            return Failure(outcome="timeout", detail=f"more than {self._cpu_seconds:g} CPU seconds")
        if exit_code == MEMORY_EXIT_CODE:
            return Failure(outcome="crash", detail=f"more than {MEMORY_LIMIT_BYTES / 1024**3:g} GiB of memory")
        return Failure(outcome="crash", detail=f"the worker process ended with exit code {exit_code}")

    def reap(self) -> int | None:
        """Wait for the end of the process, and kill it where that does not come soon; returns its exit code."""
        self._alive = False
        with _process_lock:
            self._process.join(REAP_SECONDS)
            self._kill()
            self._process.join()
            self._buried = True
        self._connection.close()
        return self._process.exitcode


class WorkerPool:
    """A thread for each worker: it sends a sample and waits for the answer."""

    def __init__(self, functions: IsolatedFunctions, num_workers: int, cpu_seconds: float) -> None:
        # They import their functions while the trainer loads the policy.
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
