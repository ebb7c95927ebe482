r"""The verifier of mathematical answers, by math-verify.

A module of its own, since worker processes import it: math-verify and sympy, but no torch. docs/grading.md has its
additions to math-verify, and how often the two agree with reference solutions.
"""

import functools
import logging
import re
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from srtrl.tasks.final_answer import BOX, extract_answer, marked_answer

_LATEX = LatexExtractionConfig(boxed_match_priority=0)
_ANY = (_LATEX, ExprExtractionConfig())

DELIMITERS = re.compile(r"(?<!\\)\$|\\\(|\\\[|\\boxed|\\fbox")
"""The marks by which math-verify recognises a formula."""
COMMAND = re.compile(r"\\(?:text|textbf|mathrm|mbox|operatorname|begin|end)\{[^{}]*\}|\\[A-Za-z]+")
WORD = re.compile(r"[A-Za-z]{3,}")
THIN_SPACE = re.compile(r"(?<=\d)(?:\\[,;: ]|~)(?=\d{3}(?!\d))")
r"""LaTeX's spaces between groups of three digits: `1\,234`."""
BARE_UNIT = re.compile(
    r"(\\boxed\{\s*\\?\$?-?\d[\d.,]*\s+)((?!(?:sin|cos|tan|cot|log|exp|mod)\b)[A-Za-z]{3,}(?:[ -][A-Za-z]+)*)\.?\s*\}"
)
r"""A number and words in a box: `\boxed{5 dollars}`, which would be read as 5 d o l l a r s."""

MAX_CHARACTERS = 1000
MAX_DEPTH = 30
"""Limits of an answer; the longest of MATH, OlympiadBench and DAPO-Math has some 200 characters and 5 brackets."""

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns, for each process, that its timeouts are off


def is_correct(text: str, answer: str) -> bool:
    r"""Whether the final answer of a completion equals the reference answer.

    The final answer is the text after `####` where the last line starts with that (as in GSM8K), or the content of
    `<answer>...</answer>` at the end; else, in this order, the last `\boxed{...}` (boxes that stand close
    together are one set of answers), the text after "final answer is" or "answer:", the last formula, the last number.
    These are math-verify's rules, with `\boxed` first; beyond them, a marked or stated answer may be LaTeX without
    dollar signs, and a boxed one may end in words (`\boxed{5 dollars}`). Equality is math-verify's: symbolic, and
    numeric to six decimals.

    It may never end on some texts (`9^{9^{9^9}}`), so it is `isolated`: the worker process has the time limit, and
    math-verify's own, which need the main thread's alarm signal, are off.

    An answer of more than `MAX_CHARACTERS`, or with more than `MAX_DEPTH` brackets in one another, is incorrect unless
    the reference is as long or as deep: algebra would take it for minutes, and no solution looks like that.

    Raises:
        ValueError: the reference answer cannot be parsed.
    """
    answer_text = extract_answer(text) or ""
    is_absurd = len(answer_text) > max(MAX_CHARACTERS, 2 * len(answer)) or _depth(answer_text) > MAX_DEPTH
    if is_absurd and _depth(answer) <= MAX_DEPTH:
        return False
    return bool(verify(_parse_reference(answer), _parse_completion(text), timeout_seconds=None))


is_correct.isolated = True  # type: ignore[attr-defined]
is_correct.extract = extract_answer  # type: ignore[attr-defined]


def _depth(text: str) -> int:
    """Maximum number of brackets that are open at a place in the text."""
    depth = deepest = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    return deepest


def _parse_completion(text: str) -> list[Any]:
    """The answer as math-verify reads it; empty where there is none."""
    marked = marked_answer(text)
    formula = None if marked is None else _bare_formula(marked)
    if formula is not None:
        parsed: list[Any] = parse(_tidied(f"{BOX}{formula}}}"), (_LATEX,), parsing_timeout=None)
        if parsed:
            return parsed
    answers: list[Any] = parse(_tidied(text if marked is None else marked), _ANY, parsing_timeout=None)
    return answers


def _bare_formula(marked: str) -> str | None:
    """A marked answer that is a formula without dollar signs, or a single word; else None."""
    marked = marked.strip().rstrip(".")
    if not marked or DELIMITERS.search(marked):
        return None
    words = WORD.findall(COMMAND.sub("", marked))
    return marked if not words or words == [marked] else None


def _tidied(text: str) -> str:
    r"""The same text with digit groups joined, units in a box marked as text, and `\fbox` as `\boxed`."""
    text = THIN_SPACE.sub("", text.replace("\\fbox{", BOX))
    return BARE_UNIT.sub(r"\1\\text{ \2}}", text)


@functools.lru_cache(maxsize=4096)  # the samples of a prompt share it
def _parse_reference(answer: str) -> list[Any]:
    r"""Parse a reference answer, with or without the `$` or `\boxed` of a worked solution."""
    bare = re.sub(r"(?<!\\)\$", "", answer)  # stray ones too: `221,$8`
    parsed: list[Any] = parse(_tidied(f"{BOX}{bare}}}"), (_LATEX,), parsing_timeout=None)
    if not parsed:
        raise ValueError(f"math-verify cannot read the reference answer {answer!r}")
    return parsed
