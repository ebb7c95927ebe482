"""Whole runs on several ranks: what is learned is that of one process; one that is killed ends all, and resumes."""

import os
import signal
import threading
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn

import pyarrow.parquet as pq
import pytest
import safetensors.torch
import torch
from rank_cases import CONTEXT, free_port, run_ranks
from test_resume import die_at_call
from tiny_run import learned_rows, make_recipe

from srtrl.metrics import is_temporary
from srtrl.ranks.processes import RankError, Ranks
from srtrl.recipe.schema import Recipe
from srtrl.run.checkpoint import list_checkpoints
from srtrl.tasks.reward_input import RewardInput
from srtrl.trainer import build, trainer
from srtrl.trainer.trainer import Trainer, run_training

PPO: dict[str, Any] = {
    "algorithm": {
        "advantage": "gae",
        "reduction": "token_mean",
        "kl": {"coefficient": 0.05, "estimator": "k1", "placement": "reward"},
    },
    "critic": {"learning_rate": 0.001},
}
DAPO: dict[str, Any] = {
    "rollout__dynamic_sampling": True,
    "algorithm": {"filters": ["drop_uniform"], "clip_high": 0.28},
}
SHORT: dict[str, Any] = {
    "rewards": [{"name": "test_rank_training:weight"}],
    "train__num_steps": 2,
    "train__learning_rate": 1e-4,
    "eval__num_problems": 5,
}


def weight(sample: RewardInput) -> float:
    """A reward that no random number decides."""
    return sum(map(ord, sample.text)) % 7 / 7


def die_in_step() -> None:
    die_at_call(Trainer, "assign_credit", 3)


def die_in_checkpoint() -> None:
    """The second one, when the other rank writes as well."""
    die_at_call(safetensors.torch, "save", 2)


def interrupt_twice() -> None:
    """As a scheduler and `torchrun` do, in the first step; once the first signal is reported."""
    assign_credit = Trainer.assign_credit

    def interrupted(self: Trainer, *arguments: Any) -> Any:
        if arguments[1].step == 1:
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
            os.kill(os.getpid(), signal.SIGTERM)
        return assign_credit(self, *arguments)

    setattr(Trainer, "assign_credit", interrupted)  # noqa: B010


def body(recipe: Recipe, variables: dict[str, str], resume: bool, prepare: Callable[[], None] | None) -> None:
    """A rank, as the launcher starts it."""
    torch.set_num_threads(1)
    os.environ |= variables
    if prepare is not None:
        prepare()
    run_training(recipe, resume=resume)


def train(
    recipe: Recipe, count: int, *, resume: bool = False, kills: tuple[int, Callable[[], None]] | None = None
) -> list[BaseProcess]:
    """Train on `count` ranks until all have ended; `kills`: a rank that is killed, and what prepares that."""
    common = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes: list[BaseProcess] = []
    for index in range(count):
        variables = common | {"RANK": str(index), "LOCAL_RANK": str(index)}
        prepare = kills[1] if kills and kills[0] == index else None
        processes.append(CONTEXT.Process(target=body, args=(recipe, variables, resume, prepare)))
        processes[-1].start()
    for process in processes:
        process.join(120)
        assert process.exitcode is not None, "a rank hangs"
    return processes


def assert_close_runs(folder: Path, expected: Path, *, tolerance: float) -> None:
    """The same first rollouts, bit for bit, and metrics that differ by the order of sums."""
    rollouts = [pq.read_table(run / "rollouts" / "step_000001.parquet") for run in (folder, expected)]
    assert rollouts[0].drop(["advantage"]).equals(rollouts[1].drop(["advantage"]))
    for row, other in zip(learned_rows(folder), learned_rows(expected), strict=True):
        assert row.keys() == other.keys()
        for name, value in row.items():
            assert value == pytest.approx(other[name], rel=tolerance, abs=tolerance), (row["step"], name)


SHARDED: dict[str, Any] = {"train__sharding": "fsdp2", "train__checkpoint_every": 1}


@pytest.mark.parametrize(
    ("changes", "is_interrupted"),
    [
        pytest.param({}, True, id="grpo"),
        pytest.param({**PPO, **SHARDED}, False, id="sharded ppo"),
        pytest.param(DAPO, False, id="dapo", marks=pytest.mark.slow),
        pytest.param({"model__lora": {"rank": 4}}, False, id="lora", marks=pytest.mark.slow),
        pytest.param({**PPO, **SHARDED, "model__dtype": "bfloat16"}, False, id="bfloat16", marks=pytest.mark.slow),
    ],
)
def test_ranks_learn_what_one_process_learns(
    policy: Path, tmp_path: Path, changes: dict[str, Any], is_interrupted: bool
) -> None:
    """Also where a signal that reached one rank, twice within a moment, has ended all after the first step."""
    run_training(make_recipe(policy, tmp_path / "one", **SHORT, **{**changes, "train__sharding": "ddp"}))
    recipe = make_recipe(policy, tmp_path / "two", **SHORT, **changes)
    if is_interrupted:
        assert [process.exitcode for process in train(recipe, 2, kills=(1, interrupt_twice))] == [0, 0]
        assert [path.name for path in list_checkpoints(tmp_path / "two" / "run" / "checkpoints")] == ["step_000001"]
    assert [process.exitcode for process in train(recipe, 2, resume=is_interrupted)] == [0, 0]
    assert_close_runs(tmp_path / "two" / "run", tmp_path / "one" / "run", tolerance=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("killed", "kill"), [(0, die_in_step), (1, die_in_step), (1, die_in_checkpoint)])
def test_a_killed_rank_ends_all_and_the_run_resumes_with_any_number(
    policy: Path, tmp_path: Path, killed: int, kill: Callable[[], None]
) -> None:
    changes = {**SHORT, "train__num_steps": 4}
    expected = make_recipe(policy, tmp_path / "one", **changes)
    run_training(expected)
    sharding = "ddp" if killed == 0 else "fsdp2"  # a checkpoint does not depend on it
    recipe = make_recipe(policy, tmp_path / "several", **changes, train__sharding=sharding)
    exit_codes = [process.exitcode for process in train(recipe, 2, kills=(killed, kill))]
    assert exit_codes[killed] == -signal.SIGKILL
    assert exit_codes[1 - killed] not in (0, None)
    *unfinished, last = sorted((tmp_path / "several" / "run" / "checkpoints").iterdir())
    assert last.name == "step_000002"
    assert all(map(is_temporary, unfinished))  # of the last one
    count = 3 if killed == 0 else 1
    recipe = make_recipe(policy, tmp_path / "several", **changes, train__sharding="fsdp2" if killed == 0 else "ddp")
    assert [process.exitcode for process in train(recipe, count, resume=True)] == [0] * count
    assert_close_runs(tmp_path / "several" / "run", tmp_path / "one" / "run", tolerance=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("sharding", ["ddp", "fsdp2"])
def test_two_devices_with_nccl_learn_what_one_learns(policy: Path, tmp_path: Path, sharding: str) -> None:
    """On CUDA tokens are equal up to rounding only, so that figures of the first step are compared, loosely."""
    changes = {**SHORT, "device": "cuda", "model__dtype": "bfloat16", "train__num_steps": 1}
    one = train(make_recipe(policy, tmp_path / "one", **changes), 1)
    two = train(make_recipe(policy, tmp_path / "two", **changes, train__sharding=sharding), 2)
    assert [process.exitcode for process in (*one, *two)] == [0, 0, 0]
    first, second = (learned_rows(tmp_path / name / "run")[1] for name in ("one", "two"))
    for name in ("reward/mean", "length/mean", "grad_norm", "logprob_difference/mean"):
        assert second[name] == pytest.approx(first[name], rel=0.3, abs=0.05), name


LOADS = [(trainer, "load_task"), (build, "build_engine"), (trainer, "load_state")]


def errors_of_a_start(ranks: Ranks, recipe: Recipe) -> list[str]:
    """Runs on each rank."""
    found = []
    for module, name in LOADS:
        with pytest.MonkeyPatch.context() as patch:
            if ranks.index == 1:
                patch.setattr(module, name, no_file)
            with (
                pytest.raises((ValueError, RankError), match=r".") as caught,
                Trainer(recipe, ranks, resume=True),
            ):
                pass
        found.append(str(caught.value))
    with pytest.raises((ValueError, RankError), match=r"--resume continues|already") as caught:
        Trainer(recipe, ranks)  # the folder is there
    return [*found, f"{caught.type.__name__}"]


def no_file(*_: Any, **__: Any) -> NoReturn:
    raise ValueError("no such file on this machine")


def test_an_error_of_one_rank_at_the_start_is_one_of_all(policy: Path, tmp_path: Path) -> None:
    """The others must not wait for its part of the weights; nor does the state of the optimizer need it."""
    once = {**SHORT, "train__num_steps": 1, "eval__before_and_after": False}
    run_training(make_recipe(policy, tmp_path, **once))
    recipe = make_recipe(policy, tmp_path, **{**once, **SHARDED, "train__num_steps": 2})
    found = run_ranks(2, errors_of_a_start, recipe)
    message = "no such file on this machine"
    first, second = [f"rank 1 of 2: {message}"] * len(LOADS), [message] * len(LOADS)
    assert found == [[*first, "ValueError"], [*second, "RankError"]]
