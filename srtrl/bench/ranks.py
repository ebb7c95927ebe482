"""`srtrl bench ranks`: a simulation of the rollouts of one training step on any number of ranks. Nothing is measured.

Every rank has the real scheduler, and samples are dealt, claimed and run ahead by the real rules, but there is no
model: a decode step takes the stated time for its rows (prompt tokens included), it gives each of its samples one
token, for nothing is drafted, and a sample ends at its recorded or drawn length. The host, grading and the update take
no time. Weak scaling: each rank adds the same number of prompts, so the number of samples per rank is the same in all
rows. `idle share` is the mean share of the step during which a rank has no sample of the step; `claims save` is the
share of the step's time that claims take away. A rank without samples runs ahead until the slowest one is done, as do
slots that are free before that: `run ahead share` is how much of the next step's tokens are decoded by then. `exchange
seconds` is what it takes at the stated bandwidth until each rank has the rollouts of all, 12 bytes per token, and comes
on top of `step seconds`.
"""

import heapq
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer

from srtrl.bench import options
from srtrl.bench.tables import Row, publish, read_environment
from srtrl.bench.workload import make_request, read_rollouts
from srtrl.engine.batch import Batch, ScheduledStep
from srtrl.engine.draft_budget import DraftControl, StepCost, slowdown_of
from srtrl.engine.options import EngineOptions
from srtrl.engine.page_pool import PagePool
from srtrl.engine.rows import Int64Array
from srtrl.engine.scheduler import Scheduler
from srtrl.ranks.processes import Ranks
from srtrl.ranks.sharing import Claims, SharedCounters, deal, round_robin
from srtrl.recipe.schema import MAX_WIDTH
from srtrl.rollout.collect import run_ahead_order
from srtrl.types import Request

LOG_NORMAL = "log-normal"
MEDIAN_TOKENS, PROMPT_SPREAD, SAMPLE_SPREAD = 1024, 0.5, 0.4
"""Of drawn lengths, and the standard deviations of their logarithm between prompts and within a prompt."""
DRAWN_PROMPT_TOKENS, DRAWN_SAMPLES = 128, 16
BYTES_PER_TOKEN = 12
"""Of an exchanged rollout: token id and log-prob, 4 bytes each, and about as much of text."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Number of tokens of any prompt and of its samples, by the number of its draw."""

    recorded: Sequence[tuple[int, Sequence[int]]]
    """Tokens of each prompt and of its samples, taken again and again; empty: lengths are drawn."""
    num_samples: int
    history: int
    """Samples of each prompt, the first ones, that are not decoded: their mean is its expected length."""
    max_tokens: int

    @property
    def max_sequence_tokens(self) -> int:
        """Of prompt and response together, at most."""
        return max((one for one, _ in self.recorded), default=DRAWN_PROMPT_TOKENS) + self.max_tokens

    def of_draw(self, draw: int) -> tuple[int, list[int], float | None]:
        """Tokens of the prompt and of its samples, and the expected length, None if nothing is known."""
        if self.recorded:
            num_prompt, lengths = self.recorded[draw % len(self.recorded)]
        else:
            generator = np.random.default_rng(draw)  # the same prompts for any number of ranks
            center = generator.normal(math.log(MEDIAN_TOKENS), PROMPT_SPREAD)
            drawn = np.exp(generator.normal(center, SAMPLE_SPREAD, self.history + self.num_samples))
            num_prompt, lengths = DRAWN_PROMPT_TOKENS, drawn.clip(1, self.max_tokens).astype(int).tolist()
        expected = float(np.mean(lengths[: self.history])) if self.history else None
        return num_prompt, list(lengths[self.history : self.history + self.num_samples]), expected

    def requests(self, draws: range) -> tuple[list[Request], dict[int, float | None]]:
        """The samples of some draws, each with its length as `max_new_tokens`, and what is expected of each draw."""
        requests, expected = [], {}
        for draw in draws:
            num_prompt, lengths, expected[draw] = self.of_draw(draw)
            prompt = (draw,) + (0,) * (num_prompt - 1)  # no prompt is another's
            requests += [make_request(prompt, draw, index, length) for index, length in enumerate(lengths)]
        return requests, expected


@dataclass(slots=True, eq=False)
class SimulatedRank:
    """One rank: what `Engine` and `rollout.collect.drive` do, but for a model."""

    scheduler: Scheduler
    control: DraftControl
    claims: Claims | None
    """None: one rank, whose samples are all queued."""
    expected: Mapping[int, float | None]
    ahead: Iterator[Request]
    """Run-aheads in the order of this rank."""
    _: KW_ONLY
    skips: bool = True
    """Whether steps that are the same are simulated at once."""
    now: int = 0
    """Nanoseconds: when the next step begins. Not rounded, so that skipping steps changes nothing."""
    busy: int = 0
    """Nanoseconds: when the last step ended that had samples of the training step."""
    num_tokens: int = 0
    timeline: list[tuple[int, int, int, int]] = field(default_factory=list)
    """Steps: how many are the same, and of each the number of primaries, of run-aheads and of prompt tokens."""
    _num_rows: int = 0
    """Primaries of the last step."""
    _num_queued: int = 0
    """Run-aheads in the scheduler's line."""
    ahead_tokens: Counter[int] = field(default_factory=Counter)
    """RNG key -> tokens of that run-ahead."""

    def admit(self) -> None:
        """Take samples for free slots; where none is left, have run-aheads wait for them."""
        scheduler = self.scheduler
        for request in self.claims.take(scheduler.num_free_slots) if self.claims else ():
            scheduler.add(request, self.expected[request.draw_index])
        while scheduler.num_free_slots and self._num_queued < scheduler.batch.num_slots:
            early = next(self.ahead, None)
            if early is None:
                return
            scheduler.add(early)  # not before: they are many, and no step looks at them
            self._num_queued += 1

    def step(self, until: int | None = None) -> bool:
        """Decode one step, or as many as are the same, those that begin before `until`; False if there is no work."""
        scheduler, batch = self.scheduler, self.scheduler.batch
        max_run_ahead = self._max_run_ahead()
        step = scheduler.schedule(max_run_ahead)
        slots, num_primaries = step.slots, step.num_primaries
        if not len(slots) and not step.chunks:
            return False
        for sample in step.started:
            if sample.request.is_run_ahead:
                self._num_queued -= 1
        has_work, self._num_rows = scheduler.has_work, num_primaries
        duration = round(1e9 * self.control.cost.seconds(len(slots) + step.num_prompt_rows))
        count = 1
        if self.skips and self._max_run_ahead() == max_run_ahead:
            count = self._num_same(step, MAX_WIDTH if until is None else -((self.now - until) // duration))
        batch.num_tokens[slots] += count
        batch.num_computed[slots] += count
        self.now += count * duration
        if has_work:
            self.busy = self.now
        self.num_tokens += count * num_primaries
        self.timeline.append((count, num_primaries, len(slots) - num_primaries, step.num_prompt_rows))
        for rng_key in batch.rng_keys[slots[num_primaries:]].tolist():
            self.ahead_tokens[rng_key] += count
        for slot in slots[batch.num_tokens[slots] == batch.max_tokens[slots]].tolist():
            sample = batch.samples[slot]
            assert sample is not None
            scheduler.finish(sample)
        return True

    def _max_run_ahead(self) -> int:
        """As `Engine._schedule`."""
        scheduler = self.scheduler
        if not scheduler.may_run_ahead:
            return 0
        return self.control.run_ahead_rows(self._num_rows, alone=not scheduler.has_work)

    def _num_same(self, step: ScheduledStep, most: int) -> int:
        """How many steps from this one on, at most `most`, are the same: until a sample ends, or pages may be short."""
        scheduler, batch, slots = self.scheduler, self.scheduler.batch, step.slots
        num_running = len(scheduler.running)
        may_admit = scheduler.num_waiting and num_running < batch.num_slots
        if step.chunks or step.num_primaries < num_running or may_admit:
            return 1
        count = min(most, int((batch.max_tokens[slots] - batch.num_tokens[slots]).min()))
        missing: Int64Array = np.maximum(batch.missing_pages(slots, batch.num_tokens[slots] + count - 1), 0)
        reserved = batch.num_slots * scheduler.pool.pages_for(scheduler.max_draft_nodes + scheduler.pool.page_size)
        if missing.sum() + reserved > scheduler.pool.num_free:
            return 1
        if missing.any():
            batch.grow(slots, missing)
        return count


@dataclass(slots=True, frozen=True)
class Simulation:
    """What is simulated."""

    lengths: Lengths
    curve: tuple[tuple[int, float], ...]
    _: KW_ONLY
    num_slots: int
    num_prompts: int
    """Per rank."""
    bandwidth: float
    """Bytes per second that a rank receives."""
    skips: bool = True

    def row(self, num_ranks: int) -> Row:
        """What the ranks do in a step, with and without claims."""
        num_draws = num_ranks * self.num_prompts
        requests, expected = self.lengths.requests(range(num_draws))
        ahead, _ = self.lengths.requests(range(num_draws, 2 * num_draws))
        lines = deal(requests, expected, num_ranks)
        counters: dict[str, int] = {}
        all_ranks = [Ranks(index=index, count=num_ranks, _local=counters) for index in range(num_ranks)]
        run_ahead = run_ahead_order(ahead)
        others = [line[self.num_slots :] for line in lines]
        ranks, without = list[SimulatedRank](), list[SimulatedRank]()
        for one, line, rest in zip(all_ranks, lines, others, strict=True):
            first, shared = line[: self.num_slots], Claims(SharedCounters(one), others)
            alone = Claims(SharedCounters(Ranks()), [rest])
            ranks.append(self.make_rank(first, shared, expected, round_robin(run_ahead, one)))
            without.append(self.make_rank(first, alone, expected, round_robin(run_ahead, one)))
        if num_ranks == 1:  # as `collect_rollouts`; nothing to claim
            ranks = without = [self.make_rank(requests, None, expected, iter(run_ahead))]
        end = decode(ranks)
        end_without = decode(without) if num_ranks > 1 else end
        for rank in ranks:  # those that are done run ahead
            while rank.now < end and rank.step(until=end):
                rank.admit()
        made: Counter[int] = Counter()
        for rank in ranks:
            made |= rank.ahead_tokens  # the maximum of each: two ranks may run ahead for one sample
        num_tokens = sum(rank.num_tokens for rank in ranks)
        largest = max(rank.num_tokens for rank in ranks)  # a gather sends as much from each
        return {
            "ranks": num_ranks,
            "samples": len(requests),
            "step_seconds": end / 1e9,
            "tokens_per_second_and_rank": 1e9 * num_tokens / end / num_ranks,
            "idle_share": idle_share(ranks),
            "idle_share_without_claims": idle_share(without),
            "claims_save": 1 - end / end_without,
            "run_ahead_share": made.total() / sum(request.sampling.max_new_tokens for request in ahead),
            "exchange_seconds": (num_ranks - 1) * largest * BYTES_PER_TOKEN / self.bandwidth,
            "claimed_samples_per_rank": sum(one.claims.counters.num_claimed for one in ranks if one.claims) / num_ranks,
        }

    def make_rank(
        self,
        requests: Sequence[Request],
        claims: Claims | None,
        expected: Mapping[int, float | None],
        ahead: Iterator[Request],
    ) -> SimulatedRank:
        """A rank with pages for whole sequences in all slots, as `make_engine`; it begins with these samples."""
        used, num_slots, longest = EngineOptions(), self.num_slots, self.lengths.max_sequence_tokens
        nodes = used.max_draft_nodes
        pool = PagePool(num_slots * -(-(longest + nodes) // used.page_size), used.page_size)
        batch = Batch(num_slots, longest, pool, nodes)
        scheduler = Scheduler(batch, prefill_chunk_tokens=used.prefill_chunk_tokens, max_draft_nodes=nodes)
        for request in requests:
            scheduler.add(request, expected[request.draw_index])
        slowdown = slowdown_of(used.run_ahead_max_slowdown)
        control = DraftControl(StepCost(points=self.curve), fixed=0, num_slots=num_slots, max_slowdown=slowdown)
        return SimulatedRank(scheduler, control, claims, expected, ahead, skips=self.skips)


def decode(ranks: Sequence[SimulatedRank]) -> int:
    """Let the ranks decode side by side until all samples are done; returns the nanoseconds."""
    coming = [(0, index) for index in range(len(ranks))]
    while coming:
        _, index = heapq.heappop(coming)
        rank = ranks[index]
        rank.admit()
        if rank.scheduler.has_work:
            rank.step()
            heapq.heappush(coming, (rank.now, index))
    return max(rank.busy for rank in ranks)


def idle_share(ranks: Sequence[SimulatedRank]) -> float:
    """Mean share of the time until the last rank is done during which a rank has nothing to decode for the step."""
    busy = [rank.busy for rank in ranks]
    return float(1 - np.mean(busy) / max(busy))


def read_lengths(
    lengths: str, tokenizer: str | None, num_samples: int | None, history: int, max_tokens: int
) -> Lengths:
    """The lengths that `--lengths` names: of a file of recorded rollouts, or drawn ones.

    Raises:
        ValueError: The file cannot be read, or has samples of several turns, or fewer of a prompt than are wanted.
    """
    if lengths == LOG_NORMAL:
        return Lengths((), num_samples or DRAWN_SAMPLES, history, max_tokens)
    path = Path(lengths)
    if not path.exists():
        raise ValueError(f"--lengths: expected {LOG_NORMAL} or a file of recorded rollouts; there is no file {lengths}")
    prompts = read_rollouts(path, tokenizer=tokenizer, max_tokens=max_tokens).prompts()
    if any(any(prompt.extensions.values()) for prompt in prompts):
        raise ValueError(f"--lengths: {path} has samples of several turns, which this simulation does not know")
    fewest = min(len(prompt.samples) for prompt in prompts)
    count = num_samples or max(1, fewest - history)
    if history + count > fewest:
        raise ValueError(
            f"--samples: {count}, and --history {history}, but {path} has prompts of {fewest} samples; lower them"
        )
    sizes = [(len(prompt.prompt_token_ids), [len(sample) for sample in prompt.samples]) for prompt in prompts]
    return Lengths(sizes, count, history, max_tokens)


def command(
    *,
    ranks: Annotated[str, typer.Option(metavar="N[,N...]", help="Numbers of ranks, a row for each.")] = "1,8,64,256",
    lengths: Annotated[str, typer.Option(metavar="FILE", help=f"Recorded rollouts, or {LOG_NORMAL}.")] = LOG_NORMAL,
    price_as: Annotated[
        str, typer.Option(metavar="CURVE", help="Time per step by its rows: ROWS:SECONDS,... or the name of a curve.")
    ] = "h200-1.5b",
    slots: Annotated[int, typer.Option(min=1, max=4096, help="Sequences that a rank decodes at a time.")] = 32,
    prompts: Annotated[int, typer.Option(min=1, max=4096, help="Prompts of a step per rank.")] = 8,
    samples: Annotated[
        int | None, typer.Option(min=1, max=4096, help=f"Of a prompt. [default: all recorded, or {DRAWN_SAMPLES}]")
    ] = None,
    history: Annotated[
        int, typer.Option(min=0, max=4096, help="Earlier samples of each prompt, whose mean length is expected.")
    ] = 0,
    max_tokens: Annotated[int, typer.Option(min=1, max=131072, help="Truncate samples to this many tokens.")] = 8192,
    bandwidth: Annotated[float, typer.Option(min=1e-3, metavar="GB/s", help="At which a rank receives.")] = 12.5,
    tokenizer: options.TokenizerFolder = None,
    json_file: options.JsonFile = None,
    write_docs: options.WriteDocs = None,
) -> None:
    """Simulate the rollouts of a training step on many ranks: how long it takes, and how long ranks are idle.

    The scheduler and the rules by which ranks share samples are the real ones; the time of a decode step is stated.
    """
    counts = options.parse_counts("--ranks", ranks)
    curve = options.parse_curve("--price-as", price_as)
    environment = read_environment(torch.device("cpu"))
    found = read_lengths(lengths, tokenizer, samples, history, max_tokens)
    simulation = Simulation(found, curve, num_slots=slots, num_prompts=prompts, bandwidth=1e9 * bandwidth)
    source = f"{LOG_NORMAL} lengths" if lengths == LOG_NORMAL else f"lengths of {Path(lengths).name}"
    known = f"{history} earlier samples" if history else "no history"
    per_rank = f"{prompts} prompts of {found.num_samples} samples and {slots} slots per rank"
    title = f"Simulation of ranks: {source}, {known}, {per_rank}, {bandwidth:g} GB/s"
    publish(title, {"rows": [simulation.row(count) for count in counts]}, __doc__, environment, json_file, write_docs)
