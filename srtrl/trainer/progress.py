"""What a run says while it runs: live bars on a terminal, one plain line a step elsewhere."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


class RunProgress:
    """Two bars on a terminal (steps of the run, samples of the running stage); plain lines where there is none."""

    def __init__(self, title: str, num_steps: int, *, console: Console | None = None, plain_every: int = 1) -> None:
        """Show `num_steps` steps.

        Args:
            title: Name of the outer bar.
            num_steps: Steps of the whole run.
            console: Where to write; standard output by default.
            plain_every: Without a terminal, print every this many steps (and the last).
        """
        self.console = console if console is not None else Console()
        self._title = title
        self._num_steps = num_steps
        self._plain_every = plain_every
        self._bars: Progress | None = None
        self._outer = self._inner = TaskID(0)
        if self.console.is_terminal:
            self._bars = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[text]}"),
                console=self.console,
            )
            self._outer = self._bars.add_task(title, total=num_steps, text="")
            self._inner = self._bars.add_task("", total=1, text="", visible=False)

    def __enter__(self) -> Self:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def expect(self, num_steps: int) -> None:
        """There are other steps than was thought."""
        self._num_steps = num_steps
        if self._bars is not None:
            self._bars.update(self._outer, total=num_steps)

    def step(self, step: int, text: str) -> None:
        """Step `step` (1-based) is done; `text` says how it went."""
        if self._bars is not None:
            self._bars.update(self._outer, completed=step, text=text)
            self._bars.update(self._inner, visible=False)
        elif step % self._plain_every == 0 or step == self._num_steps:
            self.say(f"{self._title} step {step}/{self._num_steps}  {text}")

    def stage(self, name: str, num_done: int, num_total: int, text: str = "") -> None:
        """Show how far the running stage is (a terminal only)."""
        if self._bars is not None:
            self._bars.update(
                self._inner, description=f"  {name}", completed=num_done, total=num_total, text=text, visible=True
            )

    def say(self, text: str) -> None:
        """Print one line, above the bars."""
        self.console.print(text, soft_wrap=True, highlight=False, markup=False)
