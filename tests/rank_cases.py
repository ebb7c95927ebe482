"""Runs a function in several processes that are connected, as `torchrun` would start them."""

import multiprocessing
import os
import secrets
import socket
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.context import ForkServerContext
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore

from srtrl.ranks.processes import open_ranks

CONTEXT: ForkServerContext = multiprocessing.get_context("forkserver")
PRELOADED = """
    rank_cases tiny_run srtrl.trainer.trainer accelerate hypothesis transformers.modeling_utils torch.optim
    torch.distributed.fsdp torch.distributed.checkpoint
"""
"""Modules that each process would else import after its fork; one list for all tests that start processes."""
CONTEXT.set_forkserver_preload(PRELOADED.split())


def run_ranks(count: int, function: Callable[..., Any], *arguments: Any, timeout: float = 120) -> list[Any]:
    """What `function(ranks, *arguments)` returns in each of `count` processes; errors of them are raised here."""
    queue = CONTEXT.Queue()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # here, as `torchrun` has it
    port = store.port
    processes = [
        CONTEXT.Process(target=_body, args=(queue, index, count, port, function, arguments)) for index in range(count)
    ]
    for process in processes:
        process.start()
    try:
        found = dict(queue.get(timeout=timeout) for _ in processes)
    finally:
        for process in processes:
            process.join(5)
            process.kill()
    if failed := [found[rank] for rank in range(count) if str(found[rank]).startswith("Traceback")]:
        raise AssertionError("\n".join(failed))
    return [found[index] for index in range(count)]


def _body(queue: Any, index: int, count: int, port: int, function: Callable[..., Any], arguments: Any) -> None:
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
        with open_ranks() as ranks:
            result = function(ranks, *arguments)
        queue.put((index, result))
    except BaseException:  # noqa: BLE001 - the parent raises it
        queue.put((index, traceback.format_exc()))


def free_port() -> int:
    """A port outside the range from which the system takes those of connections."""
    while True:
        port = 20_000 + secrets.randbelow(12_000)  # no seed: other tests run at the same time
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port
