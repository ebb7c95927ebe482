"""Worker processes, each with a pipe and a thread of its own.

Each worker has one job at a time, and when it dies the end of its pipe says so, after everything that it sent: no other
job dies with it. (A pool with shared queues, such as pebble's, has to find out which job a dead worker had; in a trial
with a busy main thread 2 of 60 crashing jobs broke the whole pool.)
"""

import queue
import signal
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from multiprocessing import get_context

from srtrl.tasks.reward_input import RewardInput
from srtrl.tasks.worker import MEMORY_EXIT_CODE, MEMORY_LIMIT_BYTES, Failure, Graded, IsolatedFunctions, serve

WALL_SECONDS_PER_CPU_SECOND = 20
"""A job may take this many times its CPU limit by the clock: a backstop for one that sleeps or waits."""
REAP_SECONDS = 5.0
"""How long a worker whose pipe is closed may take to end by itself."""

_process_lock = threading.Lock()
"""multiprocessing reaps children without a lock of its own; starting and reaping from several threads needs one."""


class Worker:
    """Handle of one worker process; used by one thread at a time."""

    def __init__(self, functions: IsolatedFunctions, cpu_seconds: float) -> None:
        context = get_context("spawn")  # a fork would inherit the locks of torch's and the decoder's threads
        self._cpu_seconds = cpu_seconds
        self._ready = False
        self._connection, other_end = context.Pipe()
        self._process = context.Process(
            target=serve, args=(other_end, functions, cpu_seconds), name="srtrl-grading", daemon=True
        )
        with _process_lock:
            # Ctrl-C reaches all processes, also one that has not come to ignore it yet: it inherits the blocked signal.
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            self._process.start()
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        other_end.close()
        self.alive = True

    def grade(self, sample: RewardInput) -> Graded | Failure:
        """Grade one sample; the worker is not `alive` after a `timeout` or `crash`.

        Raises:
            RuntimeError: the worker ended before its first sample (it could not import the functions).
        """
        wall_seconds = WALL_SECONDS_PER_CPU_SECOND * self._cpu_seconds
        try:
            if not self._ready:
                self._connection.recv()
                self._ready = True
            self._connection.send(sample)
            if self._connection.poll(wall_seconds):
                reply: Graded | Failure = self._connection.recv()
                return reply
        except (EOFError, OSError):
            return self._autopsy()
        self.stop()
        return Failure(outcome="timeout", detail=f"no answer within {wall_seconds:g} seconds by the clock")

    def _autopsy(self) -> Failure:
        """Tell from the exit code what ended the process."""
        exit_code = self._reap()
        if not self._ready:
            raise RuntimeError(f"a grading worker ended at its start with exit code {exit_code}; see its message above")
        if exit_code == -signal.SIGPROF:
            return Failure(outcome="timeout", detail=f"more than {self._cpu_seconds:g} CPU seconds")
        if exit_code == MEMORY_EXIT_CODE:
            return Failure(outcome="crash", detail=f"more than {MEMORY_LIMIT_BYTES / 1024**3:g} GiB of memory")
        return Failure(outcome="crash", detail=f"the worker process ended with exit code {exit_code}")

    def stop(self) -> None:
        """Kill the process, whatever it is doing."""
        self._process.kill()
        self._reap()

    def kill(self) -> None:
        """Kill the process from another thread; the one that waits in `grade` then returns."""
        self._process.kill()

    def _reap(self) -> int | None:
        self.alive = False
        with _process_lock:
            self._process.join(REAP_SECONDS)
            if self._process.exitcode is None:
                self._process.kill()
                self._process.join()
        self._connection.close()
        return self._process.exitcode


class WorkerPool:
    """A thread for each worker process: it sends a sample, waits, and replaces the process where that dies."""

    def __init__(self, functions: IsolatedFunctions, num_workers: int, cpu_seconds: float) -> None:
        self._functions = functions
        self._cpu_seconds = cpu_seconds
        self._closed = False
        self._lock = threading.Lock()
        self._workers: set[Worker] = set()
        self._idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="srtrl-grading")
        for _ in range(num_workers):  # they import their functions while the trainer loads the policy
            self._idle.put(self._start_worker())

    def submit(self, sample: RewardInput) -> "Future[Graded | Failure]":
        """Grade one sample as soon as a worker is free."""
        return self._threads.submit(self._run, sample)

    def close(self) -> None:
        """End all workers now; jobs that wait are dropped."""
        with self._lock:
            self._closed = True
            self._threads.shutdown(wait=False, cancel_futures=True)
            for worker in self._workers:
                worker.kill()
        self._threads.shutdown(wait=True)
        for worker in self._workers:
            if worker.alive:
                worker.stop()

    def _run(self, sample: RewardInput) -> Graded | Failure:
        worker = self._idle.get()  # never waits: there are as many workers as threads
        try:
            reply = worker.grade(sample)
            if not worker.alive:
                worker = self._replace(worker)
                reply = worker.grade(sample)  # once more, in a process that has graded nothing else
                if isinstance(reply, Failure):
                    reply = replace(reply, detail=f"{reply.detail}, also when retried alone")
                if not worker.alive:
                    worker = self._replace(worker)
            return reply
        finally:
            self._idle.put(worker)

    def _start_worker(self) -> Worker:
        with self._lock:
            if self._closed:
                raise RuntimeError("the grader is closed")
            worker = Worker(self._functions, self._cpu_seconds)
            self._workers.add(worker)
        return worker

    def _replace(self, worker: Worker) -> Worker:
        with self._lock:
            self._workers.discard(worker)
        return self._start_worker()
