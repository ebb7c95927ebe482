"""Grading beside the decoder: what hangs, crashes or raises costs its own sample, and nothing else."""

import logging
import multiprocessing
import os
import re
import signal
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import rollout_cases
from task_cases import Rows

from srtrl.recipe.schema import GradingSection, RewardSection
from srtrl.resolve import resolve_function
from srtrl.tasks import rewards
from srtrl.tasks.base import Verifier
from srtrl.tasks.grading import Grader, check_not_all_failed
from srtrl.tasks.reward_input import RewardInput
from srtrl.tasks.reward_terms import resolve_rewards
from srtrl.tasks.rewards import overlong_penalty
from srtrl.types import FinishReason, Grade, Prompt

CPU_SECONDS = 0.3

REWARDS = """
    import mmap, os, statistics, subprocess, sys, time
    from srtrl.tasks.reward_input import RewardInput, batched, isolated

    ACTS = {
        "loop in C": lambda: sum(range(10**12)),
        "sleep": lambda: time.sleep(1000),
        "pause": lambda: time.sleep(0.5),
        "crash": lambda: os._exit(3),
        "leave": lambda: sys.exit("enough"),
        "fork": os.fork,
        "shared": lambda: mmap.mmap(-1, 2**33),
        "memory": lambda: bytearray(2**33),
    }

    @isolated
    def act(sample: RewardInput) -> float:
        text, start = sample.text, time.process_time()
        ACTS.get(text, int)()
        while text == "loop":
            pass
        if text == "raise":
            raise KeyError("no such thing")
        if text == "nan":
            return float("nan")
        if text.startswith("crash once "):
            marker = text.removeprefix("crash once ")
            if not os.path.exists(marker):
                open(marker, "w").close()
                os._exit(3)
        if text == "child":
            return float(subprocess.Popen(["sleep", "1000"]).pid)
        if text == "who":
            return float(os.getpid())
        while text == "burn" and time.process_time() < start + 0.2:
            pass
        if text.startswith("await "):
            while not os.path.exists(text.removeprefix("await ")):
                time.sleep(0.01)
        return float(len(text))

    def length(sample: RewardInput) -> float:
        if sample.text == "raise":
            raise ZeroDivisionError("in process")
        return sample.num_tokens / sample.max_new_tokens

    @batched
    def rank(samples: list[RewardInput], *, step: float = 1.0) -> list[float]:
        return [step * index for index, _ in enumerate(samples)]

    @batched
    def too_few(samples: list[RewardInput]) -> list[float]:
        return [1.0]

    @batched
    def breaks(samples: list[RewardInput]) -> list[float]:
        raise OSError("no reward server")

    def text(sample: RewardInput) -> str:
        return "1.0"

    @batched
    def named(samples: list[RewardInput]) -> dict[str, float]:
        return {sample.text: 1.0 for sample in samples}

    @batched
    def spread(samples: list[RewardInput]) -> list[float]:
        return [statistics.stdev(len(sample.text) for sample in samples)] * len(samples)

    def leaves(sample: RewardInput) -> float:
        sys.exit(0)

    @isolated
    @batched
    def both(samples: list[RewardInput]) -> list[float]:
        return [0.0 for _ in samples]

    @isolated
    def scaled(sample: RewardInput, factor: float, *, offset: float = 0.0) -> float:
        return factor * len(sample.text) + offset

    def verify(text: str, answer: str) -> bool:
        if text == "raise":
            raise RuntimeError("cannot read this")
        return text == answer
"""


def equal_texts(text: str, answer: str, /) -> bool:
    return text == answer


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Name of an importable module of the user's own, in the current folder."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "own_rewards.py").write_text(textwrap.dedent(REWARDS), encoding="utf-8")
    folder_before, path_before = Path.cwd(), list(sys.path)
    os.chdir(folder)
    yield "own_rewards"
    os.chdir(folder_before)
    sys.path[:] = path_before
    sys.modules.pop("own_rewards", None)


def prompt_of(answer: str, number: int = 0) -> Prompt:
    return Prompt(prompt_id=f"p{number}", text="?", token_ids=(1,), answer=answer)


def make_grader(*names: str, num_workers: int = 2, verifier: Verifier = equal_texts) -> Grader:
    sections = [RewardSection(name=name) for name in names]
    grading = GradingSection(num_workers=num_workers, timeout_seconds=CPU_SECONDS)
    return Grader(Rows(verifier), sections, grading, max_new_tokens=10)


def grade_all(grader: Grader, texts: Sequence[str]) -> list[Grade]:
    tickets = [grader.submit(prompt_of("ok", i), text, "stop", len(text)) for i, text in enumerate(texts)]
    return grader.collect(tickets)


def grading_processes() -> set[Any]:
    return {process for process in multiprocessing.active_children() if process.name == "srtrl-grading"}


@pytest.fixture(scope="module")
def workers(package: str) -> Iterator[Grader]:
    """Two workers for all tests that do not count them."""
    with pytest.MonkeyPatch.context() as patch, make_grader(f"{package}:act", "correct", f"{package}:rank") as grader:
        patch.setattr("srtrl.tasks.worker_pool.WALL_SECONDS_PER_CPU_SECOND", 8)
        yield grader


BAD_SAMPLES = [  # text, outcome, reward of `act`, detail
    ("a", "wrong", 1.0, "$"),
    ("loop", "timeout", 0.0, "more than 0.3 CPU seconds, also when retried alone$"),
    ("ok", "correct", 2.0, "$"),
    ("sleep", "timeout", 0.0, "no answer within 2.4 seconds of wall-clock time"),
    ("crash", "crash", 0.0, "the worker process ended with exit code 3"),
    ("raise", "error", 0.0, r".*KeyError.*no such thing.*own_rewards.py:2"),
    ("leave", "error", 0.0, "SystemExit: enough"),
    ("memory", "crash", 0.0, "more than 4 GiB of memory"),
    ("shared", "error", 0.0, ".*Cannot allocate memory"),
    ("loop in C", "timeout", 0.0, "more than 0.3 CPU seconds"),
    ("cccc", "wrong", 4.0, "$"),
]


def test_bad_samples_cost_only_themselves(workers: Grader, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    with caplog.at_level(logging.WARNING):
        grades = grade_all(workers, [text for text, *_ in BAD_SAMPLES])
    for index, ((_, outcome, act, detail), grade) in enumerate(zip(BAD_SAMPLES, grades, strict=True)):
        is_graded = outcome in ("correct", "wrong")
        correct = float(outcome == "correct")
        assert (grade.outcome, grade.parts["act"], grade.parts["correct"]) == (outcome, act, correct)
        assert grade.reward == (act + correct + index if is_graded else 0.0)
        assert re.match(detail, grade.detail)
    named = [record.getMessage().partition(":")[0] for record in caplog.records]
    reasons = [grade.detail for grade in grades]
    first = [i for i, reason in enumerate(reasons) if reason and reason not in reasons[:i]]
    assert named == [f"prompt p{i}" for i in first]
    assert "prompt p1: grading ended in timeout, reward 0: more than 0.3 CPU seconds" in caplog.text
    once = f"crash once {tmp_path / 'marker'}"  # the second attempt is graded
    after = [(grade.outcome, grade.parts["act"], grade.detail) for grade in grade_all(workers, [once, "ok", "ok"])]
    assert after == [("wrong", float(len(once)), ""), *[("correct", 2.0, "")] * 2]


def test_a_sample_has_its_own_cpu_time_and_answer(package: str) -> None:
    """In one worker: a sample waits longer than the limit, some burn more together, some fork or start a program.

    Of a forked worker only the parent answers, and what a reward starts does not outlive the worker.
    """
    texts = ["pause", "burn", "burn", "burn", "fork", "1", "22", "fork", "333", "4444"]
    with make_grader(f"{package}:act", num_workers=1) as grader:
        *grades, last = grade_all(grader, [*texts, "child"])
        assert [(grade.outcome, grade.reward) for grade in grades] == [("wrong", len(text)) for text in texts]
    child, deadline = Path(f"/proc/{int(last.reward)}/stat"), time.monotonic() + 10
    while child.exists() and child.read_text().split()[2] != "Z":  # dead, if not reaped yet
        assert time.monotonic() < deadline, "it still runs"
        time.sleep(0.01)


def test_a_module_that_hangs_or_ends_in_a_worker_stops_the_run(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    others = grading_processes()
    monkeypatch.setattr("srtrl.tasks.worker_pool.START_SECONDS", 0.05)
    with (
        make_grader(f"{package}:act", num_workers=1) as grader,
        pytest.raises(RuntimeError, match=r"imports own_rewards did not start: it is not ready after 0.05 seconds"),
    ):
        grade_all(grader, ["ok"])
    monkeypatch.undo()
    with make_grader(f"{package}:act", num_workers=1) as grader:
        (process,) = grading_processes() - others
        process.kill()
        with pytest.raises(RuntimeError, match=r"imports own_rewards did not start: it ended with exit code -9"):
            grade_all(grader, ["ok"])


def test_a_reason_is_logged_once_and_then_counted(package: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), make_grader(f"{package}:length") as grader:
        grade_all(grader, ["raise"] * 12)
        grade_all(grader, ["raise"] * 88)
    messages = [record.getMessage() for record in caplog.records]
    assert [message.partition(":")[0] for message in messages] == [
        "prompt p0",
        "10 samples so far",
        "100 samples so far",
    ]
    assert all("ZeroDivisionError: in process (own_rewards.py:" in message for message in messages)


def test_rewards_are_tried_before_the_run_and_a_step_without_any_grade_stops_it(package: str) -> None:
    with make_grader(f"{package}:length") as grader:
        grader.try_rewards(prompt_of("ok"))
        with pytest.raises(
            ValueError, match=r"tried on prompt p0 with the response 'raise', .*ZeroDivisionError: in pro"
        ):
            grader.try_rewards(prompt_of("raise"))
        with make_grader(f"{package}:spread") as batched:
            batched.try_rewards(prompt_of("ok"), num_samples=2)
        failed = rollout_cases.graded(grade_all(grader, ["raise", "raise"]))
        with pytest.raises(
            ValueError, match=r"step 3: none of the 4 samples could be graded, .* \(error\): reward `length`"
        ):
            check_not_all_failed([failed, failed], "step 3")
        check_not_all_failed([failed, rollout_cases.graded(grade_all(grader, ["raise", "ok"]))], "step 3")


def test_tickets_say_when_they_are_done_and_grades_keep_their_order(workers: Grader, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    tickets = [workers.submit(prompt_of("ok"), text, "stop", 1) for text in (f"await {gate}", "ok")]
    workers.wait_any(tickets)
    assert [workers.is_done(ticket) for ticket in tickets] == [False, True]
    gate.touch()
    workers.wait_any(tickets)  # one more
    assert all(workers.is_done(ticket) for ticket in tickets)
    workers.wait_any(tickets)  # does not wait: there is none left
    grades = workers.collect(tickets[::-1])
    assert [(grade.outcome, grade.parts["rank"]) for grade in grades] == [("correct", 0.0), ("wrong", 1.0)]
    with make_grader() as grader:
        assert grader.is_done(grader.submit(prompt_of("ok"), "ok", "stop", 1))  # nothing runs apart


def test_interrupts_do_not_reach_workers_and_leaving_ends_them_at_once(package: str) -> None:
    others = grading_processes()

    def interrupt_workers() -> int:
        workers = grading_processes() - others
        for worker in workers:
            os.kill(worker.pid, signal.SIGINT)
        return len(workers)

    made = make_grader(f"{package}:act")
    assert interrupt_workers() == 0
    with made as grader:
        assert interrupt_workers() == 2  # while they start
        assert [grade.outcome for grade in grade_all(grader, ["ok"] * 4)] == ["correct"] * 4
        tickets = [grader.submit(prompt_of("ok", i), "pause", "stop", 1) for i in range(2)]
        assert interrupt_workers() == 2  # while they grade
        assert [grade.detail for grade in grader.collect(tickets)] == ["", ""]
        [grade] = grade_all(grader, ["who"])
        for _ in range(5):
            grader.submit(prompt_of("ok"), "sleep", "stop", 1)
        time.sleep(0.2)
        start = time.monotonic()
    assert time.monotonic() - start < 2
    with pytest.raises(ProcessLookupError):
        os.kill(int(grade.reward), 0)


@pytest.mark.parametrize(
    ("names", "verifier", "expected"),
    [  # of the samples "ok", "raise", "no": outcome, reward, detail
        (
            ["correct", "own_rewards:rank"],
            "own_rewards:verify",
            [("correct", 1.0, "$"), ("error", 0.0, "verifier: RuntimeError: cannot read this"), ("wrong", 2.0, "$")],
        ),
        (
            ["correct", "own_rewards:length"],
            None,
            [
                ("correct", 1.2, "$"),
                ("error", 0.0, r"reward `length`: ZeroDivisionError: in process \(own_rewards.py:"),
                ("wrong", 0.2, "$"),
            ],
        ),
        (["correct", "own_rewards:breaks"], None, [("error", 0.0, ".*OSError: no reward server")] * 3),
        (["own_rewards:leaves"], None, [("error", 0.0, r".*SystemExit: 0 \(own_rewards.py:")] * 3),
    ],
)
@pytest.mark.usefixtures("package")
def test_errors_in_the_training_process_are_outcomes(
    names: list[str], verifier: str | None, expected: list[tuple[str, float, str]]
) -> None:
    function = resolve_function("srtrl.tasks.rewards", verifier) if verifier else equal_texts
    with make_grader(*names, verifier=function) as grader:
        grades = grade_all(grader, ["ok", "raise", "no"])
    for grade, (outcome, reward, detail) in zip(grades, expected, strict=True):
        assert (grade.outcome, grade.reward) == (outcome, reward)
        assert re.match(detail, grade.detail)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (None, "nan", "reward `act` must return a finite number, it returned nan"),
        ("text", "a", "reward `text` must return a finite number, it returned '1.0'"),
        ("too_few", "a", "reward `too_few` returned 1 values for 2 samples"),
        ("named", "a", "reward `named` is batched and must return a list of numbers, it returned {'a': 1.0"),
    ],
)
def test_a_value_that_is_no_finite_number_stops_the_run(
    package: str, workers: Grader, name: str | None, text: str, message: str
) -> None:
    with make_grader(f"{package}:{name}" if name else "correct") as grader, pytest.raises(ValueError, match=message):
        grade_all(grader if name else workers, [text, "ok"])


REFUSED: list[tuple[list[dict[str, Any]], str]] = [
    ([{"name": "corect"}], "rewards.0: `corect` is not in srtrl/tasks/rewards.py, did you mean `correct`?"),
    ([{"name": "isolated"}], "known: correct, environment, format, overlong_penalty;"),
    ([{"name": "own_rewards:both"}], "rewards.0: `own_rewards:both` is isolated and batched"),
    ([{"name": "statistics:mean"}], "rewards.0: `statistics:mean` cannot be logged as reward/mean"),
    ([{"name": "correct"}, {"name": "correct", "weight": 0.5}], "rewards.1: two are named `correct`"),
    ([{"name": "correct", "options": {"cache": 1}}], "keyword argument 'cache'; it is correct(sample, incorrect"),
    ([{"name": "correct", "options": {"sample": 1}}], "multiple values for argument 'sample'"),
    ([{"name": "overlong_penalty"}], "argument: 'cache_tokens'; it is overlong_penalty(sample, "),
    ([{"name": "own_rewards:scaled", "options": {"factor": lambda: 3}}], "own_rewards:scaled is isolated"),
    *(
        ([{"name": "overlong_penalty", "options": {"cache_tokens": wrong}}], f"max_new_tokens - 1 (9), found {wrong!r}")
        for wrong in (0, 10, 2.0, True, "4")
    ),
]


@pytest.mark.parametrize(("sections", "message"), REFUSED)
@pytest.mark.usefixtures("package")
def test_rewards_and_their_options_are_refused_by_name(sections: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        resolve_rewards([RewardSection.model_validate(section) for section in sections], max_new_tokens=10)


def test_weights_and_options_reach_rewards_wherever_they_run(package: str) -> None:
    sections = [
        RewardSection(name="correct", weight=2.0),
        RewardSection(name=f"{package}:length", weight=-0.5),
        RewardSection(name=f"{package}:scaled", options={"factor": 3.0, "offset": 0.5}),
        RewardSection(name=f"{package}:rank", options={"step": 10.0}),
        RewardSection(name="overlong_penalty", options={"cache_tokens": 4}),
    ]
    with Grader(Rows(equal_texts), sections, GradingSection(num_workers=1), max_new_tokens=10) as grader:
        samples: list[tuple[str, FinishReason, int]] = [("ok", "stop", 5), ("12345678", "length", 8)]
        grades = grader.collect([grader.submit(prompt_of("ok"), *sample) for sample in samples])
    names = ("correct", "length", "scaled", "rank", "overlong_penalty")
    assert grades[0].parts == dict(zip(names, (1.0, 0.5, 6.5, 0.0, 0.0), strict=True))
    assert grades[1].parts == dict(zip(names, (0.0, 0.8, 24.5, 10.0, -0.5), strict=True))
    assert [(grade.outcome, grade.reward) for grade in grades] == [
        ("correct", 2.0 - 0.25 + 6.5),
        ("wrong", -0.4 + 34.0),
    ]


def sample_of(text: str, num_tokens: int = 1, max_new_tokens: int = 1) -> RewardInput:
    counts = {"num_tokens": num_tokens, "max_new_tokens": max_new_tokens}
    return RewardInput(prompt=prompt_of("1"), text=text, correct=None, finish_reason="stop", **counts)


@pytest.mark.parametrize(("max_new_tokens", "cache_tokens"), [(20480, 4096), (96, 32), (10, 9), (7, 1)])
def test_the_overlong_penalty_is_the_formula_of_dapo(max_new_tokens: int, cache_tokens: int) -> None:
    """Equation 13 of arXiv 2503.14476, its cases written out."""
    section = RewardSection(name="overlong_penalty", options={"cache_tokens": cache_tokens})
    assert len(resolve_rewards([section], max_new_tokens)) == 1
    end = max_new_tokens - cache_tokens
    for length in {1, end, end + 1, end + (cache_tokens + 1) // 2, max_new_tokens - 1, max_new_tokens}:
        expected = 0.0 if length <= end else (end - length) / cache_tokens
        value = overlong_penalty(sample_of("", length, max_new_tokens), cache_tokens=cache_tokens)
        assert value == pytest.approx(expected, abs=1e-15)
    assert overlong_penalty(sample_of("", max_new_tokens, max_new_tokens), cache_tokens=cache_tokens) == -1.0


def test_an_isolated_verifier_must_be_importable() -> None:
    def local(text: str, answer: str, /) -> bool:
        return text == answer

    local.isolated = True  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="the task's verifier is isolated and must be a function of an importable"):
        make_grader("correct", verifier=local)


def test_format_wants_a_final_answer_on_the_last_line() -> None:
    for text in ("so \\boxed{\\frac{1}{2}}.\n", "1+1=2\n#### 2", "Answer: 4", "the answer: 4"):
        assert rewards.format(sample_of(text)) == 1.0
    for text in ("", "4", "\\boxed{4}\nor so", "Answer:", "####"):
        assert rewards.format(sample_of(text)) == 0.0
    assert rewards.format(replace(sample_of("Answer: 4"), finish_reason="length")) == 0.0
