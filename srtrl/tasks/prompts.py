"""Prompts without reference answers, texts or messages: nothing is correct or incorrect, and rewards alone judge.

In a recipe, for rows such as `{"prompt": "Write a haiku about rain."}`:

    task:
      name: prompts
      options:
        train: {files: [prompts.jsonl]}
        chat_template: true
    rewards: [{name: my_package.my_module:my_reward}]
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from srtrl.tasks.row_task import RowOptions, RowTask, text_of

if TYPE_CHECKING:
    pass


class PromptsOptions(RowOptions):
    """The rows of the prompts and their fields; rewards find all fields of a row in `Prompt.metadata`."""

    placeholder: ClassVar[str] = "{prompt}"
    text_option: ClassVar[str] = "prompt_field"

    prompt_field: str = "prompt"
    """Field of the text, or of a list of messages `{role: ..., content: ...}`; `a.b` is the field `b` inside `a`."""
    answer_field: str | None = None
    """Field that becomes `Prompt.answer`, for rewards that compare with it; by default that is empty."""
    prompt_template: str = "{prompt}"
    """Text of the prompt; `{prompt}` is replaced by the row's text (of messages: the text of the last one), and other
    braces stay as they are."""

    def text_and_answer(self, fields: Mapping[str, Any], text: str) -> tuple[str, str]:
        """The text as it is, and the content of `answer_field`."""
        return text, "" if self.answer_field is None else text_of(fields, self.answer_field)


class Task(RowTask[PromptsOptions]):
    """Prompts that only rewards judge; see the options."""

    Options = PromptsOptions
    verifier = None
