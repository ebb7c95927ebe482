"""`srtrl train`: from a recipe to a finished, interrupted or stopped run. A step is `Trainer.train_step`."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from rich.console import Console

from srtrl import ranks
from srtrl.files import shown_path
from srtrl.metrics import MetricLog, StageTimer, read_metrics
from srtrl.run.checkpoint import Part, TrainerState, read_state, save_checkpoint
from srtrl.run.estimate import describe_device
from srtrl.run.folder import RunFolder, open_run_folder, step_file_name, write_rollouts
from srtrl.run.interrupt import Interrupt, UpdateMemoryError, explain_out_of_memory, freeze_gc, how_to_resume
from srtrl.run.machine import add_machine, describe_machine
from srtrl.run.place import StartFlags
from srtrl.run.progress import RunProgress, describe_prompt, reporting_compilation
from srtrl.run.repeatable import fixed_order
from srtrl.run.step_metrics import (
    describe_held_out,
    describe_step,
    has_graded,
    memory_metrics,
    step_problems,
    time_metrics,
    update_flops,
)
from srtrl.run.steps import best_step
from srtrl.run.trackers import log_samples, start_trackers
from srtrl.trainer.credit import Credit, CreditAssigner, train_sequences
from srtrl.trainer.evaluate import evaluate, training_evals
from srtrl.trainer.learner import Learner
from srtrl.trainer.objective import LogprobDifferenceError, PolicyLearner
from srtrl.trainer.passes import Column, NonFiniteError, UpdateContext, fill
from srtrl.trainer.sampling import RolloutContext, Sampler
from srtrl.types import StepRollouts

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker

    from srtrl.tasks.base import TaskBase


OnStep = Callable[[int, Mapping[str, float], "Trainer"], object]
"""A user's function: called on all ranks after each step and its checkpoint, with the step's number, its metrics and
the trainer. A dictionary of numbers that it returns on the main rank is logged: names below `user/`."""


class TrainingStoppedError(RuntimeError):
    """Training cannot continue; the message gives the reason, the last checkpoint, and what to do with it."""


@dataclass(kw_only=True, slots=True)
class Parts:
    """Loaded parts of a run; `build.build_parts` makes them of a recipe. Change them before a `Trainer` has them."""

    context: RolloutContext
    """With the recipe, the engine, and the grader, which is not started."""
    task: TaskBase
    sampler: Sampler
    credit: CreditAssigner
    columns: list[Column]
    """Numbers that passes compute before credit is assigned."""
    learners: list[Learner]
    """In the order in which they learn; the last one is `policy`."""
    policy: PolicyLearner
    saved: list[Part]
    """Parts of a checkpoint beside the learners and the sampler."""
    digests: dict[str, Any]
    """Those of prompts and models in the state of the run (`TrainerState`)."""
    flags: StartFlags
    """How the run begins."""
    checkpoint: Path | None
    """To resume."""
    changes: list[str]
    """A line for each option that differs from those of the run to resume."""

    @property
    def checkpointed(self) -> list[Part]:
        """All that a checkpoint holds, in the order in which it is read."""
        return [*self.saved, *self.learners, self.sampler, self.sampler.order]


class Trainer:
    """A run. `with Trainer(build_parts(recipe)) as trainer: trainer.train()` trains the policy step by step.

    Before the `with` block it leaves no trace. Inside there are worker processes and trackers, and the run's folder is
    locked; after each step it has all that the step learned.
    """

    run: RunFolder
    """The run's folder, inside the `with` block. Rank 0 alone writes into it."""

    def __init__(
        self,
        parts: Parts,
        *,
        console: Console | None = None,
        on_step: OnStep = lambda *_: None,
    ) -> None:
        """A run that has not begun; nothing is started or written yet.

        Args:
            parts: What the run is made of.
            console: Where rank 0 reports; standard output by default.
            on_step: See `OnStep`. After a resume it is called for the step that the checkpoint is of, once more.
        """
        self.parts, self.context, self.recipe = parts, parts.context, parts.context.recipe
        self.evaluates_ends, self.eval_prompts = training_evals(parts.task, self.recipe)
        self.on_step = on_step
        console = console if ranks.is_main() else Console(quiet=True)
        self.progress = RunProgress(self.recipe.train.num_steps, console=console)
        self.interrupt = Interrupt(self.progress.say)
        self.timer = StageTimer()
        self.step = 0
        """Training steps done."""
        self.is_stopping = False
        """Whether a rank was interrupted: the run ends after the current step."""
        self._num_idle = 0
        """The last steps in a row that had no gradient, of this process."""
        self.trackers: list[GeneralTracker] = []
        """On rank 0 only."""

    def __enter__(self) -> Self:
        """Take back the checkpoint, if there is one, and start everything that must be stopped.

        An earlier run is changed last, after all checks have passed.
        """
        with ExitStack() as stack:
            if self.recipe.repeatable and self.parts.policy.model.device.type == "cuda":
                stack.enter_context(fixed_order())
            with ranks.synchronized("loading the state of the run"):
                if self.parts.checkpoint is not None:
                    self.restore(self.parts.checkpoint)
            with self.parts.policy.resharded():
                pass  # an optimizer's state may have written the weights, which are gathered anew
            with ranks.synchronized("starting the graders"):
                stack.enter_context(self.context.grader)
                stack.enter_context(self.context.turns)
                prompts, rollout = self.parts.task.train_prompts, self.recipe.rollout
                self.context.started(prompts[0])
                self.context.turns.try_environment(prompts[0])
                self.context.grader.try_rewards(prompts, rollout.num_samples, rollout.max_new_tokens)
                if self.step > self.recipe.train.num_steps:
                    raise ValueError(f"train.num_steps: {self.step} are done; --checkpoint resumes from an earlier one")
            with ranks.synchronized("opening the run's folder"):
                if ranks.is_main():
                    self.run = self._open_folder(stack)
                else:
                    nowhere = stack.enter_context(MetricLog(Path(os.devnull)))
                    self.run = RunFolder(path=self.recipe.folder, checkpoint=self.parts.checkpoint, log=nowhere)
            self._say_start()
            self._stack = stack.pop_all()
        return self

    def _open_folder(self, stack: ExitStack) -> RunFolder:
        """Lock the run's folder and start the trackers; then take the folder back to the checkpoint."""
        run = stack.enter_context(open_run_folder(self.recipe, **self.parts.flags))
        if run.checkpoint != self.parts.checkpoint:
            raise ValueError(f"{run.path} has changed while the model was loading: another process trains there")
        self.trackers = start_trackers(self.recipe, step=self.step)
        run.begin(self.recipe)
        add_machine(run.path, describe_machine(self.parts.policy.model.device, self.recipe.model.dtype))
        return run

    def _say_start(self) -> None:
        """Report what was loaded, and from where the run continues."""
        say, resume = self.progress.say, self.parts.flags.get("resume")
        if self.run.moved_to is not None:
            say(f"the folder that was {self.run.path} is now {self.run.moved_to}")
        say("\n".join(describe_device(self.recipe, self.parts.policy.model)))
        prompts = self.parts.task.train_prompts
        report = self.parts.task.load_report or {"training prompts": len(prompts)}
        counts = ", ".join(f"{name} {count:,}" for name, count in report.items())
        say(f"task {self.recipe.task.name}: {counts}")
        say(describe_prompt(self.context.started(prompts[0]), self.context.tokenizer))
        for change in self.parts.changes:
            say(f"resuming: {change}")
        if resume and self.parts.checkpoint is None:
            say(f"resuming: {shown_path(self.run.path)} has no checkpoint, starting from step 0")
        elif resume:
            say(f"resuming {shown_path(self.run.path)} after step {self.step} of {self.recipe.train.num_steps}")

    def __exit__(self, *exception: object) -> None:
        with self._stack:
            for tracker in self.trackers:
                tracker.finish()

    def state(self) -> TrainerState:
        """The state of the run beside weights, optimizers and drafter."""
        return TrainerState(
            step=self.step,
            policy_version=self.context.engine.policy_version,
            num_draws=self.parts.sampler.num_draws,
            **self.parts.digests,
        )

    def restore(self, checkpoint: Path) -> None:
        """Take back a checkpoint, whose weights are loaded: its parts and `state`."""
        for part in self.parts.checkpointed:
            part.load(checkpoint)
        state = read_state(checkpoint)
        self.step = state.step
        self.context.engine.policy_version = state.policy_version
        self.parts.sampler.num_draws = state.num_draws

    def train(self) -> None:
        """All steps that are left, or up to an interrupt; the last one has a checkpoint.

        Raises:
            TrainingStoppedError: see `run_training`; earlier checkpoints are untouched.
            KeyboardInterrupt: the second interrupt.
        """
        try:
            with freeze_gc(), self.interrupt, self.progress:
                with self._stage("compile"), reporting_compilation(self.progress.compiling):
                    self.context.engine.warm_up()
                if self.step == 0 and self.evaluates_ends:
                    self.context.turns.begin_step(0)
                    self._write_row(metrics := self.evaluate())
                    self.progress.say(f"before training: {describe_held_out(metrics)}")
                if self.step > 0:
                    self.context.turns.begin_step(self.step)
                    self.call_on_step(lambda: read_metrics(self.run.path / "metrics.jsonl")[-1])
                self.is_stopping = self._should_stop()
                while self.step < self.recipe.train.num_steps and not self.is_stopping:
                    self.context.turns.begin_step(self.step + 1)
                    self.train_step(self.step + 1)
        except (NonFiniteError, LogprobDifferenceError, FloatingPointError, UpdateMemoryError) as error:
            raise TrainingStoppedError(f"{error}\n{how_to_resume(self.run.checkpoints)}") from error

    def train_step(self, step: int) -> None:
        """Training step `step`, from 1 on; docs/walkthrough.md follows it."""
        seed_generators(self.recipe.seed, step)
        parts, context = self.parts, UpdateContext(recipe=self.recipe, step=step)
        rollouts = parts.sampler.sample(step, on_progress=partial(self.progress.stage, "rollout"), timer=self.timer)
        credit = self.assign_credit(rollouts, context)
        metrics = rollouts.metrics | credit.metrics
        is_updated = False
        for learner in parts.learners:  # the policy is the last one; the others may begin before it
            is_updated = bool(credit.sequences) and step > learner.updates.num_skipped
            if is_updated:
                with self._stage(learner.stage):
                    metrics |= learner.learn(credit.sequences, context)
        self.context.engine.end_step(has_new_weights=is_updated)
        self.save_rollouts(step, rollouts, credit)
        metrics |= self.evaluate_if_due(step)
        self.step = step
        row = self.log(metrics, rollouts, credit)
        self.is_stopping = self._should_stop()
        with ranks.synchronized(f"checkpoint of step {step}"):
            self.checkpoint_if_due()
        self.call_on_step(lambda: row)

    def assign_credit(self, rollouts: StepRollouts, context: UpdateContext) -> Credit:
        """Advantages of the kept samples, with the columns that the recipe needs (see `Parts`)."""
        if not rollouts.kept:
            return Credit(sequences=[], advantages={}, metrics={})
        sequences = train_sequences(rollouts.kept)
        for column in self.parts.columns:
            with self._stage(column.stage):
                sequences = fill(column, sequences, context)
        return self.parts.credit.assign_credit(rollouts.kept, sequences, step=context.step)

    def evaluate_if_due(self, step: int) -> dict[str, float]:
        """`eval/...` metrics where `eval` asks for them after this step, else nothing."""
        return self.evaluate() if self.is_evaluated(step) else {}

    def is_evaluated(self, step: int) -> bool:
        """Whether `eval` asks for an evaluation after this step."""
        every = self.recipe.eval.every_steps
        is_last = self.evaluates_ends and step == self.recipe.train.num_steps
        return is_last or (every is not None and step % every == 0)

    def evaluate(self) -> dict[str, float]:
        """`eval/...` metrics of the policy as it is: held-out accuracy (without a verifier: reward)."""
        on_progress = partial(self.progress.stage, "evaluation")
        _, metrics = evaluate(self.context, self.eval_prompts, on_progress=on_progress)
        return metrics

    def save_rollouts(self, step: int, rollouts: StepRollouts, credit: Credit) -> None:
        """Write `rollouts/step_N.parquet`."""
        if ranks.is_main():
            with self.timer.stage("save_rollouts"):
                path = self.run.path / "rollouts" / step_file_name(step)
                write_rollouts(path, rollouts.groups, credit.advantages)

    def log(self, metrics: Mapping[str, float], rollouts: StepRollouts, credit: Credit) -> dict[str, float]:
        """Write a row of `metrics.jsonl`, to the trackers, and a line for people; returns the row, which is on disk."""
        policy = self.parts.policy
        computed = [sequence for sequence in credit.sequences if policy.needs_pass(sequence)]
        num_flops = update_flops(self.recipe, policy.model.config, computed) / ranks.count()  # of one device
        timed = time_metrics(self.timer.take(), metrics, num_flops)
        row = {**metrics, **timed, **memory_metrics(policy.model.device)}
        self._write_row(row)
        reward, notice = row["reward/mean"] if has_graded(row) else math.nan, step_problems(row)
        has_gradient = any(value for name, value in row.items() if name.endswith("grad_norm"))
        self._num_idle = 0 if has_gradient else self._num_idle + 1
        if self._num_idle == 3:
            folder = shown_path(self.run.path)
            notice += f"; third step without a gradient: see `srtrl rollouts {folder}` and docs/reward.md"
        self.progress.step(self.step, describe_step(row), reward=reward, notice=notice)
        if "eval/reward" in row or "eval/accuracy" in row:
            self.progress.say(f"after step {self.step}: {describe_held_out(row)}")
        if ranks.is_main():
            log_samples(self.trackers, self.step, rollouts.groups, credit.advantages)
        return row

    def call_on_step(self, last_row: Callable[[], Mapping[str, float]]) -> None:
        """Call `on_step`, with the main rank's row of this step on all ranks, and log what it returns."""
        row = ranks.on_main(last_row, f"the metrics of step {self.step}")
        metrics = {name: value for name, value in row.items() if name != "step"}
        with ranks.synchronized(f"on_step after step {self.step}"):
            returned = self.on_step(self.step, metrics, self)
            if returned is not None and not isinstance(returned, Mapping):
                raise ValueError(
                    f"on_step after step {self.step}: expected a dictionary of numbers or None, found {returned!r:.80}"
                )
            if returned:
                self._write_row({f"user/{name}": value for name, value in returned.items()})

    def checkpoint_if_due(self) -> None:
        """Write a checkpoint where the recipe wants one, of the best step, of the last, and when the run is to end."""
        train = self.recipe.train
        is_due = self.step % train.checkpoint_every == 0 or self.step == train.num_steps or self.is_stopping
        best = self._best_step() if is_due or self.is_evaluated(self.step) else None
        if not is_due and self.step != best:
            return
        self.progress.stage("checkpoint")
        parts, learners = self.parts.checkpointed, self.parts.learners
        tensors = {name: part for learner in learners for name, part in learner.tensors().items()}
        with self.timer.stage("checkpoint"), ExitStack() as stack:  # counted in the next row
            for learner in learners:
                stack.enter_context(learner.whole())
            save_checkpoint(
                self.run.checkpoints,
                self.state(),
                tensors=tensors,
                parts=parts,
                keep=train.keep_checkpoints,
                best=best,
            )
        if ranks.is_main():
            self.run.drop_observations()

    def _best_step(self) -> int | None:
        """By `train.keep_best`: the best of this step and those with a checkpoint."""
        if (metric := self.recipe.train.keep_best) is None:
            return None
        return ranks.on_main(lambda: best_step(self.run.path, metric, self.step), "the best step")

    def _should_stop(self) -> bool:
        """Whether a rank was interrupted."""
        return any(ranks.gather(self.interrupt.requested, f"the end of step {self.step}"))

    def _write_row(self, metrics: Mapping[str, float]) -> None:
        if ranks.is_main():
            self.run.log.write(self.step, metrics)
            for tracker in self.trackers:
                tracker.log(dict(metrics), step=self.step)

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        """Show and time a stage of the current step; name it if the device's memory is too small."""
        self.progress.stage(name)
        with self.timer.stage(name), explain_out_of_memory(f"step {self.step + 1}, {name}"):
            yield


def seed_generators(seed: int, step: int) -> None:
    """Seed the global generators for one step, so that a resumed run repeats it.

    srtrl draws nothing from them; rewards and losses of a user may.
    """
    state = int(np.random.SeedSequence((seed, step)).generate_state(1)[0])
    random.seed(state)
    np.random.seed(state)
    torch.manual_seed(state)
