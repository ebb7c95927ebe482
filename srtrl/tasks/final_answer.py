r"""The final answer of a completion as it is written: for the verifier, per-sample rows and majority votes.

Texts only, by regular expressions that take time linear in the text; the verifier decides whether two answers are
equal.
"""

import re
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from srtrl.types import Prompt

THOUGHT_BEGIN, THOUGHT_END = "<think>", "</think>"
"""Around a thought, which is no part of the answer."""
GOLD_MARK = "####"
"""Begins the last line of a worked solution of GSM8K."""
ANSWER_BEGIN, ANSWER_END = "<answer>", "</answer>"
"""Around the answer in the format of DeepSeek-R1."""
_STARS = r"(?<![\w)\]}{^*\\])(\*{1,3})(?=[^\s*])([^*]+)(?<!\s)\1(?![\w(*])"
EMPHASIS = re.compile(rf"{_STARS}|(?<!\w)__(?=\S)([^_]+)(?<!\s)__(?!\w)")
"""Bold and italic text of Markdown; no product, and no power of Python's: `2*3*4`, `2**3`, `x^*`."""
LAST_LINE = re.compile(r"(?im)^[\W_]{0,9}(?:final\s+)?answer[ \t*_]{0,9}(?::[\s*_]{0,40}|\n\s{0,9})([^\n]+)\Z")
"""The line that states the answer at the end, or the last line under such a heading: `Answer: 5`, `## Final answer`."""
BOX = "\\boxed{"
BOXED = re.compile(r"\\(?:boxed|fbox|framebox)\s{0,9}\{")
"""The spellings of `BOX`."""
BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
"""A brace; an escaped one is skipped."""
STATED = re.compile(r"(?i)(?:answer|result)[*_]{0,3} is:?\s*|\banswer[\s*_]{0,9}:\s*")
"""The words before a stated answer."""
_FORMULA = r"\$\$(.{1,999}?)\$\$|(?<!\\)\$([^$\n]{1,999})(?<!\\)\$|\\\[(.{1,999}?)\\\]|\\\((.{1,999}?)\\\)"
FORMULA = re.compile(_FORMULA, re.DOTALL)
"""A formula between its marks; of bounded length, so that many marks that none closes cost no quadratic time."""
STATEMENT = re.compile(rf"(?:{_FORMULA})?[^\n]*?(?=[.!]\s|\n|\Z)", re.DOTALL)
"""A stated answer: to the end of the sentence, or of the line; a formula at its begin may have several."""
_COMMA = r"(?<![\d,(\[{])\d+,(?:\d{1,2}|\d{4,})(?!\d|[.,]\d)"
_DECIMAL = r"(?:(?:\d{1,3}(?:[, \u00a0\u2009\u202f]\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d{1,3}\b)?"
_FRACTION = r"\\[dtc]?frac\{-?\d{1,99}\}\{\d{1,99}\}"
NUMBER = re.compile(rf"(?:(?<![\w)}}])[-\u2212])?(?:{_FRACTION}|{_COMMA}|{_DECIMAL}(?:/\d+)?(?:\s?\\?%)?)")
_AND = r"(?:[,;]|(?:[,;] ?)?(?:\\text\{ ?)?(?:and|or)(?: ?\})?)"
_NAME = r"(?:[A-Za-z](?:_\{?\w\}?)?\s{0,9}=\s{0,9})?"
JOINT = re.compile(rf"\s{{0,9}}(?:\$|\\[\])])?\s{{0,9}}{_AND}(?:\s|\\q?quad){{0,9}}(?:\$|\\[\[(])?\s{{0,9}}{_NAME}")
"""Between answers that are one set: `$\\boxed{1}$ and $\\boxed{2}$`, `x=\\boxed{1}, y=\\boxed{2}`."""
MAX_BOXES = 8
"""Boxes looked at, from the end, for one that is complete."""
MAX_STATED_CHARACTERS = 200
"""A stated answer is one line, and no longer than this."""
COMMAND = re.compile(r"\\(?:text|textbf|mathrm|mbox|operatorname|begin|end)\{[^{}]*\}|\\[A-Za-z]+|\b(?:exp|sqrt)\(")
WORD = re.compile(r"[A-Za-z]{3,}")
OTHER_DIGIT = re.compile(r"(?![0-9])\d")
UNITS = re.compile(r"(?<=[\d})])(?:\s+[A-Za-z]{3,})+$")
"""Words after a formula: `\\sqrt{2} square meters`."""


def as_judged(prompt: Prompt, text: str) -> str:
    """The completion as verifiers read it: with the `<think>` that ends its prompt, as DeepSeek-R1's template does."""
    return f"{THOUGHT_BEGIN}\n{text}" if prompt.text.rstrip().endswith(THOUGHT_BEGIN) else text


def with_thoughts_read(function: Callable[..., Any], text: str, *others: Any) -> Any:
    """The result of an extractor or a verifier for a completion whose thoughts are read as any other text."""
    return function(text.replace(THOUGHT_BEGIN, "\n").replace(THOUGHT_END, "\n"), *others)


def without_markup(text: str) -> str:
    """A completion without its thoughts, and without Markdown's emphasis and code marks.

    What follows the last `</think>` counts; nothing where a later `<think>` is not closed.
    """
    text = text.rpartition(THOUGHT_END)[2]
    text = "" if THOUGHT_BEGIN in text else text
    return EMPHASIS.sub(r"\2\3", with_ascii_digits(text).replace("`", ""))


def with_ascii_digits(text: str) -> str:
    """The text with `0` to `9` for the digits of other scripts."""
    return text if text.isascii() else OTHER_DIGIT.sub(lambda match: str(int(match[0])), text)


def extract_answer(text: str) -> str | None:
    r"""The final answer, or None where there is none.

    The first of these that the text has: the marked answer (`marked_answer`); the content of the last
    `\boxed{...}`, with those joined to it by a comma, "and" or "or" (no answer where it is empty or, after a complete
    one, cut off); the statement after the
    last "answer is" or "answer:"; the last formula between dollar signs or `\[ \]`, `\( \)`, or the last number,
    whichever ends later. In a marked answer that has words, the same order holds.
    """
    text = without_markup(text)
    marked = marked_answer(text)
    boxed = last_answer_box(text if marked is None else marked)
    if boxed is not None:
        return tidy(boxed) or None
    if marked is None:
        return _stated(text) or _last_value(text) or None
    return _formula(marked) or _stated(marked) or _last_value(marked) or tidy(marked) or None


def marked_answer(text: str) -> str | None:
    """The part of a text that is marked as its answer and excludes all others, or None.

    That is the last line after `####`; the content of `<answer>...</answer>` at the end; and where the text has no
    box, the text after `Answer:` in the last line, or the last line under a heading "Answer".
    """
    text = text.rstrip()
    last_line = text.rpartition("\n")[2].lstrip()
    if last_line.startswith(GOLD_MARK):
        return last_line.lstrip("#").strip()
    if (tagged := text.rstrip("*_ \n")).endswith(ANSWER_END):
        _, begin, content = tagged.removesuffix(ANSWER_END).rpartition(ANSWER_BEGIN)
        return content.strip() if begin else None
    stated = None if BOXED.search(text) else LAST_LINE.search(text)
    return None if stated is None else stated.group(1).strip()


def last_boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{...}`, braces balanced; None where it is missing, truncated or blank."""
    boxes = _boxes(text)
    return (boxes[-1][2] or None) if boxes else None


def last_answer_box(text: str) -> str | None:
    r"""The answer in a text's last boxes, or None.

    The last `\boxed{...}`, with those before it that belong to the same set of answers; empty where the last is empty
    or not closed. Where none is complete, what stands in one that is not closed, to the end of its line.
    """
    boxes = _boxes(text)
    if not boxes:
        return None
    complete, (_, end, content) = [box for box in boxes if box[2]], boxes[-1]
    if not complete and text[end - 1] == "{":
        return text[end:].partition("\n")[0].strip(" }")
    return _joined(text, complete) if content else ""


def _boxes(text: str) -> list[tuple[int, int, str]]:
    """(start, end, content) of the last boxes; one that is not closed has no content, and ends where that begins."""
    boxes = []
    for match in deque(BOXED.finditer(text), maxlen=MAX_BOXES):
        first, depth, content = match.end(), 0, ""
        for brace in BRACE.finditer(text, first - 1):
            depth += {"{": 1, "}": -1}.get(brace.group(), 0)
            if depth == 0 and brace.group() == "}":
                content = text[first : brace.start()].strip()
                first = brace.end()
                break
        boxes.append((match.start(), first, content))
    return boxes


def _joined(text: str, parts: Sequence[tuple[int, int, str]]) -> str:
    """The content of the last part, with those before it that only a `JOINT` separates; empty without parts."""
    first = len(parts) - 1
    while first > 0 and JOINT.fullmatch(text, parts[first - 1][1], parts[first][0]):
        first -= 1
    return ", ".join(dict.fromkeys(content for *_, content in parts[first:]))


def _formula(text: str) -> str | None:
    """A text that is a formula without dollar signs, or a single word; else None."""
    text = UNITS.sub("", tidy(text))
    words = WORD.findall(COMMAND.sub("", text))
    return text if not FORMULA.search(text) and (not words or words == [text]) else None


def _stated(text: str) -> str | None:
    """The last statement of an answer: a formula, or the last formula or number in it, or all of it."""
    for match in deque(STATED.finditer(text), maxlen=1):
        statement = STATEMENT.match(text, match.end())
        if statement is not None and len(statement.group()) <= MAX_STATED_CHARACTERS:
            return _formula(statement.group()) or _last_value(statement.group()) or tidy(statement.group())
    return None


def _last_value(text: str) -> str:
    """The last formulas or the last number, whichever ends later: `$5 and $7` are two sums of money, no formula."""
    formulas = [(match.start(), match.end(), tidy(match[match.lastindex or 0])) for match in FORMULA.finditer(text)]
    for number in deque(NUMBER.finditer(text), maxlen=1):
        if not formulas or formulas[-1][1] < number.end():
            return number.group()
    return _joined(text, formulas)


def tidy(answer: str) -> str:
    """The answer without the blanks, dollar signs, marks of Markdown and full stop around it."""
    answer = answer.lstrip(" \t\r\n$*_")
    tidy = answer.rstrip(" \t\r\n$*_.")
    return answer[: len(tidy) + 1] if tidy.endswith(("\\", "^")) else tidy  # `5\$`, `x^*`


def extractor(verifier: Callable[..., bool] | None) -> Callable[[str], str | None] | None:
    """The function from a completion to its final answer: the verifier's attribute `extract`, if any."""
    extract: Callable[[str], str | None] | None = getattr(verifier, "extract", None)
    return extract
