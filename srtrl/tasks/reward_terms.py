"""The recipe's `rewards`, resolved: each a function with its options, and where it runs."""

import functools
import inspect
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from srtrl.recipe.schema import RewardSection
from srtrl.resolve import Caught, check_call, declared, resolve_function
from srtrl.tasks.reward_input import RewardInput

RESERVED_NAMES = frozenset({"mean", "kl_penalty"})
"""`reward/...` metrics of the trainer."""
OTHER_FORMS = frozenset({"completion_ids", "solution_str", "solution_strs"})
"""Parameters of rewards of TRL and of verl that are not given here."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Reward:
    """A resolved reward function."""

    name: str
    """Name of its metric: the function's, without the user's package."""
    weight: float
    function: Callable[..., Any]
    """Takes a `RewardInput`, or all of them if it is batched; the recipe's options are bound to it."""
    isolated: bool
    batched: bool
    awaited: bool
    """Whether it is a coroutine function."""


def resolve_rewards(sections: Sequence[RewardSection]) -> list[Reward]:
    """Look up the rewards of a recipe and bind their options.

    Raises:
        ValueError: an unknown name, two of one name, an option that the function does not take, lacks or refuses, a
            function that has two of the forms `isolated`, `batched` and coroutine, or that is isolated and that
            workers could not import. The message begins with the key: `rewards.0.name: `.
    """
    rewards: list[Reward] = []
    for index, section in enumerate(sections):
        try:
            reward = _resolve(section)
            if any(reward.name == other.name for other in rewards):
                raise ValueError(f"two are named `{reward.name}`, which is the name of a metric: leave one out")
        except ValueError as error:
            raise ValueError(f"rewards.{index}: {error}") from error
        rewards.append(reward)
    return rewards


def _resolve(section: RewardSection) -> Reward:
    function = resolve_function("srtrl.tasks.rewards", section.name)
    if foreign := OTHER_FORMS.intersection(inspect.signature(function).parameters):
        raise ValueError(
            f"`{section.name}` takes `{min(foreign)}`, as a reward of another trainer; here it takes one sample and "
            f"returns one number: `def {section.name.rpartition(':')[2]}(sample)`, with sample.text, "
            'sample.prompt.text and, for a field of the row, sample.prompt.metadata["field"] (docs/from_trl.md)'
        )
    bound = functools.partial(function, **section.options) if section.options else function
    if in_columns := "completions" in inspect.signature(function).parameters:
        bound = functools.partial(call_in_columns, function, section.options)
    else:
        check_call(section.name, function, 1, tuple(section.options))
    reward = Reward(
        name=section.name.rpartition(":")[2],
        weight=section.weight,
        function=bound,
        isolated=is_isolated(function),
        batched=in_columns or bool(getattr(function, "batched", False)),
        awaited=any(map(inspect.iscoroutinefunction, (function, getattr(function, "__call__", None)))),  # noqa: B004
    )
    if reward.name in RESERVED_NAMES:
        raise ValueError(f"`{section.name}` cannot be logged as reward/{reward.name}, which is srtrl's own")
    if reward.isolated and reward.batched:
        raise ValueError(f"`{section.name}` is isolated and batched; a hang would then cost every sample")
    if reward.awaited and (reward.isolated or reward.batched):
        raise ValueError(f"`{section.name}` is a coroutine function, of which all samples are awaited at once: no mark")
    if reward.isolated:
        check_importable(section.name, reward.function)
    return reward


def call_in_columns(
    function: Callable[..., Any], options: Mapping[str, Any], samples: Sequence[RewardInput]
) -> Iterator[Any]:
    """Call a reward in the form of TRL, `reward(completions, answer, **kwargs)`, in which each argument is a list.

    Args:
        function: Gets `prompts`, `completions` and the fields of the rows; those it names, or all with `**kwargs`.
            A completion is a list of one message if the row's `prompt` is a list of messages, else a text.
        options: Of the recipe.
        samples: To be rewarded.

    Returns:
        The rewards; 0.0 in place of None.
    """
    answers = [{"answer": one.prompt.answer} if one.prompt.answer else {} for one in samples]
    rows = [
        {**answer, "prompt": one.prompt.text, **one.prompt.metadata}
        for answer, one in zip(answers, samples, strict=True)
    ]
    columns = {name: [row.get(name) for row in rows] for name in dict.fromkeys(chain(*rows))}
    columns["completions"] = [
        [{"role": "assistant", "content": sample.text}] if isinstance(prompt, list) else sample.text
        for sample, prompt in zip(samples, columns["prompt"], strict=True)
    ]
    columns["prompts"] = columns.pop("prompt")
    takes_all = any(item.kind is item.VAR_KEYWORD for item in inspect.signature(function).parameters.values())
    values = function(**{**(columns if takes_all else declared(function, 0, columns)), **options})
    return (0.0 if value is None else value for value in values)


def is_isolated(function: object) -> bool:
    """Whether the function is marked to run in worker processes."""
    return bool(getattr(function, "isolated", False))


def check_importable(what: str, function: object) -> None:
    """Refuse what a worker could not import: workers get functions by name, and their options as they are.

    Raises:
        ValueError: the function, or one of its options, cannot be pickled.
    """
    if getattr(function, "func", function).__module__ == "__main__":
        raise ValueError(f"{what} is isolated, and workers do not run this program: import it from another file")
    with Caught() as caught:
        pickle.dumps(function)
    if caught.error is not None:
        reason = f"must be a function of an importable module: {caught.error}"
        raise ValueError(f"{what} is isolated and {reason}") from caught.error
