"""The examples of docs/extending.md: they are found by name, pass the checks, and compute what they say."""

import re
import shlex
import sys
from pathlib import Path

import pytest
import torch
from tiny_run import make_policy, make_recipe

from srtrl.checks import check_recipe
from srtrl.metrics import read_metrics
from srtrl.recipe import Recipe
from srtrl.recipe_file import build_recipe, dump_recipe, read_source
from srtrl.resolve import resolve_function
from srtrl.tasks.base import load_task
from srtrl.tasks.reward_input import RewardInput
from srtrl.trainer.training import run_training
from srtrl.types import Prompt

TEXT = (Path(__file__).resolve().parent.parent / "docs" / "extending.md").read_text(encoding="utf-8")
COMMANDS = [line for block in re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL) for line in block.splitlines()]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the page's files, where a user would stand."""
    for block in re.findall(r"```python\n# (\S+)\n(.*?)```", TEXT, re.DOTALL):
        path = tmp_path / block[0]
        path.parent.mkdir(exist_ok=True)
        path.write_text(block[1])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    for name in [name for name in sys.modules if name.split(".")[0] == "my_fork"]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path


@pytest.fixture
def recipe_file(folder: Path) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(dump_recipe(make_recipe(make_policy(folder / "policy"), folder / "runs")))
    return path


def recipe_of(command: str, path: Path) -> Recipe:
    program, subcommand, file, *overrides = shlex.split(command)
    assert (program, subcommand, file) == ("srtrl", "train", path.name)
    source = read_source(path, overrides)
    recipe = build_recipe(source)
    check_recipe(recipe, source)
    return recipe


@pytest.mark.parametrize("command", [command for command in COMMANDS if command.startswith("srtrl train")])
def test_every_command_of_the_page_passes_the_checks(recipe_file: Path, command: str) -> None:
    assert "my_fork." in dump_recipe(recipe_of(command, recipe_file))


def test_gspo_of_single_token_sequences_is_ppo(folder: Path) -> None:
    gspo = resolve_function("srtrl.algorithms.losses", "my_fork.losses:gspo")
    ppo = resolve_function("srtrl.algorithms.losses", "ppo_clip")
    generator = torch.Generator().manual_seed(0)
    new, old, advantages = torch.randn(3, 9, generator=generator) * 0.3
    index = torch.arange(9)
    torch.testing.assert_close(
        gspo(new, old, advantages, index, clip_low=0.2, clip_high=0.3)[0],
        ppo(new, old, advantages, index, clip_low=0.2, clip_high=0.3)[0],
    )
    together = gspo(new, old, advantages, torch.zeros(9, dtype=torch.int64), clip_low=9, clip_high=9)[1]
    torch.testing.assert_close(together["ratio/sequence"], torch.exp((new - old).mean()).expand(9))


def test_leave_one_out_compares_with_the_other_samples(folder: Path) -> None:
    leave_one_out = resolve_function("srtrl.algorithms.advantages", "my_fork.advantages:leave_one_out")
    rewards = torch.tensor([[1.0, 0.0, 0.5]])
    torch.testing.assert_close(leave_one_out(rewards), torch.tensor([[1 - 0.25, 0 - 0.75, 0.5 - 0.5]]))


def test_brevity_rewards_short_right_answers(folder: Path) -> None:
    brevity = resolve_function("srtrl.tasks.rewards", "my_fork.rewards:brevity")
    prompt = Prompt(prompt_id="0", text="", token_ids=(1,), answer="")

    def reward(*, correct: bool, num_tokens: int) -> float:
        sample = RewardInput(
            prompt=prompt, text="", correct=correct, finish_reason="stop", num_tokens=num_tokens, max_new_tokens=10
        )
        return float(brevity(sample))

    assert reward(correct=True, num_tokens=3) == pytest.approx(0.7)
    assert reward(correct=False, num_tokens=3) == 0.0


def test_the_drafter_drafts_and_its_training_run_learns_what_none_learns(recipe_file: Path) -> None:
    command = next(command for command in COMMANDS if "repeat" in command)
    recipe = recipe_of(f"{command} rollout.draft_budget=3 train.num_steps=2", recipe_file)
    drafted = run_training(recipe).folder
    rows = read_metrics(drafted / "metrics.jsonl")
    assert 1.5 < rows[-1]["engine/verified_per_decode_step"] <= 4
    plain = run_training(
        build_recipe(read_source(recipe_file, ["rollout.drafter=none", "train.num_steps=2", "name=plain"]))
    )
    expected = read_metrics(plain.folder / "metrics.jsonl")
    assert [row["loss"] for row in rows[1:]] == [row["loss"] for row in expected[1:]]


def test_the_task_loads_and_its_errors_name_the_option(recipe_file: Path) -> None:
    from srtrl.model.weights import load_tokenizer

    command = next(command for command in COMMANDS if "reversal" in command)
    recipe = recipe_of(command, recipe_file)
    task = load_task(recipe, load_tokenizer(recipe.model.path))
    assert [prompt.answer for prompt in task.train_prompts] == ["enots", "repap"]
    assert task.verifier("ssalg \n", task.eval_prompts[0].answer)
    with pytest.raises(
        ValueError, match=r"^override `.*`: task.options.words: expected more than num_eval \(1\) words$"
    ):
        recipe_of("srtrl train recipe.yaml task.options.words=[stone]", _with_task(recipe_file, command))


def _with_task(recipe_file: Path, command: str) -> Path:
    recipe_file.write_text(dump_recipe(recipe_of(command, recipe_file)))
    return recipe_file
