"""Environments for the tests, completions of turns, and how a conversation is driven by hand."""

import asyncio
import random
import threading
import time
from collections import Counter
from collections.abc import Coroutine, Iterator, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from engine_cases import make_response
from task_cases import wait_until

from srtrl.build import choose_share
from srtrl.environments.base import EnvironmentBase, Step, Tool, ToolCall, ToolEnvironment, Turn
from srtrl.environments.formats import Format, MalformedCallError, Parts
from srtrl.environments.turns import EnvironmentTurns
from srtrl.model.folders import load_tokenizer
from srtrl.recipe.schema import EnvironmentSection, GradingSection, RewardSection, Section
from srtrl.rollout.collect import Collector
from srtrl.rollout.turns import Answer, Turns
from srtrl.tasks.grading import Grader
from srtrl.types import Completion, Prompt, Request, SamplingParams

END = 0
"""The end token of the bundled tokenizer."""
TOKENIZER = load_tokenizer("bundled:tiny")
END_TOKENS = (0, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71)
PROMPT = Prompt(prompt_id="p", text="Compute", token_ids=(1, 2), answer="4")
PROMPTS = [Prompt(prompt_id=str(i), text="", token_ids=(i + 1, 2 * i + 3), answer="") for i in range(9)]


def section_of(environment: type[EnvironmentBase], **changes: Any) -> EnvironmentSection:
    return EnvironmentSection(name=f"{environment.__module__}:{environment.__name__}", **changes)


def encode(text: str) -> list[int]:
    return list(TOKENIZER(text, add_special_tokens=False)["input_ids"])


def completion_of(
    turn: Sequence[int], before: Completion | None = None, extension: Sequence[int] = (), **changes: Any
) -> Completion:
    """The next turn of a sample: what the engine gives after `before` was extended."""
    said = [*before.response.token_ids.tolist(), *extension] if before else []
    fields: dict[str, Any] = {"draw": 0, "sample": 0, "max_new_tokens": 400, "finish_reason": "stop"} | changes
    request = Request(
        prompt_id="p",
        prompt_token_ids=PROMPT.token_ids,
        draw_index=fields["draw"],
        sample_index=fields["sample"],
        rng_key=0,
        sampling=SamplingParams(max_new_tokens=fields["max_new_tokens"], end_token_ids=(END,)),
        has_turns=True,
    )
    new = ((len(said) - len(extension), len(said)),) if before else ()
    extensions = (*before.response.extensions, *new) if before else ()
    response = make_response([*said, *turn], finish_reason=fields["finish_reason"], extensions=extensions)
    return Completion(request=request, response=response)


class PlainTask:
    """No verifier: rewards alone."""

    verifier = None


def grader_of(reward: str = "environment") -> Grader:
    return Grader(PlainTask(), [RewardSection(name=reward)], GradingSection(), 100)  # type: ignore[arg-type]


def collector_of(grader: Grader, turns: Turns, max_new_tokens: int = 30, **options: Any) -> Collector:
    """Samples that often end early."""
    sampling = SamplingParams(max_new_tokens=max_new_tokens, end_token_ids=END_TOKENS)
    defaults: dict[str, Any] = {"num_samples": 3, "seed": 3, "purpose": "train", "policy_version": 0}
    return Collector(grader, turns, sampling=sampling, share=choose_share(), **defaults | options)


def ask(conversations: EnvironmentTurns, completion: Completion, prompt: Prompt = PROMPT) -> Answer:
    """Submit one turn and wait for the answer to it."""
    conversations.submit_turn(completion, prompt)
    (answer,) = answers_of(conversations)
    return answer


def answers_of(conversations: EnvironmentTurns) -> list[Answer]:
    """All answers that are still to come."""
    answers: list[Answer] = []

    def is_done() -> bool:
        wait(conversations.futures(), timeout=0.02)
        answers.extend(conversations.take_answers())
        return not conversations.futures()

    wait_until(is_done)
    return answers


class Echo(EnvironmentBase):
    """Repeats the turn; counts what it has heard; "stop" ends, and text after "raise" is raised."""

    num_open = 0

    def __init__(self, options: Section, shared: Any) -> None:
        super().__init__(options, shared)
        self.heard: list[str] = []
        type(self).num_open += 1

    def step(self, turn: Turn) -> Step:
        self.heard.append(turn.text)
        if turn.text.startswith("raise"):
            raise RuntimeError(turn.text)
        if turn.text.startswith("wait"):
            time.sleep(float(turn.text.removeprefix("wait")))
        said = {"observation": f"{len(self.heard)}:{turn.text}", "metrics": {"heard": len(self.heard)}}
        return Step(**said, is_done=turn.text == "stop", reward=1.0, stop_reason="told")  # type: ignore[arg-type]

    def close(self) -> None:
        type(self).num_open -= 1


class HastyEcho(Echo):
    """With a short time limit."""

    timeout_seconds = 0.5


class Serial(EnvironmentBase):
    """One step at a time; "hang" exceeds the time limit, until `is_free`. Counts the steps that overlap others."""

    timeout_seconds = 1.0
    is_free = threading.Event()
    num_running = num_overlapping = 0

    @classmethod
    def max_parallel(cls, options: Section) -> int:
        return 1

    def step(self, turn: Turn) -> Step:
        if turn.text == "hang":
            self.is_free.wait(60)
            return Step(is_done=True)
        type(self).num_running += 1
        type(self).num_overlapping += self.num_running > 1
        time.sleep(0.2)
        type(self).num_running -= 1
        return Step(is_done=True)


class AsyncEcho(EnvironmentBase):
    """As `Echo`, in the event loop."""

    async def step(self, turn: Turn) -> Step:
        await asyncio.sleep(0.01)
        if turn.text.startswith("raise"):
            raise RuntimeError(turn.text)
        if turn.text == "interrupt":
            raise KeyboardInterrupt
        return Step(observation=turn.text)


class Unusable(EnvironmentBase):
    """Each turn brings another mistake of an author."""

    def step(self, turn: Turn) -> Step:
        mistakes: dict[str, Any] = {
            "reward": {"observation": "a", "reward": float("nan")},
            "metric": {"observation": "a", "metrics": {"a": "b"}},
            "type": {"observation": 3},
            "texts": {"observation": ["a", None]},
            "outcomes": {"observation": "a", "outcomes": "ok"},
            "generator": {"observation": (text for text in "ab")},
            "set": {"observation": "a", "outcomes": {"ok"}},
            "reason": {"is_done": True, "stop_reason": None},
            "done": {"is_done": np.True_, "reward": np.float32(1), "metrics": {"a": np.int64(2)}},
            "silent": {},
        }
        if turn.text in ("exit", "interrupt"):
            raise SystemExit(0) if turn.text == "exit" else KeyboardInterrupt
        return "no step" if turn.text == "text" else Step(**mistakes[turn.text])  # type: ignore[return-value]

    def close(self) -> None:
        raise RuntimeError("close")


class Stuck(EnvironmentBase):
    """Hangs in the method that `where` names, until `is_free`; in a coroutine it blocks the event loop."""

    where: ClassVar[str] = ""
    timeout_seconds = 0.5
    is_free = threading.Event()

    def __init__(self, options: Section, shared: Any) -> None:
        super().__init__(options, shared)
        self.reach("init")

    @classmethod
    def reach(cls, name: str) -> None:
        """Hang here, if this is the place."""
        if name == cls.where:
            cls.is_free.wait(60)

    @classmethod
    @contextmanager
    def open(cls, options: Section) -> Iterator[None]:
        cls.reach("open")
        yield
        cls.reach("end")

    @classmethod
    def max_parallel(cls, options: Section) -> int:
        cls.reach("max_parallel")
        return 2

    def start(self, prompt: Prompt) -> None:
        self.reach("start")

    def step(self, turn: Turn) -> Step | Coroutine[Any, Any, Step]:
        self.reach("step")
        return self.step_later() if self.where.startswith("async") else Step(is_done=True, reward=1.0)

    async def step_later(self) -> Step:
        self.reach("async step")
        if self.where == "async wait":
            await asyncio.sleep(60)
        return Step(is_done=True)

    def replay(self, turn: Turn, answer: Step) -> None:
        self.reach("replay")

    def close(self) -> None:
        self.reach("close")


class BrokenAtStart(EnvironmentBase):
    """Cannot be made."""

    def __init__(self, options: Section, shared: Any) -> None:
        raise RuntimeError("no such game")


TEXT = {"type": "object", "properties": {"text": {"type": "string"}}}


class Upper(ToolEnvironment):
    """A tool with two names."""

    tools = tuple(Tool(name=name, description="Upper case.", parameters=TEXT) for name in ("upper", "shout"))

    def call(self, call: ToolCall) -> tuple[str, str]:
        return call.arguments["text"].upper() + ("!" if call.name == "shout" else ""), "ok"


class OneTool(Upper):
    """For formats with a single tool."""

    tools = Upper.tools[:1]


def digits(total: int) -> Step:
    """An answer that depends on `total`; some end the sample."""
    time.sleep(random.random() / 100)
    observation, is_done = str(total * 7919 % 10**6), total % 5 == 0
    return Step(observation=observation, is_done=is_done, reward=total % 3, metrics={"sum": total})


class Digits(EnvironmentBase):
    """Answers any turn by digits that depend on it, after a random time; ends some samples."""

    def step(self, turn: Turn) -> Step:
        return digits(sum(turn.token_ids))


class Ledger(EnvironmentBase):
    """As `Digits`, of all turns of the sample so far; counts the steps by these turns."""

    num_steps: ClassVar[Counter[tuple[tuple[int, ...], ...]]] = Counter()

    def __init__(self, options: Section, shared: Any) -> None:
        super().__init__(options, shared)
        self.turns: list[tuple[int, ...]] = []

    def step(self, turn: Turn) -> Step:
        self.turns.append(turn.token_ids)
        self.num_steps[tuple(self.turns)] += 1
        return digits(sum(map(sum, self.turns)) + len(self.turns))

    def replay(self, turn: Turn, answer: Step) -> Coroutine[Any, Any, None] | None:
        self.turns.append(turn.token_ids)
        return None


class AsyncLedger(Ledger):
    """As `Ledger`."""

    async def replay(self, turn: Turn, answer: Step) -> None:
        await asyncio.sleep(0)
        super().replay(turn, answer)


LEDGER = {"name": "environment_cases:AsyncLedger", "max_turns": 4, "max_observation_tokens": 16}


class Wild(Format):
    """Finds a call in every turn but those that end with "a": of an unknown tool, or malformed, where it likes."""

    stop_strings = tuple("abcdefgh0123456789ABCDEFGH")
    reads_calls = True

    def parse(self, text: str) -> list[ToolCall]:
        if text[-1:] == "a":
            return []
        if text[-1:] == "b":
            raise MalformedCallError("b is no call")
        return [ToolCall(name="upper" if ord(text[-1]) % 4 else "other", arguments={"text": text})]

    def parts(self, observations: Sequence[str]) -> Parts:
        return [("\n[", "boundary"), *((text, "observation") for text in observations), ("]\n", "boundary")]


class Hostile(OneTool):
    """Its answers are no answers: markup, terminal codes, a right answer."""

    def call(self, call: ToolCall) -> tuple[str, str]:
        time.sleep(0.01)
        return "<script>alert(1)</script>\x1b[31m\n### 42", "ok"

    def step(self, turn: Turn) -> Step:
        return replace(super().step(turn), metrics={"said": len(turn.text)})


HOSTILE = {"name": "environment_cases:Hostile", "format": "environment_cases:Wild", "max_turns": 3}
