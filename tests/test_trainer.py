"""The training loop on a tiny policy: what it writes, what stops it, and what must not change what is learned."""

import io
import json
import os
import signal
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from rich.console import Console
from tiny_run import learned_rows, make_policy, make_recipe, train
from torch import Tensor

from srtrl.engine.cpu_runner import CpuRunner
from srtrl.metrics import read_metrics
from srtrl.recipe import Recipe
from srtrl.rollout.collect import collect_rollouts
from srtrl.trainer import build, sampling, trainer
from srtrl.trainer.evaluate import EvalJob, resolve_eval_source, run_evals
from srtrl.trainer.run_folder import RunProgress, open_run_folder
from srtrl.trainer.run_metrics import describe_step, summary_table
from srtrl.trainer.trainer import TrainingResult, TrainingStoppedError
from srtrl.trainer.update import update_policy


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_policy(tmp_path_factory.mktemp("model") / "policy")


@pytest.fixture(scope="module")
def run(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainingResult:
    """A whole run of two steps, with TensorBoard and all speeds; a checkpoint after each, so that one is in a row."""
    changes: dict[str, Any] = {"train__checkpoint_every": 1, "train__keep_checkpoints": 1, "train__peak_tflops": 1.0}
    return train(
        make_recipe(
            policy, tmp_path_factory.mktemp("runs"), train__num_steps=2, log__trackers=["tensorboard"], **changes
        )
    )


def learned(folder: Path) -> list[dict[str, float]]:
    """Rows of the training steps without timing and evaluation."""
    return [row for row in learned_rows(folder, beside=("eval/",)) if row["step"] > 0]


def weights(folder: Path, step: int) -> bytes:
    return (folder / "checkpoints" / f"step_{step:06d}" / "model.safetensors").read_bytes()


# --- What a run writes ------------------------------------------------------------------------------------------------


def test_every_promised_metric_is_logged(run: TrainingResult) -> None:
    before, *steps = read_metrics(run.folder / "metrics.jsonl")
    assert before["step"] == 0
    assert {name.split("/")[0] for name in before} == {"step", "eval", "time"}
    promised = """
        reward/mean reward/digits reward/correct accuracy length/mean length/max length/truncated_share entropy kl/ref
        clip_share/low clip_share/high grad_norm learning_rate loss tokens/prompt tokens/response
        grading/correct grading/wrong grading/timeout grading/crash grading/error groups/kept groups/dropped
        groups/short groups/all_right groups/all_wrong data/draws data/epoch
        time/rollout time/grading time/reference time/update time/step time/tokens_per_second
        engine/pages_in_use_max engine/pages
        logprob_difference/mean logprob_difference/max logprob_difference/kl
    """
    for row in steps:
        assert set(promised.split()) - row.keys() == set()
        assert row["logprob_difference/max"] < 1e-4
        assert row["grading/wrong"] + row["grading/correct"] == 16
        assert (row["data/draws"], row["data/epoch"], row["groups/short"]) == (4, 4 * (row["step"] - 1) / 10, 0)
        stages = ("rollout", "grading", "reference", "update", "save_rollouts", "eval", "checkpoint")
        assert row["time/step"] == pytest.approx(sum(row.get(f"time/{stage}", 0.0) for stage in stages))
    assert "eval/accuracy" in steps[-1]


def test_rollout_file_is_what_was_learned_from(run: TrainingResult, policy: Path) -> None:
    table = pq.read_table(run.folder / "rollouts" / "step_000002.parquet").to_pylist()
    row = learned(run.folder)[1]
    assert [(r["draw_index"], r["sample_index"]) for r in table] == [(d, s) for d in range(4, 8) for s in range(4)]
    assert sum(r["reward"] for r in table) / 16 == pytest.approx(row["reward/mean"], rel=1e-6)
    assert sum(len(r["token_ids"]) for r in table) == row["tokens/response"]
    tokenizer = build.build_tokenizer(make_recipe(policy, run.folder))
    for r in table:
        assert r["reward"] == pytest.approx(r["reward_digits"] + 0.5 * r["reward_correct"], rel=1e-6)
        assert r["prompt_token_ids"] == tokenizer.encode(r["prompt"])
        assert r["text"] == tokenizer.decode(r["token_ids"], skip_special_tokens=True)
        assert len(r["rollout_logprobs"]) == len(r["token_ids"])
        assert (r["finish_reason"] == "stop") == (r["token_ids"][-1] == tokenizer.eos_token_id)
        assert r["policy_version"] == 1
    for draw in range(4, 8):  # of the run: step 1 had 0 to 3
        group = [r for r in table if r["draw_index"] == draw]
        rewards = torch.tensor([r["reward"] for r in group])
        expected = (rewards - rewards.mean()) / rewards.std()
        assert [r["advantage"] for r in group] == pytest.approx(expected.tolist(), abs=1e-3)


def test_summary_is_read_off_the_rows(run: TrainingResult) -> None:
    before, *steps = read_metrics(run.folder / "metrics.jsonl")
    summary = json.loads((run.folder / "summary.json").read_text())
    assert (summary["num_steps"], summary["interrupted"]) == (2, False)
    assert summary["before"]["accuracy"] == before["eval/accuracy"]
    assert (summary["after"]["step"], summary["after"]["num_problems"]) == (2, 6)
    assert summary["num_response_tokens"] == sum(row["tokens/response"] for row in steps)
    assert {"time/update_tokens_per_second", "time/update_mfu", "time/checkpoint"} <= steps[1].keys()
    assert sum(summary["seconds"].values()) == pytest.approx(
        before["time/eval"] + sum(row["time/step"] for row in steps)
    )
    assert list((run.folder / "tensorboard").rglob("events.out.tfevents.*"))
    output = io.StringIO()
    Console(width=80, file=output).print(summary_table(run.summary))
    for part in ("held-out accuracy before", "held-out accuracy after", "gain", "time: rollout", "time: update"):
        assert part in output.getvalue()


def test_checkpoint_evaluates_as_the_run_did(run: TrainingResult) -> None:
    """`srtrl eval RUN` on the same problems and noise: the very same figures."""
    source = resolve_eval_source(str(run.folder))
    assert source.model.endswith("step_000002")
    assert source.recipe_path == run.folder / "recipe.yaml"
    recipe = make_recipe(Path(source.model), run.folder, train__num_steps=2)
    [outcome] = run_evals(source.model, [EvalJob(name="it", recipe=recipe)])
    row = read_metrics(run.folder / "metrics.jsonl")[-1]
    again = {name: value for name, value in outcome.result.metrics().items() if name.startswith("eval/")}
    del again["eval/reward"]  # that one draws at random
    assert again == {name: row[name] for name in again}
    with pytest.raises(ValueError, match=r"no checkpoint of step 1; there: step_000002"):
        resolve_eval_source(str(run.folder), step=1)
    with pytest.raises(ValueError, match="not a run folder"):
        resolve_eval_source("bundled:tiny", step=1)
    assert resolve_eval_source("bundled:tiny").recipe_path is None


# --- What must not change what is learned -----------------------------------------------------------------------------


def test_evaluation_logging_slots_and_released_pages_do_not_disturb_training(
    policy: Path, run: TrainingResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rewards = [{"name": "correct", "weight": 0.5}, {"name": "format"}]  # `digits` draws from the global generator
    plain = {"train__num_steps": 2, "rewards": rewards, "eval__before_and_after": False, "eval__every_steps": None}
    quiet = train(make_recipe(policy, tmp_path / "quiet", log__save_rollouts=False, **plain))
    busy = {**plain, "eval__every_steps": 1, "eval__before_and_after": True, "rollout__slots": 3}
    busy["rollout__kv_across_update"] = "release"
    allocated = []
    allocate = CpuRunner.allocate_pages

    def counted(runner: CpuRunner, num_pages: int) -> None:
        allocated.append(num_pages)
        allocate(runner, num_pages)

    monkeypatch.setattr(CpuRunner, "allocate_pages", counted)
    loud = train(make_recipe(policy, tmp_path / "loud", log__trackers=["tensorboard"], **busy))
    assert allocated == 3 * allocated[:1], "at first, and after each update"
    assert learned(quiet.folder) == learned(loud.folder)
    assert weights(quiet.folder, 2) == weights(loud.folder, 2)
    assert list((quiet.folder / "rollouts").iterdir()) == []
    assert quiet.summary.before is None
    assert weights(run.folder, 2) != weights(quiet.folder, 2)  # the comparison can fail


# --- What stops a run -------------------------------------------------------------------------------------------------


def stop_at_second_step(policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> Recipe:
    """The process gets a signal while step 2 decodes."""

    def collect(engine: Any, collector: Any, draws: Any, **options: Any) -> Any:
        if draws[0][0] == 4:  # the first draw of step 2
            os.kill(os.getpid(), number)
        return collect_rollouts(engine, collector, draws, **options)

    monkeypatch.setattr(sampling, "collect_rollouts", collect)
    return make_recipe(policy, tmp_path, train__num_steps=3, train__checkpoint_every=100, eval__every_steps=None)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_finishes_the_step_and_can_be_resumed(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    recipe = stop_at_second_step(policy, tmp_path, monkeypatch, number)
    handler = signal.getsignal(signal.SIGINT)
    result = train(recipe)
    assert signal.getsignal(signal.SIGINT) is handler
    assert result.interrupted
    assert (result.summary.num_steps, result.summary.after) == (2, None)
    assert (result.folder / "checkpoints" / "step_000002").is_dir()
    monkeypatch.undo()
    resumed = train(recipe, resume=True)
    assert not resumed.interrupted
    assert resumed.summary.before == result.summary.before
    assert resumed.summary.num_steps == 3

    whole = train(make_recipe(policy, tmp_path / "whole", train__num_steps=3, eval__every_steps=None))
    assert learned(resumed.folder) == learned(whole.folder)
    assert weights(resumed.folder, 3) == weights(whole.folder, 3)


def test_second_interrupt_stops_at_once(policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = stop_at_second_step(policy, tmp_path, monkeypatch, signal.SIGINT)

    def update(*arguments: Any, **options: Any) -> Any:
        if options["step"] == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return update_policy(*arguments, **options)

    monkeypatch.setattr(trainer, "update_policy", update)
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(KeyboardInterrupt):
        train(recipe)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert learned(tmp_path / "run")[-1]["step"] == 1


LOSS_CALLS: list[int] = []


def loss_with_a_flaw(
    logprobs: Tensor, old: Tensor, advantages: Tensor, index: Tensor, **_: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Policy gradient, except that the third call returns NaN."""
    LOSS_CALLS.append(len(index))
    return -(logprobs - old).exp() * advantages * (float("nan") if len(LOSS_CALLS) == 3 else 1.0), {}


def test_non_finite_loss_stops_with_the_last_checkpoint(policy: Path, tmp_path: Path) -> None:
    LOSS_CALLS.clear()
    changes = {"train__num_epochs": 1, "train__mini_batch_prompts": 4, "train__micro_batch_tokens": 4000}
    recipe = make_recipe(
        policy, tmp_path, algorithm__loss="test_trainer:loss_with_a_flaw", train__checkpoint_every=1, **changes
    )
    with pytest.raises(TrainingStoppedError, match=r"step 3, epoch 1, mini-batch 1: the loss is nan") as caught:
        train(recipe)
    checkpoint = tmp_path / "run" / "checkpoints" / "step_000002"
    assert f"The last checkpoint is intact: {checkpoint}" in str(caught.value)
    assert learned(tmp_path / "run")[-1]["step"] == 2
    build.build_policy(recipe, str(checkpoint), torch.device("cpu"))


def test_logprob_difference_stops_before_anything_is_learned(policy: Path, tmp_path: Path) -> None:
    recipe = make_recipe(policy, tmp_path, train__max_logprob_difference=1e-12)
    with pytest.raises(TrainingStoppedError, match="There is no checkpoint yet"):
        train(recipe)


def drop_all(rewards: Tensor, correct: Tensor) -> Tensor:
    return torch.zeros(len(rewards), dtype=torch.bool)


@pytest.mark.parametrize(
    ("changes", "num_kept"),
    [
        ({"algorithm__filters": ["test_trainer:drop_all"]}, 0),
        ({"rollout__max_new_tokens": 1, "algorithm__overlong_filtering": True}, 4),
    ],
)
def test_step_without_a_sample_left_is_logged_and_learns_nothing(
    policy: Path, tmp_path: Path, changes: dict[str, Any], num_kept: int
) -> None:
    result = train(make_recipe(policy, tmp_path, train__num_steps=2, **changes))
    rows = [row for row in read_metrics(result.folder / "metrics.jsonl") if row["step"] > 0]
    for row in rows:
        assert (row["groups/kept"], row["groups/dropped"]) == (num_kept, 4 - num_kept)
        assert "grad_norm" not in row
        assert describe_step(row).endswith("no update: the filters left no sample")
    assert result.summary.num_skipped_steps == len(rows) == 2
    table = pq.read_table(result.folder / "rollouts" / "step_000002.parquet").to_pylist()
    assert {(r["advantage"], r["policy_version"]) for r in table} == {(None, 0)}
    state = json.loads((result.folder / "checkpoints/step_000002/state.json").read_text())
    assert (state["step"], state["policy_version"]) == (2, 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"log__trackers": ["tensorbord"]}, "unknown tracker 'tensorbord'; known: .*tensorboard"),
        ({"log__trackers": ["swanlab"]}, "swanlab is not installed"),
        ({"rollout__max_new_tokens": 100}, "the model was made for 128"),
    ],
)
def test_mistakes_are_named(policy: Path, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        train(make_recipe(policy, tmp_path, **changes))
    assert list(tmp_path.iterdir()) == []  # a run that cannot start leaves nothing that would be in the way of the next


def test_overwrite_deletes_only_once_everything_is_loaded(policy: Path, tmp_path: Path) -> None:
    with open_run_folder(make_recipe(policy, tmp_path)) as run:
        run.log.write(1, {"loss": 1.0})
    with pytest.raises(ValueError, match="missing-policy"):
        train(make_recipe(tmp_path / "missing-policy", tmp_path), overwrite=True)
    assert len(read_metrics(tmp_path / "run" / "metrics.jsonl")) == 1


def test_several_processes_are_refused(policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="srtrl trains in one process"):
        train(make_recipe(policy, tmp_path))


# --- Progress ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_in_lines_and_in_bars(terminal: bool) -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=terminal, width=100)
    with RunProgress("a run", 3, console=console, plain_every=2) as progress:
        for step in range(1, 4):
            progress.stage("rollout", 5, 10)
            progress.step(step, f"reward {step}")
        progress.say("done [not markup]")
    text = output.getvalue()
    assert "done [not markup]" in text
    if terminal:
        assert "3/3" in text
    else:
        assert text.splitlines() == ["a run step 2/3  reward 2", "a run step 3/3  reward 3", "done [not markup]"]


def test_the_line_of_a_step_says_what_was_dropped_and_that_only_the_critic_learned() -> None:
    names = ("reward/mean", "accuracy", "length/mean", "time/tokens_per_second", "time/step", "groups/short")
    row = dict.fromkeys(names, 0.0) | {f"grading/{outcome}": 0.0 for outcome in ("timeout", "crash", "error")}
    row |= {"groups/kept": 32.0, "groups/dropped": 6.0, "data/draws": 38.0, "critic/grad_norm": 1.0}
    assert describe_step(row).endswith("32 of 38 groups kept  critic warm-up: no update of the policy")
    assert describe_step(row | {"grad_norm": 1.0}).endswith("32 of 38 groups kept")
