"""Environments for the tests, completions of turns, and how a conversation is driven by hand."""

import asyncio
import random
import time
from collections.abc import Sequence
from concurrent.futures import wait
from dataclasses import replace
from typing import Any

from engine_cases import make_response
from task_cases import Rows, wait_until

from srtrl.build import choose_ranks
from srtrl.environments.base import EnvironmentBase, Step, Tool, ToolCall, ToolEnvironment, Turn
from srtrl.environments.formats import Format, MalformedCallError, Parts
from srtrl.environments.turns import EnvironmentTurns
from srtrl.model.folders import load_tokenizer
from srtrl.recipe.schema import EnvironmentSection, GradingSection, RewardSection, Section
from srtrl.rollout.collect import Collector
from srtrl.rollout.one_turn import Answer, OneTurn
from srtrl.tasks.grading import Grader
from srtrl.types import Completion, FinishReason, Prompt, Request, SamplingParams

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
    turn: Sequence[int],
    before: Completion | None = None,
    extension: Sequence[int] = (),
    *,
    sample: int = 0,
    max_new_tokens: int = 400,
    finish_reason: FinishReason = "stop",
) -> Completion:
    """The next turn of a sample: what the engine gives after `before` was extended."""
    said = [*before.response.token_ids.tolist(), *extension] if before else []
    request = Request(
        prompt_id="p",
        prompt_token_ids=PROMPT.token_ids,
        draw_index=0,
        sample_index=sample,
        rng_key=0,
        sampling=SamplingParams(max_new_tokens=max_new_tokens, end_token_ids=(END,)),
        has_turns=True,
    )
    extensions = (*before.response.extensions, (len(said) - len(extension), len(said))) if before else ()
    response = make_response([*said, *turn], finish_reason=finish_reason, extensions=extensions)
    return Completion(request=request, response=response)


def grader_of(reward: str = "environment") -> Grader:
    """No verifier: rewards alone."""
    return Grader(Rows(None), [RewardSection(name=reward)], GradingSection())


def collector_of(grader: Grader, turns: OneTurn, max_new_tokens: int = 30, **options: Any) -> Collector:
    """Samples that often end early."""
    sampling = SamplingParams(max_new_tokens=max_new_tokens, end_token_ids=END_TOKENS)
    defaults: dict[str, Any] = {"num_samples": 3, "seed": 3, "purpose": "train", "policy_version": 0}
    return Collector(grader, turns, sampling=sampling, ranks=choose_ranks(), **defaults | options)


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


class AsyncLedger(EnvironmentBase):
    """As `Digits`, of all turns of the sample so far."""

    def __init__(self, options: Section, shared: Any) -> None:
        super().__init__(options, shared)
        self.totals: list[int] = []

    def step(self, turn: Turn) -> Step:
        self.totals.append(sum(turn.token_ids))
        return digits(sum(self.totals) + len(self.totals))

    async def replay(self, turn: Turn, answer: Step) -> None:
        await asyncio.sleep(0)
        self.totals.append(sum(turn.token_ids))


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
