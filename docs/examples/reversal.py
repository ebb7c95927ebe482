"""A task of one's own: an example of docs/extending.md."""

from collections.abc import Sequence
from typing import Any

from srtrl.recipe.schema import Section
from srtrl.tasks.base import TaskBase
from srtrl.types import Prompt


class ReversalOptions(Section):
    """The documentation and check of `task.options`."""

    words: list[str]
    """Words to be spelt backwards."""
    num_eval: int = 1
    """How many of them, from the end, are held out."""


def is_reversed(text: str, answer: str) -> bool:
    """Whether the completion is the answer."""
    return text.strip() == answer


class Task(TaskBase):
    """Spell a word backwards."""

    Options = ReversalOptions
    verifier = staticmethod(is_reversed)  # None: there are no reference answers, and rewards alone judge

    def __init__(self, options: ReversalOptions, *, tokenizer: Any, max_prompt_tokens: int) -> None:
        prompts = [_prompt(word, tokenizer) for word in options.words]
        if too_long := [prompt.prompt_id for prompt in prompts if len(prompt.token_ids) > max_prompt_tokens]:
            raise ValueError(f"task.options.words: {too_long[0]} is longer than {max_prompt_tokens} tokens")
        self.train_prompts: Sequence[Prompt] = prompts[: -options.num_eval]
        self.eval_prompts: Sequence[Prompt] = prompts[-options.num_eval :]

    @classmethod
    def check_options(cls, options: ReversalOptions) -> None:
        """Refuse incorrect options before anything is loaded."""
        if len(options.words) <= options.num_eval:
            raise ValueError(f"task.options.words: expected more than num_eval ({options.num_eval}) words")

    def solution(self, prompt: Prompt) -> str:
        """The supervised target (a warm start)."""
        return prompt.answer


def _prompt(word: str, tokenizer: Any) -> Prompt:
    text = f"{word} backwards:"
    return Prompt(prompt_id=word, text=text, token_ids=tuple(tokenizer.encode(text)), answer=word[::-1])
