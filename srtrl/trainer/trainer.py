"""The training loop. `Trainer.train_step` is the whole of a step; what it calls is named for what it does."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from srtrl.recipe import Recipe
from srtrl.rollout.collect import CollectProgress
from srtrl.rollout.stage_timer import StageTimer
from srtrl.trainer.build import eval_sampling
from srtrl.trainer.checkpoint import TrainerState, save_checkpoint
from srtrl.trainer.credit import Credit, assign_credit, train_sequences, with_reference
from srtrl.trainer.critic import Critic, compute_values, update_critic, with_values
from srtrl.trainer.evaluate import EvalResult, evaluate
from srtrl.trainer.interrupt import Interrupt
from srtrl.trainer.out_of_memory import KV_CACHE, PeakMemory, explain_out_of_memory, optimizer_bytes, tensor_bytes
from srtrl.trainer.progress import RunProgress
from srtrl.trainer.rollout_files import rollout_file_name, write_rollouts
from srtrl.trainer.run_folder import RunFolder
from srtrl.trainer.sampling import StepSampler
from srtrl.trainer.step_metrics import (
    describe_step,
    memory_metrics,
    time_metrics,
    update_flops,
    with_update_metrics,
)
from srtrl.trainer.timeline_files import timeline_file_name, write_timeline
from srtrl.trainer.update import compute_logprobs, next_kl_coefficient, update_policy
from srtrl.types import Prompt, RolloutGroup

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator
    from transformers import PreTrainedTokenizerBase

    from srtrl.engine.engine import Engine
    from srtrl.engine.stats import DecodeStep
    from srtrl.model.transformer import Transformer
    from srtrl.tasks.base import Task
    from srtrl.tasks.grading import Grader


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
    critic: Critic | None
    """PPO's value model and its optimizer; None where the recipe has no `critic`."""


def first_state(recipe: Recipe) -> TrainerState:
    """Where a new run begins."""
    return TrainerState(step=0, policy_version=0, num_draws=0, kl_coefficient=recipe.algorithm.kl.coefficient)


class Trainer:
    """Trains the policy step by step; what it learned is in the run folder after each step."""

    def __init__(
        self, recipe: Recipe, parts: TrainerParts, run: RunFolder, progress: RunProgress, state: TrainerState
    ) -> None:
        """Start at `state`: `first_state(recipe)` for a new run, the checkpoint's for a resumed one."""
        self.recipe = recipe
        self.parts = parts
        self.run = run
        self.progress = progress
        self.step = state.step
        self.kl_coefficient = state.kl_coefficient
        self.sampler = StepSampler(recipe, parts, state.num_draws)
        self.timer = StageTimer()
        self.memory = PeakMemory(parts.policy.device)
        self.timeline: list[DecodeStep] = []
        """Decode steps of the latest rollouts."""
        self.num_update_flops = 0.0
        """Of the latest update."""
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
        rollouts = self.sampler.sample(step, on_progress=self._show("rollout"), timer=self.timer)
        self.timeline = self.parts.engine.take_timeline()
        metrics = rollouts.metrics | self.parts.engine.take_metrics()
        self.parts.engine.release_kv()  # where the recipe says so; the next rollouts take it back
        credit = self.assign_credit(step, rollouts.kept)
        metrics |= credit.metrics
        if credit.sequences:
            metrics |= self.update_critic(step, credit)
            metrics = with_update_metrics(metrics, self.update(step, credit))
        self.save_rollouts(step, rollouts.groups, credit)
        metrics |= self.evaluate_if_due(step)
        self.step = step
        self.log(metrics)
        self.checkpoint_if_due()

    def assign_credit(self, step: int, groups: Sequence[RolloutGroup]) -> Credit:
        """Advantages of the groups' samples; with a reference also its log-probs, with a critic its values."""
        if not groups:
            return Credit(sequences=[], advantages={}, sampled_kl=None, metrics={})
        sequences = train_sequences(groups)
        if self.parts.reference is not None:
            with self.timer.stage("reference"), self._explain_memory(step, "the reference's log-probs"):
                ref_logprobs = compute_logprobs(
                    self.parts.reference,
                    sequences,
                    self.parts.accelerator,
                    micro_batch_tokens=self.recipe.train.micro_batch_tokens,
                    temperature=self.recipe.rollout.temperature,
                )
            sequences = with_reference(sequences, ref_logprobs)
        if self.parts.critic is not None:
            with self.timer.stage("values"), self._explain_memory(step, "the critic's values"):
                values = compute_values(
                    self.parts.critic.model,
                    sequences,
                    self.parts.accelerator,
                    micro_batch_tokens=self.recipe.train.micro_batch_tokens,
                    where=f"step {step}",
                )
            sequences = with_values(sequences, values)
        return assign_credit(groups, sequences, self.recipe, kl_coefficient=self.kl_coefficient)

    def update_critic(self, step: int, credit: Credit) -> dict[str, float]:
        """Teach the critic, where there is one, the step's returns."""
        if self.parts.critic is None:
            return {}
        with self.timer.stage("critic"), self._explain_memory(step, "update of the critic"):
            return update_critic(
                self.parts.critic, self.parts.accelerator, credit.sequences, recipe=self.recipe, step=step
            )

    def update(self, step: int, credit: Credit) -> dict[str, float]:
        """Change the policy, tell the decoder, and adapt the KL coefficient where the recipe wants that.

        In the first `critic.warmup_steps` steps nothing of this is done: only the critic learns.
        """
        if self.recipe.critic is not None and step <= self.recipe.critic.warmup_steps:
            return {}
        with self.timer.stage("update"), self._explain_memory(step, "update"):
            metrics = update_policy(
                self.parts.policy,
                self.parts.optimizer,
                self.parts.accelerator,
                credit.sequences,
                recipe=self.recipe,
                step=step,
                kl_coefficient=self.kl_coefficient,
            )
            self.parts.engine.on_policy_update()
        num_tokens = sum(len(sequence.token_ids) for sequence in credit.sequences)
        metrics["tokens/update"] = self.recipe.train.num_epochs * num_tokens
        self.num_update_flops = update_flops(self.recipe, self.parts.policy.config, credit.sequences)
        if self.recipe.algorithm.kl.target is not None:
            metrics["kl/coefficient"] = self.kl_coefficient
        self.kl_coefficient = next_kl_coefficient(
            self.kl_coefficient,
            metrics,
            self.recipe,
            sampled_kl=credit.sampled_kl,
            num_samples=len(credit.sequences),
        )
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
        timed = time_metrics(
            self.timer.take(),
            metrics,
            num_update_flops=self.num_update_flops,
            peak_tflops=self.recipe.train.peak_tflops,
        )
        metrics = {**metrics, **timed, **memory_metrics(self.memory)}
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
                TrainerState(
                    step=self.step,
                    policy_version=self.parts.engine.policy_version,
                    num_draws=self.sampler.num_draws,
                    kl_coefficient=self.kl_coefficient,
                ),
                model=self.parts.policy,
                optimizer=self.parts.optimizer,
                critic=self.parts.critic,
                tokenizer=self.parts.tokenizer,
                end_ids=self.parts.end_ids,
                drafter=self.parts.engine.drafter,
                keep=train.keep_checkpoints,
            )

    def _write_row(self, metrics: Mapping[str, float]) -> None:
        self.run.log.write(self.step, metrics)
        self.parts.accelerator.log(dict(metrics), step=self.step)

    def _explain_memory(self, step: int, stage: str) -> AbstractContextManager[None]:
        """Say what was in use and what helps where `stage` runs out of the device's memory."""
        parts = self.parts

        def holders() -> dict[str, int]:
            in_use = {
                "the policy": tensor_bytes(parts.policy.parameters()),
                "its optimizer": optimizer_bytes(parts.optimizer),
                KV_CACHE: parts.engine.kv_bytes(),
            }
            if parts.reference is not None:
                in_use["the reference"] = tensor_bytes(parts.reference.parameters())
            if parts.critic is not None:
                in_use["the critic"] = tensor_bytes(parts.critic.model.parameters())
                in_use["its optimizer (critic)"] = optimizer_bytes(parts.critic.optimizer)
            return in_use

        return explain_out_of_memory(f"step {step}, {stage}", self.recipe, self.memory, holders)

    def _show(self, stage: str) -> Callable[[CollectProgress], None]:
        """Feeds the inner progress bar of one stage."""
        start = time.perf_counter()

        def show(progress: CollectProgress) -> None:
            speed = progress.num_tokens / (time.perf_counter() - start)
            self.progress.stage(stage, progress.num_done, progress.num_total, f"{speed:,.0f} tokens/s")

        return show
