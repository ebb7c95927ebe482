"""The benchmark of whole training steps: same learning for all, epochs apart, and what its tables say."""

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from bench_cases import REPEATER
from tiny_run import make_policy, make_recipe
from typer.testing import CliRunner, Result

from srtrl.bench.train_run import TrainingRun, change_places, check_same, seconds_grid
from srtrl.cli import app
from srtrl.recipe import Recipe

RUNS = [("none at 4", 4), ("srt at 4", 4), ("none at 2", 2), ("ngram at 2", 2), ("srt at 2", 2)]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five steps of 4 prompts from a pool of 8: three epochs, the last a part."""
    folder = tmp_path_factory.mktemp("bench")
    made = make_recipe(make_policy(folder / "policy"), folder / "runs", train__num_steps=5)
    values = made.model_dump(mode="json")
    values["task"]["options"]["num_train"] = 8
    values["rewards"] = [{"name": "bench_cases:digit_share"}]
    (folder / "recipe.yaml").write_text(yaml.safe_dump(values))
    return folder / "recipe.yaml"


def bench(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["bench", "train", *(str(argument) for argument in arguments)])


def test_runs_take_turns_learn_the_same_and_leave_nothing_behind(recipe: Path, tmp_path: Path) -> None:
    files = ("--json", tmp_path / "bench.json", "--write-docs", tmp_path / "docs.md")
    result = bench(recipe, "--drafters", f"none,{REPEATER}", "--slots", "4,2", "--control", *files)
    assert result.exit_code == 0, result.stderr
    runs = json.loads((tmp_path / "bench.json").read_text())["runs"]
    names = ["none", REPEATER, "none, again"]
    assert [(run["drafter"], run["slots"]) for run in runs] == [(name, slots) for slots in (4, 2) for name in names]
    for run in runs:
        assert [row["step"] for row in run["rows"]] == [1, 2, 3, 4, 5]
        learned = [[row["loss"], row["reward/mean"], row["tokens/response"]] for row in run["rows"]]
        assert learned == [[row["loss"], row["reward/mean"], row["tokens/response"]] for row in runs[0]["rows"]]
        assert all(0 < row["time/rollout"] < row["time/step"] for row in run["rows"])
    assert any(row["engine/verified_per_decode_step"] > 1 for row in runs[1]["rows"])
    assert not (recipe.parent / "runs").exists()
    assert (tmp_path / "docs.md").read_text().endswith(result.stdout)
    assert "`none` is fastest at " in result.stdout
    assert [line for line in result.stdout.splitlines() if line.startswith("| 2 | 3 | none | 1 |")]
    steps = [line.split("  ")[1] for line in result.stderr.splitlines()]
    warm_up, first, second = steps[:6], steps[6:12], steps[12:18]
    assert [line.partition(", step")[0] for line in first] == [line.partition(", step")[0] for line in warm_up]
    assert [line.partition(", step")[0] for line in second] == [line.partition(", step")[0] for line in first][::-1]


def test_runs_of_equal_slots_change_trainers_and_take_their_drafter_along() -> None:
    """So that no run has the better memory: each has every trainer twice, once in each order."""
    runs = [TrainingRun(name, SimpleNamespace(rollout=SimpleNamespace(slots=slots))) for name, slots in RUNS]  # type: ignore[arg-type]
    trainers: list[Any] = [
        SimpleNamespace(parts=SimpleNamespace(engine=SimpleNamespace(speculation=name))) for name, _ in RUNS
    ]
    speculations: list[Any] = [name for name, _ in RUNS]
    seen: Counter[tuple[str, int, int]] = Counter()
    for step in range(1, 13):
        pairs: list[Any] = change_places(runs, trainers, speculations, step)
        assert [run for run, _ in pairs] == runs
        for run, trainer in pairs:
            assert trainer.parts.engine.speculation == run.name
            seen[run.name, trainers.index(trainer), step % 2] += 1
    of_four = {("none at 4", 0), ("none at 4", 1), ("srt at 4", 0), ("srt at 4", 1)}
    of_two = {(name, place) for name, slots in RUNS for place in (2, 3, 4) if slots == 2}
    assert {(name, place) for name, place, _ in seen} == of_four | of_two
    assert {seen[name, place, order] for name, place in of_four for order in (0, 1)} == {3}
    assert {seen[name, place, order] for name, place in of_two for order in (0, 1)} == {2}


def test_overrides_reach_the_recipe_and_the_slots_are_its_own(recipe: Path, tmp_path: Path) -> None:
    result = bench(recipe, "train.num_steps=2", "rollout.slots=3", "--json", tmp_path / "bench.json")
    assert result.exit_code == 0, result.stderr
    runs = json.loads((tmp_path / "bench.json").read_text())["runs"]
    assert [(run["drafter"], run["slots"], len(run["rows"])) for run in runs] == [("none", 3, 2), ("srt", 3, 2)]
    assert "is fastest at" not in result.stdout


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("--drafters", "nome"), "--drafters: `nome` is not in srtrl/drafters/, did you mean"),
        (("--slots", "0"), "--slots: expected counts like 8,32,128, found '0'"),
        (("train.num_stpes=2",), "train.num_stpes"),
        (("rollout.drafter=ngram",), "override `rollout.drafter=ngram`: the drafters are those of --drafters"),
        (("rollout.slots=3", "--slots", "4"), "override `rollout.slots=3`: the slots are those of --slots"),
        (("train.checkpoint_every=2",), "override `train.checkpoint_every=2`: bench train keeps no checkpoint"),
        (("eval.every_steps=2",), "override `eval.every_steps=2`: bench train sets that itself"),
        (("--json", "nowhere/x.json"), "--json: there is no folder nowhere"),
    ],
)
def test_mistakes_are_named(recipe: Path, arguments: tuple[str, ...], error: str) -> None:
    result = bench(recipe, *arguments)
    assert result.exit_code == 2
    assert error in result.stderr


def run_of(recipe: Recipe, name: str, seconds: list[float], *, loss: float = 1.0) -> TrainingRun:
    rows = [
        {"step": index + 1, "data/epoch": index / 2, "time/rollout": value, "time/step": value + 1, "loss": loss}
        | {
            "tokens/response": 100,
            "engine/tokens": 100.0,
            "engine/tokens_per_decode_step": 2.0,
            "engine/verified_per_decode_step": 3.0,
        }
        for index, value in enumerate(seconds)
    ]
    return TrainingRun(name, recipe, rows)


def test_tables_add_up_seconds_and_compare_pairs_of_steps(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path, tmp_path, rollout__slots=8)
    runs = [run_of(recipe, "none", [2.0, 4.0, 3.0]), run_of(recipe, "srt", [1.0, 2.0, 6.0])]
    lines = seconds_grid(runs, "Epochs", by_epoch=True).to_markdown()
    assert lines[4:] == [
        "| 8 | 1 | none | 2 | 6.00 | 8.00 | 30.000 | 2.00 | 3.00 |  |  |",
        "| 8 | 1 | srt | 2 | 3.00 | 5.00 | 15.000 | 2.00 | 3.00 | 2.000x as fast (2.000 to 2.000) | "
        "1.58x as fast (0.81 to 3.09) |",
        "| 8 | 2 | none | 1 | 3.00 | 4.00 | 30.000 | 2.00 | 3.00 |  |  |",
        "| 8 | 2 | srt | 1 | 6.00 | 7.00 | 60.000 | 2.00 | 3.00 | 0.50x as fast | 0.57x as fast |",
    ]
    (*_, last) = seconds_grid(runs, "All", by_epoch=False).to_markdown()
    assert last.startswith("| 8 | srt | 3 | 9.00 | 12.00 | 30.000 | 2.00 | 3.00 | 1.26x as fast (")


def test_a_run_that_learns_something_else_is_caught(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path, tmp_path)
    check_same([run_of(recipe, "none", [2.0]), run_of(recipe, "srt", [1.0])])
    with pytest.raises(ValueError, match=r"step 1: srt at 8 slots learned something else than none at 8, .*\(loss\)"):
        check_same([run_of(recipe, "none", [2.0]), run_of(recipe, "srt", [1.0], loss=2.0)])
