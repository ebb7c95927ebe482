"""docs/examples: each program runs, and does what its first lines say."""

import json
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_cases import run
from tiny_run import train

from srtrl.environments.base import Turn
from srtrl.metrics import read_metrics
from srtrl.recipe.file import load_recipe
from srtrl.types import Prompt

REPOSITORY = Path(__file__).resolve().parent.parent
FOLDER = REPOSITORY / "docs" / "examples"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Any]:
    """The module that the test names, imported where it lies, so that `game:Sticks` is found."""
    num_threads = torch.get_num_threads()
    monkeypatch.chdir(FOLDER)
    monkeypatch.syspath_prepend(FOLDER)
    yield import_module(request.param)
    del sys.modules[request.param]
    torch.set_num_threads(num_threads)


def rewards_of(recipe: Path, runs: Path, *overrides: str) -> list[float]:
    """The mean rewards of the steps of a run."""
    overrides = (f"output_dir={runs}", "eval.before_and_after=false", *overrides)
    folder = train(load_recipe(recipe, overrides)).folder
    return [row["reward/mean"] for row in read_metrics(folder / "metrics.jsonl") if row["step"] > 0]


@pytest.mark.parametrize("example", ["game"], indirect=True)
def test_the_best_moves_win_the_game_and_a_move_against_the_rules_ends_it(example: Any) -> None:
    def play(sticks: int, moves: str) -> tuple[str, float]:
        opponent = example.Opponent(None, None)
        opponent.start(Prompt(prompt_id="", text="", token_ids=(1,), answer=str(sticks)))
        while True:
            move = moves or str(opponent.sticks % 4)
            step = opponent.step(Turn(index=0, text=f"I take {move}.", token_ids=(1,)))
            if step.is_done:
                return step.stop_reason, step.reward
            assert step.observation == f"\n{opponent.sticks} left.\n"

    assert {play(sticks, "") for sticks in example.STARTS} == {("won", 1.0)}
    assert play(9, "4") == play(9, "0") == play(9, "no") == ("illegal", 0.0)
    assert play(6, "1") == play(9, "2") == ("lost", example.LOST)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("example", ["game"], indirect=True)
def test_a_policy_learns_the_game(example: Any, tmp_path: Path) -> None:
    rewards = rewards_of(FOLDER / "game.yaml", tmp_path)
    assert rewards[0] < 0.2
    assert sum(rewards[-5:]) / 5 > 0.8


@pytest.mark.parametrize("example", ["drafter"], indirect=True)
def test_the_drafter_saves_steps_of_a_recorded_run(example: Any, tmp_path: Path) -> None:
    rewards_of(FOLDER / "game.yaml", tmp_path, "train.num_steps=4", "rollout.num_prompts=2")
    result = run("replay", tmp_path / "game", "--drafter", "drafter:Drafter", "--json")
    assert result.exit_code == 0, result.output
    counted = json.loads(result.output)
    assert counted["drafter"] == "drafter:Drafter"
    assert 1.05 * counted["steps"] < counted["steps_without_drafts"]
