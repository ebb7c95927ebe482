"""A run that is killed with SIGKILL and resumed gives the numbers and the weights of a run never killed.

`test_promises.py` has the places of kills; here are random ones, and what is particular to tools.
"""

import os
import random
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pyarrow.parquet
import pytest
from killed_runs import die, finish, start, train_until_killed
from rank_cases import CONTEXT, FORKED
from tiny_run import assert_same_run, make_recipe, open_run, train

from srtrl.environments.base import EnvironmentBase, Step, Turn
from srtrl.recipe.schema import Recipe
from srtrl.run.folder import open_run_folder

pytestmark = FORKED


@pytest.mark.slow
def test_killed_at_random_times_again_and_again(policy: Path, finished: Callable[..., Path], tmp_path: Path) -> None:
    recipe = make_recipe(policy, tmp_path)
    generator = random.Random(time.time_ns())
    for _ in range(12):
        process = start(recipe, resume=True)
        time.sleep(generator.uniform(0.2, 3.0))
        process.kill()
        process.join(60)
    assert finish(start(recipe, resume=True)) == 0
    assert_same_run(tmp_path / "run", finished())


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
    train_until_killed(recipe, partial(kill_in_tool_call, done))
    known = {path.name: path.read_bytes() for path in (run / "observations").iterdir()}
    assert {"step_000003.jsonl", "step_000004.jsonl"} <= known.keys()
    killed = shutil.copytree(run, tmp_path / "killed" / "run")
    train(recipe, resume=True)  # from the checkpoint after step 2
    assert pyarrow.parquet.read_table(done) == pyarrow.parquet.read_table(killed / "rollouts" / done.name)
    for step in (3, 4):  # nothing was asked again
        name = f"step_{step:06d}.jsonl"
        assert (run / "observations" / name).read_bytes().startswith(known[name])
    shutil.copytree(run / "observations", killed / "observations", dirs_exist_ok=True)
    train(make_recipe(policy, tmp_path / "killed", **changes), resume=True)
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
