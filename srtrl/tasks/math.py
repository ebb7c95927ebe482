r"""Mathematical problems from files or the hub: GSM8K, MATH, DAPO-Math, AIME and the like, graded by math-verify.

In a recipe, for the rows of GSM8K, whose answer stands at the end of the worked solution:

    task:
      name: math
      options:
        train: {files: [gsm8k_train.jsonl]}
        eval: {hub: openai/gsm8k, config: main, split: test}
        problem_field: question
        answer_pattern: "#### (.+)"
        solution_field: answer
        prompt_template: "Question: {problem}\nAnswer:"
"""

import logging
import re
from collections.abc import Mapping
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pydantic import model_validator

from srtrl.tasks.choices import choice_letter, is_chosen, read_choices, render_choices
from srtrl.tasks.final_answer import BRACE, last_boxed, with_thoughts_read
from srtrl.tasks.math_verifier import is_correct
from srtrl.tasks.row_task import RowOptions, RowTask, text_of
from srtrl.tasks.rows import RowError, get_field
from srtrl.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from srtrl.tasks.base import Verifier
    from srtrl.tasks.rows import RowSource

logger = logging.getLogger(__name__)

_ABSENT = r"not (?:found|available|provided|given|known)|n/?a|nan|null|missing|tbd|to be (?:shown|proved|proven)"
NO_ANSWER = re.compile(
    r"(?i)(?:\\(?:text|mathrm|mbox)\{|[\s$.?!…_-])*"
    rf"(?:(?:see |the |a )?(?:proof|solution)|no answer|{_ABSENT})?[\s$.?!…_}}-]*"
)
"""References that stand for none: `proof`, `not found`, `?`, `\\text{}`."""


class MathOptions(RowOptions):
    """The rows of the problems, their fields, and the template of a prompt."""

    placeholder: ClassVar[str] = "{problem}"
    text_option: ClassVar[str] = "problem_field"

    problem_field: str = "problem"
    """Field of the problem's text, or of a list of messages `{role: ..., content: ...}`; `a.b` is the field `b` inside
    the field `a`."""
    answer_field: str = "answer"
    """Field of the reference answer, or of a text that contains it (`answer_pattern`); a list is one set of answers."""
    answer_pattern: str | None = None
    """Regular expression with one group: its last match in the answer field is the answer (GSM8K: `#### (.+)`)."""
    answer_boxed: bool = False
    r"""The answer is the content of the last `\boxed{...}` in the answer field (rows of MATH have a solution only)."""
    choices_field: str | None = None
    """Multiple choice: field of the list of choices, which are put below the problem as `A. ...`. The answer is a
    letter, or an index from 0 that becomes a letter; where the choices have labels (a field `label` beside them, or
    `A)` at their begin), it is a label."""
    answer_in_thought: bool = False
    """Look for a completion's answer in its thought, too; by default only after `</think>`."""
    solution_field: str = "solution"
    """Field of the worked solution, the target of a warm start; not needed for anything else."""
    prompt_template: str = "{problem}"
    """Text of the prompt; `{problem}` is replaced by the problem (of messages: by the text of the last one), and other
    braces stay as they are. Without `{problem}` each name in braces is a field of the row: `{context}`. By default the
    problem alone, without a word on the form of the answer."""

    @model_validator(mode="after")
    def check_answer_options(self) -> Self:
        """Refuse several ways to find the answer."""
        given = [name for name in ("choices_field", "answer_pattern", "answer_boxed") if getattr(self, name)]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are different ways to find the answer: choose one")
        if self.answer_pattern is not None:
            _check_pattern(self.answer_pattern)
        return self

    def text_and_answer(self, fields: Mapping[str, Any], text: str) -> tuple[str, str]:
        """The problem with its choices, and the reference answer; `RowError` without one."""
        answer = _answer_text(fields, self.answer_field)
        if self.choices_field is not None:
            choices, labels = read_choices(fields, self.choices_field)
            text = render_choices(text, choices)
            answer = choice_letter(answer, len(choices), labels, self.answer_field)
        elif self.answer_pattern is not None:
            matches = re.findall(self.answer_pattern, answer)
            if not matches or not matches[-1].strip():
                raise RowError(f"no answer: `{self.answer_field}` has no match of {self.answer_pattern!r}")
            answer = matches[-1]
        elif self.answer_boxed:
            boxed = last_boxed(answer)
            if boxed is None:
                raise RowError(f"no answer: `{self.answer_field}` has no complete \\boxed{{...}}")
            answer = boxed
        return text, answer.strip()


class Task(RowTask[MathOptions]):
    """Prompts of the mathematics task; see the options."""

    Options = MathOptions

    def _load(
        self, split: str, source: "RowSource | None", tokenizer: "PreTrainedTokenizerBase", max_prompt_tokens: int
    ) -> list[Prompt]:
        """As of all rows; references that no response earns are named, and refused where there are no others."""
        prompts = super()._load(split, source, tokenizer, max_prompt_tokens)
        if self._options.choices_field is None and (lost := [prompt for prompt in prompts if _is_lost(prompt.answer)]):
            message = f"{len(lost)} of the {len(prompts)} reference answers are cut off or stand for none: no response"
            message += f" earns them; the first: {lost[0].answer!r:.80} of {lost[0].prompt_id}"
            if len(lost) == len(prompts):
                raise ValueError(f"task.options.{split}: {message} (see task.options.answer_field)")
            logger.warning("task.options.%s: %s", split, message)
        return prompts

    @cached_property
    def verifier(self) -> "Verifier":
        """The judge of all completions: math-verify, or a comparison of letters for multiple choice."""
        judge = is_correct if self._options.choices_field is None else is_chosen
        return with_thoughts(judge) if self._options.answer_in_thought else judge

    def solution(self, prompt: Prompt) -> str:
        """The worked solution in a problem's row; ValueError if it has none."""
        try:
            return text_of(prompt.metadata, self._options.solution_field)
        except RowError as error:
            raise ValueError(
                f"{prompt.prompt_id} has no solution: {error} (see task.options.solution_field)"
            ) from error


def with_thoughts(verifier: Any) -> Any:
    """The same verifier, and its `extract`, for completions whose answer may be inside a thought."""
    judge: Any = partial(with_thoughts_read, verifier)
    judge.isolated = getattr(verifier, "isolated", False)
    judge.extract = partial(with_thoughts_read, verifier.extract)
    return judge


def _is_lost(answer: str) -> bool:
    """Whether a reference stands for no answer, or is cut off inside a brace."""
    depth = sum({"{": 1, "}": -1}.get(brace, 0) for brace in BRACE.findall(answer))
    return depth > 0 or (len(answer) <= 99 and NO_ANSWER.fullmatch(answer) is not None)


def _check_pattern(pattern: str) -> None:
    try:
        num_groups = re.compile(pattern).groups
    except re.error as error:
        raise ValueError(f"answer_pattern {pattern!r} is no regular expression: {error}") from error
    if num_groups != 1:
        raise ValueError(f"answer_pattern {pattern!r} must have exactly one group, it has {num_groups}")


def _answer_text(fields: Mapping[str, Any], name: str) -> str:
    """As `text_of`; the texts of a list (OlympiadBench's `final_answer`) stand side by side, as one set of answers."""
    value = get_field(fields, name)
    if isinstance(value, list) and value:
        return ", ".join(text_of({name: item}, name) for item in value)
    return text_of(fields, name)
