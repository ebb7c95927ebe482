"""Training runs in processes of their own, and on several ranks, each a process as a launcher starts it."""

import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from multiprocessing.process import BaseProcess
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from rank_cases import CONTEXT, free_port
from tiny_run import learned_rows

from srtrl.build import run_training
from srtrl.recipe.schema import Recipe
from srtrl.tasks.reward_input import RewardInput

Around = Callable[[], AbstractContextManager[None]]


def weight(sample: RewardInput) -> float:
    """A reward that no random number decides."""
    return sum(map(ord, sample.text)) % 7 / 7


def body(
    recipe: Recipe, variables: dict[str, str], resume: bool, prepare: Callable[[], None] | None, around: Around
) -> None:
    """A process; `variables`: of a rank, as the launcher starts it."""
    torch.set_num_threads(1)
    os.environ |= variables
    if prepare is not None:
        prepare()
    with around():
        run_training(recipe, resume=resume)


def start(
    recipe: Recipe,
    *,
    resume: bool = False,
    prepare: Callable[[], None] | None = None,
    around: Around = nullcontext,
    **variables: str,
) -> BaseProcess:
    """Train in a process of its own, forked from a server that has imported everything; `around` is entered there."""
    process = CONTEXT.Process(target=body, args=(recipe, variables, resume, prepare, around))
    process.start()
    return process


def finish(processes: Sequence[BaseProcess], timeout: float = 100) -> list[int | None]:
    """The exit codes; those that have none after `timeout` seconds are killed, and the test fails."""
    end = time.monotonic() + timeout
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
    hanging = [index for index, process in enumerate(processes) if process.exitcode is None]
    for index in hanging:
        processes[index].kill()
    assert not hanging, f"these processes hang: {hanging}"
    return [process.exitcode for process in processes]


def train_until_killed(recipe: Recipe, prepare: Callable[[], None]) -> None:
    """Train in a process of its own that is killed where `prepare` says."""
    assert finish([start(recipe, prepare=prepare)]) == [-signal.SIGKILL]


def train_on_ranks(
    recipe: Recipe,
    count: int,
    *,
    resume: bool = False,
    kills: tuple[int, Callable[[], None]] | None = None,
    around: Around = nullcontext,
    timeout: float = 100,
) -> list[BaseProcess]:
    """Train on `count` ranks until all have ended; `kills`: a rank that is killed, and what prepares that."""
    common = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    common["TORCHELASTIC_RUN_ID"] = "tests"  # as torchrun sets it: a signal that comes twice counts once
    processes = []
    for index in range(count):
        prepare = kills[1] if kills and kills[0] == index else None
        ranks = {"RANK": str(index), "LOCAL_RANK": str(index)}
        processes.append(start(recipe, resume=resume, prepare=prepare, around=around, **common, **ranks))
    finish(processes, timeout)
    return processes


def assert_close_runs(folder: Path, expected: Path, *, tolerance: float) -> None:
    """The same first rollouts, bit for bit, and metrics that differ by the order of sums.

    A draft head's learn set is parted by the place of a token within its rank, so that more than sums differs there.
    """
    rollouts = [pq.read_table(run / "rollouts" / "step_000001.parquet") for run in (folder, expected)]
    assert rollouts[0].drop(["advantage"]).equals(rollouts[1].drop(["advantage"]))
    for row, other in zip(learned_rows(folder), learned_rows(expected), strict=True):
        assert row.keys() == other.keys()
        for name, value in row.items():
            allowed = 0.1 if name.startswith("draft_head/") else tolerance
            assert value == pytest.approx(other[name], rel=allowed, abs=tolerance), (
                row["step"],
                name,
                value,
                other[name],
            )
