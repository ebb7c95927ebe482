"""`on_step`: what it sees of the run, what it logs, and that nothing of training changes by it."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from rank_runs import train_on_ranks
from tiny_run import assert_same_run, make_recipe

import srtrl
from srtrl import ranks
from srtrl.build import run_training
from srtrl.generation import Generated
from srtrl.live_run import LiveRun, with_live_run
from srtrl.metrics import read_metrics

PROMPTS = ["1+1=", "2+3="]


class KilledError(Exception):
    """In place of a kill."""


def mean_length(step: int, metrics: Mapping[str, float], run: LiveRun) -> dict[str, float] | None:
    """Rows of all steps but the first, with what a completion and the policy are just now."""
    torch.rand(step)
    if step == 1:
        return None
    groups = run.generate(PROMPTS, num_samples=3)
    lengths = [len(sample.token_ids) for group in groups for sample in group]
    total = sum(float(parameter.detach().double().sum()) for parameter in run.policy.parameters())
    return {"length": sum(lengths) / len(lengths), "weights": total, "seen": metrics["reward/mean"], "step": step}


def killed_in(step: int, on_step: Callable[..., Any]) -> Callable[..., Any]:
    def killed(number: int, *arguments: Any) -> Any:
        if number == step:
            raise KilledError
        return on_step(number, *arguments)

    return killed


def test_training_is_the_same_with_and_without_and_a_resume_makes_rows_again(policy: Path, tmp_path: Path) -> None:
    """Killed after the checkpoint of step 2 before its row is there, and between two checkpoints."""
    names = ("plain", "whole", "killed_2", "killed_3")
    recipes = {name: make_recipe(policy, tmp_path / name, rollout__drafter="srt") for name in names}
    plain = srtrl.train(recipes["plain"])
    whole = srtrl.train(recipes["whole"], on_step=mean_length)
    assert_same_run(whole.folder, plain.folder, beside=("user/",))
    rows = [{name: row[name] for name in row if name.startswith("user/")} for row in whole.history]
    assert [len(row) for row in rows] == [0, 0, 4, 4, 4]
    assert len({row["user/weights"] for row in rows[2:]}) == 3
    assert [row["user/seen"] for row in rows[2:]] == [row["reward/mean"] for row in whole.history[2:]]
    assert len((whole.folder / "metrics.jsonl").read_text().splitlines()) == 5 + 3
    for step in (2, 3):
        recipe = recipes[f"killed_{step}"]
        with pytest.raises(KilledError):
            srtrl.train(recipe, on_step=killed_in(step, mean_length))
        assert_same_run(srtrl.train(recipe, on_step=mean_length, resume=True).folder, whole.folder)
    again = srtrl.train(recipes["whole"], on_step=mean_length, resume=True)
    assert_same_run(again.folder, plain.folder, beside=("user/",))
    assert again.metrics == whole.metrics, "the row of the last step is made again, too"


@contextmanager
def written_by_each_rank() -> Iterator[None]:
    """A run has an `on_step` that writes what it sees."""

    def on_step(step: int, metrics: Mapping[str, float], run: LiveRun) -> dict[str, float] | None:
        row = mean_length(step, metrics, run)
        (run.path / f"seen_{step}_{ranks.index()}.json").write_text(json.dumps([row, metrics]))
        return row

    with patch("rank_runs.run_training", partial(run_training, on_step=with_live_run(on_step))):
        yield


def test_two_ranks_see_the_same(policy: Path, tmp_path: Path) -> None:
    """All completions and the main rank's metrics; the row is written once, and is that of one rank."""
    one, two = (make_recipe(policy, tmp_path / str(count), train__num_steps=2) for count in (1, 2))
    srtrl.train(one, on_step=mean_length)
    assert [process.exitcode for process in train_on_ranks(two, 2, around=written_by_each_rank)] == [0, 0]
    for step in (1, 2):
        first, second = (json.loads((two.folder / f"seen_{step}_{rank}.json").read_text()) for rank in (0, 1))
        assert first == second
        row = {"step": step} | first[1] | {f"user/{name}": value for name, value in (first[0] or {}).items()}
        assert read_metrics(two.folder / "metrics.jsonl")[step] == row
    lengths = [read_metrics(recipe.folder / "metrics.jsonl")[2]["user/length"] for recipe in (one, two)]
    assert lengths[0] == pytest.approx(lengths[1], rel=0.2), "weights differ by the order of sums"
    assert len((two.folder / "metrics.jsonl").read_text().splitlines()) == 3 + 1


def test_completions_go_through_the_templates_of_the_task(policy: Path, tmp_path: Path) -> None:
    """A prompt is what `srtrl.generate` makes of it; greedy ones are alike."""
    seen: list[list[list[Generated]]] = []

    def on_step(step: int, metrics: Mapping[str, float], run: LiveRun) -> None:
        assert run.path == tmp_path / "run"
        assert run.tokenizer.decode([run.tokenizer.eos_token_id])
        seen.append(run.generate(PROMPTS, num_samples=2, temperature=0))

    recipe = make_recipe(policy, tmp_path, train__num_steps=1)
    folder = srtrl.train(recipe, on_step=on_step).folder
    expected = srtrl.generate(str(folder), PROMPTS, overrides={"eval.temperature": 0})
    assert [[sample.token_ids for sample in group] for group in seen[0]] == [
        2 * [sample.token_ids for sample in group] for group in expected
    ]
    assert [group[0].prompt_token_ids for group in seen[0]] == [group[0].prompt_token_ids for group in expected]


BAD: list[tuple[Any, str]] = [
    (5, "on_step: expected a function of (step, metrics, run): 5 is not a callable object"),
    (lambda step, metrics: None, "on_step: expected a function of (step, metrics, run): too many positional arguments"),
    (lambda a, b, c, d: None, "on_step: expected a function of (step, metrics, run): missing a required argument: 'd'"),
    (lambda *_: 0.5, "on_step after step 1: expected a dictionary of numbers or None, found 0.5"),
    (lambda *_: {"mine": float("nan")}, "metric user/mine must be a finite number, found nan"),
    (lambda *_: {"mine": "good"}, "metric user/mine must be a finite number, found 'good'"),
    (lambda step, metrics, run: run.generate("1+1="), "prompts: expected a list of texts, found one text"),
    (lambda step, metrics, run: run.generate(["1" * 99]), "tokens, and rollout.max_prompt_tokens is 48"),
    (lambda step, metrics, run: run.generate(["1"], num_samples=0), "run.generate.num_samples: should be greater than"),
    (lambda step, metrics, run: run.generate(["1"], temperature=-1), "run.generate.temperature: should be greater"),
]


@pytest.mark.parametrize(("on_step", "message"), BAD, ids=[message for _, message in BAD])
def test_a_mistake_is_a_message(policy: Path, tmp_path: Path, on_step: Any, message: str) -> None:
    recipe = make_recipe(policy, tmp_path, train__num_steps=1, eval={"before_and_after": False})
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        srtrl.train(recipe, on_step=on_step)
    assert "\n" not in str(caught.value)
