"""Grading beside the decoder: what hangs, crashes, raises or lies costs its own sample, and nothing else."""

import gc
import logging
import os
import re
import signal
import sys
import textwrap
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rollout_cases
from task_cases import Rows, processes_of, prompt_of, sample_of, wait_until

from srtrl.recipe.schema import GradingSection, RewardSection
from srtrl.resolve import resolve_function
from srtrl.tasks import rewards
from srtrl.tasks.base import Verifier
from srtrl.tasks.grading import Grader, check_not_all_failed
from srtrl.tasks.reward_terms import resolve_rewards
from srtrl.tasks.rewards import overlong_penalty
from srtrl.tasks.worker import check_reward
from srtrl.types import FinishReason, Grade

CPU_SECONDS = 0.3

REWARDS = r"""
    import asyncio, gc, json, mmap, os, pickle, socket, statistics, subprocess, sys, threading, time
    from srtrl.tasks.reward_input import RewardInput, batched, isolated

    def send(*lines, number=None):
        (connection,) = [x for x in gc.get_objects() if isinstance(x, socket.socket)]
        if number is None:
            frame = sys._getframe()
            while "requests" not in frame.f_locals:
                frame = frame.f_back
            number = frame.f_locals["number"]
        for line in lines:
            text = line if isinstance(line, bytes) else json.dumps({"number": number} | line).encode() + b"\n"
            connection.sendall(text)
            time.sleep(0.05)

    def crash_once(marker):
        if not os.path.exists(marker):
            open(marker, "w").close()
            os._exit(3)

    def await_file(path):
        while not os.path.exists(path):
            time.sleep(0.01)

    def hang(marker=os.devnull):
        open(marker, "w").close()
        time.sleep(1000)

    def burn():
        start = time.process_time()
        while time.process_time() < start + 0.2:
            pass

    def daemon(path):
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                await_file(path)
            os._exit(0)

    class Pickled:
        def __reduce__(self):
            return (os.mkdir, ("made by a reward",))

    FORGED = {"correct": True, "parts": {"act": 55.0}}
    ACTS = {
        "crash once": crash_once,
        "await": await_file,
        "hang": hang,
        "burn": burn,
        "daemon": daemon,
        "loop in C": lambda: sum(range(10**12)),
        "pause": lambda: time.sleep(0.5),
        "crash": lambda: os._exit(3),
        "leave": lambda: sys.exit("enough"),
        "fork": lambda: os.fork() and None,
        "shared": lambda: mmap.mmap(-1, 2**33),
        "memory": lambda: bytearray(2**33),
        "raise": lambda: {}["no such thing"],
        "nan": lambda: float("nan"),
        "child": lambda: subprocess.Popen(["sleep", "1000"]).pid,
        "two replies": lambda: send(FORGED),
        "other number": lambda: send(FORGED, number=7),
        "no grade": lambda: send({"act": 55.0}),
        "no number": lambda: send({"correct": True, "parts": {"act": float("inf")}}),
        "pickle": lambda: send(pickle.dumps(Pickled()) + b"\n"),
        "bytes": lambda: send(b"\x00" * 100_000),
        "brackets": lambda: send(b"[" * 60_000 + b"\n"),
        "whole exchange": lambda: send(FORGED, b'"ready"\n'),
        "later": lambda: threading.Timer(0.2, send, [{"correct": True}], {"number": 1}).start(),
    }

    @isolated
    def act(sample: RewardInput) -> float:
        name, *arguments = sample.text.split(":")
        return ACTS.get(name, int)(*arguments) or len(sample.text)

    def length(sample: RewardInput) -> float:
        if sample.text == "raise":
            raise ZeroDivisionError("in process")
        return sample.num_tokens / sample.max_new_tokens

    @batched
    def rank(samples: list[RewardInput], *, step: float = 1.0) -> list[float]:
        return [step * index for index, _ in enumerate(samples)]

    @batched
    def breaks(samples: list[RewardInput]) -> list[float]:
        raise OSError("no reward server")

    def parses(sample: RewardInput) -> float:
        return json.loads("{" if sample.text == "raise" else "1.0")

    def leaves(sample: RewardInput) -> float:
        sys.exit(0)

    def gives(sample: RewardInput, *, value) -> float:
        return value

    @batched
    def all_get(samples: list[RewardInput], *, values) -> list[float]:
        return values

    @batched
    def spread(samples: list[RewardInput]) -> list[float]:
        return [statistics.stdev(len(sample.text) for sample in samples)] * len(samples)

    @isolated
    @batched
    def both(samples: list[RewardInput]) -> list[float]:
        return [0.0 for _ in samples]

    @isolated
    def scaled(sample: RewardInput, factor: float, *, offset: float = 0.0) -> float:
        return factor * len(sample.text) + offset

    gate = asyncio.Event()
    running, most = 0, 0

    async def judge(sample: RewardInput, *, factor: float = 1.0) -> float:
        global running, most
        running += 1
        most = max(most, running)
        try:
            await (asyncio.sleep(1000) if sample.text == "hang" else gate.wait())
        finally:
            running -= 1
        if sample.text == "raise":
            raise ConnectionError("no judge")
        return factor * len(sample.text) * (2 if sample.correct else 1)

    is_free = threading.Event()

    async def blocks(sample: RewardInput) -> float:
        is_free.wait(60) if sample.text != "nap" else time.sleep(0.15)
        return 1.0

    async def blocks_in_another_task(sample: RewardInput) -> float:
        return await asyncio.wait_for(blocks(sample), 1000)

    async def swallows(sample: RewardInput) -> float:
        while not is_free.is_set():
            try:
                await asyncio.sleep(0.05 if sample.text == "ok" else 1000)
            except asyncio.CancelledError:
                sample = sample_of_text("ok")
        return 1.0

    def sample_of_text(text):
        from task_cases import sample_of
        return sample_of(text)

    ERRORS = {"ok": KeyboardInterrupt, "exit": SystemExit, "cancel": asyncio.CancelledError, "raise": OSError}

    async def interrupts(sample: RewardInput) -> float:
        if sample.text in ERRORS:
            raise ERRORS[sample.text]("no")
        return 2.0

    async def leaves_task(sample: RewardInput) -> float:
        asyncio.create_task(interrupts(sample))
        await asyncio.sleep(0.01)
        return 1.0

    async def hangs_in_thread(sample: RewardInput) -> float:
        await asyncio.to_thread(is_free.wait, 60)
        return 1.0

    @batched
    def endless(samples: list[RewardInput]):
        while True:
            yield 1.0

    def slow(sample: RewardInput) -> float:
        time.sleep(0.5)
        return 1.0

    class Judge:
        async def __call__(self, sample: RewardInput) -> float:
            return 3.0

    seventh = Judge()

    def verify(text: str, answer: str) -> bool:
        if text == "raise":
            raise RuntimeError("cannot read this")
        return text == answer

    @isolated
    def isolated_verify(text: str, answer: str) -> bool:
        return sum(range(10**12)) < 0 if text == "loop in C" else text == answer
"""


def equal_texts(text: str, answer: str, /) -> bool:
    return text == answer


@pytest.fixture(scope="module", autouse=True)
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The current folder, with an importable module of the user's own: `own_rewards`."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "own_rewards.py").write_text(textwrap.dedent(REWARDS), encoding="utf-8")
    folder_before, path_before = Path.cwd(), list(sys.path)
    os.chdir(folder)
    resolve_function("srtrl.tasks.rewards", "own_rewards:act")  # imports it: each test may run alone
    yield folder
    os.chdir(folder_before)
    sys.path[:] = path_before
    sys.modules.pop("own_rewards", None)


def make_grader(*names: str, verifier: Verifier = equal_texts) -> Grader:
    sections = [RewardSection(name=name) for name in names]
    grading = GradingSection(num_workers=1, timeout_seconds=CPU_SECONDS)
    return Grader(Rows(verifier), sections, grading, max_new_tokens=10)


def grade_all(grader: Grader, texts: Sequence[str]) -> list[Grade]:
    tickets = [grader.submit(prompt_of("ok", i), text, "stop", len(text)) for i, text in enumerate(texts)]
    return grader.collect(tickets)


def grading_processes() -> set[int]:
    return processes_of(b"srtrl.tasks.worker", parent=os.getpid())


@pytest.fixture(scope="module")
def grader() -> Iterator[Grader]:
    """With one worker, so that samples come one after the other."""
    with make_grader("own_rewards:act", "correct", "own_rewards:rank") as grader:
        yield grader


Row = tuple[str, str, str]
"""Text, outcome, detail; the reward `act` of what is graded is the length of its text."""
BAD_SAMPLES: list[Row] = [
    ("a", "wrong", "$"),
    ("loop in C", "timeout", "more than 0.3 CPU seconds, also when retried alone$"),
    ("ok", "correct", "$"),
    ("crash", "crash", "the worker process ended with exit code 3"),
    ("raise", "error", r".*KeyError.*no such thing.*own_rewards.py:"),
    ("raise", "error", r".*KeyError.*no such thing.*own_rewards.py:"),
    ("leave", "error", "SystemExit: enough"),
    ("nan", "error", "ValueError: reward `act` must return a finite number, it returned nan"),
    ("memory", "crash", "more than 4 GiB of memory"),
    ("shared", "error", ".*Cannot allocate memory"),
    ("cccc", "wrong", "$"),
]
NO_GRADE = "the worker process did not send one grade: "
FORGERS: list[Row] = [
    ("two replies", "error", NO_GRADE + "it sent more than that"),
    ("1", "wrong", "$"),
    ("other number", "error", NO_GRADE + "it sent something else, or"),
    ("22", "wrong", "$"),
    ("ok", "correct", "$"),
    ("pickle", "error", NO_GRADE),
    ("333", "wrong", "$"),
    ("later", "wrong", "$"),
    ("pause", "wrong", "$"),
    ("4444", "wrong", "$"),
]
MORE_FORGERS: list[Row] = [
    ("no grade", "error", NO_GRADE),
    ("no number", "error", NO_GRADE + "reward `act` must return a finite number, it returned inf"),
    ("ok", "correct", "$"),
    ("bytes", "error", NO_GRADE + "more than 65536 bytes"),
    ("brackets", "error", NO_GRADE + "brackets in brackets"),
    ("1", "wrong", "$"),
]


def check(grader: Grader, rows: Sequence[Row]) -> list[Grade]:
    """Grade the texts of `rows`, in their order."""
    grades = grade_all(grader, [text for text, *_ in rows])
    for index, ((text, outcome, detail), grade) in enumerate(zip(rows, grades, strict=True)):
        is_graded = outcome in ("correct", "wrong")
        expected = (outcome, len(text) * is_graded, float(outcome == "correct"))
        assert (grade.outcome, grade.parts["act"], grade.parts["correct"]) == expected, grade
        assert re.match(detail, grade.detail), grade
        assert grade.reward == (grade.parts["act"] + grade.parts["correct"] + index if is_graded else 0.0)
    return grades


def test_bad_samples_cost_only_themselves(
    grader: Grader, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, package: Path
) -> None:
    with caplog.at_level(logging.WARNING):
        reasons = [grade.detail for grade in check(grader, BAD_SAMPLES)]
    named = [record.getMessage().partition(":")[0] for record in caplog.records]
    first = [i for i, reason in enumerate(reasons) if reason and reason not in reasons[:i]]
    assert named == [f"prompt p{i}" for i in first]  # a reason is logged once
    assert "prompt p1: grading ended in timeout, left out: more than 0.3 CPU seconds" in caplog.text
    once = f"crash once:{package / 'marker'}"  # the second attempt is graded
    check(grader, [(once, "wrong", "$"), ("ok", "correct", "$")])
    with monkeypatch.context() as patch:
        patch.setattr("srtrl.tasks.worker_pool.WALL_SECONDS_PER_CPU_SECOND", 1)
        late = "no answer within 0.3 seconds of wall-clock time, also when retried alone$"
        check(grader, [("hang", "timeout", late)])
    check(grader, [("ok", "correct", "$")])


@pytest.mark.parametrize("rows", [FORGERS, pytest.param(MORE_FORGERS, marks=pytest.mark.slow)])
def test_forged_replies_cost_only_their_own_sample(grader: Grader, rows: Sequence[Row], package: Path) -> None:
    """No grade goes to another sample, and nothing of a reply is run."""
    check(grader, rows)
    forged, *others = grade_all(grader, ["whole exchange", "ok", "22"])
    assert (forged.outcome, forged.parts["act"]) == ("wrong", 55.0)  # its own reward, and not the verdict
    assert [(other.outcome, other.parts["act"]) for other in others] == [("correct", 2), ("wrong", 2)]
    assert not (package / "made by a reward").exists()


def test_a_worker_ignores_interrupts_and_ends_with_all_it_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A sample may wait for longer than the CPU limit, some burn more together, some fork or start a program.

    Of a forked worker only the parent answers. What a reward starts does not outlive the worker, unless it makes a
    session of its own; then nobody waits for it. Nor does the end wait for samples that are being graded.
    """
    monkeypatch.setattr("srtrl.tasks.worker_pool.WALL_SECONDS_PER_CPU_SECOND", 1000)
    others = grading_processes()

    def interrupt_worker() -> bool:
        workers = grading_processes() - others
        for worker in workers:
            os.kill(worker, signal.SIGINT)
        return bool(workers)

    daemon_ends, has_begun = tmp_path / "daemon ends", tmp_path / "begun"
    texts = ["pause", "burn", "burn", "burn", "fork", "1", "22", "fork", "333", "4444", f"daemon:{daemon_ends}"]
    with make_grader("own_rewards:act") as grader:
        assert not interrupt_worker()  # it starts for the first sample
        tickets = [grader.submit(prompt_of("ok", i), text, "stop", 1) for i, text in enumerate(texts)]
        wait_until(interrupt_worker)  # while it starts
        grader.wait_any(tickets)
        wait_until(interrupt_worker)  # while it grades
        assert [(grade.outcome, grade.reward) for grade in grader.collect(tickets)] == [
            ("wrong", len(text)) for text in texts
        ]
        [grade] = grade_all(grader, ["child"])
        for _ in range(3):
            grader.submit(prompt_of("ok"), f"hang:{has_begun}", "stop", 1)
        wait_until(has_begun.exists)
    assert grading_processes() <= others
    child = Path(f"/proc/{int(grade.reward)}/stat")
    wait_until(lambda: not child.exists() or child.read_text().split()[2] == "Z")  # dead, if not reaped yet
    daemon_ends.touch()


@pytest.mark.parametrize(
    ("code", "seconds", "problem"),
    [("time.sleep(1000)", 0.2, "it is not ready after 0.2 seconds"), ("os._exit(0)", 60, "it ended with exit code 0")],
)
def test_a_module_that_hangs_or_ends_in_a_worker_stops_the_run(
    package: Path, monkeypatch: pytest.MonkeyPatch, code: str, seconds: float, problem: str
) -> None:
    monkeypatch.setattr("srtrl.tasks.worker_pool.START_SECONDS", seconds)
    name = "hangs" if "sleep" in code else "ends"
    program = f"""
        import os, sys, time
        from own_rewards import isolated
        if "srtrl.tasks.worker" in " ".join(sys.orig_argv):
            {code}
        @isolated
        def act(sample):
            return 1.0
    """
    (package / f"{name}.py").write_text(textwrap.dedent(program), encoding="utf-8")
    with make_grader(f"{name}:act") as grader:
        others = grading_processes()
        with pytest.raises(RuntimeError, match=f"imports {name} did not start: {problem}"):
            grade_all(grader, ["ok"])
        assert grading_processes() <= others


LATE = r"0\.3 .*needs a larger grading\.timeout_seconds"


@pytest.mark.parametrize(
    ("reward", "text", "reason"),
    [
        ("judge", "hang", LATE),
        ("act", "loop in C", LATE),
        ("isolated_verify", "loop in C", LATE),
        ("length", "raise", "ZeroDivisionError: in pro"),
    ],
)
def test_what_cannot_be_graded_stops_the_start_and_a_step_of_nothing_else(
    reward: str, text: str, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    own = sys.modules["own_rewards"]
    names = ["correct"] if reward == "isolated_verify" else [f"own_rewards:{reward}"]
    with make_grader(*names, verifier=getattr(own, reward) if names == ["correct"] else equal_texts) as grader:
        monkeypatch.setattr(grader, "_seconds", CPU_SECONDS)
        with pytest.raises(ValueError, match=rf"^rewards: tried on prompt p0 .*'{text}'.*{reason}"):
            grader.try_rewards(prompt_of(text))
        assert not caplog.messages, "it is said once"
        [grade] = grade_all(grader, [text])
    failed = [grade, grade if reason != LATE else replace(grade, detail="no answer within 6 seconds")]
    group, message = rollout_cases.graded(failed), rf"^step 3: none of the 4 samples .*\({grade.outcome}\): .*"
    with pytest.raises(ValueError, match=message + (r"a larger grading\." if reason == LATE else reason)):
        check_not_all_failed([group, group], "step 3")
    check_not_all_failed([group, rollout_cases.graded([replace(grade, outcome="wrong")])], "step 3")


def test_rewards_are_tried_on_a_group_before_the_run() -> None:
    with make_grader("own_rewards:spread") as grader:
        grader.try_rewards(prompt_of("ok"), num_samples=2)


def test_tickets_say_when_they_are_done_and_grades_keep_their_order(grader: Grader, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    tickets = [grader.submit(prompt_of("ok"), text, "stop", 1) for text in ("ok", f"await:{gate}")]
    grader.wait_any(tickets[:1])
    assert [grader.is_done(ticket) for ticket in tickets] == [True, False]
    gate.touch()
    grader.wait_any(tickets)  # one more
    assert all(grader.is_done(ticket) for ticket in tickets)
    grader.wait_any(tickets)  # does not wait: there is none left
    grades = grader.collect(tickets[::-1])
    assert [(grade.outcome, grade.parts["rank"]) for grade in grades] == [("wrong", 0.0), ("correct", 1.0)]
    with make_grader() as in_process:
        assert in_process.is_done(in_process.submit(prompt_of("ok"), "ok", "stop", 1))  # nothing runs apart


INTERRUPTS = ("KeyboardInterrupt: no", "SystemExit: no", "(asyncio.exceptions.)?CancelledError", "OSError: no", "")


def both(said: str) -> dict[str, str]:
    return dict.fromkeys(("ok", "raise"), said)


FAULTS: list[tuple[str, dict[str, Any], dict[str, str]]] = [
    ("verify", {}, {"ok": "", "raise": "verifier: RuntimeError: cannot read this"}),
    ("length", {}, {"ok": "", "raise": r"ZeroDivisionError: in process \(own_rewards.py:"}),
    ("parses", {}, {"ok": "", "raise": r"json.*JSONDecodeError: .* \(own_rewards.py:\d+, parses\)"}),
    ("leaves", {}, both(r"SystemExit: 0 \(own_rewards.py:")),
    ("gives", {"value": None}, both(r".*must return a finite number \(0.0 where it does not apply\), it returned N")),
    ("overlong_penalty", {"cache_tokens": 10}, both(r".* 1 to rollout.max_new_tokens - 1 \(9\), found 10")),
    ("breaks", {}, both("OSError: no reward server")),
    ("all_get", {"values": [1.0]}, both("ValueError: it returned 1 values for 2 samples")),
    ("all_get", {"values": {"a": 1}}, both(".*a batched reward must return a list of numbers, it returned {'a': 1")),
    ("endless", {}, both("ValueError: it returned more than 2 values for 2 samples")),
    ("interrupts", {}, dict(zip(("ok", "exit", "cancel", "raise", "fine"), INTERRUPTS, strict=True))),
    ("swallows", {}, dict.fromkeys(("ok", "hang"), "no answer within 0.3 seconds")),
    ("hangs_in_thread", {}, {"ok": "no answer within 0.3 seconds"}),
    ("leaves_task", {}, dict.fromkeys(("exit", "raise", "fine", "ok"), "")),
]
"""Reward of the training process (or verifier), its options, and what is said of each text; nothing of graded ones."""


@pytest.mark.parametrize(("name", "options", "said"), FAULTS)
def test_whatever_a_reward_does_costs_its_own_sample_alone(
    name: str,
    options: dict[str, Any],
    said: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    own = sys.modules["own_rewards"]
    own.is_free.clear()
    verifier = resolve_function("srtrl.tasks.rewards", "own_rewards:verify") if name == "verify" else equal_texts
    module = "" if name == "overlong_penalty" else "own_rewards:"
    sections = [RewardSection(name=f"{module}{name}", options=options)] if name != "verify" else []
    sections.append(RewardSection(name="correct"))
    with Grader(Rows(verifier), sections, GradingSection(num_workers=1), max_new_tokens=10) as grader:
        monkeypatch.setattr(grader, "_seconds", CPU_SECONDS)
        grades = grade_all(grader, list(said))
        for (text, reason), grade in zip(said.items(), grades, strict=True):
            graded = "correct" if text == "ok" else "wrong"
            assert grade.outcome == ("timeout" if "no answer" in reason else "error" if reason else graded)
            begin = "" if name == "verify" else f"reward `{name}`: "
            assert re.match(begin + reason if reason else "$", grade.detail), grade.detail
            assert grade.parts["correct"] == (grade.outcome == "correct")
            assert not reason or grade.reward == 0
        own.is_free.set()
    gc.collect()
    left = sorted(message for message in caplog.messages if "left behind" in message)
    errors = [
        message.removeprefix("reward `leaves_task`: in a task left behind: ").partition(": ")[0] for message in left
    ]
    assert errors == (["KeyboardInterrupt", "OSError", "SystemExit"] if name == "leaves_task" else [])
    assert "Traceback" not in capfd.readouterr().err


def test_coroutine_rewards_are_awaited_together(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """While the caller continues, 64 at a time; what raises or hangs costs its own sample, and ends with the grader."""
    num_threads = threading.active_count()
    with make_grader("own_rewards:judge", "own_rewards:seventh", "correct") as grader:
        own = sys.modules["own_rewards"]
        own.gate.clear()
        texts = ["ok", "raise", *["abc"] * 98]
        tickets = [grader.submit(prompt_of("ok", i), text, "stop", len(text)) for i, text in enumerate(texts)]
        wait_until(lambda: own.running == 64)
        assert not any(map(grader.is_done, tickets))
        grader._loop.call_soon_threadsafe(own.gate.set)
        grader.wait_any(tickets)
        assert any(map(grader.is_done, tickets))
        ok, raised, *others = grader.collect(tickets)
        assert (own.running, own.most) == (0, 64)
        assert grader.serial_rewards == []
        monkeypatch.setattr(grader, "_seconds", CPU_SECONDS)
        [hung] = grade_all(grader, ["hang"])
        monkeypatch.undo()
        grader.submit(prompt_of("ok"), "hang", "stop", 1)
        wait_until(lambda: own.running == 1)
    assert (ok.outcome, ok.parts) == ("correct", {"judge": 4.0, "seventh": 3.0, "correct": 1.0})
    assert (raised.outcome, raised.reward) == ("error", 0.0)
    assert re.match(r"reward `judge`: ConnectionError: no judge \(own_rewards.py:", raised.detail)
    assert (hung.outcome, hung.detail) == ("timeout", "reward `judge`: no answer within 0.3 seconds of wall-clock time")
    assert {grade.reward for grade in others} == {6.0}
    wait_until(lambda: threading.active_count() <= num_threads)
    gc.collect()
    assert capfd.readouterr().err == ""


def test_a_coroutine_that_blocks_the_event_loop_stops_the_run_with_its_name(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Many that block for a moment do not. A plain function that takes long is named in a warning."""
    monkeypatch.setattr("srtrl.tasks.grading.GRACE_SECONDS", 0.3)
    sections = [RewardSection(name="own_rewards:seventh"), RewardSection(name="own_rewards:blocks")]
    grading = GradingSection(timeout_seconds=0.005)
    own = sys.modules["own_rewards"]

    def wait_for_one(grader: Grader) -> None:
        grader.wait_any([grader.submit(prompt_of("ok"), "ok", "stop", 1)])

    def try_rewards(grader: Grader) -> None:
        grader.try_rewards(prompt_of("ok"))

    in_task = [sections[0], RewardSection(name="own_rewards:blocks_in_another_task")]
    ways = {
        "reward `blocks`": (wait_for_one, sections),
        "reward `seventh` or reward `blocks_in_a": (try_rewards, in_task),
    }
    for name, (start, blocking) in ways.items():
        with Grader(Rows(equal_texts), blocking, grading, max_new_tokens=10) as grader:
            own.is_free.clear()
            message = rf"rewards: {name}\S* has blocked the event loop for \d seconds; .*a coroutine must not block"
            with pytest.raises(ValueError, match=message):
                start(grader)
            own.is_free.set()
    with Grader(Rows(equal_texts), sections, grading, max_new_tokens=10) as grader:
        tickets = [grader.submit(prompt_of("ok"), "nap", "stop", 1) for _ in range(6)]
        while not all(map(grader.is_done, tickets)):
            grader.wait_any([ticket for ticket in tickets if not grader.is_done(ticket)], timeout=0.02)
        assert [grade.reward for grade in grader.collect(tickets)] == [4.0] * 6
    with Grader(Rows(equal_texts), [RewardSection(name="own_rewards:slow")], grading, max_new_tokens=10) as grader:
        assert [grade.reward for grade in grade_all(grader, ["ok"])] == [1.0]
    assert any(
        re.match(r"0\.1 seconds in reward `slow`, which has no limit .*should be @isolated", one)
        for one in caplog.messages
    )


def test_a_reward_is_a_number_of_any_kind_up_to_a_limit() -> None:
    for value, number in ((1e15, 1e15), (-(10**15), -1e15), (True, 1.0), (Fraction(1, 4), 0.25), (np.float32(3), 3.0)):
        assert check_reward("a", value) == number
    for beyond in (1.0000001e15, -1e300, 10**400, np.float64(1e16), float("inf"), float("-inf"), float("nan")):
        with pytest.raises(
            ValueError, match=r"reward `a` must return a finite number, it returned .*the limit is 1e\+15"
        ):
            check_reward("a", beyond)
    with pytest.raises(ValueError, match=r"must return a finite number, it returned '1\.0'$"):
        check_reward("a", "1.0")


REFUSED: list[tuple[list[tuple[str, dict[str, Any]]], str]] = [
    ([("corect", {})], "rewards.0: `corect` is not in srtrl/tasks/rewards.py, did you mean `correct`?"),
    ([("isolated", {})], "known: correct, environment, format, overlong_penalty;"),
    ([("own_rewards:both", {})], "rewards.0: `own_rewards:both` is isolated and batched"),
    ([("statistics:mean", {})], "rewards.0: `statistics:mean` cannot be logged as reward/mean"),
    ([("correct", {}), ("correct", {})], "rewards.1: two are named `correct`"),
    ([("correct", {"cache": 1})], "keyword argument 'cache'; it is correct(sample, incorrect"),
    ([("correct", {"sample": 1})], "multiple values for argument 'sample'"),
    ([("overlong_penalty", {})], "argument: 'cache_tokens'; it is overlong_penalty(sample, "),
    ([("own_rewards:scaled", {"factor": lambda: 3})], "own_rewards:scaled is isolated"),
]


def test_rewards_options_and_verifiers_are_refused_by_name() -> None:
    for sections, message in REFUSED:
        with pytest.raises(ValueError, match=re.escape(message)):
            resolve_rewards([RewardSection(name=name, options=options) for name, options in sections])

    def local(text: str, answer: str, /) -> bool:
        return text == answer

    local.isolated = True  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="the task's verifier is isolated and must be a function of an importable"):
        make_grader("correct", verifier=local)


def test_weights_options_and_the_verdict_reach_rewards_wherever_they_run() -> None:
    """In the training process, in a worker (as the verifier here), and in the event loop."""
    sections = [
        RewardSection(name="correct", weight=2.0),
        RewardSection(name="own_rewards:length", weight=-0.5),
        RewardSection(name="own_rewards:scaled", options={"factor": 3.0, "offset": 0.5}),
        RewardSection(name="own_rewards:rank", options={"step": 10.0}),
        RewardSection(name="overlong_penalty", options={"cache_tokens": 4}),
        RewardSection(name="own_rewards:judge", options={"factor": 0.5}),
    ]
    verifier = resolve_function("srtrl.tasks.rewards", "own_rewards:isolated_verify")
    with Grader(Rows(verifier), sections, GradingSection(num_workers=1), max_new_tokens=10) as grader:
        sys.modules["own_rewards"].gate.set()
        samples: list[tuple[str, FinishReason, int]] = [("ok", "stop", 5), ("12345678", "length", 8)]
        grades = grader.collect([grader.submit(prompt_of("ok"), *sample) for sample in samples])
    names = ("correct", "length", "scaled", "rank", "overlong_penalty", "judge")
    expected = {
        ("correct", 2.0 - 0.25 + 6.5 + 2.0): (1.0, 0.5, 6.5, 0.0, 0.0, 2.0),
        ("wrong", -0.4 + 34.0 + 4.0): (0.0, 0.8, 24.5, 10.0, -0.5, 4.0),
    }
    assert [(grade.outcome, grade.reward) for grade in grades] == list(expected)
    assert [tuple(grade.parts[name] for name in names) for grade in grades] == list(expected.values())


@pytest.mark.parametrize(("max_new_tokens", "cache_tokens"), [(20480, 4096), (10, 9), (7, 1)])
def test_the_overlong_penalty_is_the_formula_of_dapo(max_new_tokens: int, cache_tokens: int) -> None:
    """Equation 13 of arXiv 2503.14476, its cases written out."""
    end = max_new_tokens - cache_tokens
    for length in {1, end, end + 1, end + (cache_tokens + 1) // 2, max_new_tokens - 1, max_new_tokens}:
        expected = 0.0 if length <= end else (end - length) / cache_tokens
        value = overlong_penalty(sample_of("", length, max_new_tokens), cache_tokens=cache_tokens)
        assert value == pytest.approx(expected, abs=1e-15)
    assert overlong_penalty(sample_of("", max_new_tokens, max_new_tokens), cache_tokens=cache_tokens) == -1.0


def test_format_wants_a_final_answer_on_the_last_line() -> None:
    for text in ("so \\boxed{\\frac{1}{2}}.\n", "1+1=2\n#### 2", "Answer: 4", "the answer: 4"):
        assert rewards.format(sample_of(text)) == 1.0
    for text in ("", "4", "\\boxed{4}\nor so", "Answer:", "####"):
        assert rewards.format(sample_of(text)) == 0.0
    assert rewards.format(replace(sample_of("Answer: 4"), finish_reason="length")) == 0.0
