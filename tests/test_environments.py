"""Conversations by hand: limits in their order, formats, errors, time, the record; the calculator."""

import json
import math
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar

import pytest
from environment_cases import (
    END,
    PROMPT,
    TOKENIZER,
    AsyncEcho,
    BrokenAtStart,
    Echo,
    HastyEcho,
    OneTool,
    Serial,
    Stuck,
    Unusable,
    Upper,
    answers_of,
    ask,
    completion_of,
    encode,
    section_of,
)
from hypothesis import given
from hypothesis import strategies as st
from task_cases import wait_until
from transformers import PreTrainedTokenizerBase

from srtrl.environments.base import EnvironmentBase, Messages
from srtrl.environments.calculator import evaluate, show
from srtrl.environments.formats import Hermes
from srtrl.environments.python import Environment as PythonEnvironment
from srtrl.environments.python import PythonOptions
from srtrl.environments.record import Record, checksum
from srtrl.environments.turns import EnvironmentTurns
from srtrl.model.folders import load_tokenizer
from srtrl.recipe.schema import EnvironmentSection
from srtrl.resolve import warn_once
from srtrl.rollout.turns import Answer
from srtrl.types import Conversation, Prompt

CHAT_TEMPLATE = """{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|endoftext|>
{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""
EMPTY_THOUGHT = """{% if loop.last and message.role == 'assistant'
and '<think>' not in message.content %}<think></think>
{% endif %}"""
THINKING_TEMPLATE = CHAT_TEMPLATE.replace("{{ message.content }}", EMPTY_THOUGHT + "{{ message.content }}")
KEPT = "{% if loop.last %}{{ message.content }}{% else %}{{ message.content.split('</think>')[-1] }}{% endif %}"
FORGETTING_THOUGHTS: list[str | None] = [
    CHAT_TEMPLATE.replace("{{ message.content }}", KEPT),  # as QwQ's, for any message, or Qwen3's for a user's
    THINKING_TEMPLATE.replace("{{ message.content }}", KEPT),
    CHAT_TEMPLATE.replace("message.content }}", "message.content.split('</think>')[-1] }}"),  # of all turns: DeepSeek's
]
FORGETTING_TEMPLATE = CHAT_TEMPLATE.replace("message.content }}", "message.content if loop.last else '...' }}")


def tokenizer_with(template: str | None) -> PreTrainedTokenizerBase:
    tokenizer = load_tokenizer("bundled:tiny")
    tokenizer.chat_template = template
    return tokenizer


def ending_of(answer: Answer) -> Conversation:
    assert answer.extension == []
    assert answer.conversation is not None
    return answer.conversation


def test_a_conversation_from_the_first_turn_to_the_last() -> None:
    with EnvironmentTurns(section_of(Echo), TOKENIZER) as conversations:
        first = completion_of([*encode("abc"), END])
        answer = ask(conversations, first)
        assert (answer.conversation, answer.extension) == (None, encode("1:abc"))
        found = ending_of(ask(conversations, completion_of(encode("stop"), first, answer.extension)))
        assert found.segments == (("model", 3 + 1), ("observation", len(encode("1:abc"))), ("model", 4))
        assert (found.stop_reason, found.num_turns, found.reward) == ("told", 2, 2.0)
        assert found.metrics == (("heard", 1), ("heard", 2))
        assert len(found.tool_seconds) == 2
    try_out(Echo)
    try_out(AsyncEcho)
    assert Echo.num_open == 0


def test_a_long_observation_loses_its_middle_by_tokens() -> None:
    with EnvironmentTurns(section_of(Echo, max_observation_tokens=40), TOKENIZER) as conversations:
        said = "".join(str(i % 10) for i in range(100))
        whole = encode(f"1:{said}")
        extension = ask(conversations, completion_of(encode(said))).extension
        assert len(extension) == 40
        assert f"[... {len(whole) - 40} tokens left out ...]" in TOKENIZER.decode(extension)
        assert (extension[:4], extension[-4:]) == (whole[:4], whole[-4:])


def try_out(environment: type[EnvironmentBase], prompt: Prompt = PROMPT) -> None:
    with EnvironmentTurns(section_of(environment), TOKENIZER) as conversations:
        conversations.started(prompt, 100)
        conversations.try_environment(prompt)


def raises(*_: object) -> None:
    raise ArithmeticError("no")


def returns(value: object) -> Callable[[object], object]:
    return lambda _: value


RAISED = r"`{}` of \S*:Serial raised (Arith|Type)\w*Error: "
MISTAKES: list[tuple[type[EnvironmentBase], str, list[Any], str]] = [
    (Serial, "timeout_seconds", ["x", None, 0, -1.0, math.nan, [], 1e300], "must be a number above 0 and below 1e9"),
    (Serial, "tools", [None, "x", 3, [{"name": "a"}]], "tools must be a list of Tool, found"),
    (Serial, "Options", [None, dict, "x"], "Options must be a subclass of Section, found"),
    (Serial, "max_parallel", [returns(it) for it in (0, -1, "x", 1.5, b"")], "must return an integer from 1 on"),
    (Serial, "max_parallel", [raises, None, lambda: 3], RAISED.format("max_parallel")),
    (Serial, "open", [returns(None), returns(3), raises, 4], RAISED.format("open")),
    (
        Echo,
        "start",
        [lambda *_, it=it: it for it in ("a text", [5], 5, [["role", "user"]])],
        r"`start` of \S*Echo, called with prompt .*(must return a list of|not iterable)",
    ),
    (Unusable, "", ["text"], r"TypeError: `step` of the environment .* must return a Step, found 'no step'"),
    (Unusable, "", ["what"], r"tried on prompt .* with the turn 'what', raised KeyError: 'what'"),
    (Unusable, "", ["interrupt"], r"KeyboardInterrupt"),
    (AsyncEcho, "", ["interrupt"], r"KeyboardInterrupt"),
    (BrokenAtStart, "", ["a"], "RuntimeError: no such game"),
]
"""A member and values of another kind, or the turns with which the environment is tried; what is said."""


@pytest.mark.parametrize(("environment", "member", "values", "message"), MISTAKES)
def test_mistakes_of_an_author_are_named_before_the_run(
    environment: type[EnvironmentBase], member: str, values: list[Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for value in values:
        if member:
            monkeypatch.setattr(environment, member, value, raising=False)
        with pytest.raises(ValueError, match=rf"rollout\.environment: .*{message}"):
            try_out(environment, PROMPT if member else replace(PROMPT, answer=value))


@pytest.fixture
def stuck(where: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`Stuck` hangs in the method `where`."""
    warn_once.cache_clear()
    monkeypatch.setattr(Stuck, "where", where)
    Stuck.is_free.clear()
    yield
    Stuck.is_free.set()


HANGS = dict.fromkeys(["init", "start", "step", "async step", "async wait", "replay"], "")
HANGS |= {name: f"`{name}` of" for name in ("open", "max_parallel", "close")} | {"end": "the end of `open` of"}
"""Where it hangs -> how that is named."""


@pytest.mark.usefixtures("stuck")
@pytest.mark.parametrize("where", HANGS)
def test_an_environment_that_hangs_is_named_before_the_run(where: str, caplog: pytest.LogCaptureFixture) -> None:
    begun, is_last = time.monotonic(), where in ("close", "end")
    problem = "TimeoutError: no answer within the class's timeout_seconds (0.5); what waits needs a limit of its own"
    expected = nullcontext() if is_last else pytest.raises(ValueError, match=re.escape(problem))
    with expected as caught, EnvironmentTurns(section_of(Stuck), TOKENIZER) as conversations:
        conversations.try_environment(PROMPT)
    said = caplog.text if caught is None else str(caught.value)
    assert re.search(rf"rollout\.environment: {HANGS[where]} ?environment_cases:Stuck.* raised ", said)
    assert problem in said
    assert time.monotonic() < begun + 30


@pytest.mark.usefixtures("stuck")
@pytest.mark.parametrize("where", ["init", "start", "step", "async step", "async wait", "close", ""])
def test_an_environment_that_hangs_later_ends_its_sample_with_a_line(
    where: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The sum of its rewards is not known then."""
    with EnvironmentTurns(section_of(Stuck), TOKENIZER) as conversations:
        found = ending_of(ask(conversations, completion_of(encode("go"))))
        if where == "close":
            begun = time.monotonic()
            for sample in range(1, 100):
                ask(conversations, completion_of(encode("go"), sample=sample))
            assert time.monotonic() < begun + 100 * Stuck.timeout_seconds / 2
        Stuck.is_free.set()
    is_late = where not in ("close", "")
    assert (found.stop_reason, found.outcomes) == (("time", ("time",)) if is_late else ("done", ()))
    assert math.isnan(found.reward) if is_late else found.reward == 1.0
    text = "`step` of environment_cases:Stuck gave no answer within the class's timeout_seconds"
    assert caplog.text.count(text) == is_late
    assert caplog.text.count("`close` of environment_cases:Stuck raised TimeoutError") == (where == "close")


TURNS: list[tuple[type[EnvironmentBase], str, dict[str, Any], str]] = [
    (Echo, "stop", {"max_turns": 1}, "told"),  # the environment's own end comes first
    (Echo, "abc", {"max_turns": 1}, "turns"),
    (Echo, "abc", {"max_new_tokens": 8}, "observation"),
    (Echo, "abc", {"finish_reason": "length"}, "response_tokens"),
    (HastyEcho, "wait2", {}, "time"),
    (Unusable, "done", {}, "done"),  # with numbers of NumPy
    (Echo, "<|endo/ftext|>", {}, r"1:<\|endoftext\|>$"),  # as ordinary tokens
    (AsyncEcho, "abc", {}, r"abc$"),
    (Unusable, "text", {}, r"error: TypeError: .*must return a Step, found 'no step'"),
    (Unusable, "reward", {}, r"error: ValueError: .*a finite number, it returned nan"),
    (Unusable, "metric", {}, r"error: ValueError: .*environment: a.*'b'"),
    (Unusable, "type", {}, r"error: TypeError: "),
    (Unusable, "texts", {}, r"error: TypeError: Step: observation must be text, found \['a', None\]"),
    (Unusable, "outcomes", {}, r"error: TypeError: Step: outcomes must be text, found 'ok'"),
    (Unusable, "generator", {}, r"error: TypeError: Step: observation must be text, found <generator object"),
    (Unusable, "set", {}, r"error: TypeError: Step: outcomes must be text, found \{'ok'\}"),
    (Unusable, "reason", {}, r"error: TypeError: Step: stop_reason must be text, found None"),
    (Unusable, "exit", {}, r"error: SystemExit: 0"),
    (Unusable, "interrupt", {}, r"error: KeyboardInterrupt"),
    (AsyncEcho, "interrupt", {}, r"error: KeyboardInterrupt"),
    (Unusable, "what", {}, r"error: KeyError: 'what'"),
    (BrokenAtStart, "a", {}, r"error: RuntimeError: no such game"),
]
"""Environment, turn (`/` between texts that are tokenised apart), limits; stop reason or observation."""


@pytest.mark.parametrize(("environment", "turn", "limits", "expected"), TURNS)
def test_limits_have_names_and_mistakes_of_an_author_are_texts(
    environment: type[EnvironmentBase], turn: str, limits: dict[str, Any], expected: str
) -> None:
    section = {key: limits[key] for key in limits.keys() & EnvironmentSection.model_fields}
    others = {key: limits[key] for key in limits.keys() - section}
    token_ids = [token for part in turn.split("/") for token in encode(part)]
    with EnvironmentTurns(section_of(environment, **section), TOKENIZER) as conversations:
        answer = ask(conversations, completion_of(token_ids, **others))
        if answer.conversation is None:
            assert END not in answer.extension
            assert re.match(expected, str(TOKENIZER.decode(answer.extension)))
            return
        assert ending_of(answer).stop_reason == expected
        if environment is Unusable:
            assert (answer.conversation.reward, answer.conversation.metrics) == (1.0, (("a", 2.0),))


def test_an_answer_that_cannot_be_continued_or_a_format_that_does_not_fit_is_refused() -> None:
    with (
        EnvironmentTurns(section_of(Unusable), TOKENIZER) as conversations,
        pytest.raises(ValueError, match="answered with an empty text, and the format text"),
    ):
        ask(conversations, completion_of(encode("silent")))
    with pytest.raises(ValueError, match="is for one tool, the environment has 2"):
        EnvironmentTurns(section_of(Upper, format="code_tags"), TOKENIZER)


@pytest.mark.parametrize("environment", [Echo, AsyncEcho])
def test_an_environment_that_raises_says_so_and_ends_the_run_only_where_it_always_does(
    environment: type[EnvironmentBase],
) -> None:
    with EnvironmentTurns(section_of(environment, max_turns=1), TOKENIZER) as conversations:
        for sample, said in enumerate(("raise this", "raise that")):
            assert ending_of(ask(conversations, completion_of(encode(said), sample=sample))).outcomes == ("raised",)
        with pytest.raises(ValueError, match=r"(?s)step 3: the environment .* in each of 2 samples.*raise this"):
            conversations.check_not_all_raised("step 3")
        ask(conversations, completion_of(encode("fine"), sample=2))
        conversations.check_not_all_raised("step 3")
        conversations.use_record(None)
        conversations.check_not_all_raised("step 4")
    with EnvironmentTurns(section_of(environment), TOKENIZER) as conversations:
        extension = ask(conversations, completion_of(encode("raise this"))).extension
        assert "error: RuntimeError: raise this" in TOKENIZER.decode(extension)


def test_threads_are_started_when_needed_and_waiting_for_one_is_not_counted_as_time() -> None:
    before = threading.enumerate()  # some wait for the steps of earlier tests

    def num_threads() -> int:
        return sum(thread.name == "environment" for thread in threading.enumerate() if thread not in before)

    with EnvironmentTurns(section_of(Echo), TOKENIZER) as conversations:
        assert num_threads() == 1  # of the event loop
        for sample in range(3):
            ask(conversations, completion_of(encode("one"), sample=sample))
        wait_until(lambda: num_threads() == 1)
        for sample in range(3, 6):
            conversations.submit_turn(completion_of(encode("wait0.1"), sample=sample), PROMPT)
        assert num_threads() == 4
        answers_of(conversations)
        wait_until(lambda: num_threads() == 1)
    with EnvironmentTurns(section_of(Serial), TOKENIZER) as conversations:
        assert ending_of(ask(conversations, completion_of(encode("hang")))).stop_reason == "time"
        Serial.is_free.set()
        wait_until(lambda: num_threads() == 1)  # the late answer has come
        for sample in range(8):
            conversations.submit_turn(completion_of(encode("go"), sample=10 + sample), PROMPT)
        reasons = [ending_of(answer).stop_reason for answer in answers_of(conversations)]
        assert reasons == ["done"] * 8  # together they take longer than the limit
        assert Serial.num_overlapping == 0
        loop = conversations._loop
    wait_until(lambda: num_threads() == 0)
    assert loop.is_closed()


def test_the_record_repeats_what_was_said_and_the_environment_catches_up(tmp_path: Path) -> None:
    path = tmp_path / "observations" / "step_000001.jsonl"
    turns = [completion_of(encode("one"))]
    with EnvironmentTurns(section_of(Echo), TOKENIZER) as conversations:
        conversations.use_record(path)
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
    with EnvironmentTurns(section_of(Echo), TOKENIZER) as conversations:
        conversations.use_record(path)
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
        with EnvironmentTurns(section_of(Echo), TOKENIZER) as conversations:
            conversations.use_record(path)
            answer = ask(conversations, first)
            assert "error: RuntimeError: raise this" in TOKENIZER.decode(answer.extension)
            content = path.read_bytes()
            later = ask(conversations, completion_of(encode("two"), first, answer.extension))
            assert later.extension == encode("2:two")
        path.write_bytes(content)  # killed before the later answer came
    for _ in range(2):  # the second time, the environment is asked again
        with EnvironmentTurns(section_of(Echo, max_turns=1), TOKENIZER) as conversations:
            conversations.use_record(path)
            ask(conversations, first)
            with pytest.raises(ValueError, match=r"step 1: the environment .* raised in each of 1 samples"):
                conversations.check_not_all_raised("step 1")
            assert not path.exists()


CODE_TAGS: list[tuple[str, str, str]] = [
    ("so <code>ab</code>", "AB", "ok"),
    ("<code>```python\nab\n```</code>", "AB", "ok"),
    ("<code>x</code> and <code>\nab</code>", "\nAB", "ok"),
    ("<code>ab", "error: a <code> without </code>", "malformed"),
    ("ab</code>", "error: a </code> without <code>", "malformed"),
]
PYTHON: list[tuple[str, str, str]] = [
    ("print(3)\n4 * 5", "3\n20", "ok"),
    ("import sympy\nsympy.factor(sympy.Symbol('x')**2 - 1)", "(x - 1)*(x + 1)", "ok"),
    ("x = 1", "[no output]", "ok"),
    ("print(1)\n1 / 0", "1\nZeroDivisionError: division by zero", "error"),
    ("raise SystemExit(3)", "exit code 3", "error"),
    ("while True: pass", "[the time limit was exceeded]", "timeout"),
    ("x = bytearray(2**33)", "[the memory limit was exceeded]", "memory"),
    ("while True: print('a' * 1000)", r"[more output than allowed; the rest is lost]", "truncated"),
    ("import ctypes\nctypes.string_at(0)", "[the program was killed]", "killed"),
]
"""What the policy says, what is observed (of Python's the end), and the outcome."""


def check_outcomes(conversations: EnvironmentTurns, said: str, observation: str, outcome: str) -> None:
    first = completion_of(encode(said), max_new_tokens=4000)
    answer = ask(conversations, first)
    text = str(TOKENIZER.decode(answer.extension))
    assert text.startswith("\n<interpreter>\n"), said
    assert text.endswith(f"{observation}\n</interpreter>\n"), said
    last = ending_of(ask(conversations, completion_of(encode("Answer: 4"), first, answer.extension)))
    assert (last.outcomes, last.stop_reason, last.num_void_turns) == ((outcome,), "answered", 0), said
    assert [kind for kind, _ in last.segments] == ["model", "boundary", "observation", "boundary", "model"]


def test_code_tags() -> None:
    with EnvironmentTurns(section_of(OneTool, format="code_tags"), TOKENIZER) as conversations:
        for said, observation, outcome in CODE_TAGS:
            check_outcomes(conversations, said, f"<interpreter>\n{observation}", outcome)
        void = ending_of(ask(conversations, completion_of(encode("well"), sample=1)))
        assert (void.stop_reason, void.num_void_turns) == ("answered", 1)


def test_python_says_what_was_printed_and_how_it_ended() -> None:
    """In its sandbox, as a recipe would have it."""
    section = EnvironmentSection(name="python", format="code_tags", options={"num_workers": 1, "cpu_seconds": 1})
    assert PythonEnvironment.max_parallel(PythonOptions(num_workers=3)) == 3
    with EnvironmentTurns(section, TOKENIZER) as conversations:
        for code, observation, outcome in PYTHON:
            check_outcomes(conversations, f"<code>\n```python\n{code}\n```\n</code>", observation, outcome)


def hermes(name: str, text: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': {'text': text}})}\n</tool_call>"


NO_TOOL = "error: there is no tool {}; there is: upper, shout"
HERMES: list[tuple[str, list[str]]] = [
    (hermes("upper", "ab"), ["AB"]),
    (hermes("upper", "ab") + hermes("shout", "ab"), ["AB", "AB!"]),
    (hermes("whisper", "ab"), [NO_TOOL.format("whisper")]),
    (hermes("upper", 3), ["error: the argument text of upper must be a string"]),
    (hermes("upper", "a") + hermes("x", "a"), ["error: another call of this turn cannot be run", NO_TOOL.format("x")]),
    ("<tool_call>1 2</tool_call>", ["error: no JSON in <tool_call>: Extra data: line 1 column 3 (char 2)"]),
    ("<tool_call>[]</tool_call>", ['error: expected {"name": ..., "arguments": {...}} in <tool_call>']),
    ('<tool_call>{"name": "upper", "arguments": []}</tool_call>', ["error: the arguments of upper are no JSON object"]),
    ('<tool_call>{"name": "upper"}</tool_call>', ["error: the call of upper lacks the argument text"]),
    ("<tool_call>", ["error: a <tool_call> without </tool_call>"]),
    # JSON can hold half a surrogate pair, and no tokenizer takes it.
    (r'<tool_call>{"name": "\ud800"}</tool_call>', [NO_TOOL.format("?")]),
    (r'<tool_call>{"name": "upper", "arguments": {"text": "\ud800"}}</tool_call>', ["?"]),
    ("<tool_call>" + "[" * 100_000 + "</tool_call>", ["error: no JSON in <tool_call>: maximum recursion depth"]),
]


def test_hermes() -> None:
    tokenizer = tokenizer_with(CHAT_TEMPLATE)
    with EnvironmentTurns(section_of(Upper, format="hermes"), tokenizer) as conversations:
        assert [tool["function"]["name"] for tool in conversations.tools] == ["upper", "shout"]
        for sample, (turn, observations) in enumerate(HERMES):
            completion = completion_of([*encode(turn), END], max_new_tokens=10**6, sample=sample)
            text = str(tokenizer.decode(ask(conversations, completion).extension))
            *between, end = ["\n", *["<|endoftext|>\n"] * len(observations)]
            expected = "".join(f"{start}<|tool|>{text}" for start, text in zip(between, observations, strict=True))
            assert text.startswith(expected), turn[:100]
            assert text.endswith(f"{end}<|assistant|>"), turn[:100]


def test_templates_that_rewrite_earlier_turns_are_refused() -> None:
    parts = Hermes(tokenizer_with(THINKING_TEMPLATE), Upper.tools).parts(["a"])
    assert parts == [("\n<|tool|>", "boundary"), ("a", "observation"), ("<|endoftext|>\n<|assistant|>", "boundary")]
    refused = dict.fromkeys(FORGETTING_THOUGHTS, r"drops thoughts \(`<think>...</think>`\) of .* a template \(model\.")
    refused |= {FORGETTING_TEMPLATE: "changes earlier messages", None: "has no chat template"}
    for template, message in refused.items():
        for environment, name in ((Upper, "hermes"), (Echo, "chat")):
            with pytest.raises(ValueError, match=message):
                EnvironmentTurns(section_of(environment, format=name), tokenizer_with(template))


class Greeting(Echo):
    """Begins with a message."""

    seen: ClassVar[list[Prompt]] = []

    def start(self, prompt: Prompt) -> Messages:
        self.seen.append(prompt)
        return [{"role": "user", "content": f"hello {prompt.prompt_id}"}]


def test_an_environment_may_say_something_first() -> None:
    with EnvironmentTurns(section_of(Greeting), TOKENIZER) as conversations:
        started = conversations.started(PROMPT, 100)
        assert started.text == "Computehello p"
        assert list(started.token_ids) == encode(started.text)
        assert conversations.started(PROMPT, 100) is started
        ask(conversations, completion_of(encode("abc")), started)
        assert Greeting.seen == [PROMPT, PROMPT]  # without what it says itself
    with EnvironmentTurns(section_of(Greeting, format="chat"), tokenizer_with(CHAT_TEMPLATE)) as conversations:
        prompt = Prompt(prompt_id="p", text="<|user|>hi<|endoftext|>\n<|assistant|>", token_ids=(1,), answer="")
        expected = "<|user|>hi<|endoftext|>\n<|user|>hello p<|endoftext|>\n<|assistant|>"
        assert conversations.started(prompt, 100).text == expected
        with pytest.raises(ValueError, match=r"rollout.max_prompt_tokens is 3"):
            EnvironmentTurns(section_of(Greeting), TOKENIZER).started(PROMPT, 3)


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
