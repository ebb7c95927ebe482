"""Threads beside the decoder's, and an event loop for the coroutines of rewards and environments.

A user's function may hang, and a coroutine may block or swallow its cancellation: who waits keeps the limit, and
threads end with the process.
"""

import asyncio
import math
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from srtrl.resolve import Caught, describe_error, warn_once

ADVICE = "what waits needs a limit of its own, and a coroutine must not block: `await`, or use asyncio.to_thread"
BLOCKING_SECONDS = 1.0
"""A coroutine that blocks the event loop for longer is named."""
Blocked = tuple[str, float]
"""The name of an event loop's task that has blocked it, empty outside of tasks, and for how many seconds."""


def start_thread(target: Callable[[], object]) -> None:
    """A thread that ends with the process, even while it waits."""
    threading.Thread(target=target, name="environment", daemon=True).start()


class DaemonThreads(ThreadPoolExecutor):
    """Calls in threads that end with the process, even where one hangs; also those of `asyncio.to_thread`."""

    def __init__(self, max_threads: float = math.inf) -> None:
        """Threads are started when needed, and end where no call waits."""
        super().__init__()
        self._lock = threading.Lock()
        self._num_left = max_threads
        """Threads that may be started."""
        self._waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        """Call a function in a thread, as soon as one is free."""
        result: Future[Any] = Future()
        with self._lock:
            self._waiting.append((result, partial(function, *args, **kwargs)))
            if self._num_left:
                self._num_left -= 1
                start_thread(self._work)
        return result

    def give_up(self, call: "Future[Any]") -> bool:
        """Leave a call that hangs behind: another thread takes the place of its own. False where it has ended."""
        is_late = call.cancel()
        if is_late:
            start_thread(self._work)
        return is_late

    def _work(self) -> None:
        """The body of a thread."""
        while True:
            with self._lock:
                if not self._waiting:
                    self._num_left += 1
                    return
                result, function = self._waiting.popleft()
            with Caught() as caught:
                value = function()
            if not result.set_running_or_notify_cancel():
                return  # it was given up
            if caught.error is not None:
                result.set_exception(caught.error)
            else:
                result.set_result(value)


@contextmanager
def event_loop(
    owner: str, max_seconds: float = math.inf
) -> Iterator[tuple[asyncio.AbstractEventLoop, "Future[Blocked]"]]:
    """An event loop that runs in a thread of its own; what is left of its tasks at the end is cancelled.

    What a task raises that nobody awaits is logged in one line, as is a coroutine that blocks the loop.

    Args:
        owner: Says whose coroutines these are.
        max_seconds: After so long without an `await` of the task that runs, the future is done.
    """
    loop, is_over = asyncio.new_event_loop(), threading.Event()
    blocked: Future[Blocked] = Future()
    loop.set_default_executor(DaemonThreads())

    def log(_: object, context: dict[str, Any]) -> None:
        error = context.get("exception")
        warn_once(f"{owner}: in a task left behind: {describe_error(error) if error else context['message']}")

    def run() -> None:
        with closing(loop):
            while not is_over.is_set():
                with Caught():  # a task that raises KeyboardInterrupt or SystemExit keeps it, but stops the loop, too
                    loop.run_forever()
            if tasks := asyncio.all_tasks(loop):
                for task in tasks:
                    task.cancel()
                if loop.run_until_complete(asyncio.wait(tasks, timeout=1.0))[1]:
                    threading.Event().wait()  # a coroutine that swallows its end would hang whoever collects it

    loop.set_exception_handler(log)
    start_thread(run)
    start_thread(lambda: _watch(loop, is_over, blocked, owner, max_seconds))
    try:
        yield loop, blocked
    finally:
        is_over.set()
        loop.call_soon_threadsafe(loop.stop)


def _watch(
    loop: asyncio.AbstractEventLoop,
    is_over: threading.Event,
    blocked: "Future[Blocked]",
    owner: str,
    max_seconds: float,
) -> None:
    """Name the coroutines that block the loop, until it is over; the arguments are as in `event_loop`."""
    while not is_over.wait(BLOCKING_SECONDS / 4):
        is_free, last, seconds = threading.Event(), None, 0.0
        with Caught():  # it has been closed since
            loop.call_soon_threadsafe(is_free.set)
        while not (is_free.wait(BLOCKING_SECONDS) or is_over.is_set()):
            task = asyncio.current_task(loop)
            last, seconds = task, BLOCKING_SECONDS + (seconds if task is last else 0.0)
            for frame in task.get_stack(limit=1) if task else ():
                name = f"`{frame.f_code.co_name}` ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"
                warn_once(f"{owner}: {name} has blocked the event loop for {BLOCKING_SECONDS:g} s; {ADVICE}")
            if seconds > max_seconds and not blocked.done():
                blocked.set_result((task.get_name() if task else "", seconds))
