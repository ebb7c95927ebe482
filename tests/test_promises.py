"""A run learns the same, whatever disturbs it: a table of recipes and disturbances.

The runs are equal bit for bit (on several ranks up to the order of sums). A few cells are tested by default, all of
them by `make test-slow`. Below the table are kills at random times, what is particular to tools, and that a rank that
is interrupted or killed ends all.
"""

import os
import random
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import chain, product
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NoReturn

import pyarrow.parquet
import pytest
import torch
from environment_cases import LEDGER
from rank_cases import CONTEXT, FORKED, run_ranks
from rank_runs import assert_close_runs, finish, start, train_on_ranks, train_until_killed
from tiny_run import DAPO, EASY, HEAD, LUCKY, PAGE_GIB, PPO, assert_same_run, learned_rows, make_recipe, open_run, train

from srtrl import build, ranks
from srtrl.environments.base import EnvironmentBase, Step, Turn
from srtrl.files import is_temporary
from srtrl.metrics import read_metrics
from srtrl.ranks import RankError
from srtrl.recipe.schema import Recipe
from srtrl.run.folder import open_run_folder
from srtrl.run.step_metrics import describe_step, run_figures
from srtrl.run.steps import list_checkpoints
from srtrl.trainer.optimizer import MasterAdamW
from srtrl.trainer.sampling import RolloutContext
from srtrl.trainer.trainer import Trainer

# --- Where SIGKILL ends a run in a process of its own -----------------------------------------------------------------


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


# --- The table --------------------------------------------------------------------------------------------------------

UNEVEN: dict[str, Any] = {
    "seed": 10,
    "rollout__max_new_tokens": 40,
    "rollout__stop_strings": list("aeiouxyz012345"),
    "train__learning_rate": 1e-3,
    "rewards": [{"name": "rank_runs:weight"}],
}
"""Lengths that differ much."""
RECOMPUTE = {"old_logprobs": "recompute", "importance": {"mode": "token_truncate", "max": 2.0}}
TOOLS: dict[str, Any] = {**UNEVEN, "rollout__environment": LEDGER}
DYNAMIC: dict[str, Any] = {
    "algorithm": {**RECOMPUTE, "filters": ["test_promises:is_kept"]},
    "rollout__dynamic_sampling": True,
}
PARTIAL: dict[str, Any] = {
    **UNEVEN,
    "algorithm": RECOMPUTE,
    "rollout__mode": "partial",
    "rollout__min_complete": 0.5,
}
SPEC_RL: dict[str, Any] = {**UNEVEN, "algorithm": RECOMPUTE, "rollout__mode": "spec_rl", "rollout__lenience": 1.0}
RECIPES: dict[str, dict[str, Any]] = {
    "grpo": {},
    "ppo": {**PPO, "model__dtype": "bfloat16"},
    "dapo": DAPO,
    "tools": {**TOOLS, "algorithm": RECOMPUTE},
    "dynamic tools": TOOLS | DYNAMIC,
    "uneven": {**UNEVEN, "algorithm": RECOMPUTE},
    "dynamic": UNEVEN | DYNAMIC,
    "partial": PARTIAL,
    "spec_rl": SPEC_RL,
    "lora": {"model__lora": {"rank": 4}},
    "teacher": {"algorithm": {"teacher": {"coefficient": 0.3}}},  # the policy at its start
    "head": HEAD,
    "mixture": {"task": [EASY, LUCKY]},
    "skip_silent": {
        "task__name": "tiny_run:LuckyTask",
        "task__options__num_train": 6,
        "rewards": [{"name": "correct"}],
        "data__order": "skip_silent",
    },
}
"""Four steps; ten prompts, 4 in a step: in the third some come again, with history."""

SETTINGS: dict[str, dict[str, Any]] = {
    "three slots": {"rollout__slots": 3},
    "few pages": {"rollout__slots": 16, "rollout__kv_memory_gib": 7 * PAGE_GIB},
    "no run-ahead": {
        "rollout__draft_budget": 8,
        "rollout__run_ahead_max_slowdown": None,
        "rollout__slots": 5,
    },
    "a draft head": {"rollout__draft_head": HEAD["rollout__draft_head"], "rollout__draft_budget": 6},
    "no drafts": {"rollout__drafter": "none", "rollout__draft_head": None, "rollout__slots": 64},
    "more evaluation and logging": {"eval__every_steps": 1, "log__trackers": ["tensorboard"], "rollout__slots": 3},
    "every run-ahead": {
        "rollout__draft_budget": 8,
        "rollout__run_ahead_max_slowdown": 1e9,
        "rollout__slots": 40,
    },
}
LIMITS: dict[str, dict[str, Any]] = {
    "limit of partial": {"rollout__mode": "partial", "rollout__min_complete": 1.0},
    "limit of spec_rl": {"rollout__mode": "spec_rl", "rollout__lenience": 0.0},
}
"""There the modes are on-policy."""
KILLS: dict[str, Callable[[], None]] = {
    "killed in the rollout": partial(kill_in_rollout, 3, 5),
    "killed in the update": partial(kill_in_update, 3, 3),
    "killed in the checkpoint": partial(die_at_call, "srtrl.run.checkpoint._write_manifest", 2),  # all else is there
}
OTHER_KILLS: dict[str, Callable[[], None]] = {
    # all of step 3 is decoded; the evaluations before and after step 2 call `collect` too
    "killed in grading": partial(die_at_call, "srtrl.tasks.grading.Grader.collect", 5),
    "killed before the checkpoint": partial(die_at_call, "srtrl.trainer.trainer.save_checkpoint", 2),
    "killed in the first step": partial(die_at_call, "torch.optim.AdamW.step", 3),  # there is no checkpoint yet
    # the last checkpoint is complete; each clears its place first, the second deletes the first
    "killed in the deletion": partial(die_at_call, "shutil.rmtree", 3),
    "killed in the rollout file": partial(die_at_call, "srtrl.trainer.trainer.write_rollouts", 3),
}
RANKS: dict[str, dict[str, Any]] = {"two ranks": {}, "two sharded ranks": {"train__sharding": "fsdp2"}}
SHORT: dict[str, Any] = {
    "rewards": [{"name": "rank_runs:weight"}],
    "train__num_steps": 2,
    "train__learning_rate": 1e-4,
    "task__options__num_train": 4,
    "eval__num_problems": 5,
}
"""Options of runs on several ranks, whose sums differ: the second step has the prompts of the first."""
SHORT_OF: dict[str, dict[str, Any]] = {
    "ppo": SHORT | {"critic": {"learning_rate": 0.001}, "rewards": [{"name": "test_token_rewards:by_text"}]},
    "mixture": {name: value for name, value in SHORT.items() if not name.startswith("task")},  # it has several
}

DEFAULT = {
    ("grpo", "every run-ahead"),
    ("grpo", "no run-ahead"),
    ("grpo", "killed in the checkpoint"),
    ("ppo", "no drafts"),
    ("ppo", "killed in the update"),
    ("dapo", "every run-ahead"),
    ("dapo", "killed in the rollout"),
    ("tools", "every run-ahead"),
    ("dynamic tools", "killed in the update"),
    ("uneven", "limit of partial"),
    ("uneven", "more evaluation and logging"),
    ("dynamic", "limit of spec_rl"),
    ("partial", "three slots"),
    ("partial", "killed in the checkpoint"),
    ("spec_rl", "few pages"),
    ("spec_rl", "two ranks"),
    ("lora", "killed in the update"),
    ("teacher", "killed in the update"),
    ("head", "no drafts"),
    ("mixture", "every run-ahead"),
    ("mixture", "killed in the rollout"),
    ("skip_silent", "every run-ahead"),
    ("skip_silent", "killed in the rollout"),
    ("ppo", "two sharded ranks"),
    ("mixture", "two ranks"),
    ("skip_silent", "two ranks"),
}
ALONE: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(LIMITS, ("uneven", "dynamic")),
    **dict.fromkeys(OTHER_KILLS, ("grpo",)),
    "a draft head": tuple(RECIPES.keys() - {"head"}),
    "more evaluation and logging": ("uneven", "dapo"),  # rewards of others draw from the global generator
    "two sharded ranks": tuple(RECIPES.keys() - {"head", "mixture"}),
}
"""Disturbances of these recipes alone."""


def is_kept(rewards: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """A filter that drops some groups by a hash of their rewards."""
    return (rewards.sum(dim=1) * 7).round() % 3 > 0


def cells(disturbances: dict[str, Any]) -> pytest.MarkDecorator:
    """All recipes with these disturbances; `slow` but for those of `DEFAULT`."""
    rows = []
    for recipe, disturbance in product(RECIPES, disturbances):
        if recipe in ALONE.get(disturbance, RECIPES):
            marks = [] if (recipe, disturbance) in DEFAULT else [pytest.mark.slow]
            rows.append(pytest.param(recipe, disturbance, marks=marks, id=f"{recipe}, {disturbance}"))
    return pytest.mark.parametrize(("recipe", "disturbance"), rows)


@pytest.fixture
def undisturbed(finished: Callable[..., Path]) -> Callable[..., Path]:
    """`finished`, of a run that learns something: else equality would be cheap."""

    def run(**changes: Any) -> Path:
        folder = finished(**changes)
        rows = [row for row in read_metrics(folder / "metrics.jsonl") if row["step"] > 0]
        assert len({row["reward/mean"] for row in rows}) > 1
        assert all(row["grad_norm"] > 0 for row in rows[1:])
        return folder

    return run


def test_the_default_cells_are_in_the_table() -> None:
    assert {recipe for recipe, _ in DEFAULT} == RECIPES.keys()
    assert {disturbance for _, disturbance in DEFAULT} <= {*SETTINGS, *LIMITS, *KILLS, *RANKS}


@cells(SETTINGS | LIMITS)
def test_settings_that_change_nothing(
    recipe: str, disturbance: str, policy: Path, undisturbed: Callable[..., Path], tmp_path: Path
) -> None:
    """Settings of the decoder, and of the modes at their limits."""
    changes = (SETTINGS | LIMITS)[disturbance]
    folder = train(make_recipe(policy, tmp_path, **RECIPES[recipe] | changes)).folder
    alone = "off_policy/" if disturbance in LIMITS else "eval/" if "evaluation" in disturbance else "draft_head/"
    assert_same_run(folder, undisturbed(**RECIPES[recipe]), beside=(alone,))  # metrics of one of the runs
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if row["step"] > 0]
    if disturbance == "every run-ahead":
        assert sum(row["engine/text_tokens_repeated"] for row in rows) > 0
    if disturbance in ("every run-ahead", "no run-ahead"):
        assert rows[-1]["engine/verified_per_decode_step"] > 1.05
    if disturbance == "few pages":
        assert sum(row["engine/preemptions"] for row in rows) > 0
    if disturbance in ("no run-ahead", "no drafts"):
        assert {row["engine/run_ahead_rows"] for row in rows} == {0}
    if disturbance == "no drafts":
        assert {row["engine/tokens_per_decode_step"] for row in rows} == {1}
        said = [describe_step(rows[-1]), *chain(*run_figures(rows).items())]
        assert not [words for words in said if re.search(r"draft|per decode", words)]
    if disturbance == "more evaluation and logging":
        assert all("eval/accuracy" in row for row in rows)
        assert list((folder / "tensorboard").rglob("events.out.tfevents.*"))


@FORKED
@cells(KILLS | OTHER_KILLS)
def test_killed_and_resumed_equals_uninterrupted(
    recipe: str, disturbance: str, policy: Path, undisturbed: Callable[..., Path], tmp_path: Path
) -> None:
    """Resumed in another process than the one that was killed."""
    num_kept = {"train__keep_checkpoints": 1} if disturbance == "killed in the deletion" else {}
    changed = make_recipe(policy, tmp_path, **RECIPES[recipe], **num_kept)
    kill = (KILLS | OTHER_KILLS)[disturbance]
    if recipe == "dapo" and disturbance == "killed in the rollout":
        kill = partial(kill_in_rollout, 3, 18)  # more than a batch: some groups were replaced, others are open
    train_until_killed(changed, kill)
    if disturbance in KILLS:
        assert (tmp_path / "run" / "checkpoints" / "step_000002").is_dir()
        assert not (tmp_path / "run" / "checkpoints" / "step_000004").exists()
    train(changed, resume=True)
    assert_same_run(tmp_path / "run", undisturbed(**RECIPES[recipe]))


@FORKED
@cells(RANKS)
def test_several_ranks_learn_what_one_process_learns(
    recipe: str, disturbance: str, policy: Path, finished: Callable[..., Path], tmp_path: Path
) -> None:
    one = RECIPES[recipe] | SHORT_OF.get(recipe, SHORT)
    several = make_recipe(policy, tmp_path, **one | RANKS[disturbance])
    assert [process.exitcode for process in train_on_ranks(several, 2)] == [0, 0]
    assert_close_runs(tmp_path / "run", finished(**one), tolerance=1e-5)
    last = read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]
    if "off_policy/stale_share" in last:
        assert last["off_policy/stale_share"] > 0


@FORKED
@pytest.mark.parametrize("counts", [(2, 1), pytest.param((1, 2), marks=pytest.mark.slow)])
def test_lora_resumes_sharded_or_not(
    counts: tuple[int, int], policy: Path, finished: Callable[..., Path], tmp_path: Path
) -> None:
    """The reference is the policy with the weights W0, of which each rank has a part."""
    changes = {**SHORT, "model__lora": {"rank": 4}, "eval__before_and_after": False}
    for num_steps, count in enumerate(counts, start=1):
        steps = {"train__num_steps": num_steps, "train__sharding": "fsdp2" if count > 1 else "ddp"}
        recipe = make_recipe(policy, tmp_path, **changes | steps)
        assert [one.exitcode for one in train_on_ranks(recipe, count, resume=num_steps > 1)] == [0] * count
    assert_close_runs(tmp_path / "run", finished(**changes), tolerance=1e-5)


# --- Other kills ------------------------------------------------------------------------------------------------------


@FORKED
@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpo", "mixture", "skip_silent"])
def test_killed_at_random_times_again_and_again(
    name: str, policy: Path, finished: Callable[..., Path], tmp_path: Path
) -> None:
    recipe = make_recipe(policy, tmp_path, **RECIPES[name])
    generator = random.Random(time.time_ns())
    for _ in range(12):
        process = start(recipe, resume=True)
        time.sleep(generator.uniform(0.2, 3.0))
        process.kill()
        process.join(60)
    assert finish([start(recipe, resume=True)]) == [0]
    assert_same_run(tmp_path / "run", finished(**RECIPES[name]))


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


@FORKED
def test_killed_in_a_tool_call_and_resumed_repeats_what_was_said(policy: Path, tmp_path: Path) -> None:
    """Even of a tool that is not deterministic: what it said before is read from the run's folder."""
    changes = {
        "rollout__environment": {"name": "test_promises:Oracle", "max_turns": 3, "max_observation_tokens": 16},
        "rollout__stop_strings": ["1", "3", "5", "7", "+", "(", "A"],
        "rollout__max_new_tokens": 40,
        "rewards": [{"name": "environment"}],
        "eval": {"before_and_after": False},
    }
    recipe = make_recipe(policy, tmp_path, **changes)
    run = tmp_path / "run"
    done = run / "rollouts" / "step_000003.parquet"  # and after step 3 there is no checkpoint
    train_until_killed(recipe, partial(setattr, Oracle, "dies_after", done))
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


@FORKED
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


@FORKED
def test_a_signal_to_one_rank_ends_all_after_the_step(
    policy: Path, finished: Callable[..., Path], tmp_path: Path
) -> None:
    """Also if it comes twice within a moment."""
    recipe = make_recipe(policy, tmp_path, **SHORT)
    processes = train_on_ranks(recipe, 2, kills=(1, interrupt_twice))
    assert [process.exitcode for process in processes] == [0, 0]
    assert [path.name for path in list_checkpoints(tmp_path / "run" / "checkpoints")] == ["step_000001"]
    train(recipe, resume=True)
    assert_close_runs(tmp_path / "run", finished(**SHORT), tolerance=1e-5)


@FORKED
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


@FORKED
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


@FORKED
def test_an_error_of_one_rank_at_the_start_is_one_of_all(policy: Path, tmp_path: Path) -> None:
    """The others must not wait for its part of the weights; nor does the state of the optimizer need it."""
    once = {**SHORT, "train__num_steps": 1, "eval__before_and_after": False}
    train(make_recipe(policy, tmp_path, **once))
    sharded = {"train__sharding": "fsdp2", "train__checkpoint_every": 1, "train__num_steps": 2}
    recipe = make_recipe(policy, tmp_path, **once | sharded)
    found = run_ranks(2, errors_of_a_start, recipe)
    message = "no such file on this machine"
    first, second = [f"rank 1 of 2: {message}"] * len(LOADS), [message] * len(LOADS)
    assert found == [[*first, "ValueError"], [*second, "RankError"]]
