"""Checkpoints: the same bits back, whole or not there, and who may use a run folder."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from tiny_run import make_recipe
from transformers import AutoModelForCausalLM

from srtrl.drafters.none import Drafter as NoDrafter
from srtrl.metrics import read_metrics
from srtrl.model.value_model import ValueModel
from srtrl.model.weights import load_model, load_tokenizer
from srtrl.recipe.file import load_recipe
from srtrl.recipe.schema import CriticSection
from srtrl.run import checkpoint
from srtrl.run.checkpoint import (
    TrainerState,
    checkpoint_to_resume,
    latest_checkpoint,
    list_checkpoints,
    read_state,
    save_checkpoint,
)
from srtrl.run.folder import check_run_folder, open_run_folder
from srtrl.trainer.critic import Critic, ValueObjective
from srtrl.trainer.optimizer import build_optimizer


def save(policy: Path, folder: Path, step: int, *, keep: int = 2, critic: Critic | None = None) -> Path:
    """Save the policy as the checkpoint of this step."""
    (folder.parent / "metrics.jsonl").touch()
    model = load_model(str(policy), dtype=torch.float32, device="cpu")
    return save_checkpoint(
        folder,
        TrainerState(step=step, policy_version=step - 1, num_draws=5 * step),
        model=model,
        optimizer=build_optimizer(model, learning_rate=0.01, weight_decay=0.1, betas=(0.9, 0.99)),
        tokenizer=load_tokenizer(str(policy)),
        end_ids=[0],
        drafter=NoDrafter(),
        keep=keep,
        critic=critic,
    )


def test_all_files_are_made_durable_before_the_rename(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file whose name is lost in a power failure is lost: the folder of the critic too must be synced."""
    critic_model = ValueModel(load_model(str(policy), dtype=torch.float32, device="cpu"))
    optimizer = build_optimizer(critic_model, learning_rate=0.01, weight_decay=0.0, betas=(0.9, 0.99))
    synced: list[Path] = []
    monkeypatch.setattr(checkpoint, "sync_folder", synced.append)
    path = save(
        policy, tmp_path, 3, critic=Critic(objective=ValueObjective(critic_model, CriticSection()), optimizer=optimizer)
    )
    *inside, temporary, parent = synced
    assert (temporary.name, parent) == (".step_000003.writing", tmp_path)
    assert {one.relative_to(temporary) for one in inside} == {one.relative_to(path) for one in path.rglob("*")}


def test_the_new_folder_is_there_before_the_old_one_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    final, deletions = tmp_path / "policy", list[tuple[str, str]]()
    final.mkdir()
    (final / "weights").write_text("old")
    with checkpoint.written_beside(final) as temporary:
        (temporary / "weights").write_text("new")
        monkeypatch.setattr(
            shutil,
            "rmtree",
            lambda path, **_: deletions.append((path.name, (final / "weights").read_text())),
        )
    assert deletions[-1] == (".policy.deleting", "new")
    assert (tmp_path / ".policy.deleting" / "weights").read_text() == "old"


def test_checkpoint_is_a_model_for_transformers(policy: Path, tmp_path: Path) -> None:
    path = save(policy, tmp_path, 1)
    model = AutoModelForCausalLM.from_pretrained(path)
    assert model.generation_config.eos_token_id == 0
    ours = load_model(str(policy), dtype=torch.float32, device="cpu")
    assert torch.equal(model.state_dict()["model.embed_tokens.weight"], ours.embedding)


def test_only_the_newest_are_kept_by_number_of_their_step(policy: Path, tmp_path: Path) -> None:
    (tmp_path / "step_2000000.bak").mkdir()  # not a checkpoint
    for step in (2, 4, 999999, 1000000):
        save(policy, tmp_path, step, keep=2)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_999999", "step_1000000"]
    assert (tmp_path / "step_2000000.bak").is_dir()


def test_failed_write_leaves_the_last_checkpoint(policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = save(policy, tmp_path, 1, keep=1)
    before = {path: path.read_bytes() for path in first.rglob("*.*")}

    def no_space(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors.torch, "save", no_space)  # that of the optimizer's state
    with pytest.raises(OSError, match=r"No space left on device: .*step_000002\.writing/optimizer"):
        save(policy, tmp_path, 2, keep=1)
    assert latest_checkpoint(tmp_path) == first
    assert {path: path.read_bytes() for path in first.rglob("*.*")} == before


def test_other_format_is_refused(policy: Path, tmp_path: Path) -> None:
    path = save(policy, tmp_path, 1)
    (path / "state.json").write_text('{"step": 1, "policy_version": 1, "format": 99}')
    with pytest.raises(ValueError, match=r"state\.json: format 99"):
        read_state(path)


# --- The run folder ---------------------------------------------------------------------------------------------------


def test_run_folder_is_not_overwritten_unasked(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path / "policy", tmp_path)
    with open_run_folder(recipe) as run:
        run.log.write(1, {"loss": 1.0})
    with pytest.raises(ValueError, match=r"--resume continues .*--overwrite deletes"):
        check_run_folder(recipe, resume=False, overwrite=False)
    with pytest.raises(ValueError, match="exclude each other"):
        check_run_folder(recipe, resume=True, overwrite=True)
    with open_run_folder(recipe, overwrite=True):
        assert read_metrics(tmp_path / "run" / "metrics.jsonl") == []


def not_a_run(folder: Path) -> None:
    folder.mkdir()
    for name in ("recipe.yaml", "report.html"):
        (folder / name).write_text("years of work")


def run_of_an_earlier_version(folder: Path) -> None:
    with open_run_folder(make_recipe(folder.parent / "policy", folder.parent)):
        (folder / ".lock").write_text("")


def link_to_a_run(folder: Path) -> None:
    with open_run_folder(make_recipe(folder.parent / "policy", folder.parent / "elsewhere")) as run:
        folder.symlink_to(run.path)


def file_for_a_folder(folder: Path) -> None:
    with open_run_folder(make_recipe(folder.parent / "policy", folder.parent)):
        (folder / "rollouts").rmdir()
        (folder / "rollouts").touch()


@pytest.mark.parametrize(
    ("make", "flag", "refused"),
    [
        (not_a_run, "overwrite", "--overwrite: .*run has no mark of srtrl .*delete it yourself"),
        (not_a_run, "resume", "--resume: .*no recipe.yaml or no .lock, so it is not a run"),
        (run_of_an_earlier_version, "overwrite", r"no mark of srtrl \(as in runs of earlier versions"),
        (run_of_an_earlier_version, "resume", ""),
        (link_to_a_run, "overwrite", "run is a link"),
        (link_to_a_run, "resume", ""),
        (file_for_a_folder, "overwrite", ""),
        (file_for_a_folder, "resume", "rollouts is a file; expected a folder of the run"),
    ],
)
def test_which_folders_a_run_takes_over(make: Callable[[Path], None], flag: str, refused: str, tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path / "policy", tmp_path)
    make(tmp_path / "run")
    before = sorted(tmp_path.rglob("*"))
    if refused:
        with pytest.raises(ValueError, match=refused):
            check_run_folder(recipe, overwrite=flag == "overwrite", resume=flag == "resume")
        assert sorted(tmp_path.rglob("*")) == before
    else:
        with open_run_folder(recipe, overwrite=flag == "overwrite", resume=flag == "resume"):
            pass


def test_overwrite_deletes_the_files_of_the_run_alone(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path / "policy", tmp_path)
    with open_run_folder(recipe) as run:
        pass
    mine = [run.path / "notes.txt", run.path / "code" / "reward.py", tmp_path / "big" / "step_000001" / "weights"]
    for file in mine:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("years of work")
    run.checkpoints.rmdir()
    run.checkpoints.symlink_to(tmp_path / "big")
    (run.path / "rollouts" / "step_000001.parquet").touch()
    with open_run_folder(recipe, overwrite=True) as again:
        assert again.checkpoint is None
    assert [file.read_text() for file in mine] == ["years of work"] * 3
    assert list((run.path / "rollouts").iterdir()) == []
    assert not run.checkpoints.is_symlink()


def test_resume_takes_the_folder_back_to_its_checkpoint(policy: Path, tmp_path: Path) -> None:
    recipe = make_recipe(policy, tmp_path)
    rollouts = tmp_path / "run" / "rollouts"
    with open_run_folder(recipe) as run:
        (run.checkpoints / ".step_000003.writing").mkdir()
        for step in (0, 1, 2, 3):
            run.log.write(step, {"loss": 1.0})
            (rollouts / f"step_{step:06d}.parquet").touch()
            if step == 2:
                save(policy, run.checkpoints, 2)
        mine = run.path / "analysis" / "step_000009.parquet"
        mine.parent.mkdir()
        mine.touch()
    with open_run_folder(recipe, resume=True) as run:
        assert run.checkpoint == run.checkpoints / "step_000002"
        assert [row["step"] for row in read_metrics(run.path / "metrics.jsonl")] == [0, 1, 2]
        assert sorted(path.name for path in rollouts.iterdir())[-1] == "step_000002.parquet"
        assert [path.name for path in run.checkpoints.iterdir()] == ["step_000002"]
        assert mine.is_file()


def test_the_repair_of_a_damaged_log_reads_no_row_after_the_intact_checkpoint(policy: Path, tmp_path: Path) -> None:
    """Or it would fail, with the later checkpoint deleted already."""
    recipe = make_recipe(policy, tmp_path)
    with open_run_folder(recipe) as run:
        for step in (1, 2):
            run.log.write(step, {"loss": 1.0})
            save(policy, run.checkpoints, step)
    log = tmp_path / "run" / "metrics.jsonl"
    damaged = log.read_bytes().replace(b'{"step": 2', b'{"step" 2')
    log.write_bytes(damaged)
    with pytest.raises(ValueError, match=r"metrics\.jsonl has not all rows.*--resume --checkpoint 1 continues"):
        checkpoint_to_resume(tmp_path / "run" / "checkpoints")
    with open_run_folder(recipe, resume=True, from_step=1) as run:
        assert [row["step"] for row in read_metrics(log)] == [1]
        assert [path.name for path in run.checkpoints.iterdir()] == ["step_000001"]


def test_resume_without_a_checkpoint_starts_again(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path / "policy", tmp_path)
    with open_run_folder(recipe, resume=True) as run:  # there is no folder at all
        run.log.write(0, {"eval/accuracy": 0.5})
    with open_run_folder(recipe, resume=True) as run:
        assert run.checkpoint is None
        assert read_metrics(run.path / "metrics.jsonl") == []


@pytest.mark.parametrize(
    ("first", "changes", "refused"),
    [
        ({}, {"train__learning_rate": 0.5}, "train.learning_rate: the run has 0.01, now 0.5"),
        ({}, {"task__options": {"num_train": 11, "num_eval": 6, "max_operations": 2}}, "task.options.num_train"),
        ({}, {"train__num_steps": 3}, "train.num_steps"),
        ({}, {"train__num_steps": 9}, ""),
        ({}, {"train__num_steps": 9, "train__schedule": "cosine"}, "train.schedule"),
        ({}, {"log__trackers": ["tensorboard"], "train__keep_checkpoints": 7}, ""),
        ({}, {"rollout__slots": 3}, ""),
        ({}, {"rollout__slots": 3, "rollout__deterministic": False}, "rollout.deterministic"),
        # the learning rates so far would have been others
        ({"train__schedule": "linear"}, {"train__schedule": "linear", "train__num_steps": 9}, "train.num_steps"),
    ],
)
def test_resume_with_another_recipe(
    tmp_path: Path, first: dict[str, Any], changes: dict[str, Any], refused: str
) -> None:
    with open_run_folder(make_recipe(tmp_path / "policy", tmp_path, **first)):
        pass
    changed = make_recipe(tmp_path / "policy", tmp_path, **changes)
    if refused:
        with pytest.raises(ValueError, match=refused):
            check_run_folder(changed, resume=True, overwrite=False)
    else:
        with open_run_folder(changed, resume=True) as run:
            assert load_recipe(run.path / "recipe.yaml") == changed
