"""Grading beside the decoder: what hangs, crashes, raises or lies costs its own sample, and nothing else."""

import gc
import os
import re
import signal
import sys
import textwrap
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from operator import eq
from pathlib import Path
from typing import Any

import pytest
import rollout_cases
from ruamel.yaml import YAML
from task_cases import Rows, processes_of, prompt_of, sample_of, to_grade, wait_until

from srtrl.recipe.schema import GradingSection, RewardSection
from srtrl.resolve import resolve_function
from srtrl.tasks import rewards
from srtrl.tasks.base import Verifier
from srtrl.tasks.grading import Grader, check_not_all_failed
from srtrl.tasks.rewards import overlong_penalty
from srtrl.types import FinishReason, Grade

REWARDS = r"""
    import asyncio, gc, itertools, json, mmap, os, socket, statistics, subprocess, sys, threading, time
    from contextlib import suppress
    from fractions import Fraction
    from inspect import isawaitable
    from srtrl.tasks.reward_input import batched, isolated
    from srtrl.tasks.rewards import overlong_penalty

    ok = 2.0

    @isolated
    def apart(sample, *, factor=1.0):
        return eval(sample.text) * factor

    def here(sample):
        return eval(sample.text)

    @batched
    def together(samples):
        return eval(samples[0].text, globals() | {"samples": samples})

    async def judge(sample, *, factor=1.0):
        value = eval(sample.text)
        return (await value if isawaitable(value) else value) * factor

    @batched
    def rank(samples, *, step=1.0):
        return [step * index for index, _ in enumerate(samples)]

    class Judge:
        async def __call__(self, sample):
            return 3.0

    seventh = Judge()

    def verify(text, answer):
        return eval(text) == eval(answer)

    @isolated
    def verify_apart(text, answer):
        return verify(text, answer)

    @isolated
    def equal_apart(text, answer):
        return text == answer

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

    FORGED = {"correct": True, "parts": {"apart": 55.0}}

    def burn(value):
        start = time.process_time()
        while time.process_time() < start + 0.2:
            pass
        return value

    def daemon(pipe):
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                open(pipe).read()
            os._exit(0)

    def number(text):
        import numpy as np
        return np.float64(text)

    def parse():
        return json.loads("{")

    gate, is_free = asyncio.Event(), threading.Event()
    running, most = 0, 0

    async def counted(waiting):
        global running, most
        running += 1
        most = max(most, running)
        try:
            await waiting
        finally:
            running -= 1
        return 4.0

    async def blocking():
        is_free.wait(60)

    async def swallowing():
        while not is_free.is_set():
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0.05)
        return 1.0

    async def raising(error):
        raise error

    async def leaving(error):
        asyncio.create_task(raising(error))
        await asyncio.sleep(0.01)
        return 1.0
"""
"""A user's rewards, which run the text of a sample as Python, and what those texts call."""

LOOP = "sum(range(10**12))"
FAULTS: dict[str, dict[str, Any]] = YAML(typ="safe").load(Path(__file__).with_name("faults.yaml"))


@pytest.fixture(scope="module", autouse=True)
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The current folder, with an importable module of the user's own: `own_rewards`."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "own_rewards.py").write_text(textwrap.dedent(REWARDS), encoding="utf-8")
    folder_before, path_before = Path.cwd(), list(sys.path)
    os.chdir(folder)
    resolve_function("srtrl.tasks.rewards", "own_rewards:apart")  # imports it: each test may run alone
    yield folder
    os.chdir(folder_before)
    sys.path[:] = path_before
    sys.modules.pop("own_rewards", None)


def make_grader(*names: str, verifier: str = "", seconds: float = 0.3) -> Grader:
    sections = [RewardSection(name=name if name == "correct" else f"own_rewards:{name}") for name in names]
    judge: Verifier = getattr(sys.modules["own_rewards"], verifier) if verifier else eq
    return Grader(Rows(judge), sections, GradingSection(num_workers=1, timeout_seconds=seconds))


def grade_all(grader: Grader, texts: Sequence[str]) -> list[Grade]:
    tickets = [grader.submit(to_grade(prompt_of("ok", i), text, "stop", len(text))) for i, text in enumerate(texts)]
    return grader.collect(tickets)


def grading_processes() -> set[int]:
    return processes_of(b"srtrl.tasks.worker", parent=os.getpid())


@pytest.mark.parametrize("kind", [pytest.param(k, marks=[pytest.mark.slow] * (k == "more forged")) for k in FAULTS])
def test_a_fault_costs_its_own_sample_alone(
    kind: str, package: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """One worker: samples come one after the other. No grade goes to another sample, nothing of a reply is run."""
    reward, rows = FAULTS[kind]["reward"], FAULTS[kind]["samples"]
    sys.modules["own_rewards"].is_free.clear()
    where = {key: FAULTS[kind][key] for key in FAULTS[kind].keys() & {"verifier", "seconds"}}
    with make_grader(reward, "correct", "rank", **where) as grader:
        grades = grade_all(grader, [text for text, _ in rows])
        sys.modules["own_rewards"].is_free.set()
    logged: dict[str, str] = {}
    for index, ((text, expected), grade) in enumerate(zip(rows, grades, strict=True)):
        if isinstance(expected, str):
            assert re.match(expected, f"{grade.outcome}: {grade.detail}"), grade
            assert (grade.reward, grade.parts) == (0.0, {reward: 0.0, "correct": 0.0, "rank": 0.0})
            line = f"prompt p{index}: grading ended in {grade.outcome}, left out: {grade.detail}"
            logged.setdefault(grade.detail, line)  # each reason once
        else:
            parts = {reward: expected, "correct": float(text == "ok"), "rank": float(index)}
            assert (grade.outcome, grade.detail) == ("correct" if text == "ok" else "wrong", ""), grade
            assert (grade.reward, grade.parts) == (sum(parts.values()), parts)
    assert [message for message in caplog.messages if "prompt p" in message] == list(logged.values())
    assert not (package / "made by a reward").exists()
    gc.collect()
    left = [message.rpartition("left behind: ")[2] for message in caplog.messages if "left behind" in message]
    assert sorted(message.partition(" (")[0] for message in left) == [*FAULTS[kind].get("left", [])]
    assert "Traceback" not in capfd.readouterr().err


def test_a_worker_ends_with_all_it_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It ignores interrupts. A sample may wait for longer than the CPU limit, and some burn more together.

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

    pipe, has_begun = tmp_path / "pipe", tmp_path / "begun"
    os.mkfifo(pipe)
    values = {"time.sleep(0.5) or 1": 1, "burn(2)": 2, "burn(3)": 3, "burn(4)": 4, "os.fork() * 0 + 5": 5, "66": 66}
    values |= {"777": 777, "os.fork() * 0 + 8": 8, "99": 99, f"daemon('{pipe}') or 10": 10}
    with make_grader("apart") as grader:
        assert not interrupt_worker()  # it starts for the first sample
        tickets = [grader.submit(to_grade(prompt_of("ok"), text, "stop", 1)) for text in values]
        wait_until(interrupt_worker)  # while it starts
        grader.wait_any(tickets)
        wait_until(interrupt_worker)  # while it grades
        assert [(one.outcome, one.reward) for one in grader.collect(tickets)] == [("wrong", v) for v in values.values()]
        [grade] = grade_all(grader, ["subprocess.Popen(['sleep', '1000']).pid"])
        for _ in range(3):
            grader.submit(to_grade(prompt_of("ok"), f"open('{has_begun}', 'w').close() or time.sleep(1000)", "stop", 1))
        wait_until(has_begun.exists)
    assert grading_processes() <= others
    child = Path(f"/proc/{int(grade.reward)}/stat")
    wait_until(lambda: not child.exists() or child.read_text().split()[2] == "Z")  # dead, if not reaped yet
    pipe.write_text("the daemon ends")


@pytest.mark.parametrize(
    ("code", "seconds", "problem"),
    [("time.sleep(1000)", 0.2, "it is not ready after 0.2 seconds"), ("os._exit(0)", 60, "it ended with exit code 0")],
)
def test_a_module_that_hangs_or_ends_in_a_worker_stops_the_run(
    package: Path, monkeypatch: pytest.MonkeyPatch, code: str, seconds: float, problem: str
) -> None:
    monkeypatch.setattr("srtrl.tasks.worker_pool.START_SECONDS", seconds)
    name = "hangs" if "sleep" in code else "ends"
    program = (
        f"import os, sys, time\nif 'srtrl.tasks.worker' in str(sys.orig_argv): {code}\ndef act(sample): return 1.0\n"
    )
    (package / f"{name}.py").write_text(f"{program}act.isolated = True\n", encoding="utf-8")
    with Grader(Rows(eq), [RewardSection(name=f"{name}:act")], GradingSection(num_workers=1)) as grader:
        others = grading_processes()
        with pytest.raises(RuntimeError, match=f"imports {name} did not start: {problem}"):
            grade_all(grader, ["ok"])
        assert grading_processes() <= others


@pytest.mark.parametrize(
    ("verifier", "reward", "text", "problem"),
    [
        ("", "judge", "asyncio.sleep(1000)", r"0\.3 .*needs a larger grading\.timeout_seconds"),
        ("", "apart", LOOP, r"0\.015 .*needs a larger grading\.timeout_seconds"),
        ("verify_apart", "here", LOOP, r"0\.015 .*needs a larger grading\.timeout_seconds"),
        ("", "here", "1 / 0", "ZeroDivisionError"),
        ("", "together", "[statistics.stdev(len(one.text) for one in samples)] * len(samples)", ""),  # of 2 or more
    ],
)
def test_what_cannot_be_graded_stops_the_start(
    verifier: str, reward: str, text: str, problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    with make_grader(reward, verifier=verifier, seconds=0.015) as grader:
        if not problem:
            grader.try_rewards([prompt_of(text)], 2, 10)
            return
        with pytest.raises(ValueError, match=rf"^rewards: tried on prompt p0 .*'{re.escape(text)}'.*{problem}"):
            grader.try_rewards([prompt_of(text)], 1, 10)
        assert not caplog.messages, "it is said once"


def test_one_reason_for_all_samples_stops_a_step() -> None:
    late = Grade(reward=0.0, parts={}, outcome="timeout", detail="6 seconds")
    later, error = replace(late, detail="7 seconds"), replace(late, outcome="error", detail="OSError")
    for grades, problem in (([late, later], r"6 seconds.* a larger grading\."), ([error, error], "OSError")):
        group = rollout_cases.graded(grades)
        with pytest.raises(ValueError, match=rf"^step 3: none of the 4 samples .*\({grades[0].outcome}\): {problem}"):
            check_not_all_failed([group, group], "step 3")
    for other in (late, replace(error, detail="KeyError"), replace(error, outcome="wrong")):
        check_not_all_failed([rollout_cases.graded([error, other])], "step 3")


def test_tickets_say_when_they_are_done_and_grades_keep_their_order(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with make_grader("apart", "correct", "rank") as grader:
        texts = ("ok", f"len(open('{pipe}').read())")
        tickets = [grader.submit(to_grade(prompt_of("ok"), text, "stop", 1)) for text in texts]
        grader.wait_any(tickets[:1])
        assert [grader.is_done(ticket) for ticket in tickets] == [True, False]
        pipe.write_text("four")
        grader.wait_any(tickets)  # one more
        assert all(grader.is_done(ticket) for ticket in tickets)
        grader.wait_any(tickets)  # does not wait: there is none left
        grades = grader.collect(tickets[::-1])
    assert [tuple(grade.parts.values()) for grade in grades] == [(4.0, 0.0, 0.0), (2.0, 1.0, 1.0)]
    with make_grader() as in_process:
        assert in_process.is_done(in_process.submit(to_grade(prompt_of("ok"), "ok", "stop", 1)))  # nothing runs apart


def test_coroutine_rewards_are_awaited_together(capfd: pytest.CaptureFixture[str]) -> None:
    """While the caller continues, 64 at a time; what raises costs its own sample, what hangs ends with the grader."""
    num_threads = threading.active_count()
    own = sys.modules["own_rewards"]
    with make_grader("judge", "seventh", "correct", seconds=5.0) as grader:
        texts = ["ok", "raising(OSError('no judge'))", *["counted(gate.wait())"] * 98]
        tickets = [grader.submit(to_grade(prompt_of("ok", i), text, "stop", 1)) for i, text in enumerate(texts)]
        wait_until(lambda: own.running == 64)
        assert not any(map(grader.is_done, tickets[2:]))
        grader._loop.call_soon_threadsafe(own.gate.set)
        grader.wait_any(tickets[2:])
        assert any(map(grader.is_done, tickets[2:]))
        ok, raised, *others = grader.collect(tickets)
        assert (own.running, own.most) == (0, 64)
        grader.submit(to_grade(prompt_of("ok"), "counted(asyncio.sleep(1000))", "stop", 1))
        wait_until(lambda: own.running == 1)
    assert (ok.outcome, ok.parts) == ("correct", {"judge": 2.0, "seventh": 3.0, "correct": 1.0})
    assert (raised.outcome, raised.reward) == ("error", 0.0)
    assert {grade.reward for grade in others} == {7.0}
    wait_until(lambda: threading.active_count() <= num_threads)
    gc.collect()
    assert capfd.readouterr().err == ""


def test_blocking_the_event_loop_stops_the_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Many coroutines that block for a moment do not. A plain function that takes long is named in a warning."""
    monkeypatch.setattr("srtrl.tasks.grading.GRACE_SECONDS", 0.3)
    monkeypatch.setattr("srtrl.tasks.event_loop.BLOCKING_SECONDS", 0.2)
    own = sys.modules["own_rewards"]
    for name, text in (
        ("reward `judge`", "is_free.wait(60)"),
        ("reward `seventh` or reward `judge`", "asyncio.wait_for(blocking(), 1000)"),  # it blocks in another task
    ):
        with make_grader("seventh", "judge", seconds=0.005) as grader:
            own.is_free.clear()
            message = rf"rewards: {name} has blocked the event loop for \d seconds; .*a coroutine must not block"
            with pytest.raises(ValueError, match=message):
                grader.try_rewards([prompt_of(text)], 1, 10)
            own.is_free.set()
    monkeypatch.setattr("srtrl.tasks.event_loop.BLOCKING_SECONDS", 0.05)
    with make_grader("seventh", "judge", seconds=0.005) as grader:
        tickets = [grader.submit(to_grade(prompt_of("ok"), "time.sleep(0.15) or 1", "stop", 1)) for _ in range(6)]
        while not all(map(grader.is_done, tickets)):
            grader.wait_any([ticket for ticket in tickets if not grader.is_done(ticket)], timeout=0.02)
        assert [grade.reward for grade in grader.collect(tickets)] == [4.0] * 6
    with make_grader("here", seconds=0.005) as grader:
        assert [grade.reward for grade in grade_all(grader, ["time.sleep(0.5) or 1"])] == [1.0]
    warning = r"0\.1 seconds in reward `here`, which has no limit .*should be @isolated"
    assert any(re.match(warning, message) for message in caplog.messages)
    blocked = (
        r"reward `seventh`, reward `judge`: `(\w+)` \(own_rewards\.py:(\d+)\) has blocked the event loop for 0\.2 s"
    )
    places = [match for message in caplog.messages if (match := re.match(blocked, message))]
    lines = Path(str(own.__file__)).read_text(encoding="utf-8").splitlines()
    assert [(place[1], lines[int(place[2]) - 1].strip()) for place in places] == [
        ("judge", "value = eval(sample.text)"),
        ("blocking", "is_free.wait(60)"),
    ]


def test_a_verifier_that_workers_cannot_import_is_refused() -> None:
    def local(text: str, answer: str, /) -> bool:
        return text == answer

    local.isolated = True  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="the task's verifier is isolated and must be a function of an importable"):
        Grader(Rows(local), [], GradingSection())
    section = RewardSection(name="own_rewards:apart", options={"factor": lambda: 3})
    with pytest.raises(ValueError, match=r"^rewards\.0: own_rewards:apart is isolated and must be"):
        Grader(Rows(eq), [section], GradingSection())


def test_weights_options_and_the_verdict_reach_rewards_wherever_they_run() -> None:
    """In the training process, in a worker (as the verifier here), and in the event loop."""
    sections = [
        RewardSection(name="correct", weight=2.0),
        RewardSection(name="own_rewards:here", weight=-0.5),
        RewardSection(name="own_rewards:apart", options={"factor": 3.0}),
        RewardSection(name="own_rewards:rank", options={"step": 10.0}),
        RewardSection(name="overlong_penalty", options={"cache_tokens": 4}),
        RewardSection(name="own_rewards:judge", options={"factor": 0.5}),
    ]
    samples: list[tuple[str, FinishReason, int]] = [
        ("1 + sample.correct", "stop", 5),
        ("sample.num_tokens + sample.correct", "length", 8),
    ]
    with Grader(Rows(sys.modules["own_rewards"].equal_apart), sections, GradingSection(num_workers=1)) as grader:
        prompt = prompt_of("1 + sample.correct")
        grades = grader.collect([grader.submit(to_grade(prompt, *sample)) for sample in samples])
    names = ("correct", "here", "apart", "rank", "overlong_penalty", "judge")
    expected = {
        ("correct", 2.0 - 1.0 + 6.0 + 1.0): (1.0, 2.0, 6.0, 0.0, 0.0, 1.0),
        ("wrong", -4.0 + 24.0 + 10.0 - 0.5 + 4.0): (0.0, 8.0, 24.0, 10.0, -0.5, 4.0),
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
