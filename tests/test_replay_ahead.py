"""Replay of texts that idle slots decode ahead for the next step."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from test_replay import Repeater, recording_of, replay, run, write_rows

from srtrl.types import Completion, Request


class AheadRepeater(Repeater):
    """Notes run-aheads apart: they complete nothing."""

    uses_run_aheads = True

    def start(self, sequence_id: int, request: Request) -> None:
        super().start(sequence_id, request)
        if request.is_run_ahead:
            self.names[sequence_id] += "*"
            self.log[-1] = ("start", self.names[sequence_id])

    def finish(self, sequence_id: int, completion: Completion | None) -> None:
        assert (completion is None) == self.names[sequence_id].endswith("*")
        self.log.append(("finish", self.names[sequence_id], *(completion.token_ids if completion else ())))


def calls(drafter: Repeater, *names: str) -> list[tuple[object, ...]]:
    return [entry for entry in drafter.log if entry[0] in names]


STEPS: Sequence[dict[str, list[list[int]]]] = (
    {"a": [[9, 9], [1, 2, 3, 4, 5]]},
    {"b": [[1, 2, 3, 4], [3, 4]], "c": [[7], [8, 8]]},
)
"""Half of each prompt's samples are earlier ones."""


def test_idle_slots_decode_the_next_steps_earlier_samples_until_the_last_sample_ends() -> None:
    drafter = AheadRepeater()
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
    drafter = AheadRepeater()
    counts = replay(recording_of(*steps), drafter, history=0.5, history_as="run-ahead", slots=1)
    assert counts.num_run_ahead_tokens == 0, "the only slot was never idle"
    drafter = AheadRepeater()
    counts = replay(recording_of(*steps), drafter, history=0.5, history_as="run-ahead", slots=3)
    assert [entry for entry in calls(drafter, "observe", "finish") if entry[1] == "b0*"] == [
        ("observe", "b0*", 1),
        ("observe", "b0*", 2),
        ("finish", "b0*"),
    ]
    assert counts.num_run_ahead_tokens == 2


@pytest.mark.parametrize("history_as", ["complete", "run-ahead", "none"])
def test_whatever_is_known_of_the_history_the_same_samples_are_decoded(history_as: str) -> None:
    drafter = AheadRepeater()
    counts = replay(recording_of(*STEPS), drafter, history=0.5, history_as=history_as, slots=2)
    proposed = {name for entry in calls(drafter, "propose") for name in entry[1:]}
    assert proposed == {"a1", "b1", "c1"}
    assert counts.num_tokens == 4 + 1 + 1
    complete = [entry[1] for entry in calls(drafter, "finish") if str(entry[1]).endswith("0")]
    assert complete == (["a0", "b0", "c0"] if history_as == "complete" else [])


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
