"""Threads beside the decoder's, and an event loop for the coroutines of rewards and environments."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager


def start_thread(target: Callable[[], None]) -> None:
    """A thread that ends with the process, even while it waits."""
    threading.Thread(target=target, name="environment", daemon=True).start()


@contextmanager
def event_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop that runs in a thread of its own; what is left of its tasks at the end is cancelled."""
    loop = asyncio.new_event_loop()

    def run() -> None:
        with closing(loop):
            loop.run_forever()
            if tasks := asyncio.all_tasks(loop):
                for task in tasks:
                    task.cancel()
                loop.run_until_complete(asyncio.wait(tasks, timeout=1.0))

    start_thread(run)
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
