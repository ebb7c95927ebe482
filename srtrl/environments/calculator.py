"""A calculator: + - * / and brackets over numbers, exactly."""

import operator
import re
from fractions import Fraction

from srtrl.environments.base import Step, Tool, ToolCall, ToolEnvironment, Turn

TOKEN = re.compile(r"\s*(?:(\d{1,400}(?:\.\d{1,400})?)|([-+*/()]))")
OPERATORS = ({"+": operator.add, "-": operator.sub}, {"*": operator.mul, "/": operator.truediv})
"""Those that bind tightest last."""
MAX_CHARACTERS, MAX_DEPTH = 2_000, 50


class Environment(ToolEnvironment):
    """See `srtrl.environments.base.EnvironmentBase`."""

    tools = (
        Tool(
            name="calculator",
            description="Computes an expression of numbers, + - * / and brackets.",
            parameters={"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
        ),
    )

    def replay(self, turn: Turn, answer: Step) -> None:
        """Nothing is kept from call to call."""

    def call(self, call: ToolCall) -> tuple[str, str]:
        """The value of the expression, or its error."""
        try:
            return show(evaluate(call.arguments["expression"])), "ok"
        except (ValueError, ZeroDivisionError) as error:
            return f"error: {error}", "error"


def evaluate(text: str) -> Fraction:
    """The value of an expression; ValueError or ZeroDivisionError where it has none."""
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"more than {MAX_CHARACTERS} characters")
    tokens, end = [], 0
    text = text.rstrip()
    while end < len(text):
        match = TOKEN.match(text, end)
        if match is None:
            raise ValueError(f"cannot read {text[end:].lstrip()[:20]!r}")
        tokens.append(match.group(1) or match.group(2))
        end = match.end()
    try:
        value = _chain(tokens, 0)
    except ZeroDivisionError as error:
        raise ZeroDivisionError("division by zero") from error
    if tokens:
        raise ValueError(f"unexpected {tokens[0]}")
    return value


def show(value: Fraction) -> str:
    """An integer, or a decimal number of at most 12 digits after the point."""
    if value.denominator == 1:
        return str(value.numerator)
    return f"{float(value):.12g}" if abs(value) < 10**300 else str(round(value))


def _chain(tokens: list[str], depth: int, level: int = 0) -> Fraction:
    """Take operands and the operators of a level between them off the front of `tokens`."""
    if level == len(OPERATORS):
        return _factor(tokens, depth)
    value = _chain(tokens, depth, level + 1)
    while tokens and tokens[0] in OPERATORS[level]:
        operate = OPERATORS[level][tokens.pop(0)]
        value = operate(value, _chain(tokens, depth, level + 1))
    return value


def _factor(tokens: list[str], depth: int) -> Fraction:
    """A number, a bracket, or a sign and a factor."""
    if not tokens:
        raise ValueError("the expression ends too early")
    if depth > MAX_DEPTH:
        raise ValueError(f"brackets or signs deeper than {MAX_DEPTH}")
    token = tokens.pop(0)
    if token in "+-":
        value = _factor(tokens, depth + 1)
        return -value if token == "-" else value
    if token == "(":
        value = _chain(tokens, depth + 1)
        if not tokens or tokens.pop(0) != ")":
            raise ValueError("a bracket is not closed")
        return value
    if token in ")*/":
        raise ValueError(f"unexpected {token}")
    return Fraction(token)
