"""Groups of graded rollouts from the engine: a completion goes to the graders while the others still decode.

What comes back depends on the policy, the seed and the data order alone: groups are in data order and samples sorted,
never in the order in which they finished.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from itertools import chain, groupby
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from srtrl.engine.sampling import make_rng_key
from srtrl.engine.stats import merge_rank_metrics
from srtrl.engine.stopping import cut_at_stop_string
from srtrl.environments.conversations import POLL_SECONDS, Conversations
from srtrl.ranks.processes import Ranks
from srtrl.ranks.sharing import Claims, SharedCounters, deal
from srtrl.types import (
    Completion,
    Conversation,
    Grade,
    Prompt,
    Purpose,
    Request,
    Rollout,
    RolloutGroup,
    SamplingParams,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from srtrl.engine.engine import Engine
    from srtrl.tasks.grading import Grader, GradeTicket


class StageTimer:
    """Adds up wall-clock seconds by stage name (`time/<name>`); stages may repeat. A stage inside another pauses it.

    So no second is counted twice, and the sum is the step's time.
    """

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._inside = 0.0
        """Seconds of the stages inside the one that is open."""

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count the seconds inside the `with` block as `name`; also where the block raises."""
        start, outside, self._inside = time.perf_counter(), self._inside, 0.0
        try:
            yield
        finally:
            seconds = time.perf_counter() - start
            self._seconds[name] += seconds - self._inside
            self._inside = outside + seconds

    def take(self) -> dict[str, float]:
        """Seconds by stage since the last call, no stage being open; starts again from nothing."""
        seconds, self._seconds = dict(self._seconds), defaultdict(float)
        return seconds


OnProgress = Callable[[int, int], None]
"""Called after each completion with the number of completions so far and of those that are requested; with dynamic
sampling the latter may grow."""


def collect_rollouts(
    engine: Engine,
    collector: Collector,
    draws: Sequence[tuple[int, Prompt]],
    *,
    run_ahead: Sequence[Request] = (),
) -> list[RolloutGroup]:
    """Decode and grade all samples of every draw.

    Args:
        engine: Decodes; its policy is not changed.
        collector: Makes the requests and takes the completions; no draw of it is open.
        draws: `(draw_index, prompt)`, draw indices distinct; the same prompt may be drawn twice. In training a draw's
            index is its place in the data order of the run.
        run_ahead: What idle slots may decode meanwhile (see `Collector.run_ahead`); none of it comes back.

    Returns:
        One group a draw, sorted by draw index; rollouts sorted by sample index.

    Raises:
        ValueError: A request that the engine can never serve (see `Engine.check_request`), before anything is decoded.
    """
    assert len({draw_index for draw_index, _ in draws}) == len(draws), "draw indices must be distinct"
    ordered = sorted(draws, key=lambda draw: draw[0])
    requests = [request for draw_index, prompt in ordered for request in collector.open(draw_index, prompt)]
    assert all(request.is_run_ahead for request in run_ahead), "a request to learn from among the run-aheads"
    rng_keys = {request.rng_key for request in requests}
    assert rng_keys.isdisjoint(one.rng_key for one in run_ahead), "a run-ahead has the rng_key of a sample of this step"
    draw_indices = [draw_index for draw_index, _ in ordered]
    if collector.ranks.count > 1:
        return _collect_on_ranks(engine, collector, requests, draw_indices, run_ahead)
    with collector.timer.stage("rollout"):
        advance = partial(collector.advance, engine)
        for completion in engine.generate(requests, run_ahead=run_ahead, before_step=advance):
            collector.receive(completion)
    with collector.timer.stage("grading"):
        return collector.take(draw_indices)


def _collect_on_ranks(
    engine: Engine,
    collector: Collector,
    requests: Sequence[Request],
    draw_indices: Sequence[int],
    run_ahead: Sequence[Request],
) -> list[RolloutGroup]:
    """The same on several ranks: each decodes what it is dealt and what it claims, then all tell all (see sharing.py).

    Draws and requests are the same on all ranks, and so are the groups that come back.
    """
    ranks, counters = collector.ranks, collector.counters
    with ranks.together("the requests"):
        for request in requests:
            engine.check_request(request)
    first_samples = requests[:: collector.num_samples]
    expected = {one.draw_index: engine.drafter.expected_tokens(one) for one in first_samples} if ranks.is_main else {}
    found = ranks.gather((expected, engine.options.slots), "the beginning of a rollout")
    lines = deal(requests, found[0][0], ranks.count)  # not by what each rank expects: they must agree
    claims = Claims(counters, [line[num_slots:] for line, (_, num_slots) in zip(lines, found, strict=True)])
    first = lines[ranks.index][: engine.options.slots]

    def advance() -> bool:
        """Fill free slots; where no sample is left for any rank, run ahead until the others are done.

        Without run-aheads this rank's rollout ends, and it waits in a collective, which notices a rank that has died.
        """
        counters.lap(is_busy=False)
        collector.take_turns(engine)
        for request in claims.take(engine.scheduler.num_free_slots):
            engine.add(request)
        collector.advance(engine)
        counters.lap(is_busy=engine.has_work)
        if engine.has_work or not engine.scheduler.run_aheads.has_work:
            return False
        is_over = counters.read("finished") == len(requests) or counters.has_failed
        return not is_over and counters.wait("samples", may_run_ahead=True)

    with collector.timer.stage("rollout"), counters.together():
        own = of_rank(run_ahead, ranks)
        for completion in engine.generate(first, run_ahead=own, before_step=advance, purpose=collector.purpose):
            collector.receive(completion)
    collector.num_claimed = claims.num_claimed
    with collector.timer.stage("grading"):
        return collector.exchange(engine, collector.take_rollouts(draw_indices))


def run_ahead_order(requests: Iterable[Request]) -> list[Request]:
    """Samples of later draws as run-aheads, one of every prompt before the second of any."""
    ordered = sorted(requests, key=lambda request: (request.sample_index, request.draw_index))
    return [replace(request, is_run_ahead=True, has_turns=False) for request in ordered]


def of_rank(run_ahead: Sequence[Request], ranks: Ranks) -> Iterator[Request]:
    """Run-aheads in the order in which this rank takes them: each begins with others."""
    for shift in range(ranks.count):
        yield from run_ahead[(ranks.index + shift) % ranks.count :: ranks.count]


@dataclass(slots=True)
class Collector:
    """Samples between request and grade: of the draws that were opened and not yet taken."""

    grader: Grader
    """Grades beside the decoder; `batched` rewards see all samples that are taken at once."""
    tokenizer: PreTrainedTokenizerBase
    """Turns response tokens into the text that is graded."""
    _: KW_ONLY
    num_samples: int
    """Samples of each draw."""
    sampling: SamplingParams
    """How each sample is decoded."""
    seed: int
    """The run's seed; with `purpose`, draw and sample index it makes each sample's RNG key."""
    purpose: Purpose
    """`train` or `eval`: they never share noise."""
    conversations: Conversations | None = None
    """The environments of samples with several turns."""
    on_progress: OnProgress = lambda *_: None
    timer: StageTimer = field(default_factory=StageTimer)
    """Counts decoding as `rollout` and waiting for graders while nothing decodes as `grading`."""
    ranks: Ranks = field(default_factory=Ranks)
    """All make the same collectors in the same order."""
    counters: SharedCounters = field(init=False)
    """Of this rollout; `finished` counts samples."""
    num_claimed: int = field(default=0, init=False)
    """Samples that were taken from other ranks."""
    num_total: int = field(default=0, init=False)
    """Samples that are requested, as far as this rank knows."""
    _draws: dict[int, _OpenDraw] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.counters = SharedCounters(self.ranks)

    def requests(self, draws: Sequence[tuple[int, Prompt]]) -> list[Request]:
        """One request a sample, sorted by (draw, sample); see `sample_requests`."""
        requests = sample_requests(
            draws, num_samples=self.num_samples, sampling=self.sampling, seed=self.seed, purpose=self.purpose
        )
        return requests if self.conversations is None else [replace(one, has_turns=True) for one in requests]

    def run_ahead(self, draws: Sequence[tuple[int, Prompt]]) -> list[Request]:
        """What idle slots decode: the samples of later draws, early. None of it is ever learned from.

        A run-ahead is decoded by the present policy on the very RNG key that its sample will have. The next step's
        policy is nearly the same and its noise is the same, so that the sample repeats a good part of the run-ahead
        word for word: a draft of many tokens. The sample itself is decoded by the policy of its own step, and what is
        drafted never changes what is sampled, so it stays exact and on-policy.

        The order, in which they take idle slots, is breadth-first, as that of the samples: one of every prompt, then
        the second of every prompt.
        """
        return run_ahead_order(self.requests(draws))

    def open(self, draw_index: int, prompt: Prompt) -> list[Request]:
        """The samples of one more draw, which the engine shall decode."""
        assert draw_index not in self._draws, f"draw {draw_index} is opened twice"
        self._draws[draw_index] = _OpenDraw(prompt)
        self.num_total += self.num_samples
        return self.requests([(draw_index, prompt)])

    def receive(self, completion: Completion) -> None:
        """A completion of an open draw goes to the graders; a turn to its environment."""
        assert not completion.request.is_run_ahead, "a run-ahead must never be learned from"
        draw_index = completion.request.draw_index
        if self.conversations is None:
            text = response_text(self.tokenizer, completion.token_ids, self.sampling.stop_strings)
            self._grade(completion, text, None)
        else:
            self.conversations.submit_turn(completion, self._draws[draw_index].prompt)

    def advance(self, engine: Engine) -> None:
        """Go on with the samples that their environments have answered; wait for one while nothing decodes.

        Both are counted as `tools`.
        """
        if self.conversations is not None:
            with self.timer.stage("tools"):
                self._grade_ended(finish_turns(engine, self.conversations, lambda: self._wait([])))

    def take_turns(self, engine: Engine) -> None:
        """Go on with the samples that their environments have answered."""
        if self.conversations is not None:
            with self.timer.stage("tools"):
                self._grade_ended(take_ended(engine, self.conversations))

    def _grade_ended(self, ended: Iterable[tuple[Completion, Conversation]]) -> None:
        for completion, conversation in ended:
            self._grade(completion, response_text(self.tokenizer, completion.token_ids, ()), conversation)

    def _grade(self, completion: Completion, text: str, conversation: Conversation | None) -> None:
        """A sample has ended; what the policy said of its `text` is graded."""
        draw_index, sample_index = completion.request.draw_index, completion.request.sample_index
        draw = self._draws[draw_index]
        assert sample_index not in draw.samples, f"the engine finished draw {draw_index}, sample {sample_index} twice"
        num_tokens = len(completion.token_ids)
        if conversation is not None:
            num_tokens = sum(length for kind, length in conversation.segments if kind == "model")
        ticket = self.grader.submit(
            draw.prompt,
            conversation.said if conversation else text,
            completion.finish_reason,
            num_tokens,
            environment_reward=conversation.reward if conversation else 0.0,
            num_turns=conversation.num_turns if conversation else 1,
        )
        rollout = partial(
            Rollout,
            prompt=draw.prompt,
            draw_index=draw_index,
            sample_index=sample_index,
            token_ids=np.array(completion.token_ids, np.int32),
            rollout_logprobs=np.array(completion.rollout_logprobs, np.float32),
            text=text,
            finish_reason=completion.finish_reason,
            policy_version=completion.policy_version,
            conversation=conversation,
        )
        draw.samples[sample_index] = _Sample(ticket, rollout)
        num_done = self.counters.add("finished") + 1
        self.on_progress(num_done, max(num_done, self.num_total))

    def is_graded(self, draw_index: int) -> bool:
        """Whether all samples of an open draw are decoded and graded: `take` would not wait."""
        samples = self._draws[draw_index].samples
        return len(samples) == self.num_samples and all(self.grader.is_done(one.ticket) for one in samples.values())

    def wait_any(self, draw_indices: Sequence[int]) -> None:
        """Wait until one of these draws is graded, or an environment has answered; nothing decodes meanwhile."""
        with self.timer.stage("tools" if self.conversations and self.conversations.num_pending else "grading"):
            while not any(self.is_graded(draw_index) for draw_index in draw_indices) and not self._wait(draw_indices):
                pass

    def _wait(self, draw_indices: Sequence[int]) -> bool:
        """Wait until a sample of these draws is graded, or an environment answers or is late; whether one may have."""
        tickets = [one.ticket for draw_index in draw_indices for one in self._draws[draw_index].samples.values()]
        if self.conversations is None or not self.conversations.num_pending:
            self.grader.wait_any(tickets)
            return False
        self.grader.wait_any(tickets, self.conversations.futures(), POLL_SECONDS)
        return True

    def take(self, draw_indices: Sequence[int]) -> list[RolloutGroup]:
        """The groups of decoded draws, in the given order; waits for their grades, and forgets them."""
        return self._group(self._take(draw_indices, lambda tickets, _: self.grader.collect(tickets)))

    def take_rollouts(self, draw_indices: Sequence[int]) -> list[Rollout]:
        """What this rank has of the draws that all ranks have decoded; called on all of them. Else as `take`."""
        return self._take(draw_indices, partial(self.grader.collect_on_ranks, ranks=self.ranks))

    def _take(
        self,
        draw_indices: Sequence[int],
        collect: Callable[[list[GradeTicket], list[tuple[int, int]]], list[Grade]],
    ) -> list[Rollout]:
        draws = [(draw_index, self._draws.pop(draw_index).samples) for draw_index in draw_indices]
        samples = {(draw_index, index): one for draw_index, draw in draws for index, one in sorted(draw.items())}
        grades = collect([sample.ticket for sample in samples.values()], list(samples))
        return [sample.rollout(grade=grade) for sample, grade in zip(samples.values(), grades, strict=True)]

    def _group(self, rollouts: Sequence[Rollout]) -> list[RolloutGroup]:
        """The groups of rollouts that are sorted by draw and sample; none is missing."""
        groups = [list(samples) for _, samples in groupby(rollouts, key=lambda one: one.draw_index)]
        for group in groups:
            found = [rollout.sample_index for rollout in group]
            assert found == list(range(self.num_samples)), f"draw {group[0].draw_index} has the samples {found}"
        return [RolloutGroup(prompt=one[0].prompt, draw_index=one[0].draw_index, rollouts=one) for one in groups]

    def exchange(self, engine: Engine, rollouts: Sequence[Rollout]) -> list[RolloutGroup]:
        """What all ranks have decoded, in data order; this rank's drafter learns what it did not decode itself."""
        own = [*rollouts], engine.drafter.run_ahead_texts()
        all_ranks = self.ranks.gather(own, "the rollouts of all ranks")
        found = [theirs for rank, theirs in enumerate(all_ranks) if rank != self.ranks.index]
        others = sorted(chain.from_iterable(theirs for theirs, _ in found), key=place)
        prompts = {rollout.draw_index: rollout.prompt for rollout in others}
        requests = {(one.draw_index, one.sample_index): one for one in self.requests(list(prompts.items()))}
        engine.drafter.learn([completion_of(rollout, requests[place(rollout)]) for rollout in others])
        for _, texts in found:
            engine.drafter.learn_run_aheads(texts)
        return self._group(sorted([*rollouts, *others], key=place))

    def engine_metrics(self, engine: Engine) -> dict[str, float]:
        """What the engines of all ranks did in this rollout; see `merge_rank_metrics`."""
        metrics = engine.take_metrics()
        if self.ranks.count == 1:
            return metrics
        metrics |= {"engine/rank_claims": self.num_claimed, "engine/rank_seconds": self.counters.busy_seconds}
        return merge_rank_metrics(self.ranks.gather(metrics, "the engine's metrics"))


class _Sample(NamedTuple):
    """A finished sample whose grade is still to come."""

    ticket: GradeTicket
    rollout: partial[Rollout]
    """Everything but its `grade`."""


@dataclass(slots=True, frozen=True)
class _OpenDraw:
    prompt: Prompt
    samples: dict[int, _Sample] = field(default_factory=dict)
    """The finished ones, by sample index."""


def take_ended(engine: Engine, conversations: Conversations) -> Iterator[tuple[Completion, Conversation]]:
    """Let the samples go on whose answers have come since the last call; yields those that end with them.

    Their finish reason is `length` where an observation did not fit.
    """
    for answer in conversations.take_answers():
        completion, conversation = answer.completion, answer.conversation
        if conversation is None:
            engine.extend(completion, answer.extension)
            continue
        engine.end(completion)
        is_full = conversation.stop_reason == "observation"
        yield replace(completion, finish_reason="length") if is_full else completion, conversation


def finish_turns(
    engine: Engine, conversations: Conversations, wait: Callable[[], object]
) -> Iterator[tuple[Completion, Conversation]]:
    """As `take_ended`, but while nothing decodes it calls `wait`, until an answer brings work or none is due."""
    yield from take_ended(engine, conversations)
    while conversations.num_pending and not engine.has_work:
        wait()
        yield from take_ended(engine, conversations)


def sample_requests(
    draws: Sequence[tuple[int, Prompt]],
    *,
    num_samples: int,
    sampling: SamplingParams,
    seed: int,
    purpose: Purpose,
) -> list[Request]:
    """One request a sample, sorted by (draw, sample); the engine chooses its own admission order."""
    return [
        Request(
            prompt_id=prompt.prompt_id,
            prompt_token_ids=prompt.token_ids,
            draw_index=draw_index,
            sample_index=sample_index,
            rng_key=make_rng_key(seed, purpose, draw_index, sample_index),
            sampling=sampling,
            purpose=purpose,
        )
        for draw_index, prompt in sorted(draws, key=lambda draw: draw[0])
        for sample_index in range(num_samples)
    ]


def response_text(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], stop_strings: Sequence[str]) -> str:
    """The response as text: without special tokens, cut before the first stop string."""
    text = tokenizer.decode(list(token_ids), skip_special_tokens=True)
    assert isinstance(text, str)
    return cut_at_stop_string(text, stop_strings)


def place(rollout: Rollout) -> tuple[int, int]:
    """Where a rollout is in data order."""
    return rollout.draw_index, rollout.sample_index


def completion_of(rollout: Rollout, request: Request) -> Completion:
    """What the engine gave, where a rollout comes from another rank."""
    extensions: list[tuple[int, int]] = []
    start = 0
    for is_sampled, parts in groupby(rollout.segments, key=lambda segment: segment.kind == "model"):
        stop = start + sum(len(part.token_ids) for part in parts)
        if not is_sampled:
            extensions.append((start, stop))
        start = stop
    return Completion(
        request=request,
        token_ids=rollout.token_ids.tolist(),
        rollout_logprobs=rollout.rollout_logprobs.tolist(),
        finish_reason=rollout.finish_reason,
        policy_version=rollout.policy_version,
        extensions=tuple(extensions),
    )
