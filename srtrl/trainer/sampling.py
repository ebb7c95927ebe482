"""The first stage of a training step: draw prompts, decode and grade their samples, keep what is to be learned from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from srtrl.engine.stopping import count_unknown
from srtrl.metrics import StageTimer
from srtrl.ranks.processes import Ranks
from srtrl.recipe.schema import Recipe
from srtrl.rollout.collect import Collector, FixedDraws, OnProgress, collect_rollouts
from srtrl.rollout.dynamic_sampling import DrawsUntilFull
from srtrl.rollout.partial import PartialDraws, whole_prefix
from srtrl.run.metrics import rollout_metrics
from srtrl.tasks.grading import Grader, check_not_all_failed
from srtrl.trainer.build import train_sampling
from srtrl.trainer.credit import groups_to_learn_from
from srtrl.trainer.off_policy import accept_prefixes, load_earlier, save_earlier, truncated
from srtrl.trainer.passes import UpdateContext
from srtrl.types import Prefix, Prompt, Purpose, Request, Rollout, RolloutGroup, SampleKey, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from srtrl.engine.engine import Engine
    from srtrl.environments.conversations import Conversations
    from srtrl.tasks.base import TaskBase

DRAWS_PER_PROMPT = 10
"""`rollout.max_draws` by default: this many times `rollout.num_prompts`."""


@dataclass(kw_only=True, slots=True, frozen=True)
class RolloutContext:
    """The context of all rollouts of a run, in training and in evaluation."""

    recipe: Recipe
    engine: Engine
    grader: Grader
    tokenizer: PreTrainedTokenizerBase
    end_ids: tuple[int, ...]
    """Tokens that end a response."""
    conversations: Conversations | None
    """None where a sample is a single turn."""
    ranks: Ranks = field(default_factory=Ranks)
    """Processes that share the rollouts: all make the same calls, and get the same groups."""

    def collector(
        self, purpose: Purpose, num_samples: int, sampling: SamplingParams, on_progress: OnProgress, timer: StageTimer
    ) -> Collector:
        """The collector of one rollout; see `Collector`."""
        return Collector(
            self.grader,
            self.tokenizer,
            num_samples=num_samples,
            sampling=sampling,
            seed=self.recipe.seed,
            purpose=purpose,
            on_progress=on_progress,
            timer=timer,
            conversations=self.conversations,
            ranks=self.ranks,
        )

    def started(self, prompt: Prompt) -> Prompt:
        """A prompt with the messages that the environment, if there is one, begins with."""
        max_tokens = self.recipe.rollout.max_prompt_tokens
        return prompt if self.conversations is None else self.conversations.started(prompt, max_tokens)


@dataclass(kw_only=True, slots=True, frozen=True)
class StepRollouts:
    """Rollouts of one step."""

    groups: list[RolloutGroup]
    """Of all its draws, in data order."""
    kept: list[RolloutGroup]
    """Those to learn from, in data order; see `groups_to_learn_from`."""
    metrics: dict[str, float]
    """Of the policy, the draws and the engine."""


class DataOrder:
    """A seeded permutation of the prompts for each epoch, laid end to end: which prompt is drawn when.

    A pure function of (seed, place in the run), so later draws are known in advance.

    Draw number `d` of a run is place `d % num_prompts` of the permutation of epoch `d // num_prompts`. A step takes the
    next draws, with dynamic sampling as many as it needs, and may cross an epoch's end, so no prompt is left over.
    """

    def __init__(self, num_prompts: int, seed: int) -> None:
        if num_prompts < 1:
            raise ValueError("the task has no training prompts: check task.options (and what was dropped at load)")
        self.num_prompts = num_prompts
        self.seed = seed
        self._epoch = -1
        self._permutation: npt.NDArray[np.int64] = np.empty(0, np.int64)

    def prompt_of(self, draw: int) -> int:
        """Prompt index of draw `draw` of the run (0-based)."""
        epoch, place = divmod(draw, self.num_prompts)
        if epoch != self._epoch:
            self._permutation = np.random.default_rng((self.seed, epoch)).permutation(self.num_prompts)
            self._epoch = epoch
        return int(self._permutation[place])


class StepSampler:
    """Takes each step's groups from the data order and knows how far it has come."""

    def __init__(self, context: RolloutContext, task: TaskBase) -> None:
        self.context = context
        self.task = task
        self.num_draws = 0
        """Draws that the steps so far have used."""
        self.earlier: dict[SampleKey, Prefix] = {}
        """Mode `partial`: samples of incomplete groups, by draw and sample. Mode `spec_rl`: the newest responses, by
        number of the prompt and sample."""
        recipe = context.recipe
        self.sampling = train_sampling(recipe, context.end_ids)
        self.order = DataOrder(len(task.train_prompts), recipe.seed)
        self._next_ahead = 0  # the first draw that no run-ahead of this step has been made for
        rollout = recipe.rollout
        self._max_draws = rollout.num_prompts  # of one step
        if rollout.dynamic_sampling:
            self._max_draws = rollout.max_draws or DRAWS_PER_PROMPT * rollout.num_prompts

    def sample(self, step: int, *, on_progress: OnProgress, timer: StageTimer) -> StepRollouts:
        """The rollouts of training step `step`; idle slots may look ahead to what is drawn next.

        The step has the next `rollout.num_prompts` draws; with dynamic sampling as many as it takes to keep that many.
        """
        context, engine, recipe = self.context, self.context.engine, self.context.recipe
        rollout, algorithm = recipe.rollout, recipe.algorithm
        first = self._next_ahead = self.num_draws
        collector = context.collector("train", rollout.num_samples, self.sampling, on_progress, timer)
        num_wanted, reuse = rollout.num_prompts, dict[str, float]()
        if rollout.mode == "partial":
            num_wanted = share_of(rollout.num_prompts, rollout.min_complete)
        if rollout.mode != "on_policy":
            groups, kept, collector, reuse = self._sample_in_rounds(step, num_wanted, collector)
        elif rollout.dynamic_sampling:
            until_full = DrawsUntilFull(
                self.prompt_of,
                first_draw=first,
                num_prompts=rollout.num_prompts,
                max_draws=self._max_draws,
                keeps=lambda group: bool(groups_to_learn_from([group], algorithm)),
                run_ahead=lambda opened: self.run_ahead(step, opened, collector),
            )
            groups = collect_rollouts(engine, collector, until_full)
            kept = [replace(one, rollouts=one.graded) for one in until_full.kept_groups(groups, context.ranks)]
            self.num_draws = first + len(groups)
        else:
            draws = range(first, first + rollout.num_prompts)
            fixed = FixedDraws(self.draws(draws), run_ahead=self.run_ahead(step, draws, collector))
            groups = collect_rollouts(engine, collector, fixed)
            kept = groups_to_learn_from(groups, algorithm)
            self.num_draws = draws.stop
        check_not_all_failed(groups, f"step {step}")
        if context.conversations is not None:
            context.conversations.check_not_all_raised(f"step {step}", context.ranks)
        token_ids = [rollout.token_ids for group in groups for rollout in group.rollouts]
        metrics = rollout_metrics(groups, context.grader.outcomes) | {
            "data/epoch": first / self.order.num_prompts,
            "data/draws": len(groups),
            "tokens/unknown": count_unknown(context.tokenizer, np.concatenate(token_ids)),
            "groups/kept": len(kept),
            "groups/dropped": len(groups) - len(kept),
            "groups/short": max(0, num_wanted - len(kept)) if rollout.dynamic_sampling else 0,
        }
        metrics |= reuse | collector.engine_metrics(engine)
        return StepRollouts(groups=groups, kept=kept, metrics=metrics)

    def save(self, folder: Path) -> None:
        """Write samples that later steps go on from."""
        save_earlier(folder, earlier=self.earlier)

    def load(self, folder: Path) -> None:
        """Read what `save` has written."""
        self.earlier = load_earlier(folder)

    def _sample_in_rounds(
        self, step: int, num_wanted: int, collector: Collector
    ) -> tuple[list[RolloutGroup], list[RolloutGroup], Collector, dict[str, float]]:
        """The groups of a step of an off-policy mode, those that are kept, the last collector, and further metrics.

        A round has as many draws as the batch still lacks, first those that go on. There is one round; with dynamic
        sampling as many as it takes to keep `num_wanted` groups or to open `rollout.max_draws`: where all groups of a
        round are complete, these are the groups that `DrawsUntilFull` keeps.
        """
        engine, recipe, rollout = self.context.engine, self.context.recipe, self.context.recipe.rollout
        is_partial, end = rollout.mode == "partial", self.num_draws + self._max_draws
        groups: list[RolloutGroup] = []
        kept: list[RolloutGroup] = []
        num_offered = num_accepted = 0
        while True:
            going_on = sorted({draw for draw, _ in self.earlier}) if is_partial else []
            num_new = max(0, rollout.num_prompts - len(kept) - len(going_on))  # none where a resume asks for fewer
            new = range(self.num_draws, min(self.num_draws + num_new, end))
            draws, run_ahead = self.draws([*going_on, *new]), self.run_ahead(step, new, collector)
            self.num_draws = new.stop
            if is_partial:
                limit, oldest = rollout.max_new_tokens, engine.policy_version - rollout.max_age
                collector.prefixes = {key: truncated(p, len(p.token_ids), limit) for key, p in self.earlier.items()}
                due = {draw for (draw, _), prefix in self.earlier.items() if prefix.policy_versions[0] <= oldest}
                num_complete = share_of(len(draws), rollout.min_complete)
                some = PartialDraws(draws, num_complete=num_complete, due=due, run_ahead=run_ahead)
                found = collect_rollouts(engine, collector, some)
                self.earlier = some.carried
            else:
                requests = [request for request in collector.requests(draws) if self._key(request) in self.earlier]
                offered = [self.earlier[self._key(request)] for request in requests]
                with collector.timer.stage("acceptance"):
                    context = UpdateContext(recipe=recipe, step=step, ranks=self.context.ranks)
                    collector.prefixes = accept_prefixes(requests, offered, engine.runner.model, context)
                num_offered += sum(len(prefix.sampled) for prefix in offered)
                num_accepted += sum(len(prefix.sampled) for prefix in collector.prefixes.values())
                found = collect_rollouts(engine, collector, FixedDraws(draws, run_ahead=run_ahead))
                self.earlier |= {self._key(r): whole_prefix(r) for group in found for r in group.rollouts}
            groups = groups + found
            kept = kept + groups_to_learn_from(found, recipe.algorithm)
            if not rollout.dynamic_sampling or len(kept) >= num_wanted or new.stop == end:
                break
            collector = replace(collector, earlier_rounds=collector.counters)
        groups, kept = (sorted(some, key=lambda group: group.draw_index) for some in (groups, kept))
        metrics = {"off_policy/accepted_share": num_accepted / max(1, num_offered)}
        if is_partial:
            num_carried = sum(prefix.finish_reason is None for prefix in self.earlier.values())
            metrics = {"off_policy/carried": float(num_carried)}
        return groups, kept, collector, metrics

    def _key(self, sample: Request | Rollout) -> SampleKey:
        """Number of the prompt, and sample index: what mode `spec_rl` finds an earlier response by."""
        return self.order.prompt_of(sample.draw_index), sample.sample_index

    def draws(self, which: Sequence[int]) -> list[tuple[int, Prompt]]:
        """(draw index, prompt) of draws of the run; a pure function of the seed."""
        return [(draw, self.prompt_of(draw)) for draw in which]

    def prompt_of(self, draw: int) -> Prompt:
        """The prompt of one draw of the run."""
        return self.context.started(self.task.train_prompts[self.order.prompt_of(draw)])

    def run_ahead(self, step: int, opened: range, collector: Collector) -> list[Request]:
        """Run-aheads for idle slots beside the `opened` draws: of the draws after them, each once.

        They come as replacements in this step, or in the next step. None where the drafter would not use them.
        """
        recipe = self.context.recipe
        if not self.context.engine.wants_run_aheads:
            return []
        end = opened.stop + recipe.rollout.num_prompts
        if step == recipe.train.num_steps:  # no step comes after it
            end = min(end, self.num_draws + self._max_draws)
        ahead = range(max(opened.stop, self._next_ahead), end)
        self._next_ahead = max(ahead.stop, self._next_ahead)
        return collector.run_ahead(self.draws(ahead))


def share_of(count: int, share: float) -> int:
    """The smallest number that is at least this share of `count`, at least 1; rounding of the share apart."""
    return max(1, math.ceil(count * share - 1e-9))
