"""Replay: recorded rollouts through drafters whose outcome is known by hand, and the readers of recorded rollouts."""

import gzip
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
from bench_cases import REPEATER, Repeater, run, write_rows
from drafter_cases import num_agreeing, random_draft
from hypothesis import given
from hypothesis import strategies as st

from srtrl.bench.recorded import RecordedPrompt, Recording, load_recorded_tokenizer, read_recorded
from srtrl.bench.replay_loop import Replay, ReplayCounts, ReplaySettings, count_accepted, num_history_samples_of
from srtrl.drafters.base import DrafterBase, Int64Array, end_to_end
from srtrl.drafters.draft_tree import DraftTrees
from srtrl.drafters.none import Drafter as NoDrafter
from srtrl.run.folder import ROLLOUT_COLUMNS, step_file_name
from srtrl.warm_start.training import train_tokenizer


def recording_of(*steps: dict[str, list[list[int]]]) -> Recording:
    """Steps of prompts by one-letter name, each with the tokens of its samples."""

    def recorded(name: str, samples: list[list[int]]) -> RecordedPrompt:
        arrays = [np.array(sample, np.int32) for sample in samples]
        return RecordedPrompt(prompt_id=name, prompt_token_ids=(ord(name),), samples=arrays)

    found = [[recorded(*prompt) for prompt in prompts.items()] for prompts in steps]
    return Recording(steps=found, is_retokenised=False, num_cut=0)


def replay(recording: Recording, drafter: DrafterBase | None = None, **changes: Any) -> ReplayCounts:
    replaying = Replay(drafter or Repeater(), ReplaySettings(**changes))
    replaying.run(recording)
    return replaying.counts


def averages(counts: ReplayCounts) -> tuple[float, float]:
    row = counts.to_row()
    return row["tokens_per_step"], row["verified_per_step"]


# --- Verification -----------------------------------------------------------------------------------------------------


def test_a_sample_by_hand() -> None:
    # 5 is given. 5 5 is drafted and right, and 5 comes with it; 5 5 is wrong, 7 comes; 7 is right, 9 comes with it.
    counts = replay(recording_of({"a": [[5, 5, 5, 5, 7, 7, 9]]}))
    assert averages(counts) == (6 / 3, 1 + 6 / 3)
    assert counts.accepted == {2: 1, 0: 1, 1: 1}
    assert counts.to_row()["acceptance_by_depth"] == [2 / 3, 1 / 3]
    counts = replay(recording_of({"a": [[3, 3, 3]]}))  # no bonus token after the end
    assert (counts.num_tokens, counts.num_sequence_steps, counts.accepted) == (2, 1, {2: 1})
    recording = recording_of({"a": [[5, 5, 5, 5, 5, 5, 5, 7]]})
    # With two drafted: 3 tokens, 3 tokens, 1 token. With one drafted: 2, 2, 2, 1.
    assert averages(replay(recording)) == (7 / 3, 3)
    assert averages(replay(recording, draft_budget=1)) == (7 / 4, 2)


@given(seed=st.integers(0, 2**32))
def test_the_walk_is_that_of_the_book(seed: int) -> None:
    random = np.random.default_rng(seed)
    trees = DraftTrees.of(random_draft(random, 12, vocab_size=3) for _ in range(random.integers(0, 6)))
    texts = [random.integers(0, 3, random.integers(0, 7)).tolist() for _ in trees]
    found = count_accepted(trees.token_ids, trees.parents, trees.offsets, *end_to_end(texts))
    assert found.tolist() == [num_agreeing(tree, text) for tree, text in zip(trees, texts, strict=True)]


# --- Who decodes when -------------------------------------------------------------------------------------------------


def test_history_comes_first_and_the_others_decode_in_lockstep() -> None:
    drafter = Repeater()
    counts = replay(recording_of({"a": [[1, 2], [9], [3, 4, 5], [6, 6]], "b": [[7, 8], [7, 8]]}), drafter, history=0.5)
    assert ", ".join(drafter.log) == (
        "learn a: [1, 2], learn a: [9], learn b: [7, 8], update, "
        "start a2, start a3, observe a2: [3], observe a3: [6], "
        "propose a2 a3, observe a2: [4], observe a3: [6], finish a3: [6, 6], "
        "propose a2, observe a2: [5], finish a2: [3, 4, 5], "
        "start b1, observe b1: [7], propose b1, observe b1: [8], finish b1: [7, 8], update"
    )
    assert (counts.num_samples, counts.num_observed_tokens) == (3, 3 + 2 + 5 + 2)
    assert [num_history_samples_of(n, 0.5) for n in (1, 2, 3, 9)] == [0, 1, 1, 4], "rounded down"
    assert num_history_samples_of(100, 0.29) == 29


@given(st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=4), min_size=1, max_size=4))
def test_without_a_drafter_a_step_gives_one_token(lengths: list[list[int]]) -> None:
    prompts = {chr(97 + i): [[0] * length for length in group] for i, group in enumerate(lengths)}
    counts = replay(recording_of(prompts), NoDrafter())
    assert counts.num_sequence_steps == counts.num_tokens == sum(length - 1 for group in lengths for length in group)
    assert (counts.num_nodes, counts.steps) == (0, counts.steps_without_drafts)
    assert counts.steps == sum(max(group) - 1 for group in lengths)


def test_a_drafter_that_breaks_its_promises_is_named() -> None:
    class Greedy(Repeater):
        def propose(self, slots: Int64Array, max_nodes: Int64Array) -> DraftTrees:
            return super().propose(slots, max_nodes + 1)

    with pytest.raises(ValueError, match=r"Greedy proposed incorrect draft trees"):
        replay(recording_of({"a": [[1, 1]]}), Greedy(), draft_budget=1)


# --- Reading ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer with a token a byte."""
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer([], 257).save_pretrained(folder)
    return folder


def write_step(folder: Path, step: int, samples: dict[int, list[list[int]]]) -> None:
    """A run's file of rollouts; `samples` by the only token of their prompt."""
    columns = ("prompt_id", "prompt_token_ids", "draw_index", "sample_index", "token_ids")
    rows = [
        dict(zip(columns, (f"p{token}", [token], draw, index, token_ids), strict=True))
        for draw, (token, group) in enumerate(samples.items())
        for index, token_ids in enumerate(group)
    ]
    assert set(columns) <= set(ROLLOUT_COLUMNS), "what a run writes"
    folder.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / step_file_name(step))


def test_texts_are_tokenised_ended_and_cut(tokenizer_folder: Path, tmp_path: Path) -> None:
    tokenizer = load_recorded_tokenizer(str(tokenizer_folder))
    end = tokenizer.eos_token_id
    rows = [
        {"id": 7, "prompt": "hi", "samples": [{"text": "abc"}, {"text": "abcdefgh", "reward": 1}]},
        {"prompt": "ho", "samples": [{"text": f"x{tokenizer.eos_token}"}, {"token_ids": [5]}]},
        {"id": "again", "prompt": "hi", "samples": [{"text": "y"}]},
    ]
    recording = read_recorded(write_rows(tmp_path / "rows.jsonl", *rows), tokenizer=str(tokenizer_folder), max_tokens=5)
    first, second = recording.prompts()
    assert (first.prompt_id, second.prompt_id) == ("7", "1")
    assert first.prompt_token_ids == tuple(tokenizer.encode("hi"))
    abc, abcde, x, y = (tokenizer.encode(text, add_special_tokens=False) for text in ("abc", "abcde", "x", "y"))
    assert [sample.tolist() for sample in first.samples] == [[*abc, end], abcde, [*y, end]]
    assert [sample.tolist() for sample in second.samples] == [[*x, end], [5]]
    assert (recording.num_cut, recording.is_retokenised) == (1, True)


def test_a_gzipped_tokenizer_is_unpacked(tokenizer_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tokenizer_folder, tmp_path / "packed")
    with gzip.open(folder / "tokenizer.json.gz", "wb") as file:
        file.write((folder / "tokenizer.json").read_bytes())
    (folder / "tokenizer.json").unlink()
    packed, plain = (load_recorded_tokenizer(str(one)).encode("a text, 12 + 3") for one in (folder, tokenizer_folder))
    assert packed == plain
    assert not (folder / "tokenizer.json").exists()


def test_jsonl_and_parquet_give_the_same_numbers(tmp_path: Path) -> None:
    samples = {1: [[5, 5, 5, 5], [6, 7, 7]], 2: [[8, 8]]}
    write_step(tmp_path, 3, samples)
    many = [
        {"prompt_token_ids": [key], "samples": [{"token_ids": ids} for ids in group]} for key, group in samples.items()
    ]
    single = [{"prompt_token_ids": [key], "token_ids": ids} for key, group in samples.items() for ids in group]
    files = [write_rows(tmp_path / "many.jsonl", *many), write_rows(tmp_path / "single.jsonl", *single)]
    for path in (tmp_path / step_file_name(3), *files):
        recording = read_recorded(path, tokenizer=None, max_tokens=100)
        assert averages(replay(recording)) == (6 / 4, 1 + 8 / 4)


def test_a_run_is_read_step_by_step(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write_step(run / "rollouts", 2, {1: [[3, 4]], 9: [[5, 6]]})
    write_step(run / "rollouts", 1, {1: [[1, 2], [2, 3]]})
    for path in (run, run / "rollouts"):
        recording = read_recorded(path, tokenizer=None, max_tokens=100)
        assert [[prompt.prompt_id for prompt in step] for step in recording.steps] == [["p1"], ["p1", "p9"]]
    merged = {prompt.prompt_id: [sample.tolist() for sample in prompt.samples] for prompt in recording.prompts()}
    assert merged == {"p1": [[1, 2], [2, 3], [3, 4]], "p9": [[5, 6]]}
    assert [len(step[0].samples) for step in recording.steps] == [2, 1]


def test_rows_and_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    rows: list[tuple[object, str]] = [
        ('{"prompt": ', "not JSON: "),
        ({"prompt": "x", "samples": []}, "samples: should have at least 1 item"),
        ({"prompt": "", "samples": [{"token_ids": [1]}]}, "prompt: should have at least 1 character"),
        ({"prompt_token_ids": [1], "token_ids": [True]}, "token_ids.0: should be a valid integer"),
        ({"prompt_token_ids": [1], "samples": [{"token_ids": [2**31]}]}, "samples.0.token_ids.0: should be less than"),
        ({"prompt_token_ids": [1], "samples": [{}]}, "samples.0: expected a text (`prompt`, `text`) or"),
        ({"prompt": "x", "samples": [{"text": "y"}]}, "prompt is a text; give --tokenizer DIR"),
    ]
    good = {"prompt_token_ids": [1], "samples": [{"token_ids": [1, 2]}]}
    for row, error in rows:
        path = write_rows(tmp_path / "rows.jsonl", good, row)
        with pytest.raises(ValueError, match="^" + re.escape(f"{path}:2: {error}")):
            read_recorded(path, tokenizer=None, max_tokens=10)
    (tmp_path / "folder").mkdir()
    pyarrow.parquet.write_table(pyarrow.table({"prompt_id": ["a"], "draw_index": [0]}), tmp_path / "other.parquet")
    for path, error in (
        (write_rows(tmp_path / "broken.parquet", "x"), "broken.parquet: cannot read this Parquet file"),
        (tmp_path / "folder", "folder: no rows; expected"),
        (tmp_path / "other.parquet", "other.parquet:1: prompt: expected a text"),
    ):
        with pytest.raises(ValueError, match=error):
            read_recorded(path, tokenizer=None, max_tokens=10)


# --- The command ------------------------------------------------------------------------------------------------------

SETTINGS = set(ReplaySettings.__dataclass_fields__)
COUNTED = {*ReplayCounts(num_sequence_steps=1, num_observed_tokens=1, steps=1).to_row(), "approximate"}


@pytest.fixture
def rows_file(tmp_path: Path) -> Path:
    rows = [
        {"prompt_token_ids": [1], "samples": [{"token_ids": [5, 5, 5, 5]}, {"token_ids": [6, 7, 7, 7]}]},
        {"prompt_token_ids": [2], "samples": [{"token_ids": [8, 8]}, {"token_ids": [4, 3]}]},
    ]
    return write_rows(tmp_path / "rows.jsonl", *rows)


def test_the_command_prints_json(rows_file: Path, tmp_path: Path) -> None:
    other = write_rows(tmp_path / "other.jsonl", {"prompt_token_ids": [9], "samples": [{"token_ids": [1, 1, 1, 1]}]})
    result = run("replay", rows_file, other, "--drafter", REPEATER, "--max-tokens", 3, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert {"tokens_per_step", "verified_per_step", "draft_us", "insert_us_per_token"} <= COUNTED
    assert set(found) == COUNTED | SETTINGS | {"files"}
    assert [set(row) for row in found["files"]] == [COUNTED | {"path", "drafter_metrics"}] * 2
    assert [row["path"] for row in found["files"]] == [str(rows_file), str(other)]
    # Truncated to three: 5 5 5 in one step, 6 7 7 in two, 8 8 and 4 3 in one each; then 1 1 1 in one.
    assert [row["tokens_per_step"] for row in found["files"]] == [6 / 5, 2]
    assert (found["tokens_per_step"], found["verified_per_step"], found["approximate"]) == (8 / 6, 3, False)
    assert (found["num_cut"], found["num_samples"], found["num_tokens"]) == (3, 5, 8)
    assert (found["drafter"], found["draft_budget"], found["max_tokens"]) == (REPEATER, 16, 3)
    assert min(found["draft_us"], found["insert_us_per_token"]) > 0
    assert found["files"][0]["drafter_metrics"]["engine/num_calls"] > 0
    assert (found["steps"], found["steps_without_drafts"]) == (3 + 1, 3 + 2)


def test_the_options_reach_the_replay_and_its_table(rows_file: Path) -> None:
    options = ("--drafter-options", "num_repeats=1", "--history", 0.5)
    found = json.loads(run("replay", rows_file, "--drafter", REPEATER, *options, "--json").stdout)
    assert found["drafter_options"] == {"num_repeats": 1}
    assert found["history"] == 0.5
    # 6 7 7 7 takes two steps (7; 7 and 7), 4 3 one.
    assert found["num_samples"] == 2
    assert (found["steps"], found["steps_without_drafts"], found["speedup"]) == (3, 4, 4 / 3)
    table = run("replay", rows_file, "--drafter", "none").stdout
    cells = next(line for line in table.splitlines() if "rows.jsonl" in line).replace("|", " ").split()
    assert (cells[:5], cells[7:]) == (["rows.jsonl", "4", "0", "1", "1"], ["4", "4", "1"])
