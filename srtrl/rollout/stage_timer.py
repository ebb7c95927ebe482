"""Seconds of the named stages of a step. Their names become `time/<stage>`."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class StageTimer:
    """Adds up wall-clock seconds by stage name; stages may repeat. A stage inside another pauses it.

    So no second is counted twice, and the sum is the step's time.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._running: str | None = None
        self._since = 0.0

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count the seconds inside the `with` block as `name`; also where the block raises."""
        outer = self._running
        self._switch_to(name)
        try:
            yield
        finally:
            self._switch_to(outer)

    def take(self) -> dict[str, float]:
        """Seconds by stage since the last call, no stage being open; starts again from nothing."""
        assert self._running is None, f"taken inside stage {self._running}"
        seconds, self._seconds = self._seconds, {}
        return seconds

    def _switch_to(self, name: str | None) -> None:
        now = time.perf_counter()
        if self._running is not None:
            self._seconds[self._running] = self._seconds.get(self._running, 0.0) + now - self._since
        self._running, self._since = name, now
