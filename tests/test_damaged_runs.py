"""A damaged run: each command names the file in one line, and a resume never begins with other numbers unasked."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pyarrow
import pyarrow.parquet
import pytest
from bench_cases import run as call
from test_bad_input import TABLES
from tiny_run import assert_same_run, learned_rows, make_policy

from srtrl import build
from srtrl.recipe.file import load_recipe
from srtrl.run import checkpoint
from srtrl.run.checkpoint import FORMAT, delete
from srtrl.run.machine import MACHINE_FILE
from srtrl.tasks.base import load_task

LAST = "checkpoints/step_000004"
OPTIMIZER = "optimizer/shard-00001-model-00001-of-00001.safetensors"


@pytest.fixture(autouse=True)
def no_charts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports without their pictures, which take seconds."""
    monkeypatch.setattr("srtrl.report.page.draw", lambda *_: "<svg/>")


@pytest.fixture
def run(finished: Callable[[], Path], tmp_path: Path) -> Path:
    """A copy of a run of four steps with checkpoints at 2 and 4, to be damaged."""
    return Path(shutil.copytree(finished(), tmp_path / "run"))


def with_column(name: str, value: object) -> Callable[[bytes], bytes]:
    """Rollouts that can be read, in which a column holds something else; without a value it is not there."""

    def change(data: bytes) -> bytes:
        table, sink = pyarrow.parquet.ParquetFile(pyarrow.BufferReader(data)).read(), pyarrow.BufferOutputStream()
        other = table.drop([name])
        if value != "":
            other = other.append_column(name, pyarrow.array([value] * len(table)))
        pyarrow.parquet.write_table(other, sink)
        return bytes(sink.getvalue())

    return change


WAYS: dict[str, Callable[[bytes], bytes]] = {
    "flipped": lambda data: data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :],
    "cut": lambda data: data[: len(data) // 2],
    "empty": lambda _: b"",
    "other": lambda _: b"\xff{ no such content\n",
    "{}": lambda _: b"{}",
    "nested": lambda _: b"[" * 100_000,
    "format-2": lambda _: b'{"format": 2}',
    "half-row": lambda _: b'{"step": 1, "lo\n{"step": 2}\n',
    "other-row": lambda data: data.replace(b'"step": 1,', b'"step": 3,'),
    "other-digit": lambda data: data.replace(b"learning_rate: 0.01", b"learning_rate: 0.03"),
    "huge": lambda data: re.sub(rb'"reward/mean": [-\d.e]+', b'"reward/mean": 1e308', data),
    "no-reward": with_column("reward", ""),
    "other-tokens": with_column("prompt_token_ids", [1, 2]),
    "half-list": lambda data: data[: data.index(b"trackers: [") + len(b"trackers: [")],
}
NAMES = {
    "LAST": LAST,
    "OPTIMIZER": OPTIMIZER,
    "POLICY": "eval generate export",
    "READERS": "report rollouts compare",
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


COMMANDS: dict[str, list[object]] = {
    "train": ["--resume"],
    "eval": ["eval.num_problems=1"],
    "generate": ["--prompt", "1+1=", "rollout.max_new_tokens=2"],
    "export": ["exported"],
    **{name: [] for name in NAMES["READERS"].split()},
}


@pytest.mark.parametrize("row", TABLES["damages"].splitlines())
def test_a_damaged_run_gives_one_clear_line(row: str, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, meaning in NAMES.items():
        row = row.replace(name, meaning)
    damages, _, commands = row.partition(": ")
    damages, _, named = damages.partition(" => ")
    first, *further = damages.split(" + ")
    ways, _, file = first.partition(" ")
    monkeypatch.chdir(run.parent)
    for number, way in enumerate(ways.split("|")):
        copy = Path(shutil.copytree(run, run.parent / f"copy{number}" / "run"))
        for one, name in [(way, file), *(each.split() for each in further)]:
            damage(copy, one, name)
            expected = named or Path(name).name
        before = sorted(run.parent.rglob("*"))
        for command in commands.split():
            result = call(command, copy, *COMMANDS[command])
            assert sorted(run.parent.rglob("*")) == before, (way, command)
            assert result.exit_code == 2, (way, command, result.exception, result.stdout)
            assert result.stderr.startswith("error: "), (way, command)
            assert expected in result.stderr, (way, command)
            assert result.stderr.count("\n") == 1, (way, command)


@pytest.mark.parametrize("version", [2, 5])
def test_a_run_of_an_earlier_version_is_read_but_not_resumed(
    version: int, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has another layout, other manifests or none, and no checksum of the recipe."""
    monkeypatch.chdir(run.parent)
    (run / "recipe.yaml").write_text((run / "recipe.yaml").read_text().partition("\n")[2])
    for folder in (run / "checkpoints").iterdir():
        manifest = folder / "manifest.json"
        manifest.write_bytes(manifest.read_bytes().replace(b"crc32", b"sha256"))
        if version == 2:
            manifest.unlink()
        state = json.loads((folder / "state.json").read_text())
        (folder / "state.json").write_text(json.dumps(state | {"format": version}))
    (run / ".lock").write_bytes(b"")
    for command, options in COMMANDS.items():
        result = call(command, run, *options)
        if command == "train":
            advice = f"begin a new run from its weights with name=OTHER model.path={run / LAST}"
            assert f"format {version}, but this version of srtrl reads {FORMAT}; {advice}" in result.stderr
        else:
            said = re.sub(r"^first prompt of .*\n(\|.*\n)*", "", result.stderr) if command == "eval" else result.stderr
            assert (result.exit_code, said) == (0, ""), (command, result.exception)


# --- What a resume goes on from, and what it refuses ------------------------------------------------------------------


def test_a_damaged_run_goes_on_from_the_intact_checkpoint(run: Path, finished: Callable[[], Path]) -> None:
    damage(run, "flipped", f"{LAST}/{OPTIMIZER}")
    damage(run, "empty", "rollouts/step_000003.parquet")  # written again
    assert call("generate", run, *COMMANDS["generate"]).exit_code == 0, "the policy alone is read"
    refused = call("train", run, "--resume").stderr
    assert f"{LAST}/{OPTIMIZER} is missing or not as manifest.json lists it" in refused
    assert f"{run}/checkpoints/step_000002 before it is intact: --resume --checkpoint 2 continues" in refused
    assert call("train", run, "--resume", "--checkpoint", 2).exit_code == 0
    assert_same_run(run, finished())
    texts = [folder / LAST / "rollouts_train.safetensors" for folder in (run, finished())]
    assert len({file.stat().st_size for file in texts}) == 1, "drafts go on with all that they had"
    damage(run, "cut", "rollouts/step_000002.parquet")
    result = call("train", run, "--resume")
    assert result.exit_code == 0
    assert re.fullmatch(r"its report was not written: \S*step_000002.parquet: cannot read .*\n", result.stderr)


def test_a_run_has_the_rounding_of_its_products_in_a_file(run: Path) -> None:
    assert f", MKL_CBWR={os.environ['MKL_CBWR']}, torch " in (run / MACHINE_FILE).read_text()


CHANGES: list[tuple[str, str, dict[str, float | None]]] = [
    ("train.learning_rate=0.005", "train.learning_rate: the run has 0.01, now 0.005", {"learning_rate": 0.005}),
    ("algorithm.kl.coefficient=0", "algorithm.kl.coefficient: the run has 0.01, now 0.0", {"kl/ref": None}),
    ("train.num_steps=3", "train.num_steps: the run has 4, now 3", {"step": 3}),
]
"""An option, what is said of it, and metrics of the last step."""


@pytest.mark.parametrize(("change", "line", "metrics"), CHANGES)
def test_a_change_on_resume_holds_from_there_on(
    change: str,
    line: str,
    metrics: dict[str, float | None],
    run: Path,
    finished: Callable[[], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(run.parent)
    result = call("train", run, "--resume", "--checkpoint", 2, change)
    assert (result.exit_code, result.stderr) == (0, "")
    assert f"resuming: {line}" in result.stdout
    assert f"resuming {run.name} after step 2 of " in result.stdout
    assert f"the run is in {run.name}\n" in result.stdout
    assert learned_rows(run)[:3] == learned_rows(finished())[:3]
    assert {name: learned_rows(run)[-1].get(name) for name in metrics} == metrics
    expected = load_recipe(finished() / "recipe.yaml", [change, f"output_dir={run.parent}"])
    assert load_recipe(run / "recipe.yaml") == expected


def test_what_a_resume_refuses(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*options: object) -> str:
        result = call("train", run, "--resume", *options)
        assert result.exit_code == 2, result.stderr
        assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step_000002", "step_000004"]
        return result.stderr

    monkeypatch.chdir(run.parent)
    assert re.search(r"^  run/recipe.yaml:\d+: seed: the run has 7, now 8", refused("seed=8"), re.MULTILINE)
    assert "4 are done; --checkpoint resumes from an earlier" in refused("train.num_steps=3")
    assert "has no step_000003; there: step_000002, step_000004" in refused("--checkpoint", 3)

    def reordered(*arguments: object, **_: object) -> object:
        return SimpleNamespace(train_prompts=load_task(*arguments).train_prompts[::-1])  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(build, "load_task", reordered)
        assert "the data of task.options has changed" in refused()
    other = make_policy(tmp_path / "other", seed=1)
    monkeypatch.setattr(checkpoint, "locate", lambda _: other)  # where model.path leads now
    changed = f"model.path has changed: config and weights that the run started with, {other}, are not those"
    message = refused()
    assert (changed in message, message.count("\n")) == (True, 1), message
    assert call("train", run, "--resume", "algorithm.kl.coefficient=0").exit_code == 0  # without a reference
