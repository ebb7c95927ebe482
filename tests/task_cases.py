"""A tokenizer that needs no file, and a task that is its verifier, for tests of tasks and grading."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from srtrl.tasks.base import TaskBase, Verifier
from srtrl.tasks.reward_input import RewardInput
from srtrl.types import FinishReason, Prompt


def byte_tokenizer(template: str = "<s> $A") -> PreTrainedTokenizerBase:
    """One token a byte; `template` says which special tokens it adds."""
    vocab = {"<s>": 0, "</s>": 1}
    vocab |= {symbol: 2 + index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=[("<s>", 0), ("</s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")  # type: ignore[no-untyped-call]


def cases_in(name: str) -> list[str]:
    """The lines of a file in `tests/answers`, with ⏎ for a line break and ␣ for a space at the end."""
    text = (Path(__file__).parent / "answers" / name).read_text(encoding="utf-8")
    return [line.replace("⏎", "\n").replace("␣", " ") for line in text.splitlines()]


def wait_until(is_so: Callable[[], bool], what: str = "it has not happened", seconds: float = 60) -> None:
    """Wait for what other processes and threads do; the limit is that of a hang, and not of a busy machine."""
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def prompt_of(answer: str, number: int = 0) -> Prompt:
    return Prompt(prompt_id=f"p{number}", text="?", token_ids=(1,), answer=answer)


def sample_of(text: str, num_tokens: int = 1, max_new_tokens: int = 1) -> RewardInput:
    counts: dict[str, Any] = {"num_tokens": num_tokens, "max_new_tokens": max_new_tokens}
    return RewardInput(prompt=prompt_of("1"), text=text, finish_reason="stop", **counts)


def to_grade(
    prompt: Prompt, text: str, finish_reason: FinishReason = "stop", num_tokens: int = 1, **others: Any
) -> RewardInput:
    """A sample as it is given to a grader."""
    options = {"max_new_tokens": 10} | others
    return RewardInput(prompt=prompt, text=text, finish_reason=finish_reason, num_tokens=num_tokens, **options)


class Rows(TaskBase):
    """A task without rows, for what needs its verifier only."""

    def __init__(self, verifier: Verifier | None) -> None:
        self.verifier = verifier


def processes_of(command: bytes, parent: int | None = None) -> set[int]:
    """Numbers of the processes with this in their command (that are children of `parent`), without those that ended."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            arguments = (folder / "cmdline").read_bytes()
            state, parent_of, *_ = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if command in arguments and state != "Z" and parent in (None, int(parent_of)):
            found.add(int(folder.name))
    return found
