r"""Multiple choice: choices in the prompt, a letter as the answer.

The verifier is plain string matching, so it needs no worker process.
"""

import re
from collections.abc import Sequence
from string import ascii_uppercase
from typing import Any

from srtrl.tasks.final_answer import GOLD_MARK, last_complete_box
from srtrl.tasks.rows import RowError

_WRAPPED = r"(?:\\text(?:bf|rm|tt)?\{|\\math(?:bf|rm|tt)\{|[\s$*_`\"'(\[{]){0,20}"
"""Text that may stand before a letter: `(B)`, `**B**`, `\\text{B}`, `\\textbf{(B)} 12`; bounded, to bound the time."""
_LETTER = _WRAPPED + r"([A-Z])(?![A-Za-z0-9])"
ALONE = re.compile(_WRAPPED + r"([B-HJ-Z]|[AI](?!\s+(?!because|since|as\b|is\b)[a-z]))(?![A-Za-z0-9])")
"""A single capital letter, where one is expected; but `A prime number` is no choice of A."""
_STATES = (
    r"(?i:(?:answer|choice|option)(?:\s{1,9}is|\s{0,9}[:=])"
    r"(?:\s{1,9}(?:the\s{1,9})?(?:choice|option|letter))?\s{0,9}[:=]?)"
)
STATED = re.compile(_STATES + ALONE.pattern)
CHOSEN = re.compile(
    r"(?i:choice|option)\s" + _LETTER + r"[)*]{0,4}\s{1,9}(?i:is)\s{1,9}(?i:the\s{1,9})?(?i:correct|right|true)"
)
LAST_LINE = re.compile(r"^\W*" + _LETTER + r"[\W_]*$")
"""A line that is a letter and nothing else."""


def render_choices(problem: str, choices: Any, name: str) -> str:
    """The problem with one line a choice: `A. first`, `B. second`.

    Raises:
        RowError: field `name` is no list of 2 to 26 texts or numbers.
    """
    is_list = isinstance(choices, Sequence) and not isinstance(choices, str)
    if not is_list or not 2 <= len(choices) <= len(ascii_uppercase):
        raise RowError(f"field `{name}` must be a list of 2 to 26 choices, it is {choices!r:.80}")
    for choice in choices:
        if not isinstance(choice, str | int | float) or isinstance(choice, bool):
            raise RowError(f"field `{name}` must hold texts or numbers, it holds {choice!r:.80}")
    lines = [f"{letter}. {choice}" for letter, choice in zip(ascii_uppercase, choices, strict=False)]
    return "\n".join([problem, *lines])


def choice_letter(answer: str, num_choices: int, name: str) -> str:
    """The letter of a reference answer, given as that letter or as an index that counts from 0.

    Raises:
        RowError: the answer in field `name` is neither, or beyond the choices.
    """
    letters = ascii_uppercase[:num_choices]
    answer = answer.strip()
    if answer.isdecimal() and int(answer) < num_choices:
        return letters[int(answer)]
    if len(answer) == 1 and answer.upper() in letters:
        return answer.upper()
    raise RowError(
        f"field `{name}` must be a letter A to {letters[-1]} or an index 0 to {num_choices - 1}, it is {answer!r}"
    )


def extract_letter(text: str) -> str | None:
    r"""The letter that a completion chose, or None.

    The first of these that the text has: the last line after `####`; the last `\boxed{...}`; the last "answer is B",
    "Answer: (B)", "option B is correct"; a line of its own at the end, or a completion that begins with the letter and
    has no other line (`B. because ...`).
    """
    lines = text.strip().splitlines()
    last_line = lines[-1].strip() if lines else ""
    if last_line.startswith(GOLD_MARK):
        return _letter(ALONE.match(last_line.removeprefix(GOLD_MARK)))
    boxed = last_complete_box(text)
    if boxed is not None:
        return _letter(ALONE.match(boxed))
    stated = [*STATED.finditer(text), *CHOSEN.finditer(text)]
    if stated:
        return _letter(max(stated, key=lambda match: match.start()))
    return _letter(LAST_LINE.match(last_line)) or (_letter(ALONE.match(last_line)) if len(lines) == 1 else None)


def is_chosen(text: str, answer: str) -> bool:
    """Whether the letter that a completion chose is that of the reference."""
    return extract_letter(text) == answer


is_chosen.extract = extract_letter  # type: ignore[attr-defined]


def _letter(match: re.Match[str] | None) -> str | None:
    return None if match is None else match.group(1)
