"""Prompts without a verifier, texts or messages: nothing is correct or incorrect, and rewards alone judge.

In a recipe, for rows such as `{"prompt": "Write a haiku about rain."}`:

    task:
      name: prompts
      options:
        train: {files: [prompts.jsonl]}
        chat_template: true
    rewards: [{name: my_package.my_module:my_reward}]
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from srtrl.tasks.row_task import RowOptions, RowTask, text_of
from srtrl.tasks.rows import RowError, get_field


class PromptsOptions(RowOptions):
    """The rows of the prompts and their fields; rewards find all fields of a row in `Prompt.metadata`."""

    placeholder: ClassVar[str] = "{prompt}"
    text_option: ClassVar[str] = "prompt_field"

    prompt_field: str = "prompt"
    """Field of the text, or of a list of messages `{role: ..., content: ...}`; `a.b` is the field `b` inside `a`."""
    answer_field: str | None = None
    """Field that becomes `Prompt.answer`, for rewards that compare with it; by default `answer`, where a row has a text
    or a number there. Of a list of answers any is right: `Prompt.answer` is the first, `Prompt.answers` are all."""
    prompt_template: str = "{prompt}"
    """Text of the prompt; `{prompt}` is replaced by the row's text (of messages: the text of the last one), and other
    braces stay as they are. Without `{prompt}` each name in braces is a field of the row: `{nums}`."""

    def text_and_answer(self, fields: Mapping[str, Any], text: str) -> tuple[str, ...]:
        """The text as it is, and the content of `answer_field`: of a list all items."""
        name = self.answer_field or "answer"
        try:
            value = get_field(fields, name)
            items = value if isinstance(value, list) and value else [value]
            return text, *(text_of({name: item}, name) for item in items)
        except RowError:
            if self.answer_field is not None:
                raise
            return text, ""


class Task(RowTask[PromptsOptions]):
    """Prompts that only rewards judge; see the options."""

    Options = PromptsOptions
    verifier = None
