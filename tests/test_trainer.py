"""The training loop on a tiny policy: what it writes and what stops it."""

import io
import json
import math
import os
import re
import signal
import zlib
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pyarrow.parquet as pq
import pytest
import tiny_run
import torch
from rich.console import Console
from tiny_run import DAPO, PPO, learned_rows, make_recipe, open_run, train
from update_cases import CALLS, flawed

from srtrl import build, build_models
from srtrl.drafters.srt import Drafter
from srtrl.evaluation.policy import resolve_eval_source, run_evals
from srtrl.metrics import read_metrics
from srtrl.rollout.collect import collect_rollouts
from srtrl.run.interrupt import Interrupt
from srtrl.run.progress import SPARKS, RunProgress, sparkline, styled
from srtrl.run.step_metrics import describe_step, headline, run_figures, step_problems
from srtrl.tasks.reward_input import RewardInput
from srtrl.trainer import sampling
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


def test_metrics_of_a_step(finished: Callable[..., Path]) -> None:
    """That there are all, by name, is in `test_docs.py`."""
    before, *steps = read_metrics(finished() / "metrics.jsonl")
    assert before["step"] == 0
    assert {name.split("/")[0] for name in before} == {"step", "eval", "time"}
    for row in steps:
        assert row["logprob_difference/max"] < 1e-4
        assert row["grading/wrong"] + row["grading/correct"] == 16
        assert (row["data/draws"], row["data/epoch"], row["groups/short"]) == (4, 4 * (row["step"] - 1) / 10, 0)
        stages = ("compile", "rollout", "grading", "reference", "update", "save_rollouts", "eval", "checkpoint")
        learned_from = 2 * (row["tokens/response"] + 4 * row["tokens/prompt"])  # two epochs of 4 samples of a prompt
        assert row["tokens/update"] == learned_from
        assert row["time/update_tokens_per_second"] == pytest.approx(learned_from / row["time/update"])
        assert row["time/step"] == pytest.approx(sum(row.get(f"time/{stage}", 0.0) for stage in stages))
    assert "time/checkpoint" in steps[2], "of the checkpoint after step 2"


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
    assert resolve_eval_source("bundled:tiny") == ("bundled:tiny", None)


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


@pytest.mark.parametrize("environment", [{}, {"TORCHELASTIC_RUN_ID": "1"}])
def test_a_second_signal_ends_the_run_but_one_that_a_launcher_forwards_counts_once(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launcher's comes while the first one is reported, and a moment later; a signal after that is another one."""
    said: list[str] = []

    def say(message: str) -> None:
        said.append(message)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr("srtrl.run.interrupt.time.sleep", lambda _: signal.raise_signal(signal.SIGTERM))
    with Interrupt(say) as interrupt:
        with nullcontext() if environment else pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        assert interrupt.requested
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    assert ["--shutdown-timeout" in message for message in said] == [bool(environment)]


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
        build_models.build_policy(recipe, str(checkpoint), torch.device("cpu"))


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
        assert is_cut or not num_kept
        share = f"{row['length/truncated_share']:.0%} of the samples"
        assert (f"{share} reached rollout.max_new_tokens" in step_problems(row)) == is_cut
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


RECOMPUTE = {"algorithm__old_logprobs": "recompute", "algorithm__importance": {"mode": "token_truncate", "max": 2.0}}
ALL_FAIL = [{"name": "test_trainer:fails_often", "options": {"share": 10**9}}]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        PPO,
        DAPO | {"rewards": SOME_FAIL, "algorithm": DAPO["algorithm"] | {"filters": ["drop_uniform"]}},
        {"rollout__mode": "partial", "rollout__min_complete": 0.5, **RECOMPUTE},
        {"rollout__mode": "spec_rl", **RECOMPUTE},
        {"eval__before_and_after": True, "rewards": ALL_FAIL, "train__num_steps": 4},
    ],
)
def test_samples_that_could_not_be_graded_are_not_learned_from(
    policy: Path, tmp_path: Path, changes: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {"train__num_steps": 2, "rewards": SOME_FAIL} | changes
    result = train(make_recipe(policy, tmp_path, **QUICK | changes))
    said = capsys.readouterr().out
    num_without = 4 if changes["rewards"] is ALL_FAIL else 0
    assert said.count("  reward -  ") == num_without
    advice = f"thirdstepwithoutagradient:see`srtrlrollouts{result.folder}`anddocs/reward.md"
    assert "".join(said.split()).count(advice) == (num_without > 0)
    if num_without:
        *_, third, _ = re.split(r"step \d/4", said.partition("after step 4")[0])
        assert advice in "".join(third.split())
    for row in read_metrics(result.folder / "metrics.jsonl")[-2:]:
        table = pq.read_table(result.folder / "rollouts" / f"step_{row['step']:06d}.parquet").to_pylist()
        graded = [one for one in table if one["outcome"] != "error"]
        learned = [one for one in graded if one["advantage"] is not None]
        failed = len(table) - len(graded)
        assert failed == row["grading/error"] > 0
        assert learned == [one for one in table if one["advantage"] is not None]
        mean = sum(one["reward"] for one in graded) / max(1, len(graded))
        assert row["reward/mean"] == pytest.approx(mean, abs=1e-6)  # of float32
        assert f"{failed} grading{'s' * (failed > 1)} failed: left out" in step_problems(row)
        assert ("grad_norm" in row or "critic/loss" in row) == bool(learned)
        num_tokens = sum(len(one["prompt_token_ids"]) + len(one["token_ids"]) for one in learned)
        assert row.get("tokens/update", 0) <= num_tokens
        if not graded:
            assert step_problems(row).endswith("no update: the filters and failed gradings left no sample")
            assert (row["reward/mean"], row["groups/dropped"]) == (0.0, 4)
            assert (row.get("eval/reward", 0.0), row.get("eval/accuracy", 0.0)) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollout__max_new_tokens": 100}, "the model was made for 128"),
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
        "step 2/5  reward 0.125 ▁█  9.0 s  4:30 left",
        "  rewards here are means of up to 10 steps; each step's is in metrics.jsonl",
        "step 4/5  reward 0.375 ▁▃▅█  9.0 s  0:30 left",
        "  nothing learned: all advantages are 0",
        "step 5/5  reward 0.500 ▁▂▄▆█  9.0 s",
        "done [not markup]",
    ]
    output.seek(0)
    text = output.read()
    assert ("\x1b[1mstep 5/5  reward 0.500\x1b[0m" in text) == is_terminal
    if is_terminal:
        text = re.sub(r"\x1b\[\d?m", "", text)
        assert all(re.sub("  .:.. left", "", line) in text for line in lines)
        assert "step 5/5  rollout 5/10  0:30 left" in text
        assert "step 3/5  reward" not in text, "one second after the last line"
    else:
        assert text.splitlines() == lines


def test_a_gain_is_coloured_and_a_step_without_a_reward_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for no_color in ("", "1"):
        monkeypatch.setenv("NO_COLOR", no_color)
        output = io.StringIO()
        Console(file=output, force_terminal=True).print(styled("gain: +1.0 points"))
        assert ("\x1b[32m" in output.getvalue()) == (not no_color)
    output = io.StringIO()
    progress = RunProgress(3, console=Console(file=output))
    for step, reward in enumerate((0.5, math.nan, 1.0), start=1):
        progress._last_line = -math.inf
        progress.step(step, "9.0 s", reward=reward)
    assert re.findall(r"reward (\S+)", output.getvalue()) == ["0.500", "-", "0.750"]


@pytest.mark.parametrize(("is_terminal", "longest"), [(False, 100), (True, 78)])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_lines_of_a_step_have_a_longest_length_and_its_reward_is_smoothed(
    encoding: str, is_terminal: bool, longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    output = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    progress = RunProgress(2000, console=Console(file=output, width=80, force_terminal=is_terminal))
    text = "accuracy 43.1%  11.70 tokens per decode step  113.7 s (25.9 s compiling)"
    for step in range(1, 101):
        progress.step(step, text, reward=step % 10, notice="word " * 50)
    output.seek(0)
    lines = re.sub(r"\x1b\[[\d;]*m", "", output.read()).splitlines()
    assert longest - 10 < max(map(len, lines)) <= longest
    [last] = (line for line in lines if line.startswith("step 100/"))
    assert last.startswith("step 100/2000  reward 4.500  accuracy")
    assert [len(sparkline([0.5] * 3, width)) for width in range(5)] == [0, 0, 2, 3, 3]
    assert sparkline([*range(8)], 8) == SPARKS


def drafted(num_tokens: int, num_decodes: int, num_nodes: int, epoch: float, **others: float) -> dict[str, float]:
    """Metrics of a training step with drafts; `num_decodes`: one for each sample of each decode step."""
    return {
        **{"step": 3, "data/epoch": epoch, "reward/mean": 0.5, "time/rollout": 5.0, "time/step": 9.0, "grad_norm": 1.0},
        **{"engine/cache_hit_rate": 0.0, "engine/tokens": num_tokens, "engine/decode_steps": 10},
        "engine/tokens_per_decode_step": num_tokens / num_decodes,
        "engine/verified_per_decode_step": 1 + num_nodes / num_decodes,
        **others,
    }


def evaluated(step: int, accuracy: float) -> dict[str, float]:
    interval = {"eval/accuracy": accuracy, "eval/accuracy_low": accuracy - 0.1, "eval/accuracy_high": accuracy + 0.1}
    return {"step": step, "eval/num_problems": 6, "eval/num_samples": 1, "time/eval": 2.0, **interval}


def test_figures_of_a_run_and_its_steps_for_people() -> None:
    """The run had no drafter until a resume, then one of an earlier version, with other seconds."""
    plain, *steps = (
        drafted(800, 800, 0, 0.5),
        drafted(700, 700, 0, 0.9, **{"engine/draft_seconds": 9.0, "engine/saved_seconds": -0.1, "time/compile": 0.9}),
        drafted(900, 300, 1200, 1.9, **{"engine/drafting_seconds": 1.0, "accuracy": 0.25}) | evaluated(3, 0.5),
        drafted(900, 300, 1200, 1.9, **{"engine/drafting_seconds": 1.0, "time/compile": 7175.1}),
    )
    del plain["engine/cache_hit_rate"]
    assert list(map(describe_step, [plain, *steps])) == [
        *("9.0 s", "9.0 s", "accuracy 25.0%  3.00 tokens per decode step  9.0 s", "9.0 s (7175.1 s compiling)")
    ]
    rows = [evaluated(0, 0.251), plain, *steps]
    assert run_figures(rows) == {
        "held-out problems x samples": "6 x 1",
        "held-out accuracy before training": "25.1% (95%: 15.1% to 35.1%)",
        "held-out accuracy after step 3": "50.0% (95%: 40.0% to 60.0%)",
        "gain": "+24.9 points",
        "training reward, first to last": "0.500 to 0.500",
        "sampled tokens": "3,300 in 40 decode steps of 52.5 samples",
        "tokens per decode step": "1.92 (1 without drafts)",
        "tokens per decode step, by epoch": "1.00 in the first, 3.00 in the last",
        "accepted of verified draft nodes": "1,200 of 2,400 (50%)",
        "time of drafting": "2.0 s, 20.0% of the rollouts' time",
        "time of all stages": "2 h 0 min (compile 100%)",
    }
    assert list(headline(run_figures(rows))) == [
        "tokens per decode step",
        "held-out accuracy after step 3",
        "time of all stages",
    ]
    never_paid = {
        name: figure for name, figure in run_figures(steps[:1]).items() if re.search("draft|per decode", name)
    }
    assert never_paid == {"tokens per decode step": "1.00 (1 without drafts)"}
    assert "training reward, first to last" in headline(run_figures(steps[:1]))
    assert headline(run_figures([])) == {"time of all stages": "0 min 0 s"}
    assert headline(run_figures(rows))["time of all stages"] == "2 h 0 min"
    for index, name, shown in ((3, "reward/mean", "reward/mean"), (0, "eval/accuracy_low", "accuracy_low")):
        lost = [{key: value for key, value in row.items() if key != name} for row in rows]
        with pytest.raises(ValueError, match=f"metrics.jsonl: the row of step [03] has no {shown}"):
            run_figures([*rows[:index], lost[index], *rows[index + 1 :]])


def test_an_update_that_has_no_attention_for_its_heads_is_refused(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any rollout; whoever only decodes needs none."""
    check = Mock()
    monkeypatch.setattr(build_models, "check_packed_attention", check)
    recipe = make_recipe(policy, tmp_path, model__dtype="bfloat16")
    model = build_models.build_policy(recipe, recipe.model.path, torch.device("cpu"))
    build_models.make_optimizer(model, recipe, learning_rate=1e-3, weight_decay=0.0)
    check.assert_called_once_with(torch.device("cpu"), torch.bfloat16, model.config.head_dim)
