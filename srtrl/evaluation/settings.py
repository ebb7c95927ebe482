"""What each evaluation runs with: recipes made from the run's own, from a suite, and from the command line.

What is more specific comes first: the command line, then the recipe of a run on the task `math`, then the suite. So a
policy is prompted as it was trained unless the user chooses otherwise. What was used is in the table and in the JSON.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from srtrl.checks import build_checked
from srtrl.environments.options import EnvironmentFlags
from srtrl.evaluation.suite import Benchmark, OpenSuite, Suite
from srtrl.recipe.file import RecipeSource, build_recipe
from srtrl.recipe.schema import Recipe

PROMPT_OPTIONS = ("prompt_template", "chat_template", "chat_template_options", "system_prompt")
"""Options of the task `math` that say how a policy is asked."""
KEYS = {
    "task": "task.name",
    "samples": "eval.num_samples",
    "problems": "eval.num_problems",
    "temperature": "eval.temperature",
    "max_new_tokens": "rollout.max_new_tokens",
    "seed": "seed",
    "prompt_template": "task.options.prompt_template",
    "chat": "task.options.chat_template",
}
"""Flag of the command line -> what it replaces in the recipe."""


@dataclass(kw_only=True, slots=True, frozen=True)
class EvalFlags:
    """The command line's values; None where it has none."""

    task: str | None = None
    samples: int | None = None
    problems: int | None = None
    temperature: float | None = None
    max_new_tokens: int | None = None
    seed: int | None = None
    prompt_template: str | None = None
    chat: bool | None = None
    environment: EnvironmentFlags = field(default_factory=EnvironmentFlags)
    overrides: Sequence[str] = ()
    import_from_here: bool = False
    """Trust the recipe of a run with modules of the current folder."""

    def __post_init__(self) -> None:
        """Refuse what would otherwise be blamed on a recipe."""
        template = self.prompt_template
        if template is not None and not any(name in template for name in ("{problem}", "{prompt}")):
            raise ValueError(f"--prompt-template: it must contain {{problem}} (task prompts: {{prompt}}): {template!r}")

    def put(self, source: RecipeSource) -> None:
        """Put the flags into the recipe's data, then the overrides; errors name the flag."""
        source.put(("model", "compile"), False, "srtrl eval")  # for the update only; there may be no compiler here
        for name, key in KEYS.items():
            value = getattr(self, name)
            if value is not None:
                source.put(key.split("."), value, f"--{name.replace('_', '-')}")
        self.environment.put(source)
        source.override(self.overrides)


def bare_source(model: str, max_prompt_tokens: int = 1024, max_new_tokens: int = 1024) -> RecipeSource:
    """The smallest recipe that an evaluation needs, with values for training that no length conflicts with.

    Prompts and responses have up to these numbers of tokens, or half of the model's positions where that is less.
    """
    rollout = {"num_prompts": 1, "num_samples": 2, **_lengths(model, max_prompt_tokens, max_new_tokens)}
    train = {"num_steps": 1, "micro_batch_tokens": 1 << 30}
    data = {"name": "eval", "model": {"path": model}, "rollout": rollout, "train": train}
    return RecipeSource(Path("--task"), data)


def task_recipe(source: RecipeSource, flags: EvalFlags) -> Recipe:
    """The evaluation of the task that a recipe names.

    Raises:
        RecipeError: a value is wrong.
    """
    flags.put(source)
    return build_checked(source)


def suite_recipes(suite: OpenSuite, model: str, run: RecipeSource | None, flags: EvalFlags) -> dict[str, Recipe]:
    """Name of each benchmark of a suite -> the recipe of its evaluation; see `suite_recipe`."""
    return {one.name: suite_recipe(suite.suite, one, model, run, flags) for one in suite.benchmarks}


def suite_recipe(suite: Suite, benchmark: Benchmark, model: str, run: RecipeSource | None, flags: EvalFlags) -> Recipe:
    """The evaluation of one benchmark of a suite.

    Args:
        suite: Its values hold where neither the command line nor `run` has any.
        benchmark: One of its benchmarks, located.
        model: What is evaluated.
        run: The recipe of the run; None for a model.
        flags: The command line.

    Raises:
        RecipeError: a value is wrong.
    """
    where = f"benchmark {benchmark.name}"
    lengths = (suite.max_prompt_tokens, benchmark.max_new_tokens or suite.max_new_tokens)
    prompting: dict[str, Any] = {"prompt_template": benchmark.prompt_template or suite.prompt_template}
    if suite.system_prompt is not None:
        prompting["system_prompt"] = suite.system_prompt
    temperature = suite.temperature
    if run is None:
        source = bare_source(model, *lengths)
        source.put(("eval",), {"temperature": temperature, "top_p": suite.top_p}, where)
    else:
        source = copy.deepcopy(run)
        source.put(("train", "micro_batch_tokens"), 1 << 30, where)  # only training reads it
        trained = build_recipe(run)
        temperature = trained.eval.temperature
        if trained.task.name == "math":  # only then its prompts and lengths fit the suite's problems
            prompting = {name: value for name, value in trained.task.options.items() if name in PROMPT_OPTIONS}
        else:
            for name, value in _lengths(model, *lengths).items():
                source.put(("rollout", name), value, where)
    source.put(("task",), {"name": "math", "options": {**benchmark.options, **prompting}}, where)
    source.put(("rewards",), [{"name": "correct"}], where)
    is_greedy = (temperature if flags.temperature is None else flags.temperature) == 0
    num_samples = 1 if is_greedy else benchmark.num_samples or suite.num_samples
    source.put(("eval", "num_samples"), num_samples, where)
    source.put(("eval", "num_problems"), None, where)
    flags.put(source)
    return build_checked(source)


def _lengths(model: str, max_prompt_tokens: int, max_new_tokens: int) -> dict[str, int]:
    """These numbers of tokens, or half of the model's positions where that is less."""
    from srtrl.model.weights import read_config

    half = read_config(model).max_position_embeddings // 2
    return {"max_prompt_tokens": min(half, max_prompt_tokens), "max_new_tokens": min(half, max_new_tokens)}
