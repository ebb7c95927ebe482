"""How a policy writes a tool call, and how the answer is put into its context.

Each format is a small class: `parse` finds the calls in a turn, `parts` says what follows the turn. Only new text is
tokenised; what was sampled stays as it was sampled.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from srtrl.environments.base import Messages, Tool, ToolCall
from srtrl.tasks.rendering import apply_chat_template
from srtrl.types import SegmentKind

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Parts = list[tuple[str, SegmentKind]]
"""Texts and what they are, in order."""
MARK = "@@observation {}@@"
"""Stands for an observation while the chat template is asked what it puts around one."""
ANSWERS = ("an answer", "<think>\nreasons\n</think>\n\nan answer")
"""With which it is asked. Of these forms of a turn one must stay as it is when others follow it: templates of reasoning
models put an empty `<think>` into some."""
LENGTH_OF_END = 6


class MalformedCallError(ValueError):
    """A turn has something that was meant as a call and is none; the message is for the policy."""


class Format:
    """The format `text`, and the base of the others: no calls, and observations as they are."""

    stop_strings: ClassVar[tuple[str, ...]] = ()
    """What ends a turn, beside an end token."""
    reads_calls: ClassVar[bool] = False
    """Whether `parse` can find any."""
    describes_tools: ClassVar[bool] = False
    """Whether the chat template tells the policy of the tools."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", tools: Sequence[Tool]) -> None:
        self.tokenizer = tokenizer
        self.tools = tools

    def parse(self, text: str) -> list[ToolCall]:
        """The calls in a turn, of any name.

        Raises:
            MalformedCallError: there is something like a call that cannot be read.
        """
        return []

    def parts(self, observations: Sequence[str]) -> Parts:
        """What follows a turn, for the observations of its calls or a single one."""
        return [(observation, "observation") for observation in observations]

    def split(self, text: str) -> list[tuple[str, list[str]]]:
        """The turns of a worked solution, each with the observations after it: the inverse of `parts`.

        Raises:
            MalformedCallError: no rollout can look like this, or the format cannot tell.
        """
        return [(text, [])]

    def start(self, prompt_text: str, messages: Messages) -> str:
        """The prompt with the messages that an environment begins with."""
        return prompt_text + "".join(message["content"] for message in messages)


class CodeTags(Format):
    """ReTool (arXiv 2504.11536): `<code>...</code>` in the response; the output comes in `<interpreter>` tags.

    Everything is one message of the assistant: no chat template takes part. The code may be in a Markdown fence.
    """

    stop_strings = ("</code>",)
    reads_calls = True
    OUTPUT = re.compile(r"(?<=</code>)\s*<interpreter>\n?(.*?)\n?</interpreter>(?:\n|\Z)", re.DOTALL)
    FENCE = re.compile(r"\A\s*```(?:python|py)?[ \t]*\n(.*?)\n?[ \t]*```\s*\Z", re.DOTALL)

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", tools: Sequence[Tool]) -> None:
        super().__init__(tokenizer, tools)
        if len(tools) != 1:
            raise ValueError(
                f"rollout.environment.format: code_tags is for one tool, the environment has {len(tools)}: use hermes"
            )

    def parse(self, text: str) -> list[ToolCall]:
        """The text between the last `<code>` and the `</code>` that ended the turn."""
        before, closed, _ = text.rpartition("</code>")
        if not closed:
            if "<code>" in text:
                raise MalformedCallError("a <code> without </code>")
            return []
        _, opened, code = before.rpartition("<code>")
        if not opened:
            raise MalformedCallError("a </code> without <code>")
        fenced = self.FENCE.match(code)
        (tool,) = self.tools
        argument = next(iter(tool.parameters["properties"]))
        return [ToolCall(name=tool.name, arguments={argument: fenced.group(1) if fenced else code})]

    def parts(self, observations: Sequence[str]) -> Parts:
        """`<interpreter>` tags on lines of their own."""
        text = "\n".join(observations)
        return [("\n<interpreter>\n", "boundary"), (text, "observation"), ("\n</interpreter>\n", "boundary")]

    def split(self, text: str) -> list[tuple[str, list[str]]]:
        """Observations are what stands in `<interpreter>` tags after a `</code>`."""
        pieces = self.OUTPUT.split(text)
        turns, outputs = pieces[::2], pieces[1::2]
        for turn in turns:
            if "<interpreter>" in turn or "</interpreter>" in turn:
                raise MalformedCallError("<interpreter> tags that do not follow a </code>")
            if "</code>" in turn.removesuffix("</code>") or (turn is turns[-1] and turn.endswith("</code>")):
                raise MalformedCallError("a </code> without <interpreter> tags after it")
        return [*((turn, [output]) for turn, output in zip(turns, outputs, strict=False)), (turns[-1], [])]


class Chat(Format):
    """Observations are messages of the user; the tokenizer's chat template puts them into the context."""

    role: ClassVar[str] = "user"

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", tools: Sequence[Tool]) -> None:
        """Find out what the template puts between two turns.

        Raises:
            ValueError: there is no template, or it rewrites what was said before.
        """
        super().__init__(tokenizer, tools)
        self.parts(["an observation"])

    def parts(self, observations: Sequence[str]) -> Parts:
        """The template's text around each observation: `boundary`."""
        text = self._between([{"role": self.role, "content": MARK.format(i)} for i in range(len(observations))])
        parts: Parts = []
        for index, observation in enumerate(observations):
            before, found, text = text.partition(MARK.format(index))
            if not found:
                raise ValueError("rollout.environment.format: the chat template leaves out messages of tools")
            parts += [(before, "boundary"), (observation, "observation")]
        return [*parts, (text, "boundary")]

    def start(self, prompt_text: str, messages: Messages) -> str:
        """The messages go before the start of the policy's turn, which the prompt ends with."""
        new = self._render([{"role": "user", "content": MARK}, *messages], add_generation_prompt=True)
        old = self._render([{"role": "user", "content": MARK}], add_generation_prompt=True)
        start = self._render([{"role": "user", "content": MARK}])
        opening = old.removeprefix(start)
        if not (new.startswith(start) and old.startswith(start) and prompt_text.endswith(opening)):
            raise ValueError(
                f"rollout.environment: the chat template of {self.tokenizer.name_or_path} cannot put the messages that "
                "the environment begins with after the prompt: put them into the prompt (task.options)"
            )
        return prompt_text.removesuffix(opening) + new.removeprefix(start)

    def _between(self, messages: list[Mapping[str, str]]) -> str:
        """What the template puts after the text of a turn that has just ended: messages, and the start of the next."""
        found = set()
        for answer in ANSWERS:
            said = [{"role": "user", "content": "q"}, {"role": "assistant", "content": answer}]
            history, longer = self._render(said), self._render([*said, *messages], add_generation_prompt=True)
            before, end_of_answer, end = history.rpartition(answer[-LENGTH_OF_END:])
            if longer.startswith(history):
                text = longer[len(before) + len(end_of_answer) :]
                # The end token was sampled: it is not put there again.
                found.add(text.removeprefix(next(filter(end.startswith, self.tokenizer.all_special_tokens), "")))
        if len(found) != 1:
            raise ValueError(
                f"rollout.environment.format: the chat template of {self.tokenizer.name_or_path} changes earlier "
                "messages when others follow, so that a sample cannot go on from the tokens that were sampled: use "
                "another format, or another template"
            )
        return found.pop()

    def _render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = False) -> str:
        (text,) = apply_chat_template(
            self.tokenizer, [[dict(message) for message in messages]], {}, add_generation_prompt=add_generation_prompt
        )
        return text


class Hermes(Chat):
    """The tool calls of Qwen2.5, Qwen3 and Hermes: JSON in `<tool_call>` tags; answers are messages of the role `tool`.

    The chat template also puts the tools into the prompt.
    """

    role = "tool"
    reads_calls = describes_tools = True
    CALL = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)

    def split(self, text: str) -> list[tuple[str, list[str]]]:
        """A single turn: what follows a call is not part of a text, but depends on the chat template."""
        if "<tool_call>" in text:
            raise MalformedCallError("a warm start on tool calls needs the format code_tags; hermes is not supported")
        return super().split(text)

    def parse(self, text: str) -> list[ToolCall]:
        """Every `<tool_call>` of the turn."""
        calls = []
        for match in self.CALL.finditer(text):
            content, end = match.groups()
            if not end:
                raise MalformedCallError("a <tool_call> without </tool_call>")
            try:
                call = json.loads(content)
            except (ValueError, RecursionError) as error:
                raise MalformedCallError(f"no JSON in <tool_call>: {error}") from error
            if not (isinstance(call, dict) and isinstance(call.get("name"), str)):
                raise MalformedCallError('expected {"name": ..., "arguments": {...}} in <tool_call>')
            arguments = call.get("arguments", {})
            if not isinstance(arguments, dict):
                raise MalformedCallError(f"the arguments of {call['name']} are no JSON object")
            calls.append(ToolCall(name=call["name"], arguments=arguments))
        return calls


FORMATS: Mapping[str, type[Format]] = {"text": Format, "chat": Chat, "code_tags": CodeTags, "hermes": Hermes}


def tool_schemas(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """The tools as chat templates read them."""
    return [
        {
            "type": "function",
            "function": {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)},
        }
        for tool in tools
    ]


def check_call(tools: Sequence[Tool], call: ToolCall) -> tuple[str, str] | None:
    """What is wrong with a call: `unknown_tool` or `malformed`, and a message for the policy. None: nothing."""
    tool = next((tool for tool in tools if tool.name == call.name), None)
    if tool is None:
        return "unknown_tool", f"there is no tool {call.name:.40}; there is: {', '.join(one.name for one in tools)}"
    properties = tool.parameters.get("properties", {})
    for name in tool.parameters.get("required", properties):
        if name not in call.arguments:
            return "malformed", f"the call of {tool.name} lacks the argument {name}"
        if properties.get(name, {}).get("type") == "string" and not isinstance(call.arguments[name], str):
            return "malformed", f"the argument {name} of {tool.name} must be a string"
    return None
