"""The training loop on a tiny policy: what it writes, what stops it, and what must not change what is learned."""

import io
import json
import os
import re
import signal
import zlib
from collections.abc import Callable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pyarrow.parquet as pq
import pytest
import tiny_run
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from tiny_run import DAPO, PPO, learned_rows, make_recipe, open_run, train
from update_cases import CALLS, flawed

import srtrl
from srtrl import build
from srtrl.drafters.srt import Drafter
from srtrl.evaluation.policy import resolve_eval_source, run_evals
from srtrl.metrics import read_metrics
from srtrl.recipe.file import dump_recipe
from srtrl.rollout.collect import collect_rollouts
from srtrl.run.interrupt import Interrupt
from srtrl.run.metrics import describe_step, headline, run_figures, step_problems
from srtrl.run.progress import SPARKS, RunProgress, sparkline
from srtrl.tasks.reward_input import RewardInput
from srtrl.trainer import sampling
from srtrl.trainer.optimizer import learning_rate_at
from srtrl.trainer.sampling import DataOrder
from srtrl.trainer.trainer import Trainer, TrainingStoppedError

QUICK: dict[str, Any] = {
    **{"train__num_epochs": 1, "train__mini_batch_prompts": 4, "train__micro_batch_tokens": 4000},
    **{"eval__before_and_after": False, "eval__every_steps": None},
}
"""One micro-batch per step, and no evaluation."""


def learned(folder: Path) -> list[dict[str, float]]:
    """Rows of the training steps without timing and evaluation."""
    return [row for row in learned_rows(folder, beside=("eval/",)) if row["step"] > 0]


def weights(folder: Path, step: int) -> bytes:
    return (folder / "checkpoints" / f"step_{step:06d}" / "model.safetensors").read_bytes()


# --- What a run writes ------------------------------------------------------------------------------------------------


def test_every_promised_metric_is_logged_and_gives_the_figures_of_the_run(finished: Callable[..., Path]) -> None:
    before, *steps = rows = read_metrics(finished() / "metrics.jsonl")
    assert before["step"] == 0
    assert {name.split("/")[0] for name in before} == {"step", "eval", "time"}
    promised = """
        reward/mean reward/digits reward/correct accuracy length/mean length/max length/truncated_share entropy kl/ref
        clip_share/low clip_share/high grad_norm learning_rate loss tokens/prompt tokens/response
        grading/correct grading/wrong grading/timeout grading/crash grading/error groups/kept groups/dropped
        groups/short groups/all_right groups/all_wrong data/draws data/epoch
        time/rollout time/grading time/reference time/update time/step time/tokens_per_second time/update_tflops
        engine/pages_in_use_max engine/pages
        logprob_difference/mean logprob_difference/max logprob_difference/kl
    """
    for row in steps:
        assert set(promised.split()) - row.keys() == set()
        assert row["logprob_difference/max"] < 1e-4
        assert row["grading/wrong"] + row["grading/correct"] == 16
        assert (row["data/draws"], row["data/epoch"], row["groups/short"]) == (4, 4 * (row["step"] - 1) / 10, 0)
        stages = ("compile", "rollout", "grading", "reference", "update", "save_rollouts", "eval", "checkpoint")
        learned_from = 2 * (row["tokens/response"] + 4 * row["tokens/prompt"])  # two epochs of 4 samples of a prompt
        assert row["tokens/update"] == learned_from
        assert row["time/update_tokens_per_second"] == pytest.approx(learned_from / row["time/update"])
        assert row["time/step"] == pytest.approx(sum(row.get(f"time/{stage}", 0.0) for stage in stages))
    assert "time/checkpoint" in steps[2], "of the checkpoint after step 2"

    figures = run_figures(rows)
    assert figures["held-out problems x samples"] == "6 x 1"
    for row, when in ((before, "before training"), (steps[-1], "after step 4")):
        shown = "{eval/accuracy:.1%} (95%: {eval/accuracy_low:.1%} to {eval/accuracy_high:.1%})"
        assert figures[f"held-out accuracy {when}"] == shown.format_map(row)
    first, last = (
        float(figures[f"held-out accuracy {when}"].split("%")[0]) for when in ("before training", "after step 4")
    )
    assert figures["gain"] == f"{last - first:+.1f} points"
    num_tokens, num_decodes = (sum(row[name] for row in steps) for name in ("tokens/response", "engine/decode_steps"))
    found = re.fullmatch(
        rf"{num_tokens:,} in {num_decodes:,} decode steps of ([\d.]+) samples", figures["sampled tokens"]
    )
    assert found
    saved = re.fullmatch(r"([\d.]+) \(1 without drafts\)", figures["tokens per decode step"])
    assert saved
    assert num_decodes * float(found[1]) * float(saved[1]) == pytest.approx(num_tokens, rel=0.01)
    per_decode = sorted(row["engine/tokens_per_decode_step"] for row in steps)
    by_epoch = re.fullmatch(r"([\d.]+) in the first, ([\d.]+) in the last", figures["tokens per decode step, by epoch"])
    assert by_epoch
    for figure in (saved[1], *by_epoch.groups()):
        assert per_decode[0] - 0.01 < float(figure) < per_decode[-1] + 0.01
    assert re.fullmatch(r"\d+\.\d s, \d+\.\d% of the rollouts' time", figures["time of drafting"])
    total = before["time/eval"] + sum(row["time/step"] for row in steps)
    assert figures["time of all stages"].startswith(f"{round(total) // 60} min {round(total) % 60} s (")
    assert {"rollout", "update"} <= set(re.findall(r"(\w+) \d+%", figures["time of all stages"]))


def test_rollout_file_is_what_was_learned_from(finished: Callable[..., Path], policy: Path) -> None:
    table = pq.read_table(finished() / "rollouts" / "step_000002.parquet").to_pylist()
    row = learned(finished())[1]
    assert [(r["draw_index"], r["sample_index"]) for r in table] == [(d, s) for d in range(4, 8) for s in range(4)]
    assert sum(r["reward"] for r in table) / 16 == pytest.approx(row["reward/mean"], rel=1e-6)
    assert sum(len(r["token_ids"]) for r in table) == row["tokens/response"]
    tokenizer = build.build_tokenizer(make_recipe(policy, Path()))
    for r in table:
        assert r["reward"] == pytest.approx(r["reward_digits"] + 0.5 * r["reward_correct"], rel=1e-6)
        assert r["prompt_token_ids"] == tokenizer.encode(r["prompt"])
        assert r["text"] == tokenizer.decode(r["token_ids"], skip_special_tokens=True)
        assert len(r["rollout_logprobs"]) == len(r["token_ids"])
        assert (r["finish_reason"] == "stop") == (r["token_ids"][-1] == tokenizer.eos_token_id)
        assert (r["policy_version"], r["step"]) == (1, 2)
        assert r["answer"] == str(eval(r["prompt"].removeprefix("Compute ").rstrip(".\n")))
    for draw in range(4, 8):  # of the run: step 1 had 0 to 3
        group = [r for r in table if r["draw_index"] == draw]
        rewards = torch.tensor([r["reward"] for r in group])
        expected = (rewards - rewards.mean()) / rewards.std()
        assert [r["advantage"] for r in group] == pytest.approx(expected.tolist(), abs=1e-3)


def test_checkpoint_evaluates_as_the_run_did(finished: Callable[..., Path]) -> None:
    """`srtrl eval RUN` on the same problems and noise: the very same figures."""
    run = finished()
    model, recipe_path = resolve_eval_source(str(run))
    assert (Path(model).name, recipe_path) == ("step_000004", run / "recipe.yaml")
    [outcome] = run_evals(model, {"it": make_recipe(Path(model), run)})
    row = read_metrics(run / "metrics.jsonl")[-1]
    again = {name: value for name, value in outcome.metrics.items() if name.startswith("eval/")}
    for name in ("eval/reward", "eval/reward_low", "eval/reward_high"):
        del again[name]  # that one draws at random
    assert again == {name: row[name] for name in again}
    for source, message in (
        (str(run), "no checkpoint of step 1; there: step_000002"),
        ("bundled:tiny", "not a run folder"),
    ):
        with pytest.raises(ValueError, match=message):
            resolve_eval_source(source, step=1)
    assert resolve_eval_source("bundled:tiny") == ("bundled:tiny", None)


# --- What must not change what is learned -----------------------------------------------------------------------------


def test_evaluation_logging_and_slots_do_not_disturb_training(
    policy: Path, finished: Callable[..., Path], tmp_path: Path
) -> None:
    rewards = [{"name": "correct", "weight": 0.5}, {"name": "format"}]  # `digits` draws from the global generator
    plain = {**QUICK, "train__num_steps": 2, "rewards": rewards}
    quiet = train(make_recipe(policy, tmp_path / "quiet", **plain))
    busy = {**plain, "eval__every_steps": 1, "eval__before_and_after": True, "rollout__slots": 3}
    loud = train(make_recipe(policy, tmp_path / "loud", log__trackers=["tensorboard"], **busy))
    assert learned(quiet.folder) == learned(loud.folder)
    assert weights(quiet.folder, 2) == weights(loud.folder, 2)
    assert not any("eval/accuracy" in row for row in read_metrics(quiet.folder / "metrics.jsonl"))
    assert list((loud.folder / "tensorboard").rglob("events.out.tfevents.*"))
    assert weights(finished(), 2) != weights(quiet.folder, 2)  # the comparison can fail


# --- What stops a run -------------------------------------------------------------------------------------------------


def signal_while_decoding(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process gets the signal in step 1."""

    def collect(engine: Any, collector: Any, draws: Any) -> Any:
        if draws.draws[0][0] == 0 and collector.purpose == "train":
            os.kill(os.getpid(), number)
        return collect_rollouts(engine, collector, draws)

    monkeypatch.setattr(sampling, "collect_rollouts", collect)


def test_interrupt_finishes_the_step_and_can_be_resumed_and_a_second_one_stops_at_once(
    policy: Path, finished: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe(policy, tmp_path, train__num_steps=2)
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with monkeypatch.context() as once:
        signal_while_decoding(signal.SIGTERM, once)
        result = train(recipe)
    assert (result.interrupted, result.num_steps) == (True, 1)
    assert (result.folder / "checkpoints" / "step_000001").is_dir()
    resumed = train(recipe, resume=True)
    assert (resumed.interrupted, resumed.num_steps) == (False, 2)
    whole = finished(train__num_steps=2)
    assert learned(resumed.folder) == learned(whole)
    assert weights(resumed.folder, 2) == weights(whole, 2)

    signal_while_decoding(signal.SIGINT, monkeypatch)
    monkeypatch.setattr(
        "srtrl.trainer.objective.PolicyLearner.learn", lambda *_, **__: os.kill(os.getpid(), signal.SIGINT)
    )
    with pytest.raises(KeyboardInterrupt):
        train(recipe, overwrite=True)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert learned(resumed.folder) == []


def test_an_interrupt_after_a_step_without_a_checkpoint_waits_for_one(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint_if_due = Trainer.checkpoint_if_due

    def then_interrupt(self: Trainer) -> None:
        checkpoint_if_due(self)
        self.interrupt.requested = True

    monkeypatch.setattr(Trainer, "checkpoint_if_due", then_interrupt)
    result = train(make_recipe(policy, tmp_path, train__num_steps=3, train__checkpoint_every=3, **QUICK))
    assert result.interrupted
    assert (result.folder / "checkpoints" / f"step_{result.num_steps:06d}").is_dir()


def test_a_second_signal_ends_the_run_while_the_first_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """No launcher repeats it."""
    monkeypatch.setattr(os, "environ", {})
    with pytest.raises(KeyboardInterrupt), Interrupt(lambda _: signal.raise_signal(signal.SIGINT)):
        signal.raise_signal(signal.SIGTERM)


def test_a_signal_that_a_launcher_forwards_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes while the first one is reported, and a moment later; a signal after that is another one."""
    said: list[str] = []
    monkeypatch.setattr(os, "environ", {"TORCHELASTIC_RUN_ID": "1"})

    def say(message: str) -> None:
        said.append(message)
        signal.raise_signal(signal.SIGINT)

    sleep = Mock(side_effect=lambda _: signal.raise_signal(signal.SIGTERM))
    monkeypatch.setattr("srtrl.run.interrupt.time.sleep", sleep)
    with Interrupt(say) as interrupt:
        signal.raise_signal(signal.SIGTERM)
        assert interrupt.requested
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    sleep.assert_called_once_with(1.0)
    assert [("--shutdown-timeout" in message) for message in said] == [True]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithm": flawed("nan", at_call=2)}, "step 2, epoch 1, mini-batch 1: the loss .* is nan"),
        ({"algorithm": flawed("no memory", at_call=2)}, "step 2, update: the device's memory is too small"),
        ({"train__max_logprob_difference": 1e-12}, "There is no checkpoint yet"),
    ],
)
def test_an_error_in_a_step_stops_with_the_last_checkpoint(
    policy: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    CALLS.clear()
    recipe = make_recipe(policy, tmp_path, train__checkpoint_every=1, **QUICK, **changes)
    with pytest.raises(TrainingStoppedError, match=message) as caught:
        train(recipe)
    if "step 2" in message:
        checkpoint = tmp_path / "run" / "checkpoints" / "step_000001"
        assert f"The last checkpoint is intact: {checkpoint}" in str(caught.value)
        assert learned(tmp_path / "run")[-1]["step"] == 1
        build.build_policy(recipe, str(checkpoint), torch.device("cpu"))


@pytest.mark.parametrize(
    ("changes", "num_kept"),
    [
        ({"algorithm__filters": ["test_credit:drop_all"]}, 0),
        ({"algorithm__filters": ["test_credit:drop_all"], "algorithm__advantage": "gae", "critic": {}}, 0),
        ({"rollout__max_new_tokens": 1, "algorithm__overlong_filtering": True}, 4),
    ],
)
def test_step_without_a_sample_left_is_logged_and_learns_nothing(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], num_kept: int
) -> None:
    end_step = Mock()
    monkeypatch.setattr(Drafter, "end_step", end_step)
    result = train(make_recipe(policy, tmp_path, train__num_steps=2, rollout__drafter="srt", **QUICK, **changes))
    assert end_step.call_count >= 2, "history and run-aheads are those of another step all the same"
    _, *steps = rows = read_metrics(result.folder / "metrics.jsonl")
    for row in steps:
        assert (row["groups/kept"], row["groups/dropped"]) == (num_kept, 4 - num_kept)
        assert not any(name.endswith("grad_norm") for name in row), "neither policy nor critic learns"
        assert step_problems(row).endswith("no update: the filters left no sample")
        is_cut = row["length/truncated_share"] > 0.5
        share = f"{row['length/truncated_share']:.0%} of the samples"
        assert (f"{share} reached rollout.max_new_tokens" in step_problems(row)) == is_cut
        assert is_cut or "overlong_filtering" not in str(changes)
    assert run_figures(rows)["steps with nothing to learn from"] == "2"
    assert ("reached rollout.max_new_tokens" in run_figures(rows)) == is_cut
    table = pq.read_table(result.folder / "rollouts" / "step_000002.parquet").to_pylist()
    assert {(r["advantage"], r["policy_version"]) for r in table} == {(None, 0)}
    state = json.loads((result.folder / "checkpoints/step_000002/state.json").read_text())
    assert (state["step"], state["policy_version"]) == (2, 0)


SOME_FAIL: list[dict[str, Any]] = [
    {"name": "test_trainer:fails_often", "options": {"share": 2}},
    {"name": "correct", "options": {"incorrect": -1.0}},
]


def fails_often(sample: RewardInput, *, share: int) -> float:
    """Raises for all texts but one in `share`, each time with another message; never for the trial's."""
    if sample.prompt.answer != sample.text and zlib.crc32(sample.text.encode()) % share:
        raise RuntimeError(f"{sample.text!r} of {sample.prompt.prompt_id}")
    return tiny_run.digits(sample)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        PPO,
        DAPO | {"rewards": SOME_FAIL, "algorithm": DAPO["algorithm"] | {"filters": ["drop_uniform"]}},
        {"rollout__mode": "partial", "rollout__min_complete": 0.5, "algorithm__old_logprobs": "recompute"},
        {"rollout__mode": "spec_rl", "algorithm__old_logprobs": "recompute", "algorithm__importance_cap": 2.0},
        {
            "eval__before_and_after": True,
            "rewards": [{"name": "test_trainer:fails_often", "options": {"share": 10**9}}],
        },
    ],
)
def test_samples_that_could_not_be_graded_are_not_learned_from(
    policy: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    result = train(make_recipe(policy, tmp_path, train__num_steps=2, **QUICK | {"rewards": SOME_FAIL} | changes))
    for row in read_metrics(result.folder / "metrics.jsonl")[-2:]:
        table = pq.read_table(result.folder / "rollouts" / f"step_{row['step']:06d}.parquet").to_pylist()
        failed = [one for one in table if one["outcome"] == "error"]
        graded = [one for one in table if one["outcome"] != "error"]
        assert len(failed) == row["grading/error"] > 0
        assert {one["advantage"] for one in failed} == {None}
        mean = sum(one["reward"] for one in graded) / max(1, len(graded))
        assert row["reward/mean"] == pytest.approx(mean, abs=1e-6)  # of float32
        assert f"{len(failed)} gradings failed: left out" in step_problems(row)
        learned = [one for one in graded if one["advantage"] is not None]
        assert ("grad_norm" in row or "critic/loss" in row) == bool(learned)
        if "grad_norm" in row:
            assert row["tokens/update"] <= sum(len(one["prompt_token_ids"]) + len(one["token_ids"]) for one in learned)
        if not graded:
            assert step_problems(row).endswith("no update: the filters and failed gradings left no sample")
            assert (row["reward/mean"], row["groups/dropped"]) == (0.0, 4)
            assert (row.get("eval/reward", 0.0), row.get("eval/accuracy", 0.0)) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"log__trackers": ["tensorbord"]}, "tensorbord is not installed, or .*; available here: .*tensorboard"),
        ({"rollout__max_new_tokens": 100}, "the model was made for 128"),
        ({"model__path": "missing-policy"}, "missing-policy"),
        ({"rollout__environment": {"name": "environment_cases:BrokenAtStart"}}, "rollout.environment: .*no such game"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is .* RANK is not set"),
    ],
)
def test_a_run_that_cannot_start_deletes_nothing(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str
) -> None:
    with open_run(make_recipe(policy, tmp_path)) as run:
        run.log.write(1, {"loss": 1.0})
    if "WORLD_SIZE" in changes:
        monkeypatch.setenv("WORLD_SIZE", changes.pop("WORLD_SIZE"))
    with pytest.raises(ValueError, match=message):
        train(make_recipe(policy, tmp_path, **changes), overwrite=True)
    assert len(read_metrics(tmp_path / "run" / "metrics.jsonl")) == 1
    with pytest.raises(ValueError, match=message):
        train(make_recipe(policy, tmp_path / "new", **changes))
    assert not (tmp_path / "new").exists(), "nothing is left that would be in the way of the next run"


# --- From Python ------------------------------------------------------------------------------------------------------


def test_a_run_from_python_has_the_commands_checks_and_a_callback_for_each_step(policy: Path, tmp_path: Path) -> None:
    """Also where it continues from an earlier checkpoint with a changed key."""
    file = tmp_path / "recipe.yaml"
    recipe = make_recipe(policy, tmp_path, train__num_steps=2, train__checkpoint_every=1, train__warmup_steps=0)
    file.write_text(dump_recipe(recipe), encoding="utf-8")
    with pytest.raises(ValueError, match=r"train\.num_step: unknown key, did you mean `num_steps`"):
        srtrl.load_recipe(file, ["train.num_step=3"])
    seen: list[tuple[int, Mapping[str, float]]] = []
    result = srtrl.train(srtrl.load_recipe(file), on_step=lambda *step: seen.append(step))
    _, *rows = read_metrics(result.folder / "metrics.jsonl")
    assert [{"step": step} | dict(row) for step, row in seen] == rows
    assert len(rows) == 2
    slower = srtrl.load_recipe(file, ["train.learning_rate=1e-5"])
    seen.clear()
    srtrl.train(slower, resume=True, from_step=1, on_step=lambda *step: seen.append(step))
    assert [(step, row["learning_rate"]) for step, row in seen] == [(2, 1e-5)]
    with pytest.raises(ValueError, match="from_step needs resume=True"):
        srtrl.train(slower, from_step=1)


# --- Progress ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_terminal", [False, True])
def test_progress_is_a_line_in_two_seconds_and_on_a_terminal_the_stage(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = iter([100.0, 190.0, 191.0, 191.5, 192.0])
    monkeypatch.setattr("srtrl.run.progress.monotonic", lambda: next(ends))
    output = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    with RunProgress(5, console=Console(file=output, force_terminal=is_terminal, width=100)) as progress:
        for step in range(1, 6):
            progress.stage("rollout", 5, 10)
            notice = "nothing learned: all advantages are 0" if step == 4 else ""
            progress.step(step, "9.0 s", reward=(step - 1) / 4, notice=notice)
        progress.say("done [not markup]")
    lines = [
        "step 1/5  reward 0.000  9.0 s",
        "step 2/5  reward 0.125 ▁█  9.0 s",
        "step 4/5  reward 0.375 ▁▃▅█  9.0 s",
        "  nothing learned: all advantages are 0",
        "step 5/5  reward 0.500 ▁▂▄▆█  9.0 s",
        "done [not markup]",
    ]
    lefts = ["", "  4:30 left", "  0:30 left", "", "", ""]
    output.seek(0)
    text = output.read()
    if is_terminal:
        assert all(line in text for line in lines)
        assert "step 5/5  rollout 5/10  0:30 left" in text
        assert "step 3/5  reward" not in text, "one second after the last line"
    else:
        assert text.splitlines() == [line + left for line, left in zip(lines, lefts, strict=True)]


def test_no_line_of_a_step_is_longer_than_78_characters_and_its_reward_is_smoothed() -> None:
    output = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    progress = RunProgress(2000, console=Console(file=output, width=80))
    text = "accuracy 43.1%  11.70 tokens per decode step  113.7 s (25.9 s compiling)"
    for step in range(1, 101):
        progress.step(step, text, reward=step % 10, notice="word " * 50)
    output.seek(0)
    lines = output.read().splitlines()
    assert max(map(len, lines)) <= 78
    assert lines[-6].startswith("step 100/2000  reward 4.500  accuracy")
    assert [len(sparkline([0.5] * 3, width)) for width in range(5)] == [0, 0, 2, 3, 3]
    assert sparkline([*range(8)], 8) == SPARKS
    plain = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    for step in (1, 2):
        RunProgress(2, console=Console(file=plain)).step(step, "9.0 s", reward=0.5)


# --- Parts that are plain functions -----------------------------------------------------------------------------------


@given(st.integers(2, 40), st.integers(0, 5), st.integers(1, 500))
def test_data_order_is_a_permutation_in_each_epoch(num_prompts: int, seed: int, num_draws: int) -> None:
    order = DataOrder(num_prompts, seed)
    drawn = [order.prompt_of(draw) for draw in range(num_draws)]
    for start in range(0, num_draws - num_prompts, num_prompts):
        assert sorted(drawn[start : start + num_prompts]) == list(range(num_prompts))
    fresh = DataOrder(num_prompts, seed)  # in any order: what resume and look-ahead need
    assert [fresh.prompt_of(draw) for draw in reversed(range(num_draws))] == drawn[::-1]


def test_data_order_depends_on_seed_and_epoch() -> None:
    orders = DataOrder(50, 0), DataOrder(50, 1)
    epochs = {tuple(map(order.prompt_of, range(start, start + 50))) for order in orders for start in (0, 50)}
    assert len(epochs) == 4
    with pytest.raises(ValueError, match="no training prompts"):
        DataOrder(0, 0)


def test_the_line_of_a_step_says_how_much_of_its_time_was_compilation() -> None:
    metrics = {"reward/mean": 0.5, "time/step": 28.7}
    assert describe_step({**metrics, "time/compile": 25.9}).endswith("28.7 s (25.9 s compiling)")
    assert describe_step({**metrics, "time/compile": 0.2}).endswith("28.7 s")
    assert describe_step(metrics) == "28.7 s"
    assert describe_step({**metrics, "accuracy": 0.25}) == "accuracy 25.0%  28.7 s"


def drafted(num_tokens: int, num_decodes: int, num_nodes: int, *, epoch: float, **others: float) -> dict[str, float]:
    """What a training step with drafts logs of them; `num_decodes`: one for each sample of each decode step."""
    return {
        **{"step": 1, "data/epoch": epoch, "reward/mean": 0.5, "time/step": 9.0, "time/rollout": 5.0, "grad_norm": 1.0},
        **{"engine/cache_hit_rate": 0.0, "engine/tokens": num_tokens, "engine/decode_steps": 10},
        "engine/tokens_per_decode_step": num_tokens / num_decodes,
        "engine/verified_per_decode_step": 1 + num_nodes / num_decodes,
        **others,
    }


TIMED = {"engine/drafting_seconds": 1.0}
SAVED_BY_DRAFTS: list[tuple[str, list[dict[str, float]], list[str], dict[str, str]]] = [
    (
        "two epochs",
        [drafted(700, 700, 0, epoch=0.9, **TIMED), drafted(900, 300, 1200, epoch=1.9, **TIMED)],
        ["", "3.00 tokens per decode step"],
        {
            "tokens per decode step": "1.60 (1 without drafts)",
            "tokens per decode step, by epoch": "1.00 in the first, 3.00 in the last",
            "accepted of verified draft nodes": "600 of 1,200 (50%)",
            "time of drafting": "2.0 s, 20.0% of the rollouts' time",
        },
    ),
    (
        "one epoch of an earlier version, which has other seconds",
        [drafted(300, 200, 500, epoch=0.0, **{"engine/saved_seconds": -0.1, "engine/draft_seconds": 1.0})],
        ["1.50 tokens per decode step"],
        {"tokens per decode step": "1.50 (1 without drafts)", "accepted of verified draft nodes": "100 of 500 (20%)"},
    ),
    (
        "a drafter whose drafts never paid",
        [drafted(700, 700, 0, epoch=0.0)],
        [""],
        {"tokens per decode step": "1.00 (1 without drafts)"},
    ),
    (
        "none, then drafts from a resume on",
        [
            {name: value for name, value in drafted(700, 700, 0, epoch=0.5, **TIMED).items() if "cache" not in name},
            drafted(600, 300, 1200, epoch=1.5, **TIMED),
        ],
        ["", "2.00 tokens per decode step"],
        {
            "tokens per decode step": "2.00 (1 without drafts)",
            "accepted of verified draft nodes": "300 of 1,200 (25%)",
            "time of drafting": "1.0 s, 20.0% of the rollouts' time",
        },
    ),
    ("no step", [], [], {}),
]


@pytest.mark.parametrize(
    ("steps", "in_lines", "in_summary"),
    [row[1:] for row in SAVED_BY_DRAFTS],
    ids=[row[0] for row in SAVED_BY_DRAFTS],
)
def test_what_drafts_save_is_tokens_per_decode_step(
    steps: list[dict[str, float]], in_lines: list[str], in_summary: dict[str, str]
) -> None:
    assert [describe_step(row) for row in steps] == [f"{words}  9.0 s".strip() for words in in_lines]
    figures = run_figures(steps)
    about_drafts = {name: figure for name, figure in figures.items() if re.search(r"draft|per decode", name)}
    assert about_drafts == in_summary
    assert headline(figures).get("tokens per decode step") == in_summary.get("tokens per decode step")


def test_with_the_drafter_none_nothing_is_said_of_drafts(policy: Path, tmp_path: Path) -> None:
    result = train(make_recipe(policy, tmp_path, train__num_steps=1, rollout__drafter="none", **QUICK))
    rows = read_metrics(result.folder / "metrics.jsonl")
    assert rows[-1]["engine/tokens_per_decode_step"] == 1
    said = [describe_step(rows[-1]), *chain(*run_figures(rows).items())]
    assert not [words for words in said if re.search(r"draft|per decode", words)]


def test_learning_rate() -> None:
    def rates(schedule: str, warmup: int = 4) -> list[float]:
        """Of three training steps with four optimizer steps each."""
        changes = {"train__num_steps": 3, "train__learning_rate": 1.0, "train__warmup_steps": warmup}
        plan = make_recipe(Path(), Path(), train__schedule=schedule, **changes).policy_updates
        return [learning_rate_at(plan, step, number) for step in (1, 2, 3) for number in range(4)]

    warm_up = [0.2, 0.4, 0.6, 0.8]
    assert rates("constant") == pytest.approx([*warm_up, *[1.0] * 8])
    assert rates("linear") == pytest.approx([*warm_up, *(1 - step / 8 for step in range(8))])
    assert rates("cosine")[8] == pytest.approx(0.5)
    assert rates("cosine", warmup=0)[0] == 1.0


def test_an_update_that_has_no_attention_for_its_heads_is_refused(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any rollout; whoever only decodes needs none."""
    refused: list[tuple[torch.dtype, int]] = []
    monkeypatch.setattr(build, "check_packed_attention", lambda device, dtype, width: refused.append((dtype, width)))
    for options in ({}, {"model__dtype": "bfloat16"}):
        recipe = make_recipe(policy, tmp_path, **options)
        model = build.build_policy(recipe, recipe.model.path, torch.device("cpu"))
        build.make_optimizer(model, recipe, learning_rate=1e-3, weight_decay=0.0)
    width = model.config.head_dim
    assert refused == [(torch.float32, width), (torch.bfloat16, width)]
