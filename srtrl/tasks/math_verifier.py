r"""Whether a completion gives the reference answer of a mathematical problem, by math-verify.

A module of its own, since worker processes import it: math-verify and sympy, but no torch.
"""

import functools
import logging
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

GOLD_MARK = "####"
_LATEX = LatexExtractionConfig(boxed_match_priority=0)
_ANY = (_LATEX, ExprExtractionConfig())

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns, for each process, that its timeouts are off


def is_correct(text: str, answer: str) -> bool:
    r"""Whether the final answer of a completion equals the reference answer.

    The final answer is what follows `####` where the last line starts with that (as in GSM8K); else, in this order, the
    last `\boxed{...}` (boxes that stand close together are one set of answers), what follows "final answer is" or
    "answer:", the last formula, the last number. These are math-verify's rules, with `\boxed` first. Equality is
    math-verify's too: symbolic, and numeric to six decimals.

    It may take for ever on some texts (`9^{9^{9^9}}`), so it is `isolated`: the worker process has the time limit, and
    math-verify's own, which need the main thread's alarm signal, are off.

    Raises:
        ValueError: the reference answer cannot be parsed.
    """
    last_line = text.rstrip().rpartition("\n")[2].lstrip()
    marked = last_line.removeprefix(GOLD_MARK)
    found = parse(text if marked == last_line else marked, _ANY, parsing_timeout=None)
    return bool(verify(_parse_reference(answer), found, timeout_seconds=None))


is_correct.isolated = True  # type: ignore[attr-defined]


@functools.lru_cache(maxsize=4096)  # the samples of a prompt share it
def _parse_reference(answer: str) -> list[Any]:
    r"""Parse a reference answer, with or without the `$` or `\boxed` of a worked solution."""
    parsed: list[Any] = parse(f"\\boxed{{{answer}}}", (_LATEX,), parsing_timeout=None)
    if not parsed:
        raise ValueError(f"math-verify cannot read the reference answer {answer!r}")
    return parsed
