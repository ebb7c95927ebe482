"""What trackers are told: the recipe, and samples now and then; TensorBoard's own files and a stand-in for wandb."""

import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from accelerate.utils import LoggerType
from tiny_run import make_recipe, train

from srtrl.metrics import read_metrics

SHORT: dict[str, Any] = {"train__num_steps": 2, "log__samples_every": 2}


class FakeRun:
    """What `wandb.init` returns: it keeps what is logged, by step."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.logged: list[tuple[int, dict[str, Any]]] = []
        self.is_finished = False

    def log(self, values: dict[str, Any], step: int) -> None:
        self.logged.append((step, values))

    def finish(self) -> None:
        self.is_finished = True


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A module of that name with the calls that accelerate's tracker makes."""
    module = SimpleNamespace(runs=[], config={})

    def init(**options: Any) -> FakeRun:
        if options["project"] == "secret":
            raise LookupError("not logged in")
        if "colour" in options:
            raise TypeError("init() got an unexpected keyword argument 'colour'")
        run = FakeRun(options)
        module.runs.append(run)
        return run

    module.init = init
    module.config = SimpleNamespace(values={})
    module.config.update = lambda values, **_: module.config.values.update(values)
    module.Table = lambda columns, data, dataframe: [dict(zip(columns, row, strict=True)) for row in data]
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.setattr("accelerate.tracking._available_trackers", [LoggerType.TENSORBOARD, LoggerType.WANDB])
    return module


def test_wandb_gets_options_recipe_metrics_and_samples(policy: Path, tmp_path: Path, wandb: SimpleNamespace) -> None:
    options = {"wandb": {"entity": "me", "id": "run-1", "resume": "allow", "mode": "offline"}}
    where = {"log__project": "sums", "log__run_name": "first", "log__folder": str(tmp_path / "wandb files")}
    recipe = make_recipe(policy, tmp_path, log__trackers=["wandb"], log__tracker_options=options, **where, **SHORT)
    result = train(recipe)
    [run] = wandb.runs
    folder = tmp_path / "wandb files" / "first"
    assert folder.is_dir()
    assert run.options == {"project": "sums", "name": "first", "dir": str(folder), **options["wandb"]}
    assert run.is_finished
    config = wandb.config.values
    assert (config["train.num_steps"], config["algorithm.loss"], config["rollout.max_draws"]) == (2, "ppo_clip", None)
    assert config["log.tracker_options.wandb.id"] == "run-1"
    assert config["rewards"].startswith('[{"name": "tiny_run:digits"')
    rows = [{"step": step} | values for step, values in run.logged if "samples" not in values]
    assert rows == read_metrics(result.folder / "metrics.jsonl")
    tables = {step: values["samples"] for step, values in run.logged if "samples" in values}
    assert list(tables) == [1, 2]
    for step, table in tables.items():
        assert [(sample["step"], sample["prompt_id"][:10]) for sample in table] == 4 * [(step, "arithmetic")]
        texts = {"prompt", "text", "answer", "reward", "reward_digits", "reward_correct", "advantage", "outcome"}
        assert texts <= table[0].keys()
        assert "token_ids" not in table[0]


def test_an_option_that_a_tracker_does_not_know(policy: Path, tmp_path: Path, wandb: SimpleNamespace) -> None:
    recipe = make_recipe(policy, tmp_path, log__trackers=["wandb"], log__tracker_options={"wandb": {"colour": "red"}})
    with pytest.raises(
        ValueError, match=r"log.tracker_options: TypeError: .*init\(\) got an unexpected keyword argument 'colour'"
    ):
        train(recipe)


def test_a_tracker_that_cannot_start_leaves_the_old_run_as_it_was(
    policy: Path, tmp_path: Path, wandb: SimpleNamespace
) -> None:
    folder = train(make_recipe(policy, tmp_path, **SHORT)).folder
    before = {path: path.is_file() and path.read_bytes() for path in folder.rglob("*")}
    refused = make_recipe(policy, tmp_path, log__trackers=["wandb"], log__project="secret", **SHORT)
    with pytest.raises(ValueError, match=r"log.trackers: LookupError: .*not logged in"):
        train(refused, overwrite=True)
    assert {path: path.is_file() and path.read_bytes() for path in folder.rglob("*")} == before


def test_tensorboard_gets_hyperparameters_and_text(policy: Path, tmp_path: Path) -> None:
    reader = import_module("tensorboard.backend.event_processing.event_accumulator")
    records = import_module("tensorboard.plugins.hparams.plugin_data_pb2")
    result = train(make_recipe(policy, tmp_path, log__trackers=["tensorboard"], **SHORT))
    [file] = (result.folder / "tensorboard").rglob("events.*")  # one run in its list, not a further one for the recipe
    events = reader.EventAccumulator(str(file)).Reload()
    text = {
        tag: [
            (event.step, event.tensor_proto.string_val[0].decode()) for event in events.Tensors(f"{tag}/text_summary")
        ]
        for tag in ("recipe", "samples")
    }
    assert "    name: run\n" in text["recipe"][0][1]
    assert [step for step, _ in text["samples"]] == [1, 2]
    assert text["samples"][0][1].startswith("step 1, prompt_id arithmetic-train-")
    assert ", outcome wrong, " in text["samples"][0][1]
    assert "prompt:\n\n    Compute " in text["samples"][0][1]
    found = records.HParamsPluginData.FromString(
        events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    ).session_start_info.hparams
    assert found["train.num_steps"].number_value == 2
    assert found["algorithm.loss"].string_value == "ppo_clip"
    assert {event.step for event in events.Scalars("reward/mean")} == {1, 2}
