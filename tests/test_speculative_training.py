"""Run-aheads of a training run: off where nothing drafts from them, else exactly the requests of the next step.

That a run learns the same with and without drafts and run-aheads is in `test_promises.py`.
"""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tiny_run import assert_same_run, make_recipe, train

from srtrl.engine.engine import Engine
from srtrl.features.run_ahead import RunAhead
from srtrl.metrics import read_metrics
from srtrl.rollout.collect import Collector, collect_rollouts
from srtrl.run.folder import check_run_folder
from srtrl.trainer import sampling
from srtrl.types import Request

WITHOUT_RUN_AHEAD: dict[str, dict[str, Any]] = {
    "off": {"rollout__draft_budget": 8, "rollout__run_ahead_max_slowdown": None, "rollout__slots": 5},
    "history": {
        "rollout__drafter": "history",
        "rollout__draft_budget": 8,
        "rollout__run_ahead_max_slowdown": None,
    },
    "ngram": {"rollout__drafter": "ngram", "rollout__draft_budget": 4, "rollout__run_ahead_max_slowdown": 1e9},
    "no drafts": {"rollout__draft_budget": 0, "rollout__run_ahead_max_slowdown": 1e9},
}


@pytest.mark.parametrize("name", WITHOUT_RUN_AHEAD)
def test_without_run_aheads_only_samples_are_decoded(
    name: str, policy: Path, finished: Callable[..., Path], tmp_path: Path
) -> None:
    """They are off, or nothing drafts from them."""
    folder = train(make_recipe(policy, tmp_path, **WITHOUT_RUN_AHEAD[name])).folder
    assert_same_run(folder, finished())
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if row["step"] > 0]
    assert {row["engine/background_rows"] for row in rows} == {0}
    assert rows[1]["engine/tokens"] == rows[1]["tokens/response"]
    if name in ("off", "history"):  # in the last steps some prompts come again
        assert sum(row["engine/verified_per_decode_step"] for row in rows[2:]) > 1.05 * 2


def test_the_trainer_looks_one_step_ahead_and_says_what_comes(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[tuple[list[Request], list[Request]]] = []
    early: list[Request] = []

    def collect(engine: Engine, collector: Collector, draws: Any) -> Any:
        assert collector.purpose == "train"
        steps.append((collector.requests(draws.draws), [*early]))
        early.clear()
        return collect_rollouts(engine, collector, draws)

    monkeypatch.setattr(sampling, "collect_rollouts", collect)
    monkeypatch.setattr(RunAhead, "add", lambda _, requests: early.extend(requests))
    recipe = make_recipe(policy, tmp_path, train__num_steps=3, rollout__run_ahead_max_slowdown=100.0)
    train(recipe)
    changed = {"run_ahead_max_slowdown": 0.5, "draft_budget": 3}
    other = recipe.model_copy(update={"rollout": recipe.rollout.model_copy(update=changed)})
    check_run_folder(other, resume=True)  # all of these can change
    assert len(steps) == 3
    for (_, ahead), (following, _) in pairwise(steps):
        assert len(ahead) == 16
        assert ahead == following
    assert steps[-1][1] == []  # the last step has no next one
