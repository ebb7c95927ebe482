"""What can be known to be wrong with a recipe before any weight is loaded: names, task options, paths, the machine."""

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from srtrl.recipe import Recipe
from srtrl.recipe_errors import Key, Problem, RecipeError
from srtrl.recipe_file import RecipeSource
from srtrl.resolve import resolve_function


@dataclass(frozen=True, slots=True)
class Signature:
    """How the trainer calls a function that a recipe names."""

    module: str
    """Where the bare names are."""
    num_positional: int
    keywords: tuple[str, ...] = ()


ADVANTAGE = Signature("srtrl.algorithms.advantages", 1)
LOSS = Signature("srtrl.algorithms.losses", 4, ("clip_low", "clip_high"))
REDUCTION = Signature("srtrl.algorithms.reductions", 2, ("sequence_lengths", "max_new_tokens"))
KL_ESTIMATOR = Signature("srtrl.algorithms.kl", 2)
FILTER = Signature("srtrl.algorithms.filters", 1)
REWARD = Signature("srtrl.tasks.rewards", 1)


def check_recipe(recipe: Recipe, source: RecipeSource | None = None, *, warm_start: bool = False) -> None:
    """Resolve every name in the recipe and look for the files it needs.

    Args:
        recipe: A recipe whose types and combinations are right.
        source: Where it was read from; with it, problems name the line or the override.
        warm_start: Check for `srtrl warm-start`, which may make the model that the recipe names.

    Raises:
        RecipeError: listing every problem.
    """
    problems = [*_function_problems(recipe), *_problems_of_parts(recipe, warm_start=warm_start)]
    if problems:
        raise RecipeError([source.located(problem) if source else problem for problem in problems])


def _function_problems(recipe: Recipe) -> Iterator[Problem]:
    algorithm = recipe.algorithm
    named: list[tuple[Key, Signature, str]] = [
        (("algorithm", "advantage"), ADVANTAGE, algorithm.advantage),
        (("algorithm", "loss"), LOSS, algorithm.loss),
        (("algorithm", "reduction"), REDUCTION, algorithm.reduction),
        (("algorithm", "kl", "estimator"), KL_ESTIMATOR, algorithm.kl.estimator),
        *((("algorithm", "filters", index), FILTER, name) for index, name in enumerate(algorithm.filters)),
        *((("rewards", index, "name"), REWARD, reward.name) for index, reward in enumerate(recipe.rewards)),
    ]
    for key, signature, name in named:
        try:
            _check_function(signature, name)
        except ValueError as error:
            yield Problem(key, str(error))


def _check_function(signature: Signature, name: str) -> None:
    """Raise ValueError for an unknown function, or one that the trainer could not call."""
    function = resolve_function(signature.module, name)
    arguments = dict.fromkeys(signature.keywords)
    try:
        inspect.signature(function).bind(*[None] * signature.num_positional, **arguments)
    except TypeError as error:
        call = ", ".join(
            [f"{signature.num_positional} arguments", *(f"{keyword}=..." for keyword in signature.keywords)]
        )
        raise ValueError(
            f"`{name}` cannot be called with ({call}): {error}; see {signature.module.replace('.', '/')}.py"
        ) from error


def _problems_of_parts(recipe: Recipe, *, warm_start: bool) -> Iterator[Problem]:
    from_scratch = warm_start and recipe.warm_start is not None and recipe.warm_start.architecture is not None
    checks: list[tuple[Key, Callable[[Recipe], None]]] = [
        (("task", "name"), _check_task),
        (("model", "path"), _check_architecture if from_scratch else _check_model),
        (("rollout", "drafter"), _check_drafter),
        (("device",), _check_device),
        (("log", "trackers"), _check_trackers),
    ]
    for key, check in checks:
        try:
            check(recipe)
        except RecipeError as error:
            yield from error.problems
        except ValueError as error:
            yield _problem_of(error, key)


def _problem_of(error: ValueError, default_key: Key) -> Problem:
    """A message that begins with its option ("task.options.train.files.0: no file ...") is a problem of that one."""
    option, _, message = str(error).partition(": ")
    if re.fullmatch(r"[a-z_]+(\.[a-z_0-9]+)*", option) and option.split(".")[0] == default_key[0]:
        return Problem(tuple(int(part) if part.isdecimal() else part for part in option.split(".")), message)
    return Problem(default_key, str(error))


def _check_task(recipe: Recipe) -> None:
    from srtrl.tasks.base import check_task

    check_task(recipe)


def _check_model(recipe: Recipe) -> None:
    """A local model must be there, of a supported architecture, with room for the lengths; the hub is not asked."""
    from srtrl.model.weights import read_config

    path = recipe.model.path
    if not (path.startswith("bundled:") or Path(path).exists() or _looks_local(path)):
        return
    _check_length(recipe, read_config(path).max_position_embeddings, path)


def _check_architecture(recipe: Recipe) -> None:
    """A model from scratch must have room for the lengths; `model.path` is not read."""
    assert recipe.warm_start is not None
    assert recipe.warm_start.architecture is not None
    num_positions = recipe.warm_start.architecture.max_position_embeddings
    _check_length(recipe, num_positions, "warm_start.architecture (max_position_embeddings)")


def _check_length(recipe: Recipe, num_positions: int, model: str) -> None:
    longest = recipe.rollout.max_prompt_tokens + recipe.rollout.max_new_tokens
    if longest > num_positions:
        key = ("rollout", "max_new_tokens")
        message = f"max_prompt_tokens + max_new_tokens = {longest} is beyond the {num_positions} positions of {model}"
        raise RecipeError([Problem(key, message)])


def _looks_local(path: str) -> bool:
    """A hub name is `name` or `organisation/name`; what cannot be one was meant as a folder."""
    return path.startswith((".", "/", "~")) or path.count("/") > 1


def _check_drafter(recipe: Recipe) -> None:
    from srtrl.trainer.build import build_drafter

    build_drafter(recipe)


def _check_device(recipe: Recipe) -> None:
    from srtrl.trainer.build import choose_device, is_deterministic

    is_deterministic(recipe, choose_device(recipe))


def _check_trackers(recipe: Recipe) -> None:
    from srtrl.trainer.build import check_trackers

    check_trackers(recipe.log.trackers)
