"""The progress of a run on the console: a line for each step and, on a terminal, the stage that runs."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from math import isnan
from statistics import fmean
from textwrap import wrap
from time import monotonic
from typing import TYPE_CHECKING, Self

from numba.core import event
from numba.core.registry import CPUDispatcher
from rich.console import Console
from rich.text import Text

from srtrl.engine.stopping import decode
from srtrl.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

COMPILE_MESSAGE = "compiling CPU kernels: once for this installation, 20 seconds to a minute"

STEPS_FOR_TIME_LEFT = 10
"""Last steps whose mean time the remaining ones are expected to take."""

STEPS_OF_REWARD = 10
"""Last steps whose mean reward is shown."""

MEAN_REWARD = f"rewards here are means of up to {STEPS_OF_REWARD} steps; each step's is in metrics.jsonl"
"""Printed once."""

SECONDS_PER_LINE = 2.0
"""Steps that follow a line within this time have none, but the last one and those with a notice."""

WIDTH, LOG_WIDTH = 78, 100
"""Longest line; with the time left, which stands in no terminal's line, one of all parts is a little longer."""

SPARKS = "▁▂▃▄▅▆▇█"

STYLES = {r"^step \S+  reward \S+": "bold", r"^gain: +\+.*": "green", r"^gain: +-.*": "red"}
"""Patterns in lines for people, and their styles on a terminal."""

SHOWN_CHARACTERS = 500
"""Characters of the first prompt that are shown at the start of a run."""


class RunProgress:
    """Prints lines; inside its `with` block, on a terminal, also shows the current step and stage below them."""

    def __init__(self, num_steps: int, *, console: Console | None = None) -> None:
        """The progress of a run of `num_steps` steps, on standard output by default."""
        self.console = console if console is not None else Console()
        self._num_steps = num_steps
        self._num_done = 0
        self._ends: deque[float] = deque(maxlen=STEPS_FOR_TIME_LEFT + 1)
        """When the last steps ended."""
        self._last_line = -SECONDS_PER_LINE
        self._rewards: list[float] = []
        self._has_explained = False
        """Whether `MEAN_REWARD` has been printed."""
        self._status = self.console.status("")

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._status.stop()

    def step(self, step: int, text: str, *, reward: float | None = None, notice: str = "") -> None:
        """Print a line about step `step` (1-based), which is done, at most one in `SECONDS_PER_LINE`.

        `reward`: of the step, NaN where no sample could be graded; shown is the mean of the last steps, with its way
        since this process began. `notice`: what must not be missed, on a line of its own.
        """
        self._num_done = step
        self._ends.append(monotonic())
        is_graded = reward is not None and not isnan(reward)
        if reward is not None and is_graded:
            self._rewards.append(reward)
        if not notice and step < self._num_steps and self._ends[-1] < self._last_line + SECONDS_PER_LINE:
            return
        self._last_line = self._ends[-1]
        explanation = MEAN_REWARD if len(self._rewards) > 1 and not self._has_explained else ""
        self._has_explained = len(self._rewards) > 1
        start, end = f"step {step}/{self._num_steps}  ", text
        if not self.console.is_terminal and (left := self._time_left()):
            end += f"  {left}"
        if reward is not None and not is_graded:
            start += "reward -  "
        elif reward is not None:
            ends = range(1, len(self._rewards) + 1)
            means = [fmean(self._rewards[max(0, end - STEPS_OF_REWARD) : end]) for end in ends]
            start += f"reward {means[-1]:.3f} "
            if self.console.encoding.startswith("utf"):
                start += sparkline(means, min(STEPS_OF_REWARD, WIDTH - len(start) - len(end) - 2))
            start = f"{start.rstrip()}  "
        width = WIDTH if self.console.is_terminal else LOG_WIDTH
        for words, indent in ((start + end, ""), (notice, "  "), (explanation, "  ")):
            for line in wrap(words, width, initial_indent=indent, subsequent_indent="  ", break_on_hyphens=False):
                self.say(line)

    def _time_left(self) -> str:
        """The time that the other steps will take; nothing where it is not known."""
        num_left = self._num_steps - self._num_done
        if not num_left or len(self._ends) < 2:
            return ""
        seconds = round(num_left * (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1))
        return f"{str(timedelta(seconds=seconds)).removeprefix('0:').removeprefix('0')} left"

    def stage(self, name: str, num_done: int = 0, num_total: int = 0) -> None:
        """Show the stage that runs (on a terminal only) and, with `num_total`, how much of it is done."""
        if num_done == num_total and name == "rollout":
            name, num_done, num_total = "grading", 0, 0  # everything is decoded; there is nothing to count
        if self.console.is_terminal:
            count = f" {num_done}/{num_total}" if num_total else ""
            step = f"step {min(self._num_done + 1, self._num_steps)}/{self._num_steps}"
            self._status.update(f"{step}  {name}{count}  {self._time_left()}")

    def compiling(self, num_done: int, num_total: int) -> None:
        """A CPU kernel is being compiled: say once why it takes long."""
        if num_done == 1:
            self.say(COMPILE_MESSAGE)
        self.stage("compile", num_done, num_total)

    def say(self, text: str) -> None:
        """Print one line."""
        self.console.print(styled(text), soft_wrap=True)


def styled(text: str) -> Text:
    """The text, with the reward of a step and the gain of a run in a style of their own on a terminal."""
    result = Text(text)
    for pattern, style in STYLES.items():
        result.highlight_regex(pattern, style)
    return result


def sparkline(values: Sequence[float], width: int) -> str:
    """At most `width` of the values, the first and the last among them, from the lowest to the highest."""
    if min(width, len(values)) < 2:
        return ""
    number = min(width, len(values))
    shown = [values[round(i * (len(values) - 1) / (number - 1))] for i in range(number)]
    low, span = min(shown), (max(shown) - min(shown)) or 1.0
    return "".join(SPARKS[int((value - low) / span * (len(SPARKS) - 1))] for value in shown)


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


def describe_prompt(prompt: Prompt, tokenizer: PreTrainedTokenizerBase, what: str = "first training prompt") -> str:
    """The prompt as the policy reads it, with special tokens and line ends, without the middle of a long one.

    Each line begins with `| `, so that a line end at the very end is visible.
    """
    text = decode(tokenizer, prompt.token_ids, clean_up_tokenization_spaces=False)
    if (num_left_out := len(text) - SHOWN_CHARACTERS) > 0:
        half = SHOWN_CHARACTERS // 2
        text = f"{text[:half]} [... {num_left_out:,} characters left out ...] {text[-half:]}"
    heading = f"{what}, {prompt.prompt_id} ({len(prompt.token_ids):,} tokens):"
    return "\n| ".join([heading, *text.split("\n")])
