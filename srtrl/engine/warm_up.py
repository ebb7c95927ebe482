"""Reports the compilation of CPU kernels, which takes a while once for an installation."""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager

from numba.core import event
from numba.core.registry import CPUDispatcher

COMPILE_MESSAGE = "compiling CPU kernels: once for this installation, half a minute to two minutes"


def reporting_compilation(on_compile: Callable[[int, int], None]) -> AbstractContextManager[None]:
    """Call `on_compile` with the number of srtrl's kernels compiled so far, and of all, whenever Numba begins another.

    Not at all where Numba's cache on the disk has all of them.
    """
    installed: AbstractContextManager[None] = event.install_listener("numba:compile", _CompileListener(on_compile))
    return installed


class _CompileListener(event.Listener):
    def __init__(self, on_compile: Callable[[int, int], None]) -> None:
        self._on_compile = on_compile
        modules = [vars(module) for name, module in list(sys.modules.items()) if name.startswith("srtrl.")]
        self._kernels = {value for names in modules for value in names.values() if isinstance(value, CPUDispatcher)}
        self._begun: set[CPUDispatcher] = set()

    def on_start(self, event: event.Event) -> None:
        """A function is to be compiled: one of ours, or one of Numba's own that ours need."""
        kernel = event.data["dispatcher"]
        if kernel in self._kernels and kernel not in self._begun:
            self._begun.add(kernel)
            self._on_compile(len(self._begun), len(self._kernels))

    def on_end(self, event: event.Event) -> None:
        """Nothing to do."""
