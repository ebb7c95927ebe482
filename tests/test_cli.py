"""The command line: what reaches the functions behind it, what it prints, and how it fails."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from tiny_run import make_policy
from typer.testing import CliRunner, Result

from srtrl import __version__
from srtrl.checks import check_recipe
from srtrl.cli import app
from srtrl.recipe import Recipe
from srtrl.recipe_file import load_recipe
from srtrl.trainer.evaluate import EvalJob

RECIPE = """\
name: test
device: cpu
model:
  path: {policy}
task:
  name: arithmetic
  options: {{num_train: 50, num_eval: 20}}
rollout:
  num_prompts: 8
  num_samples: 4
  max_prompt_tokens: 64
  max_new_tokens: 64
train:
  num_steps: 3
"""


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_policy(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def recipe_file(tmp_path: Path, policy: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.format(policy=policy))
    return path


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def json_rows(result: Result) -> list[dict[str, Any]]:
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_version_and_help() -> None:
    assert run("--version").stdout == f"srtrl {__version__}\n"
    listed = run("--help").stdout
    for name in ("train", "warm-start", "eval", "generate", "bench", "report", "compare", "show-config"):
        assert f"  {name} " in listed
        assert run(name, "--help").exit_code == 0


# --- show-config ------------------------------------------------------------------------------------------------------


def test_show_config_prints_what_the_recipe_resolves_to(recipe_file: Path, tmp_path: Path) -> None:
    shown = run("show-config", recipe_file, "train.learning_rate=2e-5", "eval.num_problems=7")
    assert shown.exit_code == 0
    again = tmp_path / "again.yaml"
    again.write_text(shown.stdout)
    expected = load_recipe(recipe_file, ["train.learning_rate=2e-5", "eval.num_problems=7"])
    assert load_recipe(again) == expected
    as_json = run("show-config", recipe_file, "train.learning_rate=2e-5", "eval.num_problems=7", "--json")
    assert Recipe.model_validate_json(as_json.stdout) == expected


def test_help_fields_documents_every_field_and_the_tasks_options() -> None:
    shown = run("show-config", "--help-fields").stdout
    lines = shown.splitlines()
    at = lines.index('algorithm.kl.placement: loss | reward = "loss"')
    assert "subtracted from the reward before advantages" in lines[at + 1]
    assert "rewards.N.weight: number = 1.0" in lines
    assert "rollout.num_prompts: integer (required)" in lines
    assert "task.options.max_operand: integer = 12" in lines
    assert not [line for line in lines if line == "    "], "a field without documentation"


@pytest.mark.parametrize(
    ("override", "error"),
    [
        ("algorithm.loss=ppo_clp", "algorithm.loss: `ppo_clp` is not in srtrl/algorithms/losses.py, did you mean "),
        ("rewards=[{name: correct}, {name: correct}]", "rewards.1: two are named `correct`"),
        ("task.name=arithmetics", "task.name: `arithmetics` is not in srtrl/tasks/, did you mean `arithmetic`?"),
        ("task.options.max_operan=3", "task.options.max_operan: unknown key, did you mean `max_operand`?"),
        ("rollout.drafter=nne", "rollout.drafter: `nne` is not in srtrl/drafters/, did you mean `none`?"),
        ("rollout.drafter=collections:Counter", "rollout.drafter: `collections:Counter` is no drafter; expected a sub"),
        ("rollout.drafter_options={min_score: 2}", "rollout.drafter_options.min_score: should be less than 1, found 2"),
        ("model.path=./nowhere", "model.path: ./nowhere: "),
        (
            "rollout.max_new_tokens=65",
            "rollout.max_new_tokens: max_prompt_tokens + max_new_tokens = 129 is more than the",
        ),
        ("log.trackers=[tensorbord]", "log.trackers: unknown tracker 'tensorbord'"),
    ],
)
@pytest.mark.parametrize("command", ["train", "show-config"])
def test_names_paths_and_options_are_checked_before_weights(
    recipe_file: Path, monkeypatch: pytest.MonkeyPatch, command: str, override: str, error: str
) -> None:
    monkeypatch.setattr("srtrl.trainer.trainer.run_training", _must_not_run)
    monkeypatch.setattr("srtrl.trainer.build.load_model", _must_not_run)  # imported first: it must not keep the next
    monkeypatch.setattr("srtrl.model.weights.load_model", _must_not_run)
    result = run(command, recipe_file, override, *(["--check"] if command == "show-config" else []))
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: override `{override}`: ")
    assert error in result.stderr


def test_an_option_of_the_task_is_named_with_its_line(tmp_path: Path, policy: Path) -> None:
    path = tmp_path / "recipe.yaml"
    options = "  options:\n    train:\n      files:\n      - missing.jsonl\n"
    text = RECIPE.format(policy=policy).replace("name: arithmetic", "name: math")
    path.write_text(text.replace("  options: {num_train: 50, num_eval: 20}\n", options))
    result = run("show-config", path, "--check")
    assert result.stderr.startswith(f"error: {path}:10: task.options.train.files.0: no file missing.jsonl")


def _must_not_run(*_: object, **__: object) -> None:
    raise AssertionError("must not be reached")


# --- train, eval, bench, report ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("interrupted", [False, True])
def test_train_hands_over_the_recipe_and_says_what_to_do_next(
    recipe_file: Path, monkeypatch: pytest.MonkeyPatch, interrupted: bool
) -> None:
    calls: list[Any] = []

    def run_training(recipe: Recipe, *, resume: bool, overwrite: bool) -> SimpleNamespace:
        calls.append((recipe, resume, overwrite))
        return SimpleNamespace(folder=Path("runs/test"), summary=SimpleNamespace(num_steps=3), interrupted=interrupted)

    monkeypatch.setattr("srtrl.trainer.trainer.run_training", run_training)
    monkeypatch.setattr("srtrl.trainer.run_metrics.summary_table", lambda _: "before, after")
    overrides = ["train.num_steps=5", "task.options={num_train: 10}"]
    result = run("train", recipe_file, *overrides, "--overwrite")
    assert (result.exit_code, result.stderr) == (130 if interrupted else 0, "")
    assert calls == [(load_recipe(recipe_file, overrides), False, True)]
    assert "before, after" in result.stdout
    again = f"srtrl train {recipe_file} train.num_steps=5 'task.options={{num_train: 10}}' --resume"
    following = f"interrupted after step 3; to resume: {again}" if interrupted else "srtrl report runs/test"
    assert following in result.stdout


@pytest.mark.parametrize("raised", [KeyboardInterrupt(), ZeroDivisionError("a bug")])
def test_interrupts_and_bugs_are_told_apart(
    recipe_file: Path, monkeypatch: pytest.MonkeyPatch, raised: BaseException
) -> None:
    def run_training(*_: object, **__: object) -> None:
        raise raised

    monkeypatch.setattr("srtrl.trainer.trainer.run_training", run_training)
    result = run("train", recipe_file)
    if isinstance(raised, KeyboardInterrupt):
        assert (result.exit_code, result.stderr) == (130, "interrupted\n")
    else:
        assert result.exception is raised


def test_only_our_own_value_errors_lose_their_traceback(recipe_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe_file.write_text("name: [")
    refused = run("show-config", recipe_file)
    assert refused.exit_code == 2
    assert refused.stderr.startswith(f"error: {recipe_file}:1:8: not valid YAML")
    monkeypatch.setenv("SRTRL_TRACEBACK", "1")
    assert isinstance(run("show-config", recipe_file).exception, ValueError)
    monkeypatch.delenv("SRTRL_TRACEBACK")

    def foreign(*_: object) -> None:
        int("a ValueError that is not ours")

    monkeypatch.setattr("srtrl.cli.read_source", foreign)
    assert isinstance(run("show-config", recipe_file).exception, ValueError)


def test_a_warm_start_from_scratch_needs_no_model_yet(recipe_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipes: list[Recipe] = []

    def run_warm_start(recipe: Recipe, *, overwrite: bool) -> SimpleNamespace:
        recipes.append(recipe)
        return SimpleNamespace(output=Path("made"), held_out=None)

    monkeypatch.setattr("srtrl.trainer.warm_start.run_warm_start", run_warm_start)
    architecture = (
        "architecture: {hidden_size: 32, intermediate_size: 64, num_hidden_layers: 1, num_attention_heads: 2, "
        "num_key_value_heads: 1, max_position_embeddings: %d}"
    )
    overrides = ["model.path=./made", f"warm_start={{output: made, {architecture % 128}}}"]
    assert run("warm-start", recipe_file, *overrides).exit_code == 0
    assert recipes[0].warm_start is not None
    too_short = run("warm-start", recipe_file, overrides[0], f"warm_start={{output: made, {architecture % 127}}}")
    assert too_short.exit_code == 2
    assert "is more than the 127 positions of warm_start.architecture" in too_short.stderr
    assert "model.path: ./made: " in run("warm-start", recipe_file, overrides[0], "warm_start={output: made}").stderr


def evaluated(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> tuple[Result, list[Recipe]]:
    """Run `srtrl eval` without evaluating; the recipes that would have been used."""
    recipes: list[Recipe] = []

    @dataclass
    class Figures:
        accuracy: float = 0.5

    def run_evals(model: str, jobs: Sequence[EvalJob], **_: object) -> Iterator[SimpleNamespace]:
        for job in jobs:
            assert model == job.recipe.model.path
            recipes.append(job.recipe)
            yield SimpleNamespace(job=job, result=Figures(), num_left_out=0)

    monkeypatch.setattr("srtrl.evaluation.run.run_evals", run_evals)
    monkeypatch.setattr("srtrl.evaluation.tables.eval_table", lambda *_: "a table")
    return run("eval", *arguments), recipes


def test_eval_of_a_model_takes_its_task_from_the_command_line_or_a_recipe(
    recipe_file: Path, policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ("--samples", 4, "--problems", 9, "--max-new-tokens", 32, "--seed", 3)
    overrides = ("task.options={num_eval: 9, num_train: 9}", "rollout.max_prompt_tokens=32")
    result, (recipe,) = evaluated(monkeypatch, policy, "--task", "arithmetic", *flags, *overrides)
    assert (result.exit_code, result.stderr) == (0, "")
    assert recipe.task.options == {"num_eval": 9, "num_train": 9}
    assert (recipe.eval.num_samples, recipe.eval.num_problems) == (4, 9)
    assert (recipe.rollout.max_new_tokens, recipe.seed) == (32, 3)
    _, (recipe,) = evaluated(monkeypatch, policy, "--recipe", recipe_file, "--temperature", 0)
    assert (recipe.rollout.num_prompts, recipe.eval.temperature) == (8, 0)


def test_eval_of_a_run_uses_its_recipe_and_newest_checkpoint(
    recipe_file: Path, policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = recipe_file.parent
    for step in (10, 20):
        (folder / "checkpoints").mkdir(exist_ok=True)
        (folder / "checkpoints" / f"step_{step:06d}").symlink_to(policy)
    result, recipes = evaluated(monkeypatch, folder)
    assert (result.exit_code, result.stderr) == (0, "")
    assert recipes[0].model.path == str(folder / "checkpoints" / "step_000020")
    _, recipes = evaluated(monkeypatch, folder, "--step", 10)
    assert recipes[0].model.path == str(folder / "checkpoints" / "step_000010")


def test_bench_hands_its_options_to_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    def command(slots: int = 8) -> None:
        print("slots", slots)

    monkeypatch.setattr("srtrl.resolve.resolve_class", lambda *_: command)
    assert "slots 16" in run("bench", "rollout", "--slots", 16).stdout


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("bench", "rolout"), "`rolout` is not in srtrl/bench/, did you mean `rollout`?"),
        (("report", "."), "is not the folder of a run"),
        (("show-config",), "show-config needs a RECIPE, or --help-fields"),
        (("eval", "bundled:tiny"), "--suite NAME, --task NAME or --recipe FILE"),
        (
            ("eval", "bundled:tiny", "--task", "arithmetic", "--samples", 0),
            "--samples: eval.num_samples: should be gre",
        ),
    ],
)
def test_mistakes_of_the_user_exit_with_2(arguments: tuple[object, ...], error: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert error in result.stderr


def test_the_console_script_answers(tmp_path: Path) -> None:
    script = Path(sys.executable).parent / "srtrl"
    command = [str(script), "train", str(tmp_path / "none.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == f"error: {tmp_path}/none.yaml: cannot read the recipe: No such file or directory\n"
    environment = {**os.environ, "SRTRL_TRACEBACK": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert "Traceback" in done.stderr


# --- The recipes ------------------------------------------------------------------------------------------------------


RECIPES = Path(__file__).resolve().parent.parent / "recipes"


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: str(path.stem))
def test_the_recipes_that_come_with_the_repository_are_valid(path: Path) -> None:
    recipe = load_recipe(path)
    assert recipe.name.replace("-", "_") == path.stem
    if recipe.warm_start is not None:  # what `srtrl warm-start` checks: such a recipe may make its model itself
        check_recipe(recipe, warm_start=True)
        return
    result = run("show-config", path, "--check")
    assert (result.exit_code, result.stderr) == (0, "")
    assert Recipe.model_validate(yaml.safe_load(result.stdout)) == recipe


PAPERS: dict[str, dict[str, Any]] = {
    "grpo_math": {
        "model.path": "Qwen/Qwen2.5-1.5B",
        "rollout": {"num_prompts": 128, "num_samples": 5, "max_prompt_tokens": 512, "max_new_tokens": 4096},
        "train": {"num_steps": 300, "mini_batch_prompts": 64, "learning_rate": 1e-6},
        "algorithm.kl": {"coefficient": 0.001, "estimator": "k3", "placement": "loss"},
    },
    "ppo_math": {
        "rollout": {"num_prompts": 512, "temperature": 1.0, "max_prompt_tokens": 512, "max_new_tokens": 4096},
        "train": {"num_steps": 300, "mini_batch_prompts": 128, "learning_rate": 1e-6},
        "algorithm": {"advantage": "gae"},
        "algorithm.kl": {"coefficient": 0.001, "placement": "reward"},
        "critic": {"learning_rate": 1e-5},
    },
    "dapo_math17k": {
        "rollout": {"num_prompts": 128, "num_samples": 16, "max_prompt_tokens": 2048, "max_new_tokens": 8192},
        "rollout.dynamic_sampling": True,
        "train": {"num_steps": 300, "mini_batch_prompts": 32},
        "algorithm": {"clip_low": 0.20, "clip_high": 0.28, "reduction": "token_mean"},
        "algorithm.kl.coefficient": 0,
        "algorithm.filters": ["drop_all_right_or_wrong"],
        "rewards.1.options": {"cache_tokens": 4096},
    },
}


@pytest.mark.parametrize("name", PAPERS)
def test_recipes_have_the_settings_of_their_papers(name: str) -> None:
    recipe = load_recipe(RECIPES / f"{name}.yaml").model_dump()
    for key, expected in PAPERS[name].items():
        value: Any = recipe
        for part in key.split("."):
            value = value[int(part) if part.isdecimal() else part]
        assert (value | expected if isinstance(expected, dict) else expected) == value, key
