r"""The verifier of mathematical answers, by math-verify.

A module of its own, since worker processes import it: math-verify and sympy, but no torch. docs/grading.md has its
additions to math-verify, and how often the two agree with reference solutions.
"""

import functools
import logging
import re
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify
from sympy import And, FiniteSet, Intersection, Union
from sympy.core.relational import Relational

from srtrl.tasks.final_answer import BOX, extract_answer, tidy

_LATEX = LatexExtractionConfig(boxed_match_priority=0)

MAX_CHARACTERS = 1000
MAX_DEPTH = 30
"""Limits of an answer; the longest of MATH, OlympiadBench and DAPO-Math has some 200 characters and 5 brackets."""

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns, for each process, that its timeouts are off


def is_correct(text: str, answer: str, *, answer_in_thought: bool = False) -> bool:
    r"""Whether the final answer of a completion (`extract_answer`) equals the reference answer.

    Only what `extract_answer` returns is compared. Equality is math-verify's: symbolic, and numeric to six decimals;
    both answers may have the spellings of `REWRITES` and `READINGS` besides. An inequality of one variable equals the
    interval it means, and a number in one base never equals one in another (`1101_2` and `1101_3`).

    It may never end on some texts (`9^{9^{9^9}}`), so it is `isolated`: the worker process has the time limit, and
    math-verify's own, which need the main thread's alarm signal, are off.

    An answer of more than `MAX_CHARACTERS`, or with more than `MAX_DEPTH` brackets in one another, is incorrect unless
    the reference is as long or as deep: algebra would take it for minutes, and no solution looks like that.

    Args:
        text: A completion.
        answer: The reference answer, with or without the `$` of a worked solution.
        answer_in_thought: As of `extract_answer`.

    Raises:
        ValueError: the reference answer cannot be parsed.
    """
    found = extract_answer(text, answer_in_thought=answer_in_thought) or ""
    is_absurd = len(found) > max(MAX_CHARACTERS, 2 * len(answer)) or _depth(found) > MAX_DEPTH
    if is_absurd and _depth(answer) <= MAX_DEPTH:
        return False
    reference = _parse_reference(answer)
    if not found or len({bases for bases in (_bases(answer), _bases(found)) if bases}) == 2:
        return False
    return bool(verify(reference, _parse(found), timeout_seconds=None, allow_set_relation_comp=True))


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


# --- Spellings that math-verify does not know -------------------------------------------------------------------------

CHARACTERS = str.maketrans(
    {"−": "-", "×": r"\times ", "·": r"\cdot ", "÷": r"\div ", "±": r"\pm ", "π": r"\pi ", "∞": r"\infty "}  # noqa: RUF001
    | {"≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∈": r"\in ", "∪": r"\cup ", "∅": r"\emptyset ", "°": r"^\circ "}  # noqa: RUF001
    | {"⟨": r"\langle ", "⟩": r"\rangle ", "〈": "(", "〉": ")", "²": "^{2}", "³": "^{3}", "½": r"\frac{1}{2}"}
    | {"∛": "³√", "Ø": r"\O "}
    | dict.fromkeys("\u00a0\u2007\u2009\u200a\u202f", " ")
)
_CODE = r"(?:US ?\\?\$|USD|EUR|GBP|JPY|INR|CNY|CHF|CAD|AUD|Rs\.?)"
_SIGN = r"(?:\\\$|[€£¥₹₩₽₺₫]|\\(?:euro|texteuro|textdollar|pounds|textsterling|yen)(?![A-Za-z])(?:\{\})?)"
_REAL = r"(?:\\in\s*\\math(?:bb|bf)\s*\{?R\}?\s*)?"
REWRITES = (
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
    # Euler's number and the imaginary unit, in upright type.
    (r"(?<=[A-Za-z])(?=\\(?:mathrm|text)\{[ei]\})", " "),
    (r"(?:\\(?:mathrm|text|operatorname|mathit)\s*\{|\{\\rm )\s*([ei])\s*\}", r"\1"),
    (r"\\mathrm\s+([ei])(?![A-Za-z])", r"\1"),
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
READINGS = (
    (r"(?<![\w.\\}])(\d+(?:\.\d+)?)[eE]\s?\+?(-?\d{1,3})(?![\w.])", r"\1\\times 10^{\2}"),
    (r"\\log(?![A-Za-z]|\s*_)", r"\\ln"),
)
r"""Further readings: `2e-1` is 0.2 or 2e - 1, and `\log` has the base 10 or e. Any two that are equal count."""
RECURRING = re.compile(r"(\d*)\.(\d*)\\(?:overline|bar|dot)\s*(?:\{\s*(\d+)\s*\}|(\d))")
"""`0.1\\overline{6}`."""
_INDEX = r"(?:(\d+)|\{\s*(\d+)\s*\}|\{\\text\s*\{\s*(\w+)\s*\}\s*\})"
BASE = re.compile(rf"(?<![A-Za-z_\d\\.}}])\(?(\d[\dA-F.]*)\)?\s*_\s*{_INDEX}")
"""A number in a base: `1101_2`, `(1101)_{2}`."""


def _parse(answer: str) -> list[Any]:
    """The readings of an answer by math-verify: expressions, and the text as it normalises it; empty where none."""
    text = RECURRING.sub(_fraction, _rewritten(answer, REWRITES))
    text = BASE.sub(r"\1", text)
    parsed: list[Any] = []
    for reading in dict.fromkeys((text, *(_rewritten(text, (rule,)) for rule in READINGS))):
        parsed += parse(f"{BOX}{reading}}}", (_LATEX,), parsing_timeout=None)
    joint = re.search(r"\b(?:or|and)\b", text)
    if joint and parsed and isinstance(parsed[0], FiniteSet) and len(parsed[0].free_symbols) == 1:
        parts = parsed[0].args
        if all(isinstance(part, Relational | And) for part in parts):
            parsed.append((Union if joint[0] == "or" else Intersection)(*(part.as_set() for part in parts)))
    return parsed


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


def _bases(answer: str) -> tuple[str, ...]:
    """The bases of the numbers in an answer that have one."""
    return tuple(match[2] or match[3] or match[4] for match in BASE.finditer(answer.translate(CHARACTERS)))
