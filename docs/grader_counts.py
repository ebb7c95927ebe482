r"""Counts wrong verdicts of the grader of mathematics: the table of grading.md.

    python docs/grader_counts.py REFERENCES.jsonl... [--rollouts ROLLOUTS.jsonl...] [--save VERDICTS.json]

REFERENCES hold rows with an `answer`. Each reference is written in five forms, which must be judged correct; and the
reference of the next row, in the same forms, must be judged incorrect unless it is the same text. Both counts are
printed, and below them each case. ROLLOUTS hold rows `{answer, samples: [{text}]}`; their verdicts and extracted
answers go to VERDICTS, so that two versions can be compared: `PYTHONPATH` names the folder of another version. One
process, some minutes.
"""

import argparse
import itertools
import json
import signal
from pathlib import Path
from typing import Any

from srtrl.tasks.final_answer import extract_answer
from srtrl.tasks.math_verifier import is_correct

FORMS = {
    "boxed": "So it is $\\boxed{X}$.",
    "Markdown": "So it is this.\n\n**Answer: X**",
    "tags": "<think>\nWe see it.\n</think>\n\n<answer>\nX\n</answer>",
    "sentence": "We see it. The final answer is $X$.",
    "mark": "We see it.\n#### **X**",
}
SPELLINGS = (("\\frac", "\\dfrac"), ("\\left", ""), ("\\right", ""))
"""Other spellings in the form `boxed`, which make no difference."""
SECONDS = 10
"""Maximum time of one verdict."""


def written(form: str, answer: str) -> str:
    """A completion that gives the answer."""
    for old, new in SPELLINGS if form == "boxed" else ():
        answer = answer.replace(old, new)
    return FORMS[form].replace("X", answer.rstrip("$. ") if form == "sentence" else answer)


def verdict(text: str, answer: str) -> bool | str:
    """The verdict, or why there is none."""
    signal.alarm(SECONDS)
    try:
        return is_correct(text, answer)
    except (ValueError, TimeoutError) as error:
        return str(error)[:80]
    finally:
        signal.alarm(0)


def too_long(*_: object) -> None:
    """Ends a verdict."""
    raise TimeoutError("too long")


def plain(answer: str) -> str:
    """The answer without spellings that make no difference."""
    return "".join(answer.replace("dfrac", "frac").replace("\\left", "").replace("\\right", "").split())


def count(path: Path) -> None:
    """Print the counts of one file of references."""
    answers = [json.loads(line)["answer"] for line in path.read_text(encoding="utf-8").splitlines()]
    print(f"{path.name}: rejected, and accepted for another reference")
    for form in FORMS:
        negatives = [answer for answer in answers if verdict(written(form, answer), answer) is not True]
        others = [(one, other) for one, other in itertools.pairwise(answers) if plain(one) != plain(other)]
        positives = [(one, other) for one, other in others if verdict(written(form, other), one) is True]
        print(f"  {form}: {len(negatives)} of {len(answers)}, {len(positives)} of {len(others)}")
        for answer in negatives:
            print(f"    rejected: {answer}")
        for one, other in positives:
            print(f"    accepted for {one}: {other}")


def main() -> None:
    """Read the command line, and print all counts."""
    signal.signal(signal.SIGALRM, too_long)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("references", nargs="*", type=Path)
    parser.add_argument("--rollouts", nargs="*", type=Path, default=[])
    parser.add_argument("--save", type=Path)
    given = parser.parse_args()
    for path in given.references:
        count(path)
    found: dict[str, Any] = {}
    for path in given.rollouts:
        for row in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
            for index, sample in enumerate(row["samples"]):
                judged = verdict(sample["text"], row["answer"])
                found[f"{path.stem}/{row['id']}/{index}"] = [judged, extract_answer(sample["text"]), row["answer"]]
    print(f"rollouts: {sum(judged is True for judged, *_ in found.values())} of {len(found)} are correct")
    if given.save is not None:
        given.save.write_text(json.dumps(found, ensure_ascii=False), encoding="utf-8")


if __name__ == "__main__":
    main()
