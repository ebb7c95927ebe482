r"""The verifier of mathematical answers, by math-verify.

A module of its own, since worker processes import it: math-verify and sympy, but no torch. docs/grading.md has its
additions to math-verify, and how often the two agree with reference solutions.
"""

import functools
import itertools
import logging
import re
from decimal import Decimal
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify
from sympy import And, FiniteSet, Float, Intersection, MatrixBase, UnevaluatedExpr, Union
from sympy.core.relational import Relational

from srtrl.tasks.final_answer import BOX, extract_answer, tidy, with_ascii_digits

_LATEX = LatexExtractionConfig(boxed_match_priority=0)

MAX_CHARACTERS = 1000
MAX_DEPTH = 30
"""Limits of an answer; the longest of MATH, OlympiadBench and DAPO-Math has some 200 characters and 5 brackets."""

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns, for each process, that its timeouts are off


def is_correct(text: str, answer: str) -> bool:
    r"""Whether the final answer of a completion (`extract_answer`) equals the reference answer.

    Only what `extract_answer` returns is compared. Equality is math-verify's, symbolic and numeric to six decimals,
    unless numbers differ in proportion to their size (`_differ`); both answers may have the spellings of `REWRITES` and
    `READINGS` besides. An inequality of one variable equals the interval it means, and a number in one base never
    equals one in another (`1101_2` and `1101_3`). A percent sign that only one of both has is a unit.

    It may never end on some texts (`9^{9^{9^9}}`), so it is `isolated`: the worker process has the time limit, and
    math-verify's own, which need the main thread's alarm signal, are off.

    An answer of more than `MAX_CHARACTERS`, or with more than `MAX_DEPTH` brackets in one another, is incorrect unless
    the reference is as long or as deep: algebra would take it for minutes, and no solution looks like that.

    Args:
        text: A completion.
        answer: The reference answer, with or without the `$` of a worked solution.

    Raises:
        ValueError: the reference answer cannot be parsed.
    """
    found = extract_answer(text) or ""
    answer = with_ascii_digits(answer)
    is_absurd = len(found) > max(MAX_CHARACTERS, 2 * len(answer)) or _depth(found) > MAX_DEPTH
    if is_absurd and _depth(answer) <= MAX_DEPTH:
        return False
    reference = _parse_reference(answer)
    if not found or len({marks for marks in (_marks(answer), _marks(found)) if marks}) == 2:
        return False
    if _is_equal(reference, found):
        return True
    bare_answer, bare_found = PERCENT.sub("", answer), PERCENT.sub("", found)
    is_one_sided = (bare_answer != answer) != (bare_found != found)
    return is_one_sided and _is_equal(_parse_reference(bare_answer), bare_found)


is_correct.isolated = True  # type: ignore[attr-defined]
is_correct.extract = extract_answer  # type: ignore[attr-defined]


def _depth(text: str) -> int:
    """Maximum number of brackets that are open at a place in the text."""
    depth = deepest = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    return deepest


@functools.lru_cache(maxsize=4096)  # the samples of a prompt share it
def _parse_reference(answer: str) -> list[Any]:
    parsed = _parse(answer)
    if not parsed:
        raise ValueError(f"math-verify cannot read the reference answer {answer!r}")
    return parsed


def _is_equal(reference: list[Any], found: str) -> bool:
    """Whether a reading of the answer equals one of the reference."""
    for first, second in itertools.product(reference, _parse(found, (*READINGS, DECIMAL_COMMA))):
        if verify(first, second, timeout_seconds=None, allow_set_relation_comp=True) and not _differ(first, second):
            return True
    return False


SIGNIFICANT_DIGITS = 3
"""A decimal with at least this number of digits equals each value that rounds to it."""


def _differ(first: Any, second: Any) -> bool:
    """Whether values that math-verify takes for equal hold two numbers that differ in proportion to their size.

    Its six decimals are no digits of 1.6e-19. Exact numbers must be equal; a decimal equals another number to 1e-6 of
    its size, or as the other one rounded to `SIGNIFICANT_DIGITS`.
    """
    if isinstance(first, str) or first == second:
        return False
    numbers = _numbers(first), _numbers(second)
    decimal = first.has(Float), second.has(Float)
    tolerance = 1e-6 if any(decimal) else 1e-12
    is_percent = first.has(UnevaluatedExpr) or second.has(UnevaluatedExpr)  # 50% equals 50, too
    are_numbers = getattr(first, "is_number", False) and getattr(second, "is_number", False) and not is_percent
    for pair in zip(*numbers, strict=True) if len(numbers[0]) == len(numbers[1]) else ():
        size, gap = max(map(abs, pair)), abs(pair[0] - pair[1])
        is_noise = 0 in pair and size < 1e-90  # of a sum that is zero
        rounds = any(is_decimal and gap <= _half_unit(value) for is_decimal, value in zip(decimal, pair, strict=True))
        if gap > tolerance * size and (are_numbers or gap < 2e-6) and not rounds and not is_noise:
            return True
    return False


def _numbers(value: Any) -> list[Any]:
    """The finite numbers in a value, to 30 digits, sorted; of complex ones both parts."""
    if not getattr(value, "is_number", False):
        parts = value.flat() if isinstance(value, MatrixBase) else getattr(value, "args", ())
        return sorted(number for part in parts for number in _numbers(part))
    return sorted(part for part in value.evalf(30).as_real_imag() if part.is_Number and part.is_finite)


def _half_unit(value: Any) -> float:
    """Half a unit of the last digit of a decimal; 0 where it has fewer than `SIGNIFICANT_DIGITS`."""
    _, digits, exponent = Decimal(f"{float(value):.12g}").normalize().as_tuple()
    return 0.500001 * 10.0 ** int(exponent) if len(digits) >= SIGNIFICANT_DIGITS else 0.0


# --- Spellings that math-verify does not know -------------------------------------------------------------------------

CHARACTERS = str.maketrans(
    {"−": "-", "×": r"\times ", "·": r"\cdot ", "÷": r"\div ", "±": r"\pm ", "π": r"\pi ", "∞": r"\infty "}  # noqa: RUF001
    | {"≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∈": r"\in ", "∪": r"\cup ", "∅": r"\emptyset ", "°": r"^\circ "}  # noqa: RUF001
    | {"⟨": r"\langle ", "⟩": r"\rangle ", "〈": "(", "〉": ")", "²": "^{2}", "³": "^{3}", "½": r"\frac{1}{2}"}
    | {"∛": "³√", "Ø": r"\O ", "，": ",", "（": "(", "）": ")", "－": "-", "＋": "+", "％": "%", "．": ".", "٫": "."}  # noqa: RUF001
    | dict.fromkeys("\u00a0\u2007\u2009\u200a\u202f", " ")
)
_CODE = r"(?:US ?\\?\$|USD|EUR|GBP|JPY|INR|CNY|CHF|CAD|AUD|Rs\.?)"
_SIGN = r"(?:\\\$|[€£¥₹₩₽₺₫]|\\(?:euro|texteuro|textdollar|pounds|textsterling|yen)(?![A-Za-z])(?:\{\})?)"
_REAL = r"(?:\\in\s*\\math(?:bb|bf)\s*\{?R\}?\s*)?"
_COLOUR = r"\\(?:text)?color(?:box)?\s*(?:\[\w*\]\s*)?\{[^{}]*\}"
_SIZE = r"\\(?:normalsize|small|footnotesize|tiny|large|Large|LARGE|huge|Huge|displaystyle|bf|bfseries)(?![A-Za-z])"
_WEIGHT = r"\\(?:underline|mathbf|mathsf|mathtt|boldsymbol|bm|pmb|textbf|textit|emph)\s*"
_WHOLE = r"\{(?!\\rm )((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}"
_ABOUT = r"\\(?:approx|sim|simeq|thickapprox)(?:eq)?(?![A-Za-z])|[~≈\u223c≃]"
_CHECKS = r"\\(?:checkmark|blacksquare|qed)|[✓✔✅∎]"
_WORDS = r"approx[a-z]*|about|exact(?:ly)?|correct|check(?:ed)?|verified|simplified|final answer|rounded[a-z ]*"
_TEXT = r"(?:\\text\s*\{\s*)?"
_MORE_YES = r"(?:it|they|this|that|he|she|there|we) (?:is|are|was|does|do|did|can|will|has|have)"
_PI = r"(?<![A-Za-z\\])(?<!/\d)(?<!/\d\d)(?<!/\d\s)[Pp]i(?![A-Za-z])"
_SQRT = (r"(?<![A-Za-z\\])sqrt\s?\(((?:[^()]|\([^()]*\))*)\)", r"\\sqrt{\1}")
MAX_PLAIN_CHARACTERS = 200
"""Limit of an answer without LaTeX."""
_RAISED = re.compile(r"[\d)]\s?(?:\*\*|\^)")
_EXPONENTIAL = re.compile(r"(?:exp|[A-Za-z]\s?(?:\*\*|\^))\s?\(")
PLAIN = (
    (r"(?<=\d)\s?x\s?(?=10\s?(?:\^|\*\*))", "*"),
    (r"(?<=[A-Za-z\d)])\s?\*\*\s?(-?\d{1,3}|[A-Za-z])(?![\w.(]|\s?(?:\*\*|\^))", r"^{\1}"),
    (r"(?<=[A-Za-z\d])\s?\*\*\s?\(([^()*^]*(?:\*[^()*^]+)*)\)", r"^{\1}"),
    (r"\^\s?(-\d{1,3})(?![\d.])", r"^{\1}"),
    (_PI, r"\\pi "),
    (r"(?<![A-Za-z\\])exp\s?(?=\()", r"\\exp"),
    *(_SQRT,) * 3,
    (r"(?<![A-Za-z\\])sqrt\s?(\d+)", r"\\sqrt{\1}"),
)
"""Rewrites of mathematics without LaTeX: `3/4*pi`, `exp(16)`, `10**3`, `7 x 10^-3`; see `_is_plain`."""
REWRITES = (
    # Colour, size and weight, nested; "about" before a value, marks and remarks after it.
    (rf"{_COLOUR}|{_SIZE}", ""),
    *((rf"^\s*(?:{_WEIGHT})?{_WHOLE}$", r"\1"),) * 3,
    (rf"^(?:{_ABOUT}|{_CHECKS}|{_TEXT}(?:about|approx(?:imately|\.)?)\s*\}}?)\s*(?=[-\d.\\$(])", ""),
    (rf"(?:\s|\\[,;: ]|\\q?quad)*(?:{_CHECKS}|\(\s*{_TEXT}(?:{_WORDS})[.!]?\s*\}}?\s*\))$", ""),
    # Words.
    (rf"^{_TEXT}(?:it |the limit )?(?:DNE|[Dd](?:oes not|oesn't|o not) exist)\.?\s*\}}?$", r"\\text{DNE}"),
    (rf"^{_TEXT}([Yy]es),? {_MORE_YES}\.?\s*\}}?$", r"\\text{\1}"),
    (rf"^{_TEXT}([Nn]o),? {_MORE_YES}(?: not|n't)\.?\s*\}}?$", r"\\text{\1}"),
    (r"^(?:\\text\s*\{\s*)?(\d{1,2}:\d\d)\s*([ap])\.?\s?m\.?\s*\}?$", r"\1\\text{ \2m}"),
    # Currencies; stray dollar signs too: `221,$8`.
    (rf"\\(?:text|mathrm)\s*\{{\s*(?:{_SIGN}|{_CODE})\s*\}}|{_SIGN}|\b{_CODE}\s*(?=\d)|(?<=\d) ?{_CODE}$|\$", ""),
    # Groups of digits (`1\,234`, `10 000`); no list of small numbers, and no mixed number.
    (r"(?<=\d)(?:\\[,;:!> ]|\\thinspace(?![A-Za-z])|~| )\s*(?=\d{3}(?![\d/]))", ""),
    # Roots: `√5`, `√(1+√2)`, `³√8`.
    (r"√\s*(\\frac\{[^{}]*\}\{[^{}]*\}|\d+(?:\.\d+)?|[A-Za-z]|\\[A-Za-z]+|\{[^{}]*\})", r"\\sqrt{\1}"),
    (r"√\s*\(([^()]*)\)", r"\\sqrt{\1}"),
    (r"(?:(?<![\w)}])\^\{3\}|³)\\sqrt", r"\\sqrt[3]"),
    # A number and words, which would be read as 5 d o l l a r s.
    (r"^(-?\d[\d.,]*\s+)((?!(?:sin|cos|tan|cot|log|exp|mod)\b)[A-Za-z]{3,}(?:[ -][A-Za-z]+)*)$", r"\1\\text{ \2}"),
    (r"(?<![\d.])(\d+) (\d+)/(\d+)", r"\1\\frac{\2}{\3}"),
    (r"(\\[dt]?frac)\s*\\pi\s*(\d|\{[^{}]*\})", r"\1{\\pi}{\2}"),
    # Euler's number and the imaginary unit, in upright type.
    (r"(?<=[A-Za-z])(?=\\(?:mathrm|text)\{[ei]\})", " "),
    (r"(?:\\(?:mathrm|text|operatorname|mathit)\s*\{|\{\\rm )\s*([ei])\s*\}", r"\1"),
    (r"\\mathrm\s+([ei])(?![A-Za-z])", r"\1"),
    (r"(?<=\d)i(?![A-Za-z])", " i"),
    # Angle brackets, the empty set, inequalities that are joined, and sets that one inequality defines.
    (r"^<([^<>=]+,[^<>=]+)>$", r"(\1)"),
    (r"(?:\\(?:left|[Bb]igg?l?)\s*)?\\lang(?:le)?(?![A-Za-z])", "("),
    (r"(?:\\(?:right|[Bb]igg?r?)\s*)?\\rang(?:le)?(?![A-Za-z])", ")"),
    (r"\\(?:varnothing|O)(?![A-Za-z])|(?:\\left)?\\\{(?:\s|\\[,;: ]|\\q?quad)*(?:\\right)?\\\}", r"\\emptyset"),
    (r"^(?:\\text\{)?(?:[Tt]he )?[Ee]mpty set\}?$", r"\\emptyset"),
    (r"\\(?:lor|vee)(?![A-Za-z])|(?<=\d)\s*\\cup(?=\s*[A-Za-z]\s*(?:[<>]|\\[lg]e))", r"\\text{ or }"),
    (rf"^(?:\\left)?\\\{{\s*[A-Za-z]\s*{_REAL}(?:\\mid|\\vert|:|\|)(.+?)(?:\\right)?\\\}}$", r"\1"),
    (r"\\dot\s*\{?(\d)\}?(\d*)\\dot\s*\{?(\d)\}?", r"\\overline{\1\2\3}"),
)
"""Patterns and their replacements, in this order, for references and answers."""
_LETTERS = r"[A-Z](?:\s*(?:,\s*(?:and\s+)?|and\s+)[A-Z])+"
DECIMAL_COMMA = (r"^(-?\d+),(\d{1,2}|\d{4,})(?=\\?%?$)", r"\1.\2")
"""A further reading of answers, not of references: `12,5` may be two numbers."""
READINGS = (
    (r"(?<![\w.\\}])(\d+(?:\.\d+)?)[eE]\s?\+?(-?\d{1,3})(?![\w.])", r"\1\\times 10^{\2}"),
    (r"\\log(?![A-Za-z]|\s*_)", r"\\ln"),
    (rf"^(?:\\left)?(?:\\\{{)?\s*{_TEXT}({_LETTERS})\s*\}}?\s*(?:\\right)?(?:\\\}})?$", r"\\text{\1}"),
)
r"""Further readings: `2e-1` is 0.2 or 2e - 1, and `\log` has the base 10 or e. Any two that are equal count."""
RECURRING = re.compile(r"(\d*)\.(\d*)\\(?:overline|bar|dot)\s*(?:\{\s*(\d+)\s*\}|(\d))")
"""`0.1\\overline{6}`."""
_INDEX = r"(?:(\d+)|\{\s*(\d+)\s*\}|\{\\text\s*\{\s*(\w+)\s*\}\s*\})"
BASE = re.compile(rf"(?<![A-Za-z_\d\\.}}])\(?(\d[\dA-F.]*)\)?\s*_\s*{_INDEX}")
"""A number in a base: `1101_2`, `(1101)_{2}`."""
CLOCK = re.compile(r"\d:\d\d(?:\s|\\text|[{~])*([ap])\.?\s?m\b")
"""The half of the day of a time: `7:30 a.m.`"""
PERCENT = re.compile(r"(?<=[\d}])\s*\\?%[\s$.]*$")


def _parse(answer: str, readings: tuple[tuple[str, str], ...] = READINGS) -> list[Any]:
    """The readings of an answer by math-verify: expressions, and the text as it normalises it; empty where none."""
    text = RECURRING.sub(_fraction, _rewritten(answer, (*PLAIN, *REWRITES) if _is_plain(answer) else REWRITES))
    text = BASE.sub(r"\1", text)
    parsed: list[Any] = []
    for reading in dict.fromkeys((text, *(_rewritten(text, (rule,)) for rule in readings))):
        parsed += parse(f"{BOX}{reading}}}", (_LATEX,), parsing_timeout=None)
    joint = re.search(r"\b(?:or|and)\b", text)
    if joint and parsed and isinstance(parsed[0], FiniteSet) and len(parsed[0].free_symbols) == 1:
        parts = parsed[0].args
        if all(isinstance(part, Relational | And) for part in parts):
            parsed.append((Union if joint[0] == "or" else Intersection)(*(part.as_set() for part in parts)))
    return parsed


def _is_plain(answer: str) -> bool:
    """Whether `PLAIN` is for this answer: it is short, and holds no tower of powers, such as `9**(9**9)`."""
    height = 2 * len(_RAISED.findall(answer)) + len(_EXPONENTIAL.findall(answer))
    return len(answer) <= MAX_PLAIN_CHARACTERS and (height <= 2 or "(" not in answer)


def _rewritten(text: str, rules: tuple[tuple[str, str], ...]) -> str:
    text = tidy(text.translate(CHARACTERS))
    for pattern, replacement in rules:
        text = re.sub(pattern, replacement, text)
    return text


def _fraction(match: re.Match[str]) -> str:
    """A recurring decimal as a fraction."""
    whole, fixed, period = match[1], match[2], match[3] or match[4]
    difference = int(whole + fixed + period) - int(whole + fixed or "0")
    return rf"\frac{{{difference}}}{{{'9' * len(period)}{'0' * len(fixed)}}}"


def _marks(answer: str) -> tuple[str, ...]:
    """The bases of the numbers in an answer that have one, and the halves of the day of its times."""
    bases = (match[2] or match[3] or match[4] for match in BASE.finditer(answer.translate(CHARACTERS)))
    return (*bases, *CLOCK.findall(answer))
