"""Seconds of the named stages of a step. Their names become `time/<stage>`."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class StageTimer:
    """Adds up wall-clock seconds by stage name; stages may repeat but must not nest (their sum is the step's time)."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._running: str | None = None

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count the seconds inside the `with` block as `name`; also where the block raises."""
        assert self._running is None, f"stage {name} inside stage {self._running}"
        self._running = name
        start = time.perf_counter()
        try:
            yield
        finally:
            self._running = None
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    def take(self) -> dict[str, float]:
        """Seconds by stage since the last call; starts again from nothing."""
        seconds, self._seconds = self._seconds, {}
        return seconds
