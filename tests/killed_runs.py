"""Where SIGKILL ends a training run in a process of its own."""

import os
import signal
from pkgutil import resolve_name
from typing import Any

from srtrl.trainer.sampling import RolloutContext
from srtrl.trainer.trainer import Trainer


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_at_call(place: str, number: int, *, after: bool = False) -> None:
    """Let call `number` (from 1) of `place`, a dotted name, kill the process, before or after the call's own work."""
    owner_name, _, name = place.rpartition(".")
    owner = resolve_name(owner_name)
    original = getattr(owner, name)
    calls = 0

    def call(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number and not after:
            die()
        result = original(*arguments, **options)
        if calls == number:
            die()
        return result

    setattr(owner, name, call)


def kill_in_rollout(step: int, num_done: int) -> None:
    """In the rollout of this step, when this many samples are done and graded; others are half decoded."""
    make_collector = RolloutContext.collector
    num_rollouts = 0

    def make(context: Any, purpose: Any, *arguments: Any) -> Any:
        nonlocal num_rollouts
        num_rollouts += purpose == "train"

        def on_progress(done: int, _: int) -> None:
            if num_rollouts == step and done >= num_done:
                die()

        collector = make_collector(context, purpose, *arguments)
        collector.on_progress = on_progress
        return collector

    setattr(RolloutContext, "collector", make)  # noqa: B010


def kill_in_update(step: int, num_optimizer_steps: int) -> None:
    """In the update of this step, after this many of its optimizer steps."""
    assign_credit = Trainer.assign_credit
    num_updates = 0

    def counted(*arguments: Any) -> Any:
        nonlocal num_updates
        num_updates += 1
        if num_updates == step:
            die_at_call("torch.optim.AdamW.step", num_optimizer_steps, after=True)
        return assign_credit(*arguments)

    setattr(Trainer, "assign_credit", counted)  # noqa: B010
