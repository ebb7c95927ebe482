"""Samples of several turns as people and programs see them: report, rollouts, generate, eval, recordings."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from bench_cases import Repeater, printed, write_rows
from environment_cases import HOSTILE
from rollout_cases import make_group

from srtrl import generate
from srtrl.bench.recorded import Recording, find_extensions, read_recorded
from srtrl.bench.replay_loop import Replay, ReplayCounts
from srtrl.drafters.none import Drafter as NoDrafter
from srtrl.evaluation.policy import majority_scores
from srtrl.report.page import write_report
from srtrl.report.runs import read_rollouts
from srtrl.run.trackers import log_samples
from srtrl.types import Conversation, SegmentKind

sys.path.append(str(Path(__file__).resolve().parents[1] / "docs"))
from bench_rollout import load_prompts


@pytest.fixture(scope="session")
def run(finished: Callable[..., Path]) -> Path:
    changes = {"rollout__environment": HOSTILE, "rollout__max_new_tokens": 80, "train__micro_batch_tokens": 400}
    return finished(train__num_steps=2, **changes)


def rows_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


# --- A run ------------------------------------------------------------------------------------------------------------


def test_the_report_shows_conversations_without_their_markup(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("srtrl.report.charts.to_svg", lambda figure: "<svg></svg>")  # drawing takes seconds
    page = write_report(run).read_text(encoding="utf-8")
    assert page.count("alert(1)") == page.count("&lt;script&gt;alert(1)&lt;/script&gt;") > 0
    kinds = re.findall(r'<div class="turn (\w+)"><h4>([^<]*)</h4>', page)
    titles = {"model": r"Policy, turn [123]", "observation": "tool output", "boundary": "added by the format"}
    assert {kind for kind, _ in kinds} == set(titles)
    assert all(re.fullmatch(titles[kind], title) for kind, title in kinds)
    assert re.search(r"[23] turns, ended by: (turns|response_tokens|observation)", page)
    for chart in ("Turns", "Tool calls", "How calls ended", "Why samples ended"):
        assert f"<h3>{chart}</h3>" in page


def test_rollouts_mark_what_tools_said(run: Path) -> None:
    shown = printed("rollouts", run, "--limit", 100)
    rows = rows_of(printed("rollouts", run, "--limit", 100, "--json"))
    assert "\x1b" not in shown
    kinds = [segment["kind"] for row in rows for segment in row["segments"]]
    assert shown.count("--- tool output ---") == kinds.count("observation") > 0
    assert shown.count("--- turn 2 ---") == sum(row["num_turns"] > 1 for row in rows)
    assert len(re.findall(r"\d turns?, ended by: \w+$", shown, re.MULTILINE)) == len(rows) == 16
    table = read_rollouts(run / "rollouts" / "step_000002.parquet").to_pylist()
    for row, stored in zip(rows, table, strict=True):
        assert [one["text"] for one in row["segments"]] == stored["segment_texts"]
        assert sum(stored["segment_lengths"]) == len(stored["token_ids"])
        assert all(one["text"] in stored["text"] for one in row["segments"] if one["kind"] == "observation")


def test_generate_answers_by_the_environment(run: Path) -> None:
    flags = ("generate", run, "--prompt", "1+1=", "--prompt", "56", "--samples", 3)
    rows = rows_of(printed(*flags, "--json"))
    assert rows == rows_of(printed(*flags, "--json", "rollout.slots=1"))
    assert {segment["kind"] for row in rows for segment in row["segments"]} == {"model", "observation", "boundary"}
    for row in rows:
        assert [token for segment in row["segments"] for token in segment["token_ids"]] == row["token_ids"]
        assert sum(segment["kind"] == "model" for segment in row["segments"]) == row["num_turns"]
        for segment in row["segments"]:
            assert (segment["logprobs"] is None) == (segment["kind"] != "model")
    ((alone,),) = generate(str(run), ["1+1="], overrides=["rollout.environment=null"])
    assert (alone.segments, alone.num_turns, alone.stop_reason) == ([], 1, "")


def test_eval_uses_the_environment_and_says_how_turns_went(run: Path, tmp_path: Path) -> None:
    output = tmp_path / "rows.jsonl"
    record = json.loads(printed("eval", run, "eval.num_samples=2", "--output", output, "--json"))
    rows = rows_of(output.read_text(encoding="utf-8"))
    assert record["environment/turns_mean"] == np.mean([row["num_turns"] for row in rows]) > 1
    assert 0 < record["eval/environment/valid_call_share"] < 1
    assert {segment["kind"] for row in rows for segment in row["segments"]} == {"model", "observation", "boundary"}
    table = printed("eval", run, "eval.num_samples=2")
    for figure in ("turns mean", "call share", "valid call share"):
        assert figure in table
    assert f"environment '{HOSTILE['name']}'" in " ".join(table.split())


# --- Recordings -------------------------------------------------------------------------------------------------------

SAMPLE = [5, 5, 5, 9, 9, 9, 9, 9, 7]
"""The policy says 5 5 5, reads 9 9, and says 9 9 9 7."""
TURNS = {
    "token_ids": SAMPLE,
    "segment_kinds": ["model", "boundary", "observation", "model"],
    "segment_lengths": [3, 1, 1, 4],
}
"""As the columns of a run's rollouts."""


def record(folder: Path, *samples: dict[str, Any], max_tokens: int = 100) -> Recording:
    path = write_rows(folder / "rows.jsonl", {"prompt_token_ids": [1, 2], "samples": list(samples)})
    return read_recorded(path, tokenizer=None, max_tokens=max_tokens)


def replay(recording: Recording, drafter: Any, **settings: Any) -> ReplayCounts:
    return Replay(drafter, **settings).run(recording)


def test_a_sample_of_two_turns_by_hand(tmp_path: Path) -> None:
    drafter = Repeater()
    counts = replay(record(tmp_path, TURNS), drafter)
    # 5 is given, 5 5 is drafted and right. Then 9 9 is drafted and right and 9 comes with it; 9 9 is wrong, 7 comes.
    assert (counts.num_tokens, counts.num_sequence_steps) == (6, 3)
    assert (counts.steps, counts.steps_without_drafts, counts.num_observed_tokens) == (3, 6, 9)
    assert drafter.calls("start", "observe", "finish", "learn") == (
        "start 00, observe 00: [5], observe 00: [5, 5], finish 00: None, start 00', observe 00': [9, 9], "
        f"observe 00': [9, 9, 9], observe 00': [7], finish 00': None, learn 0: {SAMPLE}"
    )
    two = record(tmp_path, TURNS, TURNS, {"token_ids": [5, 5]})
    for history in (0.0, 0.4):  # one sample is history: no step decodes it
        counts = replay(two, NoDrafter(), history=history)
        assert counts.num_tokens == counts.num_sequence_steps == (13 if history == 0 else 7)
        assert counts.steps == counts.steps_without_drafts


def test_a_truncated_sample_ends_with_what_was_sampled(tmp_path: Path) -> None:
    for max_tokens, tokens in ((9, 9), (6, 6), (5, 3), (4, 3), (3, 3), (2, 2)):
        [[prompt]] = record(tmp_path, TURNS, max_tokens=max_tokens)
        [sample] = prompt.samples
        extensions = ((3, 5),) if tokens > 5 else ()
        assert (sample.tokens.tolist(), sample.extensions) == (SAMPLE[:tokens], extensions)
        assert sample.is_cut == (tokens < len(SAMPLE))


def test_replay_of_a_run_knows_its_turns(run: Path) -> None:
    recording = read_recorded(run, tokenizer=None, max_tokens=1000)
    found = {
        (prompt.prompt_token_ids, tuple(sample.tokens)): sample.extensions
        for prompt in recording[0]
        for sample in prompt.samples
    }
    for row in read_rollouts(run / "rollouts" / "step_000001.parquet").to_pylist():
        extensions = find_extensions(row["segment_kinds"], row["segment_lengths"])
        assert found[tuple(row["prompt_token_ids"]), tuple(row["token_ids"])] == extensions
    assert any(found.values())
    with pytest.raises(SystemExit, match="has samples of several turns; `srtrl replay`"):
        load_prompts(run, 1000, tokenizer=None, max_tokens=None)


# --- What is graded, and what is learned from -------------------------------------------------------------------------


def talk(*texts: tuple[SegmentKind, str]) -> Conversation:
    return Conversation(
        segments=tuple((kind, 1) for kind, _ in texts),
        texts=tuple(text for _, text in texts),
        num_turns=1,
        stop_reason="answered",
    )


def test_votes_are_of_what_the_policy_said() -> None:
    """Two wrong samples read 42 from a tool, say different things, and so do not outvote the right one."""
    talks = [talk(("model", said), ("observation", "42"), ("model", "")) for said in ("7", "8", "9")]
    group = make_group(0, ["correct", "wrong", "wrong"], texts=["7 42", "8 42", "9 42"], conversations=talks)
    assert [one.policy_text for one in group.rollouts] == ["7\n", "8\n", "9\n"]
    assert majority_scores([group], lambda text: text.split()[-1]) == [pytest.approx(1 / 3)]


def test_tables_of_trackers_show_turns_too() -> None:
    tables: list[dict[str, Any]] = []
    tracker = SimpleNamespace(name="wandb", log_table=lambda name, **table: tables.append(table))
    talks = [talk(("model", "a\n"), ("observation", "<b>"), ("model", "c"))]
    log_samples(cast(Any, [tracker]), 1, [make_group(0, ["wrong"], conversations=talks)], {})
    [table] = tables
    lines = [line.strip() for line in table["data"][0][table["columns"].index("text")].splitlines()]
    assert lines == ["--- turn 1 ---", "a", "--- tool output ---", "<b>", "--- turn 2 ---", "c"]
