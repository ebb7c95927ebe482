r"""The final answer of a completion as it is written: for per-sample rows and for majority votes.

Texts only, by regular expressions that take time linear in the text; the verifier decides whether two answers are
equal. The order of the rules is that of `math_verifier.is_correct`.
"""

import re
from collections.abc import Callable

GOLD_MARK = "####"
"""Begins the last line of a worked solution of GSM8K."""
ANSWER_BEGIN, ANSWER_END = "<answer>", "</answer>"
"""Around the answer in the format of DeepSeek-R1."""
LAST_LINE = re.compile(r"^[\W_]{0,9}(?:final\s+)?answer[\s*_]{0,9}:[\s*_]*(.+)$", re.IGNORECASE)
"""A last line that states the answer: `Answer: 5`, `**Final answer:** 5`."""
BOX = "\\boxed{"
BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
"""A brace; an escaped one is skipped."""
STATED = re.compile(r"(?:final answer|answer|result) is:?\s*|\banswer[\s*]{0,9}:\s*(?:\*\*)?\s*", re.IGNORECASE)
"""The words before a stated answer."""
FORMULA = re.compile(r"\$\$(.{1,999}?)\$\$|\$([^$\n]{1,999})\$|\\\[(.{1,999}?)\\\]|\\\((.{1,999}?)\\\)", re.DOTALL)
"""A formula between its marks; of bounded length, so that many marks that none closes cost no quadratic time."""
NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:/\d+)?")
MAX_BOXES = 8
"""Boxes looked at, from the end, for one that is complete."""
MAX_STATED_CHARACTERS = 200
"""A stated answer is one line, and no longer than this."""


def extract_answer(text: str) -> str | None:
    r"""The final answer, or None where there is none.

    The first of these that the text has: the marked answer (`marked_answer`); the content of the last complete
    `\boxed{...}`; the statement after the last "answer is" or "answer:"; the last formula between dollar signs or
    `\[ \]`, `\( \)`, or the last number, whichever ends later.
    """
    marked = marked_answer(text)
    boxed = last_complete_box(text if marked is None else marked)
    if boxed is not None:
        return _tidy(boxed)
    if marked is not None:
        return _tidy(marked)
    return _stated(text) or _last_value(text)


def states_answer(text: str) -> bool:
    r"""Whether a text marks an answer: in a box, after `####` or `Answer:`, or in `<answer>` tags."""
    return marked_answer(text) is not None or last_complete_box(text) is not None


def marked_answer(text: str) -> str | None:
    """The part of a text that is marked as its answer and excludes all others, or None.

    That is the last line after `####`; the content of `<answer>...</answer>` at the end; and where the text has no
    box, the text after `Answer:` in the last line.
    """
    text = text.rstrip()
    last_line = text.rpartition("\n")[2].lstrip()
    if last_line.startswith(GOLD_MARK):
        return last_line.removeprefix(GOLD_MARK).strip()
    if text.endswith(ANSWER_END):
        _, begin, content = text.removesuffix(ANSWER_END).rpartition(ANSWER_BEGIN)
        return content.strip() if begin else None
    stated = None if BOX in text else LAST_LINE.match(last_line)
    return None if stated is None else stated.group(1).strip()


def last_boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{...}`, braces balanced; None where it is missing, truncated or blank."""
    start = text.rfind(BOX)
    return None if start < 0 else _box_at(text, start)


def last_complete_box(text: str) -> str | None:
    """As `last_boxed`, but an earlier box where the last one is truncated: a completion may end inside a box."""
    start = len(text)
    for _ in range(MAX_BOXES):
        start = text.rfind(BOX, 0, start)
        if start < 0:
            return None
        boxed = _box_at(text, start)
        if boxed is not None:
            return boxed
    return None


def _box_at(text: str, start: int) -> str | None:
    depth, first = 0, start + len(BOX)
    for match in BRACE.finditer(text, first - 1):
        depth += {"{": 1, "}": -1}.get(match.group(), 0)
        if depth == 0 and match.group() == "}":
            return text[first : match.start()].strip() or None
    return None


def _stated(text: str) -> str | None:
    """The last statement of an answer, to the end of its line: the formula or number in it, else all of it."""
    end = -1
    for match in STATED.finditer(text):
        end = match.end()
    if end < 0:
        return None
    line = text[end:].partition("\n")[0].strip()
    if not line or len(line) > MAX_STATED_CHARACTERS:
        return None
    return _last_value(line) or _tidy(line)


def _last_value(text: str) -> str | None:
    """The last formula or the last number, whichever ends later: `$5 and $7` are two sums of money, no formula."""
    formula = number = None
    for formula in FORMULA.finditer(text):  # noqa: B007  (the last one is wanted)
        pass
    for number in NUMBER.finditer(text):  # noqa: B007
        pass
    if formula is not None and (number is None or formula.end() >= number.end()):
        return _tidy(next(part for part in formula.groups() if part is not None))
    return None if number is None else number.group()


def _tidy(answer: str) -> str | None:
    """Without the dollar signs, blanks and full stop around it; None where nothing is left."""
    return answer.strip(" \t\r\n$").rstrip(".").strip() or None


def extractor(verifier: Callable[..., bool] | None) -> Callable[[str], str | None] | None:
    """The function from a completion to its final answer: the verifier's attribute `extract`, if any."""
    extract: Callable[[str], str | None] | None = getattr(verifier, "extract", None)
    return extract
