"""Ctrl-C and SIGTERM: the first asks the run to end after the running step, the second ends it at once."""

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Self


class Interrupt:
    """While entered, catches SIGINT and SIGTERM (in the main thread; elsewhere signals are not ours to catch)."""

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
