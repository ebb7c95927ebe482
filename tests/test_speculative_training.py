"""A training run learns the same with and without speculation: rewards, losses, weights, rollouts."""

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from tiny_run import make_policy, make_recipe

from srtrl.drafters.srt import Drafter as SrtDrafter
from srtrl.metrics import read_metrics
from srtrl.model.weights import load_model
from srtrl.trainer.checkpoint import latest_checkpoint
from srtrl.trainer.run_folder import read_timeline
from srtrl.trainer.trainer import run_training

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


def learned(folder: Path) -> tuple[list[dict[str, float]], list[torch.Tensor], list[dict[str, object]]]:
    """Metrics that may not depend on timing, weights, and rollouts of a run."""
    rows = [
        {name: value for name, value in row.items() if not name.startswith(("engine/", "time/")) and name != "time"}
        for row in read_metrics(folder / "metrics.jsonl")
    ]
    checkpoint = latest_checkpoint(folder / "checkpoints")
    assert checkpoint is not None
    weights: list[torch.Tensor] = list(load_model(str(checkpoint), dtype=torch.float32, device="cpu").parameters())
    rollouts = [row for file in sorted((folder / "rollouts").iterdir()) for row in pq.read_table(file).to_pylist()]
    return rows, weights, rollouts


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_policy(tmp_path_factory.mktemp("model") / "policy")


@pytest.fixture(scope="module")
def plain(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    recipe = make_recipe(policy, tmp_path_factory.mktemp("plain"), rollout__drafter="none", train__num_steps=6)
    return run_training(recipe).folder


@pytest.mark.parametrize("name", SETTINGS)
def test_speculation_learns_the_same(name: str, policy: Path, plain: Path, tmp_path: Path) -> None:
    folder = run_training(make_recipe(policy, tmp_path, train__num_steps=6, **SETTINGS[name])).folder
    expected_rows, expected_weights, expected_rollouts = learned(plain)
    rows, weights, rollouts = learned(folder)
    assert rows == expected_rows
    assert all(torch.equal(a, b) for a, b in zip(weights, expected_weights, strict=True))
    assert rollouts == expected_rollouts
    later = [row for row in read_metrics(folder / "metrics.jsonl") if row["step"] >= 4]  # 10 prompts, 4 a step
    if name != "srt":  # there the budget decides, by the clock
        assert sum(row["engine/verified_per_decode_step"] for row in later) > 1.05 * len(later)
    if name == "every run-ahead":
        assert sum(row.get("engine/run_ahead_followed", 0) for row in later) > 0


def test_a_run_writes_timelines_and_its_rollouts_into_the_checkpoint(policy: Path, tmp_path: Path) -> None:
    folder = run_training(make_recipe(policy, tmp_path, rollout__draft_budget=4)).folder
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
