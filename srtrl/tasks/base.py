"""The interface of a task, and the task that a recipe names."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from srtrl.recipe.file import Problem, RecipeError, validate_section
from srtrl.recipe.schema import Recipe, RewardSection, Section, TaskSection
from srtrl.resolve import Caught, describe_error, describe_value, resolve_class
from srtrl.tasks.order import DataOrder, Order
from srtrl.tasks.rendering import Message
from srtrl.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NAME_SOME = "name some in task.options"
"""Advice for a task without held-out problems; from Python it is an argument (srtrl/api.py)."""
NO_HELD_OUT = (
    f"task {{}} has no held-out problems: {NAME_SOME}, or train without evaluation "
    "(eval.before_and_after=false, no eval.every_steps)"
)


class Verifier(Protocol):
    """Decides whether a completion is correct.

    With an attribute `isolated = True` it runs in worker processes that are killed when it takes too long, and must
    then be a function of a module (workers import it); otherwise it runs in the training process, must be quick and
    must end for any text. With an attribute `extract`, a quick function from a completion to its final answer (or
    None), evaluations hold majority votes and list the answers.
    """

    def __call__(self, text: str, answer: str, /) -> bool:
        """Whether `text` gives the reference `answer`: a completion, after `<think>` if its prompt ends with that."""


class TaskBase:
    """Prompts, their grading, and supervised targets. A task is a subclass; what it leaves out is as here."""

    Options: type[Section] = Section
    """The documentation and check of `task.options`."""
    train_prompts: Sequence[Prompt] = ()
    """Problems to train on; empty if the options name none."""
    eval_prompts: Sequence[Prompt] = ()
    """Held-out problems; empty if the options name none."""
    load_report: Mapping[str, int] = MappingProxyType({})
    """Counts of loading: `train/rows`, and where rows can be left out, `train/malformed`, `train/overlong`
    and `train/without_answer`."""

    def __init__(self, options: Any, *, tokenizer: "PreTrainedTokenizerBase", max_prompt_tokens: int) -> None:
        """Load the prompts of at most so many tokens; ValueError for what is wrong with the data."""

    @cached_property
    def verifier(self) -> Verifier | None:
        """The judge of all completions; None (best as an attribute of the class) where only rewards judge them."""
        return None

    def label_of(self, prompt: Prompt) -> str:
        """The label of the task in a mixture that a prompt is of; empty where the task is no mixture."""
        return ""

    def judged_by(self, rewards: Sequence[RewardSection]) -> Mapping[str, tuple["TaskBase", Sequence[RewardSection]]]:
        """The task whose verifier judges the prompts of each label, and their rewards: the recipe's, or its own."""
        return {"": (self, rewards)}

    def order(self, seed: int, *, is_shuffled: bool = True) -> Order:
        """Which training prompt is drawn when, if that depends on no sample."""
        return DataOrder(len(self.train_prompts), seed, is_shuffled=is_shuffled)

    @classmethod
    def check_options(cls, options: Any) -> None:
        """Raise ValueError for mistakes in the options that can be seen before any weight is loaded."""

    @classmethod
    def needs_network(cls, options: Any) -> bool:
        """Whether the prompts are downloaded."""
        return False

    @classmethod
    def typed_prompt(cls, options: Any, text: Any) -> tuple[str, list[Message] | None]:
        """A prompt that is not of the task's data as the task would ask it; see `typed_prompts`."""
        return text, None

    def solution(self, prompt: Prompt) -> str:
        """The supervised target of a prompt; ValueError if it has none."""
        raise ValueError(f"{prompt.prompt_id} has no solution: this task has none")


def check_task(recipe: Recipe) -> None:
    """Check the task's name and options without a tokenizer or weights; ValueError names the option and the reason."""
    task_class, options = resolve_task(recipe.task)
    task_class.check_options(options)
    _check_judges(task_class, recipe)
    wants_eval = recipe.eval.before_and_after is True or recipe.eval.every_steps is not None
    if wants_eval and getattr(options, "eval", options) is None:
        raise ValueError(f"task.options.eval: {NO_HELD_OUT.format(recipe.task.name)}")


def needs_network(task: TaskSection) -> bool:
    """Whether loading the task downloads something."""
    task_class, options = resolve_task(task)
    return task_class.needs_network(options)


def load_task(
    recipe: Recipe,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    max_prompt_tokens: int | None = None,
    tools: Sequence[dict[str, Any]] = (),
) -> TaskBase:
    """Load the prompts of the recipe's task, tokenised for `tokenizer`, of at most `rollout.max_prompt_tokens`.

    Args:
        recipe: Its sections `task`, `rollout` and `rewards`.
        tokenizer: The policy's.
        max_prompt_tokens: In place of `rollout.max_prompt_tokens`.
        tools: For the chat template, if the task uses one.

    Raises:
        ValueError: the task's name, an option, or a row of its data is incorrect.
    """
    longest = max_prompt_tokens or recipe.rollout.max_prompt_tokens
    task = load_section(recipe.task, tokenizer, max_prompt_tokens=longest, tools=tools)
    _check_judges(task, recipe)
    return task


def load_section(
    section: TaskSection,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    max_prompt_tokens: int,
    tools: Sequence[dict[str, Any]] = (),
) -> TaskBase:
    """As `load_task`, for one section."""
    task_class, options = resolve_task(section)
    if tools and "chat_template_options" in type(options).model_fields:
        template_options = {"tools": list(tools), **getattr(options, "chat_template_options", {})}
        options = options.model_copy(update={"chat_template_options": template_options})
    with Caught() as caught:
        task = task_class(options, tokenizer=tokenizer, max_prompt_tokens=max_prompt_tokens)
    if (error := caught.error) is not None:
        if ":" not in section.name:
            raise error
        what = str(error) if isinstance(error, ValueError) else f"task.name: raised {describe_error(error)}"
        raise ValueError(what) from error
    return task


def _check_judges(task: TaskBase | type[TaskBase], recipe: Recipe) -> None:
    """Refuse rewards and filters that need a verdict if the task, or its class, has no verifier."""
    if task.verifier is not None:
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
    if recipe.train.keep_best in ("eval/accuracy", "eval/solved_any"):
        problems.append(Problem("train.keep_best", f"{recipe.train.keep_best} {reason}: expected eval/reward"))
    if problems:
        raise RecipeError(*problems)


def typed_prompts(task: TaskSection, prompts: Sequence[str | list[Message]]) -> list[tuple[str, list[Message] | None]]:
    """Prompts as the task would ask them, by its class method `typed_prompt`.

    Returns:
        For each the text, and the messages of a task that uses the tokenizer's chat template.

    Raises:
        ValueError: messages for a task of texts.
    """
    task_class, options = resolve_task(task)
    if not hasattr(options, "text_option") and not all(isinstance(prompt, str) for prompt in prompts):
        raise ValueError(f"prompts of the task {task.name} are texts, not messages: give texts, or --raw")
    return [task_class.typed_prompt(options, prompt) for prompt in prompts]


def resolve_task(task: TaskSection) -> tuple[type[TaskBase], Section]:
    """The class that a task names, and its options."""
    task_class = resolve_class("srtrl.tasks", task.name, "Task")
    if not (isinstance(task_class, type) and issubclass(task_class, TaskBase)):
        raise ValueError(f"`{task.name}` is no task; expected a subclass of {__name__}:TaskBase")
    options = task_class.Options
    if not (isinstance(options, type) and issubclass(options, Section)):
        raise ValueError(f"`{task.name}`: its `Options` is {describe_value(options)}; expected a subclass of Section")
    return task_class, validate_section(options, dict(task.options), "task.options")
