"""Recorded rollouts through a drafter, step by step: what decoding them with that drafter would have been like.

Verification keeps the longest path of a draft tree that agrees with what is sampled, for any draft, and here what is
sampled is known. So no model is needed to know how many tokens each decode step would have given.
"""

import heapq
import itertools
import json
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import numba
import numpy as np
import numpy.typing as npt

from srtrl.bench.recorded import Extensions, RecordedPrompt, Recording, Tokens, recorded_completion
from srtrl.bench.tables import format_table
from srtrl.bench.workload import make_request, read_rollouts
from srtrl.drafters.base import DrafterBase, resolve_drafter
from srtrl.drafters.draft_tree import ROOT, check_trees
from srtrl.engine.draft_budget import cut_trees
from srtrl.recipe.file import RecipeError, RecipeSource, validate_section
from srtrl.recipe.schema import Section
from srtrl.types import Request

COLUMNS = (
    *("num_samples", "num_cut", "tokens_per_step", "verified_per_step", "draft_us", "insert_us_per_token"),
    *("steps", "steps_without_drafts", "speedup"),
)
"""What the table shows."""
MAX_VOCAB_SIZE = 1 << 31
"""Recordings do not say how many tokens there are."""


@dataclass(kw_only=True, slots=True, frozen=True)
class ReplaySettings:
    """How recorded rollouts are replayed."""

    drafter: str = "srt"
    drafter_options: Sequence[str] = ()
    """Each as KEY=VALUE."""
    draft_budget: int = 16
    """Maximum nodes of one draft tree."""
    min_score: float | None = None
    """Nodes of a lower score are not verified; None verifies all."""
    history: float = 0.0
    """Share of each prompt's samples, rounded down, that are earlier than the others and not decoded as samples."""
    history_as: str = "complete"
    """`complete`: the drafter has seen them before the others start; `run-ahead`: as far as slots that the step before
    leaves idle can decode them, a token per step; `none`: it never sees them."""
    slots: int | None = None
    """Sequences decoded at once, the first sample of every prompt before the second of any; None replays each prompt
    alone, its samples in lockstep."""
    step_prompts: int | None = None
    """Prompts of a training step; None: as recorded."""
    tokenizer: str | None = None
    """Folder or hub name, for recordings of texts."""
    max_tokens: int = 4000
    """Samples are truncated to this many tokens."""


@dataclass(kw_only=True, slots=True)
class ReplayCounts:
    """What a replay counted. Counts of several replays add up."""

    num_prompts: int = 0
    num_samples: int = 0
    """Samples that were decoded; the history's are not among them."""
    num_history_samples: int = 0
    num_run_ahead_tokens: int = 0
    """Tokens of the history that idle slots decoded, where it is not known beforehand."""
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
    """Number of accepted tokens of a draft -> how many sequence-steps had it."""

    def add(self, other: "ReplayCounts") -> None:
        """Take in the counts of another replay."""
        for one in fields(self):
            setattr(self, one.name, getattr(self, one.name) + getattr(other, one.name))

    def to_row(self) -> dict[str, Any]:
        """The counts and their averages, as `srtrl replay --json` prints them.

        `tokens_per_step` is what a sequence gets from a decode step (1 without drafts), `verified_per_step` what it
        brings into one: its draft's nodes, and one. `draft_us` are microseconds of drafting for one sequence and step,
        with the nodes that `min_score` takes out again; `insert_us_per_token` those of all the drafter's other work,
        for one token that it was shown. `acceptance_by_depth` is the share of the sequence-steps in which at least
        1, 2, 3, ... drafted tokens were accepted. `speedup` is how much faster the decode steps until all samples were
        done are, if a step takes no longer for what it verifies.
        """
        by_depth = [self.accepted[depth] for depth in range(max(self.accepted, default=0) + 1)]
        num_at_least = self.num_sequence_steps - np.cumsum(by_depth)[:-1]
        counts = {one.name: getattr(self, one.name) for one in fields(self)}
        return counts | {
            "tokens_per_step": self.num_tokens / self.num_sequence_steps,
            "verified_per_step": 1 + self.num_nodes / self.num_sequence_steps,
            "draft_us": 1e6 * self.draft_seconds / self.num_sequence_steps,
            "insert_us_per_token": 1e6 * self.insert_seconds / self.num_observed_tokens,
            "acceptance_by_depth": (num_at_least / self.num_sequence_steps).tolist(),
            "speedup": self.steps_without_drafts / self.steps,
        }


@dataclass(slots=True)
class _LiveSample:
    """A recorded sample on its way through the decode steps."""

    request: Request
    tokens: Tokens
    extensions: Extensions = ()
    """What is read between two turns: neither drafted nor decoded."""
    slot: int = -1
    """While it decodes."""
    num_committed: int = 0

    @property
    def turn_end(self) -> int:
        """Where the present turn ends."""
        starts = [start for start, _ in self.extensions[self.request.turn :]]
        return starts[0] if starts else len(self.tokens)

    @property
    def num_decoded(self) -> int:
        """Tokens of all turns that decode steps give; the first of the sample is given."""
        return len(self.tokens) - sum(stop - start for start, stop in self.extensions) - 1

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
        self._draws = itertools.count()
        self._free_slots: list[int] = []

    def run(self, recording: Recording) -> None:
        """Replay one training step after another; the drafter keeps what it learned.

        Prompts of a step follow each other in the order of the file, for every drafter alike, since some (SuffixDecoding)
        learn from other prompts too. With `slots` they share the slots.
        """
        largest = max(len(prompt.samples) for prompts in recording.steps for prompt in prompts)
        self._free_slots = list(range(max(largest, self._settings.slots or 0)))
        self.counts.num_cut = recording.num_cut
        for step, prompts in enumerate(recording.steps):
            has_ahead = self._settings.history_as == "run-ahead" and step + 1 < len(recording.steps)
            ahead, _ = self._samples_of(recording.steps[step + 1] if has_ahead else [], is_run_ahead=True)
            self._replay_step(prompts, breadth_first(ahead))
            with self._clock("insert_seconds"):
                self._drafter.end_step()

    def _samples_of(
        self, prompts: Sequence[RecordedPrompt], *, is_run_ahead: bool = False
    ) -> tuple[list[list[_LiveSample]], list[list[_LiveSample]]]:
        """The samples of each prompt that are history, and those that are not."""
        history, others = [], []
        for prompt in prompts:
            longest = max(len(sample) for sample in prompt.samples)
            number = next(self._draws)
            requests = [
                make_request(prompt.prompt_token_ids, number, index, longest, prompt_id=prompt.prompt_id)
                for index in range(len(prompt.samples))
            ]
            samples = [
                _LiveSample(replace(request, is_run_ahead=is_run_ahead), tokens, prompt.extensions.get(index, ()))
                for index, (request, tokens) in enumerate(zip(requests, prompt.samples, strict=True))
            ]
            if is_run_ahead:  # it ends with its first turn
                samples = [_LiveSample(one.request, one.tokens[: one.turn_end]) for one in samples]
            num_history = num_history_samples_of(len(samples), self._settings.history)
            history.append(samples[:num_history])
            others.append(samples[num_history:])
        return history, others

    def _replay_step(self, prompts: Sequence[RecordedPrompt], ahead: Sequence[_LiveSample]) -> None:
        """Show the drafter the history of every prompt, then decode the other samples."""
        history, groups = self._samples_of(prompts)
        self.counts.num_prompts += len(prompts)
        self.counts.num_samples += sum(map(len, groups))
        if self._settings.history_as == "complete" and any(history):
            self.counts.num_history_samples += sum(map(len, history))
            for samples in history:
                self._start(samples, [sample.turn_end for sample in samples])
                while talking := [sample for sample in samples if not sample.is_done]:
                    self._observe(talking, [sample.turn_end - sample.num_committed for sample in talking])
                self._finish(samples)
            with self._clock("insert_seconds"):
                self._drafter.end_step()
        if self._settings.slots is None:
            for samples in groups:
                self._decode(samples, len(samples))
        else:
            self._decode(breadth_first(groups), self._settings.slots, ahead)

    def _decode(self, queue: Sequence[_LiveSample], num_slots: int, ahead: Sequence[_LiveSample] = ()) -> None:
        """Decode the samples of `queue`, `num_slots` at once; one that is done is replaced before the next step.

        Slots for which no sample is left decode those of `ahead`, until the last sample of `queue` is done.
        """
        self.counts.steps_without_drafts += count_steps([one.num_decoded for one in queue], num_slots)
        waiting, line = deque(queue), deque(ahead)
        live, running = list[_LiveSample](), list[_LiveSample]()
        while waiting or live:
            while waiting and len(live) < num_slots:
                admitted = [waiting.popleft() for _ in range(min(num_slots - len(live), len(waiting)))]
                self._start(admitted, [1] * len(admitted))  # given: it comes from the prompt's forward pass
                live = self._finish_done([*live, *admitted])
            if live:
                # Slots only become free: no sample waits when the first one is.
                admitted = [line.popleft() for _ in range(min(num_slots - len(live) - len(running), len(line)))]
                self._observe(running, [1] * len(running))
                self._start(admitted, [1] * len(admitted))
                running = [*running, *admitted]
                self.counts.num_run_ahead_tokens += len(running)
                running = self._finish_done(running)
                self._decode_step(live)
                live = self._finish_done(live)
        self._finish(running)

    def _decode_step(self, live: Sequence[_LiveSample]) -> None:
        """All draft, all verify, all commit."""
        slots = np.array([sample.slot for sample in live])
        budget = self._settings.draft_budget
        max_nodes = np.full(len(live), budget)
        self._drafter.min_score = self._settings.min_score or 0.0
        with self._clock("draft_seconds"):
            trees = self._drafter.propose(slots, max_nodes)
        check_trees(trees, max_nodes, MAX_VOCAB_SIZE, str(self._drafter))
        num_worthwhile = np.cumsum(np.insert(trees.scores >= self._drafter.min_score, 0, False))
        # Scores fall, so that the nodes of a sufficient score are the first ones of their tree.
        trees = cut_trees(trees, np.diff(num_worthwhile[trees.offsets]), len(live))
        following = [one.tokens[one.num_committed : one.turn_end][: budget + 1] for one in live]
        starts = np.cumsum([0, *map(len, following)])
        num_accepted = count_accepted(trees.token_ids, trees.parents, trees.offsets, np.concatenate(following), starts)
        num_emitted = np.minimum(num_accepted + 1, np.diff(starts))  # no bonus token after the end of a turn
        counts = self.counts
        counts.steps += 1
        counts.num_sequence_steps += len(live)
        counts.num_nodes += trees.num_nodes
        counts.num_tokens += int(num_emitted.sum())
        counts.accepted.update(num_accepted.tolist())
        self._observe(live, num_emitted.tolist())

    # --- The drafter's calls ---

    def _start(self, samples: Sequence[_LiveSample], num_tokens: Sequence[int]) -> None:
        """Give the samples slots, and commit their first tokens."""
        if not samples:
            return
        for sample in samples:
            sample.slot = heapq.heappop(self._free_slots)
        self._begin_turns(samples, num_tokens)

    def _begin_turns(self, samples: Sequence[_LiveSample], num_tokens: Sequence[int]) -> None:
        """Each turn is a text of its own for the drafter; it begins with these numbers of tokens."""
        with self._clock("insert_seconds"):
            self._drafter.start(np.array([sample.slot for sample in samples]), [sample.request for sample in samples])
        self._observe(samples, num_tokens)

    def _observe(self, samples: Sequence[_LiveSample], num_tokens: Sequence[int]) -> None:
        """Commit the next tokens of each sample; where a turn ends, the next one begins with what is put in before."""
        if not samples:
            return
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
                sample.request = replace(sample.request, turn=sample.request.turn + 1)
            self._begin_turns(ended, sizes)

    def _finish_done(self, samples: Sequence[_LiveSample]) -> list[_LiveSample]:
        """Finish the samples that are done; returns the others."""
        self._finish([sample for sample in samples if sample.is_done])
        return [sample for sample in samples if not sample.is_done]

    def _finish(self, samples: Sequence[_LiveSample]) -> None:
        if not samples:
            return
        completions = [recorded_completion(sample.request, sample.tokens, sample.extensions) for sample in samples]
        slots = [sample.slot for sample in samples]
        with self._clock("insert_seconds"):
            finished = [None if one.extensions else one for one in completions]
            self._drafter.finish(slots, finished)
            if turns := [one for one in completions if one.extensions]:  # as `Engine.end`
                self._drafter.learn(turns)
        for slot in slots:
            heapq.heappush(self._free_slots, slot)

    @contextmanager
    def _clock(self, name: Literal["draft_seconds", "insert_seconds"]) -> Iterator[None]:
        """Add the seconds of the block to a count."""
        begin = time.perf_counter()
        yield
        setattr(self.counts, name, getattr(self.counts, name) + time.perf_counter() - begin)


def num_history_samples_of(num_samples: int, share: float) -> int:
    """How many of a prompt's samples are history: `share` of them, rounded down (and 0.29 of 100 is 29)."""
    return int(share * num_samples + 1e-9)


def breadth_first(groups: Sequence[Sequence[_LiveSample]]) -> list[_LiveSample]:
    """The first sample of every prompt, then the second, and so on."""
    by_rank = itertools.zip_longest(*groups)
    return [sample for rank in by_rank for sample in rank if sample is not None]


def count_steps(lengths: Sequence[int], num_slots: int) -> int:
    """Decode steps until all sequences are done, in order of admission, each taking as many steps as its length."""
    slots = [0] * num_slots
    for length in lengths:
        heapq.heapreplace(slots, slots[0] + length)
    return max(slots, default=0)


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
        ValueError: An unknown drafter or option, a file that cannot be used or is given twice, or nothing to decode.
    """
    if len(set(files)) < len(files):
        raise ValueError(f"{Counter(files).most_common(1)[0][0]}: given twice")
    drafter_class, options = find_drafter(settings.drafter, settings.drafter_options)
    total, rows = ReplayCounts(), []
    for path in files:
        recording = read_rollouts(path, tokenizer=settings.tokenizer, max_tokens=settings.max_tokens)
        if settings.step_prompts is not None:
            recording = in_steps(recording, settings.step_prompts)
        drafter = drafter_class(options)
        if settings.history_as == "run-ahead" and not drafter.uses_run_aheads:
            raise ValueError(
                f"--history-as: run-ahead, but the drafter {settings.drafter} does not draft from run-aheads"
            )
        if settings.history_as == "run-ahead" and len(recording.steps) < 2:
            raise ValueError(f"{path}: one training step, and nothing to run ahead for; give --step-prompts")
        drafter.warm_up()
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
    table = [{"file": Path(row["path"]).name} | {name: row[name] for name in COLUMNS} for row in with_total]
    print(format_table(table))
    if result["approximate"]:
        print("\nTexts were tokenised again: an approximation of the tokens that were sampled.")


def in_steps(recording: Recording, step_prompts: int) -> Recording:
    """The same prompts in the same order, `step_prompts` per step."""
    prompts = recording.prompts()
    steps = [prompts[first : first + step_prompts] for first in range(0, len(prompts), step_prompts)]
    return replace(recording, steps=steps)


def find_drafter(name: str, overrides: Sequence[str]) -> tuple[type[DrafterBase], Section]:
    """The class of the drafter, and its options.

    Raises:
        ValueError: There is no such drafter, or an option of it is incorrect.
    """
    found = resolve_drafter("--drafter", name)
    source = RecipeSource(Path("--drafter-options"))
    try:
        source.override(overrides)
        return found, validate_section(found.Options, source.data)
    except RecipeError as error:
        raise ValueError(f"--drafter-options: {error}") from error
