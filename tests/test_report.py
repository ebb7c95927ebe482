"""The report of a run: complete, self-contained, and honest about what is missing."""

import html
import json
import math
import random
import re
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import bench_cases
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from bench_cases import printed
from bench_cases import run as command
from hypothesis import given, settings
from hypothesis import strategies as st
from recipe_cases import recipe_text

from srtrl.metrics import MetricLog
from srtrl.report.charts import CHARTS, draw, lines_of
from srtrl.report.decoded_response import decoded_response, last_rollout
from srtrl.report.page import write_report
from srtrl.report.runs import read_run
from srtrl.run.folder import step_file_name
from srtrl.run.machine import MACHINE_FILE, describe_machine, read_machines
from srtrl.warm_start.training import train_tokenizer

REWARDS = "rewards: [{name: correct}, {name: format, weight: 0.1}]\n"
PLAIN_CHARTS = [
    *("Reward", "Accuracy", "Response length", "Truncated responses", "Groups", "Groups with equal rewards"),
    *("Loss", "KL to the reference", "Entropy", "Clipped tokens", "Gradient norm", "Learning rate"),
    *("Decoder vs. trainer log-probs", "Speed of the decoder", "Time by stage", "Tokens per decode step"),
    *("Failed gradings", "Decode steps"),
]
"""Those of a run without critic or drafts."""
SVG = "{http://www.w3.org/2000/svg}"


def make_run(
    folder: Path, num_steps: int, *, planned: int | None = None, without: tuple[str, ...] = (), drafts: bool = False
) -> Path:
    """A run folder as the trainer writes it, with made-up figures."""
    (folder / "rollouts").mkdir(parents=True)
    (folder / "recipe.yaml").write_text(recipe_text(f"{REWARDS}seed: 0\n", num_steps=planned or num_steps))
    noise = random.Random(0)
    with MetricLog(folder / "metrics.jsonl") as log:
        log.write(0, eval_metrics(0.31))
        for step in range(1, num_steps + 1):
            row = step_metrics(step, noise) | (engine_metrics() if drafts else {})
            if step == num_steps or step % 10 == 0:
                row |= eval_metrics(0.31 + 0.4 * step / num_steps)
            log.write(step, {name: value for name, value in row.items() if not name.startswith(without or ("-",))})
            pq.write_table(rollout_table(step, noise), folder / "rollouts" / step_file_name(step))
    return folder


def eval_metrics(accuracy: float) -> dict[str, float]:
    interval = {"eval/accuracy_low": accuracy - 0.04, "eval/accuracy_high": accuracy + 0.04}
    counts = {"eval/num_problems": 200, "eval/num_samples": 1, "eval/length/mean": 20.0}
    return {"eval/accuracy": accuracy, **interval, **counts, "time/eval": 2.5}


def step_metrics(step: int, noise: random.Random) -> dict[str, float]:
    learned = 1 - math.exp(-step / 30)
    return {
        **{"reward/mean": 0.3 + 0.5 * learned, "reward/correct": 0.3 + 0.5 * learned, "reward/format": 0.9},
        **{"accuracy": 0.3 + 0.5 * learned, "entropy": 0.5 - 0.3 * learned, "kl/ref": 0.002 * step, "loss": 0.01},
        **{"length/mean": 22 + noise.gauss(0, 1), "length/max": 60, "length/truncated_share": 0.1},
        **{"clip_share/low": 0.001, "clip_share/high": 0.002, "grad_norm": 0.6, "learning_rate": 1e-5},
        **{"logprob_difference/mean": 2e-7, "logprob_difference/max": 3e-6},
        **{"time/rollout": 1.2, "time/update": 0.8, "time/step": 2.1, "tokens/prompt": 200, "tokens/response": 700},
        **({"time/compile": 100.0, "time/step": 102.1} if step == 1 else {}),
        **{"groups/kept": 8, "groups/zero_advantage_share": 0.25, "grading/timeout": float(step == 2)},
        **{"engine/tokens": 700, "engine/decode_steps": 30, "engine/tokens_per_decode_step": 2.5, "data/epoch": 0.5},
        "engine/cache_hit_rate": 0.5,
        "time/tokens_per_second": 900.0 + noise.gauss(0, 30),
    }


def engine_metrics() -> dict[str, float]:
    depths = {f"engine/acceptance_depth_{depth}": 0.4 + 0.05 * depth for depth in range(1, 9)}
    run_ahead = {"engine/run_ahead_tokens": 40, "engine/text_tokens_repeated": 0}
    return depths | run_ahead | {"engine/verified_per_decode_step": 4}


def rollout_table(step: int, noise: random.Random) -> pa.Table:
    rows = [
        {
            **{"prompt_id": f"train-{draw}", "draw_index": draw, "sample_index": sample, "prompt": f"{draw}+1.\n"},
            **{"prompt_token_ids": [7] * 5, "answer": "</pre><script>alert(1)</script>"},
            **{
                "token_ids": [1] * noise.randint(5, 15 + step % 40) + [2],
                "text": f"<b>{draw}</b>+1={draw + 1} & so on\n",
            },
            **{"reward": correct + 0.1, "reward_format": 1.0, "outcome": "correct" if correct else "wrong"},
            "finish_reason": "stop",
        }
        for draw, sample in product(range(8), range(4))
        for correct in [noise.random() < 0.5]
    ]
    return pa.Table.from_pylist(rows)


def charts_of(page: str) -> dict[str, ElementTree.Element]:
    """The charts by title, each a picture that is well-formed SVG."""
    found = re.findall(r"<h3>([^<]+)</h3>\s*<p>[^<]*</p>\s*(<svg .*?</svg>)", page, re.DOTALL)
    return {title: ElementTree.fromstring(picture) for title, picture in found}


def texts_of(svg: ElementTree.Element) -> set[str]:
    return {element.text or "" for element in svg.iter(f"{SVG}text")}


def test_a_finished_run_has_all_charts_and_figures(tmp_path: Path) -> None:
    page = write_report(make_run(tmp_path / "fake", 30)).read_text(encoding="utf-8")
    charts = charts_of(page)
    assert sorted(charts) == sorted(PLAIN_CHARTS)
    assert {"mean = correct", "format"} <= texts_of(charts["Reward"]), "equal lines are one"
    assert "zero advantage share" not in texts_of(charts["Groups"]), "a share is no number of groups"
    assert "zero advantage share" in texts_of(charts["Groups with equal rewards"])
    points = json.loads(html.unescape(re.findall(r'data-lines="([^"]+)"', page)[0]))
    assert points["format"] == [[step, 0.9] for step in range(1, 31)], "to look at under the pointer"
    assert "100" not in texts_of(charts["Time by stage"]), "compilation would dwarf the other seconds"
    figures = ("31.0%", "71.0%", "+40.0 points", "training reward", "2.50 (1 without drafts)", "reward_format 1")
    for figure in (*figures, "time of all stages"):
        assert figure in page
    # With the compilation of the first step and an evaluation before it and in every tenth step.
    duration = "2 min 50 s"
    time = re.search(rf"<p>Time of all stages: ({duration} \([^)]*\))</p>", page)
    assert time, "without machines, which an older run has not noted"
    assert (tiles := re.findall(r"<b>([^<]+)</b> <small>", page))[::2] == ["2.50 (1 without drafts)", duration]
    assert tiles[1].startswith("71.0%")
    assert "</b> <small>tokens per decode step</small>" in page
    assert "<p>Time by stage, 170.0 s</p>" in page
    assert re.search(r'width: 58.82%" title="compile 100.0 s"', page)
    steps = [1, 7, 13, 18, 24, 30]
    assert [int(step) for step in re.findall(r"Samples of step (\d+): 6 of 32", page)] == steps
    shown = re.findall(r'<section class="card sample" data-step="(\d+)" data-outcome="(\w+)">', page)
    assert shown == [(str(step), outcome) for step in steps for outcome in ("correct", "wrong") for _ in range(3)]
    assert [step or None for step in re.findall(r'<option value="(\d*)">', page)] == [None, *map(str, steps), None]
    assert re.findall(r"<option>(\w+)</option>", page) == ["correct", "wrong"]
    assert "still running" not in page
    drafted = re.search(r"<h2>(\d+) tokens in (\d+) decode steps</h2>", page)
    assert drafted
    assert int(drafted[1]) > int(drafted[2]), "one token again and again is drafted"
    cells = re.findall(r'<div class="cells( plain)?">(.*)</div>', page)
    counts = [row.count("<i ") for _, row in cells]
    assert (counts[0], sum(counts[1:]), len(cells) - 1) == (int(drafted[1]), int(drafted[1]), int(drafted[2]))
    network = r"""(?:src|href)\s*=\s*["'](?!data:|#)|@import|url\((?!#)|<script[^>]"""
    assert not re.findall(network, page), "needs no network"
    assert page.count("<script>") == 2, "what a task or the policy wrote is escaped"
    assert "<h4>Reference answer</h4><pre>&lt;/pre&gt;&lt;script&gt;alert" in page
    assert re.search(r'<span class="tag">5 tokens</span>\s*<pre>\d\+1.', page), "a prompt as the policy reads it"
    assert "<b>0</b>+1" not in page, "what the policy wrote is escaped"
    assert "&lt;b&gt;" in page


def test_an_interrupted_run_says_so_and_leaves_out_what_is_missing(
    tmp_path: Path, finished: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It speculates, has no rollouts, and went on on another machine."""
    names = ("KL to the reference", "Tokens per decode step", "Acceptance by depth", "Run-ahead")
    few = {section: [one for one in charts if one.title in names] for section, charts in CHARTS.items()}
    monkeypatch.setattr("srtrl.report.page.CHARTS", few)  # to draw all takes seconds
    run = make_run(tmp_path / "fake", 3, planned=50, without=("kl/", "eval/"), drafts=True)
    shutil.rmtree(run / "rollouts")
    with (run / "metrics.jsonl").open("a") as log:
        log.write('{"step": 4, "reward/me')
    [machine] = read_machines(finished())
    assert re.sub(r"-\d\d-\d\d$", "", machine) == re.sub(r"-\d\d-\d\d$", "", describe_machine(torch.device("cpu")))
    assert re.fullmatch(r".+, \d+ cores?, MKL_CBWR=\S*, torch \S+, srtrl \S+, \d{4}-\d\d-\d\d", machine)
    (run / MACHINE_FILE).write_text(f"{machine}\n" * 2 + "NVIDIA <H100>, 2027-01-01\n")
    page = write_report(run).read_text(encoding="utf-8")
    charts = charts_of(page)
    assert set(charts) == {*names[1:]}
    assert "text tokens repeated" not in texts_of(charts["Run-ahead"])  # zero throughout
    machines = f" on {machine}; then NVIDIA &lt;H100&gt;, 2027-01-01</p>"
    for text in ("This run has done 3 of 50 steps", "whose reward is 0: 1 timeout.", machines):
        assert text in page
    for text in ("held-out accuracy after", "<h2>Samples", "<script>alert"):
        assert text not in page


def test_two_evaluations_are_two_points_and_an_axis_shows_what_it_must() -> None:
    def picture(name: str, rows: list[dict[str, float]]) -> str:
        (chart,) = (one for charts in CHARTS.values() for one in charts if one.title == name)
        lines = lines_of(chart, rows)
        assert lines
        return draw(chart, rows, lines)

    rows = [{"step": step, "eval/accuracy": 0.1 * step} for step in range(4)]
    has_line = ["fill: none; stroke: #2563eb" in picture("Accuracy", rows[:number]) for number in (2, 3)]
    assert has_line == [False, True]
    noise = [{"step": step, "loss": 1e-8 * (-1) ** step} for step in range(4)]
    assert {"0.0", "0.5", "1.0"} <= texts_of(ElementTree.fromstring(picture("Loss", noise)))
    assert "0.0" in texts_of(ElementTree.fromstring(picture("Learning rate", [{"step": 1, "learning_rate": 2e-4}])))


# --- srtrl rollouts ---------------------------------------------------------------------------------------------------


@pytest.fixture
def told(tmp_path: Path) -> Path:
    """A run of two steps: the first as an older version wrote it, the second with texts that ask for trouble."""
    run = make_run(tmp_path / "told", 2)
    first = run / "rollouts" / step_file_name(1)
    pq.write_table(pq.read_table(first).drop_columns(["answer"]), first)
    samples = [
        {"sample_index": 0, "text": "short\x1b[2J [bold]", "token_ids": [1], "reward": 1.1, "outcome": "correct"},
        {"sample_index": 1, "text": "x" * 2500, "token_ids": [1] * 9, "reward": -0.5, "outcome": "wrong"},
        {"sample_index": 2, "text": "middle", "token_ids": [1] * 3, "reward": 0.1, "outcome": "wrong"},
    ]
    shared = {"step": 2, "prompt_id": "p-1", "draw_index": 9, "prompt_token_ids": [7, 7], "prompt": "What is 2?\n"}
    shared |= {"answer": "two", "reward_format": 1.0, "advantage": None, "finish_reason": "stop"}
    rows = [shared | row for row in samples]
    pq.write_table(pa.Table.from_pylist(rows), run / "rollouts" / step_file_name(2))
    return run


def test_rollouts_are_shown_with_all_that_is_known_of_them(told: Path) -> None:
    shown = printed("rollouts", told)
    assert "step 2, prompt p-1, sample 0: reward 1.1 (format 1), not learned from, correct" in shown
    assert "1 tokens, finish reason: stop" in shown
    assert shown.count("What is 2?") == 1
    assert shown.count("reference answer\ntwo\n") == 3
    assert "short·[2J [bold]" in shown, "no control character reaches the terminal, and nothing is markup"
    assert "... 500 more characters; --full shows all" in shown
    assert "x" * 2500 in printed("rollouts", told, "--full")
    assert "... 2 more samples; --limit shows more" in printed("rollouts", told, "--limit", 1)


def test_equal_samples_are_shown_once_and_prompts_by_their_visits(tmp_path: Path) -> None:
    run = make_run(tmp_path / "told", 3)

    def row(prompt: str, index: int, text: str, reward: float, outcome: str = "wrong") -> dict[str, Any]:
        row = {"prompt_id": prompt, "draw_index": 9, "sample_index": index, "text": text, "reward": reward}
        row |= {"outcome": outcome, "token_ids": [1], "prompt_token_ids": [7], "prompt": "?", "finish_reason": "stop"}
        return row | {"advantage": 0.0, "reward_format": reward}

    for step, rows in enumerate(
        (
            [row("p", 0, "a", 0.25), row("q", 0, "a", 1.0)],
            [row("p", 0, "a", 0.5), row("r\x1b", 0, "a", 0.5)],
            [
                *(row("p", 0, "a", 1.0), row("p", 1, "b", 1.0), row("p", 2, "a", 1.0), row("p", 3, "a", 0.0)),
                *(row("p", 4, "a", 0.0, "error"), row("q", 0, "a", 0.0)),
            ],
        ),
        start=1,
    ):
        pq.write_table(pa.Table.from_pylist(rows), run / "rollouts" / step_file_name(step))
    shown = printed("rollouts", run, "--prompt", "p")
    assert re.findall(r"sample (.*?): reward (\S+) ", shown) == [
        ("0 (2 equal)", "1"),
        ("1", "1"),
        ("3", "0"),
        ("4", "0"),
    ]
    assert "... 2 more samples" in printed("rollouts", run, "--prompt", "p", "--limit", 2)
    assert printed("rollouts", run, "--by-prompt").splitlines() == [
        "-1.000  q: 1.000 at step 1, 0.000 at step 3, visits: 2",
        "+0.000  r·: 0.500 at step 2, 0.500 at step 2, visits: 1",
        "+0.500  p: 0.250 at step 1, 0.750 at step 3, visits: 3",
    ]
    result = command("rollouts", run, "--by-prompt", "--limit", 3)
    assert (result.exit_code, result.stderr) == (2, "error: --by-prompt: expected no other option\n")


JSON_ROWS: list[tuple[tuple[object, ...], list[int]]] = [
    ((), [0, 1, 2]),
    (("--sort", "reward"), [1, 2, 0]),
    (("--sort", "-reward", "--limit", 2), [0, 2]),
    (("--sort", "length"), [0, 2, 1]),
    (("--prompt", "p-1", "--step", 2), [0, 1, 2]),
    (("--prompt", "train-3"), [0, 1, 2, 3]),  # of step 1: step 2 did not sample it
]


def test_rollouts_as_json(told: Path) -> None:
    for arguments, expected in JSON_ROWS:
        rows = [json.loads(line) for line in printed("rollouts", told, *arguments, "--json").splitlines()]
        assert [row["sample_index"] for row in rows] == expected, arguments
        expected_row = (1, None, None) if "train-3" in arguments else (2, "two", None)
        assert {(row["step"], row["answer"], row["advantage"]) for row in rows} == {expected_row}
        assert all(len(row["text"]) == 2500 for row in rows if row["length"] == 9), "whole"
        assert not rows[0].keys() & {"token_ids", "rollout_logprobs"}


# --- The response that is decoded again, step by step -----------------------------------------------------------------


TEXTS = {
    1: {"sum": ["one plus two is three", "one plus one is two"], "odd": ["alone here", "not alone"]},
    3: {"sum": ["one plus two is three", "two"]},
    4: {"sum": ["one plus two is four", "never looked at"]},
}
"""Step -> prompt -> the texts of its samples."""
COLUMNS = ("prompt_id", "prompt", "prompt_token_ids", "draw_index", "sample_index", "token_ids")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run whose tokenizer has a token a byte."""
    folder = tmp_path / "fake"
    (folder / "rollouts").mkdir(parents=True)
    tokenizer = train_tokenizer([], 257)
    tokenizer.save_pretrained(folder / "model")
    (folder / "recipe.yaml").write_text(recipe_text("seed: 4\n", path=folder / "model"))
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    for step, prompts in TEXTS.items():
        samples = [
            (name, f"[{name}]\n", [draw], draw, index, [*tokenizer.encode(text), tokenizer.eos_token_id])
            for draw, (name, texts) in enumerate(prompts.items())
            for index, text in enumerate(texts)
        ]
        columns = map(list, zip(*samples[::-1], strict=True))
        table = pa.table(dict(zip(COLUMNS, columns, strict=True)))
        pq.write_table(table, folder / "rollouts" / f"step_{step:06d}.parquet")
    return folder


def test_the_last_rollout_is_the_later_one_and_a_first_step_has_its_samples_in_turn(run: Path) -> None:
    name, prompt, num_earlier = last_rollout(read_run(run))  # of the prompt with the most rollouts
    assert (name, prompt.prompt_id, len(prompt.samples), num_earlier) == ("step 4, sample 0", "sum", 6, 4)
    for step in (3, 4):
        (run / "rollouts" / f"step_{step:06d}.parquet").unlink()
    name, _, num_earlier = last_rollout(read_run(run))
    assert (name, num_earlier) == ("step 1, sample 1", 1)


# --- Decoded again ----------------------------------------------------------------------------------------------------

texts = st.lists(st.integers(0, 3), min_size=1, max_size=12)


@given(st.lists(texts, max_size=6), texts)
@settings(max_examples=25)
def test_the_steps_give_the_rollout(earlier: list[list[int]], later: list[int]) -> None:
    prompt = bench_cases.recorded("x", [1], [*earlier, later], ())
    pieces = decoded_response("", prompt, len(earlier), str).pieces
    assert [token for texts in pieces for text in texts for token in json.loads(text)] == later


def test_turns_are_texts_of_their_own() -> None:
    """The policy says 5 5 5, reads 9 9, and says 9 9 9 7: no draft leads into a tool's output."""
    sample = [5, 5, 5, 9, 9, 9, 9, 9, 7]
    pieces = decoded_response("", bench_cases.recorded("x", [1], [sample, sample], ((3, 5),)), 1, str).pieces
    assert pieces == [["[5]"], ["[5]", "[5]"], ["[9]", "[9]", "[9]", "[7]"]]
