"""A damaged run: each command names the file in one line, and a resume never begins with other numbers unasked."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny_run import assert_same_run, learned_rows, make_policy, make_recipe, train
from typer.testing import CliRunner, Result

from srtrl.cli import app
from srtrl.recipe.file import load_recipe
from srtrl.run import checkpoint
from srtrl.run.checkpoint import FORMAT, delete
from srtrl.tasks.base import load_task
from srtrl.trainer import trainer

LAST = "checkpoints/step_000004"
OPTIMIZER = "optimizer/shard-00001-model-00001-of-00001.safetensors"


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


def without(prefix: str) -> Callable[[bytes], bytes]:
    """A manifest that does not list some files."""

    def change(data: bytes) -> bytes:
        entries = json.loads(data)
        kept = {name: entry for name, entry in entries["files"].items() if not name.startswith(prefix)}
        return json.dumps(entries | {"files": kept}).encode()

    return change


WAYS: dict[str, Callable[[bytes], bytes]] = {
    "flipped": lambda data: data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :],
    "cut": lambda data: data[: len(data) // 2],
    "empty": lambda _: b"",
    "other": lambda _: b"\xff{ no such content\n",
    "{}": lambda _: b"{}",
    "fileless": without(""),
    "weightless": without("model"),
    "stateless": without("state"),
    "momentless": without("optimizer"),
    "infinite": lambda data: re.sub(rb'"size": \d+', b'"size": Infinity', data, count=1),  # of the rows
    "format-2": lambda _: b'{"format": 2}',
    "unknown-key": lambda data: data.replace(b'"step"', b'"x": 1, "step"'),
    "half-row": lambda _: b'{"step": 1, "lo\n{"step": 2}\n',
    "other-row": lambda data: data.replace(b'"step": 1,', b'"step": 3,'),
    "other-digit": lambda data: data.replace(b"learning_rate: 0.01", b"learning_rate: 0.03"),
    "half-list": lambda data: data[: data.index(b"trackers: [") + len(b"trackers: [")],
}
DAMAGES = """
flipped LAST/model.safetensors: train POLICY
cut LAST/model.safetensors: train POLICY
lost LAST/model.safetensors: train POLICY
flipped LAST/OPTIMIZER: train
lost LAST/OPTIMIZER: train
format-2 LAST/state.json: train
lost LAST/state.json: train POLICY
lost LAST/manifest.json: train POLICY
cut LAST/manifest.json: train POLICY
{} LAST/manifest.json: train POLICY
fileless LAST/manifest.json: train POLICY
weightless LAST/manifest.json: train POLICY
stateless LAST/manifest.json: train POLICY
momentless LAST/manifest.json: train POLICY
infinite LAST/manifest.json: train POLICY
lost LAST/manifest.json + lost LAST/state.json: train
lost LAST/manifest.json + unknown-key LAST/state.json: train
linked LAST: train
other checkpoints/step_000003: train
lost checkpoints => no checkpoint: train POLICY
other LAST/tokenizer.json => LAST: train trie POLICY
other LAST/config.json: train trie POLICY
half-row metrics.jsonl: train READERS
other-row metrics.jsonl: train
empty metrics.jsonl: train READERS
lost metrics.jsonl: train READERS
other rollouts/step_000004.parquet: report trie rollouts
other rollouts/step_x.parquet: report trie rollouts
flipped rollouts/step_000004.parquet: trie rollouts
other-digit recipe.yaml: train
other recipe.yaml: train READERS eval
half-list recipe.yaml: train READERS eval
"""
"""How a file is damaged (and another one) => what each of the commands names, by default that file: the commands."""
NAMES = {
    "LAST": LAST,
    "OPTIMIZER": OPTIMIZER,
    "POLICY": "eval generate export",
    "READERS": "report trie rollouts compare",
}


def damage(run: Path, way: str, name: str) -> None:
    """Damage a file of a run, or a folder."""
    path = run / name
    if way == "linked":
        path.rename(run.parent / "elsewhere")
        path.symlink_to(run.parent / "elsewhere")
    elif way == "lost":
        delete(path)
    else:
        path.write_bytes(WAYS[way](path.read_bytes() if path.is_file() else b""))


def make_old(run: Path) -> None:
    """Make it a run of an earlier version: another layout, neither manifests nor a checksum of the recipe."""
    (run / "recipe.yaml").write_text((run / "recipe.yaml").read_text().partition("\n")[2])
    for folder in (run / "checkpoints").iterdir():
        (folder / "manifest.json").unlink()
        state = json.loads((folder / "state.json").read_text())
        (folder / "state.json").write_text(json.dumps(state | {"format": 2}))


COMMANDS: dict[str, list[object]] = {
    "train": ["--resume"],
    "eval": ["eval.num_problems=1"],
    "generate": ["--prompt", "1+1=", "rollout.max_new_tokens=2"],
    "export": ["exported"],
    **{name: [] for name in NAMES["READERS"].split()},
}


@pytest.mark.parametrize("row", DAMAGES.strip().splitlines())
def test_a_damaged_run_gives_one_clear_line(row: str, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, meaning in NAMES.items():
        row = row.replace(name, meaning)
    damages, _, commands = row.partition(": ")
    damages, _, named = damages.partition(" => ")
    for way, name in (one.split() for one in damages.split(" + ")):
        damage(run, way, name)
        expected = named or Path(name).name
    monkeypatch.chdir(run.parent)
    before = sorted(run.parent.rglob("*"))
    for command in commands.split():
        result = call(command, run, *COMMANDS[command])
        assert sorted(run.parent.rglob("*")) == before, command
        assert result.exit_code == 2, (command, result.exception, result.stdout)
        assert result.stderr.startswith("error: ")
        assert expected in result.stderr, command
        assert result.stderr.count("\n") == 1, command


def test_a_run_of_an_earlier_version_is_read_but_not_resumed(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run.parent)
    make_old(run)
    (run / ".lock").write_bytes(b"")
    for command, options in COMMANDS.items():
        result = call(command, run, *options)
        if command == "train":
            advice = f"begin a new run from its weights with name=OTHER model.path={run / LAST}"
            assert f"format 2, but this version of srtrl reads {FORMAT}; {advice}" in result.stderr
        else:
            assert (result.exit_code, result.stderr) == (0, ""), (command, result.exception)


def test_a_damaged_checkpoint_names_the_intact_one_and_the_run_goes_on_from_there(run: Path, finished: Path) -> None:
    damage(run, "flipped", f"{LAST}/{OPTIMIZER}")
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
    assert (
        f"model.path has changed: config and weights that the run started from, {other}, are not those"
        in refused.stderr
    )
    assert call("train", run, "--resume", "algorithm.kl.coefficient=0").exit_code == 0  # without a reference


def test_damaged_rollouts_are_named_once_and_do_not_stop_a_resume(run: Path, finished: Path) -> None:
    for way, step in (("lost", 1), ("cut", 2), ("empty", 3)):
        damage(run, way, f"rollouts/step_{step:06d}.parquet")
    assert call("train", run, "--resume", "--checkpoint", 2).exit_code == 0  # 3 and 4 are written again
    result = call("train", run, "--resume")
    assert result.exit_code == 0
    assert re.fullmatch(r"its report was not written: \S*step_000002.parquet: cannot read .*\n", result.stderr)
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
        (["seed=8"], r"run/recipe.yaml:\d+: seed: the run has 7, now 8"),
        (["train.num_steps=3"], "4 are done; --checkpoint resumes from an earlier"),
        (["--checkpoint", 3], "has no step_000003; there: step_000002, step_000004"),
    ],
)
def test_what_a_resume_refuses(options: list[object], message: str, run: Path) -> None:
    result = call("train", run, "--resume", *options)
    assert result.exit_code == 2
    assert re.search(message, result.stderr), result.stderr
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step_000002", "step_000004"]
