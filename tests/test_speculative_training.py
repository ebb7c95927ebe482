"""A training run learns the same with and without speculation: rewards, losses, weights, rollouts."""

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from tiny_run import assert_same_run, make_policy, make_recipe, train

from srtrl.drafters.srt import Drafter as SrtDrafter
from srtrl.metrics import read_metrics
from srtrl.trainer.checkpoint import latest_checkpoint
from srtrl.trainer.run_folder import read_timeline

SETTINGS: dict[str, dict[str, Any]] = {
    "srt": {},
    "fixed budget": {"rollout__draft_budget": 8},
    "every run-ahead": {
        "rollout__draft_budget": 8,
        "rollout__run_ahead_max_slowdown": 1e9,
        "rollout__slots": 13,
    },
    "no run-ahead": {"rollout__draft_budget": 8, "rollout__run_ahead": "off", "rollout__slots": 5},
    "history": {"rollout__drafter": "history", "rollout__draft_budget": 8},
}


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_policy(tmp_path_factory.mktemp("model") / "policy")


@pytest.fixture(scope="module")
def plain(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    recipe = make_recipe(policy, tmp_path_factory.mktemp("plain"), rollout__drafter="none", train__num_steps=6)
    return train(recipe).folder


@pytest.mark.parametrize("name", SETTINGS)
def test_speculation_learns_the_same(name: str, policy: Path, plain: Path, tmp_path: Path) -> None:
    folder = train(make_recipe(policy, tmp_path, train__num_steps=6, **SETTINGS[name])).folder
    assert_same_run(folder, plain)
    later = [row for row in read_metrics(folder / "metrics.jsonl") if row["step"] >= 4]  # 10 prompts, 4 a step
    if name != "srt":  # there the budget decides, by wall-clock time
        assert sum(row["engine/verified_per_decode_step"] for row in later) > 1.05 * len(later)
    if name == "every run-ahead":
        assert sum(row.get("engine/run_ahead_followed", 0) for row in later) > 0


def test_a_run_writes_timelines_and_its_rollouts_into_the_checkpoint(policy: Path, tmp_path: Path) -> None:
    folder = train(make_recipe(policy, tmp_path, rollout__draft_budget=4)).folder
    steps = read_timeline(folder / "timeline" / "step_000002.parquet")
    row = next(row for row in read_metrics(folder / "metrics.jsonl") if row["step"] == 2)
    assert len(steps) == row["engine/decode_steps"]
    assert sum(step.num_tokens for step in steps) == row["engine/tokens"] == row["tokens/response"]
    checkpoint = latest_checkpoint(folder / "checkpoints")
    assert checkpoint is not None
    drafter = SrtDrafter()
    drafter.load(checkpoint)
    rollouts = pq.read_table(folder / "rollouts" / "step_000004.parquet").to_pylist()
    kept = drafter.cache("train").rollouts(tuple(rollouts[0]["prompt_token_ids"]))
    assert rollouts[0]["token_ids"] in [one.tolist() for one in kept]
