"""The rollout engine: requests in, completions out as they finish; one decode step reads like a list."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import numpy as np

from srtrl import ranks
from srtrl.drafters.base import DrafterBase, key_of
from srtrl.drafters.draft_tree import DraftTrees, check_trees
from srtrl.drafters.none import Drafter as NoDrafter
from srtrl.engine.batch import Batch, Sample, ScheduledStep
from srtrl.engine.cpu_runner import CpuRunner
from srtrl.engine.draft_budget import MAX_ROWS, DraftControl, StepCost, cut_trees
from srtrl.engine.kv_memory import allocate_pages
from srtrl.engine.no_run_ahead import NoRunAhead
from srtrl.engine.page_pool import PagePool
from srtrl.engine.runner import EngineOptions, RowFilters, Runner
from srtrl.engine.scheduler import Scheduler
from srtrl.engine.stats import EngineStats, StageClock, add_stats
from srtrl.engine.step_inputs import fill_inputs
from srtrl.engine.stopping import StopFinder, Tokenizer
from srtrl.engine.verify import MAX_LENGTH, RUNNING, Verified, plan_moves, rows_that_stay, verify
from srtrl.model.transformer import Transformer
from srtrl.types import Completion, FinishReason, Purpose, Request, Response

__all__ = ["Engine", "EngineOptions"]


class Engine:
    """Paged-KV decoder with continuous batching and draft-tree verification, on the policy's own weights."""

    def __init__(
        self,
        policy: Transformer,
        options: EngineOptions,
        *,
        tokenizer: Tokenizer | None = None,
        drafter: DrafterBase | None = None,
        runner: Runner | None = None,
        cost: StepCost | None = None,
        compile_kernels: Callable[[bool], None] | None = None,
        run_ahead: Callable[[Batch, StepCost, DrafterBase], NoRunAhead] | None = None,
    ) -> None:
        """An engine without requests; its pages are allocated, its kernels are not compiled yet.

        Args:
            policy: Decodes; the engine reads the weights and changes none.
            options: Sizes and limits.
            tokenizer: For stop strings.
            drafter: `NoDrafter` by default.
            runner: `CpuRunner` by default.
            cost: Of a decode step; measured by default.
            compile_kernels: Called before the first rollout, with whether it may draft (`warm_up.py`).
            run_ahead: The constructor of what decodes in idle slots; `NoRunAhead` by default.

        Raises:
            ValueError: the model is not made for sequences this long, or the memory does not hold one of them.
        """
        self.options = options
        self.stop_finder = StopFinder(tokenizer, policy.config.vocab_size)
        self.vocab_size = policy.config.vocab_size
        self.max_sequence_tokens = options.longest_sequence(policy.config.max_position_embeddings)
        self.runner = runner or CpuRunner(policy, options)
        num_pages = allocate_pages(self.runner, options, self.max_sequence_tokens)
        self.pool = PagePool(num_pages, options.page_size)
        self.batch = Batch(options.slots, self.max_sequence_tokens, self.pool, options.max_draft_nodes)
        self.drafter = drafter or NoDrafter()
        self.control = DraftControl(
            cost or StepCost(self.runner.row_edges(MAX_ROWS)),
            fixed=None if options.draft_budget == "auto" else options.draft_budget,
        )
        self.run_ahead = run_ahead(self.batch, self.control.cost, self.drafter) if run_ahead else NoRunAhead()
        self.scheduler = Scheduler(
            self.batch,
            prefill_chunk_tokens=options.prefill_chunk_tokens,
            max_draft_nodes=options.max_draft_nodes,
            run_ahead=self.run_ahead,
        )
        self.policy_version = 0
        self.stats = EngineStats()
        self.clock = StageClock()
        """Stages of the current step, or of the last one."""
        self._unrecorded: Callable[[], None] | None = None
        """Counts the last step."""
        self._num_rows = 0
        """Rows of the last step without those of run-aheads."""
        self._compile_kernels = compile_kernels
        self._is_warm = False
        self._is_decoding = False

    @property
    def has_work(self) -> bool:
        """Whether a sample decodes or waits for a slot; paused samples and run-aheads do not count."""
        return self.scheduler.has_work

    @property
    def num_free_slots(self) -> int:
        """Slots that no sample has or waits for."""
        return self.scheduler.num_free_slots

    @property
    def drafts(self) -> bool:
        """Whether the drafter is used at all."""
        return self.drafter.drafts and self.control.fixed != 0

    def check_request(self, request: Request) -> None:
        """Raise ValueError, naming the request, where it can never be decoded."""
        who = f"prompt {request.prompt_id!r}, sample {request.sample_index}"
        prompt, sampling = request.prompt_token_ids, request.sampling
        if not prompt:
            raise ValueError(f"{who}: the prompt is empty; at least one token is needed")
        prefix = () if request.prefix is None else request.prefix.token_ids.tolist()
        for token in (min(prompt), max(prompt), *((min(prefix), max(prefix)) if prefix else ())):
            if not 0 <= token < self.vocab_size:
                raise ValueError(f"{who}: token id {token} is not in the vocabulary of {self.vocab_size}")
        assert sampling.max_new_tokens >= 1, sampling
        assert 0 <= sampling.temperature < float("inf"), sampling
        assert 0 <= sampling.top_k < 2**31, sampling
        assert 0 < sampling.top_p <= 1, sampling
        assert not sampling.stop_strings or self.stop_finder.tokenizer is not None, "stop strings need a tokenizer"
        longest = len(prompt) + sampling.max_new_tokens
        if longest > self.max_sequence_tokens:
            raise ValueError(
                f"{who}: {len(prompt)} prompt tokens and max_new_tokens {sampling.max_new_tokens} exceed the limit of "
                f"{self.max_sequence_tokens} tokens: shorten the prompt or lower max_new_tokens"
            )
        assert self.pool.pages_for(longest) <= self.pool.num_pages, "the pages do not hold this sequence"
        if request.prefix is not None and not 1 <= len(prefix) < sampling.max_new_tokens:
            raise ValueError(
                f"{who}: expected a prefix of 1 to {sampling.max_new_tokens - 1} tokens, fewer than max_new_tokens, "
                f"found {len(prefix)}"
            )

    def add(self, request: Request) -> None:
        """Queue a request; inside `rollout`, between two steps.

        Raises:
            ValueError: See `check_request`; the other requests are left alone.
        """
        self.check_request(request)
        self.stop_finder.add(request.sampling.stop_strings)
        expected_tokens = self.drafter.expected_tokens(request)
        if request.sample_index == 0:
            self.stats.num_draws += 1
            self.stats.num_known_draws += expected_tokens is not None
        self.scheduler.add(request, expected_tokens)

    def add_run_aheads(self, requests: Sequence[Request]) -> None:
        """Queue samples of draws that `run_ahead` chose; before a rollout, or between two steps.

        Raises:
            ValueError: See `check_request`.
        """
        for request in requests:
            self.check_request(request)
            self.stop_finder.add(request.sampling.stop_strings)
        self.run_ahead.add(requests)

    def extend(self, completion: Completion, token_ids: Sequence[int]) -> None:
        """Continue a sample that paused at the end of a turn: its next turn follows these tokens.

        They are not sampled, no draft leads to them, and their log-probs are 0. May be called when `add` may.

        Raises:
            ValueError: There are no tokens, one is not in the vocabulary, or no room is left to sample one after them.
        """
        request = completion.request
        room = request.sampling.max_new_tokens - len(completion.response.token_ids) - 1
        if not 1 <= len(token_ids) <= room or not all(0 <= token < self.vocab_size for token in token_ids):
            raise ValueError(
                f"prompt {request.prompt_id!r}, sample {request.sample_index}: expected 1 to {room} tokens of a "
                f"vocabulary of {self.vocab_size} to extend it by, found {len(token_ids)}: {token_ids!s:.60}"
            )
        self.scheduler.extend(request.rng_key, np.array(token_ids, np.int32))

    def end(self, completion: Completion) -> None:
        """A sample that paused at the end of a turn is finished: drafters may learn from it."""
        self.scheduler.end(completion.request.rng_key)
        self.drafter.learn([completion])

    def interrupt(self, num_tokens: int) -> list[Completion]:
        """End the running samples that have sampled at least this many tokens, those of their prefix not counted.

        Inside `rollout`, between two steps. Their tokens become drafts for the samples with the same RNG keys.

        Returns:
            Their responses so far.
        """
        ended = [
            sample
            for sample in self.scheduler.running
            if len(self.batch.generated(sample.slot)) - sample.request.num_reused >= num_tokens
        ]
        slots = [sample.slot for sample in ended]
        for sample in ended:
            self.scheduler.finish(sample)
        self._give_up(slots)
        for sample in ended:
            self.drafter.learn_texts({key_of(sample.request): {sample.request.rng_key: sample.token_ids}})
        return [self._completion(sample) for sample in ended]

    @contextmanager
    def rollout(self, purpose: Purpose) -> Iterator[None]:
        """Inside it samples are added (`add`) and decoded (`step`); at its end what is not finished is dropped.

        The first time, kernels are compiled and, where drafts are budgeted by it, the cost of a step is measured.

        Raises:
            ValueError: Another rollout of this engine has not ended; it is left alone.
        """
        if self._is_decoding:
            raise ValueError(
                "this engine is decoding already: read the first `generate` to its end, close it, or give it more "
                "samples (`Engine.add`)"
            )
        self.warm_up()
        self.drafter.defers = self.runner.is_asynchronous
        self.drafter.begin_rollout(purpose)
        self._is_decoding = True
        try:
            yield
        finally:
            self._is_decoding = False
            self._give_up(list(self.scheduler.clear()))
            self.drafter.learn_deferred()
            self._record_last()

    def generate(self, requests: Sequence[Request]) -> Iterator[Completion]:
        """Decode the requests; yields each completion as it finishes, in no particular order.

        The consumer may add more (`add`, `extend`) between two completions, the last one included. If it stops early,
        the rest is dropped: no sample and no page is left.

        Raises:
            ValueError: A request can never be decoded, raised before anything is decoded; or see `rollout`.
        """
        with self.rollout(requests[0].purpose if requests else "generate"):
            for request in requests:
                self.add(request)
            while self.has_work:
                yield from self.step()

    def step(self) -> list[Completion]:
        """One decode step for all running samples; returns those that finished."""
        self.clock = StageClock()
        step = self._schedule()
        if not (len(step.slots) or step.chunks):
            return []
        trees = self._draft(step)
        self._launch(step, trees)
        self._learn(step, trees)
        verified = self._verify(step, trees)
        self._observe(trees, verified)
        completions = self._take_finished(verified)
        self._num_rows = step.num_primaries + trees.num_nodes
        self._unrecorded = partial(
            self._record, step, trees, verified, self.clock, was_prepared=self.runner.was_prepared
        )
        return completions

    def step_run_aheads(self) -> bool:
        """One decode step while no sample has work; returns whether a run-ahead had work, and room for it."""
        assert not self.has_work
        num_steps = self.stats.num_run_ahead_steps
        if self.run_ahead.has_work:
            self.step()
            self._record_last()
        return self.stats.num_run_ahead_steps > num_steps

    def end_step(self, *, has_new_weights: bool) -> None:
        """A training step has ended: drafts are of another step now, and with new weights KV is stale."""
        assert not self.has_work, "a step ends while samples are decoding"
        self.drafter.end_step()
        if has_new_weights:
            self.runner.weights_changed()
            self.policy_version += 1

    def take_metrics(self) -> dict[str, float]:
        """Metrics since the last call, all under `engine/`: they may depend on slots, pages and drafter.

        Called on all ranks, whose engines work together: these are the metrics of all of them.
        """
        self._record_last()
        stats, self.stats = self.stats, EngineStats()
        stats.num_slots, stats.num_pages = self.options.slots, self.pool.num_pages
        stats.num_preemptions, self.scheduler.num_preemptions = self.scheduler.num_preemptions, 0
        stats.num_graphs_dropped, self.runner.num_graphs_dropped = self.runner.num_graphs_dropped, 0
        shared = ranks.gather((stats, self.drafter.take_metrics()), "the engine's metrics")
        total = add_stats([stats for stats, _ in shared])
        metrics = total.metrics(ranks.count())
        if not self.drafts:
            return metrics
        metrics["engine/cache_hit_rate"] = total.num_known_draws / max(total.num_draws, 1)
        rows = [row for _, row in shared]
        for name in dict.fromkeys(name for row in rows for name in row):
            values = [row[name] for row in rows if name in row]
            metrics[name] = sum(values) / (1 if name in self.drafter.summed_metrics else len(values))
        return metrics

    def _schedule(self) -> ScheduledStep:
        """Let the scheduler fill the step, and report to the drafter which samples have lost or got a slot."""
        run_ahead, is_alone = self.run_ahead, not self.has_work
        step = self.scheduler.schedule(
            run_ahead.max_rows(self._num_rows, is_alone=is_alone) if run_ahead.has_work else 0
        )
        if step.ended:
            self._give_up(list(step.ended))
        if step.started:
            slots = np.array([sample.slot for sample in step.started])
            requests = [self._continued(sample) for sample in step.started]
            self.drafter.start(slots, requests)
            resumed = [
                self.batch.generated(slot)[request.text_start :] for slot, request in zip(slots, requests, strict=True)
            ]
            offsets = np.cumsum([0, *map(len, resumed)])
            if offsets[-1]:  # of prefixes, and of preempted and extended samples, which the drafter forgot
                self.drafter.observe(slots, np.concatenate(resumed), offsets)
        self.clock.lap("schedule")
        return step

    def _draft(self, step: ScheduledStep) -> DraftTrees:
        """Trees for the primaries, as large as pays and as free pages allow; run-aheads get none."""
        num, batch = step.num_primaries, self.batch
        if not (self.drafts and num):
            return DraftTrees.empty(len(step.slots))
        slots = step.slots[:num]
        # A sample that ends with its next token needs no draft.
        max_nodes = self.control.max_nodes(self.options.max_draft_nodes)
        room = np.where(batch.max_tokens[slots] - batch.num_tokens[slots] > 1, max_nodes, 0)
        proposed = self.drafter.propose(slots, room, self.control.score_floor)
        check_trees(proposed, room, self.vocab_size, str(self.drafter))
        self.clock.lap("propose")
        num_other_rows = len(step.slots) - num + step.num_prompt_rows
        sizes = self.scheduler.grow_for_drafts(slots, self.control.choose(proposed, num_other_rows))
        trees = cut_trees(proposed, sizes, len(step.slots))
        self.clock.lap("choose")
        return trees

    def _launch(self, step: ScheduledStep, trees: DraftTrees) -> None:
        """Fill the step's inputs and queue it."""
        batch, slots, sizes = self.batch, step.slots, trees.sizes
        inputs = self.runner.inputs_for(batch.step_size(step, sizes))
        fill_inputs(inputs, batch.arrays, slots, trees, step.chunks, self.pool.page_size)
        filters = None
        if batch.is_filtered[slots].any():
            filters = RowFilters(
                top_k=np.repeat(batch.top_k[slots], 1 + sizes), top_p=np.repeat(batch.top_p[slots], 1 + sizes)
            )
        self.clock.lap("rows")
        self.runner.launch(inputs, filters)
        self.clock.lap("forward")

    def _learn(self, step: ScheduledStep, trees: DraftTrees) -> None:
        """Do what decides nothing of the next launch; a device computes the step meanwhile."""
        self._record_last()
        self.drafter.learn_deferred()
        if not self.runner.is_asynchronous:  # else it is a part of the wait
            self.clock.lap("observe")
        elif self.drafts and step.num_primaries:
            num = step.num_primaries
            self.drafter.foresee(step.slots[:num], trees.pick(trees.offsets[:num], trees.sizes[:num]))

    def _verify(self, step: ScheduledStep, trees: DraftTrees) -> Verified:
        """Wait for what was sampled, and keep the path of each tree that it follows."""
        sampled = self.runner.wait(len(step.slots) + trees.num_nodes)
        self.clock.lap("wait" if self.runner.is_asynchronous else "forward")
        verified = verify(self.batch, step.slots, trees, sampled, self.stop_finder)
        self.clock.lap("verify")
        if self.drafts and self.drafter.reads_states:
            self.drafter.computed(*rows_that_stay(step, trees, verified))
        self.drafter.prepare(verified.slots, verified.token_ids, verified.offsets, verified.rows)
        self.clock.lap("propose")
        if trees.num_nodes:
            self.runner.move_kv(plan_moves(self.batch, verified, self.pool.page_size))
        self.clock.lap("commit")
        return verified

    def _take_finished(self, verified: Verified) -> list[Completion]:
        """Take out the finished samples, and pause those whose turn has ended."""
        self.stats.max_pages = max(self.stats.max_pages, self.pool.num_used)  # before any is given back
        ended = np.flatnonzero(verified.finish != RUNNING).tolist()
        completions: list[Completion | None] = []
        for b in ended:
            sample = self.batch.samples[int(verified.slots[b])]
            assert sample is not None
            (self.scheduler.pause if sample.request.has_turns else self.scheduler.finish)(sample)
            finish_reason: FinishReason = "length" if verified.finish[b] == MAX_LENGTH else "stop"
            completions.append(None if sample.is_run_ahead else self._completion(sample, finish_reason))
        if ended:
            known = [None if c is None or c.request.has_turns else c for c in completions]  # not complete if paused
            self.drafter.finish(verified.slots[ended].tolist(), known)
        self.clock.lap("finish")
        return [completion for completion in completions if completion is not None]

    def _give_up(self, slots: Sequence[int]) -> None:
        """Samples have lost these slots unfinished."""
        self.drafter.finish(slots, [None] * len(slots))

    def _completion(self, sample: Sample, finish_reason: FinishReason | None = None) -> Completion:
        """The response of a sample up to where it has left its slot, or has got it."""
        versions = np.full(len(sample.token_ids), self.policy_version, np.int32)
        if (prefix := sample.request.prefix) is not None:
            versions[: len(prefix.token_ids)] = prefix.policy_versions
        response = Response(
            token_ids=sample.token_ids,
            rollout_logprobs=sample.logprobs,
            policy_versions=versions,
            finish_reason=finish_reason,
            extensions=tuple(sample.extensions),
        )
        return Completion(request=sample.request, response=response)

    def _continued(self, sample: Sample) -> Request:
        """The request of a sample that has got a slot; that of a later turn has all turns before it as its prefix."""
        request = sample.request
        return replace(request, prefix=self._completion(sample).response) if sample.extensions else request

    def _observe(self, trees: DraftTrees, verified: Verified) -> None:
        """Report the new tokens to the drafter, with what else the policy took to be likely where both can."""
        tokens, num_top = (verified.slots, verified.token_ids, verified.offsets), self.drafter.num_top
        is_drawn = self.drafter.knows_noise  # else recorded tokens replace the sampled ones
        top = self.runner.top_tokens(verified.rows_of_tokens(trees), num_top) if num_top and is_drawn else None
        if top is None:
            self.drafter.observe(*tokens)
        else:
            self.drafter.observe_top(*tokens, top)
        self.clock.lap("observe")

    def _record_last(self) -> None:
        """Count the last step: while a device computes the next one, or where counts are asked for."""
        record, self._unrecorded = self._unrecorded, None
        if record is not None:
            record()

    def _record(
        self, step: ScheduledStep, trees: DraftTrees, verified: Verified, clock: StageClock, *, was_prepared: bool
    ) -> None:
        """Count a step, and learn what it cost."""
        num_prefill, num_rows = step.num_prompt_rows, len(step.slots) + trees.num_nodes
        self.stats.add_step(step, trees, verified, clock)
        if self.drafts and was_prepared and 2 * num_prefill <= num_rows:  # the rows of prompts are not like others
            self.control.cost.record(num_rows + num_prefill, clock.total)

    def warm_up(self) -> None:
        """Once: compile (or load) all kernels, and measure the cost of a step where drafts are budgeted by it.

        The first rollout does so by itself.
        """
        if self._is_warm:
            return
        self.runner.warm_up(compiles=self._compile_kernels is not None)
        if self._compile_kernels is not None:
            self._compile_kernels(self.drafts)
        slots, context = self.options.slots, max(1, min(self.max_sequence_tokens // 2, 512))
        needs_cost = self.drafts and (self.control.fixed is None or self.run_ahead.needs_cost)
        if needs_cost and not self.control.cost.is_known:
            self.control.cost.probe(
                lambda num_rows: self.runner.time_step(num_rows, context, min(num_rows, slots)),
                num_slots=slots,
                max_rows=slots * (1 + self.options.max_draft_nodes),
            )
        self._is_warm = True
