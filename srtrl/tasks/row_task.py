"""The base of tasks of rows: from the rows of files or the hub to prompts, by templates.

A task adds a class of options that names the fields of the text and the answer: see `math.py` and `prompts.py`.
"""

import json
import logging
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import isfinite
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, Self, TypeVar

from pydantic import Field, model_validator

from srtrl.recipe.schema import Section
from srtrl.tasks.base import TaskBase
from srtrl.tasks.rendering import SURROGATE, Message, apply_chat_template, tokenise
from srtrl.tasks.rows import Row, RowError, RowSource, check_source, get_field, read_rows
from srtrl.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

COMMON_FIELDS = ("problem", "question", "prompt", "instruction", "messages")
"""Names that data sets give the field of the text."""
OTHER_MEDIA = ("images", "image", "videos")
"""Fields of what a policy of texts cannot see."""
FIELD = re.compile(r"(?<![\w\\])\{([A-Za-z_][\w.]*)\}")
"""A field in a template; `\\boxed{answer}` is none."""
MESSAGES_AS_TEXT = re.compile(r'\s*\[\s*\{\s*"(?:role|content)"\s*:')


class RowOptions(Section):
    """The rows, and the template of a prompt."""

    placeholder: ClassVar[str]
    """The part of `prompt_template` that is replaced by the text of the row."""
    text_option: ClassVar[str]
    """Option that names the field of the text, or of the messages."""

    train: RowSource | None = None
    """Rows to train on."""
    eval: RowSource | None = None
    """Held-out rows."""
    id_field: str | None = None
    """Field of a unique name for each row; by default its file and line."""
    prompt_template: str
    chat_template: bool = False
    """Wrap a text as a user's message in the tokenizer's chat template; a list of messages always goes through it."""
    chat_template_options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of that template, such as `enable_thinking: false`."""
    system_prompt: str | None = None
    """System message of the chat template; messages that begin with one of their own keep it."""
    malformed_rows: Literal["stop", "skip"] = "stop"
    """For a row that is not JSON or lacks a field: stop, or skip it; skipped rows are counted and logged."""

    @model_validator(mode="after")
    def check_source_and_templates(self) -> Self:
        """Refuse options that contradict each other."""
        if self.train is None and self.eval is None:
            raise ValueError("name the prompts: `train`, `eval` or both, as {files: [...]} or {hub: ..., split: ...}")
        if not (self.has_placeholder or FIELD.search(self.prompt_template)):
            expected = f"must contain {self.placeholder}, or fields of the row such as {{question}}"
            raise ValueError(f"prompt_template {expected}, found {self.prompt_template!r}")
        return self

    @property
    def has_placeholder(self) -> bool:
        """Whether the template is put around a text; otherwise it is filled with fields of the row."""
        return self.placeholder in self.prompt_template

    def check_use(self, has_messages: bool) -> None:
        """Refuse options of the chat template (but the tools, which an environment adds) if none is applied."""
        arguments = self.chat_template_options.keys() - {"tools"}
        if not has_messages and (self.system_prompt or arguments):
            name = "system_prompt" if self.system_prompt else "chat_template_options"
            raise ValueError(f"task.options.{name}: needs chat_template: true, or prompts that are lists of messages")

    def text_and_answer(self, fields: Mapping[str, Any], text: str) -> tuple[str, ...]:
        """The replacement of the placeholder for the row's `text`, and the reference answer; `RowError` without one.

        Further items are other answers, each as right as the first.
        """
        raise NotImplementedError


OptionsT = TypeVar("OptionsT", bound=RowOptions)


class RowTask(TaskBase, Generic[OptionsT]):
    """Prompts from rows; see the options. A subclass adds `Options` and `verifier`."""

    def __init__(self, options: OptionsT, *, tokenizer: "PreTrainedTokenizerBase", max_prompt_tokens: int) -> None:
        self._options = options
        self.load_report: dict[str, int] = {}
        self.train_prompts: Sequence[Prompt] = self._load("train", options.train, tokenizer, max_prompt_tokens)
        self.eval_prompts: Sequence[Prompt] = self._load("eval", options.eval, tokenizer, max_prompt_tokens)

    @classmethod
    def check_options(cls, options: OptionsT) -> None:
        """Raise ValueError if a file is missing or has no row with such fields; the hub is not read."""
        for split, source in (("train", options.train), ("eval", options.eval)):
            if source is not None and source.hub is None:
                check_source(source, f"task.options.{split}")
                for name in source.files:
                    _, messages = next(read_prompts(options, RowSource(files=[name]), split, Counter()))
                    options.check_use(has_messages=messages is not None)

    @classmethod
    def needs_network(cls, options: OptionsT) -> bool:
        """Whether rows come from the hub."""
        return any(source is not None and source.hub is not None for source in (options.train, options.eval))

    @classmethod
    def typed_prompt(cls, options: OptionsT, prompt: str | list[Message]) -> tuple[str, list[Message] | None]:
        """A text that is not of a row, or messages, in the templates of the options."""
        if isinstance(prompt, str):
            return _fill_template(options, prompt, None)
        return _fill_template(options, prompt[-1]["content"], prompt)

    def _load(
        self, split: str, source: RowSource | None, tokenizer: "PreTrainedTokenizerBase", max_prompt_tokens: int
    ) -> list[Prompt]:
        """Read, render and tokenise the rows of a split; none if the options name none."""
        if source is None:
            return []
        options = self._options
        counts: Counter[str] = Counter(rows=0, malformed=0, overlong=0)
        rows = list(read_prompts(options, source, split, counts))
        prompts = [prompt for prompt, _ in rows]
        conversations = [messages for _, messages in rows if messages is not None]
        options.check_use(has_messages=bool(conversations))
        if conversations:
            if len(conversations) < len(rows):
                message = "some rows hold messages, others a text; set chat_template: true to make messages of all"
                raise ValueError(f"task.options.{split}: {message}")
            try:
                texts = apply_chat_template(tokenizer, conversations, options.chat_template_options)
            except ValueError as error:
                raise ValueError(f"task.options.chat_template (or a list of messages): {error}") from error
            prompts = [replace(prompt, text=text) for prompt, text in zip(prompts, texts, strict=True)]
        # No token has more characters than the longest of the vocabulary: a text that cannot fit is not even tokenised.
        max_characters = max_prompt_tokens * max(map(len, tokenizer.get_vocab()))
        short = [prompt for prompt in prompts if len(prompt.text) <= max_characters]
        tokenised = tokenise(tokenizer, short, add_special_tokens=not conversations)
        fitting = [prompt for prompt in tokenised if len(prompt.token_ids) <= max_prompt_tokens]
        counts["overlong"] = len(prompts) - len(fitting)
        if num_without := sum(not prompt.answer for prompt in fitting):
            counts["without_answer"] = num_without
        self.load_report |= {f"{split}/{name}": count for name, count in counts.items()}
        if counts["overlong"]:
            kept = {prompt.prompt_id for prompt in fitting}
            first = next(prompt.prompt_id for prompt in prompts if prompt.prompt_id not in kept)
            limit = f"rollout.max_prompt_tokens ({max_prompt_tokens})"
            message = f"{counts['overlong']} of {len(prompts)} prompts are longer than {limit}; the first is {first}"
            if not fitting:
                raise ValueError(f"task.options.{split}: {message}")
            logger.warning("task.options.%s: dropped: %s", split, message)
        return fitting


# --- From rows to prompts ---------------------------------------------------------------------------------------------


def read_prompts(
    options: RowOptions, source: RowSource, split: str, counts: Counter[str]
) -> Iterator[tuple[Prompt, list[Message] | None]]:
    """The well-formed rows of a source in order, each as a prompt without tokens and its messages.

    A prompt for the chat template has messages, and `text` is that of the last one. `counts` takes the numbers of
    rows and of malformed ones.
    """
    prompt_ids: set[str] = set()
    first_reason, has_tools = "", False
    for row in read_rows(source):
        counts["rows"] += 1
        has_tools = has_tools or bool(isinstance(row.fields, Mapping) and row.fields.get("tools"))
        try:
            prompt, messages = _prompt_of(options, row)
            if prompt.prompt_id in prompt_ids:
                raise RowError(f"an earlier row has the same `{options.id_field}`, {prompt.prompt_id}")
        except RowError as error:
            if options.malformed_rows == "stop":
                skip = "(or set task.options.malformed_rows: skip)"
                raise ValueError(f"{row.place}: {error}{_option_to_set(options, row, error)} {skip}") from error
            counts["malformed"] += 1
            first_reason = first_reason or f"{row.place}: {error}"
        else:
            prompt_ids.add(prompt.prompt_id)
            yield prompt, messages
    place = f"task.options.{split}: {source.hub or ', '.join(source.files)}"
    num_rows, num_malformed = counts["rows"], counts["malformed"]
    if num_rows == 0:
        raise ValueError(f"{place}: there are no rows")
    if not prompt_ids:
        raise ValueError(f"{place}: none of the {num_rows} rows can be used; the first: {first_reason}")
    if has_tools:
        logger.warning("%s: the field `tools` of its rows is not used: tools are rollout.environment's", place)
    if num_malformed:
        logger.warning("%s: skipped %d of %d rows; the first: %s", place, num_malformed, num_rows, first_reason)


def _option_to_set(options: RowOptions, row: Row, error: RowError) -> str:
    """Advice to set the option that names a field which the row lacks, with a likely field; empty for other errors."""
    fields = {} if isinstance(row.fields, RowError) else row.fields
    for option in type(options).model_fields:
        if option.endswith("_field") and str(error).startswith(f"no field `{getattr(options, option)}`"):
            likely = [name for name in COMMON_FIELDS if option == options.text_option and name in fields]
            return f": set task.options.{option}{f': {likely[-1]}' if likely else ' to one of them'}"
    return ""


def _prompt_of(options: RowOptions, row: Row) -> tuple[Prompt, list[Message] | None]:
    """The prompt that a row holds, and its messages if it has any; `RowError` if it holds none."""
    if isinstance(row.fields, RowError):
        raise row.fields
    fields, messages = row.fields, None
    if media := next((name for name in OTHER_MEDIA if fields.get(name)), None):
        reason = "a policy reads texts alone: leave such rows out, or the field where it is not needed"
        raise RowError(f"field `{media}` holds something, and {reason}")
    if options.has_placeholder:
        name = getattr(options, options.text_option)
        value = get_field(fields, name)
        if isinstance(value, str) and MESSAGES_AS_TEXT.match(value):
            value = _messages_in(value, name)
        messages = check_messages(value, name) if isinstance(value, list) else None
        text = text_of(fields, name) if messages is None else messages[-1]["content"]
    else:
        text = FIELD.sub(lambda match: _shown(fields, match[1]), options.prompt_template)
    text, answer, *others = options.text_and_answer(fields, text)
    text, messages = _fill_template(options, text, messages)
    prompt_id = row.name if options.id_field is None else text_of(fields, options.id_field)
    answers: dict[str, Any] = {"answer": answer, "other_answers": tuple(others)}
    return Prompt(prompt_id=prompt_id, text=text, token_ids=(), metadata=fields, **answers), messages


def _fill_template(options: RowOptions, text: str, messages: list[Message] | None) -> tuple[str, list[Message] | None]:
    """`text` in the templates of the options; `messages` are those that end with it, if it is of a conversation."""
    if options.has_placeholder:
        text = options.prompt_template.replace(options.placeholder, text)
    if messages is not None:
        messages = [*messages[:-1], {**messages[-1], "content": text}]
    elif options.chat_template:
        messages = [{"role": "user", "content": text}]
    if messages is not None and options.system_prompt is not None and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": options.system_prompt}, *messages]
    return text, messages


def check_messages(values: Sequence[Any], name: str) -> list[Message]:
    """The messages of a conversation; `RowError` unless each has a role and a text, and the user's is the last."""
    if not values:
        raise RowError(f"field `{name}` is an empty list; expected messages, the user's last")
    messages = []
    for index, message in enumerate(values):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RowError(f'{name}.{index}: expected {{"role": ..., "content": ...}}, found {message!r:.80}')
        place = f"{name}.{index}.content"
        messages.append({**message, "content": text_of({place: message.get("content")}, place)})
    if (role := messages[-1]["role"]) != "user":
        raise RowError(f"the last message of `{name}` must be the user's, it is of the role {role}")
    return messages


def _messages_in(text: str, name: str) -> Any:
    """The messages of a text in JSON, as a column of Parquet may have them."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RowError(f"field `{name}` begins as messages in JSON, but it is not JSON: {error}") from error


def _shown(fields: Mapping[str, Any], name: str) -> str:
    """A field in a template: as `text_of`, and a list as JSON (Countdown's `nums`: `[3, 25, 8]`)."""
    value = get_field(fields, name)
    return json.dumps(value, ensure_ascii=False) if isinstance(value, list) else text_of(fields, name)


def text_of(fields: Mapping[str, Any], name: str) -> str:
    """The field as a text, numbers included (AIME's answers are integers); `RowError` if it is empty or no text."""
    value = get_field(fields, name)
    if (isinstance(value, int) and not isinstance(value, bool)) or (isinstance(value, float) and isfinite(value)):
        return str(value)
    if not isinstance(value, str):
        raise RowError(f"field `{name}` must be a text or a number, it is {type(value).__name__}")
    if not value.strip():
        raise RowError(f"field `{name}` is empty")
    if SURROGATE.search(value):
        raise RowError(f"field `{name}` is no valid Unicode: it has half of a surrogate pair")
    return value
