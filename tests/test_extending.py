"""The examples of docs/extending.md: they are found by name, pass the checks, and compute what they say."""

import importlib
import json
import re
import shlex
import shutil
import sys
from pathlib import Path

import pyarrow.parquet
import pytest
import torch
from task_cases import sample_of
from tiny_run import learned_rows, make_policy, make_recipe

from srtrl import train
from srtrl.build import run_training
from srtrl.checks import check_recipe
from srtrl.metrics import MetricRow, read_metrics
from srtrl.model.folders import load_tokenizer
from srtrl.model.weights import load_model, named_tensors
from srtrl.recipe.file import build_recipe, dump_recipe, read_source
from srtrl.recipe.schema import Recipe
from srtrl.run.steps import checkpoint_name
from srtrl.tasks.base import load_task
from srtrl.types import segment_slices

DOCS = Path(__file__).resolve().parent.parent / "docs"
TEXT = (DOCS / "extending.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)
FILES = ("drafter", "entropic", "reversal")
"""Examples of the page that are files of their own."""
COMMANDS = [line for block in BLOCKS for line in block.replace("\\\n", "").splitlines()]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the page's files, where a user would stand."""
    for block in re.findall(r"```python\n# (\S+)\n(.*?)```", TEXT, re.DOTALL):
        path = tmp_path / block[0]
        path.parent.mkdir(exist_ok=True)
        path.write_text(block[1])
    for name in FILES:
        shutil.copy(DOCS / "examples" / f"{name}.py", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    for name in [name for name in sys.modules if name.split(".")[0] in ("my_fork", *FILES)]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path


@pytest.fixture
def recipe_file(folder: Path, policy: Path) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(dump_recipe(make_recipe(policy, folder / "runs")))
    return path


def recipe_of(command: str, path: Path) -> Recipe:
    program, subcommand, file, *overrides = shlex.split(command)
    assert (program, subcommand, file) == ("srtrl", "train", path.name)
    source = read_source(path, overrides)
    recipe = build_recipe(source)
    check_recipe(recipe, source)
    return recipe


def test_every_command_of_the_page_passes_the_checks(recipe_file: Path) -> None:
    trained = [command for command in COMMANDS if command.startswith("srtrl train")]
    assert len(trained) == 14
    for command in trained:
        assert re.search(rf"my_fork\.|(?:{'|'.join(FILES)}):", dump_recipe(recipe_of(command, recipe_file))), command


def trained(recipe_file: Path, part: str, overrides: str = "train.num_steps=1") -> tuple[Path, list[MetricRow]]:
    """The folder of a run of the page's first command with this part, and the rows of its steps."""
    command = next(command for command in COMMANDS if part in command)
    folder = run_training(recipe_of(f"{command} eval.before_and_after=false {overrides}", recipe_file)).folder
    return folder, [row for row in read_metrics(folder / "metrics.jsonl") if row["step"] > 0]


def test_a_loss_outside_the_package_trains(recipe_file: Path, policy: Path) -> None:
    """A run as the page says: the policy changes, the loss's metric is logged, and its options reach it."""
    folder, rows = trained(recipe_file, "name=sapo")
    assert all(0 < row["loss/slope"] <= 1 and row["grad_norm"] > 0 for row in rows)
    assert not any(key.startswith("clip_share") for row in rows for key in row)
    before, after = (
        named_tensors(load_model(path, dtype=torch.float32, device="cpu"))
        for path in (policy, folder / "checkpoints" / checkpoint_name(1))
    )
    assert any(not torch.equal(before[name], after[name]) for name in before)
    options = "train.num_steps=1 name=hotter 'algorithm.loss_options={negative_temperature: 3.0}'"
    _, other = trained(recipe_file, "name=sapo", options)
    assert other[0]["reward/mean"] == rows[0]["reward/mean"], "the first policy's rollouts are the same"
    assert other[0]["loss/slope"] != rows[0]["loss/slope"], "the second mini-batch is off-policy: the gate differs"


def test_examples_of_arguments_by_name_compute_what_they_say(recipe_file: Path) -> None:
    """The most entropic tokens in a run with three mini-batches' micro-batches; GDPO on rewards made by hand."""
    _, [row] = trained(recipe_file, "name=entropic")
    assert 0.3 <= row["loss/learned_share"] < 0.6, "at least the share of each response, which may be a short one"
    assert row["grad_norm"] > 0
    _, [row] = trained(recipe_file, "name=gdpo")
    assert row["reward/correct"] >= 0
    per_objective = sys.modules["my_fork.gdpo"].per_objective
    right, formatted = torch.tensor([[1.0, 0.0], [1.0, 1.0]]).double(), torch.tensor([[0.0, 1.0], [5.0, 0.0]]).double()
    terms, weights = {"right": right, "formatted": formatted}, {"right": 1.0, "formatted": 0.5}
    found = per_objective(right + formatted / 2, reward_terms=terms, reward_weights=weights, epsilon=0)
    half = 0.5**0.5  # the advantage of the better of two
    total = torch.tensor([[half - half / 2, -half + half / 2], [half / 2, -half / 2]]).double()
    assert torch.allclose(found, total / total.std(), atol=1e-5)


def test_a_coroutine_reward_is_awaited_and_a_token_level_advantage_is_learned_from(recipe_file: Path) -> None:
    rewards = "'rewards=[{name: \"tiny_run:digits\"}, {name: my_fork.judge:judge, weight: 0.5}]'"
    _, [row] = trained(recipe_file, "length_adaptive_gae", f"train.num_steps=1 {rewards}")
    assert 0 <= row["reward/judge"] <= 1
    assert row["grad_norm"] > 0


def test_a_process_reward_is_on_the_ends_of_lines_and_learned_from(recipe_file: Path) -> None:
    _, [row] = trained(recipe_file, "name=process")
    assert row["reward/process"] == 0, "noise is no sum"
    assert "grad_norm" in row
    process = sys.modules["my_fork.process"]
    texts = {"1+2=3\nso 17 + 25 = 42": {5: 1, 20: 1}, "2+2=5\n\n9+9=18\nend": {5: -1, 13: 1}, "no": {}}
    for text, expected in texts.items():
        rewards = process.process(sample_of(text, len(text)))
        assert {index: value for index, value in enumerate(rewards) if value} == expected
        assert len(rewards) == len(text)
    rewards = torch.tensor([[0.0, 1, 1], [2, 0, 0], [5, 0, 0]]).double()
    mask = torch.tensor([[True] * 3, [True, False, False], [True, True, False]])
    options = {"group_index": torch.tensor([0, 0, 1]), "gamma": 1.0, "lam": 1.0}
    found = process.to_come(rewards, rewards, mask, **options)
    assert found.tolist() == [[0, 1, 0.5], [0, 0, 0], [0, 0, 0]]


def test_a_judge_of_each_turn_is_learned_from(folder: Path, recipe_file: Path) -> None:
    """Its number stands on the last token of each turn, which no observation has.

    Noise has few words: here they are enough.
    """
    judge = folder / "my_fork" / "judge.py"
    judge.write_text(judge.read_text().replace("> 3", "> 0"))
    lengths = "rollout.max_prompt_tokens=100 rollout.max_new_tokens=28 'rollout.stop_strings=[a, e, i, o, u, y]'"
    run, [row] = trained(recipe_file, "name=judged_turns", f"train.num_steps=1 {lengths}")
    assert row["grad_norm"] > 0
    table = pyarrow.parquet.read_table(run / "rollouts" / "step_000001.parquet").to_pylist()
    judged = [sample for sample in table if sample["token_rewards"] is not None]
    assert judged
    for sample in judged:
        segments = list(segment_slices([*zip(sample["segment_kinds"], sample["segment_lengths"], strict=True)]))
        ends = {part.stop - 1 for kind, part in segments if kind == "model"}
        found = {index for index, value in enumerate(sample["token_rewards"]) if value}
        assert found <= ends
        assert sample["reward_judge_turns"] <= sample["num_turns"]
    assert any(len([value for value in sample["token_rewards"] if value]) > 1 for sample in judged)


def test_the_task_loads_and_its_errors_name_the_option(recipe_file: Path) -> None:
    command = next(command for command in COMMANDS if "reversal" in command)
    recipe = recipe_of(command, recipe_file)
    task = load_task(recipe, load_tokenizer(recipe.model.path))
    assert [prompt.answer for prompt in task.train_prompts] == ["enots", "repap"]
    assert task.verifier is not None
    assert task.verifier("ssalg \n", task.eval_prompts[0].answer)
    recipe_file.write_text(dump_recipe(recipe))
    message = r"^override `.*`: task.options.words: expected more than num_eval \(1\) words$"
    with pytest.raises(ValueError, match=message):
        recipe_of("srtrl train recipe.yaml task.options.words=[stone]", recipe_file)


def test_an_environment_outside_the_package_answers(recipe_file: Path) -> None:
    """A policy with random weights guesses badly, but every sample begins with the rules and every turn is answered."""
    folder, [row] = trained(recipe_file, "guessing", "train.num_steps=1 rollout.max_prompt_tokens=100")
    assert row["environment/own/no_number"] > 0
    assert row["environment/turns_mean"] >= 1
    assert row["tokens/model"] + row["tokens/observation"] == row["tokens/response"]
    table = pyarrow.parquet.read_table(folder / "rollouts" / "step_000001.parquet").to_pylist()
    assert all("Guess the number." in sample["prompt"] for sample in table)
    for sample in table:
        assert sample["num_turns"] == sample["segment_kinds"].count("model")
        assert ("observation" in sample["segment_kinds"]) == ("A number, please." in sample["text"])


def test_an_evaluation_of_ones_own_is_logged(folder: Path, recipe_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(folder)
    on_step = importlib.import_module("my_fork.capitals").on_step
    rows = train(recipe_file, {"train.num_steps": 3}, on_step=on_step).history
    assert [row["step"] for row in rows if 0 <= row.get("user/capitals", -1) <= 1] == [2]


def test_parts_of_a_users_own_train_and_are_resumed(
    folder: Path, policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A column, a learner, a sampler, and what they leave in a checkpoint: a resumed run is one without a break."""
    monkeypatch.syspath_prepend(folder)
    run = importlib.import_module("my_fork.parts").run
    teacher = make_policy(folder / "teacher", seed=3)
    rewards = [{"name": "tiny_run:digits", "weight": 100}]
    common = {"algorithm": {"kl": {"coefficient": 0.1}}, "rewards": rewards, "train__checkpoint_every": 1}
    common |= {"train__keep_checkpoints": 3, "eval": {"before_and_after": False}}
    for name, lengths in (("whole", [3]), ("parts", [1, 3])):
        for num_steps in lengths:
            run(make_recipe(policy, folder / name, train__num_steps=num_steps, **common), str(teacher))
    whole, resumed = (learned_rows(folder / name / "run") for name in ("whole", "parts"))
    assert resumed == whole
    assert all(row["kl/ref"] > 1e-3 for row in whole), "from the first step: the teacher is another model"
    assert whole[-1]["reward_model/error"] < whole[0]["reward_model/error"]
    shares = [json.loads(path.read_text()) for path in sorted((folder / "whole").glob("run/checkpoints/*/share.json"))]
    assert shares == [0.5, 1.0, 1.0]
