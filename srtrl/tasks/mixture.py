"""Several tasks in one run: `task:` is a list, and each sample is graded as its own task says.

A recipe's list of two or more tasks is this task with them as `options.tasks`. Its prompts are theirs end to end; their
ids begin with the task's label. Draws are shared by weight in fixed proportions: see `MixedOrder`.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction
from functools import partial
from itertools import accumulate, chain, zip_longest
from typing import TYPE_CHECKING, Any

from pydantic import Field, field_validator

from srtrl.recipe.file import RecipeError
from srtrl.recipe.schema import MixedTaskSection, RewardSection, Section
from srtrl.tasks.base import TaskBase, load_section, needs_network, resolve_task
from srtrl.tasks.order import DataOrder, Order
from srtrl.tasks.reward_terms import resolve_rewards
from srtrl.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class MixtureOptions(Section):
    """The tasks of a mixture."""

    tasks: list[MixedTaskSection] = Field(min_length=1)
    """The tasks, each with its weight."""

    @field_validator("tasks")
    @classmethod
    def check_tasks(cls, tasks: list[MixedTaskSection]) -> list[MixedTaskSection]:
        """Refuse two tasks of one label, and a mixture in a mixture."""
        labels = [task.shown_label for task in tasks]
        if twice := [label for label, count in Counter(labels).items() if count > 1]:
            raise ValueError(f"two tasks are labelled `{twice[0]}`, which names their metrics: give one another label")
        if any(task.name == "mixture" for task in tasks):
            raise ValueError("a mixture has no mixture inside: list all tasks side by side")
        return tasks


class MixedOrder(Order):
    """Which prompt of a mixture is drawn when: a pure function of (seed, draw), as `DataOrder`.

    A draw takes the task whose (draws so far + 1) / weight is smallest, the first of equals. Within a task each epoch
    is a permutation of its own, laid end to end. The number of draws is saved by checkpoints; all else follows from it.

    Args:
        orders: Of each task; its prompts follow those of the tasks before it.
        weights: Of each task, taken as written in decimals.
        labels: The last part of each task's metric.
    """

    def __init__(self, orders: Sequence[Order], weights: Sequence[float], labels: Sequence[str]) -> None:
        self._orders, self._labels = orders, labels
        *self._starts, self.num_prompts = accumulate((order.num_prompts for order in orders), initial=0)
        self._weights = [Fraction(str(weight)) for weight in weights]
        self._places: list[tuple[int, int]] = []  # [draw]: its task, and how many draws of this task are before it
        self._counts = [0] * len(orders)

    def place_of(self, draw: int) -> tuple[int, int]:
        """Index of the task of draw `draw` of the run (0-based), and the number of earlier draws of this task."""
        while len(self._places) <= draw:
            shares = [(count + 1) / weight for count, weight in zip(self._counts, self._weights, strict=True)]
            task = shares.index(min(shares))
            self._places.append((task, self._counts[task]))
            self._counts[task] += 1
        return self._places[draw]

    def prompt_of(self, draw: int) -> int:
        """Prompt index of draw `draw` of the run (0-based)."""
        task, place = self.place_of(draw)
        return self._starts[task] + self._orders[task].prompt_of(place)

    def epochs(self, num_draws: int) -> dict[str, float]:
        """`data/epoch` of all prompts after `num_draws` draws, and that of each task."""
        counts = Counter(self.place_of(draw)[0] for draw in range(num_draws))
        orders = zip(self._labels, self._orders, strict=True)
        own = {f"data/epoch/{label}": counts[task] / order.num_prompts for task, (label, order) in enumerate(orders)}
        return {"data/epoch": num_draws / self.num_prompts, **own}


def _judged_by_its_task(text: str, answer: str, /) -> bool:
    raise AssertionError("a sample of a mixture is judged by its own task")


class Task(TaskBase):
    """The tasks of `options.tasks` as one."""

    Options = MixtureOptions
    verifier = staticmethod(_judged_by_its_task)
    """Never called: each sample is judged by the verifier of its task (`judged_by`)."""

    def __init__(
        self, options: MixtureOptions, *, tokenizer: "PreTrainedTokenizerBase", max_prompt_tokens: int
    ) -> None:
        self.sections = options.tasks
        self.labels = [section.shown_label for section in options.tasks]
        self.parts: list[TaskBase] = []
        for index, section in enumerate(options.tasks):
            with _errors_of(index):
                part = load_section(section, tokenizer, max_prompt_tokens=max_prompt_tokens)
                if part.verifier is None:
                    raise ValueError(f"task.name: {section.name} has no verifier, which each of several tasks needs")
                if not part.train_prompts:
                    raise ValueError("task.options: no training prompts; each of several tasks needs some")
                self.parts.append(part)
        prompts = [_labelled(label, part.train_prompts) for label, part in zip(self.labels, self.parts, strict=True)]
        self.train_prompts = list(chain(*prompts))
        held_out = [_labelled(label, part.eval_prompts) for label, part in zip(self.labels, self.parts, strict=True)]
        # In turns, so that the first `eval.num_problems` are of all tasks.
        self.eval_prompts = [prompt for some in zip_longest(*held_out) for prompt in some if prompt is not None]
        names = dict.fromkeys(chain(*(part.load_report for part in self.parts)))
        self.load_report = {name: sum(part.load_report.get(name, 0) for part in self.parts) for name in names}

    def label_of(self, prompt: Prompt) -> str:
        """The label of a prompt's task."""
        return prompt.prompt_id.partition("/")[0]

    def judged_by(self, rewards: Sequence[RewardSection]) -> Mapping[str, tuple[TaskBase, Sequence[RewardSection]]]:
        """Each task, with its own rewards or the recipe's."""
        tasks = zip(self.labels, self.parts, self.sections, strict=True)
        return {label: (part, section.rewards or rewards) for label, part, section in tasks}

    def order(self, seed: int, *, is_shuffled: bool = True) -> MixedOrder:
        """Draws in the proportions of the tasks' weights."""
        sizes = [len(part.train_prompts) for part in self.parts]
        orders = [DataOrder(size, seed, index, is_shuffled=is_shuffled) for index, size in enumerate(sizes)]
        return MixedOrder(orders, [section.weight for section in self.sections], self.labels)

    @classmethod
    def check_options(cls, options: MixtureOptions) -> None:
        """Check each task's options and rewards; ValueError."""
        for index, section in enumerate(options.tasks):
            with _errors_of(index):
                task_class, own = resolve_task(section)
                task_class.check_options(own)
                resolve_rewards(section.rewards or ())

    @classmethod
    def needs_network(cls, options: MixtureOptions) -> bool:
        """Whether one of the tasks is downloaded."""
        return any(map(needs_network, options.tasks))

    @classmethod
    def typed_prompt(cls, options: MixtureOptions, text: Any) -> Any:
        """Refused: there is no telling whose prompt it is."""
        raise ValueError("a mixture of tasks does not say whose prompt it is: give --raw")


@contextmanager
def _errors_of(index: int) -> Iterator[None]:
    """Errors inside name the keys of this task of the list: `task.1.options...` for `task.options...`."""
    rename = partial(re.sub, r"^(task\.|(?=rewards\b))", f"task.{index}.")
    try:
        yield
    except RecipeError as error:
        raise RecipeError(*(replace(item, key=rename(item.key)) for item in error.problems)) from error
    except ValueError as error:
        what = rename(str(error))
        raise ValueError(what if what.startswith("task.") else f"task.{index}: {what}") from error


def _labelled(label: str, prompts: Iterable[Prompt]) -> list[Prompt]:
    return [replace(prompt, prompt_id=f"{label}/{prompt.prompt_id}") for prompt in prompts]
