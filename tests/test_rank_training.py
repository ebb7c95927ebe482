"""Whole runs on several ranks: a rank that is interrupted or killed ends all, and the run resumes with any number.

That several ranks learn what one process learns is in `test_promises.py`.
"""

import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from killed_runs import die_at_call
from rank_cases import FORKED, run_ranks
from rank_runs import assert_close_runs, train_on_ranks
from test_promises import SHORT
from tiny_run import learned_rows, make_recipe, train

from srtrl import build, ranks
from srtrl.metrics import is_temporary
from srtrl.ranks import RankError
from srtrl.recipe.schema import Recipe
from srtrl.run.steps import list_checkpoints
from srtrl.trainer.optimizer import MasterAdamW
from srtrl.trainer.trainer import Trainer

pytestmark = FORKED
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
