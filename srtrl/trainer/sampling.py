"""The first stage of a training step: draw prompts, decode and grade their samples, keep what is to be learned from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from srtrl.engine.stopping import count_unknown
from srtrl.environments.formats import resolve_format
from srtrl.metrics import StageTimer
from srtrl.recipe.schema import Recipe
from srtrl.rollout.collect import Collector, FixedDraws, OnProgress, collect_rollouts
from srtrl.rollout.dynamic_sampling import DrawsUntilFull
from srtrl.rollout.one_rank import OneRank
from srtrl.rollout.one_turn import OneTurn
from srtrl.run.step_metrics import rollout_metrics
from srtrl.tasks.grading import Grader, check_not_all_failed
from srtrl.trainer.credit import CreditAssigner
from srtrl.types import Prompt, Purpose, SamplingParams, StepRollouts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from srtrl.engine.engine import Engine
    from srtrl.tasks.base import TaskBase
    from srtrl.tasks.order import Order

DRAWS_PER_PROMPT = 10
"""`rollout.max_draws` by default: this many times `rollout.num_prompts`."""


@dataclass(kw_only=True, slots=True, frozen=True)
class RolloutContext:
    """The context of all rollouts of a run, in training and in evaluation: the same on all ranks, which share them."""

    recipe: Recipe
    engine: Engine
    grader: Grader
    tokenizer: PreTrainedTokenizerBase
    end_ids: tuple[int, ...]
    """Tokens that end a response."""
    turns: OneTurn
    """Decides how a sample continues after a turn."""
    ranks: OneRank = field(default_factory=OneRank)

    def collector(
        self, purpose: Purpose, num_samples: int, sampling: SamplingParams, on_progress: OnProgress, timer: StageTimer
    ) -> Collector:
        """The collector of one rollout; see `Collector`.

        On a CPU no run-ahead is decoded during waits for graders and environments that compute on the same CPU.
        """
        is_shared = self.grader.computes_here or self.turns.computes_here
        return Collector(
            self.grader,
            self.turns,
            num_samples=num_samples,
            sampling=sampling,
            seed=self.recipe.seed,
            purpose=purpose,
            policy_version=self.engine.policy_version,
            on_progress=on_progress,
            timer=timer,
            ranks=self.ranks,
            runs_ahead=not is_shared or self.engine.runner.model.device.type != "cpu",
        )

    def count_unknown(self, rollouts: StepRollouts) -> int:
        """Number of response tokens that the tokenizer does not have."""
        responses = [rollout.response.token_ids for group in rollouts.groups for rollout in group.rollouts]
        return count_unknown(self.tokenizer, np.concatenate(responses))

    def take_engine_metrics(self) -> dict[str, float]:
        """Metrics `engine/...` of all ranks since the last call; called on all of them."""
        return self.engine.take_metrics() | self.ranks.take_metrics()

    def started(self, prompt: Prompt) -> Prompt:
        """A prompt with the messages that the environment, if there is one, begins with."""
        return self.turns.started(prompt, self.recipe.rollout.max_prompt_tokens)


class Sampler:
    """Takes each step's groups from the data order, at the place `num_draws`."""

    def __init__(
        self, context: RolloutContext, task: TaskBase, credit: CreditAssigner, order: Order | None = None
    ) -> None:
        self.context = context
        self.credit = credit
        self.task = task
        self.num_draws = 0
        """Draws that the steps so far have used."""
        recipe = context.recipe
        self.sampling = train_sampling(recipe, context.end_ids)
        self.order = order or task.order(recipe.seed)
        rollout = recipe.rollout
        self.max_draws = rollout.num_prompts  # of one step
        if rollout.dynamic_sampling:
            self.max_draws = rollout.max_draws or DRAWS_PER_PROMPT * rollout.num_prompts

    @property
    def num_wanted(self) -> int:
        """Groups that a step is to learn from."""
        return self.context.recipe.rollout.num_prompts

    def sample(self, step: int, *, on_progress: OnProgress, timer: StageTimer) -> StepRollouts:
        """The rollouts of training step `step`.

        The step has the next `rollout.num_prompts` draws; with dynamic sampling as many as it takes to keep that many.
        """
        context, rollout = self.context, self.context.recipe.rollout
        epochs = self.order.epochs(self.num_draws)
        collector = context.collector("train", rollout.num_samples, self.sampling, on_progress, timer)
        rollouts = self.collect(step, collector)
        self.order.observe(rollouts.groups, self.num_draws)
        check_not_all_failed(rollouts.groups, f"step {step}")
        context.turns.check_not_all_raised(f"step {step}")
        num_short = max(0, self.num_wanted - len(rollouts.kept)) if rollout.dynamic_sampling else 0
        metrics = {
            **rollout_metrics(rollouts, context.grader.outcomes),
            **task_metrics(rollouts, context.grader),
            **epochs,
            "groups/short": num_short,
            "tokens/unknown": context.count_unknown(rollouts),
        }
        return replace(rollouts, metrics=metrics | context.take_engine_metrics())

    def collect(self, step: int, collector: Collector) -> StepRollouts:
        """The rollouts of a step, with metrics of the sampler's own, if any; moves `num_draws` on."""
        engine, rollout = self.context.engine, self.context.recipe.rollout
        first = self.num_draws
        if not rollout.dynamic_sampling:
            draws = range(first, first + rollout.num_prompts)
            self.announce(step, draws, collector)
            groups = collect_rollouts(engine, collector, FixedDraws(self.draws(draws)))
            self.num_draws = draws.stop
            return StepRollouts(groups=groups, kept=self.credit.groups_to_learn_from(groups))
        until_full = DrawsUntilFull(
            self.prompt_of,
            first_draw=first,
            num_prompts=rollout.num_prompts,
            max_draws=self.max_draws,
            keeps=lambda group: bool(self.credit.groups_to_learn_from([group])),
            on_open=lambda opened: self.announce(step, opened, collector),
        )
        groups = collect_rollouts(engine, collector, until_full)
        kept = [replace(group, rollouts=group.graded) for group in until_full.kept_groups(groups)]
        self.num_draws = first + len(groups)
        return StepRollouts(groups=groups, kept=kept)

    def save(self, folder: Path) -> None:
        """Write what later steps go on from into a checkpoint."""

    def load(self, folder: Path) -> None:
        """Read what `save` has written."""

    def draws(self, which: Sequence[int]) -> list[tuple[int, Prompt]]:
        """(draw index, prompt) of draws of the run; a pure function of the seed."""
        return [(draw, self.prompt_of(draw)) for draw in which]

    def prompt_of(self, draw: int) -> Prompt:
        """The prompt of one draw of the run."""
        return self.context.started(self.task.train_prompts[self.order.prompt_of(draw)])

    def announce(self, step: int, opened: range, collector: Collector) -> None:
        """Draws are opened: those may be run ahead that this step or the next may open after them."""
        engine, recipe = self.context.engine, self.context.recipe
        end = opened.stop + recipe.rollout.num_prompts
        if step == recipe.train.num_steps:  # no step comes after it
            end = min(end, self.num_draws + self.max_draws)
        if chosen := engine.run_ahead.choose(range(opened.stop, end)):
            engine.add_run_aheads(collector.requests(self.draws(chosen)))


def task_metrics(rollouts: StepRollouts, grader: Grader) -> dict[str, float]:
    """Some of a step's metrics for each task of a mixture."""
    metrics: dict[str, float] = {}
    kept = grader.by_task(rollouts.kept)
    for label, groups in grader.by_task(rollouts.groups).items():
        of_task = rollout_metrics(StepRollouts(groups=groups, kept=kept.get(label, [])))
        metrics |= {f"{name}/{label}": of_task[name] for name in ("accuracy", "reward/mean", "groups/kept")}
    return metrics


def train_sampling(recipe: Recipe, end_ids: tuple[int, ...]) -> SamplingParams:
    """Sampling of training rollouts: the full softmax at the recipe's temperature, as the update computes it."""
    rollout = recipe.rollout
    turn_ends = () if rollout.environment is None else resolve_format(rollout.environment).stop_strings
    return SamplingParams(
        max_new_tokens=rollout.max_new_tokens,
        temperature=rollout.temperature,
        end_token_ids=end_ids,
        stop_strings=(*rollout.stop_strings, *turn_ends),
    )
