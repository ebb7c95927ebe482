"""Recorded rollouts through a drafter, step by step: what decoding them with that drafter would have been like.

Verification keeps the longest path of a draft tree that agrees with the sampled tokens, for any draft, and here the
sampled tokens are known. So no model is needed to know how many tokens each decode step would have given.
"""

import itertools
import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numba
import numpy as np
import numpy.typing as npt

from srtrl.bench.measure import format_table
from srtrl.bench.recorded import (
    Extensions,
    RecordedPrompt,
    Recording,
    Tokens,
    feed_drafter,
    make_request,
    read_recorded,
    recorded_completion,
)
from srtrl.drafters.base import DrafterBase, resolve_drafter
from srtrl.drafters.draft_tree import ROOT, check_trees
from srtrl.engine.engine import compile_kernels
from srtrl.recipe.file import RecipeError, RecipeSource, validate_section
from srtrl.recipe.schema import Section
from srtrl.types import Request

COLUMNS = (
    *("num_samples", "num_cut", "tokens_per_step", "verified_per_step", "draft_us", "insert_us_per_token"),
    *("steps", "steps_without_drafts", "speedup"),
)
"""Of the table."""
MAX_VOCAB_SIZE = 1 << 31
"""Recordings do not contain the size of the vocabulary."""


@dataclass(kw_only=True, slots=True, frozen=True)
class ReplaySettings:
    """How recorded rollouts are replayed."""

    drafter: str = "srt"
    drafter_options: Sequence[str] = ()
    """Each as KEY=VALUE."""
    draft_budget: int = 16
    """Maximum nodes of one draft tree."""
    history: float = 0.0
    """Share of each prompt's samples, rounded down, that the drafter learns before the others start."""
    tokenizer: str | None = None
    """Folder or hub name, for recordings of texts."""
    max_tokens: int = 4000
    """Samples are truncated to this many tokens."""
    noise: bool = True
    """Whether drafts use the noise of the samples, where it is known."""


@dataclass(kw_only=True)
class ReplayCounts:
    """The counts of a replay. Counts of several replays add up."""

    num_samples: int = 0
    """Samples that were decoded; the history's are not among them."""
    num_cut: int = 0
    """Samples that lost their end to `max_tokens`."""
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
    accepted: Counter[int] = field(default_factory=Counter)
    """Number of accepted tokens of a draft of at least one node -> how many drafts had it."""

    def add(self, other: "ReplayCounts") -> None:
        """Take in the counts of another replay."""
        for name in vars(self):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def to_row(self) -> dict[str, Any]:
        """The counts and their averages, as `srtrl replay --json` prints them.

        `tokens_per_step` is the number of tokens that a sequence gets from a decode step (1 without drafts),
        `verified_per_step` the number that it brings into one: its draft's nodes, and one. `draft_us` are microseconds
        of drafting for one sequence and step; `insert_us_per_token` those of all the drafter's other work, for one
        token that it was shown. `acceptance_by_depth` is the share of drafts of which at least 1, 2, 3, ... tokens
        were accepted. `speedup` is how much faster the decode steps until all samples were done are, if a step takes no
        longer for the tokens that it verifies.
        """
        by_depth = [self.accepted[depth] for depth in range(max(self.accepted, default=0) + 1)]
        num_at_least = self.accepted.total() - np.cumsum(by_depth)[:-1]
        return vars(self) | {
            "tokens_per_step": self.num_tokens / self.num_sequence_steps,
            "verified_per_step": 1 + self.num_nodes / self.num_sequence_steps,
            "draft_us": 1e6 * self.draft_seconds / self.num_sequence_steps,
            "insert_us_per_token": 1e6 * self.insert_seconds / self.num_observed_tokens,
            "acceptance_by_depth": (num_at_least / max(self.accepted.total(), 1)).tolist(),
            "speedup": self.steps_without_drafts / self.steps,
        }


@dataclass(slots=True)
class LiveSample:
    """A recorded sample on its way through the decode steps."""

    request: Request
    tokens: Tokens
    extensions: Extensions
    """Read between two turns: neither drafted nor decoded."""
    slot: int
    num_committed: int = 0

    @property
    def turn_end(self) -> int:
        """The end of the current turn."""
        starts = [start for start, _ in self.extensions[self.request.turn :]]
        return starts[0] if starts else len(self.tokens)

    @property
    def num_decoded(self) -> int:
        """Tokens of all turns that decode steps give; the first of the sample is given."""
        return len(self.tokens) - sum(stop - start for start, stop in self.extensions) - 1


class Replay:
    """One drafter, and the counts of the recordings that it was given."""

    def __init__(self, drafter: DrafterBase, settings: ReplaySettings) -> None:
        self.counts = ReplayCounts()
        self._drafter = drafter
        self._settings = settings
        self._draws = itertools.count()

    def run(self, recording: Recording) -> None:
        """Replay one training step after another; the drafter keeps what it learned.

        Prompts of a step follow each other in the order of the file; the samples of a prompt decode in lockstep.
        """
        self.counts.num_cut = recording.num_cut
        self._drafter.knows_noise = self._settings.noise and recording.has_rng_keys
        for prompts in recording.steps:
            num_known = [num_history_samples_of(len(prompt.samples), self._settings.history) for prompt in prompts]
            pairs = list(zip(prompts, num_known, strict=True))
            if any(num_known):
                history = [replace(prompt, samples=prompt.samples[:count]) for prompt, count in pairs]
                with self._clock("insert_seconds"):
                    feed_drafter(self._drafter, history)
                self.counts.num_observed_tokens += sum(len(one) for prompt in history for one in prompt.samples)
            groups = [self._samples_of(prompt, count) for prompt, count in pairs]
            self.counts.num_samples += sum(map(len, groups))
            for samples in groups:
                self._decode(samples)
            with self._clock("insert_seconds"):
                self._drafter.end_step()

    def _samples_of(self, prompt: RecordedPrompt, first: int) -> list[LiveSample]:
        """The samples of a prompt from number `first` on."""
        longest, draw = max(len(sample) for sample in prompt.samples), next(self._draws)
        live = []
        for index in range(first, len(prompt.samples)):
            request = make_request(prompt.prompt_token_ids, draw, index, longest, prompt_id=prompt.prompt_id)
            if prompt.rng_keys:
                request = replace(request, rng_key=prompt.rng_keys[index])
            extensions = prompt.extensions.get(index, ())
            live.append(LiveSample(request, prompt.samples[index], extensions, slot=index - first))
        return live

    def _decode(self, samples: Sequence[LiveSample]) -> None:
        """Decode the samples of a prompt side by side."""
        if not samples:
            return
        self.counts.steps_without_drafts += max(sample.num_decoded for sample in samples)
        self._begin_turns(samples, [1] * len(samples))  # given: it comes from the prompt's forward pass
        live = self._finish_done(samples)
        while live:
            self._decode_step(live)
            live = self._finish_done(live)

    def _decode_step(self, live: Sequence[LiveSample]) -> None:
        """All draft, all verify, all commit."""
        slots = np.array([sample.slot for sample in live])
        budget = self._settings.draft_budget
        max_nodes = np.full(len(live), budget)
        with self._clock("draft_seconds"):
            trees = self._drafter.propose(slots, max_nodes)
        check_trees(trees, max_nodes, MAX_VOCAB_SIZE, str(self._drafter))
        following = [one.tokens[one.num_committed : one.turn_end][: budget + 1] for one in live]
        starts = np.cumsum([0, *map(len, following)])
        num_accepted = count_accepted(trees.token_ids, trees.parents, trees.offsets, np.concatenate(following), starts)
        num_emitted = np.minimum(num_accepted + 1, np.diff(starts))  # no bonus token after the end of a turn
        counts = self.counts
        counts.steps += 1
        counts.num_sequence_steps += len(live)
        counts.num_nodes += trees.num_nodes
        counts.num_tokens += int(num_emitted.sum())
        counts.accepted.update(num_accepted[trees.sizes > 0].tolist())
        self._observe(live, num_emitted.tolist())

    # --- The drafter's calls ---

    def _begin_turns(self, samples: Sequence[LiveSample], num_tokens: Sequence[int]) -> None:
        """Each turn is a text of its own for the drafter; it begins with these numbers of tokens."""
        with self._clock("insert_seconds"):
            self._drafter.start(np.array([sample.slot for sample in samples]), [sample.request for sample in samples])
        self._observe(samples, num_tokens)

    def _observe(self, samples: Sequence[LiveSample], num_tokens: Sequence[int]) -> None:
        """Commit the next tokens of each sample; at the end of a turn the next one begins with the text before it."""
        tokens = []
        for sample, count in zip(samples, num_tokens, strict=True):
            tokens.append(sample.tokens[sample.num_committed : sample.num_committed + count])
            sample.num_committed += count
        offsets = np.cumsum([0, *num_tokens])
        with self._clock("insert_seconds"):
            self._drafter.observe(np.array([sample.slot for sample in samples]), np.concatenate(tokens), offsets)
        self.counts.num_observed_tokens += sum(num_tokens)
        ended = [one for one in samples if one.num_committed == one.turn_end and one.request.turn < len(one.extensions)]
        if ended:
            with self._clock("insert_seconds"):
                self._drafter.finish([sample.slot for sample in ended], [None] * len(ended))
            sizes = [stop - start for start, stop in (one.extensions[one.request.turn] for one in ended)]
            for sample in ended:
                start, _ = sample.extensions[sample.request.turn]
                sample.request = replace(sample.request, turn=sample.request.turn + 1, text_start=start)
            self._begin_turns(ended, sizes)

    def _finish_done(self, samples: Sequence[LiveSample]) -> list[LiveSample]:
        """Finish the samples that are done; returns the others."""
        done = [sample for sample in samples if sample.num_committed == len(sample.tokens)]
        if done:
            slots = [sample.slot for sample in done]
            completions = [recorded_completion(sample.request, sample.tokens, sample.extensions) for sample in done]
            with self._clock("insert_seconds"):
                self._drafter.finish(slots, [None if one.extensions else one for one in completions])
                if turns := [one for one in completions if one.extensions]:  # as `Engine.end`
                    self._drafter.learn(turns)
        return [sample for sample in samples if sample.num_committed < len(sample.tokens)]

    @contextmanager
    def _clock(self, name: Literal["draft_seconds", "insert_seconds"]) -> Iterator[None]:
        """Add the seconds of the block to a count."""
        begin = time.perf_counter()
        yield
        setattr(self.counts, name, getattr(self.counts, name) + time.perf_counter() - begin)


def num_history_samples_of(num_samples: int, share: float) -> int:
    """How many of a prompt's samples are history: `share` of them, rounded down (and 0.29 of 100 is 29)."""
    return int(share * num_samples + 1e-9)


@numba.njit(cache=True, nogil=True)
def count_accepted(
    token_ids: Tokens,
    parents: Tokens,
    offsets: npt.NDArray[np.int64],
    following: Tokens,
    starts: npt.NDArray[np.int64],
) -> npt.NDArray[np.int64]:
    """Length of each tree's path that agrees with the recorded tokens.

    A parent comes before its children, so one pass over the nodes finds the whole path.

    Args:
        token_ids: [total nodes], as in `DraftTrees`, and so are `parents` and `offsets`.
        parents: [total nodes].
        offsets: [B + 1].
        following: What was recorded of each sequence from its next token on, end to end.
        starts: [B + 1], where that of each sequence begins.
    """
    num_accepted = np.zeros(len(offsets) - 1, np.int64)
    for i in range(len(num_accepted)):
        last, position = ROOT, starts[i]
        for node in range(offsets[i], offsets[i + 1]):
            if position == starts[i + 1]:
                break
            if parents[node] == last and token_ids[node] == following[position]:
                last = node - offsets[i]
                position += 1
        num_accepted[i] = position - starts[i]
    return num_accepted


# --- From files to a table --------------------------------------------------------------------------------------------


def replay_files(files: Sequence[Path], settings: ReplaySettings, *, as_json: bool = False) -> None:
    """Replay each file with a new drafter, and print a table, or JSON.

    Raises:
        ValueError: An unknown drafter or option, a file that cannot be used, or nothing to decode.
    """
    drafter_class, options = find_drafter(settings.drafter, settings.drafter_options)
    total, rows = ReplayCounts(), []
    for path in files:
        recording = read_recorded(path, tokenizer=settings.tokenizer, max_tokens=settings.max_tokens)
        drafter = drafter_class(options)
        compile_kernels()
        replay = Replay(drafter, settings)
        replay.run(recording)
        if replay.counts.num_sequence_steps == 0:
            raise ValueError(f"{path}: nothing to decode: each sample has one token, and the first one is given")
        row = replay.counts.to_row() | {"approximate": recording.is_retokenised}
        rows.append({"path": str(path), **row, "drafter_metrics": drafter.take_metrics()})
        total.add(replay.counts)
    used = asdict(settings) | {"drafter_options": options.model_dump()}
    result = used | total.to_row() | {"approximate": any(row["approximate"] for row in rows), "files": rows}
    if as_json:
        print(json.dumps(result))
        return
    print(f"Replay: {', '.join(f'{name} {value}' for name, value in asdict(settings).items() if value)}\n")
    with_total = [*rows, result | {"path": "all"}] if len(rows) > 1 else rows
    print(
        format_table([{"file": Path(row["path"]).name, **{name: row[name] for name in COLUMNS}} for row in with_total])
    )
    if result["approximate"]:
        print("\nTexts were tokenised again: an approximation of the tokens that were sampled.")


def find_drafter(name: str, overrides: Sequence[str]) -> tuple[type[DrafterBase], Section]:
    """The class of the drafter, and its options.

    Raises:
        ValueError: There is no such drafter, or an option of it is incorrect.
    """
    drafter_class = resolve_drafter("--drafter", name)
    source = RecipeSource(Path("--drafter-options"))
    try:
        source.override(overrides)
        return drafter_class, validate_section(drafter_class.Options, source.data)
    except RecipeError as error:
        raise ValueError(f"--drafter-options: {error}") from error
