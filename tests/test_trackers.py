"""Records in trackers: the recipe, metrics and tables of samples; TensorBoard's own files and a stand-in for wandb."""

import shutil
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from accelerate.utils import LoggerType
from tiny_run import make_recipe, train

from srtrl.checks import check_recipe
from srtrl.metrics import read_metrics
from srtrl.run.trackers import start_trackers

SHORT: dict[str, Any] = {"train__num_steps": 2}


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """A module of that name with the calls that accelerate's tracker makes."""
    module = Mock()
    module.Table = lambda columns, data, dataframe: [dict(zip(columns, row, strict=True)) for row in data]
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.setattr("accelerate.tracking._available_trackers", [LoggerType.TENSORBOARD, LoggerType.WANDB])
    return module


def test_trackers_get_the_recipe_metrics_and_samples(
    policy: Path, tmp_path: Path, wandb: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("srtrl.run.trackers.SAMPLES_EVERY", 2)
    both = ["wandb", "tensorboard"]
    result = train(make_recipe(policy, tmp_path, log__trackers=both, log__project="sums", **SHORT))
    wandb.init.assert_called_once_with(project="sums", name="run", dir=str(result.folder))
    run = wandb.init.return_value
    run.finish.assert_called_once_with()
    [config] = wandb.config.update.call_args.args
    assert (config["train.num_steps"], config["algorithm.loss"], config["rollout.max_draws"]) == (2, "ppo_clip", None)
    assert config["rewards"].startswith('[{"name": "tiny_run:digits"')
    logged = [(call.kwargs["step"], *call.args) for call in run.log.call_args_list]
    rows = [{"step": step} | values for step, values in logged if "samples" not in values]
    assert rows == read_metrics(result.folder / "metrics.jsonl")
    tables = {step: values["samples"] for step, values in logged if "samples" in values}
    assert list(tables) == [1, 2]
    for step, table in tables.items():
        assert [(sample["step"], sample["prompt_id"][:10]) for sample in table] == 4 * [(step, "arithmetic")]
        texts = {"prompt", "text", "answer", "reward", "reward_digits", "reward_correct", "advantage", "outcome"}
        assert texts <= table[0].keys()
        assert "token_ids" not in table[0]

    reader = import_module("tensorboard.backend.event_processing.event_accumulator")
    [file] = (result.folder / "tensorboard").rglob("events.*")  # one run in its list, not a further one for the recipe
    events = reader.EventAccumulator(str(file)).Reload()
    [recipe] = events.Tensors("recipe/text_summary")
    assert "    name: run\n" in recipe.tensor_proto.string_val[0].decode()
    assert {event.step for event in events.Scalars("reward/mean")} == {1, 2}


def test_wandb_has_its_own_variables(
    policy: Path, tmp_path: Path, wandb: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_NAME", "first")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path / "wandb files"))
    recipe = make_recipe(policy, tmp_path, log__trackers=["wandb", "tensorboard"])
    monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter", board := Mock())
    start_trackers(recipe, step=3)
    wandb.init.assert_called_once_with(project="srtrl", name="first", dir=str(tmp_path / "wandb files"))
    assert board.call_args.kwargs == {"purge_step": 4}


def test_a_tracker_that_cannot_start_leaves_the_old_run_as_it_was(
    policy: Path, tmp_path: Path, wandb: Mock, finished: Callable[..., Path]
) -> None:
    folder = Path(shutil.copytree(finished(train__checkpoint_every=1, **SHORT), tmp_path / "run"))
    wandb.init.side_effect = LookupError("not logged in")
    before = {path: path.is_file() and path.read_bytes() for path in folder.rglob("*")}
    changes = SHORT | {"log__trackers": ["wandb"], "train__learning_rate": 0.5}
    for flags in ({"resume": True, "from_step": 1}, {"overwrite": True}):
        with pytest.raises(LookupError, match="not logged in"):
            train(make_recipe(policy, tmp_path, **changes), **flags)
        assert {path: path.is_file() and path.read_bytes() for path in folder.rglob("*")} == before, flags
        assert not (tmp_path / "run.1").exists()


@pytest.mark.parametrize(
    ("name", "command"), [("tensorboard", "pip install 'srtrl[tensorboard]'"), ("wandb", "pip install wandb")]
)
def test_a_tracker_that_is_not_installed_is_refused_at_once(
    name: str, command: str, policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("accelerate.tracking._available_trackers", [])
    with pytest.raises(ValueError, match=r"log\.trackers") as caught:
        check_recipe(make_recipe(policy, tmp_path, log__trackers=[name]))
    assert str(caught.value).endswith(
        f"{name} is not installed, or accelerate has no such tracker; available here: none; to install it: {command}"
    )
