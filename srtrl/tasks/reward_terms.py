"""The recipe's `rewards`, resolved: each a function with its options, and where it runs."""

import functools
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from srtrl.recipe import RewardSection
from srtrl.resolve import check_options, resolve_function

RESERVED_NAMES = frozenset({"mean", "kl_penalty"})
"""`reward/...` metrics of the trainer."""


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


def resolve_rewards(sections: Sequence[RewardSection], max_new_tokens: int) -> list[Reward]:
    """Look up the rewards of a recipe and bind their options.

    Raises:
        ValueError: an unknown name, two of one name, an option that the function does not take, lacks or refuses, a
            function that is both `isolated` and `batched`, or that is isolated and that workers could not import.
    """
    rewards: list[Reward] = []
    for section in sections:
        function = resolve_function("srtrl.tasks.rewards", section.name)
        check_reward_options(section.name, function, section.options, max_new_tokens)
        reward = Reward(
            name=section.name.rpartition(":")[2],
            weight=section.weight,
            function=functools.partial(function, **section.options) if section.options else function,
            isolated=is_isolated(function),
            batched=bool(getattr(function, "batched", False)),
        )
        if reward.name in RESERVED_NAMES:
            raise ValueError(
                f"rewards: `{section.name}` cannot be logged as reward/{reward.name}, which is srtrl's own"
            )
        if any(reward.name == other.name for other in rewards):
            raise ValueError(f"rewards: two are named `{reward.name}`; their metrics would be one")
        if reward.isolated and reward.batched:
            raise ValueError(f"rewards: `{section.name}` is isolated and batched; a hang would then cost every sample")
        if reward.isolated:
            check_importable(section.name, reward.function)
        rewards.append(reward)
    return rewards


def check_reward_options(
    name: str, function: Callable[..., Any], options: Mapping[str, Any], max_new_tokens: int
) -> None:
    """Refuse options that the reward does not take, those that it lacks, and those that its own check refuses.

    Args:
        name: As the recipe has it.
        function: What it names.
        options: The recipe's `rewards.N.options`.
        max_new_tokens: The recipe's limit, for the function's own check (`with_options_check`).

    Raises:
        ValueError: naming the option.
    """
    check_options(name, function, options, num_positional=1)
    own_check = getattr(function, "check_options", None)
    if own_check is not None:
        own_check(max_new_tokens, **options)


def is_isolated(function: object) -> bool:
    """Whether the function is marked to run in worker processes."""
    return bool(getattr(function, "isolated", False))


def check_importable(what: str, function: object) -> None:
    """Refuse what a worker could not import: workers get functions by name, and their options as they are.

    Raises:
        ValueError: the function, or one of its options, cannot be pickled.
    """
    try:
        pickle.dumps(function)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(f"{what} is isolated and must be a function of an importable module: {error}") from error
