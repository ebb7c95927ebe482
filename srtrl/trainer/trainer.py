"""The training loop. `Trainer.train_step` is the whole of a step; what it calls is named for what it does."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from srtrl.recipe import Recipe
from srtrl.rollout.collect import CollectProgress, collect_rollouts
from srtrl.rollout.run_ahead import run_ahead_requests
from srtrl.rollout.stage_timer import StageTimer
from srtrl.trainer.build import eval_sampling, train_sampling
from srtrl.trainer.checkpoint import TrainerState, save_checkpoint
from srtrl.trainer.credit import Credit, assign_credit, filter_groups, train_sequences, with_reference
from srtrl.trainer.data_order import DataOrder
from srtrl.trainer.evaluate import EvalResult, evaluate
from srtrl.trainer.interrupt import Interrupt
from srtrl.trainer.progress import RunProgress
from srtrl.trainer.rollout_files import rollout_file_name, write_rollouts
from srtrl.trainer.run_folder import RunFolder
from srtrl.trainer.sequence_logprobs import compute_logprobs
from srtrl.trainer.step_metrics import describe_step, rollout_metrics, time_metrics
from srtrl.trainer.timeline_files import timeline_file_name, write_timeline
from srtrl.trainer.update import update_policy
from srtrl.types import Prompt, Request, RolloutGroup

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator
    from transformers import PreTrainedTokenizerBase

    from srtrl.engine.engine import Engine
    from srtrl.engine.timeline import DecodeStep
    from srtrl.model.transformer import Transformer
    from srtrl.tasks.base import Task
    from srtrl.tasks.grading import Grader

MAX_NEXT_USES = 4096
"""Draws, from the current step's on, that a drafter is told of: what is needed later may all be forgotten first."""


@dataclass(kw_only=True, slots=True)
class TrainerParts:
    """What a trainer works with; made in `training.py`."""

    accelerator: Accelerator
    tokenizer: PreTrainedTokenizerBase
    end_ids: tuple[int, ...]
    """Tokens that end a response."""
    task: Task
    eval_prompts: list[Prompt]
    """Held-out problems; empty where the recipe asks for no evaluation."""
    policy: Transformer
    reference: Transformer | None
    """Frozen; None where the recipe asks for no KL."""
    engine: Engine
    grader: Grader
    optimizer: torch.optim.Optimizer


class Trainer:
    """Trains the policy step by step; what it learned is in the run folder after each step."""

    def __init__(
        self, recipe: Recipe, parts: TrainerParts, run: RunFolder, progress: RunProgress, step: int = 0
    ) -> None:
        """Start after training step `step`: 0 for a new run, the checkpoint's for a resumed one."""
        self.recipe = recipe
        self.parts = parts
        self.run = run
        self.progress = progress
        self.step = step
        self.order = DataOrder(len(parts.task.train_prompts), recipe.seed)
        self.timer = StageTimer()
        self.timeline: list[DecodeStep] = []
        """Decode steps of the latest rollouts."""
        self.interrupt = Interrupt(progress.say)

    def train(self) -> None:
        """All steps that are left, or as many as until an interrupt; the last one done has a checkpoint.

        Raises:
            NonFiniteError, LogprobDifferenceError: see `update_policy`; earlier checkpoints are untouched.
            KeyboardInterrupt: the second interrupt.
        """
        with self.interrupt, self.progress:
            if self.step == 0 and self.recipe.eval.before_and_after:
                self.evaluate_before()
            while self.step < self.recipe.train.num_steps and not self.interrupt.requested:
                self.train_step(self.step + 1)

    def train_step(self, step: int) -> None:
        """Training step `step` (the first is 1): DESIGN.md, "One training step"."""
        draws = self.next_draws(step)
        groups = self.collect(step, draws)
        self.timeline = self.parts.engine.take_timeline()
        metrics = rollout_metrics(groups) | self.parts.engine.take_metrics()
        metrics["data/epoch"] = (step - 1) * self.recipe.rollout.num_prompts / self.order.num_prompts
        kept = filter_groups(groups, self.recipe.algorithm.filters)
        metrics |= {"groups/kept": len(kept), "groups/dropped": len(groups) - len(kept)}
        credit = self.assign_credit(kept)
        metrics |= credit.metrics
        if kept:
            metrics |= self.update(step, credit)
        self.save_rollouts(step, groups, credit)
        metrics |= self.evaluate_if_due(step)
        self.step = step
        self.log(metrics)
        self.checkpoint_if_due()

    def next_draws(self, step: int) -> list[tuple[int, Prompt]]:
        """(draw index, prompt) of a step; a pure function of the step, so that later steps can be looked at ahead."""
        indices = self.order.draws_of_step(step, self.recipe.rollout.num_prompts)
        return [(draw, self.parts.task.train_prompts[index]) for draw, index in enumerate(indices)]

    def collect(self, step: int, draws: Sequence[tuple[int, Prompt]]) -> list[RolloutGroup]:
        """Decode and grade the step's rollouts; idle slots may look ahead to the next step's."""
        self.parts.engine.drafter.set_next_uses(self.next_uses(step))
        return collect_rollouts(
            self.parts.engine,
            self.parts.grader,
            self.parts.tokenizer,
            draws,
            num_samples=self.recipe.rollout.num_samples,
            sampling=train_sampling(self.recipe, self.parts.end_ids),
            seed=self.recipe.seed,
            purpose="train",
            step=step,
            run_ahead=self.run_ahead(step, draws),
            on_progress=self._show("rollout"),
            timer=self.timer,
        )

    def run_ahead(self, step: int, draws: Sequence[tuple[int, Prompt]]) -> list[Request]:
        """What idle slots may decode during a step; the last step has no next one, and not every drafter has a use."""
        section = self.recipe.rollout
        if self.parts.engine.speculation.is_off or not self.parts.engine.drafter.uses_run_aheads:
            return []
        return run_ahead_requests(
            section.run_ahead,
            current_draws=draws,
            next_draws=self.next_draws(step + 1) if step < self.recipe.train.num_steps else [],
            num_samples=section.num_samples,
            sampling=train_sampling(self.recipe, self.parts.end_ids),
            seed=self.recipe.seed,
            step=step,
            coupled=section.run_ahead_coupled,
        )

    def next_uses(self, step: int) -> list[tuple[int, ...]]:
        """Token ids of the prompts that are drawn from this step on, in order, as far as a drafter's cache cares."""
        per_step = self.recipe.rollout.num_prompts
        left = (self.recipe.train.num_steps - step + 1) * per_step
        prompts = self.parts.task.train_prompts
        count = min(left, max(per_step, len(prompts)), MAX_NEXT_USES)
        return [prompts[index].token_ids for index in self.order.draws((step - 1) * per_step, count)]

    def assign_credit(self, groups: Sequence[RolloutGroup]) -> Credit:
        """Advantages of the groups' samples; with a reference also its log-probs."""
        if not groups:
            return Credit(sequences=[], advantages={}, metrics={})
        sequences = train_sequences(groups)
        if self.parts.reference is not None:
            with self.timer.stage("reference"):
                ref_logprobs = compute_logprobs(
                    self.parts.reference,
                    sequences,
                    self.parts.accelerator,
                    micro_batch_tokens=self.recipe.train.micro_batch_tokens,
                    temperature=self.recipe.rollout.temperature,
                )
            sequences = with_reference(sequences, ref_logprobs)
        return assign_credit(groups, sequences, self.recipe)

    def update(self, step: int, credit: Credit) -> dict[str, float]:
        """Change the policy, and tell the decoder."""
        with self.timer.stage("update"):
            metrics = update_policy(
                self.parts.policy,
                self.parts.optimizer,
                self.parts.accelerator,
                credit.sequences,
                recipe=self.recipe,
                step=step,
            )
            self.parts.engine.on_policy_update()
        return metrics

    def evaluate_before(self) -> None:
        """Held-out accuracy of the policy that training starts from: row 0 of the metrics."""
        self._write_row(self.evaluate("before training").metrics())

    def evaluate_if_due(self, step: int) -> dict[str, float]:
        """`eval/...` metrics where `eval` asks for them after this step, else nothing."""
        section = self.recipe.eval
        is_last = section.before_and_after and step == self.recipe.train.num_steps
        if not is_last and (section.every_steps is None or step % section.every_steps != 0):
            return {}
        return self.evaluate(f"after step {step}").metrics()

    def evaluate(self, when: str) -> EvalResult:
        """Held-out accuracy of the policy as it is."""
        result = evaluate(
            self.parts.engine,
            self.parts.grader,
            self.parts.tokenizer,
            self.parts.eval_prompts,
            num_samples=self.recipe.eval.num_samples,
            sampling=eval_sampling(self.recipe, self.parts.end_ids),
            seed=self.recipe.seed,
            on_progress=self._show("evaluation"),
        )
        self.parts.engine.take_metrics()  # the step's own were taken before; these would be added to the next step's
        self.parts.engine.take_timeline()
        low, high = result.interval
        self.progress.say(f"{when}: held-out accuracy {result.accuracy:.1%} (95%: {low:.1%} to {high:.1%})")
        return result

    def save_rollouts(self, step: int, groups: Sequence[RolloutGroup], credit: Credit) -> None:
        """Write `rollouts/step_N.parquet` and `timeline/step_N.parquet`."""
        if self.recipe.log.save_rollouts:
            with self.timer.stage("save_rollouts"):
                write_rollouts(self.run.rollouts / rollout_file_name(step), groups, credit.advantages)
                write_timeline(self.run.timeline / timeline_file_name(step), self.timeline)

    def log(self, metrics: Mapping[str, float]) -> None:
        """One row of `metrics.jsonl`, the trackers, and a line for people; the row is on disk when this returns."""
        metrics = {**metrics, **time_metrics(self.timer.take(), metrics)}
        self._write_row(metrics)
        self.progress.step(self.step, describe_step(metrics))

    def checkpoint_if_due(self) -> None:
        """Write a checkpoint where the recipe wants one, after the last step, and when the run is to end."""
        train = self.recipe.train
        is_last = self.step == train.num_steps or self.interrupt.requested
        if not is_last and self.step % train.checkpoint_every != 0:
            return
        with self.timer.stage("checkpoint"):  # counted in the next row: this step's row precedes its checkpoint
            save_checkpoint(
                self.run.checkpoints,
                TrainerState(step=self.step, policy_version=self.parts.engine.policy_version),
                model=self.parts.policy,
                optimizer=self.parts.optimizer,
                tokenizer=self.parts.tokenizer,
                end_ids=self.parts.end_ids,
                drafter=self.parts.engine.drafter,
                keep=train.keep_checkpoints,
            )

    def _write_row(self, metrics: Mapping[str, float]) -> None:
        self.run.log.write(self.step, metrics)
        self.parts.accelerator.log(dict(metrics), step=self.step)

    def _show(self, stage: str) -> Callable[[CollectProgress], None]:
        """Feeds the inner progress bar of one stage."""
        start = time.perf_counter()

        def show(progress: CollectProgress) -> None:
            speed = progress.num_tokens / (time.perf_counter() - start)
            self.progress.stage(stage, progress.num_done, progress.num_total, f"{speed:,.0f} tokens/s")

        return show
