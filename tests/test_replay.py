"""Replay: recorded rollouts through drafters whose outcome is known by hand, and the readers of recorded rollouts."""

import gzip
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from srtrl.bench.replay_loop import (
    Replay,
    ReplayCounts,
    ReplaySettings,
    above,
    count_accepted,
    count_steps,
    num_history_samples_of,
)
from srtrl.bench.replay_run import ReplayRow, make_row
from srtrl.cli import app
from srtrl.drafters.base import DrafterBase, Int32Array, Int64Array
from srtrl.drafters.draft_tree import ROOT, DraftTree, DraftTrees
from srtrl.drafters.none import Drafter as NoDrafter
from srtrl.recipe import Section
from srtrl.rollout.recorded import RecordedPrompt, Recording, load_recorded_tokenizer, read_recorded
from srtrl.trainer.run_folder import step_file_name, write_rollouts
from srtrl.trainer.warm_start import train_tokenizer
from srtrl.types import Completion, Grade, Prompt, Request, Rollout, RolloutGroup


def tree_of(token_ids: Sequence[int], parents: Sequence[int], scores: Sequence[float] = ()) -> DraftTree:
    return DraftTree(
        token_ids=np.array(token_ids, np.int32),
        parents=np.array(parents, np.int32),
        scores=np.array(scores or [0.5] * len(token_ids), np.float32),
    )


class RepeatOptions(Section):
    """How often."""

    num_repeats: int = 2
    """Length of the draft."""


class Repeater(DrafterBase):
    """Drafts the last token again and again, with scores 1/2, 1/4, ..., and keeps a log of its calls."""

    Options = RepeatOptions
    uses_run_aheads = True

    def __init__(self, options: Section | None = None) -> None:
        super().__init__(options)
        assert isinstance(self.options, RepeatOptions)
        self.num_repeats = self.options.num_repeats
        self.log: list[tuple[Any, ...]] = []
        self.names: dict[int, str] = {}
        self.last: dict[int, int] = {}

    def start(self, slots: Int64Array, requests: Sequence[Request]) -> None:
        for slot, request in zip(slots.tolist(), requests, strict=True):
            assert slot not in self.names
            self.names[slot] = f"{request.prompt_id}{request.sample_index}" + "*" * request.is_run_ahead
            self.log.append(("start", self.names[slot]))

    def propose(self, slots: Int64Array, max_nodes: Int64Array) -> DraftTrees:
        self.log.append(("propose", *(self.names[slot] for slot in slots.tolist())))
        sizes = np.minimum(max_nodes, self.num_repeats).tolist()
        return DraftTrees.of(
            tree_of([self.last[slot]] * size, range(-1, size - 1), [0.5 ** (d + 1) for d in range(size)])
            for slot, size in zip(slots.tolist(), sizes, strict=True)
        )

    def observe(self, slots: Int64Array, token_ids: Int32Array, offsets: Int64Array) -> None:
        for row, slot in enumerate(slots.tolist()):
            tokens = token_ids[offsets[row] : offsets[row + 1]].tolist()
            self.last[slot] = tokens[-1]
            self.log.append(("observe", self.names[slot], *tokens))

    def finish(self, slots: Sequence[int], completions: Sequence[Completion | None]) -> None:
        for slot, completion in zip(slots, completions, strict=True):
            name = self.names.pop(slot)
            assert (completion is None) == name.endswith("*"), "run-aheads complete nothing"
            self.log.append(("finish", name, *(completion.token_ids if completion else ())))

    def on_policy_update(self) -> None:
        self.log.append(("update",))

    def take_metrics(self) -> dict[str, float]:
        return {"engine/num_calls": float(len(self.log))}


def recording_of(*steps: dict[str, list[list[int]]]) -> Recording:
    """Steps of prompts by one-letter name, each with the tokens of its samples."""
    return Recording(
        path=Path("hand.jsonl"),
        steps=[
            [
                RecordedPrompt(
                    prompt_id=name,
                    prompt_token_ids=(ord(name),),
                    samples=[np.array(sample, np.int32) for sample in samples],
                )
                for name, samples in prompts.items()
            ]
            for prompts in steps
        ],
        is_retokenised=False,
        num_cut=0,
    )


def replay(recording: Recording, drafter: DrafterBase | None = None, **changes: Any) -> ReplayCounts:
    replaying = Replay(drafter or Repeater(), ReplaySettings(**({"max_nodes": 16} | changes)))
    replaying.run(recording)
    return replaying.counts


def averages(counts: ReplayCounts) -> tuple[float, float]:
    row = make_row(counts, ReplaySettings(max_nodes=16), num_cut=0, approximate=False)
    return row.tokens_per_step, row.verified_per_step


# --- The walk ---------------------------------------------------------------------------------------------------------


def test_a_sample_by_hand() -> None:
    # 5 is given. 5 5 is drafted and right, and 5 comes with it; 5 5 is wrong, 7 comes; 7 is right, 9 comes with it.
    counts = replay(recording_of({"a": [[5, 5, 5, 5, 7, 7, 9]]}))
    assert averages(counts) == (6 / 3, 1 + 6 / 3)
    assert counts.accepted == {2: 1, 0: 1, 1: 1}
    row = make_row(counts, ReplaySettings(max_nodes=16), num_cut=0, approximate=False)
    assert row.acceptance_by_depth == [2 / 3, 1 / 3]


def test_there_is_no_bonus_token_after_the_end() -> None:
    counts = replay(recording_of({"a": [[3, 3, 3]]}))
    assert (counts.num_tokens, counts.num_sequence_steps, counts.accepted) == (2, 1, {2: 1})


def test_a_budget_and_a_least_score_cut_the_draft() -> None:
    recording = recording_of({"a": [[5, 5, 5, 5, 5, 5, 5, 7]]})
    # With two drafted: 3 tokens, 3 tokens, 1 token. With one drafted: 2, 2, 2, 1.
    assert averages(replay(recording)) == (7 / 3, 3)
    assert averages(replay(recording, max_nodes=1)) == (7 / 4, 2)
    assert averages(replay(recording, min_score=0.5)) == (7 / 4, 2)
    assert averages(replay(recording, min_score=0.25)) == (7 / 3, 3)
    assert averages(replay(recording, max_nodes=1, min_score=0.25)) == (7 / 4, 2)
    assert averages(replay(recording, min_score=0.6)) == (1, 1)


@pytest.mark.parametrize("slots", [None, 1, 3])
def test_no_drafter_gives_one_token_for_one(slots: int | None) -> None:
    recording = recording_of({"a": [[1, 2, 3], [1]], "b": [[4, 5, 6, 7], [8, 8, 8]]})
    counts = replay(recording, NoDrafter(), slots=slots)
    assert averages(counts) == (1, 1)
    assert (counts.num_tokens, counts.num_samples, counts.num_prompts) == (7, 4, 2)
    assert counts.num_steps == counts.num_steps_without_drafts


def accepted_by_the_book(tree: DraftTree, following: Sequence[int]) -> int:
    """Go from the root to the child that carries the next token, as long as there is one."""
    node = ROOT
    for depth, token in enumerate(following):
        children = [child for child in range(tree.num_nodes) if tree.parents[child] == node]
        agreeing = [child for child in children if tree.token_ids[child] == token]
        if not agreeing:
            return depth
        node = agreeing[0]
    return len(following)


@st.composite
def draft_trees(draw: st.DrawFn) -> DraftTree:
    """Trees over three tokens, siblings distinct, scores falling."""
    nodes: list[tuple[int, int]] = []
    for _ in range(draw(st.integers(0, 12))):
        node = (draw(st.integers(ROOT, len(nodes) - 1)), draw(st.integers(0, 2)))
        if node not in nodes:
            nodes.append(node)
    scores = sorted((draw(st.sampled_from([0.1, 0.3, 0.5, 0.9])) for _ in nodes), reverse=True)
    return tree_of([token for _, token in nodes], [parent for parent, _ in nodes], scores)


samples_of_tokens = st.lists(st.integers(0, 2), max_size=6)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(draft_trees(), samples_of_tokens, samples_of_tokens), max_size=5))
def test_the_walk_is_that_of_the_book(cases: list[tuple[DraftTree, list[int], list[int]]]) -> None:
    trees = DraftTrees.of(tree for tree, _, _ in cases)
    recorded = np.array([token for _, past, following in cases for token in past + following], np.int32)
    ends = np.cumsum([len(past) + len(following) for _, past, following in cases], dtype=np.int64)
    positions = np.array(
        [end - len(following) for end, (_, _, following) in zip(ends, cases, strict=True)], dtype=np.int64
    )
    found = count_accepted(trees.token_ids, trees.parents, trees.offsets, recorded, positions, ends)
    assert found.tolist() == [accepted_by_the_book(tree, following) for tree, _, following in cases]


@settings(max_examples=100, deadline=None)
@given(st.lists(draft_trees(), max_size=5), st.sampled_from([0.0, 0.1, 0.2, 0.3, 0.9, 1.0]))
def test_a_least_score_keeps_the_first_nodes_of_each_tree(trees: list[DraftTree], min_score: float) -> None:
    kept = above(DraftTrees.of(trees), min_score)
    assert len(kept) == len(trees)
    for tree, rest in zip(trees, kept, strict=True):
        first = tree.first(int((tree.scores >= np.float32(min_score)).sum()))
        for name in ("token_ids", "parents", "scores"):
            assert np.array_equal(getattr(rest, name), getattr(first, name))


# --- Who decodes when -------------------------------------------------------------------------------------------------


def test_history_comes_first_and_the_others_decode_in_lockstep() -> None:
    drafter = Repeater()
    counts = replay(recording_of({"a": [[1, 2], [9], [3, 4, 5], [6, 6]], "b": [[7, 8]]}), drafter, history=0.5)
    assert drafter.log == [
        ("start", "a0"),
        ("start", "a1"),
        ("observe", "a0", 1, 2),
        ("observe", "a1", 9),
        ("finish", "a0", 1, 2),
        ("finish", "a1", 9),
        ("update",),
        ("start", "a2"),
        ("start", "a3"),
        ("observe", "a2", 3),
        ("observe", "a3", 6),
        ("propose", "a2", "a3"),
        ("observe", "a2", 4),
        ("observe", "a3", 6),
        ("finish", "a3", 6, 6),
        ("propose", "a2"),
        ("observe", "a2", 5),
        ("finish", "a2", 3, 4, 5),
        ("start", "b0"),
        ("observe", "b0", 7),
        ("propose", "b0"),
        ("observe", "b0", 8),
        ("finish", "b0", 7, 8),
        ("update",),
    ]
    assert (counts.num_samples, counts.num_history_samples, counts.num_observed_tokens) == (3, 2, 10)


def test_history_is_rounded_down() -> None:
    assert [num_history_samples_of(n, 0.5) for n in (1, 2, 3, 9)] == [0, 1, 1, 4]
    assert num_history_samples_of(100, 0.29) == 29
    assert num_history_samples_of(7, 0) == 0


def test_a_step_of_training_is_history_for_the_next() -> None:
    drafter = Repeater()
    replay(recording_of({"a": [[1, 2]]}, {"a": [[3, 4]]}), drafter)
    assert [entry for entry in drafter.log if entry[0] in ("finish", "update")] == [
        ("finish", "a0", 1, 2),
        ("update",),
        ("finish", "a0", 3, 4),
        ("update",),
    ]


def test_slots_are_given_breadth_first_or_depth_first() -> None:
    # Steps: one, one; four, one. Breadth-first the long sample starts at once, depth-first after the first prompt's.
    recording = recording_of({"a": [[1, 2], [3, 4]], "b": [[5, 6, 7, 8, 9], [1, 3]]})
    breadth, depth = Repeater(), Repeater()
    assert replay(recording, breadth, slots=2, order="breadth", max_nodes=0).num_steps == 4
    assert replay(recording, depth, slots=2, order="depth", max_nodes=0).num_steps == 5
    assert [entry[1] for entry in breadth.log if entry[0] == "start"] == ["a0", "b0", "a1", "b1"]
    proposals = [entry[1:] for entry in breadth.log if entry[0] == "propose"]
    assert proposals == [("a0", "b0"), ("b0", "a1"), ("b0", "b1"), ("b0",)]
    proposals = [entry[1:] for entry in depth.log if entry[0] == "propose"]
    assert proposals == [("a0", "a1"), ("b0", "b1"), ("b0",), ("b0",), ("b0",)]


def test_slots_tell_how_many_steps_drafts_save() -> None:
    counts = replay(recording_of({"a": [[1] * 9, [1, 2, 3]]}), slots=1)
    # Eight tokens in three steps, then two in two; without drafts ten.
    assert (counts.num_steps, counts.num_steps_without_drafts) == (5, 10)
    row = make_row(counts, ReplaySettings(max_nodes=16, slots=1), num_cut=0, approximate=False)
    assert (row.steps, row.steps_without_drafts, row.speedup) == (5, 10, 2.0)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=4), min_size=1, max_size=4), st.integers(1, 6))
def test_the_baseline_is_what_no_drafter_takes(lengths: list[list[int]], slots: int) -> None:
    prompts = {chr(97 + i): [[0] * length for length in group] for i, group in enumerate(lengths)}
    counts = replay(recording_of(prompts), NoDrafter(), slots=slots, order="depth")
    assert counts.num_steps == counts.num_steps_without_drafts
    assert counts.num_steps == count_steps([n - 1 for group in lengths for n in group], slots)


def test_a_drafter_that_breaks_its_promises_is_named() -> None:
    class Greedy(Repeater):
        def propose(self, slots: Int64Array, max_nodes: Int64Array) -> DraftTrees:
            return super().propose(slots, max_nodes + 1)

    with pytest.raises(ValueError, match=r"Greedy proposed .*: tree 0 has 2 nodes, expected 0 to 1"):
        replay(recording_of({"a": [[1, 1]]}), Greedy(), max_nodes=1)


# --- Run-aheads -------------------------------------------------------------------------------------------------------


def calls(drafter: Repeater, *names: str) -> list[tuple[object, ...]]:
    return [entry for entry in drafter.log if entry[0] in names]


STEPS: Sequence[dict[str, list[list[int]]]] = (
    {"a": [[9, 9], [1, 2, 3, 4, 5]]},
    {"b": [[1, 2, 3, 4], [3, 4]], "c": [[7], [8, 8]]},
)
"""Half of each prompt's samples are earlier ones."""


def test_idle_slots_decode_the_next_steps_earlier_samples_until_the_last_sample_ends() -> None:
    drafter = Repeater()
    counts = replay(recording_of(*STEPS), drafter, history=0.5, history_as="run-ahead", slots=3)
    assert drafter.log[: drafter.log.index(("update",))] == [
        ("start", "a1"),
        ("observe", "a1", 1),
        ("start", "b0*"),
        ("start", "c0*"),
        ("observe", "b0*", 1),
        ("observe", "c0*", 7),
        ("finish", "c0*"),
        ("propose", "a1"),
        ("observe", "a1", 2),
        ("observe", "b0*", 2),
        ("propose", "a1"),
        ("observe", "a1", 3),
        ("observe", "b0*", 3),
        ("propose", "a1"),
        ("observe", "a1", 4),
        ("observe", "b0*", 4),
        ("finish", "b0*"),
        ("propose", "a1"),
        ("observe", "a1", 5),
        ("finish", "a1", 1, 2, 3, 4, 5),
    ]
    assert [entry[1] for entry in calls(drafter, "finish")] == ["c0*", "b0*", "a1", "b1", "c1"]
    assert (counts.num_run_ahead_tokens, counts.num_history_samples, counts.num_samples) == (5, 0, 3)
    assert counts.num_observed_tokens == 5 + 5 + 2 + 2


def test_a_run_ahead_that_is_not_done_ends_with_the_step_and_waiting_samples_come_first() -> None:
    steps = ({"a": [[9], [1, 2, 3], [1, 2, 3]]}, {"b": [[1, 2, 3, 4, 5], [6]]})
    drafter = Repeater()
    counts = replay(recording_of(*steps), drafter, history=0.5, history_as="run-ahead", slots=1)
    assert counts.num_run_ahead_tokens == 0, "the only slot was never idle"
    drafter = Repeater()
    counts = replay(recording_of(*steps), drafter, history=0.5, history_as="run-ahead", slots=3)
    assert [entry for entry in calls(drafter, "observe", "finish") if entry[1] == "b0*"] == [
        ("observe", "b0*", 1),
        ("observe", "b0*", 2),
        ("finish", "b0*"),
    ]
    assert counts.num_run_ahead_tokens == 2


@pytest.mark.parametrize("history_as", ["complete", "run-ahead", "none"])
def test_whatever_is_known_of_the_history_the_same_samples_are_decoded(history_as: str) -> None:
    drafter = Repeater()
    counts = replay(recording_of(*STEPS), drafter, history=0.5, history_as=history_as, slots=2)
    proposed = {name for entry in calls(drafter, "propose") for name in entry[1:]}
    assert proposed == {"a1", "b1", "c1"}
    assert counts.num_tokens == 4 + 1 + 1
    complete = [entry[1] for entry in calls(drafter, "finish") if str(entry[1]).endswith("0")]
    assert complete == (["a0", "b0", "c0"] if history_as == "complete" else [])


# --- Reading ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer with a token a byte."""
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer([], 257).save_pretrained(folder)
    return folder


def write_rows(path: Path, *rows: object) -> Path:
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return path


def write_step(folder: Path, step: int, samples: dict[int, list[list[int]]]) -> None:
    """A run's file of rollouts; `samples` by the only token of their prompt."""
    groups = []
    for draw, (token, group) in enumerate(samples.items()):
        prompt = Prompt(prompt_id=f"p{token}", text="?", token_ids=(token,), answer="")
        rollouts = [
            Rollout(
                prompt=prompt,
                draw_index=draw,
                sample_index=index,
                token_ids=token_ids,
                rollout_logprobs=[0.0] * len(token_ids),
                text="",
                finish_reason="stop",
                policy_version=step - 1,
                grade=Grade(reward=0.0, parts={}, outcome="wrong"),
            )
            for index, token_ids in enumerate(group)
        ]
        groups.append(RolloutGroup(prompt=prompt, draw_index=draw, rollouts=rollouts))
    folder.mkdir(parents=True, exist_ok=True)
    write_rollouts(folder / step_file_name(step), groups, {})


def test_texts_are_tokenised_ended_and_cut(tokenizer_folder: Path, tmp_path: Path) -> None:
    tokenizer = load_recorded_tokenizer(tokenizer_folder)
    end = tokenizer.eos_token_id
    rows = [
        {"id": 7, "prompt": "hi", "samples": [{"text": "abc"}, {"text": "abcdefgh", "reward": 1}]},
        {"prompt": "ho", "samples": [{"text": f"x{tokenizer.eos_token}"}, {"token_ids": [5]}]},
        {"id": "again", "prompt": "hi", "samples": [{"text": "y"}]},
    ]
    recording = read_recorded(write_rows(tmp_path / "rows.jsonl", *rows), tokenizer=tokenizer, max_tokens=5)
    first, second = recording.prompts()
    assert (first.prompt_id, second.prompt_id) == ("7", "1")
    assert first.prompt_token_ids == tuple(tokenizer.encode("hi"))
    a, b, c = tokenizer.encode("abc", add_special_tokens=False)
    assert [sample.tolist() for sample in first.samples] == [
        [a, b, c, end],
        tokenizer.encode("abcde", add_special_tokens=False),
        [*tokenizer.encode("y", add_special_tokens=False), end],
    ]
    assert [sample.tolist() for sample in second.samples] == [
        [*tokenizer.encode("x", add_special_tokens=False), end],
        [5],
    ]
    assert all(sample.dtype == np.int32 for prompt in (first, second) for sample in prompt.samples)
    assert (recording.num_cut, recording.is_retokenised) == (1, True)


def test_a_gzipped_tokenizer_is_unpacked(tokenizer_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "packed"
    shutil.copytree(tokenizer_folder, folder)
    with gzip.open(folder / "tokenizer.json.gz", "wb") as file:
        file.write((folder / "tokenizer.json").read_bytes())
    (folder / "tokenizer.json").unlink()
    text = "a text, 12 + 3"
    assert load_recorded_tokenizer(folder).encode(text) == load_recorded_tokenizer(tokenizer_folder).encode(text)
    assert not (folder / "tokenizer.json").exists()


def test_jsonl_and_parquet_give_the_same_numbers(tmp_path: Path) -> None:
    samples = {1: [[5, 5, 5, 5], [6, 7, 7]], 2: [[8, 8]]}
    write_step(tmp_path, 3, samples)
    rows = [
        {"prompt_token_ids": [token], "samples": [{"token_ids": ids} for ids in group]}
        for token, group in samples.items()
    ]
    from_parquet = read_recorded(tmp_path / step_file_name(3), tokenizer=None, max_tokens=100)
    from_jsonl = read_recorded(write_rows(tmp_path / "rows.jsonl", *rows), tokenizer=None, max_tokens=100)
    for recording in (from_parquet, from_jsonl):
        assert not recording.is_retokenised
        assert averages(replay(recording)) == (6 / 4, 1 + 8 / 4)
    assert [prompt.prompt_id for prompt in from_parquet.prompts()] == ["p1", "p2"]


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


@pytest.mark.parametrize(
    ("row", "error"),
    [
        ('{"prompt": ', "rows.jsonl:2: not JSON: "),
        ({"prompt": "x", "sample": []}, "rows.jsonl:2: samples: expected a list of at least one {'text': ...}, "),
        ({"prompt": "x", "sample": []}, "no such field, did you mean `sample`?"),
        ({"prompt": "x", "samples": []}, "rows.jsonl:2: samples: expected a list of at least one {'text': ...}, found"),
        ({"samples": [{"token_ids": [1]}]}, "rows.jsonl:2: expected an object with `prompt` or `prompt_token_ids`"),
        ({"prompt": "", "samples": [{"token_ids": [1]}]}, "rows.jsonl:2: prompt: expected a text that is not empty"),
        ({"prompt_token_ids": [1], "samples": [{"text": ""}]}, "rows.jsonl:2: samples.0: text: expected a text that"),
        ({"prompt_token_ids": [1], "samples": [{"token_ids": []}]}, "rows.jsonl:2: samples.0: token_ids: expected a"),
        ({"prompt_token_ids": [1], "samples": [{"token_ids": [True]}]}, "at least one token id, found '[True]'"),
        ({"prompt_token_ids": [1], "samples": [{"token_ids": [-1]}]}, "at least one token id, found '[-1]'"),
        ({"prompt_token_ids": [1], "samples": [{"token_ids": [2**31]}]}, "at least one token id, found '[2147483648]'"),
        ({"prompt_token_ids": [1], "samples": ["text"]}, "rows.jsonl:2: samples.0: expected an object with `text` or"),
        ({"prompt": "x", "samples": [{"text": "y"}]}, "rows.jsonl:2: the row has texts; give --tokenizer DIR"),
    ],
)
def test_rows_that_cannot_be_used_are_named(tmp_path: Path, row: object, error: str) -> None:
    good = {"prompt_token_ids": [1], "samples": [{"token_ids": [1, 2]}]}
    path = write_rows(tmp_path / "rows.jsonl", good, row)
    with pytest.raises(ValueError, match=r"rows\.jsonl:2: ") as raised:
        read_recorded(path, tokenizer=None, max_tokens=10)
    assert str(raised.value).startswith(f"{path}:2: ")
    assert error in str(raised.value)


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    def error_of(path: Path) -> str:
        with pytest.raises(ValueError, match=path.name) as raised:
            read_recorded(path, tokenizer=None, max_tokens=10)
        return str(raised.value).removeprefix(f"{path}: ")

    assert error_of(tmp_path / "none.jsonl").startswith("no such file or folder")
    assert error_of(write_rows(tmp_path / "a.txt", "x")).startswith("expected a .jsonl or .parquet file")
    assert error_of(write_rows(tmp_path / "empty.jsonl")).startswith("no rows in it")
    assert error_of(write_rows(tmp_path / "broken.parquet", "x")).startswith("cannot read this Parquet file")
    folder = tmp_path / "folder"
    folder.mkdir()
    assert error_of(folder).startswith("no recorded rollouts in this folder")


def test_a_parquet_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "other.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt_id": ["a"], "draw_index": [0]}), path)
    with pytest.raises(ValueError, match=r"other.parquet: no column `sample_index`; expected those of a run's"):
        read_recorded(path, tokenizer=None, max_tokens=10)


# --- The command ------------------------------------------------------------------------------------------------------

COUNTED = set(ReplayRow.__dataclass_fields__)
SETTINGS = {"drafter", "drafter_options", "draft_budget", "min_score", "max_tokens"}
SETTINGS |= {"history", "history_as", "slots", "order"}


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["replay", *(str(argument) for argument in arguments)])


@pytest.fixture
def rows_file(tmp_path: Path) -> Path:
    rows = [
        {"prompt_token_ids": [1], "samples": [{"token_ids": [5, 5, 5, 5]}, {"token_ids": [6, 7, 7, 7]}]},
        {"prompt_token_ids": [2], "samples": [{"token_ids": [8, 8]}, {"token_ids": [4, 3]}]},
    ]
    return write_rows(tmp_path / "rows.jsonl", *rows)


def test_the_command_prints_json(rows_file: Path, tmp_path: Path) -> None:
    other = write_rows(tmp_path / "other.jsonl", {"prompt_token_ids": [9], "samples": [{"token_ids": [1, 1, 1, 1]}]})
    result = run(rows_file, other, "--drafter", "test_replay:Repeater", "--max-tokens", 3, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert {"tokens_per_step", "verified_per_step", "draft_us", "insert_us_per_token"} <= COUNTED
    assert set(found) == COUNTED | SETTINGS | {"files"}
    assert [set(row) for row in found["files"]] == [COUNTED | {"path", "drafter_metrics"}] * 2
    assert [row["path"] for row in found["files"]] == [str(rows_file), str(other)]
    # Cut to three: 5 5 5 in one step, 6 7 7 in two, 8 8 and 4 3 in one each; then 1 1 1 in one.
    assert [row["tokens_per_step"] for row in found["files"]] == [6 / 5, 2]
    assert found["tokens_per_step"] == 8 / 6
    assert found["verified_per_step"] == 3
    assert (found["num_cut"], found["num_samples"], found["num_tokens"]) == (3, 5, 8)
    assert {name: found[name] for name in SETTINGS} == {
        "drafter": "test_replay:Repeater",
        "drafter_options": {"num_repeats": 2},
        "draft_budget": 16,
        "min_score": None,
        "history": 0.0,
        "history_as": "complete",
        "slots": None,
        "order": None,
        "max_tokens": 3,
    }
    assert found["approximate"] is False
    assert found["draft_us"] > 0
    assert found["insert_us_per_token"] > 0
    assert found["files"][0]["drafter_metrics"]["engine/num_calls"] > 0
    assert found["steps"] is found["steps_without_drafts"] is found["speedup"] is None


def test_the_commands_options_reach_the_replay(rows_file: Path) -> None:
    options = ("--drafter-options", "num_repeats=1", "--history", 0.5, "--slots", 1, "--order", "depth")
    found = json.loads(run(rows_file, "--drafter", "test_replay:Repeater", *options, "--json").stdout)
    assert found["drafter_options"] == {"num_repeats": 1}
    assert (found["slots"], found["order"], found["history"]) == (1, "depth", 0.5)
    # 6 7 7 7 takes two steps (7; 7 and 7), 4 3 one.
    assert (found["num_history_samples"], found["num_samples"]) == (2, 2)
    assert (found["steps"], found["steps_without_drafts"], found["speedup"]) == (3, 4, 4 / 3)
    scored = json.loads(run(rows_file, "--drafter", "test_replay:Repeater", "--min-score", 0.5, "--json").stdout)
    assert (scored["draft_budget"], scored["min_score"], scored["verified_per_step"]) == (128, 0.5, 2)


def test_the_command_prints_a_table(rows_file: Path) -> None:
    result = run(rows_file, "--drafter", "none", "--slots", 2)
    assert result.exit_code == 0, result.output
    cells = next(line for line in result.stdout.splitlines() if "rows.jsonl" in line).replace("│", " ").split()
    assert cells[:4] == ["rows.jsonl", "4", "1.00", "1.0"]
    assert cells[6:] == ["4", "4", "1.00"]
    assert "tokenised again" not in result.stdout


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("--drafter", "nne"), "--drafter: `nne` is not in srtrl/drafters/, did you mean `none`?"),
        (("--drafter", "none", "--drafter-options", "x=1"), "--drafter-options: override `x=1`: x: unknown key"),
        (
            ("--drafter", "none", "--drafter-options", "x"),
            "--drafter-options: override `x`: expected section.key=value",
        ),
        (("--drafter", "none", "--history", "1"), "--history: expected a share of at least 0 and below 1, found 1.0"),
        (("--drafter", "none", "--min-score", "2"), "--min-score: expected a chance from 0 to 1, found 2.0"),
        (("--drafter", "none", "--order", "depth"), "--order: it needs --slots"),
        (("--drafter", "none", "--max-tokens", "1"), "nothing to decode: each sample has one token"),
        (("--drafter", "none", "--tokenizer", "./nowhere"), "--tokenizer: ./nowhere: "),
    ],
)
def test_mistakes_are_named_and_exit_with_2(rows_file: Path, arguments: tuple[str, ...], error: str) -> None:
    result = run(rows_file, *arguments)
    assert result.exit_code == 2
    assert error in result.stderr
    assert "Traceback" not in result.stderr


def test_a_file_given_twice_is_refused(rows_file: Path) -> None:
    result = run(rows_file, rows_file, "--drafter", "none")
    assert (result.exit_code, result.stderr) == (2, f"error: {rows_file}: given twice\n")


def test_the_command_counts_run_ahead_and_makes_steps_of_prompts(tmp_path: Path) -> None:
    """With idle slots the default drafter knows the next prompt's text beforehand."""
    text = list(range(10, 40))
    rows = [
        {"prompt_token_ids": [1], "samples": [{"token_ids": text}, {"token_ids": list(range(50, 90))}]},
        {"prompt_token_ids": [2], "samples": [{"token_ids": text}, {"token_ids": text}]},
    ]
    path = write_rows(tmp_path / "rows.jsonl", *rows)
    settings = ("--history", 0.5, "--slots", 2, "--step-prompts", 1, "--json")
    found = {}
    for history_as in ("complete", "run-ahead", "none"):
        result = run(path, *settings, "--history-as", history_as)
        assert result.exit_code == 0, result.stderr
        found[history_as] = json.loads(result.stdout)
        assert (found[history_as]["history_as"], found[history_as]["num_samples"]) == (history_as, 2)
    assert [one["num_run_ahead_tokens"] for one in found.values()] == [0, 30, 0]
    steps = [one["steps"] for one in found.values()]
    # A completed rollout also tells other prompts of its phrases; a run-ahead speaks to its own prompt alone.
    assert steps[0] <= steps[1] < steps[2] == found["none"]["steps_without_drafts"]


def test_run_ahead_needs_slots_steps_and_a_drafter_that_heeds_it(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", {"prompt_token_ids": [1], "samples": [{"token_ids": [1, 2]}] * 2})
    for arguments, error in (
        ((), "--history-as: run-ahead needs --slots"),
        (("--slots", 2), "one training step, and nothing to run ahead for; give --step-prompts"),
        (("--slots", 2, "--drafter", "suffix"), "--history-as: run-ahead, but the drafter suffix does not draft from"),
    ):
        result = run(path, "--history", 0.5, "--history-as", "run-ahead", *arguments)
        assert result.exit_code == 2
        assert error in result.stderr


def test_the_shared_rollouts_without_a_drafter(shared_data: Path) -> None:
    file = shared_data / "rollouts" / "curious_qwen0.5b_grpo_gsm8k_8x12.jsonl"
    tokenizer = shared_data / "tokenizers" / "qwen2.5"
    found = json.loads(run(file, "--tokenizer", tokenizer, "--drafter", "none", "--history", 0.5, "--json").stdout)
    assert (found["tokens_per_step"], found["verified_per_step"], found["approximate"]) == (1.0, 1.0, True)
    assert (found["num_prompts"], found["num_samples"], found["num_history_samples"]) == (8, 48, 48)
    assert found["num_tokens"] == found["num_sequence_steps"] > 5000
