"""Runs functions in several processes that are connected, as `torchrun` would start them.

The processes of `run_ranks` stay: the next call, of any test, runs in them, with counters of its own. A function that
fails on a rank ends them all, and the next call starts others.
"""

import atexit
import multiprocessing
import os
import secrets
import socket
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import distributed_c10d

from srtrl import ranks

CONTEXT: ForkServerContext = multiprocessing.get_context("forkserver")
PRELOADED = """
    srtrl.trainer.trainer accelerate hypothesis pandas pyarrow.parquet scipy.stats pytest transformers.modeling_utils
    torch.optim torch.distributed.fsdp torch.distributed.checkpoint
"""
"""Modules that each process would else import after its fork; one list for all tests that start processes."""
CONTEXT.set_forkserver_preload(PRELOADED.split())
FORKED = pytest.mark.xdist_group("forked")
"""Group of tests that start processes: one worker has them all, since its server of forks takes seconds to start."""


class RankPool:
    """Connected processes that run one function after the other; they start with the first one."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._store: TCPStore | None = None
        self._processes: list[BaseProcess] = []
        self._connections: list[Connection] = []

    def run(self, function: Callable[..., Any], *arguments: Any, timeout: float = 100) -> list[Any]:
        """Return the result of `function(*arguments)` on each rank.

        Raises:
            AssertionError: It failed on some, with their tracebacks; or some did not answer in `timeout` seconds.
        """
        results, failures = self.outcomes(function, *arguments, timeout=timeout)
        assert not failures, "\n".join(failures.values())
        return [results[rank] for rank in range(self.count)]

    def outcomes(
        self, function: Callable[..., Any], *arguments: Any, timeout: float = 100
    ) -> tuple[dict[int, Any], dict[int, str]]:
        """Results and tracebacks by rank; if there is a traceback, all processes have ended.

        Raises:
            AssertionError: Some ranks did not answer in `timeout` seconds; all processes are killed.
        """
        if not self._processes:
            self._start()
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        waits_for = dict(zip(self._connections, range(self.count), strict=True))
        end = time.monotonic() + timeout
        try:
            for connection in self._connections:
                connection.send((function, arguments))
            while waits_for and (ready := wait(list(waits_for), max(0.0, end - time.monotonic()))):
                for one in ready:
                    assert isinstance(one, Connection)
                    rank = waits_for.pop(one)
                    try:
                        is_done, answer = one.recv()
                    except EOFError:
                        is_done, answer = False, f"rank {rank} of {self.count} ended without an answer"
                    (results if is_done else failures)[rank] = answer
            told = "".join(f"\nrank {rank} says: {failure}" for rank, failure in failures.items())
            assert not waits_for, (
                f"ranks {[*waits_for.values()]} of {self.count} did not answer in {timeout:g} seconds{told}"
            )
        finally:
            if failures or waits_for:
                self.close(seconds=0 if waits_for else 5)
        return results, failures

    def _start(self) -> None:
        self._store = store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as `torchrun` has it
        for index in range(self.count):
            mine, other = CONTEXT.Pipe()
            process = CONTEXT.Process(target=_serve, args=(other, index, self.count, store.port))
            process.start()
            other.close()
            self._processes.append(process)
            self._connections.append(mine)

    def close(self, seconds: float = 5) -> None:
        """End the processes; those that have not ended in `seconds` are killed."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(seconds)
            process.kill()
            process.join(10)
        self._store, self._processes, self._connections = None, [], []


def run_ranks(count: int, function: Callable[..., Any], *arguments: Any, timeout: float = 100) -> list[Any]:
    """`RankPool.run` in processes that other tests use, too."""
    return shared_pool(count).run(function, *arguments, timeout=timeout)


@cache
def shared_pool(count: int) -> RankPool:
    """The pool of `count` processes of this process."""
    pool = RankPool(count)
    atexit.register(pool.close)
    return pool


def _serve(connection: Connection, index: int, count: int, port: int) -> None:
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(index),
        "LOCAL_RANK": str(index),
        "WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "1",  # accelerate would take more
    }
    try:
        with ranks.open_ranks():
            num_calls = 0
            while True:
                try:
                    function, arguments = connection.recv()
                except EOFError:  # the tests have ended
                    os._exit(0)
                num_calls += 1
                store = None
                if count > 1:
                    store = PrefixStore(f"call {num_calls}", distributed_c10d._get_default_store())
                with ranks.use(index, count, store, ranks.timeout_seconds()):
                    result = function(*arguments)
                connection.send((True, result))
    except BaseException:  # noqa: BLE001 - the parent raises it
        connection.send((False, traceback.format_exc()))


def free_port() -> int:
    """A port outside the range from which the system takes those of connections."""
    while True:
        port = 20_000 + secrets.randbelow(12_000)  # no seed: other tests run at the same time
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port
