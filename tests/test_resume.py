"""A run that is killed with SIGKILL and resumed gives the numbers and the weights of a run never killed."""

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import torch
from rank_cases import CONTEXT
from tiny_run import assert_same_run, learned_rows, make_recipe, open_run

from srtrl.environments.base import EnvironmentBase, Step, Turn
from srtrl.recipe.schema import Recipe
from srtrl.rollout.collect import collect_rollouts
from srtrl.run import checkpoint
from srtrl.run.folder import open_run_folder
from srtrl.tasks.grading import Grader
from srtrl.trainer import sampling, trainer


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_at_call(owner: Any, name: str, number: int, *, after: bool = False) -> None:
    """Let call `number` (from 1) of `owner.name` kill the process, before or after the call's own work."""
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


def kill_in_rollout() -> None:
    """Some samples of step 3 are done and graded, others are half decoded."""
    original = collect_rollouts

    def collect(engine: Any, collector: Any, draws: Any) -> Any:
        def on_progress(num_done: int, _: int) -> None:
            if draws.draws[0][0] == 2 * 4 and num_done == 5:
                die()

        collector.on_progress = on_progress
        return original(engine, collector, draws)

    setattr(sampling, "collect_rollouts", collect)  # noqa: B010


KILLS: dict[str, Callable[[], None]] = {
    "in rollout": kill_in_rollout,
    # all of step 3 is decoded; the evaluations before and after step 2 call `collect` too
    "in grading": lambda: die_at_call(Grader, "collect", 5),
    # in step 3, after the second of its four optimizer steps
    "in update": lambda: die_at_call(torch.optim.AdamW, "step", 2 * 4 + 2, after=True),
    # the second has its weights and optimizer, but not yet its state; each writes generation_config.json before that,
    # and its manifest after it
    "in checkpoint": lambda: die_at_call(checkpoint, "write_atomic", 5),
}
MORE_KILLS: dict[str, Callable[[], None]] = {
    "between row and checkpoint": lambda: die_at_call(trainer, "save_checkpoint", 2),
    "in the first step": lambda: die_at_call(torch.optim.AdamW, "step", 3),  # there is no checkpoint yet
    # the last checkpoint is complete; each clears its place first, the second deletes the first
    "in deletion": lambda: die_at_call(shutil, "rmtree", 3),
    "in the rollout file": lambda: die_at_call(trainer, "write_rollouts", 3),
}


def kill_at(place: str) -> None:
    """Let the process be killed at one of these."""
    (KILLS | MORE_KILLS)[place]()


def run_child(recipe: Recipe, resume: bool, prepare: Callable[[], None] | None) -> None:
    """Body of the child process."""
    torch.set_num_threads(1)
    if prepare is not None:
        prepare()
    trainer.run_training(recipe, resume=resume)


def start(recipe: Recipe, *, resume: bool = False, prepare: Callable[[], None] | None = None) -> ForkServerProcess:
    """Train in a process of its own, forked from a server that has imported everything."""
    process = CONTEXT.Process(target=run_child, args=(recipe, resume, prepare))
    process.start()
    return process


def finish(process: ForkServerProcess) -> int:
    process.join(120)
    assert process.exitcode is not None, "the run hangs"
    return process.exitcode


@pytest.fixture(scope="module")
def uninterrupted(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output_dir = tmp_path_factory.mktemp("uninterrupted")
    assert finish(start(make_recipe(policy, output_dir))) == 0
    rows = [row for row in learned_rows(output_dir / "run") if row["step"] > 0]
    assert all(row["grad_norm"] > 0 for row in rows), "if nothing were learned, equality would be cheap"
    assert rows[-1]["kl/ref"] > 1e-4  # the policy has moved away from the reference
    assert len({row["reward/mean"] for row in rows}) == 4
    return output_dir / "run"


@pytest.mark.parametrize("kill", [*KILLS, *(pytest.param(kill, marks=pytest.mark.slow) for kill in MORE_KILLS)])
def test_killed_and_resumed_equals_uninterrupted(kill: str, policy: Path, uninterrupted: Path, tmp_path: Path) -> None:
    changes = {"train__keep_checkpoints": 1} if kill == "in deletion" else {}
    recipe = make_recipe(policy, tmp_path, **changes)
    assert finish(start(recipe, prepare=partial(kill_at, kill))) == -signal.SIGKILL
    assert finish(start(recipe, resume=True)) == 0
    assert_same_run(tmp_path / "run", uninterrupted)


@pytest.mark.slow
def test_killed_at_random_times_again_and_again(policy: Path, uninterrupted: Path, tmp_path: Path) -> None:
    recipe = make_recipe(policy, tmp_path)
    generator = random.Random(time.time_ns())
    for _ in range(12):
        process = start(recipe, resume=True)
        time.sleep(generator.uniform(0.2, 3.0))
        process.kill()
        process.join()
    assert finish(start(recipe, resume=True)) == 0
    assert_same_run(tmp_path / "run", uninterrupted)


class Oracle(EnvironmentBase):
    """Answers a turn by a random number that no seed decides; may kill the process in the middle of a call."""

    num_calls = 0
    dies_after: Path | None = None
    """The process dies a few calls after this file has been written."""

    def step(self, turn: Turn) -> Step:
        if self.dies_after is not None and self.dies_after.exists():
            type(self).num_calls += 1
            if self.num_calls == 5:
                die()
        return Step(observation=f" {int.from_bytes(os.urandom(2))} ", reward=sum(turn.token_ids) % 3)


def kill_in_tool_call(file: Path) -> None:
    """Let the process die in a tool call after this file has been written."""
    Oracle.dies_after = file


def test_killed_in_a_tool_call_and_resumed_repeats_what_was_said(policy: Path, tmp_path: Path) -> None:
    """Even of a tool that is not deterministic: what it said before is read from the run's folder."""
    changes = {
        "rollout__environment": {"name": "test_resume:Oracle", "max_turns": 3, "max_observation_tokens": 16},
        "rollout__stop_strings": ["1", "3", "5", "7", "+", "(", "A"],
        "rollout__max_new_tokens": 40,
        "rewards": [{"name": "environment"}],
        "eval": {"before_and_after": False},
    }
    recipe = make_recipe(policy, tmp_path, **changes)
    run = tmp_path / "run"
    done = run / "rollouts" / "step_000003.parquet"  # and after step 3 there is no checkpoint
    assert finish(start(recipe, prepare=partial(kill_in_tool_call, done))) == -signal.SIGKILL
    known = {path.name: path.read_bytes() for path in (run / "observations").iterdir()}
    assert {"step_000003.jsonl", "step_000004.jsonl"} <= known.keys()
    killed = shutil.copytree(run, tmp_path / "killed" / "run")
    assert finish(start(recipe, resume=True)) == 0  # from the checkpoint after step 2
    assert pyarrow.parquet.read_table(done) == pyarrow.parquet.read_table(killed / "rollouts" / done.name)
    for step in (3, 4):  # nothing was asked again
        name = f"step_{step:06d}.jsonl"
        assert (run / "observations" / name).read_bytes().startswith(known[name])
    shutil.copytree(run / "observations", killed / "observations", dirs_exist_ok=True)
    assert finish(start(make_recipe(policy, tmp_path / "killed", **changes), resume=True)) == 0
    assert_same_run(killed, run)


def test_two_processes_cannot_hold_one_folder(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path / "policy", tmp_path)
    with open_run(recipe):
        process = CONTEXT.Process(target=expect_refusal, args=(recipe,))
        process.start()
        assert finish(process) == 0
    with open_run(recipe, resume=True):
        pass


def expect_refusal(recipe: Recipe) -> None:
    """Body of the child process."""
    with pytest.raises(ValueError, match="in use by another srtrl process"), open_run_folder(recipe, resume=True):
        pass
