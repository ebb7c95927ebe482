"""Conversations by hand: limits in their order, formats, errors, time, the record; the calculator."""

import asyncio
import json
import math
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from environment_cases import (
    END,
    PROMPT,
    TOKENIZER,
    BrokenAtStart,
    OneTool,
    Upper,
    answers_of,
    ask,
    completion_of,
    encode,
    section_of,
)
from hypothesis import given
from hypothesis import strategies as st
from ruamel.yaml import YAML
from task_cases import wait_until
from transformers import PreTrainedTokenizerBase

from srtrl.environments.base import EnvironmentBase, Messages, Step, Turn
from srtrl.environments.calculator import evaluate, show
from srtrl.environments.python import Environment as PythonEnvironment
from srtrl.environments.python import PythonOptions
from srtrl.environments.record import Record, checksum
from srtrl.environments.turns import EnvironmentTurns
from srtrl.model.folders import load_tokenizer
from srtrl.recipe.schema import EnvironmentSection, Section
from srtrl.resolve import warn_once
from srtrl.rollout.one_turn import Answer
from srtrl.types import Conversation, Prompt

CASES: dict[str, Any] = YAML(typ="safe").load(Path(__file__).with_name("environments.yaml"))
"""Turns and their answers."""


class Echo(EnvironmentBase):
    """Repeats the turn; counts what it has heard; "stop" ends, and text after "raise" is raised."""

    num_open = 0

    def __init__(self, options: Section, shared: Any) -> None:
        super().__init__(options, shared)
        self.num_heard = 0
        type(self).num_open += 1

    def step(self, turn: Turn) -> Step:
        self.num_heard += 1
        if turn.text.startswith("raise"):
            raise RuntimeError(turn.text)
        said = {"observation": f"{self.num_heard}:{turn.text}", "metrics": {"heard": self.num_heard}}
        return Step(**said, is_done=turn.text == "stop", reward=1.0, stop_reason="told")  # type: ignore[arg-type]

    def close(self) -> None:
        type(self).num_open -= 1


class Greeting(Echo):
    """Begins with a message."""

    seen: ClassVar[list[Prompt]] = []

    def start(self, prompt: Prompt) -> Messages:
        self.seen.append(prompt)
        return [{"role": "user", "content": f"hello {prompt.prompt_id}"}]


is_free = threading.Event()


def hang(*_: object) -> None:
    is_free.wait(60)


def fail(error: BaseException) -> None:
    raise error


NAMES = {"Step": Step, "fail": fail, "hang": hang, "np": np, "sys": sys, "time": time}


class Evaluates(EnvironmentBase):
    """Answers a turn by its value as Python: any mistake of an author."""

    timeout_seconds = 0.5

    def step(self, turn: Turn) -> Any:
        return eval(turn.text, NAMES)

    def close(self) -> None:
        raise RuntimeError("close")


class EvaluatesLater(EnvironmentBase):
    """The same in the event loop."""

    async def step(self, turn: Turn) -> Any:
        await asyncio.sleep(0.01)
        return eval(turn.text, NAMES)


ENVIRONMENTS = {one.__name__: one for one in (Echo, Evaluates, EvaluatesLater, BrokenAtStart)}


def talk(
    environment: type[EnvironmentBase], tokenizer: Any = TOKENIZER, folder: Path | None = None, **section: Any
) -> EnvironmentTurns:
    return EnvironmentTurns(section_of(environment, **section), tokenizer, folder)


def ending_of(answer: Answer) -> Conversation:
    assert answer.extension == []
    assert answer.conversation is not None
    return answer.conversation


def try_out(environment: type[EnvironmentBase], prompt: Prompt = PROMPT) -> None:
    with talk(environment) as conversations:
        conversations.started(prompt, 100)
        conversations.try_environment(prompt)


def test_a_conversation_from_the_first_turn_to_the_last() -> None:
    with talk(Echo) as conversations:
        first = completion_of([*encode("abc"), END])
        answer = ask(conversations, first)
        assert (answer.conversation, answer.extension) == (None, encode("1:abc"))
        found = ending_of(ask(conversations, completion_of(encode("stop"), first, answer.extension)))
        assert found.segments == (("model", 3 + 1), ("observation", len(encode("1:abc"))), ("model", 4))
        assert (found.stop_reason, found.num_turns, found.reward) == ("told", 2, 2.0)
        assert found.metrics == (("heard", 1), ("heard", 2))
        assert len(found.tool_seconds) == 2
    try_out(Echo)
    try_out(EvaluatesLater, replace(PROMPT, answer="Step()"))
    assert Echo.num_open == 0


def test_a_long_observation_loses_its_middle_by_tokens() -> None:
    with talk(Echo, max_observation_tokens=40) as conversations:
        said = "".join(str(i % 10) for i in range(100))
        whole = encode(f"1:{said}")
        extension = ask(conversations, completion_of(encode(said))).extension
        assert len(extension) == 40
        assert f"[... {len(whole) - 40} tokens left out ...]" in TOKENIZER.decode(extension)
        assert (extension[:4], extension[-4:]) == (whole[:4], whole[-4:])


# --- Mistakes of an author --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "turn", "limits", "expected"), CASES["turns"])
def test_limits_have_names_and_mistakes_of_an_author_are_texts(
    name: str, turn: str, limits: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    """The run goes on; a mistake in the first turn that is tried is named before it."""
    environment = ENVIRONMENTS[name]
    section = {key: limits[key] for key in limits.keys() & EnvironmentSection.model_fields}
    others = {key: limits[key] for key in limits.keys() - section}
    token_ids = [token for part in turn.split("/") for token in encode(part)]
    with talk(environment, folder=tmp_path / "observations", **section) as conversations:
        conversations.begin_step(1)
        answer = ask(conversations, completion_of(token_ids, **others))
    if answer.conversation is not None:
        assert ending_of(answer).stop_reason == expected
        if expected == "done":
            assert (answer.conversation.reward, answer.conversation.metrics) == (1.0, (("a", 2.0),))
        return
    assert END not in answer.extension
    assert re.match(expected, str(TOKENIZER.decode(answer.extension)))
    if expected.startswith("error: "):
        message = rf"rollout\.environment: .* raised {expected.removeprefix('error: ')}"
        with pytest.raises(ValueError, match=message):
            try_out(environment, replace(PROMPT, answer=turn))


def raises(*_: object) -> None:
    raise ArithmeticError("no")


def returns(value: object) -> Callable[..., object]:
    return lambda *_: value


RAISED = r"`{}` of \S*:Echo raised (Arith|Type)\w*Error: "
NO_MESSAGES = r"`start` of \S*Echo, called with prompt .*(must return a list of|not iterable)"
MEMBERS: list[tuple[str, list[Any], str]] = [
    ("timeout_seconds", ["x", None, 0, -1.0, math.nan, [], 1e300], "must be a number above 0 and below 1e9"),
    ("tools", [None, "x", 3, [{"name": "a"}]], "tools must be a list of Tool, found"),
    ("Options", [None, dict, "x"], "Options must be a subclass of Section, found"),
    ("max_parallel", [returns(it) for it in (0, -1, "x", 1.5, b"")], "must return an integer from 1 on"),
    ("max_parallel", [raises, None, lambda: 3], RAISED.format("max_parallel")),
    ("open", [returns(None), returns(3), raises, 4], RAISED.format("open")),
    ("start", [returns(it) for it in ("a text", [5], 5, [["role", "user"]])], NO_MESSAGES),
]
"""A member, values that do not fit, and what is said."""


@pytest.mark.parametrize(("member", "values", "message"), MEMBERS)
def test_mistakes_in_a_class_are_named_before_the_run(
    member: str, values: list[Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for value in values:
        monkeypatch.setattr(Echo, member, value)
        with pytest.raises(ValueError, match=rf"rollout\.environment: .*{message}"):
            try_out(Echo)


def test_an_answer_that_cannot_be_continued_or_a_format_that_does_not_fit_is_refused() -> None:
    with (
        talk(Evaluates) as conversations,
        pytest.raises(ValueError, match="answered with an empty text, and the format text"),
    ):
        ask(conversations, completion_of(encode("Step()")))
    with pytest.raises(ValueError, match="is for one tool, the environment has 2"):
        talk(Upper, format="code_tags")


@pytest.mark.parametrize("environment", [Evaluates, EvaluatesLater])
def test_an_environment_that_raises_ends_the_run_only_where_it_always_does(
    environment: type[EnvironmentBase], caplog: pytest.LogCaptureFixture
) -> None:
    with talk(environment, max_turns=1) as conversations:
        for sample, said in enumerate(("fail(RuntimeError('this'))", "{}['that']")):
            assert ending_of(ask(conversations, completion_of(encode(said), sample=sample))).outcomes == ("raised",)
        with pytest.raises(ValueError, match=r"(?s)step 3: the environment .* in each of 2 samples.*Error: this"):
            conversations.check_not_all_raised("step 3")
        ask(conversations, completion_of(encode("Step(observation='fine')"), sample=2))
        conversations.check_not_all_raised("step 3")
        conversations.begin_step(4)
        conversations.check_not_all_raised("step 4")
        ask(conversations, completion_of(encode("fail(RuntimeError('third'))"), sample=3))
    [message] = caplog.messages
    place = r"RuntimeError: this \(test_environments\.py:\d+, \w+\)$"
    assert re.match(rf"{__name__}:{environment.__name__} raised, and the policy reads it: {place}", message)


# --- What hangs -------------------------------------------------------------------------------------------------------


class Quick(EnvironmentBase):
    """Its methods return at once, but for one that a test replaces."""

    timeout_seconds = 0.5

    def step(self, turn: Turn) -> Any:
        return Step(is_done=True, reward=1.0)


async def block(*_: object) -> None:
    hang()


async def sleep(*_: object) -> None:
    await asyncio.sleep(60)


def end_late(options: Section) -> AbstractContextManager[Any]:
    stack = ExitStack()
    stack.callback(hang)
    return stack


HANGS: dict[str, tuple[str, Callable[..., Any], str]] = {
    "init": ("__init__", hang, ""),
    "start": ("start", hang, ""),
    "step": ("step", hang, ""),
    "async step": ("step", block, ""),
    "async wait": ("step", sleep, ""),
    "replay": ("replay", hang, ""),
    "open": ("open", hang, "`open` of"),
    "max_parallel": ("max_parallel", hang, "`max_parallel` of"),
    "close": ("close", hang, "`close` of"),
    "end": ("open", end_late, "the end of `open` of"),
}
"""Place of the hang -> the method, its replacement, and its name in the message."""


@pytest.fixture
def stuck(where: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`Quick` hangs there."""
    warn_once.cache_clear()
    is_free.clear()
    if where:
        method, function, _ = HANGS[where]
        monkeypatch.setattr(Quick, method, function)
    yield
    is_free.set()


@pytest.mark.usefixtures("stuck")
@pytest.mark.parametrize("where", HANGS)
def test_an_environment_that_hangs_is_named_before_the_run(where: str, caplog: pytest.LogCaptureFixture) -> None:
    begun, is_last = time.monotonic(), where in ("close", "end")
    problem = "TimeoutError: no answer within the class's timeout_seconds (0.5); what waits needs a limit of its own"
    expected = nullcontext() if is_last else pytest.raises(ValueError, match=re.escape(problem))
    with expected as caught, talk(Quick) as conversations:
        conversations.try_environment(PROMPT)
    said = caplog.text if caught is None else str(caught.value)
    assert re.search(rf"rollout\.environment: {HANGS[where][2]} ?{__name__}:Quick.* raised ", said)
    assert problem in said
    assert time.monotonic() < begun + 30


@pytest.mark.usefixtures("stuck")
@pytest.mark.parametrize("where", ["init", "start", "step", "async step", "async wait", "close", ""])
def test_an_environment_that_hangs_later_ends_its_sample(where: str, caplog: pytest.LogCaptureFixture) -> None:
    """The sum of its rewards is not known then."""
    with talk(Quick) as conversations:
        found = ending_of(ask(conversations, completion_of(encode("go"))))
        if where == "close":
            begun = time.monotonic()
            for sample in range(1, 100):
                ask(conversations, completion_of(encode("go"), sample=sample))
            assert time.monotonic() < begun + 100 * Quick.timeout_seconds / 2
        is_free.set()
    is_late = where not in ("close", "")
    assert (found.stop_reason, found.outcomes) == (("time", ("time",)) if is_late else ("done", ()))
    assert math.isnan(found.reward) if is_late else found.reward == 1.0
    text = f"`step` of {__name__}:Quick gave no answer within the class's timeout_seconds"
    assert caplog.text.count(text) == is_late
    assert caplog.text.count(f"`close` of {__name__}:Quick raised TimeoutError") == (where == "close")


def test_threads_start_when_needed_and_waiting_for_one_is_no_time_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    before = threading.enumerate()  # some wait for the steps of earlier tests
    turns = [completion_of(encode("time.sleep(0.2) or Step(is_done=True)"), sample=sample) for sample in range(8)]

    def num_threads() -> int:
        return sum(thread.name == "environment" for thread in threading.enumerate() if thread not in before)

    for max_parallel in (128, 1):
        monkeypatch.setattr(Evaluates, "max_parallel", returns(max_parallel))
        is_free.clear()
        with talk(Evaluates) as conversations:
            assert num_threads() == 2  # of the event loop
            assert ending_of(ask(conversations, completion_of(encode("hang()")))).stop_reason == "time"
            is_free.set()
            wait_until(lambda: num_threads() == 2)  # the late answer has come
            for turn in turns:
                conversations.submit_turn(turn, PROMPT)
            assert num_threads() == 2 + min(max_parallel, len(turns))
            reasons = [ending_of(answer).stop_reason for answer in answers_of(conversations)]
            assert reasons == ["done"] * len(turns)  # one after the other they take longer than the limit
            wait_until(lambda: num_threads() == 2)
            loop = conversations._loop
        wait_until(lambda: num_threads() == 0)
        assert loop.is_closed()


# --- The record -------------------------------------------------------------------------------------------------------


def test_the_record_repeats_what_was_said_and_the_environment_catches_up(tmp_path: Path) -> None:
    path = tmp_path / "observations" / "step_000001.jsonl"
    turns = [completion_of(encode("one"))]
    with talk(Echo, folder=path.parent) as conversations:
        conversations.begin_step(1)
        first = ask(conversations, turns[0])
        turns.append(completion_of(encode("two"), turns[0], first.extension))
        second = ask(conversations, turns[1])
    with path.open("a") as file:
        file.write('{"key": "half a li')  # killed while it wrote
    lines = path.read_bytes().split(b"\n")
    changed = json.loads(lines[0])
    changed["step"]["observation"] = "from the record"
    changed["crc32"] = checksum(changed)
    path.write_bytes(b"\n".join([json.dumps(changed).encode(), *lines[1:]]))
    with talk(Echo, folder=path.parent) as conversations:
        conversations.begin_step(1)
        assert ask(conversations, turns[0]).extension == encode("from the record")
        assert ask(conversations, turns[1]).extension == second.extension
        third = ask(conversations, completion_of(encode("three"), turns[1], second.extension))
        assert third.extension == encode("3:three")  # it has heard the first two turns by now
        assert len(path.read_bytes().split(b"\n")) == 4
        other = ask(conversations, completion_of(encode("two"), turns[0], encode("others"), sample=1))
        assert other.extension == encode("1:two")  # another history: no answer of the record
    for damaged in (b"no json\n", path.read_bytes().replace(b"from the", b"from she")):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"step_000001.jsonl:1: damaged"):
            Record(path)


def test_an_error_is_in_the_record_unless_all_environments_of_the_step_raised(tmp_path: Path) -> None:
    path = tmp_path / "observations" / "step_000001.jsonl"
    first = completion_of(encode("raise this"))
    for _ in range(2):  # the second time, the environment sees the first turn late
        with talk(Echo, folder=path.parent) as conversations:
            conversations.begin_step(1)
            answer = ask(conversations, first)
            assert "error: RuntimeError: raise this" in TOKENIZER.decode(answer.extension)
            content = path.read_bytes()
            later = ask(conversations, completion_of(encode("two"), first, answer.extension))
            assert later.extension == encode("2:two")
        path.write_bytes(content)  # killed before the later answer came
    for _ in range(2):  # the second time, the environment is asked again
        with talk(Echo, folder=path.parent, max_turns=1) as conversations:
            conversations.begin_step(1)
            ask(conversations, first)
            with pytest.raises(ValueError, match=r"step 1: the environment .* raised in each of 1 samples"):
                conversations.check_not_all_raised("step 1")
            assert not path.exists()


# --- Formats ----------------------------------------------------------------------------------------------------------


def tokenizer_with(content: str | None) -> PreTrainedTokenizerBase:
    """With a chat template that puts this for each message."""
    tokenizer = load_tokenizer("bundled:tiny")
    tokenizer.chat_template = content and CASES["frame"].replace("CONTENT", content)
    return tokenizer


@pytest.mark.parametrize("kind", ["code_tags", "python"])
def test_what_calls_in_code_tags_print_and_how_they_end(kind: str) -> None:
    """Python in its sandbox, as a recipe would have it."""
    python = EnvironmentSection(name="python", format="code_tags", options={"num_workers": 1, "cpu_seconds": 1})
    section = python if kind == "python" else section_of(OneTool, format="code_tags")
    with EnvironmentTurns(section, TOKENIZER) as conversations:
        for code, observation, outcome in CASES[kind]:
            said = f"<code>\n```python\n{code}\n```\n</code>" if kind == "python" else code
            first = completion_of(encode(said), max_new_tokens=4000)
            answer = ask(conversations, first)
            text = str(TOKENIZER.decode(answer.extension))
            begin, end = "\n<interpreter>\n", f"{observation}\n</interpreter>\n"
            assert text.startswith(begin if kind == "python" else begin + end), said
            assert text.endswith(end), said
            last = ending_of(ask(conversations, completion_of(encode("Answer: 4"), first, answer.extension)))
            assert (last.outcomes, last.stop_reason) == ((outcome,), "answered"), said
            assert [name for name, _ in last.segments] == ["model", "boundary", "observation", "boundary", "model"]
        void = ending_of(ask(conversations, completion_of(encode("well"), sample=1)))
        assert void.stop_reason == "answered"
    assert PythonEnvironment.max_parallel(PythonOptions(num_workers=3)) == 3


def test_hermes() -> None:
    tokenizer = tokenizer_with(CASES["plain"])
    with talk(Upper, tokenizer, format="hermes") as conversations:
        assert [tool["function"]["name"] for tool in conversations.tools] == ["upper", "shout"]
        for sample, (said, observations) in enumerate(CASES["hermes"]):
            turn = said.replace("BRACKETS", "[" * 100_000)
            completion = completion_of([*encode(turn), END], max_new_tokens=10**6, sample=sample)
            text = str(tokenizer.decode(ask(conversations, completion).extension))
            *between, end = ["\n", *["<|endoftext|>\n"] * len(observations)]
            expected = "".join(f"{start}<|tool|>{text}" for start, text in zip(between, observations, strict=True))
            assert text.startswith(expected), turn[:100]
            assert text.endswith(f"{end}<|assistant|>"), turn[:100]


def test_templates_that_rewrite_earlier_turns_are_refused() -> None:
    parts = talk(Upper, tokenizer_with(CASES["thinking"]), format="hermes").format.parts(["a"])
    assert parts == [("\n<|tool|>", "boundary"), ("a", "observation"), ("<|endoftext|>\n<|assistant|>", "boundary")]
    for content, message in [*CASES["refused"], (None, "has no chat template")]:
        for environment, name in ((Upper, "hermes"), (Echo, "chat")):
            with pytest.raises(ValueError, match=message):
                talk(environment, tokenizer_with(content), format=name)


def test_an_environment_may_say_something_first() -> None:
    with talk(Greeting) as conversations:
        started = conversations.started(PROMPT, 100)
        assert started.text == "Computehello p"
        assert list(started.token_ids) == encode(started.text)
        assert conversations.started(PROMPT, 100) is started
        ask(conversations, completion_of(encode("abc")), started)
        assert Greeting.seen == [PROMPT, PROMPT]  # without what it says itself
        with pytest.raises(ValueError, match=r"rollout.max_prompt_tokens is 3"):
            conversations.started(replace(PROMPT, prompt_id="q"), 3)
    with talk(Greeting, tokenizer_with(CASES["plain"]), format="chat") as conversations:
        prompt = Prompt(prompt_id="p", text="<|user|>hi<|endoftext|>\n<|assistant|>", token_ids=(1,), answer="")
        expected = "<|user|>hi<|endoftext|>\n<|user|>hello p<|endoftext|>\n<|assistant|>"
        assert conversations.started(prompt, 100).text == expected


# --- The calculator ---------------------------------------------------------------------------------------------------

EXPRESSIONS = st.recursive(
    st.integers(0, 99).map(str),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from("+-*/"), inner).map("".join), inner.map("({})".format), inner.map("-{}".format)
    ),
    max_leaves=12,
)


@given(EXPRESSIONS)
def test_the_calculator_is_pythons(expression: str) -> None:
    try:
        expected = eval(re.sub(r"\d+", r"Fraction(\g<0>)", expression), {"Fraction": Fraction})
    except ZeroDivisionError:
        with pytest.raises(ZeroDivisionError, match="division by zero"):
            evaluate(expression)
    else:
        assert evaluate(expression) == expected


def test_the_calculator_shows_numbers_and_refuses_all_else() -> None:
    shown = {
        "12345678901*98765432109": "1219326311336229232209",
        "1/4": "0.25",
        " 2 * (3 + 4) ": "14",
        "1/3": "0." + "3" * 12,
    }
    assert {text: show(evaluate(text)) for text in shown} == shown
    wrong = ("", "1+", "(1", "1)", "2**3", "a", "1 2", "(" * 60 + "1", "9" * 3000, "__import__('os')", "-" * 70 + "1")
    for text in wrong:
        with pytest.raises(ValueError, match=r"."):
            evaluate(text)
