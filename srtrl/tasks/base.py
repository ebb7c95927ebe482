"""The interface of a task, and the task that a recipe names."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from srtrl.recipe.file import Problem, RecipeError, validate_section
from srtrl.recipe.schema import Recipe, Section, TaskSection
from srtrl.resolve import resolve_class
from srtrl.tasks.rendering import Message
from srtrl.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Verifier(Protocol):
    """Decides whether a completion is correct.

    With an attribute `isolated = True` it runs in worker processes that are killed when it takes too long, and must
    then be a function of a module (workers import it); otherwise it runs in the training process, must be quick and
    must end for any text. With an attribute `extract`, a quick function from a completion to its final answer (or
    None), evaluations hold majority votes and list the answers.
    """

    def __call__(self, text: str, answer: str, /) -> bool:
        """Whether `text` gives the reference `answer`: a completion, after `<think>` if its prompt ends with that."""


class Task(Protocol):
    """Prompts, their grading, and supervised targets.

    A task is a class with these attributes, a class attribute `Options` (a `Section`: the documentation and check of
    `task.options`), a constructor `(options, *, tokenizer, max_prompt_tokens)`, and a class method
    `check_options(options)` that raises ValueError for mistakes that can be seen before any weight is loaded. It may
    have a class method `typed_prompt(options, text)`: see `typed_prompts`.
    """

    @property
    def train_prompts(self) -> Sequence[Prompt]:
        """Problems to train on; empty where the options name none."""

    @property
    def eval_prompts(self) -> Sequence[Prompt]:
        """Held-out problems; empty where the options name none."""

    @property
    def load_report(self) -> dict[str, int]:
        """Counts of loading: `train/rows`, and where rows can be left out, `train/malformed`, `train/overlong`."""

    @property
    def verifier(self) -> Verifier | None:
        """The judge of all completions; None (best as an attribute of the class) where only rewards judge them."""

    def solution(self, prompt: Prompt) -> str:
        """The supervised target of a prompt; ValueError if its row has none."""


def check_task(recipe: Recipe) -> None:
    """Check the task's name and options without a tokenizer or weights; ValueError names the option and the reason."""
    task_class, options = _resolve_task(recipe.task)
    task_class.check_options(options)
    _check_judges(task_class, recipe)


def load_task(
    recipe: Recipe,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    max_prompt_tokens: int | None = None,
    tools: Sequence[dict[str, Any]] = (),
) -> Task:
    """Load the prompts of the recipe's task, tokenised for `tokenizer`, of at most `rollout.max_prompt_tokens`.

    Args:
        recipe: Its sections `task`, `rollout` and `rewards`.
        tokenizer: The policy's.
        max_prompt_tokens: In place of `rollout.max_prompt_tokens`.
        tools: For the chat template, where the task uses one.

    Raises:
        ValueError: the task's name, an option, or a row of its data is incorrect.
    """
    task_class, options = _resolve_task(recipe.task)
    if tools and "chat_template_options" in type(options).model_fields:
        template_options = {"tools": list(tools), **getattr(options, "chat_template_options", {})}
        options = options.model_copy(update={"chat_template_options": template_options})
    longest = max_prompt_tokens or recipe.rollout.max_prompt_tokens
    task: Task = task_class(options, tokenizer=tokenizer, max_prompt_tokens=longest)
    _check_judges(task, recipe)
    return task


def _check_judges(task: object, recipe: Recipe) -> None:
    """Refuse rewards and filters that need a verdict where the task, or its class, has no verifier."""
    if getattr(task, "verifier", True) is not None:
        return
    reason = f"asks whether a completion is correct, and the task {recipe.task.name} has no verifier"
    problems = [
        Problem(f"rewards.{index}.name", f"`correct` (the default) {reason}: name other rewards (docs/data.md)")
        for index, reward in enumerate(recipe.rewards)
        if reward.name == "correct"
    ]
    problems += [
        Problem(f"algorithm.filters.{index}", f"{name} {reason}: use drop_uniform")
        for index, name in enumerate(recipe.algorithm.filters)
        if name == "drop_all_right_or_wrong"
    ]
    if problems:
        raise RecipeError(*problems)


def typed_prompts(task: TaskSection, prompts: Sequence[str | list[Message]]) -> list[tuple[str, list[Message] | None]]:
    """Prompts as the task would ask them: what follows its class method `typed_prompt`; without one as they are.

    Returns:
        For each the text, and the messages of a task that uses the tokenizer's chat template.

    Raises:
        ValueError: messages for a task of texts.
    """
    task_class, options = _resolve_task(task)
    if not hasattr(options, "text_option") and not all(isinstance(prompt, str) for prompt in prompts):
        raise ValueError(f"prompts of the task {task.name} are texts, not messages: give texts, or --raw")
    typed_prompt = getattr(task_class, "typed_prompt", lambda _, text: (text, None))
    return [typed_prompt(options, prompt) for prompt in prompts]


def _resolve_task(task: TaskSection) -> tuple[Any, Section]:
    task_class = resolve_class("srtrl.tasks", task.name, "Task")
    options = getattr(task_class, "Options", None)
    if not (isinstance(options, type) and issubclass(options, Section)):
        raise ValueError(f"`{task.name}` is no task; expected a class with `Options`, a subclass of Section")
    return task_class, validate_section(options, dict(task.options), "task.options")
