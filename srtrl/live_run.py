"""A run in training as `on_step` sees it: its policy, and completions by the engine that trains."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from srtrl.generation import Generated, check_prompts, generated_of, prompts_options
from srtrl.recipe.file import validate_section
from srtrl.recipe.schema import EvalSection, RewardSection, TaskSection
from srtrl.tasks.base import load_section
from srtrl.tasks.grading import Grader
from srtrl.tasks.rendering import Message
from srtrl.trainer.evaluate import evaluate
from srtrl.trainer.sampling import RolloutContext
from srtrl.trainer.trainer import OnStep, Trainer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from srtrl.model.transformer import Transformer


@dataclass(kw_only=True, slots=True, frozen=True)
class LiveRun:
    """A run between two training steps. Read it and generate with it; change nothing of it."""

    path: Path
    """The run's folder."""
    policy: Transformer
    """After the step's update; with `train.sharding: fsdp2` each rank has its part of the weights."""
    tokenizer: PreTrainedTokenizerBase
    context: RolloutContext
    """The context of the run's rollouts."""

    def generate(
        self, prompts: Sequence[str | list[Message]], *, num_samples: int = 1, temperature: float | None = None
    ) -> list[list[Generated]]:
        """Complete prompts with the policy as it is now; called on all ranks, which share the work and the result.

        Prompts go through the templates of the run's task, and its environment answers, as in `srtrl.generate`. The
        RNG keys are those of purpose `generate`, at any step: nothing of training changes, and two steps are compared
        on the same noise.

        Args:
            prompts: Texts, or lists of messages.
            num_samples: Completions of each.
            temperature: 0 is greedy; by default `eval.temperature` of the recipe.

        Returns:
            For each prompt its completions.

        Raises:
            ValueError: there are no prompts, one of them is empty or too long, or a number cannot be used.
        """
        check_prompts(prompts)
        recipe = self.context.recipe
        changed: dict[str, Any] = {"num_samples": num_samples}
        if temperature is not None:
            changed["temperature"] = temperature
        section = validate_section(EvalSection, recipe.eval.model_dump() | changed, "run.generate")
        options = prompts_options(prompts, recipe.task.model_dump(exclude_unset=True))
        task = load_section(
            TaskSection(name="srtrl.generation:Prompts", options=options),
            self.tokenizer,
            max_prompt_tokens=recipe.rollout.max_prompt_tokens,
            tools=self.context.turns.tools,
        )
        rewards = [RewardSection(name="environment")]
        with Grader(task, rewards, recipe.grading) as grader:
            context = replace(self.context, recipe=recipe.model_copy(update={"eval": section}), grader=grader)
            groups, _ = evaluate(context, task.eval_prompts, purpose="generate", on_progress=lambda *_: None)
        return [[generated_of(rollout) for rollout in group.rollouts] for group in groups]


def with_live_run(on_step: Callable[..., Any]) -> OnStep:
    """A function of (step, metrics, run) as a `Trainer` calls it.

    Raises:
        ValueError: it takes other arguments.
    """
    try:
        inspect.signature(on_step).bind(*range(3))
    except (TypeError, ValueError) as error:  # no function, or one without a signature
        raise ValueError(f"on_step: expected a function of (step, metrics, run): {error}") from error

    def called(step: int, metrics: Mapping[str, float], trainer: Trainer) -> object:
        context, policy = trainer.context, trainer.parts.policy.model
        run = LiveRun(path=trainer.run.path, policy=policy, tokenizer=context.tokenizer, context=context)
        return on_step(step, metrics, run)

    return called
