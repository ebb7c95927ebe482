"""The command line: what reaches the functions behind it, what it prints, and how it fails."""

import errno
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from bench_cases import run
from recipe_cases import recipe_text
from tiny_run import make_checkpoint
from typer.testing import CliRunner

from srtrl import __version__
from srtrl.checks import check_recipe
from srtrl.cli import app
from srtrl.model.folders import locate
from srtrl.recipe.file import load_recipe, read_yaml
from srtrl.recipe.schema import Recipe


@pytest.fixture
def recipe_file(tmp_path: Path, policy: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe_text(path=policy))
    return path


def test_version_and_help() -> None:
    assert run("--version").stdout == f"srtrl {__version__}\n"
    listed = run("--help").stdout
    for name in ("train", "warm-start", "eval", "generate", "replay", "report", "compare", "show-config"):
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
    as_json = run("show-config", again, "--json")
    assert Recipe.model_validate_json(as_json.stdout) == expected


# --- train, eval, bench, report ---------------------------------------------------------------------------------------


RANK = {"WORLD_SIZE": "2", "RANK": "0"}


@pytest.mark.parametrize(("interrupted", "launcher", "code"), [(False, {}, 0), (True, {}, 130), (True, RANK, 0)])
def test_train_hands_over_the_recipe_and_says_what_to_do_next(
    recipe_file: Path,
    finished: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    interrupted: bool,
    launcher: dict[str, str],
    code: int,
) -> None:
    """A launcher would start an interrupted run again if it ended with an error."""
    for name, value in launcher.items():
        monkeypatch.setenv(name, value)
    folder = finished(train__num_steps=2)
    monkeypatch.setattr("srtrl.report.page.write_report", lambda folder: folder / "report.html")
    run_training = Mock(return_value=SimpleNamespace(folder=folder, num_steps=3, interrupted=interrupted))
    monkeypatch.setattr("srtrl.build.run_training", run_training)
    overrides = ["train.num_steps=5", "task.options={num_train: 10}"]
    result = run("train", recipe_file, *overrides, "--overwrite")
    assert (result.exit_code, result.stderr) == (code, "")
    run_training.assert_called_once_with(
        load_recipe(recipe_file, overrides), resume=False, overwrite=True, from_step=None
    )
    assert re.search(r"^gain: +[+-]\d+\.\d points$", result.stdout, re.MULTILINE)
    resume = f"interrupted after step 3; to resume: srtrl train {folder} --resume\n"
    assert result.stdout.endswith(resume if interrupted else f"its report: file://{folder}/report.html\n")


def test_resume_finds_a_run_by_its_name(
    finished: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(finished(), "runs/mine")
    run_training = Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr("srtrl.build.run_training", run_training)
    assert run("train", "mine", "--resume").exit_code == 130
    (recipe,), flags = run_training.call_args
    assert (Path(recipe.output_dir, recipe.name), flags["resume"]) == (tmp_path / "runs/mine", True)
    near = "mien: cannot read the recipe: No such file or directory, did you mean `mine`?"
    assert near in run("train", "mien", "--resume").stderr
    assert "its recipe is runs/mine/recipe.yaml" in run("train", "mine").stderr
    assert "mine: no such folder; did you mean runs/mine?" in run("report", "mine").stderr


def test_interrupts_and_errors_of_the_system_are_one_line_and_bugs_a_traceback(
    recipe_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = OSError(errno.ENOSPC, "No space left", "runs/a")
    for raised, code, message in (
        (KeyboardInterrupt(), 130, "interrupted"),
        (full, 1, "error: [Errno 28] No space left: 'runs/a'"),
    ):
        monkeypatch.setattr("srtrl.build.run_training", Mock(side_effect=raised))
        result = run("train", recipe_file)
        assert (result.exit_code, result.stderr) == (code, f"{message}\n")
    for bug in (ValueError, RuntimeError, ZeroDivisionError):
        monkeypatch.setattr("srtrl.cli.read_source", Mock(side_effect=bug))
        assert isinstance(run("show-config", recipe_file).exception, bug)


def test_a_warm_start_from_scratch_needs_no_model_yet(recipe_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_warm_start = Mock(return_value=SimpleNamespace(output=Path("made"), held_out=None))
    monkeypatch.setattr("srtrl.warm_start.training.run_warm_start", run_warm_start)
    architecture = (
        "architecture: {hidden_size: 32, intermediate_size: 64, num_hidden_layers: 1, num_attention_heads: 2, "
        "num_key_value_heads: 1, max_position_embeddings"
    )
    for more, message in (
        (f", {architecture}: 128}}", ""),
        (f", {architecture}: 127}}", "is more than the 127 positions of warm_start.architecture"),
        ("", "model.path: ./made: "),
    ):
        result = run("warm-start", recipe_file, "model.path=./made", f"warm_start={{output: made{more}}}")
        assert (result.exit_code, message in result.stderr) == (2 if message else 0, True), result.output
    assert run_warm_start.call_args.args[0].warm_start is not None
    teacher = ["algorithm.teacher.path=acme/nine", "warm_start={output: made}"]
    assert run("warm-start", recipe_file, *teacher).exit_code == 0, "it downloads no teacher"


def evaluated(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> Recipe:
    """Run `srtrl eval` without evaluating; the recipe that would have been used."""
    run_evals = Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr("srtrl.evaluation.run.run_evals", run_evals)
    result = run("eval", *arguments)
    assert (result.exit_code, result.stderr) == (130, "interrupted\n")
    model, recipes = run_evals.call_args.args
    [recipe] = recipes.values()
    assert isinstance(recipe, Recipe)
    assert model == recipe.model.path
    return recipe


def test_eval_takes_task_and_values_from_the_command_line_a_recipe_or_a_run(
    recipe_file: Path, policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = shlex.split(
        "'task.options={num_eval: 9, num_train: 9}' eval.num_samples=4 seed=3 "
        "rollout.max_new_tokens=32 rollout.max_prompt_tokens=32"
    )
    recipe = evaluated(monkeypatch, policy, "--task", "arithmetic", *overrides)
    assert recipe.task.options == {"num_eval": 9, "num_train": 9}
    assert (recipe.eval.num_samples, recipe.rollout.max_new_tokens, recipe.seed) == (4, 32, 3)
    recipe = evaluated(monkeypatch, policy, "--recipe", recipe_file, "eval.temperature=0")
    assert (recipe.rollout.num_prompts, recipe.eval.temperature) == (8, 0)
    folder = recipe_file.parent
    for step in (10, 20):
        make_checkpoint(policy, folder, step)
    assert evaluated(monkeypatch, folder).model.path == str(folder / "checkpoints" / "step_000020")
    assert evaluated(monkeypatch, folder, "--step", 10).model.path == str(folder / "checkpoints" / "step_000010")


def test_the_module_answers(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "srtrl", "train", str(tmp_path / "none.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert done.stderr == f"error: {tmp_path}/none.yaml: cannot read the recipe: No such file or directory\n"
    with_traceback = CliRunner(env={"SRTRL_TRACEBACK": "1"}).invoke(app, command[3:])
    assert isinstance(with_traceback.exception, ValueError)


# --- The recipes ------------------------------------------------------------------------------------------------------


RECIPES = Path(__file__).resolve().parent.parent / "recipes"


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: str(path.stem))
def test_the_recipes_that_come_with_the_repository_are_valid(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder where the quickstart has trained a teacher."""
    checkpoints = tmp_path / "runs" / "quickstart" / "checkpoints"
    checkpoints.mkdir(parents=True)
    (checkpoints / "step_000052").symlink_to(locate("bundled:tiny"))
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe(path)
    assert recipe.name.replace("-", "_") == path.stem
    if recipe.warm_start is not None:  # what `srtrl warm-start` checks: such a recipe may make its model itself
        check_recipe(recipe, warm_start=True)
        return
    result = run("show-config", path, "--check", "--yaml")
    assert (result.exit_code, result.stderr) == (0, "")
    assert Recipe.model_validate(read_yaml(result.stdout, "stdout")[0]) == recipe


def test_recipes_are_named_without_their_path_unless_a_file_has_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("dapo_tiny").mkdir()
    for name in ("quickstart", "dapo_tiny"):
        assert load_recipe(Path(name)) == load_recipe(RECIPES / f"{name}.yaml")
    Path("quickstart").write_text("name: mine")
    assert "quickstart: model: is missing" in run("show-config", "quickstart").stderr


def test_every_file_of_the_package_is_in_a_wheel() -> None:
    """By the patterns of pyproject.toml; `test_a_wheel_has_the_recipes` builds one."""
    package = RECIPES.parent / "srtrl"
    project = tomllib.loads((RECIPES.parent / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["srtrl"]
    packed = {path for pattern in patterns for path in package.glob(pattern)} | {*package.rglob("*.py")}
    recipes = {package / "recipe" / "bundled" / path.name for path in RECIPES.glob("*.yaml")}
    files = {path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert (files | recipes) - packed == set()
    assert all((path.parent / "__init__.py").exists() for path in files if path.suffix == ".py")


@pytest.mark.slow
def test_a_wheel_has_the_recipes(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", minversion="77")
    source = tmp_path / "source"
    shutil.copytree(RECIPES.parent / "srtrl", source / "srtrl", symlinks=True)
    shutil.copytree(RECIPES, source / "recipes")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(RECIPES.parent / name, source)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--wheel-dir", tmp_path, source], check=True, timeout=100)
    [wheel] = tmp_path.glob("*.whl")
    shutil.unpack_archive(wheel, tmp_path / "site", "zip")
    command = [sys.executable, "-m", "srtrl", "show-config", "quickstart", "--check", "--yaml"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, check=True, timeout=60)
    assert Recipe.model_validate(read_yaml(done.stdout.decode(), "stdout")[0]) == load_recipe(
        RECIPES / "quickstart.yaml"
    )
