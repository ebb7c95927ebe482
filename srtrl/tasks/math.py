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
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import isfinite
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, model_validator

from srtrl.recipe import Section
from srtrl.recipe_file import SURROGATE
from srtrl.tasks.choices import choice_letter, is_chosen, render_choices
from srtrl.tasks.final_answer import last_boxed
from srtrl.tasks.math_verifier import is_correct
from srtrl.tasks.prompts import tokenise
from srtrl.tasks.rows import Row, RowError, RowSource, check_source, get_field, read_rows
from srtrl.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from srtrl.tasks.base import Verifier

logger = logging.getLogger(__name__)


class MathOptions(Section):
    """Where the problems are, which fields to use, and how a problem becomes a prompt."""

    train: RowSource | None = None
    """Problems to train on."""
    eval: RowSource | None = None
    """Held-out problems."""
    problem_field: str = "problem"
    """Field of the problem's text; `a.b` is the field `b` inside the field `a`."""
    answer_field: str = "answer"
    """Field of the reference answer, or of a text that contains it (`answer_pattern`); a list is one set of answers."""
    answer_pattern: str | None = None
    """Regular expression with one group: its last match in the answer field is the answer (GSM8K: `#### (.+)`)."""
    answer_boxed: bool = False
    r"""The answer is what the last `\boxed{...}` in the answer field holds (rows of MATH have a solution only)."""
    choices_field: str | None = None
    """Multiple choice: field of the list of choices, which are put below the problem as `A. ...`. The answer is a
    letter, or an index from 0 that becomes a letter."""
    solution_field: str = "solution"
    """Field of the worked solution, the target of a warm start; not needed for anything else."""
    id_field: str | None = None
    """Field of a unique name for each row; by default its file and line."""
    prompt_template: str = "{problem}\nPlease reason step by step, and put your final answer within \\boxed{}.\n"
    """Text of the prompt; `{problem}` is replaced by the problem, and other braces stay as they are."""
    chat_template: bool = False
    """Wrap the text as a user's message in the tokenizer's chat template."""
    chat_template_options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of that template, such as `enable_thinking: false`."""
    system_prompt: str | None = None
    """System message of the chat template."""
    overlong_prompts: Literal["drop", "error"] = "drop"
    """What happens to a prompt longer than `rollout.max_prompt_tokens`; dropped ones are counted and logged."""
    malformed_rows: Literal["stop", "skip"] = "stop"
    """What happens to a row that is not JSON or lacks a field; skipped ones are counted and logged."""

    @model_validator(mode="after")
    def check_combinations(self) -> Self:
        """Refuse options that contradict each other."""
        if self.train is None and self.eval is None:
            raise ValueError("name the problems: `train`, `eval` or both, as {files: [...]} or {hub: ..., split: ...}")
        if "{problem}" not in self.prompt_template:
            raise ValueError(f"prompt_template must contain {{problem}}, found {self.prompt_template!r}")
        for name in ("system_prompt", "chat_template_options"):
            if getattr(self, name) and not self.chat_template:
                raise ValueError(f"{name} needs chat_template: true")
        given = [name for name in ("choices_field", "answer_pattern", "answer_boxed") if getattr(self, name)]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are different ways to find the answer: choose one")
        if self.answer_pattern is not None:
            _check_pattern(self.answer_pattern)
        return self

    @property
    def verifier(self) -> "Verifier":
        """The judge of answers: math-verify, or a comparison of letters for multiple choice."""
        return is_correct if self.choices_field is None else is_chosen


def _check_pattern(pattern: str) -> None:
    try:
        num_groups = re.compile(pattern).groups
    except re.error as error:
        raise ValueError(f"answer_pattern {pattern!r} is no regular expression: {error}") from error
    if num_groups != 1:
        raise ValueError(f"answer_pattern {pattern!r} must have exactly one group, it has {num_groups}")


class Task:
    """Prompts of the mathematics task; see the options."""

    Options = MathOptions

    def __init__(self, options: MathOptions, *, tokenizer: "PreTrainedTokenizerBase", max_prompt_tokens: int) -> None:
        if options.chat_template and tokenizer.chat_template is None:
            raise ValueError("task.options.chat_template: the tokenizer has no chat template; use a plain template")
        self._options = options
        self.load_report: dict[str, int] = {}
        self.train_prompts: Sequence[Prompt] = self._load("train", options.train, tokenizer, max_prompt_tokens)
        self.eval_prompts: Sequence[Prompt] = self._load("eval", options.eval, tokenizer, max_prompt_tokens)

    @classmethod
    def check_options(cls, options: MathOptions) -> None:
        """Raise ValueError where a file is missing or has no row with such fields; the hub is not asked."""
        for split, source in (("train", options.train), ("eval", options.eval)):
            if source is not None and source.hub is None:
                check_source(source, f"task.options.{split}")
                for name in source.files:
                    next(read_problems(options, RowSource(files=[name]), split, Counter()))

    @property
    def verifier(self) -> "Verifier":
        """The judge of all completions."""
        return self._options.verifier

    def solution(self, prompt: Prompt) -> str:
        """The worked solution of the prompt's row; ValueError if it has none."""
        try:
            return _text_of(prompt.metadata, self._options.solution_field)
        except RowError as error:
            raise ValueError(
                f"{prompt.prompt_id} has no solution: {error} (see task.options.solution_field)"
            ) from error

    def _load(
        self, split: str, source: RowSource | None, tokenizer: "PreTrainedTokenizerBase", max_prompt_tokens: int
    ) -> list[Prompt]:
        """Read, render and tokenise the problems of a split; none where the options name none."""
        if source is None:
            return []
        options = self._options
        counts: Counter[str] = Counter(rows=0, malformed=0, overlong=0)
        prompts = list(read_problems(options, source, split, counts))
        if options.chat_template:
            prompts = _apply_chat_template(options, tokenizer, prompts)
        prompts = tokenise(tokenizer, prompts, add_special_tokens=not options.chat_template)
        overlong = [prompt for prompt in prompts if len(prompt.token_ids) > max_prompt_tokens]
        counts["overlong"] = len(overlong)
        self.load_report |= {f"{split}/{name}": count for name, count in counts.items()}
        if overlong:
            first = f"the first, {overlong[0].prompt_id}, has {len(overlong[0].token_ids)} tokens"
            limit = f"rollout.max_prompt_tokens ({max_prompt_tokens})"
            message = f"{len(overlong)} of {len(prompts)} prompts are longer than {limit}; {first}"
            if options.overlong_prompts == "error" or len(overlong) == len(prompts):
                raise ValueError(f"task.options.{split}: {message}")
            logger.warning("task.options.%s: dropped: %s", split, message)
        return [prompt for prompt in prompts if len(prompt.token_ids) <= max_prompt_tokens]


# --- From rows to problems --------------------------------------------------------------------------------------------


def read_problems(options: MathOptions, source: RowSource, split: str, counts: Counter[str]) -> Iterator[Prompt]:
    """The well-formed problems of a source in order, without tokens; `counts` takes the numbers of (malformed) rows."""
    prompt_ids: set[str] = set()
    first_reason = ""
    for row in read_rows(source):
        counts["rows"] += 1
        try:
            problem = _problem_of(options, row)
            if problem.prompt_id in prompt_ids:
                raise RowError(f"an earlier row has the same `{options.id_field}`, {problem.prompt_id}")
        except RowError as error:
            if options.malformed_rows == "stop":
                raise ValueError(f"{row.place}: {error} (or set task.options.malformed_rows: skip)") from error
            counts["malformed"] += 1
            first_reason = first_reason or f"{row.place}: {error}"
        else:
            prompt_ids.add(problem.prompt_id)
            yield problem
    place = f"task.options.{split}: {source.hub or ', '.join(source.files)}"
    num_rows, num_malformed = counts["rows"], counts["malformed"]
    if num_rows == 0:
        raise ValueError(f"{place}: there are no rows")
    if not prompt_ids:
        raise ValueError(f"{place}: none of the {num_rows} rows can be used; the first: {first_reason}")
    if num_malformed:
        logger.warning("%s: skipped %d of %d rows; the first: %s", place, num_malformed, num_rows, first_reason)


def _problem_of(options: MathOptions, row: Row) -> Prompt:
    """The problem that a row holds; `RowError` if it holds none."""
    if isinstance(row.fields, RowError):
        raise row.fields
    problem = _text_of(row.fields, options.problem_field)
    answer = _answer_text(row.fields, options.answer_field)
    if options.choices_field is not None:
        choices = get_field(row.fields, options.choices_field)
        problem = render_choices(problem, choices, options.choices_field)
        answer = choice_letter(answer, len(choices), options.answer_field)
    elif options.answer_pattern is not None:
        matches = re.findall(options.answer_pattern, answer)
        if not matches or not matches[-1].strip():
            raise RowError(f"no answer: `{options.answer_field}` has no match of {options.answer_pattern!r}")
        answer = matches[-1]
    elif options.answer_boxed:
        boxed = last_boxed(answer)
        if boxed is None:
            raise RowError(f"no answer: `{options.answer_field}` has no complete \\boxed{{...}}")
        answer = boxed
    prompt_id = row.name if options.id_field is None else _text_of(row.fields, options.id_field)
    text = options.prompt_template.replace("{problem}", problem.strip())
    return Prompt(prompt_id=prompt_id, text=text, token_ids=(), answer=answer.strip(), metadata=row.fields)


def _answer_text(fields: Mapping[str, Any], name: str) -> str:
    """As `_text_of`; the texts of a list (OlympiadBench's `final_answer`) stand side by side, as one set of answers."""
    value = get_field(fields, name)
    if isinstance(value, list) and value:
        return ", ".join(_text_of({name: item}, name) for item in value)
    return _text_of(fields, name)


def _text_of(fields: Mapping[str, Any], name: str) -> str:
    """The field as a text, numbers included (AIME's answers are integers); `RowError` where it is empty or no text."""
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


def _apply_chat_template(
    options: MathOptions, tokenizer: "PreTrainedTokenizerBase", problems: Sequence[Prompt]
) -> list[Prompt]:
    """Wrap each text as the user's message; the template adds special tokens and the start of the answer."""
    import jinja2

    system = [] if options.system_prompt is None else [{"role": "system", "content": options.system_prompt}]
    conversations = [[*system, {"role": "user", "content": problem.text}] for problem in problems]
    try:
        texts = tokenizer.apply_chat_template(
            conversations, tokenize=False, add_generation_prompt=True, **options.chat_template_options
        )
    except jinja2.TemplateError as error:
        raise ValueError(f"task.options.chat_template: the tokenizer's template refuses: {error}") from error
    return [replace(problem, text=text) for problem, text in zip(problems, texts, strict=True)]
