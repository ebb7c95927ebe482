r"""Multiple choice: choices in the prompt, a letter as the answer.

The verifier is plain string matching, so it needs no worker process.
"""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from string import ascii_uppercase
from typing import Any

from srtrl.tasks.final_answer import LAST_LINE as ANSWER_LINE
from srtrl.tasks.final_answer import last_answer_box, marked_answer, without_markup
from srtrl.tasks.rows import RowError, get_field

_WRAPPED = r"(?:\\text(?:bf|rm|tt)?\{|\\math(?:bf|rm|tt)\{|[\s$*_`\"'(\[{]){0,20}"
"""Text that may stand before a letter: `(B)`, `**B**`, `\\text{B}`, `\\textbf{(B)} 12`; bounded, to bound the time."""
_NO_WORD = r"(?![A-Za-z0-9]|['\u2019-][A-Za-z]|\s*=|\}?_[\w{])"
_LETTER = _WRAPPED + r"([A-Z])" + _NO_WORD
_ARTICLE = r"(?![AI]\s+(?!because|since|as\b|and\b)[a-z])"
ALONE = re.compile(rf"{_WRAPPED}{_ARTICLE}([A-Z]|[a-z](?=[\W_]*\Z)){_NO_WORD}")
"""A single capital letter, where one is expected, or a small one at the end; but `A prime number` is no choice of A."""
BEGIN = re.compile(_LETTER + r"(?=[)}\]*_.:,$]|\s+(?:because|since|as)\b)|\(?([a-h])[.):](?=\s)")
"""A text that begins with the letter, and goes on with a reason."""
_NOUN = r"(?:the\s{1,9})?(?:(?:correct|right|best|final)\s{1,9})?(?:answer|choice|option|letter)"
_IS = r"(?:is|['\u2019]s|would\s{1,9}be|must\s{1,9}be|should\s{1,9}be|has\s{1,9}to\s{1,9}be)"
_SAYS = rf"(?:answer|choice|option|letter)(?:\s{{1,9}}{_IS}|[\s*_]{{0,9}}[:=])(?:\s{{1,9}}{_NOUN})?\s{{0,9}}[:=]?"
_NOUNS = "antwort|réponse|respuesta|risposta|resposta|ответ|答案|答え"
_ELSEWHERE = rf"(?:{_NOUNS})(?:\s{{1,9}}(?:ist|est|es|è)\b|[\s*_]{{0,9}}[:=\uff1a是为]{{1,2}})|(?<!不)[选選]择?"
"""The same in other languages: `Antwort: C`, `答案是 C`."""
_PICKS = rf"\b(?:choose|chose|pick|select|go(?:ing)?\s{{1,9}}with)(?:\s{{1,9}}{_NOUN})?\s"
_IT_IS = rf"\b(?:it|this|that)(?:\s{{1,9}})?{_IS}(?:\s{{1,9}}{_NOUN})?\s"
STATED = re.compile(rf"(?i:{_SAYS}|{_PICKS}|{_IT_IS}|{_ELSEWHERE}){ALONE.pattern}")
"""`The answer is C`, `I choose option C`, `so it is C`."""
_RIGHT = r"(?i:is\s{1,9}(?:the\s{1,9})?(?:correct|right|true|best|answer)\b)"
CHOSEN = re.compile(rf"(?<!nor )(?<!not )(?<![\w'\u2019-]){_LETTER}[)*}}\].$]{{0,4}}\s{{1,9}}{_RIGHT}")
"""`C is correct`, `option (C) is the answer`."""
_SO = rf"(?i:\b(?:therefore|thus|hence|so|option|choice|answer)\b,?(?:\s{{1,9}}{_NOUN})?)"
CONCLUDED = re.compile(rf"(?m){_SO}\s{{0,9}}{_LETTER}[\W_]*$")
"""A line that ends in `so C`, `option C`."""
LAST_LINE = re.compile(r"^\W*([A-Za-z])[\W_]*$")
"""A line that is a letter and nothing else."""
_SECOND = _WRAPPED + r"[A-Z](?![A-Za-z0-9])"
_LISTED = rf"(?:and|or|&|/){_SECOND}|,{_SECOND}(?=\W{{0,4}}(?:$|,|and\b|or\b))"
SECOND = re.compile(rf"(?m)[)*}}\].$]{{0,4}}\s{{0,9}}(?:{_LISTED})")
"""After a letter: another one, so that none is chosen: `A and C`."""
OWN_LABEL = re.compile(r"\(?(?:([A-Z])[).:]|(\d{1,2})\))\s*")
"""A label at the begin of a choice: `A)21`, `(2) 21`."""


def read_choices(fields: Mapping[str, Any], name: str) -> tuple[list[str], list[str]]:
    """The choices in field `name`, and their labels; no labels where the row has none.

    Labels are the list in the field `label` or `labels` beside `name`, the keys of a mapping from labels to choices, or
    what stands in order at the begin of the choices: `A)21`. It is then no part of the texts. Or each choice is an
    object `{label, text}` (CommonsenseQA).

    Raises:
        RowError: the field is no list of 2 to 26 texts or numbers, or the labels are not as many, or not different.
    """
    choices, labels = get_field(fields, name), _labels_beside(fields, name)
    if isinstance(choices, Mapping):
        choices, labels = list(choices.values()), list(choices)
    elif isinstance(choices, list) and all(isinstance(item, Mapping) and "label" in item for item in choices):
        choices, labels = [item.get("text") for item in choices], [str(item["label"]).strip() for item in choices]
    is_list = isinstance(choices, Sequence) and not isinstance(choices, str)
    if not is_list or not 2 <= len(choices) <= len(ascii_uppercase):
        raise RowError(f"field `{name}` must be a list of 2 to 26 choices, it is {choices!r:.80}")
    for choice in choices:
        if not isinstance(choice, str | int | float) or isinstance(choice, bool):
            raise RowError(f"field `{name}` must hold texts or numbers, it holds {choice!r:.80}")
    texts = [str(choice) for choice in choices]
    if labels is None:
        own = [match for text in texts if (match := OWN_LABEL.match(text))]
        labels = [match[1] or match[2] for match in own]
        numbered = labels == [str(1 + index) for index in range(len(texts))]
        if numbered or labels == list(ascii_uppercase[: len(texts)]):
            texts = [match.string[match.end() :] for match in own]
        return texts, labels if numbered else []
    if len(labels) != len(texts) or len(set(labels)) < len(labels):
        raise RowError(f"field `{name}` has {len(texts)} choices, and as labels beside them {labels!r:.80}")
    return texts, labels


def _labels_beside(fields: Mapping[str, Any], name: str) -> list[str] | None:
    """The list in the field `label` or `labels` that stands where the choices do; None where there is no such list."""
    for beside in ("label", "labels"):
        with suppress(RowError):
            labels = get_field(fields, name[: name.rfind(".") + 1] + beside)
            if isinstance(labels, list):
                return [str(label).strip() for label in labels]
    return None


def render_choices(problem: str, choices: Sequence[str]) -> str:
    """The problem with one line a choice: `A. first`, `B. second`."""
    lines = [f"{letter}. {choice}" for letter, choice in zip(ascii_uppercase, choices, strict=False)]
    return "\n".join([problem, *lines])


def choice_letter(answer: str, num_choices: int, labels: Sequence[str], name: str) -> str:
    """The letter of a reference answer, given as its label; without labels, as a letter or an index that counts from 0.

    Raises:
        RowError: the answer in field `name` is neither, or beyond the choices.
    """
    letters = ascii_uppercase[:num_choices]
    names = labels or [*letters, *map(str, range(num_choices))]
    letter_of = dict(zip(map(str.upper, names), letters * 2, strict=False))
    if (letter := letter_of.get(answer.strip().upper())) is not None:
        return letter
    unlabelled = f"a letter A to {letters[-1]} or an index 0 to {num_choices - 1}"
    expected = f"one of the choices' labels {', '.join(labels)}" if labels else unlabelled
    raise RowError(f"field `{name}` must be {expected}, it is {answer.strip()!r}")


def extract_letter(text: str) -> str | None:
    r"""The letter that a completion chose, or None.

    The first of these that the text has: the last line after `####`; the content of `<answer>...</answer>` at the end;
    the last `\boxed{...}`; the last "answer is B", "Answer: (B)", "I choose B", "option B is correct", "so B"; a line
    of its own at the end, or a completion that begins with the letter and has no other line (`B. because ...`).
    """
    text = without_markup(text).strip()
    marked = marked_answer(text)
    if marked is not None:
        text = marked
    lines = text.splitlines()
    boxed = last_answer_box(text)
    if boxed is not None:
        line = ANSWER_LINE.search(text)
        return _letter(ALONE.match(boxed)) or (_letter(ALONE.match(line[1])) if line else None)
    stated = [match for pattern in (STATED, CHOSEN, CONCLUDED) for match in pattern.finditer(text)]
    if stated:
        return _letter(max(stated, key=lambda match: match.end()))
    return _letter(LAST_LINE.match(lines[-1] if lines else "")) or _letter(
        BEGIN.match(text) if len(lines) == 1 else None
    )


def is_chosen(text: str, answer: str) -> bool:
    """Whether the letter that a completion chose is that of the reference."""
    return extract_letter(text) == answer


is_chosen.extract = extract_letter  # type: ignore[attr-defined]


def _letter(match: re.Match[str] | None) -> str | None:
    return None if match is None or SECOND.match(match.string, match.end()) else match[match.lastindex or 0].upper()
