"""Replay: recorded rollouts through drafters whose outcome is known by hand, and the readers of recorded rollouts."""

import json
import re
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from bench_cases import REPEATER, Repeater, recorded, run, tree_of, write_rows
from ruamel.yaml import YAML
from test_bad_input import parsed
from tokenizers.processors import TemplateProcessing

from srtrl.bench.recorded import Recording, merge_prompts, read_recorded
from srtrl.bench.replay_loop import Replay, ReplayCounts, count_accepted
from srtrl.drafters.base import DrafterBase, Int64Array
from srtrl.drafters.draft_tree import DraftTrees
from srtrl.drafters.none import Drafter as NoDrafter
from srtrl.run.columns import ROLLOUT_COLUMNS
from srtrl.run.folder import step_file_name
from srtrl.warm_start.training import train_tokenizer


def replay(prompts: dict[str, list[list[int]]], drafter: DrafterBase | None = None, **settings: Any) -> ReplayCounts:
    """Replay one step of prompts by one-letter name, each with the tokens of its samples."""
    step = [recorded(name, [ord(name)], samples) for name, samples in prompts.items()]
    return Replay(drafter or Repeater(), **settings).run([step])


def tokens_of(recording: Recording) -> list[dict[str, list[list[int]]]]:
    """Prompts of each step by name, with the tokens of their samples."""
    return [{one.prompt_id: [sample.tokens.tolist() for sample in one.samples] for one in step} for step in recording]


def averages(counts: ReplayCounts) -> tuple[float, float]:
    row = counts.to_row()
    return row["tokens_per_step"], row["verified_per_step"]


# --- Verification -----------------------------------------------------------------------------------------------------


def test_a_sample_by_hand() -> None:
    # 5 is given. 5 5 is drafted and right, and 5 comes with it; 5 5 is wrong, 7 comes; 7 is right, 9 comes with it.
    counts = replay({"a": [[5, 5, 5, 5, 7, 7, 9]]})
    assert averages(counts) == (6 / 3, 1 + 6 / 3)
    counts = replay({"a": [[3, 3, 3]]})  # no bonus token after the end
    assert (counts.num_tokens, counts.num_sequence_steps) == (2, 1)
    # With two drafted: 3 tokens, 3 tokens, 1 token. With one drafted: 2, 2, 2, 1.
    repeated = {"a": [[5, 5, 5, 5, 5, 5, 5, 7]]}
    assert averages(replay(repeated)) == (7 / 3, 3)
    assert averages(replay(repeated, draft_budget=1)) == (7 / 4, 2)
    counts = replay({"a": [[1] * 4, [2] * 3], "b": [[3]]}, NoDrafter())
    assert (counts.num_tokens, counts.num_sequence_steps, counts.num_nodes) == (5, 5, 0)
    assert (counts.steps, counts.steps_without_drafts) == (3, 3)


def test_the_path_of_a_tree_is_followed_to_the_first_difference() -> None:
    tree = tree_of([1, 2, 1, 2, 3], [-1, -1, 1, 0, 2], [1.0] * 5)  # 1 2 and 2 1 3
    for text, expected in (([1, 2, 3], 2), ([2, 1, 3, 4], 3), ([2, 1], 2), ([2, 2], 1), ([3], 0), ([], 0)):
        assert count_accepted(tree, text) == expected


# --- Who decodes when -------------------------------------------------------------------------------------------------


def test_history_comes_first_and_the_others_decode_in_lockstep() -> None:
    drafter = Repeater()
    counts = replay({"a": [[1, 2], [9], [3, 4, 5], [6, 6]], "b": [[7, 8], [7, 8]]}, drafter, history=0.5)
    assert ", ".join(drafter.log) == (
        "learn a: [1, 2], learn a: [9], learn b: [7, 8], update, "
        "start a2, start a3, observe a2: [3], observe a3: [6], "
        "propose a2 a3, observe a2: [4], observe a3: [6], finish a3: [6, 6], "
        "propose a2, observe a2: [5], finish a2: [3, 4, 5], "
        "start b1, observe b1: [7], propose b1, observe b1: [8], finish b1: [7, 8], update"
    )
    assert (counts.num_samples, counts.num_observed_tokens) == (3, 3 + 2 + 5 + 2)
    for num_samples, history, num_known in ((1, 0.5, 0), (2, 0.5, 1), (3, 0.5, 1), (9, 0.5, 4), (100, 0.29, 29)):
        known, others = recorded("a", [1], [[1]] * num_samples).split(history)
        assert (len(known.samples), len(others.samples)) == (num_known, num_samples - num_known), "rounded down"


def test_a_drafter_that_breaks_its_promises_is_named() -> None:
    class Greedy(Repeater):
        def propose(self, slots: Int64Array, max_nodes: Int64Array, min_score: float) -> DraftTrees:
            return super().propose(slots, max_nodes + 1, min_score)

    with pytest.raises(ValueError, match=r"Greedy proposed incorrect draft trees"):
        replay({"a": [[1, 1]]}, Greedy(), draft_budget=1)


# --- Reading ----------------------------------------------------------------------------------------------------------


HI = [0, 72, 73]
A = [65, 0]
USER = {"role": "user", "content": "hi"}
ASSISTANT = {"role": "assistant", "content": "a"}


def write_step(folder: Path, step: int, rows: list[dict[str, Any]]) -> None:
    """A run's file of rollouts."""
    folder.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / step_file_name(step))


def test_texts_are_tokenised_ended_and_cut(tmp_path: Path) -> None:
    tokenizer = train_tokenizer([], 257)  # a token a byte
    tokenizer.save_pretrained(tmp_path)
    end = tokenizer.eos_token_id
    rows = [
        {"id": 7, "prompt": "hi", "samples": [{"text": "abc"}, {"text": "abcdefgh", "reward": 1}]},
        {"prompt": "ho", "samples": [{"text": f"x{tokenizer.eos_token}"}, {"token_ids": [5]}]},
        {"id": "again", "prompt": "hi", "samples": [{"text": "y"}]},
    ]
    recording = read_recorded(write_rows(tmp_path / "rows.jsonl", *rows), tokenizer=str(tmp_path), max_tokens=5)
    [[first, second]] = recording
    assert first.prompt_token_ids == tuple(tokenizer.encode("hi"))
    abc, abcde, x, y = (tokenizer.encode(text, add_special_tokens=False) for text in ("abc", "abcde", "x", "y"))
    assert tokens_of(recording) == [{"7": [[*abc, end], abcde, [*y, end]], "1": [[*x, end], [5]]}]
    assert [sample.is_cut for sample in first.samples + second.samples] == [False, True, False, False, False]


LOGS: dict[str, dict[str, Any]] = YAML(typ="safe").load(Path(__file__).with_name("foreign_logs.yaml"))


@pytest.mark.parametrize("row", LOGS.values(), ids=LOGS)
def test_logs_of_other_trainers_and_engines_are_read(row: dict[str, Any], tmp_path: Path) -> None:
    tokenizer = train_tokenizer([], 257)
    begin = (tokenizer.eos_token, tokenizer.eos_token_id)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"{begin[0]} $A", special_tokens=[begin])
    tokenizer.chat_template = "{{ eos_token }}{{ messages[-1].content }}"
    tokenizer.save_pretrained(tmp_path)
    assert (tokenizer.encode("hi"), tokenizer.encode("a")) == (HI, A[::-1])
    [[prompt]] = read_recorded(write_rows(tmp_path / "log.jsonl", row), tokenizer=str(tmp_path), max_tokens=5)
    assert (list(prompt.prompt_token_ids), [sample.tokens.tolist() for sample in prompt.samples]) == (HI, [A])


def test_steps_of_a_folder_of_logs_follow_each_other_and_a_prompt_keeps_its_name(tmp_path: Path) -> None:
    def row(step: int, prompt: int, token: int) -> dict[str, Any]:
        return {"id": f"{step}-{token}", "step": step, "prompt_token_ids": [prompt], "token_ids": [token]}

    write_rows(tmp_path / "10.jsonl", row(10, 1, 5), row(10, 2, 6))
    write_rows(tmp_path / "9.jsonl", row(9, 2, 7), row(9, 1, 8), row(9, 2, 9))
    recording = read_recorded(tmp_path, tokenizer=None, max_tokens=5)
    assert tokens_of(recording) == [{"9-7": [[7], [9]], "9-8": [[8]]}, {"9-8": [[5]], "9-7": [[6]]}]
    (tmp_path / "9.jsonl").unlink()
    (tmp_path / "10.jsonl").rename(tmp_path / "log.txt")
    with pytest.raises(ValueError, match="no rows; expected rollouts as"):
        read_recorded(tmp_path, tokenizer=None, max_tokens=5)


def test_jsonl_and_a_run_give_the_same_rollouts_and_a_run_is_read_step_by_step(tmp_path: Path) -> None:
    columns = ("id", "prompt_token_ids", "draw_index", "sample_index", "token_ids")
    values = [("p1", [1], 0, 1, [6, 7, 7]), ("p1", [1], 0, 0, [5, 5, 5, 5]), ("p2", [2], 1, 0, [8, 8])]
    single = [dict(zip(columns, row, strict=True)) for row in values]
    stored = [{("prompt_id" if name == "id" else name): value for name, value in row.items()} for row in single]
    assert stored[0].keys() <= ROLLOUT_COLUMNS.keys(), "what a run writes"
    write_step(tmp_path / "run" / "rollouts", 2, stored)
    write_step(tmp_path / "run" / "rollouts", 1, stored[1:2])
    samples = [{"token_ids": row["token_ids"]} for row in single[1::-1]]
    nested = [{"id": "p1", "prompt_token_ids": [1], "samples": samples}, single[2]]
    first, whole = {"p1": [[5, 5, 5, 5]]}, {"p1": [[5, 5, 5, 5], [6, 7, 7]], "p2": [[8, 8]]}
    for path, expected in (
        (write_rows(tmp_path / "nested.jsonl", *nested), [whole]),
        (write_rows(tmp_path / "single.jsonl", single[1], single[0], single[2]), [whole]),
        (tmp_path / "run" / "rollouts" / step_file_name(2), [whole]),
        (tmp_path / "run" / "rollouts", [first, whole]),
        (tmp_path / "run", [first, whole]),
    ):
        recording = read_recorded(path, tokenizer=None, max_tokens=100)
        assert tokens_of(recording) == expected
    merged = tokens_of([merge_prompts([*recording[0], *recording[1]])])
    assert merged == [whole | {"p1": [[5, 5, 5, 5], [5, 5, 5, 5], [6, 7, 7]]}]


def test_rows_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    good = {"prompt_token_ids": [1], "samples": [{"token_ids": [1, 2]}]}
    for row, error in parsed("recordings"):
        path = write_rows(tmp_path / "rows.jsonl", good, row)
        with pytest.raises(ValueError, match="^" + re.escape(f"{path}:2: {error}")):
            read_recorded(path, tokenizer=None, max_tokens=10)
    path = write_rows(tmp_path / "rows.jsonl", {"input": "x", "gts": "y"})
    with pytest.raises(ValueError, match=re.escape("(all shapes: docs/data.md); the row has input, gts") + "$"):
        read_recorded(path, tokenizer=None, max_tokens=10)
    (tmp_path / "list.json").write_text('[["x", "y"]]')
    with pytest.raises(ValueError, match=r"list\.json:1: .*found list"):
        read_recorded(tmp_path / "list.json", tokenizer=None, max_tokens=10)
    tokenizer = train_tokenizer([], 257)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    path = write_rows(tmp_path / "rows.jsonl", {"messages": [USER, ASSISTANT]})
    with pytest.raises(ValueError, match=re.escape(f"{path}:1: prompt: the tokenizer has no chat template")):
        read_recorded(path, tokenizer=str(tmp_path), max_tokens=10)


# --- The command ------------------------------------------------------------------------------------------------------


def test_the_command_prints_json_and_a_table(tmp_path: Path) -> None:
    texts = {1: [[5, 5, 5, 5], [6, 7, 7, 7]], 2: [[8, 8], [4, 3]]}
    rows = [{"prompt_token_ids": [name], "token_ids": text} for name, group in texts.items() for text in group]
    rows_file = write_rows(tmp_path / "rows.jsonl", *rows)
    result = run("replay", rows_file, "--drafter", REPEATER, "--max-tokens", 3, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    # Truncated to three: 5 5 5 in one step, 6 7 7 in two, 8 8 and 4 3 in one each.
    assert (found["tokens_per_step"], found["verified_per_step"]) == (6 / 5, 3)
    assert (found["num_cut"], found["num_samples"], found["num_tokens"]) == (2, 4, 6)
    assert (found["drafter"], found["draft_budget"], found["max_tokens"]) == (REPEATER, 16, 3)
    assert min(found["draft_us"], found["insert_us_per_token"]) > 0
    assert found["drafter_metrics"]["engine/num_calls"] > 0
    assert (found["steps"], found["steps_without_drafts"]) == (3, 3)
    options = ("--drafter-options", "num_repeats=1", "--history", 0.5)
    found = json.loads(run("replay", rows_file, "--drafter", REPEATER, *options, "--json").stdout)
    assert found["drafter_options"] == {"num_repeats": 1}
    assert found["history"] == 0.5
    # 6 7 7 7 takes two steps (7; 7 and 7), 4 3 one.
    assert (found["num_samples"], found["steps"], found["steps_without_drafts"]) == (2, 3, 4)
    table = run("replay", rows_file, "--drafter", "none").stdout
    assert "rows.jsonl with none, at most 16 nodes per draft, no sample known before" in table
    figures = dict(re.findall(r"^\| (\D+?) +\| +(\d\S*) \|$", table, re.MULTILINE))
    assert len(figures) == 6
    assert figures["decode steps, one prompt at a time"] == figures["decode steps without drafts"] == "4"
    assert figures["tokens per sample and decode step"] == "1"
    assert "truncated" not in table
    table = run("replay", rows_file, "--drafter", "none", "--max-tokens", 3).stdout
    assert table.endswith("\n2 samples were truncated to 3 tokens (--max-tokens).\n")
