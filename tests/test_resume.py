"""Runs that are killed or interrupted, in one process or on several ranks, and resumed.

`test_promises.py` has the places of kills, and that several ranks learn what one process learns; here are kills at
random times, what is particular to tools, and that a rank that is interrupted or killed ends all.
"""

import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pyarrow.parquet
import pytest
import torch
from killed_runs import die, die_at_call
from rank_cases import CONTEXT, FORKED, run_ranks
from rank_runs import assert_close_runs, finish, start, train_on_ranks, train_until_killed
from test_promises import SHORT
from tiny_run import assert_same_run, learned_rows, make_recipe, open_run, train

from srtrl import build, ranks
from srtrl.environments.base import EnvironmentBase, Step, Turn
from srtrl.metrics import is_temporary
from srtrl.ranks import RankError
from srtrl.recipe.schema import Recipe
from srtrl.run.folder import open_run_folder
from srtrl.run.steps import list_checkpoints
from srtrl.trainer.optimizer import MasterAdamW
from srtrl.trainer.trainer import Trainer

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
    assert finish([start(recipe, resume=True)]) == [0]
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
        assert finish([process]) == [0]
    with open_run(recipe, resume=True):
        pass


def expect_refusal(recipe: Recipe) -> None:
    """Body of the child process."""
    with pytest.raises(ValueError, match="in use by another srtrl process"), open_run_folder(recipe, resume=True):
        pass


# --- Several ranks ---------------------------------------------------------------------------------------------------


SHARDED: dict[str, Any] = {"train__sharding": "fsdp2", "train__checkpoint_every": 1}


DIES_IN_STEP = partial(die_at_call, "srtrl.trainer.trainer.Trainer.assign_credit", 3)
DIES_IN_CHECKPOINT = partial(die_at_call, "safetensors.torch.save", 2)
"""The second one, when the other rank writes as well."""


def interrupt_twice() -> None:
    """As a scheduler and `torchrun` do, in the first step; once the first signal is reported."""
    assign_credit = Trainer.assign_credit

    def interrupted(self: Trainer, *arguments: Any) -> Any:
        if arguments[1].step == 1:
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
            os.kill(os.getpid(), signal.SIGTERM)
        return assign_credit(self, *arguments)

    setattr(Trainer, "assign_credit", interrupted)  # noqa: B010


def test_a_signal_to_one_rank_ends_all_after_the_step(
    policy: Path, finished: Callable[..., Path], tmp_path: Path
) -> None:
    """Also where it comes twice within a moment."""
    recipe = make_recipe(policy, tmp_path, **SHORT)
    processes = train_on_ranks(recipe, 2, kills=(1, interrupt_twice))
    assert [process.exitcode for process in processes] == [0, 0]
    assert [path.name for path in list_checkpoints(tmp_path / "run" / "checkpoints")] == ["step_000001"]
    train(recipe, resume=True)
    assert_close_runs(tmp_path / "run", finished(**SHORT), tolerance=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("killed", "kill"), [(0, DIES_IN_STEP), (1, DIES_IN_STEP), (1, DIES_IN_CHECKPOINT)])
def test_a_killed_rank_ends_all_and_the_run_resumes_with_any_number(
    policy: Path, finished: Callable[..., Path], tmp_path: Path, killed: int, kill: Callable[[], None]
) -> None:
    changes = {**SHORT, "train__num_steps": 4}
    sharding = "ddp" if killed == 0 else "fsdp2"  # a checkpoint does not depend on it
    recipe = make_recipe(policy, tmp_path, **changes, train__sharding=sharding)
    exit_codes = [process.exitcode for process in train_on_ranks(recipe, 2, kills=(killed, kill))]
    assert exit_codes[killed] == -signal.SIGKILL
    assert exit_codes[1 - killed] not in (0, None)
    *unfinished, last = sorted((tmp_path / "run" / "checkpoints").iterdir())
    assert last.name == "step_000002"
    assert all(map(is_temporary, unfinished))  # of the last one
    count = 3 if killed == 0 else 1
    recipe = make_recipe(policy, tmp_path, **changes, train__sharding="fsdp2" if killed == 0 else "ddp")
    assert [process.exitcode for process in train_on_ranks(recipe, count, resume=True)] == [0] * count
    assert_close_runs(tmp_path / "run", finished(**changes), tolerance=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("sharding", ["ddp", "fsdp2"])
def test_two_devices_with_nccl_learn_what_one_learns(policy: Path, tmp_path: Path, sharding: str) -> None:
    """On CUDA tokens are equal up to rounding only, so that figures of the first step are compared, loosely."""
    changes = {**SHORT, "device": "cuda", "model__dtype": "bfloat16", "train__num_steps": 1}
    one = train_on_ranks(make_recipe(policy, tmp_path / "one", **changes), 1)
    two = train_on_ranks(make_recipe(policy, tmp_path / "two", **changes, train__sharding=sharding), 2)
    assert [process.exitcode for process in (*one, *two)] == [0, 0, 0]
    first, second = (learned_rows(tmp_path / name / "run")[1] for name in ("one", "two"))
    for name in ("reward/mean", "length/mean", "grad_norm", "logprob_difference/mean"):
        assert second[name] == pytest.approx(first[name], rel=0.3, abs=0.05), name


LOADS = [(build, "load_task"), (build, "build_engine"), (MasterAdamW, "load")]


def errors_of_a_start(recipe: Recipe) -> list[str]:
    """Runs on each rank."""
    found = []
    for module, name in LOADS:
        with pytest.MonkeyPatch.context() as patch:
            if ranks.index() == 1:
                patch.setattr(module, name, no_file)
            with (
                pytest.raises((ValueError, RankError), match=r".") as caught,
                Trainer(build.build_parts(recipe, resume=True)),
            ):
                pass
        found.append(str(caught.value))
    with pytest.raises((ValueError, RankError), match=r"--resume continues|already") as caught:
        build.build_parts(recipe)  # the folder is there
    return [*found, f"{caught.type.__name__}"]


def no_file(*_: Any, **__: Any) -> NoReturn:
    raise ValueError("no such file on this machine")


def test_an_error_of_one_rank_at_the_start_is_one_of_all(policy: Path, tmp_path: Path) -> None:
    """The others must not wait for its part of the weights; nor does the state of the optimizer need it."""
    once = {**SHORT, "train__num_steps": 1, "eval__before_and_after": False}
    train(make_recipe(policy, tmp_path, **once))
    recipe = make_recipe(policy, tmp_path, **{**once, **SHARDED, "train__num_steps": 2})
    found = run_ranks(2, errors_of_a_start, recipe)
    message = "no such file on this machine"
    first, second = [f"rank 1 of 2: {message}"] * len(LOADS), [message] * len(LOADS)
    assert found == [[*first, "ValueError"], [*second, "RankError"]]
