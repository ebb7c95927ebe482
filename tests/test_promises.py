"""What is learned is the same, whatever disturbs a run: a table of recipes and disturbances.

The runs are equal bit for bit (on several ranks up to the order of sums). A few cells are tested by default, all of
them by `make test-slow`.
"""

from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from environment_cases import LEDGER
from killed_runs import die_at_call, kill_in_rollout, kill_in_update
from rank_cases import FORKED
from rank_runs import assert_close_runs, train_on_ranks, train_until_killed
from tiny_run import DAPO, HEAD, PAGE_GIB, PPO, assert_same_run, make_recipe, train

from srtrl.metrics import read_metrics

UNEVEN: dict[str, Any] = {
    "seed": 10,
    "rollout__max_new_tokens": 40,
    "rollout__stop_strings": list("aeiouxyz012345"),
    "train__learning_rate": 1e-3,
    "rewards": [{"name": "rank_runs:weight"}],
}
"""Lengths that differ much."""
RECOMPUTE = {"old_logprobs": "recompute", "importance_cap": 2.0}
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
    "head": HEAD,
}
"""Four steps; ten prompts, 4 in a step: in the third some come again, with history."""

SETTINGS: dict[str, dict[str, Any]] = {
    "three slots": {"rollout__slots": 3},
    "few pages": {"rollout__slots": 16, "rollout__kv_memory_gib": 7 * PAGE_GIB},
    "history alone": {
        "rollout__drafter": "history",
        "rollout__draft_budget": 8,
        "rollout__run_ahead_max_slowdown": None,
        "rollout__slots": 5,
    },
    "a draft head": {"rollout__draft_head": HEAD["rollout__draft_head"], "rollout__draft_budget": 6},
    "no drafts": {"rollout__drafter": "none", "rollout__draft_head": None, "rollout__slots": 64},
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
"""Of runs on several ranks, whose sums differ: the second step has the prompts of the first."""

DEFAULT = {
    ("grpo", "every run-ahead"),
    ("grpo", "history alone"),
    ("grpo", "killed in the checkpoint"),
    ("ppo", "no drafts"),
    ("ppo", "killed in the update"),
    ("dapo", "every run-ahead"),
    ("dapo", "killed in the rollout"),
    ("tools", "every run-ahead"),
    ("dynamic tools", "killed in the update"),
    ("uneven", "limit of partial"),
    ("dynamic", "limit of spec_rl"),
    ("partial", "three slots"),
    ("partial", "killed in the checkpoint"),
    ("spec_rl", "few pages"),
    ("spec_rl", "two ranks"),
    ("lora", "killed in the update"),
    ("head", "no drafts"),
    ("ppo", "two sharded ranks"),
}
ALONE: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(LIMITS, ("uneven", "dynamic")),
    **dict.fromkeys(OTHER_KILLS, ("grpo",)),
    "a draft head": tuple(RECIPES.keys() - {"head"}),
    "two sharded ranks": tuple(RECIPES.keys() - {"lora", "head"}),
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
    """Of the decoder, and of the modes at their limits."""
    changes = (SETTINGS | LIMITS)[disturbance]
    folder = train(make_recipe(policy, tmp_path, **RECIPES[recipe] | changes)).folder
    beside = ("off_policy/",) if disturbance in LIMITS else ("draft_head/",)  # of what one of the runs does not have
    assert_same_run(folder, undisturbed(**RECIPES[recipe]), beside=beside)
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if row["step"] > 0]
    if disturbance == "every run-ahead":
        assert sum(row["engine/text_tokens_repeated"] for row in rows) > 0
    if disturbance in ("every run-ahead", "history alone"):
        assert rows[-1]["engine/verified_per_decode_step"] > 1.05
    if disturbance == "few pages":
        assert sum(row["engine/preemptions"] for row in rows) > 0
    if disturbance in ("history alone", "no drafts"):
        assert {row["engine/background_rows"] for row in rows} == {0}


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
    one = RECIPES[recipe] | SHORT | ({"critic": {"learning_rate": 0.001}} if recipe == "ppo" else {})
    several = make_recipe(policy, tmp_path, **one | RANKS[disturbance])
    assert [process.exitcode for process in train_on_ranks(several, 2)] == [0, 0]
    assert_close_runs(tmp_path / "run", finished(**one), tolerance=1e-5)
    last = read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]
    if "off_policy/stale_share" in last:
        assert last["off_policy/stale_share"] > 0
