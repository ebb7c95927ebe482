"""Training runs in processes of their own, which SIGKILL ends at a given place."""

import os
import signal
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pkgutil import resolve_name
from typing import Any

import torch
from rank_cases import CONTEXT

from srtrl.build import run_training
from srtrl.recipe.schema import Recipe
from srtrl.trainer.sampling import RolloutContext
from srtrl.trainer.trainer import Trainer

Prepare = Callable[[], None]


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


def run_child(recipe: Recipe, resume: bool, prepare: Prepare | None) -> None:
    """Body of the child process."""
    torch.set_num_threads(1)
    if prepare is not None:
        prepare()
    run_training(recipe, resume=resume)


def start(recipe: Recipe, *, resume: bool = False, prepare: Prepare | None = None) -> ForkServerProcess:
    """Train in a process of its own, forked from a server that has imported everything."""
    process = CONTEXT.Process(target=run_child, args=(recipe, resume, prepare))
    process.start()
    return process


def finish(process: ForkServerProcess, timeout: float = 100) -> int:
    """The exit code; a process that has none after `timeout` seconds is killed, and the test fails."""
    process.join(timeout)
    if process.exitcode is None:
        process.kill()
        raise AssertionError("the run hangs")
    return process.exitcode


def train_until_killed(recipe: Recipe, prepare: Prepare) -> None:
    """Train in a process of its own that is killed where `prepare` says."""
    assert finish(start(recipe, prepare=prepare)) == -signal.SIGKILL
