"""Problems of reasoning-gym (`pip install reasoning-gym`), with its own difficulty and verifiers.

srtrl train recipe.yaml 'rewards=[{name: "reasoning:score"}]' \
  'task={name: "reasoning:Task", options: {dataset: chain_sum, difficulty: {max_terms: 3, max_digits: 2}}}'
"""

import json
from functools import cache
from typing import Any

from pydantic import Field
from reasoning_gym import create_dataset
from reasoning_gym.utils import extract_answer

from srtrl.recipe.schema import Section
from srtrl.tasks.base import TaskBase
from srtrl.tasks.rendering import apply_chat_template, tokenise
from srtrl.tasks.reward_input import RewardInput
from srtrl.types import Prompt


class ReasoningOptions(Section):
    """The problems; the held-out ones come after those to train on."""

    dataset: str
    """A name of reasoning-gym: `chain_sum`, `sudoku`, ..."""
    difficulty: dict[str, Any] = Field(default_factory=dict)
    """Options of the data set, such as `max_terms`."""
    num_train: int = 1000
    num_eval: int = 100
    seed: int = 0
    prompt_template: str = "{question}\nWrite the final answer between <answer> and </answer>.\n"
    chat_template: bool = False
    """Whether the tokenizer's chat template is put around the prompt."""


@cache
def _dataset(name: str, options: str) -> Any:
    return create_dataset(name, **json.loads(options))


class Task(TaskBase):
    """Problems that the reward `score` judges."""

    Options = ReasoningOptions
    verifier = None  # a score needs the whole problem, and may lie between 0 and 1

    def __init__(self, options: ReasoningOptions, *, tokenizer: Any, max_prompt_tokens: int) -> None:
        size = options.num_train + options.num_eval
        source = options.dataset, json.dumps({**options.difficulty, "seed": options.seed, "size": size})
        problems = [_dataset(*source)[index] for index in range(size)]
        texts = [options.prompt_template.replace("{question}", problem["question"]) for problem in problems]
        if options.chat_template:
            texts = apply_chat_template(tokenizer, [[{"role": "user", "content": text}] for text in texts], {})
        prompts = [
            Prompt(
                prompt_id=f"{options.dataset}-{index}",
                text=text,
                token_ids=(),
                answer=str(problem["answer"]),
                metadata={"problem": problem, "source": source},
            )
            for index, (problem, text) in enumerate(zip(problems, texts, strict=True))
        ]
        prompts = tokenise(tokenizer, prompts, add_special_tokens=not options.chat_template)
        self.train_prompts, self.eval_prompts = (
            [prompt for prompt in part if len(prompt.token_ids) <= max_prompt_tokens]
            for part in (prompts[: options.num_train], prompts[options.num_train :])
        )


def score(sample: RewardInput) -> float:
    """What the package's verifier gives to the text in `<answer>`, or without one to the last line: 0 to 1."""
    answer = extract_answer(sample.text) or sample.text.strip().rpartition("\n")[2]
    return float(_dataset(*sample.prompt.metadata["source"]).score_answer(answer, sample.prompt.metadata["problem"]))
