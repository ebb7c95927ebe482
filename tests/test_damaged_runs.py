"""A damaged run: each command names the file in one line, and a resume never begins with other numbers unasked."""

import json
import re
import shutil
from collections.abc import Callable
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_run import assert_same_run, learned_rows, make_policy, make_recipe, train
from typer.testing import CliRunner, Result

from srtrl.cli import app
from srtrl.recipe.file import load_recipe
from srtrl.run import checkpoint
from srtrl.run.checkpoint import FORMAT
from srtrl.tasks.base import load_task
from srtrl.trainer import trainer

LAST = "checkpoints/step_000004"
MANIFEST = f"{LAST}/manifest.json"
OPTIMIZER = "optimizer/shard-00001-model-00001-of-00001.safetensors"
Damage = Callable[[Path], object]


@pytest.fixture(scope="module")
def finished(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps with checkpoints at 2 and 4."""
    return train(make_recipe(policy, tmp_path_factory.mktemp("runs"))).folder


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of it, to be damaged."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def edit(name: str, change: Callable[[bytes], bytes]) -> Damage:
    return lambda run: (run / name).write_bytes(change((run / name).read_bytes()))


def edit_json(name: str, change: Callable[[Any], object]) -> Damage:
    def changed(data: bytes) -> bytes:
        value = json.loads(data)
        change(value)
        return json.dumps(value).encode()

    return edit(name, changed)


def unlist(prefix: str) -> Damage:
    """Take files out of the last manifest."""

    def change(entries: Any) -> None:
        entries["files"] = {name: entry for name, entry in entries["files"].items() if not name.startswith(prefix)}

    return edit_json(MANIFEST, change)


def flip(name: str) -> Damage:
    """Invert one bit in the middle of a file."""
    return edit(
        name, lambda data: data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :]
    )


def cut(name: str) -> Damage:
    """Keep the first half of a file."""
    return edit(name, lambda data: data[: len(data) // 2])


def cut_after(name: str, text: bytes) -> Damage:
    """Keep a file up to the end of a text."""
    return edit(name, lambda data: data[: data.index(text) + len(text)])


def write(name: str, content: bytes = b"\xff{ no such content\n") -> Damage:
    return lambda run: (run / name).write_bytes(content)


def remove(name: str) -> Damage:
    return lambda run: (run / name).unlink()


def all_of(*damages: Damage) -> Damage:
    return lambda run: [damage(run) for damage in damages]


def as_of_an_earlier_version(run: Path) -> None:
    """Of the layout before this one, and without manifests."""
    for folder in (run / "checkpoints").iterdir():
        (folder / "manifest.json").unlink()
        state = json.loads((folder / "state.json").read_text())
        (folder / "state.json").write_text(json.dumps(state | {"format": 2}))


def link_last(run: Path) -> None:
    (run / LAST).rename(run.parent / "elsewhere")
    (run / LAST).symlink_to(run.parent / "elsewhere")


TRAIN, REPORT, TRIE, ROLLOUTS, COMPARE, EVAL = "train", "report", "trie", "rollouts", "compare", "eval"
GENERATE, EXPORT = "generate", "export"
POLICY = (EVAL, GENERATE, EXPORT)
READERS = (REPORT, TRIE, ROLLOUTS, COMPARE)
DAMAGES: dict[str, tuple[Damage, str, tuple[str, ...]]] = {
    "flipped weights": (flip(f"{LAST}/model.safetensors"), "model.safetensors", (TRAIN, *POLICY)),
    "cut weights": (cut(f"{LAST}/model.safetensors"), "model.safetensors", (TRAIN, *POLICY)),
    "lost weights": (remove(f"{LAST}/model.safetensors"), "model.safetensors", (TRAIN, *POLICY)),
    "flipped optimizer": (flip(f"{LAST}/{OPTIMIZER}"), OPTIMIZER, (TRAIN,)),
    "other state": (write(f"{LAST}/state.json", b'{"format": 2}'), "state.json", (TRAIN,)),
    "no state": (remove(f"{LAST}/state.json"), "state.json", (TRAIN, *POLICY)),
    "no manifest": (remove(f"{LAST}/manifest.json"), "manifest.json", (TRAIN, *POLICY)),
    "cut manifest": (cut(f"{LAST}/manifest.json"), "manifest.json", (TRAIN, *POLICY)),
    "empty manifest": (write(f"{LAST}/manifest.json", b"{}"), "manifest.json", (TRAIN, *POLICY)),
    "manifest without files": (
        edit_json(MANIFEST, lambda entries: entries["files"].clear()),
        MANIFEST,
        (TRAIN, *POLICY),
    ),
    "manifest without weights": (unlist("model"), MANIFEST, (TRAIN, *POLICY)),
    "manifest without optimizer": (unlist("optimizer"), MANIFEST, (TRAIN, *POLICY)),
    "manifest without state": (unlist("state"), MANIFEST, (TRAIN, *POLICY)),
    "infinite size": (edit_json(MANIFEST, lambda entries: entries["log"].update(size=inf)), MANIFEST, (TRAIN, *POLICY)),
    "unknown key in state": (
        all_of(remove(MANIFEST), edit_json(f"{LAST}/state.json", lambda state: state.update(x=1))),
        "state.json",
        (TRAIN,),
    ),
    "old, no state": (all_of(as_of_an_earlier_version, remove(f"{LAST}/state.json")), "state.json", (TRAIN,)),
    "lost optimizer": (remove(f"{LAST}/{OPTIMIZER}"), OPTIMIZER, (TRAIN,)),
    "linked checkpoint": (link_last, LAST, (TRAIN,)),
    "file for a checkpoint": (write("checkpoints/step_000003"), "checkpoints/step_000003", (TRAIN,)),
    "tokenizer": (write(f"{LAST}/tokenizer.json"), LAST, (TRAIN, TRIE, *POLICY)),
    "model config": (write(f"{LAST}/config.json"), "config.json", (TRAIN, TRIE, *POLICY)),
    "row cut": (write("metrics.jsonl", b'{"step": 1, "lo\n{"step": 2}\n'), "metrics.jsonl", (TRAIN, *READERS)),
    "other row": (
        edit("metrics.jsonl", lambda rows: rows.replace(b'"step": 1,', b'"step": 3,')),
        "metrics.jsonl",
        (TRAIN,),
    ),
    "no rows": (write("metrics.jsonl", b""), "metrics.jsonl", (TRAIN, *READERS)),
    "no log": (remove("metrics.jsonl"), "metrics.jsonl", (TRAIN, *READERS)),
    "rollouts": (write("rollouts/step_000004.parquet"), "step_000004.parquet", (REPORT, TRIE, ROLLOUTS)),
    "other rollouts": (write("rollouts/step_x.parquet"), "step_x.parquet", (REPORT, TRIE, ROLLOUTS)),
    "flipped rollouts": (flip("rollouts/step_000004.parquet"), "step_000004.parquet", (TRIE, ROLLOUTS)),
    "no checkpoints": (lambda run: shutil.rmtree(run / "checkpoints"), "no checkpoint", (TRAIN, *POLICY)),
    "another digit in recipe": (
        edit("recipe.yaml", lambda text: text.replace(b"learning_rate: 0.01", b"learning_rate: 0.03")),
        "recipe.yaml",
        (TRAIN,),
    ),
    "recipe": (write("recipe.yaml"), "recipe.yaml", (TRAIN, *READERS, EVAL)),
    "cut recipe": (cut_after("recipe.yaml", b"trackers: ["), "recipe.yaml", (TRAIN, *READERS, EVAL)),
}


COMMANDS: dict[str, list[object]] = {
    TRAIN: ["--resume"],
    EVAL: ["eval.num_problems=1"],
    REPORT: [],
    TRIE: [],
    ROLLOUTS: [],
    COMPARE: [],
    GENERATE: ["--prompt", "1+1=", "rollout.max_new_tokens=2"],
    EXPORT: ["exported"],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_run_gives_one_clear_line(damage: str, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, file, refusing = DAMAGES[damage]
    make(run)
    monkeypatch.chdir(run.parent)
    before = sorted(run.parent.rglob("*"))
    for command in refusing:
        result = call(command, run, *COMMANDS[command])
        assert sorted(run.parent.rglob("*")) == before, command
        assert result.exit_code == 2, (command, result.exception, result.stdout)
        assert result.stderr.startswith("error: ")
        assert file in result.stderr, command
        assert result.stderr.count("\n") == 1, command


def test_a_run_of_an_earlier_version_is_read_but_not_resumed(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run.parent)
    as_of_an_earlier_version(run)
    (run / ".lock").write_bytes(b"")
    for command, options in COMMANDS.items():
        result = call(command, run, *options)
        if command == TRAIN:
            advice = f"begin a new run from its weights with name=OTHER model.path={run / LAST}"
            assert f"format 2, but this version of srtrl reads {FORMAT}; {advice}" in result.stderr
        else:
            assert (result.exit_code, result.stderr) == (0, ""), (command, result.exception)


def test_a_damaged_checkpoint_names_the_intact_one_and_the_run_goes_on_from_there(run: Path, finished: Path) -> None:
    flip(f"{LAST}/{OPTIMIZER}")(run)
    refused = call("train", run, "--resume")
    assert f"{LAST}/{OPTIMIZER} is missing or not as manifest.json lists it" in refused.stderr
    assert f"{run}/checkpoints/step_000002 before it is intact: --resume --checkpoint 2 continues" in refused.stderr
    assert call("train", run, "--resume", "--checkpoint", 2).exit_code == 0
    assert_same_run(run, finished)


def test_changed_prompts_and_start_models_are_not_resumed(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reordered(*arguments: object, **_: object) -> object:
        return SimpleNamespace(train_prompts=load_task(*arguments).train_prompts[::-1])  # type: ignore[arg-type]

    other = make_policy(tmp_path / "other", seed=1)
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "load_task", reordered)
        assert "the data of task.options has changed" in call("train", run, "--resume").stderr
    monkeypatch.setattr(checkpoint, "locate", lambda _: other)  # where model.path leads now
    refused = call("train", run, "--resume")
    assert (refused.exit_code, refused.stderr.count("\n")) == (2, 1)
    assert f"model.path has changed: config and weights of the reference, {other}, are not those" in refused.stderr
    assert call("train", run, "--resume", "algorithm.kl.coefficient=0").exit_code == 0  # without a reference


def test_damaged_rollouts_are_named_once_and_do_not_stop_a_resume(run: Path, finished: Path) -> None:
    rollouts = run / "rollouts"
    (rollouts / "step_000001.parquet").unlink()
    cut("rollouts/step_000002.parquet")(run)
    write("rollouts/step_000003.parquet", b"")(run)
    assert call("train", run, "--resume", "--checkpoint", 2).exit_code == 0  # 3 and 4 are written again
    result = call("train", run, "--resume")
    assert (result.exit_code, result.stderr) == (0, "")
    assert re.findall(r"--resume: rollouts that are missing or damaged .*: (.*)", result.stdout) == [
        "step_000001.parquet, step_000002.parquet"
    ]
    assert learned_rows(run) == learned_rows(finished)


@pytest.mark.parametrize(
    ("change", "line", "metrics"),
    [
        ("train.learning_rate=0.005", "train.learning_rate: the run has 0.01, now 0.005", {"learning_rate": 0.005}),
        ("algorithm.kl.coefficient=0", "algorithm.kl.coefficient: the run has 0.01, now 0.0", {"kl/ref": None}),
        ("train.num_steps=3", "train.num_steps: the run has 4, now 3", {"step": 3}),
    ],
)
def test_a_change_on_resume_holds_from_there_on(
    change: str, line: str, metrics: dict[str, float | None], run: Path, finished: Path
) -> None:
    result = call("train", run, "--resume", "--checkpoint", 2, change)
    assert (result.exit_code, result.stderr) == (0, "")
    assert f"--resume: {line}" in result.stdout
    assert learned_rows(run)[:3] == learned_rows(finished)[:3]
    assert {name: learned_rows(run)[-1].get(name) for name in metrics} == metrics
    expected = load_recipe(finished / "recipe.yaml", [change, f"output_dir={run.parent}"])
    assert load_recipe(run / "recipe.yaml") == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--checkpoint", 2, "--overwrite"], "--checkpoint needs --resume"),
        (["--resume", "seed=8"], r"run/recipe.yaml:\d+: seed: the run has 7, now 8"),
        (["--resume", "train.learning_rate=-1"], "override `train.learning_rate=-1`"),
        (["--resume", "train.num_steps=3"], "4 are done; --checkpoint resumes from an earlier"),
        (["--resume", "--checkpoint", 3], "has no step_000003; there: step_000002, step_000004"),
    ],
)
def test_what_a_resume_refuses(options: list[object], message: str, run: Path) -> None:
    recipe = run if "--resume" in options else run / "recipe.yaml"
    result = call("train", recipe, *options)
    assert result.exit_code == 2
    assert re.search(message, result.stderr), result.stderr
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step_000002", "step_000004"]
