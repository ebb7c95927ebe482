"""What holds for the time of a run: signals end it after a step, and the garbage collector leaves old objects alone."""

import gc
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self


@contextmanager
def long_lived_objects_left_alone() -> Iterator[None]:
    """Let the garbage collector look through none of the objects that are there by now.

    Importing torch and its like leaves half a million of them, and looking through all takes 0.2 to 0.5 seconds, now
    and then, in the middle of a rollout. What comes later is collected as ever, and at the end all is as before.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class Interrupt:
    """Ctrl-C and SIGTERM: the first asks the run to end after the running step, the second ends it at once.

    Signals are caught while it is entered, in the main thread (elsewhere they are not ours to catch).
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.requested = False
        self._say = say
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self.requested:
            raise KeyboardInterrupt(f"second {name}")
        self.requested = True
        self._say(
            f"{name}: finishing what is under way, then writing a checkpoint (after a step); once more stops at once"
        )
