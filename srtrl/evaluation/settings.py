"""The recipes of evaluations, made from the run's own, from a suite, and from the command line.

What is more specific comes first: the command line, then the recipe of a run on the task `math`, then the suite. So a
policy is prompted as it was trained unless the user chooses otherwise. The settings are in the table and in the JSON.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from srtrl.checks import build_checked
from srtrl.evaluation.suite import Benchmark, Suite
from srtrl.recipe.file import RecipeSource, build_recipe
from srtrl.recipe.schema import Recipe

PROMPT_OPTIONS = ("prompt_template", "chat_template", "chat_template_options", "system_prompt")
"""Options of the task `math` for the text of the prompt."""


def bare_source(model: str, max_prompt_tokens: int = 1024, max_new_tokens: int = 1024) -> RecipeSource:
    """The smallest recipe that an evaluation needs, with values for training that no length conflicts with.

    Prompts and responses have up to these numbers of tokens, or half of the model's positions where that is less.
    """
    rollout = {"num_prompts": 1, "num_samples": 2, **_lengths(model, max_prompt_tokens, max_new_tokens)}
    train = {"num_steps": 1, "micro_batch_tokens": 1 << 30}
    data = {"name": "eval", "model": {"path": model}, "rollout": rollout, "train": train}
    return RecipeSource(Path("--task"), data)


def suite_recipe(
    suite: Suite, benchmark: Benchmark, model: str, run: RecipeSource | None, overrides: Sequence[str]
) -> Recipe:
    """The evaluation of one benchmark of a suite.

    Args:
        suite: Its values hold where neither the command line nor `run` has any.
        benchmark: One of its benchmarks, located.
        model: The policy, as a folder or a name.
        run: The recipe of the run; None for a model.
        overrides: Of the command line.

    Raises:
        RecipeError: a value cannot be used.
    """
    where = f"benchmark {benchmark.name}"
    lengths = (suite.max_prompt_tokens, benchmark.max_new_tokens or suite.max_new_tokens)
    prompting: dict[str, Any] = {"prompt_template": benchmark.prompt_template or suite.prompt_template}
    if suite.system_prompt is not None:
        prompting["system_prompt"] = suite.system_prompt
    if run is None:
        source = bare_source(model, *lengths)
        source.put(("eval",), {"temperature": suite.temperature, "top_p": suite.top_p}, where)
    else:
        source = copy.deepcopy(run)
        source.put(("train", "micro_batch_tokens"), 1 << 30, where)  # only training reads it
        trained = build_recipe(run)
        if trained.task.name == "math":  # only then its prompts and lengths fit the suite's problems
            prompting = {name: value for name, value in trained.task.options.items() if name in PROMPT_OPTIONS}
        else:
            for name, value in _lengths(model, *lengths).items():
                source.put(("rollout", name), value, where)
    source.put(("task",), {"name": "math", "options": {**benchmark.options, **prompting}}, where)
    source.put(("rewards",), [{"name": "correct"}], where)
    changed = copy.deepcopy(source)
    changed.override(overrides)
    is_greedy = changed.data["eval"].get("temperature") == 0  # then all samples are the same
    source.put(("eval", "num_samples"), 1 if is_greedy else benchmark.num_samples or suite.num_samples, where)
    source.put(("eval", "num_problems"), None, where)
    source.override(overrides)
    return build_checked(source)


def _lengths(model: str, max_prompt_tokens: int, max_new_tokens: int) -> dict[str, int]:
    """These numbers of tokens, or half of the model's positions where that is less."""
    from srtrl.model.weights import read_config

    half = read_config(model).max_position_embeddings // 2
    return {"max_prompt_tokens": min(half, max_prompt_tokens), "max_new_tokens": min(half, max_new_tokens)}
