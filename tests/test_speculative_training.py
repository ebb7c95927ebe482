"""A training run learns the same with and without speculation: rewards, losses, weights, rollouts."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tiny_run import assert_same_run, make_policy, make_recipe, train

from srtrl.metrics import read_metrics
from srtrl.rollout.collect import Collector, collect_rollouts
from srtrl.run.folder import check_run_folder
from srtrl.trainer import sampling
from srtrl.trainer.trainer import run_training
from srtrl.types import Request

SETTINGS: dict[str, dict[str, Any]] = {
    "srt": {},
    "every run-ahead": {
        "rollout__draft_budget": 8,
        "rollout__run_ahead_max_slowdown": 1e9,
        "rollout__slots": 13,
    },
    "no run-ahead": {"rollout__draft_budget": 8, "rollout__run_ahead_max_slowdown": None, "rollout__slots": 5},
    "history": {"rollout__drafter": "history", "rollout__draft_budget": 8},
    "ngram": {"rollout__drafter": "ngram", "rollout__draft_budget": 4, "rollout__run_ahead_max_slowdown": 1e9},
    "no drafts": {"rollout__draft_budget": 0, "rollout__run_ahead_max_slowdown": 1e9},
}


@pytest.fixture(scope="module")
def plain(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    recipe = make_recipe(policy, tmp_path_factory.mktemp("plain"), rollout__drafter="none", train__num_steps=6)
    return train(recipe).folder


@pytest.mark.parametrize("name", SETTINGS)
def test_speculation_learns_the_same(name: str, policy: Path, plain: Path, tmp_path: Path) -> None:
    folder = train(make_recipe(policy, tmp_path, train__num_steps=6, **SETTINGS[name])).folder
    assert_same_run(folder, plain)
    rows = {int(row["step"]): row for row in read_metrics(folder / "metrics.jsonl")}
    later = [rows[step] for step in (4, 5, 6)]  # 10 prompts, 4 in a step
    if name in ("every run-ahead", "no run-ahead", "history"):  # of "srt" the wall-clock time decides
        assert sum(row["engine/verified_per_decode_step"] for row in later) > 1.05 * len(later)
    if name == "every run-ahead":
        assert sum(row.get("engine/run_ahead_followed", 0) for row in later) > 0
    if name in ("no run-ahead", "ngram", "no drafts"):  # it is off, or nobody drafts from it
        assert {rows[step]["engine/run_ahead_rows"] for step in range(1, 7)} == {0}
        assert rows[2]["engine/tokens"] == rows[2]["tokens/response"]


def test_the_trainer_looks_one_step_ahead_and_says_what_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[tuple[list[Request], list[Request]]] = []

    def collect(engine: Any, collector: Collector, draws: Any) -> Any:
        assert collector.purpose == "train"
        steps.append((collector.requests(draws.draws), list(draws.run_ahead)))
        return collect_rollouts(engine, collector, draws)

    monkeypatch.setattr(sampling, "collect_rollouts", collect)
    recipe = make_recipe(
        make_policy(tmp_path / "policy"), tmp_path, train__num_steps=3, rollout__run_ahead_max_slowdown=100.0
    )
    run_training(recipe, resume=False, overwrite=False)
    changed = {"run_ahead_max_slowdown": 0.5, "draft_budget": 3}
    other = recipe.model_copy(update={"rollout": recipe.rollout.model_copy(update=changed)})
    check_run_folder(other, resume=True)  # all of these can change
    assert len(steps) == 3
    for (_, ahead), (following, _) in pairwise(steps):
        assert len(ahead) == 16
        assert sorted(ahead, key=lambda one: one.rng_key) == sorted(
            (replace(request, is_run_ahead=True) for request in following), key=lambda one: one.rng_key
        )
    assert steps[-1][1] == []  # the last step has no next one
