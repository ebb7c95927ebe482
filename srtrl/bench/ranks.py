"""`srtrl bench ranks`: a simulation of the rollouts of one training step on any number of ranks. Nothing is measured.

Every rank has the real scheduler, and samples are dealt, claimed and run ahead by the real rules, but there is no
model: a decode step takes the time of `H200_CURVE` for its rows (prompt tokens included), it gives each of its samples
one token, for nothing is drafted, and a sample ends at its recorded or drawn length. The host, grading and the update
take no time. Weak scaling: each rank adds the same number of prompts, so the number of samples per rank is the same in
all rows. `idle share` is the mean share of the step during which a rank has no sample of the step; `claims save` is the
share of the step's time that claims save. A rank without samples runs ahead until the slowest one is done, as do slots
that are free before that: `run ahead share` is how much of the next step's tokens are decoded by then.
"""

import heapq
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer

from srtrl.bench import options
from srtrl.bench.tables import Row, publish, read_environment
from srtrl.bench.workload import make_request, read_rollouts
from srtrl.engine.batch import Batch
from srtrl.engine.draft_budget import DraftControl, StepCost
from srtrl.engine.page_pool import PagePool
from srtrl.engine.runner import EngineOptions
from srtrl.engine.scheduler import Scheduler
from srtrl.ranks.processes import Ranks
from srtrl.ranks.sharing import Claims, SharedCounters, deal, round_robin
from srtrl.rollout.collect import run_ahead_order
from srtrl.types import Request

LOG_NORMAL = "log-normal"
MEDIAN_TOKENS, PROMPT_SPREAD, SAMPLE_SPREAD = 1024, 0.5, 0.4
"""Of drawn lengths, and the standard deviations of their logarithm between prompts and within a prompt."""
DRAWN_PROMPT_TOKENS, DRAWN_SAMPLES = 128, 16


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
    now: float = 0.0
    """Seconds: when the next step begins."""
    busy: float = 0.0
    """Seconds: when the last step ended that had samples of the training step."""
    num_tokens: int = 0
    steps: list[tuple[int, int, int]] = field(default_factory=list)
    """Of each step the number of primaries, of run-aheads and of prompt tokens."""
    ahead_tokens: Counter[int] = field(default_factory=Counter)
    """RNG key -> tokens of that run-ahead."""
    _num_queued: int = 0
    """Run-aheads in the scheduler's line."""

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

    def step(self) -> bool:
        """Decode one step; False if there is no work."""
        scheduler, batch = self.scheduler, self.scheduler.batch
        rows = 0
        if scheduler.may_run_ahead:  # as `Engine._schedule`
            num_last = self.steps[-1][0] if self.steps else 0
            rows = self.control.run_ahead_rows(num_last, alone=not scheduler.has_work)
        step = scheduler.schedule(rows)
        slots, num_primaries = step.slots, step.num_primaries
        if not len(slots) and not step.chunks:
            return False
        self._num_queued -= sum(sample.request.is_run_ahead for sample in step.started)
        self.now += self.control.cost.seconds(len(slots) + step.num_prompt_rows)
        if scheduler.has_work:
            self.busy = self.now
        batch.num_tokens[slots] += 1
        batch.num_computed[slots] += 1
        self.num_tokens += num_primaries
        self.steps.append((num_primaries, len(slots) - num_primaries, step.num_prompt_rows))
        self.ahead_tokens.update(batch.rng_keys[slots[num_primaries:]].tolist())
        for slot in slots[batch.num_tokens[slots] == batch.max_tokens[slots]].tolist():
            sample = batch.samples[slot]
            assert sample is not None
            scheduler.finish(sample)
        return True


@dataclass(kw_only=True, slots=True, frozen=True)
class Simulation:
    """The settings of a simulation."""

    lengths: Lengths
    curve: tuple[tuple[int, float], ...]
    num_slots: int
    num_prompts: int
    """Per rank."""

    def row(self, num_ranks: int) -> Row:
        """The figures of a step, with and without claims."""
        num_draws = num_ranks * self.num_prompts
        requests, expected = self.lengths.requests(range(num_draws))
        ahead, _ = self.lengths.requests(range(num_draws, 2 * num_draws))
        lines = deal(requests, expected, num_ranks)
        counters: dict[str, int] = {}
        all_ranks = [Ranks(index=index, count=num_ranks, _local=counters) for index in range(num_ranks)]
        run_ahead = run_ahead_order(ahead)
        waiting = [line[self.num_slots :] for line in lines]
        ranks, without = list[SimulatedRank](), list[SimulatedRank]()
        for index, line in zip(all_ranks, lines, strict=True):
            first = line[: self.num_slots]
            shared = Claims(SharedCounters(index), waiting)
            alone = Claims(SharedCounters(Ranks()), [line[self.num_slots :]])
            ranks.append(self.make_rank(first, shared, expected, round_robin(run_ahead, index)))
            without.append(self.make_rank(first, alone, expected, round_robin(run_ahead, index)))
        if num_ranks == 1:  # nothing to claim
            ranks = without = [self.make_rank(requests, None, expected, iter(run_ahead))]
        end = decode(ranks)
        end_without = decode(without) if num_ranks > 1 else end
        for rank in ranks:  # those that are done run ahead
            while rank.now < end and rank.step():
                rank.admit()
        made: Counter[int] = Counter()
        for rank in ranks:
            made |= rank.ahead_tokens  # the maximum of each: two ranks may run ahead for one sample
        num_tokens = sum(rank.num_tokens for rank in ranks)
        return {
            "ranks": num_ranks,
            "samples": len(requests),
            "step_seconds": end,
            "tokens_per_second_and_rank": num_tokens / end / num_ranks,
            "idle_share": idle_share(ranks),
            "idle_share_without_claims": idle_share(without),
            "claims_save": 1 - end / end_without,
            "run_ahead_share": made.total() / sum(request.sampling.max_new_tokens for request in ahead),
            "claimed_samples_per_rank": sum(rank.claims.counters.num_claimed for rank in ranks if rank.claims)
            / num_ranks,
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
        control = DraftControl(StepCost(points=self.curve), fixed=0, max_slowdown=used.run_ahead_max_slowdown)
        return SimulatedRank(scheduler, control, claims, expected, ahead)


def decode(ranks: Sequence[SimulatedRank]) -> float:
    """Let the ranks decode side by side until all samples are done; returns the seconds."""
    coming = [(0.0, index) for index in range(len(ranks))]
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


def read_lengths(lengths: str, tokenizer: str | None, history: int, max_tokens: int) -> Lengths:
    """The lengths that `--lengths` names: of a file of recorded rollouts, or drawn ones.

    Raises:
        ValueError: The file cannot be read, or has samples of several turns, or no more of a prompt than are history.
    """
    if lengths == LOG_NORMAL:
        return Lengths((), DRAWN_SAMPLES, history, max_tokens)
    path = Path(lengths)
    if not path.exists():
        raise ValueError(f"--lengths: expected {LOG_NORMAL} or a file of recorded rollouts; there is no file {lengths}")
    prompts = read_rollouts(path, tokenizer=tokenizer, max_tokens=max_tokens).prompts()
    if any(any(prompt.extensions.values()) for prompt in prompts):
        raise ValueError(f"--lengths: {path} has samples of several turns, which this simulation does not know")
    num_samples = min(len(prompt.samples) for prompt in prompts) - history
    if num_samples < 1:
        raise ValueError(f"--history {history}: {path} has prompts of {num_samples + history} samples; lower it")
    sizes = [(len(prompt.prompt_token_ids), [len(sample) for sample in prompt.samples]) for prompt in prompts]
    return Lengths(sizes, num_samples, history, max_tokens)


def command(
    *,
    ranks: Annotated[str, typer.Option(metavar="N[,N...]", help="Numbers of ranks, a row for each.")] = "1,8,64",
    lengths: Annotated[str, typer.Option(metavar="FILE", help=f"Recorded rollouts, or {LOG_NORMAL}.")] = LOG_NORMAL,
    slots: Annotated[int, typer.Option(min=1, max=4096, help="Sequences that a rank decodes at a time.")] = 32,
    prompts: Annotated[int, typer.Option(min=1, max=4096, help="Prompts of a step per rank.")] = 8,
    history: Annotated[
        int, typer.Option(min=0, max=4096, help="Earlier samples of each prompt, whose mean length is expected.")
    ] = 0,
    max_tokens: Annotated[int, typer.Option(min=1, max=131072, help="Truncate samples to this many tokens.")] = 8192,
    tokenizer: options.TokenizerFolder = None,
    json_file: options.JsonFile = None,
) -> None:
    """Simulate the rollouts of a training step on many ranks: how long it takes, and how long ranks are idle.

    The scheduler and the rules by which ranks share samples are the real ones; the time of a decode step is stated.
    """
    counts = options.parse_counts("--ranks", ranks)
    environment = read_environment(torch.device("cpu"))
    drawn = read_lengths(lengths, tokenizer, history, max_tokens)
    simulation = Simulation(lengths=drawn, curve=options.H200_CURVE, num_slots=slots, num_prompts=prompts)
    source = f"{LOG_NORMAL} lengths" if lengths == LOG_NORMAL else f"lengths of {Path(lengths).name}"
    known = f"{history} earlier samples" if history else "no history"
    per_rank = f"{prompts} prompts of {drawn.num_samples} samples and {slots} slots per rank"
    title = f"Simulation of ranks: {source}, {known}, {per_rank}"
    publish(title, {"rows": [simulation.row(count) for count in counts]}, __doc__, environment, json_file)
