"""Recorded rollouts through a drafter, step by step: what decoding them with that drafter would have been like.

Verification keeps the longest path of a draft tree that agrees with the sampled tokens, for any draft, and here the
sampled tokens are known. So no model is needed to know how many tokens each decode step would have given.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np

from srtrl.bench.recorded import (
    RecordedPrompt,
    RecordedSample,
    Recording,
    feed_drafter,
    recorded_completion,
    with_progress,
)
from srtrl.drafters.base import DrafterBase, resolve_drafter
from srtrl.drafters.draft_tree import ROOT, DraftTree, check_trees
from srtrl.recipe.file import RecipeError, RecipeSource, validate_section
from srtrl.types import Request

MAX_VOCAB_SIZE = 1 << 31
"""Recordings do not contain the size of the vocabulary."""


@dataclass(kw_only=True)
class ReplayCounts:
    """The counts of a replay."""

    num_samples: int = 0
    """Samples that were decoded; the history's are not among them."""
    num_cut: int = 0
    """Samples of the recording that were truncated."""
    num_tokens: int = 0
    """Tokens that decode steps gave: those that were sampled, but the first of each sample."""
    num_observed_tokens: int = 0
    """Tokens that the drafter was shown, those of the history too."""
    num_sequence_steps: int = 0
    """Decode steps, each counted once for every sequence in it."""
    num_nodes: int = 0
    """Drafted tokens that were verified."""
    steps: int = 0
    """Decode steps of the whole batch."""
    steps_without_drafts: int = 0
    """The same with no drafter."""
    draft_seconds: float = 0.0
    """In `propose`."""
    insert_seconds: float = 0.0
    """In every other call of the drafter."""

    def to_row(self) -> dict[str, Any]:
        """The counts and their averages, as `srtrl replay --json` prints them.

        `tokens_per_step` is the number of tokens that a sequence gets from a decode step (1 without drafts),
        `verified_per_step` the number that it brings into one: its draft's nodes, and one. `draft_us` are microseconds
        of drafting for one sequence and step; `insert_us_per_token` those of all the drafter's other work, for one
        token that it was shown. `speedup` is how much faster the decode steps until all samples were done are, if a
        step takes no longer for the tokens that it verifies.
        """
        return vars(self) | {
            "tokens_per_step": self.num_tokens / self.num_sequence_steps,
            "verified_per_step": 1 + self.num_nodes / self.num_sequence_steps,
            "draft_us": 1e6 * self.draft_seconds / self.num_sequence_steps,
            "insert_us_per_token": 1e6 * self.insert_seconds / self.num_observed_tokens,
            "speedup": self.steps_without_drafts / self.steps,
        }


@dataclass(slots=True)
class LiveSample:
    """A recorded sample on its way through the decode steps."""

    request: Request
    sample: RecordedSample
    """Its extensions are read between two turns: neither drafted nor decoded."""
    slot: int
    num_committed: int = 0
    turn: int = 0
    """Number of the current turn, from 0."""

    @property
    def turn_end(self) -> int:
        """The end of the current turn."""
        starts = [start for start, _ in self.sample.extensions[self.turn :]]
        return starts[0] if starts else len(self.sample.tokens)

    @property
    def num_decoded(self) -> int:
        """Tokens of all turns that decode steps give; the first of the sample is given."""
        return len(self.sample.tokens) - sum(stop - start for start, stop in self.sample.extensions) - 1


class Replay:
    """One drafter, and the counts of the recordings that it was given."""

    def __init__(
        self, drafter: DrafterBase, *, draft_budget: int = 16, history: float = 0.0, noise: bool = True
    ) -> None:
        """An empty replay.

        Args:
            drafter: It may have learned before.
            draft_budget: Maximum nodes of one draft tree.
            history: Share of each prompt's samples, rounded down, that the drafter learns before the others start.
            noise: Whether drafts use the noise of the samples, where it is known.
        """
        self.counts = ReplayCounts()
        self._drafter = drafter
        self._draft_budget = draft_budget
        self._history = history
        self._noise = noise

    def run(self, recording: Recording) -> ReplayCounts:
        """Replay one training step after another; the drafter keeps what it learned.

        Prompts of a step follow each other in the order of the file; the samples of a prompt decode in lockstep.
        """
        samples = [sample for prompt in chain.from_iterable(recording) for sample in prompt.samples]
        self.counts.num_cut = sum(sample.is_cut for sample in samples)
        self._drafter.knows_noise = self._noise and all(sample.rng_key is not None for sample in samples)
        draws = enumerate(with_progress([*chain.from_iterable(recording)], "prompts replayed"))
        for prompts in recording:
            pairs = [prompt.split(self._history) for prompt in prompts]
            history = [known for known, _ in pairs]
            if any(known.samples for known in history):
                with self._clock("insert_seconds"):
                    feed_drafter(self._drafter, history)
                self.counts.num_observed_tokens += sum(len(one.tokens) for known in history for one in known.samples)
            for known, others in pairs:
                draw, _ = next(draws)
                self._decode(others, draw, len(known.samples))
            with self._clock("insert_seconds"):
                self._drafter.end_step()
        return self.counts

    def _decode(self, prompt: RecordedPrompt, draw_index: int, first_index: int) -> None:
        """Decode the samples of a prompt side by side; they are counted from `first_index` on."""
        if not prompt.samples:
            return
        longest = max(len(sample.tokens) for sample in prompt.samples)
        samples = []
        for slot, sample in enumerate(prompt.samples):
            request = prompt.request(draw_index, first_index + slot, longest)
            if sample.rng_key is not None:
                request = replace(request, rng_key=sample.rng_key)
            samples.append(LiveSample(request, sample, slot))
        self.counts.num_samples += len(samples)
        self.counts.steps_without_drafts += max(sample.num_decoded for sample in samples)
        self._begin_turns(samples, [1] * len(samples))  # given: it comes from the prompt's forward pass
        live = self._finish_done(samples)
        while live:
            self._decode_step(live)
            live = self._finish_done(live)

    def _decode_step(self, live: Sequence[LiveSample]) -> None:
        """All draft, all verify, all commit."""
        slots = np.array([one.slot for one in live])
        max_nodes = np.full(len(live), self._draft_budget)
        with self._clock("draft_seconds"):
            trees = self._drafter.propose(slots, max_nodes, 0.0)
        check_trees(trees, max_nodes, MAX_VOCAB_SIZE, str(self._drafter))
        num_emitted = []
        for tree, one in zip(trees, live, strict=True):
            following = one.sample.tokens[one.num_committed : one.turn_end][: self._draft_budget + 1].tolist()
            # No bonus token after the end of a turn.
            num_emitted.append(min(count_accepted(tree, following) + 1, len(following)))
        counts = self.counts
        counts.steps += 1
        counts.num_sequence_steps += len(live)
        counts.num_nodes += trees.num_nodes
        counts.num_tokens += sum(num_emitted)
        self._observe(live, num_emitted)

    # --- The drafter's calls ---

    def _begin_turns(self, samples: Sequence[LiveSample], num_tokens: Sequence[int]) -> None:
        """Each turn is a text of its own for the drafter; it begins with these numbers of tokens."""
        with self._clock("insert_seconds"):
            self._drafter.start(np.array([one.slot for one in samples]), [one.request for one in samples])
        self._observe(samples, num_tokens)

    def _observe(self, samples: Sequence[LiveSample], num_tokens: Sequence[int]) -> None:
        """Commit the next tokens of each sample; at the end of a turn the next one begins with the text before it."""
        tokens = []
        for one, count in zip(samples, num_tokens, strict=True):
            tokens.append(one.sample.tokens[one.num_committed : one.num_committed + count])
            one.num_committed += count
        offsets = np.cumsum([0, *num_tokens])
        with self._clock("insert_seconds"):
            self._drafter.observe(np.array([one.slot for one in samples]), np.concatenate(tokens), offsets)
        self.counts.num_observed_tokens += sum(num_tokens)
        ended = [one for one in samples if one.num_committed == one.turn_end and one.turn < len(one.sample.extensions)]
        if ended:
            with self._clock("insert_seconds"):
                self._drafter.finish([one.slot for one in ended], [None] * len(ended))
            parts = [one.sample.extensions[one.turn] for one in ended]
            for one, (_, stop) in zip(ended, parts, strict=True):
                one.turn += 1
                prefix = recorded_completion(one.request, one.sample).response.cut(stop)
                one.request = replace(one.request, prefix=prefix)
            self._begin_turns(ended, [stop - start for start, stop in parts])

    def _finish_done(self, samples: Sequence[LiveSample]) -> list[LiveSample]:
        """Finish the samples that are done; returns the others."""
        done = [one for one in samples if one.num_committed == len(one.sample.tokens)]
        if done:
            completions = [recorded_completion(one.request, one.sample) for one in done]
            with self._clock("insert_seconds"):
                self._drafter.finish(
                    [one.slot for one in done], [None if c.response.extensions else c for c in completions]
                )
                if turns := [one for one in completions if one.response.extensions]:  # as `Engine.end`
                    self._drafter.learn(turns)
        return [one for one in samples if one.num_committed < len(one.sample.tokens)]

    @contextmanager
    def _clock(self, name: Literal["draft_seconds", "insert_seconds"]) -> Iterator[None]:
        """Add the seconds of the block to a count."""
        begin = time.perf_counter()
        yield
        setattr(self.counts, name, getattr(self.counts, name) + time.perf_counter() - begin)


def build_drafter(name: str, overrides: Sequence[str]) -> DrafterBase:
    """The drafter `name`, with these options.

    Raises:
        ValueError: There is no such drafter, or an option of it is incorrect.
    """
    drafter_class = resolve_drafter("--drafter", name)
    source = RecipeSource(Path("--drafter-options"))
    try:
        source.override(overrides)
        options = validate_section(drafter_class.Options, source.data)
    except RecipeError as error:
        raise ValueError(f"--drafter-options: {error}") from error
    return drafter_class(options)


def count_accepted(tree: DraftTree, following: Sequence[int]) -> int:
    """Length of the tree's path that agrees with the tokens that follow.

    A parent comes before its children, so one pass over the nodes finds the whole path.
    """
    last, depth = ROOT, 0
    for node, (token, parent) in enumerate(zip(tree.token_ids.tolist(), tree.parents.tolist(), strict=True)):
        if depth < len(following) and parent == last and token == following[depth]:
            last, depth = node, depth + 1
    return depth
