"""The formats of tool calls and of observations in the context.

Each format is a small class: `parse` finds the calls in a turn, `parts` gives the text that follows the turn. Only new
text is tokenised; sampled tokens stay as they were sampled.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, ClassVar

from srtrl.environments.base import Messages, Tool, ToolCall, resolve_environment
from srtrl.recipe.schema import EnvironmentSection
from srtrl.resolve import resolve_class, suggestion
from srtrl.tasks.rendering import apply_chat_template
from srtrl.types import SegmentKind

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Parts = list[tuple[str, SegmentKind]]
"""Texts and their kinds, in order."""
MARK = "@@observation {}@@"
"""Placeholder of an observation, to see the text that the chat template puts around it."""
ANSWERS = ("an answer", "<think>\nreasons\n</think>\n\nan answer")
"""Forms of a turn. The template must leave the last one unchanged when messages follow; into the first one templates of
reasoning models may put an empty `<think>`."""
END_CHARACTERS = 6
"""Characters at the end of an answer by which it is found in the template's text."""


class MalformedCallError(ValueError):
    """A turn has a call that cannot be read; the message is for the policy."""


class Format:
    """The format `text`, and the base of the others: no calls, and observations as they are."""

    stop_strings: ClassVar[tuple[str, ...]] = ()
    """Strings that end a turn, as an end token does."""
    reads_calls: ClassVar[bool] = False
    """Whether `parse` can find calls."""
    describes_tools: ClassVar[bool] = False
    """Whether the chat template puts the tools into the prompt."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", tools: Sequence[Tool]) -> None:
        self.tokenizer = tokenizer
        self.tools = tools

    def parse(self, text: str) -> list[ToolCall]:
        """The calls in a turn, of any name.

        Raises:
            MalformedCallError: a call cannot be read.
        """
        return []

    def parts(self, observations: Sequence[str]) -> Parts:
        """The text after a turn, for the observations of its calls or a single one."""
        return [(observation, "observation") for observation in observations]

    def split_solution(self, text: str) -> list[tuple[str, list[str]]]:
        """The turns of a worked solution, each with the observations after it: the inverse of `parts`.

        Raises:
            MalformedCallError: no rollout can look like this, or the format cannot find out.
        """
        return [(text, [])]

    def add_messages(self, prompt_text: str, messages: Messages) -> str:
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

    def split_solution(self, text: str) -> list[tuple[str, list[str]]]:
        """Observations are the texts in `<interpreter>` tags after a `</code>`."""
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
        """Try the template once.

        Raises:
            ValueError: there is no template, or it rewrites earlier turns.
        """
        super().__init__(tokenizer, tools)
        self.parts(["an observation"])

    def parts(self, observations: Sequence[str]) -> Parts:
        """The template's text around each observation: `boundary`."""
        text = self._between([{"role": self.role, "content": MARK.format(i)} for i in range(len(observations))])
        parts: Parts = []
        for index, observation in enumerate(observations):
            before, mark, text = text.partition(MARK.format(index))
            if not mark:
                raise ValueError("rollout.environment.format: the chat template leaves out messages of tools")
            parts += [(before, "boundary"), (observation, "observation")]
        return [*parts, (text, "boundary")]

    def add_messages(self, prompt_text: str, messages: Messages) -> str:
        """The messages go before the opening of the policy's turn, with which the prompt ends."""
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
        """The template's text after a turn that has just ended: the messages, and the opening of the next turn."""
        texts = set()
        for answer in ANSWERS:
            turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": answer}]
            history, longer = self._render(turns), self._render([*turns, *messages], add_generation_prompt=True)
            before, end_of_answer, end = history.rpartition(answer[-END_CHARACTERS:])
            if longer.startswith(history):
                text = longer[len(before) + len(end_of_answer) :]
                # The end token was sampled: it is not put there again.
                texts.add(text.removeprefix(next(filter(end.startswith, self.tokenizer.all_special_tokens), "")))
        drops_thoughts = "an answer" in longer and "reasons" not in longer  # of the last form
        if drops_thoughts or not longer.startswith(history) or len(texts) != 1:
            what = "drops thoughts (`<think>...</think>`) of" if drops_thoughts else "changes"
            raise ValueError(
                f"rollout.environment.format: the chat template of {self.tokenizer.name_or_path} {what} earlier "
                "messages when others follow, so that a sample cannot continue from the tokens that were sampled: use "
                "another format, or a template (model.tokenizer) that keeps them"
            )
        return texts.pop()

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

    def split_solution(self, text: str) -> list[tuple[str, list[str]]]:
        """A single turn: the text after a call is not in the solution; it depends on the chat template."""
        if "<tool_call>" in text:
            raise MalformedCallError("a warm start on tool calls needs the format code_tags; hermes is not supported")
        return super().split_solution(text)

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
    return [{"type": "function", "function": asdict(tool)} for tool in tools]


def check_call(tools: Sequence[Tool], call: ToolCall) -> tuple[str, str] | None:
    """The problem of a call: `unknown_tool` or `malformed`, and a message for the policy; None for a valid call."""
    tool = next((tool for tool in tools if tool.name == call.name), None)
    if tool is None:
        return "unknown_tool", f"there is no tool {call.name:.40}; there is: {', '.join(tool.name for tool in tools)}"
    properties = tool.parameters.get("properties", {})
    for name in tool.parameters.get("required", properties):
        if name not in call.arguments:
            return "malformed", f"the call of {tool.name} lacks the argument {name}"
        if properties.get(name, {}).get("type") == "string" and not isinstance(call.arguments[name], str):
            return "malformed", f"the argument {name} of {tool.name} must be a string"
    return None


def resolve_format(section: EnvironmentSection) -> type[Format]:
    """The class of the recipe's format.

    Raises:
        ValueError: the name is unknown or not a format's, or the environment has tools and the format reads no calls.
    """
    key, name = "rollout.environment.format", section.format
    if ":" not in name and name not in FORMATS:
        known = f"known: {', '.join(FORMATS)}; or one of your own as package.module:Class"
        raise ValueError(f"{key}: `{name}` is unknown{suggestion(name, FORMATS) or ';'} {known}")
    format_class: Any = resolve_class("srtrl.environments", name, "Format") if ":" in name else FORMATS[name]
    if not (isinstance(format_class, type) and issubclass(format_class, Format)):
        raise ValueError(f"{key}: `{name}` is no subclass of srtrl.environments.formats:Format")
    if resolve_environment(section)[0].tools and not format_class.reads_calls:
        raise ValueError(
            f"{key}: `{name}` finds no calls, and the environment {section.name} has tools: "
            "expected code_tags or hermes"
        )
    return format_class
