"""The rollout engine: requests in, completions out as they finish; one decode step reads like a list."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

import numpy as np
import numpy.typing as npt

from srtrl.drafters.base import DrafterBase
from srtrl.drafters.none import Drafter as NoDrafter
from srtrl.engine.kv_memory import allocate_pages
from srtrl.engine.options import EngineOptions
from srtrl.engine.page_pool import PagePool
from srtrl.engine.row_sampling import ForcedTokens
from srtrl.engine.runner import make_device_runner, make_runner
from srtrl.engine.scheduler import Scheduler
from srtrl.engine.sequence import ScheduledStep
from srtrl.engine.speculation import MAX_ROWS, Draft, Speculation
from srtrl.engine.stats import EngineStats, StepSeconds
from srtrl.engine.step_cost import StepCost
from srtrl.engine.stopping import Tokenizer
from srtrl.engine.timeline import DecodeStep
from srtrl.engine.verify import Walk, follow_rows, verify_trees
from srtrl.model.cpu_threads import set_cpu_threads
from srtrl.model.transformer import Transformer
from srtrl.types import Completion, Request

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
    ) -> None:
        if policy.device.type == "cpu":
            set_cpu_threads()
        self.options = options
        self.tokenizer = tokenizer
        self.vocab_size = policy.config.vocab_size
        self.max_sequence_tokens = options.max_sequence_tokens or policy.config.max_position_embeddings
        if self.max_sequence_tokens > policy.config.max_position_embeddings:
            raise ValueError(
                f"sequences of up to {self.max_sequence_tokens} tokens are asked for, but the model was made for "
                f"{policy.config.max_position_embeddings} (max_position_embeddings in its config.json): lower "
                "rollout.max_prompt_tokens or rollout.max_new_tokens"
            )
        self._device = make_device_runner(policy, options, self.max_sequence_tokens)
        """The runner, where it is one for CUDA devices."""
        self.runner = self._device or make_runner(policy, options)
        num_pages = allocate_pages(self.runner, options, self.max_sequence_tokens)
        self.pool = PagePool(num_pages, options.page_size)
        self.scheduler = Scheduler(
            self.pool,
            num_slots=options.slots,
            prefill_chunk_tokens=options.prefill_chunk_tokens,
            admission=options.admission,
            long_first=options.long_first,
            max_draft_nodes=options.max_draft_nodes,
        )
        self.speculation = Speculation(
            drafter or NoDrafter(),
            vocab_size=self.vocab_size,
            draft_budget=options.draft_budget,
            max_draft_nodes=options.max_draft_nodes,
            run_ahead_max_slowdown=options.run_ahead_max_slowdown,
            num_slots=options.slots,
            cost=(
                self.runner.step_cost(MAX_ROWS)
                if options.cost_points is None
                else StepCost.from_points(options.cost_points)
            ),
        )
        self.policy_version = 0
        self.trace: Mapping[int, npt.NDArray[np.int32]] | None = None
        """For benchmarks: rng_key -> recorded response, whose tokens are taken in place of those that are sampled."""
        self.after_step: Callable[[], None] | None = None
        """For benchmarks: called behind each decode step of `generate`, so that others may work meanwhile."""
        self.stats = EngineStats()
        self._timeline: list[DecodeStep] = []
        self._rollout_started: float | None = None
        self._next_sequence_id = 0
        self._pages_released = False
        self._bookkeeping: Callable[[], None] | None = None
        """Of the last step: done while the device computes the next one."""

    @property
    def drafter(self) -> DrafterBase:
        """What guesses."""
        return self.speculation.drafter

    @property
    def has_work(self) -> bool:
        """Whether a sample is unfinished; run-aheads do not count."""
        return self.scheduler.has_work

    def check_request(self, request: Request) -> None:
        """Raise ValueError, naming the request, where it can never be decoded."""
        who = f"prompt {request.prompt_id!r}, sample {request.sample_index}"
        prompt, sampling = request.prompt_token_ids, request.sampling
        if not prompt:
            raise ValueError(f"{who}: the prompt is empty; at least one token is needed")
        unknown = [token for token in prompt if not 0 <= token < self.vocab_size]
        if unknown:
            raise ValueError(f"{who}: token id {unknown[0]} is not in the vocabulary of {self.vocab_size}")
        if sampling.max_new_tokens < 1:
            raise ValueError(f"{who}: max_new_tokens is {sampling.max_new_tokens}, expected at least 1")
        if sampling.temperature < 0 or sampling.top_k < 0 or not 0 < sampling.top_p <= 1:
            raise ValueError(
                f"{who}: expected temperature >= 0, top_k >= 0 and 0 < top_p <= 1, found {sampling.temperature}, "
                f"{sampling.top_k} and {sampling.top_p}"
            )
        if sampling.stop_strings and self.tokenizer is None:
            raise ValueError(f"{who}: stop strings need a tokenizer")
        longest = len(prompt) + sampling.max_new_tokens
        if longest > self.max_sequence_tokens:
            raise ValueError(
                f"{who}: {len(prompt)} prompt tokens and max_new_tokens {sampling.max_new_tokens} exceed the limit of "
                f"{self.max_sequence_tokens} tokens: shorten the prompt or lower max_new_tokens"
            )
        if self.pool.pages_for(longest) > self.pool.num_pages:
            raise ValueError(
                f"{who}: up to {longest} tokens need {self.pool.pages_for(longest)} pages of {self.pool.page_size}, "
                f"but there are {self.pool.num_pages}: raise num_pages or kv_memory_gib"
            )

    def add(self, request: Request) -> None:
        """Queue a request; also while `generate` runs, between two of its completions or from its `before_step`.

        A sample ends the run-ahead on its own RNG key: what that has said so far is the sample's draft from now on.

        Raises:
            ValueError: See `check_request`; the other requests are left alone.
        """
        self.check_request(request)
        self._queue(request)

    def generate(
        self,
        requests: Iterable[Request],
        *,
        run_ahead: Iterable[Request] = (),
        before_step: Callable[[], None] | None = None,
    ) -> Iterator[Completion]:
        """Decode the requests; yields each completion as it finishes, in no particular order.

        It ends when no sample is left. More may be added (`add`) while it runs: by the consumer between two
        completions, the last one included, or by `before_step`. A consumer that stops early drops the rest: no sample
        and no page is left behind.

        Args:
            requests: The samples wanted.
            run_ahead: What idle slots may decode beside them, for the sake of later drafts; ends with the last sample.
            before_step: Called before each decode step, and once more when no sample is left; it may add requests.

        Raises:
            ValueError: A request can never be decoded; raised before anything is decoded.
        """
        requests, run_ahead = list(requests), list(run_ahead)
        assert not any(request.is_run_ahead for request in requests)
        assert all(request.is_run_ahead for request in run_ahead)
        for request in [*requests, *run_ahead]:
            self.check_request(request)
        try:
            for request in [*requests, *run_ahead]:
                self._queue(request)
            while self._has_work_after(before_step):
                completions = self.step()
                if self.after_step is not None:
                    self.after_step()
                yield from completions
        finally:
            self.end_rollout()

    def step(self) -> list[Completion]:
        """One decode step for all running samples; returns those that finished."""
        started = time.perf_counter()
        scheduled = self._schedule()
        draft = self.speculation.draft(scheduled, self.scheduler)
        drafted = time.perf_counter()
        walks, computed, waited = self._decode(scheduled, draft)
        sampled = time.perf_counter()
        self.runner.commit(walks)
        self.speculation.observe(draft, walks)
        completions = self._take_finished(walks)
        finished = time.perf_counter()
        seconds = StepSeconds(
            draft=drafted - started,
            forward=computed - drafted,
            sample=sampled - computed,
            commit=finished - sampled,
            waited=waited,
        )
        self._bookkeeping = partial(
            self._count,
            scheduled,
            draft,
            walks,
            seconds,
            finished,
            self.scheduler.num_waiting,
            self.runner.was_prepared,
        )
        if self._device is None or not self.has_work:
            self._do_bookkeeping()
        return completions

    def end_rollout(self) -> None:
        """Drop what is still decoded or waits: run-aheads, and samples that nobody wants any more."""
        self._do_bookkeeping()
        for sequence_id in self.scheduler.clear():
            self.speculation.finish(sequence_id, None)
        self.speculation.report_ends()
        self._rollout_started = None

    def on_policy_update(self) -> None:
        """The policy's weights have changed: KV is stale, drafts are not."""
        assert not self.scheduler.has_work, "the policy changed while samples were decoding"
        self.runner.refresh_weights()
        self.drafter.on_policy_update()
        self.policy_version += 1

    def release_kv(self) -> None:
        """No sample is live and an update follows: with `kv_across_update: release`, give it the pages' memory.

        The next request takes it back.
        """
        assert not self.scheduler.has_work, "samples are decoding"
        if self.options.kv_across_update == "release":
            self.runner.release_pages()
            self._pages_released = True

    def kv_bytes(self) -> int:
        """Memory that the pages hold at present."""
        return self.runner.num_pages * self.runner.page_bytes

    def take_metrics(self) -> dict[str, float]:
        """Metrics since the last call, all under `engine/`: they may depend on slots, pages and drafter."""
        self._do_bookkeeping()
        metrics = self.stats.metrics() | {
            "engine/slots": self.options.slots,
            "engine/pages": self.pool.num_pages,
            "engine/preemptions": self.scheduler.num_preemptions,
        }
        if not self.speculation.is_off:
            metrics |= self.speculation.budget.take_metrics() | self.drafter.take_metrics()
        self.stats = EngineStats()
        self.scheduler.num_preemptions = 0
        return metrics

    def take_timeline(self) -> list[DecodeStep]:
        """Decode steps since the last call, in order."""
        self._do_bookkeeping()
        timeline, self._timeline = self._timeline, []
        return timeline

    def _queue(self, request: Request) -> None:
        """Queue a request that was checked."""
        if self._pages_released:
            self._take_pages_back()
        if self.pool.num_used == 0:
            self.speculation.prepare(self.runner, request, max_context_tokens=self.max_sequence_tokens)
        sequence_id = self._next_sequence_id
        self._next_sequence_id += 1
        if request.is_run_ahead:  # the drafter hears of it once it has a slot
            self.scheduler.add(sequence_id, request)
            return
        for ended in self.scheduler.idle_slots.end_rng_key(request.rng_key):
            self.speculation.finish(ended, None)
        self.scheduler.add(sequence_id, request, self.speculation.start(sequence_id, request))

    def _take_pages_back(self) -> None:
        """Allocate the pages that `release_kv` gave away."""
        num_pages = allocate_pages(self.runner, self.options, self.max_sequence_tokens, num_pages=self.pool.num_pages)
        self.pool.resize(num_pages)
        self._pages_released = False

    def _has_work_after(self, before_step: Callable[[], None] | None) -> bool:
        if before_step is not None:
            before_step()
        return self.has_work

    def _schedule(self) -> ScheduledStep:
        """Who decodes; run-aheads come and go."""
        wants_rows = self.scheduler.may_run_ahead
        scheduled = self.scheduler.schedule(self.speculation.max_run_ahead_rows() if wants_rows else 0)
        for sequence in scheduled.admitted_run_aheads:
            self.speculation.start(sequence.sequence_id, sequence.request)
        for sequence_id in self.scheduler.take_dropped():
            self.speculation.finish(sequence_id, None)
        return scheduled

    def _take_finished(self, walks: list[Walk]) -> list[Completion]:
        """Take out the finished samples."""
        completions = []
        for walk in walks:
            sequence = walk.sequence
            if walk.finish is None:
                self.scheduler.trim(sequence)
                continue
            completion = None
            if not sequence.is_run_ahead:
                completion = Completion(
                    request=sequence.request,
                    token_ids=sequence.generated_token_ids,
                    rollout_logprobs=sequence.rollout_logprobs,
                    finish_reason=walk.finish,
                    policy_version=self.policy_version,
                )
                completions.append(completion)
            self.speculation.finish(sequence.sequence_id, completion)
            self.scheduler.finish(sequence)
        return completions

    def _decode(self, scheduled: ScheduledStep, draft: Draft) -> tuple[list[Walk], float, float]:
        """Forward pass, sampling and walks.

        Returns:
            A walk for each decoding sequence; when its logits (or, on a CUDA device, its tokens) were there, by the
            clock; and the seconds until then in which the host did nothing but wait.
        """
        decodes, trees = scheduled.decodes, draft.verified
        forced = None if self.trace is None else ForcedTokens(by_rng_key=self.trace)
        logits = None
        if self._device is None:
            logits = self.runner.execute(scheduled, trees)
            computed = time.perf_counter()
        else:
            self._device.launch(scheduled, trees, forced)
            self._do_bookkeeping()
        for chunk in scheduled.prefills:
            chunk.holder.num_computed += chunk.count
        self.stats.max_pages = max(self.stats.max_pages, self.pool.num_used)  # before any page is given back
        if logits is not None:
            return verify_trees(decodes, trees, logits, self.tokenizer, forced), computed, 0.0
        assert self._device is not None
        tokens, logprobs = self._device.wait()
        computed = time.perf_counter()
        walks = follow_rows(decodes, trees, tokens, logprobs, self.tokenizer) if decodes else []
        return walks, computed, self._device.wait_seconds

    def _do_bookkeeping(self) -> None:
        if self._bookkeeping is not None:
            bookkeeping, self._bookkeeping = self._bookkeeping, None
            bookkeeping()

    def _count(
        self,
        scheduled: ScheduledStep,
        draft: Draft,
        walks: list[Walk],
        seconds: StepSeconds,
        finished: float,
        num_waiting: int,
        is_usual: bool,
    ) -> None:
        """Statistics, timeline and cost of a step that ended at `finished`; of an unusual one no cost is learned."""
        num_primaries = scheduled.num_primaries
        num_run_ahead = len(scheduled.decodes) - num_primaries
        num_prefill = scheduled.num_prefill_tokens
        num_rows = len(scheduled.decodes) + draft.verified.num_nodes
        num_tokens = self.stats.add_walks(walks, draft.verified, num_primaries)
        self.stats.num_prefill_tokens += num_prefill
        self.stats.add_seconds(seconds)
        cost = self.speculation.cost
        if cost.is_known:
            context = draft.context_tokens / max(len(scheduled.decodes), 1)
            if draft.was_asked and not scheduled.prefills:  # without drafts nothing is saved, and nothing spent
                rows = num_rows - num_run_ahead
                self.stats.saved_seconds += cost.saved_seconds(num_primaries, rows, num_tokens, context * rows)
                self.stats.saved_seconds -= draft.seconds
            if num_run_ahead:
                without, with_them = cost.seconds_at([num_rows - num_run_ahead, num_rows], context)
                self.stats.num_run_ahead_rows += num_run_ahead
                self.stats.run_ahead_seconds += float(with_them - without)
            if cost.is_fixed:
                self.stats.priced_seconds += cost.seconds(num_rows + num_prefill)
        if self._rollout_started is None:
            self._rollout_started = finished - seconds.total
        self._timeline.append(
            DecodeStep(
                seconds=finished - self._rollout_started,
                num_primaries=num_primaries,
                num_run_ahead=num_run_ahead,
                num_waiting=num_waiting,
                num_rows=num_rows,
                num_prefill=num_prefill,
                num_tokens=num_tokens,
            )
        )
        if is_usual:
            self.speculation.record(scheduled, draft, seconds.total)
