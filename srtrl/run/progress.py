"""The progress of a run on the console: a line for each step and, on a terminal, the stage that runs."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from time import monotonic
from typing import TYPE_CHECKING, Self

from numba.core import event
from numba.core.registry import CPUDispatcher
from rich.console import Console

from srtrl.engine.stopping import decode
from srtrl.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

COMPILE_MESSAGE = "compiling CPU kernels: once for this installation, 20 seconds to a minute"

STEPS_FOR_TIME_LEFT = 10
"""Last steps whose mean time the remaining ones are expected to take."""

SHOWN_CHARACTERS = 500
"""Of the first prompt, at the start of a run."""


class RunProgress:
    """Prints lines; inside its `with` block, on a terminal, also shows the current step and stage below them."""

    def __init__(self, num_steps: int, *, console: Console | None = None) -> None:
        """Of `num_steps` steps, on standard output by default."""
        self.console = console if console is not None else Console()
        self._num_steps = num_steps
        self._num_done = 0
        self._ends: deque[float] = deque(maxlen=STEPS_FOR_TIME_LEFT + 1)
        """When the last steps ended."""
        self._status = self.console.status("")

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._status.stop()

    def step(self, step: int, text: str) -> None:
        """Print a line about step `step` (1-based), which is done, with the time that the others will take."""
        self._num_done = step
        self._ends.append(monotonic())
        num_left = self._num_steps - step
        if num_left and len(self._ends) > 1:
            seconds = round(num_left * (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1))
            text += f"  {timedelta(seconds=seconds)} left"
        self.say(f"step {step}/{self._num_steps}  {text}")

    def stage(self, name: str, num_done: int = 0, num_total: int = 0) -> None:
        """Show the stage that runs (on a terminal only) and, with `num_total`, how much of it is done."""
        if num_done == num_total and name == "rollout":
            name, num_done, num_total = "grading", 0, 0  # everything is decoded; there is nothing to count
        if self.console.is_terminal:
            count = f" {num_done}/{num_total}" if num_total else ""
            self._status.update(f"step {min(self._num_done + 1, self._num_steps)}/{self._num_steps}  {name}{count}")

    def compiling(self, num_done: int, num_total: int) -> None:
        """A CPU kernel is being compiled: say once why it takes long."""
        if num_done == 1:
            self.say(COMPILE_MESSAGE)
        self.stage("compile", num_done, num_total)

    def say(self, text: str) -> None:
        """Print one line."""
        self.console.print(text, soft_wrap=True, highlight=False, markup=False)


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


def describe_prompt(prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> str:
    """The prompt as the policy reads it, with special tokens and line ends, without the middle of a long one.

    Each line begins with `| `, so that a line end at the very end is visible.
    """
    text = decode(tokenizer, prompt.token_ids, clean_up_tokenization_spaces=False)
    if (num_left_out := len(text) - SHOWN_CHARACTERS) > 0:
        half = SHOWN_CHARACTERS // 2
        text = f"{text[:half]} [... {num_left_out:,} characters left out ...] {text[-half:]}"
    heading = f"first training prompt, {prompt.prompt_id} ({len(prompt.token_ids):,} tokens):"
    return "\n| ".join([heading, *text.split("\n")])
