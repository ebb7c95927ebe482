"""Checkpoints: the same bits back, whole or not there, and who may use a run folder."""

import re
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_run import assert_same_run, make_recipe, open_run, train
from torch import nn

from srtrl import ranks
from srtrl.drafters.none import Drafter as NoDrafter
from srtrl.evaluation.policy import resolve_eval_source
from srtrl.features.critic import CRITIC_FOLDER, CRITIC_OPTIMIZER, ValueModel, save_value_model
from srtrl.files import is_temporary, new_folder, temporary_beside
from srtrl.metrics import read_metrics
from srtrl.model.folders import load_tokenizer
from srtrl.model.transformer import Transformer
from srtrl.model.weights import load_model
from srtrl.ranks.sharding import reshard, unshard
from srtrl.recipe.file import load_recipe
from srtrl.run.checkpoint import OPTIMIZER, PolicyFiles, TrainerState, checkpoint_to_resume, save_checkpoint
from srtrl.run.folder import check_run_folder, open_run_folder
from srtrl.run.steps import list_checkpoints
from srtrl.trainer.optimizer import MasterAdamW, build_optimizer

ADAMW: dict[str, Any] = {"learning_rate": 0.01, "weight_decay": 0.1, "betas": (0.9, 0.99)}


def save(
    policy: Path,
    folder: Path,
    step: int,
    *,
    keep: int = 2,
    models: Sequence[nn.Module] = (),
    optimizers: Sequence[MasterAdamW] = (),
) -> Path:
    """Save the checkpoint of a step: of the policy, or of these models (and a critic) with their optimizers."""
    if ranks.is_main():
        folder.parent.mkdir(parents=True, exist_ok=True)
        (folder.parent / "metrics.jsonl").touch()
    model, *critics = models or [load_model(policy, dtype=torch.float32, device="cpu")]
    assert isinstance(model, Transformer)
    names = (OPTIMIZER, CRITIC_OPTIMIZER)
    tensors = {
        name: optimizer.tensors(model.dtype)
        for name, optimizer in zip(names, optimizers or [build_optimizer(model, **ADAMW)], strict=False)
    }
    parts: list[Any] = [PolicyFiles(model=model, tokenizer=load_tokenizer(str(policy)), end_ids=[0]), NoDrafter()]
    for critic in critics:
        unshard(critic)
        parts.append(SimpleNamespace(save=lambda path, model=critic: save_value_model(model, path / CRITIC_FOLDER)))
    state = TrainerState(step=step, policy_version=step - 1, num_draws=5 * step)
    path = save_checkpoint(folder, state, tensors=tensors, parts=parts, keep=keep)
    for critic in critics:
        reshard(critic)
    return path


def test_all_files_are_made_durable_before_the_rename(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file whose name is lost in a power failure is lost: the folder of the critic too must be synced."""
    model, body = (load_model(policy, dtype=torch.float32, device="cpu") for _ in range(2))
    models = [model, ValueModel(body)]
    synced: list[Path] = []
    monkeypatch.setattr("srtrl.files.sync_folder", synced.append)
    path = save(policy, tmp_path, 3, models=models, optimizers=[build_optimizer(one, **ADAMW) for one in models])
    *inside, temporary, parent = synced[-len([*path.rglob("*")]) - 2 :]  # after those of single files
    assert is_temporary(temporary)
    assert parent == tmp_path
    assert {one.relative_to(temporary) for one in inside} == {one.relative_to(path) for one in path.rglob("*")}


def test_a_folder_that_cannot_be_finished_leaves_nothing(tmp_path: Path) -> None:
    for name in (".policy.writing", ".policy.deleting"):  # of the user: temporary names are random
        (tmp_path / name).mkdir()
    before = contents(tmp_path)
    with pytest.raises(KeyError), new_folder(tmp_path / "policy") as temporary:  # noqa: PT012
        (temporary / "weights").touch()
        raise KeyError
    assert contents(tmp_path) == before


def test_only_the_newest_are_kept_by_number_of_their_step(policy: Path, tmp_path: Path) -> None:
    (tmp_path / "step_2000000.bak").mkdir()  # not a checkpoint
    for step in (2, 4, 999999, 1000000):
        save(policy, tmp_path, step, keep=2)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_999999", "step_1000000"]
    assert (tmp_path / "step_2000000.bak").is_dir()


USER_FILES = (
    *("rollouts/selected.csv", "rollouts/step_000099.mine.parquet", "rollouts/step_x.parquet", "rollouts/.step_mine"),
    *("checkpoints/best/model", "checkpoints/notes.txt", "checkpoints/step_000099.bak", "checkpoints/.step_mine"),
    *("report.html", "analysis/step_000009.parquet", ".srtrl_notes", ".metrics.jsonl.7848.tmp"),
)
"""Names in a run's folder that srtrl never gives, or that a user keeps."""


# --- The run folder ---------------------------------------------------------------------------------------------------


def contents(folder: Path) -> dict[str, bytes | None]:
    """Names and bytes of everything in a folder; None for a folder in it."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def test_overwrite_renames_the_whole_folder_and_a_failed_start_renames_it_back(tmp_path: Path) -> None:
    recipe, folder, outside = make_recipe(tmp_path / "policy", tmp_path), tmp_path / "run", tmp_path / "outside"
    with open_run(recipe) as run:
        run.log.write(1, {"loss": 1.0})
    outside.mkdir()
    (outside / "precious").write_text("years of work")
    (folder / "checkpoints" / "best").symlink_to(outside)
    (folder / "rollouts" / "notes.txt").write_text("years of work")
    (folder / "code").mkdir()
    first = contents(folder)
    for error in (KeyboardInterrupt, ValueError):
        with pytest.raises(error), open_run_folder(recipe, overwrite=True):  # noqa: PT012
            assert contents(tmp_path / "run.1") == first
            raise error
        assert contents(folder) == first
        assert not (tmp_path / "run.1").exists()
    for number in (1, 2):
        with open_run(recipe, overwrite=True) as run:
            assert run.moved_to == tmp_path / f"run.{number}"
            assert (run.checkpoint, read_metrics(folder / "metrics.jsonl")) == (None, [])
            run.log.write(2, {"loss": 2.0})
    assert contents(tmp_path / "run.1") == first
    assert (outside / "precious").read_text() == "years of work"
    assert [row["loss"] for row in read_metrics(tmp_path / "run.2" / "metrics.jsonl")] == [2.0]
    (folder / "recipe.yaml").write_text("years of work")
    with open_run(recipe, overwrite=True):  # whatever is in it
        assert (tmp_path / "run.3" / "recipe.yaml").read_text() == "years of work"


def link(path: Path) -> None:
    path.symlink_to(path.parent.parent / "precious")


NO_RUNS: list[tuple[str, Callable[[Path], object], dict[str, bool], str]] = [
    ("run", link, {"overwrite": True}, "run is a link"),
    ("run", link, {"resume": True}, "run is a link"),
    ("run/.lock", link, {"overwrite": True}, r"run/\.lock cannot be made or opened"),
    ("run/.lock", link, {"resume": True}, "holds no recipe.yaml"),
    ("run/.lock", link, {}, "run exists: "),
    ("run/.lock", Path.mkdir, {"overwrite": True}, r"run/\.lock cannot be made or opened"),
    ("run/.lock", lambda path: path.write_text("of another program"), {}, "run exists: "),
    ("run/.env", Path.touch, {}, "run exists: "),
    ("run/report.html", Path.touch, {"resume": True}, r"run holds no recipe\.yaml, so it is not a run"),
    ("run/policy", Path.mkdir, {"overwrite": True}, r"model\.path: .* is in the run's own folder"),
    ("run", Path.touch, {"overwrite": True}, "run is a file"),
]


def test_what_is_no_run_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    """Links lead to a file of the user, or to a name where none must be made."""
    for number, ((name, make, flags, message), has_target) in enumerate(product(NO_RUNS, (True, False))):
        folder = tmp_path / str(number)
        (folder / name).parent.mkdir(parents=True)
        if has_target:
            (folder / "precious").write_text("years of work")
        make(folder / name)
        before = contents(folder)
        recipe = make_recipe(folder / "run" / "policy", folder)
        with pytest.raises(ValueError, match=message), open_run(recipe, **flags):
            pass
        assert contents(folder) == before, (name, flags)
    message = r"^/proc/x/run/\.lock cannot be made"
    with pytest.raises(ValueError, match=message), open_run(make_recipe(Path("policy"), Path("/proc/x"))):
        pass


def test_resume_takes_the_folder_back_to_its_checkpoint_when_nothing_can_refuse(policy: Path, tmp_path: Path) -> None:
    """It deletes only names of its own exact form: those of later steps, and temporary ones of a killed run."""
    recipe, folder = make_recipe(policy, tmp_path), tmp_path / "run"
    with open_run(recipe) as run:
        for step in (0, 1, 2, 3):
            run.log.write(step, {"loss": 1.0})
            (folder / "rollouts" / f"step_{step:06d}.parquet").touch()
            if step in (1, 2):
                save(policy, run.checkpoints, step)
    unfinished = [temporary_beside(folder / name) for name in ("recipe.yaml", "rollouts/x", "checkpoints/x")]
    for path in unfinished:
        path.mkdir()
    for name in USER_FILES:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()
    before = contents(folder)
    other = make_recipe(policy, tmp_path, train__learning_rate=0.5)
    for from_step in (None, 1):
        with pytest.raises(KeyError), open_run_folder(other, resume=True, from_step=from_step):  # a tracker, say
            raise KeyError
        assert contents(folder) == before
    with open_run(other, resume=True) as run:
        assert run.checkpoint == run.checkpoints / "step_000002"
        assert [row["step"] for row in read_metrics(folder / "metrics.jsonl")] == [0, 1, 2]
        assert load_recipe(folder / "recipe.yaml") == other
    gone = {"rollouts/step_000003.parquet", *(str(path.relative_to(folder)) for path in unfinished)}
    assert contents(folder).keys() == before.keys() - gone
    log = folder / "metrics.jsonl"
    log.write_bytes(log.read_bytes().replace(b'{"step": 2', b'{"step" 2'))
    with pytest.raises(ValueError, match=r"metrics\.jsonl has not all rows.*--resume --checkpoint 1 continues"):
        checkpoint_to_resume(folder / "checkpoints")
    with open_run(recipe, resume=True, from_step=1) as run:  # reads no damaged row
        assert list_checkpoints(run.checkpoints) == [run.checkpoints / "step_000001"]
        assert [row["step"] for row in read_metrics(log)] == [0, 1]
    assert all((folder / name).is_file() for name in USER_FILES)


def test_resume_without_a_checkpoint_starts_again(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path / "policy", tmp_path)
    with open_run(recipe, resume=True) as run:  # there is no folder at all
        run.log.write(0, {"eval/accuracy": 0.5})
    with open_run(recipe, resume=True) as run:
        assert run.checkpoint is None
        assert read_metrics(run.path / "metrics.jsonl") == []


def test_resume_with_another_recipe(tmp_path: Path) -> None:
    """Locked options are refused with their place in the run's recipe; changes of other options are listed."""
    with open_run(make_recipe(tmp_path / "policy", tmp_path)):
        pass
    other = make_recipe(tmp_path / "policy", tmp_path, log__trackers=["tensorboard"])
    assert check_run_folder(other, resume=True) == ["log.trackers: the run has [], now ['tensorboard']"]
    locked: dict[str, dict[str, Any]] = {
        f"task.options.note: the run has nothing, now '{196 * 'x'}...": {"task__options__note": 300 * "x"},
        "task.options.num_train: the run has 10, now 11": {"task__options__num_train": 11},
        "rewards: the run has ": {"rewards": [{"name": "correct"}]},
        "model.dtype: the run has 'float32', now 'bfloat16'": {"model__dtype": "bfloat16"},
        "critic: the run has None, now nothing": {"critic": {}, "algorithm__advantage": "gae"},
    }
    for line, changes in locked.items():
        with pytest.raises(ValueError, match="--resume: these options cannot change within a run") as caught:
            check_run_folder(make_recipe(tmp_path / "policy", tmp_path, **changes), resume=True)
        assert re.search(rf"{tmp_path}/run/recipe\.yaml(:\d+)?: {re.escape(line)}", str(caught.value)), changes


def test_the_best_evaluation_has_a_checkpoint_that_stays(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in a run that is killed and resumed; the first of equal ones counts, and a resume from before forgets it."""
    changes: dict[str, Any] = {
        "train__keep_best": "eval/accuracy",
        "train__keep_checkpoints": 1,
        "eval__every_steps": 1,
    }
    recipes = {
        name: make_recipe(policy, tmp_path / name, **changes, train__num_steps=6, train__checkpoint_every=3)
        for name in ("whole", "killed")
    }
    accuracies = [0.9, 0.2, 0.5, 0.3, 0.7, 0.7, 0.1]  # before training, and after each step
    killed_after = 99

    def evaluated(context: Any, *_: Any, **__: Any) -> tuple[list[Any], dict[str, float]]:
        if (step := context.turns.step) == killed_after:
            raise KeyboardInterrupt
        ends = {"eval/accuracy_low": 0.0, "eval/accuracy_high": 1.0}
        return [], {"eval/accuracy": accuracies[step], **ends}

    monkeypatch.setattr("srtrl.rollout.one_turn.OneTurn.begin_step", lambda turns, step: setattr(turns, "step", step))
    monkeypatch.setattr("srtrl.trainer.trainer.evaluate", evaluated)

    def kept(name: str) -> list[str]:
        return [path.name[-1] for path in list_checkpoints(recipes[name].folder / "checkpoints")]

    train(recipes["whole"])
    assert kept("whole") == ["4", "6"]
    folder = recipes["whole"].folder
    assert resolve_eval_source(str(folder), best=True)[0] == str(folder / "checkpoints" / "step_000004")
    for killed_after, expected in ((3, ["2"]), (5, ["4"])):
        with pytest.raises(KeyboardInterrupt):
            train(recipes["killed"], resume=killed_after > 3)
        assert kept("killed") == expected
    killed_after = 99
    train(recipes["killed"], resume=True)
    assert_same_run(recipes["killed"].folder, folder)
    assert kept("killed") == ["4", "6"]
    accuracies[5:] = [0.6, 0.8]
    train(recipes["killed"], resume=True, from_step=4)
    assert kept("killed") == ["6"], "the best is the newest"
