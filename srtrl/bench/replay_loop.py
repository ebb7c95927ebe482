"""Recorded rollouts through a drafter, step by step: what decoding them with that drafter would have been like.

Verification keeps the longest path of a draft tree that agrees with what is sampled, whatever is drafted, and here what
is sampled is known. So no model is needed to know how many tokens each decode step would have given.
"""

import heapq
import itertools
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Literal

import numba
import numpy as np
import numpy.typing as npt

from srtrl.drafters.base import DrafterBase
from srtrl.drafters.draft_tree import ROOT, DraftTrees, check_trees
from srtrl.rollout.recorded import RecordedPrompt, Recording, Tokens
from srtrl.types import Completion, Request, SamplingParams

Order = Literal["breadth", "depth"]
HistoryAs = Literal["complete", "run-ahead", "none"]

LOOK_AHEAD_PROMPTS = 1024
"""How many coming prompts a drafter is told of."""
MAX_VOCAB_SIZE = 1 << 31
"""Recordings do not say how many tokens there are."""
WARM_UP_SAMPLES = 4
WARM_UP_TOKENS = 64


@dataclass(kw_only=True, slots=True, frozen=True)
class ReplaySettings:
    """How recorded rollouts are replayed."""

    max_nodes: int
    """Most nodes of one draft tree."""
    min_score: float | None = None
    """Nodes of a lower score are not verified; None verifies all."""
    history: float = 0.0
    """Share of each prompt's samples, rounded down, that are earlier than the others and not decoded as samples."""
    history_as: HistoryAs = "complete"
    """`complete`: the drafter has seen them before the others start; `run-ahead`: as far as slots that the step before
    leaves idle can decode them, a token a step; `none`: it never sees them."""
    slots: int | None = None
    """Sequences decoded at once, of whatever prompts; None replays each prompt alone, its samples in lockstep."""
    order: Order = "breadth"
    """With `slots`: the first sample of every prompt before the second of any, or prompt by prompt."""


@dataclass(kw_only=True, slots=True)
class ReplayCounts:
    """What a replay counted. Counts of several replays add up."""

    num_prompts: int = 0
    num_samples: int = 0
    """Samples that were decoded."""
    num_history_samples: int = 0
    num_tokens: int = 0
    """Tokens that the decoded samples got from decode steps: all but the first token of each."""
    num_run_ahead_tokens: int = 0
    """Tokens of earlier samples that idle slots decoded."""
    num_observed_tokens: int = 0
    """Tokens that the drafter was shown, those of the history too."""
    num_sequence_steps: int = 0
    """Decode steps, each counted once for every sequence in it."""
    num_nodes: int = 0
    """Drafted tokens that were verified."""
    num_steps: int = 0
    """Decode steps of the whole batch."""
    num_steps_without_drafts: int = 0
    """The same with no drafter."""
    draft_seconds: float = 0.0
    """In `propose`."""
    insert_seconds: float = 0.0
    """In every other call of the drafter."""
    accepted: Counter[int] = field(default_factory=Counter)
    """Number of accepted tokens of a draft -> how many sequence-steps had it."""

    def add(self, other: "ReplayCounts") -> None:
        """Take in the counts of another replay."""
        for one in fields(self):
            setattr(self, one.name, getattr(self, one.name) + getattr(other, one.name))


@dataclass(slots=True)
class _LiveSample:
    """A recorded sample on its way through the decode steps."""

    request: Request
    tokens: Tokens
    slot: int = -1
    """While it decodes."""
    first: int = 0
    """Where its tokens begin in the array of all tokens of its queue."""
    num_committed: int = 0

    @property
    def is_done(self) -> bool:
        """Whether every recorded token is committed."""
        return self.num_committed == len(self.tokens)


class Replay:
    """One drafter, and what it did with the recordings that it was given."""

    def __init__(self, drafter: DrafterBase, settings: ReplaySettings) -> None:
        self.counts = ReplayCounts()
        self._drafter = drafter
        self._settings = settings
        self._numbers = itertools.count()
        self._free_slots: list[int] = []
        self._num_slots = 0

    def run(self, recording: Recording, on_sample: Callable[[], None] = lambda: None) -> None:
        """Replay one training step after another; the drafter keeps what it learned.

        Prompts of a step follow each other in the order of the file, for every drafter alike, since some (`suffix`)
        learn from other prompts too. With `slots` they share the slots. `on_sample` is called when a sample is done.
        """
        following = [*recording.steps[1:], []]
        for step, (prompts, next_step) in enumerate(zip(recording.steps, following, strict=True)):
            coming = itertools.islice(itertools.chain.from_iterable(recording.steps[step:]), LOOK_AHEAD_PROMPTS)
            next_prompts = [prompt.prompt_token_ids for prompt in coming]
            with self._clock("insert_seconds"):
                self._drafter.set_next_uses(next_prompts)
            self._replay_step(step, prompts, self._ahead(next_step), on_sample)
            with self._clock("insert_seconds"):
                self._drafter.on_policy_update()

    def _ahead(self, prompts: Sequence[RecordedPrompt]) -> list[_LiveSample]:
        """What idle slots may decode for the step of these prompts: one sample of each, then the second, ..."""
        if self._settings.history_as != "run-ahead":
            return []
        share = self._settings.history
        samples = [
            [self._sample_of(prompt, draw, index, is_run_ahead=True) for index in range(num_history)]
            for draw, prompt in enumerate(prompts)
            if (num_history := num_history_samples_of(len(prompt.samples), share))
        ]
        return admission_order(samples, "breadth")

    def _replay_step(
        self, step: int, prompts: Sequence[RecordedPrompt], ahead: Sequence[_LiveSample], on_sample: Callable[[], None]
    ) -> None:
        """Show the drafter the history of every prompt, then decode the other samples."""
        live = []
        num_history_samples = 0
        for draw, prompt in enumerate(prompts):
            num_history = num_history_samples_of(len(prompt.samples), self._settings.history)
            samples = [self._sample_of(prompt, draw, index) for index in range(len(prompt.samples))]
            live.append(samples[num_history:])
            if self._settings.history_as == "complete":
                self._show(samples[:num_history], step)
                num_history_samples += num_history
        if num_history_samples:
            with self._clock("insert_seconds"):
                self._drafter.on_policy_update()
        self.counts.num_prompts += len(prompts)
        self.counts.num_history_samples += num_history_samples
        self.counts.num_samples += sum(map(len, live))
        if self._settings.slots is None:
            for samples in live:
                self._decode(samples, len(samples), step, on_sample)
        else:
            queue = admission_order(live, self._settings.order)
            self._decode(queue, self._settings.slots, step, on_sample, ahead)

    def _decode(
        self,
        queue: Sequence[_LiveSample],
        num_slots: int,
        step: int,
        on_sample: Callable[[], None],
        ahead: Sequence[_LiveSample] = (),
    ) -> None:
        """Decode the samples of `queue`, `num_slots` at once; one that is done is replaced before the next step.

        Slots for which no sample is left decode those of `ahead`, until the last sample of `queue` is done.
        """
        lengths = [len(sample.tokens) - 1 for sample in queue]
        self.counts.num_steps_without_drafts += count_steps(lengths, num_slots)
        recorded = np.concatenate([np.empty(0, np.int32), *(sample.tokens for sample in queue)])
        for sample, first in zip(queue, np.cumsum([0, *(len(sample.tokens) for sample in queue)]), strict=False):
            sample.first = int(first)
        waiting = deque(queue)
        live: list[_LiveSample] = []
        line, running = deque(ahead), list[_LiveSample]()
        while waiting or live:
            while waiting and len(live) < num_slots:
                admitted = [waiting.popleft() for _ in range(min(num_slots - len(live), len(waiting)))]
                self._start(admitted)
                self._observe(
                    admitted, np.ones(len(admitted), np.int64)
                )  # given: it comes from the prompt's forward pass
                live = self._without_done([*live, *admitted], step, on_sample)
            if live:
                running = self._run_ahead(running, line, num_slots - len(live))
                self._decode_step(live, recorded)
                live = self._without_done(live, step, on_sample)
        self._finish(running, step)

    def _run_ahead(self, running: list[_LiveSample], line: deque[_LiveSample], num_free: int) -> list[_LiveSample]:
        """One token of each run-ahead, new ones having taken the slots that are free; returns the unfinished ones."""
        # Slots only become free: nobody waits when the first one is.
        admitted = [line.popleft() for _ in range(min(num_free - len(running), len(line)))]
        self._start(admitted)
        running = [*running, *admitted]
        self._observe(running, np.ones(len(running), np.int64))
        self.counts.num_run_ahead_tokens += len(running)
        self._finish([sample for sample in running if sample.is_done], 0)
        return [sample for sample in running if not sample.is_done]

    def _decode_step(self, live: Sequence[_LiveSample], recorded: Tokens) -> None:
        """All draft, all verify, all commit."""
        slots = np.array([sample.slot for sample in live])
        max_nodes = np.full(len(live), self._settings.max_nodes)
        self._drafter.min_score = self._settings.min_score or 0.0
        with self._clock("draft_seconds"):
            trees = self._drafter.propose(slots, max_nodes)
        who = f"the drafter {type(self._drafter).__module__}.{type(self._drafter).__qualname__}"
        check_trees(trees, max_nodes, MAX_VOCAB_SIZE, who)
        if self._settings.min_score is not None:
            trees = above(trees, self._settings.min_score)
        positions = np.array([sample.first + sample.num_committed for sample in live])
        ends = np.array([sample.first + len(sample.tokens) for sample in live])
        num_accepted = count_accepted(trees.token_ids, trees.parents, trees.offsets, recorded, positions, ends)
        num_emitted = np.minimum(num_accepted + 1, ends - positions)  # no bonus token after the last recorded one
        counts = self.counts
        counts.num_steps += 1
        counts.num_sequence_steps += len(live)
        counts.num_nodes += trees.num_nodes
        counts.num_tokens += int(num_emitted.sum())
        counts.accepted.update(num_accepted.tolist())
        self._observe(live, num_emitted)

    # --- The drafter's calls ---

    def _sample_of(self, prompt: RecordedPrompt, draw: int, index: int, *, is_run_ahead: bool = False) -> _LiveSample:
        request = Request(
            prompt_id=prompt.prompt_id,
            prompt_token_ids=prompt.prompt_token_ids,
            draw_index=draw,
            sample_index=index,
            rng_key=next(self._numbers),
            sampling=SamplingParams(max_new_tokens=max(len(sample) for sample in prompt.samples)),
            purpose="train",
            is_run_ahead=is_run_ahead,
        )
        return _LiveSample(request=request, tokens=prompt.samples[index])

    def _show(self, samples: Sequence[_LiveSample], step: int) -> None:
        """Let the drafter see samples of a prompt from beginning to end."""
        self._start(samples)
        self._observe(samples, np.array([len(sample.tokens) for sample in samples], np.int64))
        self._finish(samples, step)

    def _start(self, samples: Sequence[_LiveSample]) -> None:
        if not samples:
            return
        for sample in samples:
            if not self._free_slots:
                self._free_slots.append(self._num_slots)
                self._num_slots += 1
            sample.slot = heapq.heappop(self._free_slots)
        with self._clock("insert_seconds"):
            self._drafter.start(np.array([sample.slot for sample in samples]), [sample.request for sample in samples])

    def _observe(self, samples: Sequence[_LiveSample], num_tokens: npt.NDArray[np.int64]) -> None:
        """Commit the next tokens of each sample."""
        if not samples:
            return
        slots = np.array([sample.slot for sample in samples])
        tokens = []
        for sample, count in zip(samples, num_tokens.tolist(), strict=True):
            tokens.append(sample.tokens[sample.num_committed : sample.num_committed + count])
            sample.num_committed += count
        token_ids = np.concatenate(tokens)
        offsets = np.concatenate([[0], num_tokens.cumsum()])
        with self._clock("insert_seconds"):
            self._drafter.observe(slots, token_ids, offsets)
        self.counts.num_observed_tokens += len(token_ids)

    def _finish(self, samples: Sequence[_LiveSample], step: int) -> None:
        if not samples:
            return
        completions = [None if sample.request.is_run_ahead else self._completion_of(sample, step) for sample in samples]
        with self._clock("insert_seconds"):
            self._drafter.finish([sample.slot for sample in samples], completions)
        for sample in samples:
            heapq.heappush(self._free_slots, sample.slot)

    @staticmethod
    def _completion_of(sample: _LiveSample, step: int) -> Completion:
        return Completion(
            request=sample.request,
            token_ids=sample.tokens.tolist(),
            rollout_logprobs=[0.0] * len(sample.tokens),  # not recorded, and of no use to a drafter
            finish_reason="stop",
            policy_version=step,
        )

    def _without_done(self, live: list[_LiveSample], step: int, on_sample: Callable[[], None]) -> list[_LiveSample]:
        """Finish the samples that are done; returns the others."""
        done = [sample for sample in live if sample.is_done]
        self._finish(done, step)
        for _ in done:
            on_sample()
        return [sample for sample in live if not sample.is_done]

    @contextmanager
    def _clock(self, name: Literal["draft_seconds", "insert_seconds"]) -> Iterator[None]:
        """Add the seconds of the block to a count."""
        begin = time.perf_counter()
        yield
        setattr(self.counts, name, getattr(self.counts, name) + time.perf_counter() - begin)


def warm_up(drafter: DrafterBase, settings: ReplaySettings, recording: Recording) -> None:
    """Replay the beginning of a recording with a drafter of its own, so that no compilation is timed afterwards."""
    prompt = next(itertools.chain.from_iterable(recording.steps))
    samples = [sample[:WARM_UP_TOKENS] for sample in prompt.samples[:WARM_UP_SAMPLES]]
    beginning = replace(recording, steps=[[replace(prompt, samples=samples)]])
    drafter.warm_up()
    Replay(drafter, settings).run(beginning)


def num_history_samples_of(num_samples: int, share: float) -> int:
    """How many of a prompt's samples are history: `share` of them, rounded down (and 0.29 of 100 is 29)."""
    return int(share * num_samples + 1e-9)


def admission_order(prompts: Sequence[Sequence[_LiveSample]], order: Order) -> list[_LiveSample]:
    """All samples in the order in which they get a slot; see `ReplaySettings.order`."""
    samples = [sample for prompt in prompts for sample in prompt]
    if order == "breadth":
        ranks = [rank for prompt in prompts for rank in range(len(prompt))]
        samples = [samples[index] for index in np.argsort(ranks, kind="stable")]
    return samples


def count_steps(lengths: Sequence[int], num_slots: int) -> int:
    """Decode steps until all sequences are done, in order of admission, each taking as many steps as its length."""
    slots = [0] * num_slots
    for length in lengths:
        heapq.heapreplace(slots, slots[0] + length)
    return max(slots, default=0)


def above(trees: DraftTrees, min_score: float) -> DraftTrees:
    """Return the trees without their nodes below `min_score`: scores fall, so that each tree keeps its first nodes."""
    is_below = np.concatenate([[0], np.cumsum(trees.scores < min_score)])
    num_below = is_below[1:] - np.repeat(is_below[trees.offsets[:-1]], trees.sizes)
    keep = num_below == 0
    num_kept = np.concatenate([[0], np.cumsum(keep)])
    return DraftTrees(
        token_ids=trees.token_ids[keep],
        parents=trees.parents[keep],
        scores=trees.scores[keep],
        offsets=num_kept[trees.offsets],
    )


@numba.njit(cache=True, nogil=True)
def count_accepted(
    token_ids: Tokens,
    parents: Tokens,
    offsets: npt.NDArray[np.int64],
    recorded: Tokens,
    positions: npt.NDArray[np.int64],
    ends: npt.NDArray[np.int64],
) -> npt.NDArray[np.int64]:
    """Length of each tree's path that agrees with the recorded tokens.

    A parent comes before its children, so one pass over the nodes finds the whole path.

    Args:
        token_ids: [total nodes], as in `DraftTrees`, and so are `parents` and `offsets`.
        parents: [total nodes].
        offsets: [B + 1].
        recorded: Recorded tokens of all sequences.
        positions: [B], where in `recorded` each sequence's next token is.
        ends: [B], where its tokens end.
    """
    num_accepted = np.zeros(len(positions), np.int64)
    for i in range(len(positions)):
        last = ROOT
        position = positions[i]
        for node in range(offsets[i], offsets[i + 1]):
            if position == ends[i]:
                break
            if parents[node] == last and token_ids[node] == recorded[position]:
                last = node - offsets[i]
                position += 1
        num_accepted[i] = position - positions[i]
    return num_accepted
