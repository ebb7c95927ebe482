"""The report of a run: complete, self-contained, and honest about what is missing."""

import base64
import math
import random
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from srtrl.engine.stats import DecodeStep
from srtrl.metrics import MetricLog
from srtrl.report import charts
from srtrl.report.page import write_report
from srtrl.report.run_data import Sample, StepRollouts, choose_samples
from srtrl.report.speculation_charts import early_and_late, epoch_starts, timeline_columns
from srtrl.trainer.run_folder import read_timeline, step_file_name, write_timeline

RECIPE = """\
name: fake
model: {{path: "bundled:tiny"}}
task: {{name: arithmetic}}
rewards: [{{name: correct}}, {{name: format, weight: 0.1}}]
rollout: {{num_prompts: 8, num_samples: 4, max_prompt_tokens: 64, max_new_tokens: 64}}
train: {{num_steps: {num_steps}}}
"""


def make_run(
    folder: Path,
    num_steps: int,
    *,
    planned: int | None = None,
    without: tuple[str, ...] = (),
    drafts: float | None = 0.0,
) -> Path:
    """A run folder as the trainer writes it, with made-up figures; `drafts` are verified a step, None: an old run."""
    (folder / "rollouts").mkdir(parents=True)
    (folder / "recipe.yaml").write_text(RECIPE.format(num_steps=planned or num_steps))
    noise = random.Random(0)
    with MetricLog(folder / "metrics.jsonl") as log:
        log.write(0, eval_metrics(0.31))
        for step in range(1, num_steps + 1):
            row = step_metrics(step, noise)
            if drafts is not None:
                row |= engine_metrics(step, drafts)
            if step == num_steps or step % 10 == 0:
                row |= eval_metrics(0.31 + 0.4 * step / num_steps)
            log.write(step, {name: value for name, value in row.items() if not name.startswith(without or ("-",))})
            pq.write_table(rollout_table(step, noise), folder / "rollouts" / f"step_{step:06d}.parquet")
    return folder


def eval_metrics(accuracy: float) -> dict[str, float]:
    interval = {"eval/accuracy_low": accuracy - 0.04, "eval/accuracy_high": accuracy + 0.04}
    counts = {"eval/num_problems": 200, "eval/num_samples": 1, "eval/length/mean": 20.0}
    return {"eval/accuracy": accuracy, **interval, **counts, "time/eval": 2.5}


def step_metrics(step: int, noise: random.Random) -> dict[str, float]:
    learned = 1 - math.exp(-step / 30)
    values = {
        "reward/mean": 0.3 + 0.5 * learned + noise.gauss(0, 0.04),
        "reward/correct": 0.3 + 0.5 * learned,
        "reward/format": 0.9,
        "accuracy": 0.3 + 0.5 * learned + noise.gauss(0, 0.04),
        "length/mean": 22 + 4 * learned + noise.gauss(0, 1),
        "length/max": 60 + noise.gauss(0, 3),
        "length/truncated_share": 0.1 * (1 - learned),
        "entropy": 0.5 - 0.3 * learned,
        "kl/ref": 0.002 * step,
        "loss": 0.01,
        "clip_share/low": 0.001,
        "clip_share/high": 0.002,
        "grad_norm": 0.6 + noise.gauss(0, 0.1),
        "learning_rate": 1e-5,
        "logprob_difference/mean": 2e-7,
        "logprob_difference/max": 3e-6,
        "logprob_difference/kl": 1e-9,
        "time/rollout": 1.2 + noise.random() / 5,
        "time/grading": 0.05,
        "time/update": 0.8,
        "time/checkpoint": 0.02,
        "time/step": 2.1,
        "time/tokens_per_second": 900.0 + noise.gauss(0, 30),
        "time/update_tokens_per_second": 15_000.0,
        "time/update_mfu": 0.4,
        "tokens/prompt": 200,
        "tokens/response": 700,
        "groups/kept": 8,
    }
    return values | {"grading/correct": 20, "grading/wrong": 11, "grading/timeout": float(step == 2)}


def engine_metrics(step: int, drafts: float) -> dict[str, float]:
    """What the engine logs with a drafter, and without one (`drafts` 0): three steps are an epoch."""
    metrics = {
        "data/epoch": (step - 1) / 3,
        "engine/tokens_per_decode_step": 1 + drafts / 4 + step / 100 * drafts,
        "engine/verified_per_decode_step": 1 + drafts,
        "engine/accepted_per_draft": drafts / 4,
        "engine/draft_hit_rate": drafts / (drafts + 1),
        "engine/saved_seconds": 0.4 * drafts,
        "engine/draft_seconds": 0.01,
        "engine/forward_seconds": 0.8,
        "engine/sample_seconds": 0.1,
        "engine/commit_seconds": 0.02,
    }
    if drafts:
        metrics |= {f"engine/acceptance_depth_{depth}": 0.4 + 0.05 * depth for depth in range(1, 9)}
        metrics |= {"engine/run_ahead_tokens_made": 40, "engine/run_ahead_tokens_used": 25}
        metrics["engine/drafted_steps_share"] = 0.9
    return metrics


def decode_steps(count: int) -> list[DecodeStep]:
    return [
        DecodeStep(
            seconds=0.25 * (index + 1),
            num_primaries=8,
            num_run_ahead=index % 3,
            num_waiting=max(0, 5 - index),
            num_rows=30 - index % 7,
            num_prefill=index,
            num_tokens=12,
        )
        for index in range(count)
    ]


def rollout_table(step: int, noise: random.Random) -> pa.Table:
    rows: list[dict[str, Any]] = []
    for draw in range(8):
        for sample in range(4):
            correct = noise.random() < 0.5
            rows.append(
                {
                    "prompt_id": f"train-{draw}",
                    "draw_index": draw,
                    "sample_index": sample,
                    "prompt": f"Compute {draw}+1.\n",
                    "token_ids": [1] * noise.randint(5, 15 + step % 40),
                    "text": f"<b>{draw}</b>+1={draw + 1} & so on\nAnswer: {draw + 1 if correct else 0}",
                    "rollout_logprobs": [0.0],
                    "reward": float(correct),
                    "outcome": "correct" if correct else "wrong",
                    "finish_reason": "stop",
                    "policy_version": step - 1,
                }
            )
    return pa.Table.from_pylist(rows)


def chart_titles(page: str) -> list[str]:
    """The titles of the charts, each with a picture that is well-formed SVG."""
    charts = re.findall(r'<img alt="([^"]+)" src="data:image/svg\+xml;base64,([^"]+)">', page)
    for _, picture in charts:
        root = ElementTree.fromstring(base64.b64decode(picture))
        assert root.tag.endswith("svg")
        assert len(list(root.iter())) > 20
    return [title for title, _ in charts]


@pytest.mark.parametrize(("num_steps", "drafts"), [(1, 0.0), (3, None), (60, 0.0)])
def test_a_finished_run_has_all_charts_and_figures(tmp_path: Path, num_steps: int, drafts: float | None) -> None:
    page = write_report(make_run(tmp_path / "fake", num_steps, drafts=drafts)).read_text(encoding="utf-8")
    assert chart_titles(page) == [
        "Reward",
        "Accuracy",
        "Reward by part",
        "Response length",
        "Cut at the length limit",
        "KL to the reference",
        "Entropy",
        "Clipped tokens",
        "Gradient norm",
        "Learning rate",
        "Decoder against trainer",
        "Speed of the decoder",
        "Seconds of each stage",
        "Distribution of lengths",
    ]
    assert "31.0%" in page
    assert "71.0%" in page
    assert "+40.0" in page
    assert "Samples of step 1" in page
    assert f"Samples of step {num_steps}" in page
    assert "still going on" not in page
    assert "Speculation" not in page
    assert "Tokens a decode step" not in page


@pytest.mark.parametrize("num_steps", [1, 42])
def test_a_run_that_speculates_shows_what_it_brought(tmp_path: Path, num_steps: int) -> None:
    run = make_run(tmp_path / "fake", num_steps, drafts=3.0)
    (run / "timeline").mkdir()
    for step in range(1, num_steps + 1):
        write_timeline(run / "timeline" / step_file_name(step), decode_steps(4 if step == 1 else 1500))
    page = write_report(run).read_text(encoding="utf-8")
    titles = chart_titles(page)
    several = num_steps > 1
    assert titles[titles.index("Distribution of lengths") + 1 :] == [
        "Tokens a decode step",
        "Acceptance by depth",
        "Where decoding time goes",
        "Acceptance of drafts",
        "Tokens decoded ahead",
        "Steps with drafts",
        "Timeline of step 1",
        *([f"Timeline of step {num_steps}", "Trie of a prompt"] if several else []),
    ]
    assert "<h2>Speculation</h2>" in page
    assert ("4.0 verified" in page, "Rollout time saved" in page) == (True, True)
    assert ("1,500 decode steps in 375 seconds" in page) == several
    assert (f"Step {num_steps}, sample 0, in decode steps" in page) == several


def test_epochs_and_the_groups_of_steps_are_named(tmp_path: Path) -> None:
    rows = [{"step": float(step), **engine_metrics(step, 3.0)} for step in range(1, 8)]
    assert epoch_starts(rows) == [(4.0, 2), (7.0, 3)]
    named = [(label, [row["step"] for row in of]) for label, _, of in early_and_late(rows)]
    assert named == [("first epoch", [1, 2, 3]), ("latest 4 steps", [4, 5, 6, 7])]
    assert [label for label, _, _ in early_and_late(rows[:3])] == ["all steps"]
    assert [label for label, _, _ in early_and_late([{"step": 1.0}, {"step": 2.0}])] == ["all steps"]


def test_a_long_timeline_keeps_its_end_and_its_sums() -> None:
    steps = decode_steps(1501)
    seconds, columns = timeline_columns(steps)
    assert len(seconds) <= 601
    assert (seconds[0], seconds[-1]) == (0.0, steps[-1].seconds)
    assert len(columns["num_rows"]) == len(seconds)
    widths = np.diff(seconds)
    assert (columns["num_rows"][1:] * widths).sum() == pytest.approx(sum(step.num_rows for step in steps) * 0.25)


def test_a_timeline_file_gives_back_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / step_file_name(7)
    assert path.name == "step_000007.parquet"
    write_timeline(path, decode_steps(5))
    assert read_timeline(path) == decode_steps(5)
    write_timeline(path, [])
    assert read_timeline(path) == []
    pq.write_table(pa.table({"seconds": [1.0]}), path)
    with pytest.raises(ValueError, match=r"step_000007.parquet: .*num_primaries"):
        read_timeline(path)
    path.write_bytes(b"nonsense")
    with pytest.raises(ValueError, match=r"step_000007.parquet: cannot read this timeline"):
        read_timeline(path)


def test_the_report_is_whole_where_the_tokenizer_is_gone(tmp_path: Path) -> None:
    run = make_run(tmp_path / "fake", 2, drafts=3.0)
    recipe = run / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("bundled:tiny", str(tmp_path / "gone")))
    page = write_report(run).read_text(encoding="utf-8")
    assert "Trie of a prompt" in chart_titles(page)
    assert "&lt;1&gt;&lt;1&gt;" in page


def test_the_page_needs_no_network_and_escapes_what_the_policy_wrote(tmp_path: Path) -> None:
    page = write_report(make_run(tmp_path / "fake", 3)).read_text(encoding="utf-8")
    assert not re.findall(r"""(?:src|href)\s*=\s*["'](?!data:)""", page)
    assert "@import" not in page
    assert "url(" not in page
    assert "<script" not in page
    assert "&lt;b&gt;" in page
    assert "<b>0</b>+1" not in page


def test_an_interrupted_run_says_so_and_leaves_out_what_is_missing(tmp_path: Path) -> None:
    run = make_run(tmp_path / "fake", 3, planned=50, without=("kl/", "eval/", "reward/correct", "reward/format"))
    for file in (run / "rollouts").iterdir():
        file.unlink()
    with (run / "metrics.jsonl").open("a") as log:
        log.write('{"step": 4, "reward/me')
    page = write_report(run).read_text(encoding="utf-8")
    titles = chart_titles(page)
    assert not {"KL to the reference", "Reward by part", "Distribution of lengths"} & set(titles)
    assert "Accuracy" in titles
    assert "This run has done 3 of 50 steps" in page
    assert "not evaluated" in page
    assert "1 timeout" in page
    assert "Samples of step" not in page


def test_a_run_that_only_evaluated_yet_is_reported(tmp_path: Path) -> None:
    page = write_report(make_run(tmp_path / "fake", 0, planned=5)).read_text(encoding="utf-8")
    assert chart_titles(page) == ["Accuracy"]
    assert "This run has done 0 of 5 steps" in page


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such folder"):
        write_report(tmp_path / "none")
    with pytest.raises(ValueError, match=r"it has no recipe.yaml and no metrics.jsonl"):
        write_report(tmp_path)
    (tmp_path / "recipe.yaml").write_text(RECIPE.format(num_steps=3))
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match="no complete row yet"):
        write_report(tmp_path)


def test_samples_shown_are_right_and_wrong_ones_of_different_prompts() -> None:
    def sample(prompt_id: str, outcome: str) -> Sample:
        text = {"prompt": "", "text": "", "finish_reason": "stop"}
        return Sample(prompt_id=prompt_id, outcome=outcome, reward=0, sample_index=0, length=1, **text)

    def shown(*samples: Sample) -> list[tuple[str, str]]:
        chosen = choose_samples(StepRollouts(step=1, samples=samples), most=2)
        return [(one.prompt_id, one.outcome) for one in chosen]

    mixed = (sample("a", "wrong"), sample("a", "correct"), sample("b", "wrong"))
    assert shown(*mixed) == [("a", "correct"), ("b", "wrong")]
    assert shown(sample("a", "wrong"), sample("a", "timeout")) == [("a", "wrong"), ("a", "timeout")]
    assert shown(sample("a", "correct")) == [("a", "correct")]
    assert shown() == []


def test_only_seconds_are_stacked_as_the_seconds_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    stacks: list[dict[str, Any]] = []

    def record(_: object, __: object, parts: list[tuple[str, str, Any]]) -> None:
        stacks.append({name: values for name, _, values in parts})

    monkeypatch.setattr(charts, "draw_stack", record)
    rows = [{"step": step, **step_metrics(step, random.Random(0))} for step in (1, 2)]
    assert charts._draw_stage_times(rows) is not None
    (parts,) = stacks
    assert set(parts) == {"rollout", "grading", "update", "checkpoint"}
    assert sum(parts.values()).tolist() == pytest.approx([2.17, 2.17], abs=0.11)
