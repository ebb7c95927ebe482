"""Procedural arithmetic: an expression over small integers, solved one elementary step a line.

    Compute (7+5)*3-8.          7+5=12
                                12*3=36
                                36-8=28
                                Answer: 28

Whether a problem belongs to training or evaluation is decided by a hash of its expression alone. So no evaluation
problem is ever trained on, for any seeds, sizes and difficulties of the recipes that made a policy.
"""

import hashlib
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import add, mul, sub
from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, model_validator

from srtrl.recipe.schema import Section
from srtrl.tasks.base import TaskBase
from srtrl.tasks.rendering import tokenise
from srtrl.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Split = Literal["train", "eval"]

PRECEDENCE = {"+": 1, "-": 1, "*": 2}
FUNCTIONS: dict[str, Callable[[int, int], int]] = {"+": add, "-": sub, "*": mul}
OPERAND_PRECEDENCE = 3
EVAL_SHARE = 8
"""One expression in this many belongs to evaluation."""
MAX_FRUITLESS_DRAWS = 20_000
"""Draws in a row without a new problem after which the difficulty counts as exhausted (a fifth of a second)."""
ANSWER_MARK = "Answer:"
TEMPLATE = "Compute {}.\n"


class ArithmeticOptions(Section):
    """Size and difficulty of the problem sets."""

    seed: int = Field(default=0, ge=0)
    """Seed of the problems; the split of a problem does not depend on it."""
    num_train: int = Field(default=20_000, ge=1, le=10_000_000)
    """Training problems, all different."""
    num_eval: int = Field(default=500, ge=1, le=10_000_000)
    """Held-out problems, all different and none of them a training problem of any seed."""
    min_operations: int = Field(default=2, ge=1, le=16)
    """Minimum number of operations of an expression."""
    max_operations: int = Field(default=4, ge=1, le=16)
    """Maximum number of operations of an expression."""
    max_operand: int = Field(default=12, ge=1, le=10**6)
    """Operands are between 1 and this."""
    max_value: int = Field(default=999, ge=1, le=10**9)
    """Every intermediate result and the answer are between 0 and this."""
    tool_share: float = Field(default=0.0, ge=0, le=1)
    """Share of the problems whose solution calls a calculator (`rollout.environment.format: code_tags`) instead of
    working out the steps; only a warm start reads solutions."""

    @model_validator(mode="after")
    def check_difficulty(self) -> Self:
        """Refuse bounds that no expression meets."""
        if self.min_operations > self.max_operations:
            raise ValueError(f"min_operations ({self.min_operations}) is above max_operations ({self.max_operations})")
        if self.max_value < self.max_operand:
            raise ValueError(f"max_value ({self.max_value}) is below max_operand ({self.max_operand})")
        return self


@dataclass(slots=True, frozen=True)
class Expression:
    """An arithmetic expression, its value, and the lines that work it out."""

    text: str
    value: int
    precedence: int
    """Precedence of the outermost operator: how tightly it binds."""
    steps: tuple[str, ...] = ()


def is_correct(text: str, answer: str) -> bool:
    """Whether the last `Answer:` of a completion is followed, on its line, by exactly the integer `answer`.

    Integers are compared exactly, leading zeros apart, as strings: linear in the text, also for a million digits.
    """
    return extract_integer(text) == _normalise(answer)


def extract_integer(text: str) -> str | None:
    """The integer after the last `Answer:` of a completion, without leading zeros; None if there is none."""
    _, mark, rest = text.rpartition(ANSWER_MARK)
    line = rest.partition("\n")[0].strip(" \t\r")
    return _normalise(line) if mark and re.fullmatch(r"-?[0-9]+", line) else None


is_correct.extract = extract_integer  # type: ignore[attr-defined]


def _normalise(integer: str) -> str:
    digits = integer.removeprefix("-").lstrip("0") or "0"
    return f"-{digits}" if integer.startswith("-") and digits != "0" else digits


class Task(TaskBase):
    """Prompts of the procedural arithmetic task; see the options for the difficulty."""

    Options = ArithmeticOptions
    verifier = staticmethod(is_correct)

    def __init__(
        self, options: ArithmeticOptions, *, tokenizer: "PreTrainedTokenizerBase", max_prompt_tokens: int
    ) -> None:
        self.train_prompts: Sequence[Prompt] = _make_prompts(options, "train", tokenizer, max_prompt_tokens)
        self.eval_prompts: Sequence[Prompt] = _make_prompts(options, "eval", tokenizer, max_prompt_tokens)
        self.load_report = {"train/rows": len(self.train_prompts), "eval/rows": len(self.eval_prompts)}

    @classmethod
    def typed_prompt(cls, options: ArithmeticOptions, text: str) -> tuple[str, None]:
        """An expression, also in a whole prompt that lacks the line end."""
        return TEMPLATE.format(text.strip().removeprefix("Compute ").removesuffix(".")), None

    @classmethod
    def check_options(cls, options: ArithmeticOptions) -> None:
        """Raise ValueError if the difficulty has too few different problems."""
        draw_expressions(options, "train")
        draw_expressions(options, "eval")

    def solution(self, prompt: Prompt) -> str:
        """The worked solution, one step a line, ending in the answer."""
        return str(prompt.metadata["solution"])


def draw_expressions(options: ArithmeticOptions, split: Split) -> list[Expression]:
    """Draw the different expressions of a split; the first ones do not depend on the number of problems.

    Raises:
        ValueError: the difficulty has too few different expressions.
    """
    num_problems = options.num_train if split == "train" else options.num_eval
    generator = random.Random(f"srtrl arithmetic {options.seed} {split}")
    expressions: dict[str, Expression] = {}
    fruitless = 0
    while len(expressions) < num_problems:
        num_operations = generator.randint(options.min_operations, options.max_operations)
        operators = [generator.choice("+-*") for _ in range(num_operations)]
        expression = _build(operators, options, generator)
        if expression is None or expression.text in expressions or split_of(expression.text) != split:
            fruitless += 1
            if fruitless == MAX_FRUITLESS_DRAWS:
                raise ValueError(
                    f"task arithmetic: found only {len(expressions)} different {split} problems of this difficulty, "
                    f"num_{split} asks for {num_problems}; raise max_operations, max_operand or max_value"
                )
            continue
        expressions[expression.text] = expression
        fruitless = 0
    return list(expressions.values())


def split_of(expression_text: str) -> Split:
    """The split that an expression belongs to, by a hash of its text."""
    return "eval" if _hash(expression_text) % EVAL_SHARE == 0 else "train"


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _build(operators: list[str], options: ArithmeticOptions, generator: random.Random) -> Expression | None:
    """A random expression with these operators in the order of its text, or None if a value is out of bounds.

    The order of evaluation is random, too; parentheses are written where it needs them.
    """
    if not operators:
        operand = generator.randint(1, options.max_operand)
        return Expression(str(operand), operand, OPERAND_PRECEDENCE)
    root = generator.randrange(len(operators))  # applied last
    left = _build(operators[:root], options, generator)
    right = _build(operators[root + 1 :], options, generator)
    if left is None or right is None:
        return None
    return _combine(left, operators[root], right, options.max_value)


def _combine(left: Expression, operator: str, right: Expression, max_value: int) -> Expression | None:
    """`left operator right` with the parentheses it needs, or None where its value lies outside 0 to `max_value`."""
    value = FUNCTIONS[operator](left.value, right.value)
    if not 0 <= value <= max_value:
        return None
    precedence = PRECEDENCE[operator]
    left_text = left.text if left.precedence >= precedence else f"({left.text})"
    # Also at equal precedence: `a+(b+c)` keeps its parentheses, since its first step is `b+c`.
    right_text = right.text if right.precedence > precedence else f"({right.text})"
    step = f"{left.value}{operator}{right.value}={value}"
    return Expression(f"{left_text}{operator}{right_text}", value, precedence, (*left.steps, *right.steps, step))


def _make_prompts(
    options: ArithmeticOptions, split: Split, tokenizer: "PreTrainedTokenizerBase", max_prompt_tokens: int
) -> list[Prompt]:
    prompts = [
        Prompt(
            prompt_id=f"arithmetic-{split}-{options.seed}-{index}",
            text=TEMPLATE.format(expression.text),
            token_ids=(),
            answer=str(expression.value),
            metadata={"problem": expression.text, "solution": _solution_text(expression, options.tool_share)},
        )
        for index, expression in enumerate(draw_expressions(options, split))
    ]
    prompts = tokenise(tokenizer, prompts)
    longest = max(prompts, key=lambda prompt: len(prompt.token_ids))
    if len(longest.token_ids) > max_prompt_tokens:
        raise ValueError(
            f"task arithmetic: {longest.text!r} has {len(longest.token_ids)} tokens, rollout.max_prompt_tokens is "
            f"{max_prompt_tokens}; raise it, or lower max_operations or max_operand"
        )
    return prompts


def _solution_text(expression: Expression, tool_share: float) -> str:
    lines = expression.steps
    if _hash(f"tool {expression.text}") % 1000 < 1000 * tool_share:
        lines = (f"<code>{expression.text}</code>", f"<interpreter>\n{expression.value}\n</interpreter>")
    return "\n".join((*lines, f"{ANSWER_MARK} {expression.value}"))
