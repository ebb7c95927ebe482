"""The report of a run: complete, self-contained, and honest about what is missing."""

import base64
import math
import random
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from srtrl.metrics import MetricLog
from srtrl.report.page import write_report
from srtrl.report.run_data import Sample, StepRollouts, choose_samples

RECIPE = """\
name: fake
model: {{path: "bundled:tiny"}}
task: {{name: arithmetic}}
rewards: [{{name: correct}}, {{name: format, weight: 0.1}}]
rollout: {{num_prompts: 8, num_samples: 4, max_prompt_tokens: 64, max_new_tokens: 64}}
train: {{num_steps: {num_steps}}}
"""


def make_run(folder: Path, num_steps: int, *, planned: int | None = None, without: tuple[str, ...] = ()) -> Path:
    """A run folder as the trainer writes it, with made-up figures."""
    (folder / "rollouts").mkdir(parents=True)
    (folder / "recipe.yaml").write_text(RECIPE.format(num_steps=planned or num_steps))
    noise = random.Random(0)
    with MetricLog(folder / "metrics.jsonl") as log:
        log.write(0, eval_metrics(0.31))
        for step in range(1, num_steps + 1):
            row = step_metrics(step, noise)
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
        "tokens/prompt": 200,
        "tokens/response": 700,
        "groups/kept": 8,
    }
    return values | {"grading/correct": 20, "grading/wrong": 11, "grading/timeout": float(step == 2)}


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
        assert len(list(root.iter())) > 30
    return [title for title, _ in charts]


@pytest.mark.parametrize("num_steps", [1, 3, 60])
def test_a_finished_run_has_all_charts_and_figures(tmp_path: Path, num_steps: int) -> None:
    page = write_report(make_run(tmp_path / "fake", num_steps)).read_text(encoding="utf-8")
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
