"""Rollouts of several ranks are those of one, whatever each of them decodes; how they deal, claim and wait."""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import pytest
from engine_cases import options, requests_for, tiny_policy
from environment_cases import PROMPTS, TOKENIZER, Digits, ask, collector_of, completion_of, grader_of, section_of
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_cases import FORKED, run_ranks
from torch._C._distributed_c10d import HashStore

from srtrl import ranks
from srtrl.drafters.base import DrafterBase
from srtrl.drafters.none import Drafter as NoDrafter
from srtrl.drafters.srt import Drafter as SrtDrafter
from srtrl.engine.engine import Engine
from srtrl.engine.stats import EngineStats, add_stats
from srtrl.environments.turns import EnvironmentTurns
from srtrl.features.run_ahead import RunAhead
from srtrl.features.sharing import SeveralRanks, deal
from srtrl.model.transformer import Transformer
from srtrl.ranks import RankError
from srtrl.rollout.collect import FixedDraws, collect_rollouts
from srtrl.rollout.dynamic_sampling import DrawsUntilFull
from srtrl.rollout.one_rank import OneRank
from srtrl.rollout.one_turn import OneTurn
from srtrl.tasks.reward_input import RewardInput, batched
from srtrl.types import Completion, Request, Rollout

pytestmark = FORKED


def half_tokens(sample: RewardInput) -> float:
    return sample.num_tokens / 2


def no_space(*_: object) -> NoReturn:
    raise OSError(28, "No space left")


@batched
def place_by_length(samples: Sequence[RewardInput]) -> list[float]:
    """Differs if anything but all samples is seen, in their order."""
    lengths = [sample.num_tokens for sample in samples]
    return [place + 0.01 * sum(other < length for other in lengths) for place, length in enumerate(lengths)]


@dataclass(kw_only=True, frozen=True)
class Case:
    """Two rollouts, one after the other, with a policy update between them."""

    num_draws: int = 5
    num_samples: int = 3
    slots: int = 2
    drafter: type[DrafterBase] = SrtDrafter
    is_dynamic: bool = False
    reward: str = "half_tokens"
    slow_rank: int = 1
    """It sleeps a random time before each decode step."""
    steps_ahead: int = 0
    """Rank 1 makes its first step when rank 0 has decoded all other samples, and as many steps for run-aheads."""
    broken: str = ""
    """Method of rank 1's engine or grader that raises."""


@dataclass(kw_only=True)
class Found:
    """Observations of one rank: in both rollouts, and at the end."""

    groups: list[Any] = field(default_factory=list)
    kept: list[list[int]] = field(default_factory=list)
    metrics: list[dict[str, float]] = field(default_factory=list)
    progress: list[tuple[int, int]] = field(default_factory=list)
    """Samples that are done, and that are requested."""
    num_decoded: int = 0
    """Samples that this rank has decoded."""
    history: dict[tuple[int, ...], list[list[int]]] = field(default_factory=dict)
    """Prompt -> what the drafter knows of it at the end, in no order."""


RUN_AHEAD = partial(RunAhead, max_slowdown=0.1)


class WatchedEngine(Engine):
    """Counts the samples that are decoded here, and calls `before_step`."""

    num_decoded = 0
    before_step: Callable[[], None]

    def add(self, request: Request) -> None:
        self.num_decoded += 1
        super().add(request)

    def step(self) -> list[Completion]:
        self.before_step()
        return super().step()


@cache
def policy() -> Transformer:
    return tiny_policy(vocab_size=290, scale=5.0)


def rollouts(case: Case) -> Found:
    """Runs on each rank."""
    limits = {"max_sequence_tokens": 128, "slots": case.slots}
    engine = WatchedEngine(
        policy(), options(**limits), tokenizer=TOKENIZER, drafter=case.drafter(), run_ahead=RUN_AHEAD
    )
    found, draws = Found(), list(enumerate(PROMPTS))
    with grader_of(f"{__name__}:{case.reward}") as grader, OneTurn(TOKENIZER) as turns:
        if case.broken and ranks.index() == 1:
            setattr(engine if case.broken == "step" else grader, case.broken, no_space)
        for _ in range(2):
            collector = collector_of(grader, turns, num_samples=case.num_samples)
            collector.on_progress = lambda *numbers: found.progress.append(numbers)
            engine.before_step = partial(before_step, engine, collector.ranks, case)
            if case.is_dynamic:
                until_full = DrawsUntilFull(
                    PROMPTS.__getitem__,
                    first_draw=0,
                    num_prompts=3,
                    max_draws=9,
                    keeps=lambda group: group.draw_index not in (0, 2, 3),
                )
                groups = collect_rollouts(engine, collector, until_full)
                kept = until_full.kept_groups(groups)
            else:
                engine.add_run_aheads(collector.requests(draws[case.num_draws :]) if case.steps_ahead else [])
                kept = groups = collect_rollouts(engine, collector, FixedDraws(draws[: case.num_draws]))
            found.groups.append([contents(one) for group in groups for one in group.rollouts])
            found.kept.append([group.draw_index for group in kept])
            assert engine.pool.num_used == 0
            found.metrics.append(engine.take_metrics() | collector.ranks.take_metrics())
            engine.end_step(has_new_weights=True)
    found.num_decoded = engine.num_decoded
    if isinstance(engine.drafter, SrtDrafter):
        known = engine.drafter.caches["train"]
        found.history = {key: sorted(one.tokens.tolist() for one in known.rollouts(key)) for key in known.prompts()}
    return found


def contents(rollout: Rollout) -> tuple[Any, ...]:
    response = rollout.response
    names = rollout.draw_index, rollout.sample_index, rollout.text, response.finish_reason, rollout.grade
    return *names, response.token_ids.tolist(), response.rollout_logprobs.tolist()


def before_step(engine: Engine, sharing: OneRank, case: Case) -> None:
    if ranks.count() == 1:
        return
    if ranks.index() == case.slow_rank:
        time.sleep(0.008 * random.random())
    if case.steps_ahead and ranks.is_main():
        ranks.add("steps ahead", sharing.read("finished") >= case.num_draws * case.num_samples - case.slots)
    while not ranks.is_main() and ranks.add("steps ahead", 0) < case.steps_ahead:
        time.sleep(0.001)


CASES = {
    "dynamic": Case(is_dynamic=True, reward="place_by_length"),
    "nothing to do": Case(num_draws=1, num_samples=1, drafter=NoDrafter),
    "one slow rank": Case(num_samples=4, reward="place_by_length", steps_ahead=20),
}


@pytest.mark.parametrize("name", CASES)
def test_rollouts_do_not_depend_on_the_number_of_ranks(name: str) -> None:
    case = CASES[name]
    found, truth = run_ranks(2, rollouts, case), rollouts(case)
    assert truth.groups[0]
    for one in found:
        assert one.groups == truth.groups
        assert one.kept == truth.kept
        assert one.history == truth.history
        assert one.metrics == found[0].metrics
        for same in ("engine/tokens", "engine/cache_hit_rate"):
            assert [row.get(same) for row in one.metrics] == [row.get(same) for row in truth.metrics]
    assert sum(one.num_decoded for one in found) == truth.num_decoded  # nothing was decoded twice
    done = [number for one in found for number, _ in one.progress]
    assert sorted(done) == sorted(number for number, _ in truth.progress)
    assert case.is_dynamic or {total for _, total in truth.progress} == {case.num_draws * case.num_samples}
    for row in found[0].metrics:
        assert 0 <= row["engine/ranks_idle_share"] < 1
        assert row["engine/rank_seconds_max"] > 0
        assert row["engine/tokens_per_decode_step"] == 1 or case.drafter is not NoDrafter
    assert not [name for row in truth.metrics for name in row if "rank" in name]
    if case.steps_ahead:  # who is idle takes what waits for a slow rank, and then runs ahead
        assert found[0].metrics[0]["engine/rank_claims"] == case.num_draws * case.num_samples / 2 - case.slots
        assert found[0].metrics[0]["engine/run_ahead_tokens"] >= case.steps_ahead


def follow() -> dict[str, float]:
    """Both rollouts have one sample, on rank 0: the other has nothing to do in the first but to run ahead.

    Rank 0 waits until it has: on a busy machine it would be done before that begins.
    """

    def take_part() -> None:
        while ranks.add("steps ahead", int(ranks.index() > 0)) < 2 and ranks.is_main():
            time.sleep(0.001)

    engine = WatchedEngine(
        policy(), options(max_sequence_tokens=128), tokenizer=TOKENIZER, drafter=SrtDrafter(), run_ahead=RUN_AHEAD
    )
    engine.before_step = take_part
    grader = grader_of(f"{__name__}:half_tokens")
    for draw in range(2):
        collector = collector_of(grader, OneTurn(TOKENIZER), num_samples=1)
        if draw == 0 and ranks.index() > 0:  # not on rank 0
            engine.add_run_aheads(collector.requests([(1, PROMPTS[0])]))
        collect_rollouts(engine, collector, FixedDraws([(draw, PROMPTS[0])]))
        metrics = engine.take_metrics() | collector.ranks.take_metrics()
        engine.end_step(has_new_weights=True)
    return metrics


def test_a_sample_follows_the_run_ahead_of_another_rank() -> None:
    metrics, other = run_ranks(2, follow)
    assert other == metrics
    assert metrics["engine/text_tokens_repeated"] > 0


def fail(case: Case) -> str:
    with pytest.raises((RankError, OSError)) as caught:
        rollouts(case)
    return f"{caught.type.__name__}: {caught.value}"


@pytest.mark.parametrize("broken", ["step", "collect"])
def test_all_ranks_end_at_once_where_one_fails_and_say_which(broken: str) -> None:
    case = Case(broken=broken, is_dynamic=broken == "collect", slow_rank=0)
    message = "[Errno 28] No space left"
    assert run_ranks(2, fail, case) == [f"RankError: rank 1 of 2: {message}", f"OSError: {message}"]


# --- Rules, without processes ----------------------------------------------------------------------------------------


@given(
    lengths=st.lists(st.one_of(st.none(), st.floats(0, 1e5)), min_size=1, max_size=40),
    num_samples=st.integers(1, 9),
    num_ranks=st.integers(1, 9),
)
def test_dealing_is_balanced(lengths: list[float | None], num_samples: int, num_ranks: int) -> None:
    requests = requests_for([(1, 2 + i) for i in range(len(lengths))], num_samples=num_samples)
    lines = deal(requests, dict(enumerate(lengths)), num_ranks)
    assert sorted(chain(*lines), key=lambda one: (one.draw_index, one.sample_index)) == requests
    known = [length for length in lengths if length is not None]
    average = sum(known) / len(known) if known else 1.0
    real = [max(1.0, average if length is None else length) for length in lengths]
    loads = [sum(real[one.draw_index] for one in line) for line in lines]
    assert max(loads) <= 1.000001 * sum(loads) / num_ranks + max(real)
    for line in lines:
        order = [(one.sample_index, -real[one.draw_index], one.draw_index) for one in line]
        assert order == sorted(order)


def test_prompts_are_whole_where_that_balances() -> None:
    table: list[tuple[list[float | None], list[str]]] = [
        ([None] * 4, ["0 2 0 2 0 2", "1 3 1 3 1 3"]),
        ([None] * 5, ["0 2 4 0 2 4 0 2", "1 3 1 3 1 3 4"]),  # the last prompt is split
        ([100, 500, 300, 200], ["1 0 1 0 1", "2 3 2 3 2 3 0"]),
        ([None], ["0", "0", "0", ""]),
        ([10, None, 30], ["2 2", "0 0 2 0", "1 1 1"]),
    ]
    for lengths, expected in table:
        requests = requests_for([(1, 2 + i) for i in range(len(lengths))])
        lines = deal(requests, dict(enumerate(lengths)), len(expected))
        assert [" ".join(str(one.draw_index) for one in line) for line in lines] == expected


@settings(deadline=None)  # the machine may be busy
@given(data=st.data())
def test_every_sample_is_taken_once_and_none_waits_where_a_rank_is_idle(data: st.DataObject) -> None:
    count = data.draw(st.integers(2, 5))
    requests = requests_for([(1, 2 + i) for i in range(data.draw(st.integers(1, 6)))], num_samples=4)
    lines = deal(requests, dict.fromkeys(range(len(requests) // 4)), count)
    rank_of = partial(ranks.use, count=count, store=HashStore())
    shares = []
    for rank in range(count):
        with rank_of(rank):
            shares.append(SeveralRanks())
            shares[rank].wait_in(lines)
    taken: list[list[Request]] = [[] for _ in lines]
    for rank, wanted in data.draw(st.lists(st.tuples(st.integers(0, count - 1), st.integers(0, 4)), max_size=30)):
        left = len(requests) - sum(map(len, taken))
        with rank_of(rank):
            found = shares[rank].claim(wanted)
        taken[rank] += found
        assert len(found) == min(wanted, left)
        assert shares[rank].num_claimed == sum(one not in lines[rank] for one in taken[rank])
    with rank_of(0):
        taken[0] += shares[0].claim(len(requests))
    assert sorted(map(id, chain(*taken))) == sorted(map(id, requests))


def test_a_rank_waits_as_long_as_another_makes_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """No sample finishes meanwhile: a decode step, or a wait for a tool, is enough."""
    now = 0.0
    monkeypatch.setattr("srtrl.features.sharing.time", SimpleNamespace(monotonic=lambda: now, sleep=lambda _: None))
    rank_of = partial(ranks.use, count=2, store=HashStore(), timeout_seconds=30)
    with rank_of(0):
        busy = SeveralRanks()
    with rank_of(1):
        idle = SeveralRanks()
    for _ in range(4):
        now += 20
        with rank_of(0):
            busy.report_progress()
        with rank_of(1):
            idle.wait_for_others(sleeps=True)
    now += 29
    with rank_of(1):
        idle.wait_for_others(sleeps=False)
    now += 2
    message = (
        "rank 1 of 2 waited for samples of the others for more than 30 seconds in which none of them made progress"
    )
    with rank_of(1), pytest.raises(RankError, match=message):
        idle.wait_for_others(sleeps=True)


def test_metrics_of_several_engines_are_those_of_one_that_did_it_all() -> None:
    stats = add_stats(
        [
            EngineStats(num_steps=1, num_decodes=2, num_tokens=6, num_drafts=2, num_slots=4, num_draws=1, max_pages=3),
            EngineStats(num_steps=3, num_decodes=6, num_tokens=6, num_drafts=1, num_slots=4, num_draws=3, max_pages=2),
        ]
    )
    stats.seconds[:] = 2.0 ** np.arange(10)
    metrics = stats.metrics(2)
    found = {name: metrics[f"engine/{name}"] for name in ("decode_steps", "slots", "pages_in_use_max")}
    assert found == {"decode_steps": 4, "slots": 8, "pages_in_use_max": 5}
    assert metrics["engine/tokens_per_decode_step"] == 12 / 8
    assert metrics["engine/slots_in_use_mean"] == 4  # of both
    seconds = [metrics[f"engine/{part}_seconds"] for part in ("schedule", "drafting", "forward", "sample")]
    assert seconds == [(1 + 512) / 2, (2 + 4 + 128 + 256) / 2, (8 + 16 + 32) / 2, 64 / 2]  # of each


def test_metrics_of_a_users_drafter_are_means_or_the_sums_that_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """No name decides it: a mean may be called anything."""

    class Counting(NoDrafter):
        summed_metrics = frozenset({"engine/my_mean"})

        def take_metrics(self) -> dict[str, float]:
            return {"engine/my_mean": 3.0, "engine/my_count": 3.0}

    monkeypatch.setattr(ranks, "gather", lambda value, what: [value, value])
    engine = Engine(policy(), options(), drafter=Counting())
    assert not {"engine/my_mean", "engine/my_count"} & set(engine.take_metrics())  # it drafts nothing
    engine.drafter = type("Drafter", (DrafterBase,), dict(Counting.__dict__))()
    metrics = engine.take_metrics()
    assert (metrics["engine/my_mean"], metrics["engine/my_count"]) == (6.0, 3.0)


def test_a_record_of_any_number_of_ranks_is_found_by_any(tmp_path: Path) -> None:
    path = tmp_path / "observations" / "step_000001.jsonl"
    said = [completion_of((20, 21 + sample), sample=sample) for sample in range(3)]
    parts: Any = section_of(Digits), TOKENIZER, path.parent
    answers = []
    for rank, completion in enumerate(said):
        with ranks.use(rank, len(said)), EnvironmentTurns(*parts) as conversations:
            conversations.begin_step(1)
            answers.append(ask(conversations, completion))
    names = ["step_000001.jsonl", "step_000001.rank1.jsonl", "step_000001.rank2.jsonl"]
    assert sorted(one.name for one in path.parent.iterdir()) == names
    known = {name: (path.parent / name).read_bytes() for name in names}
    with (path.parent / names[2]).open("ab") as file:
        file.write(b'{"key"')  # that rank is still writing
    with ranks.use(1, len(said)), EnvironmentTurns(*parts) as conversations:
        conversations.begin_step(1)
        for completion, answer in zip(said, answers, strict=True):
            assert ask(conversations, completion).extension == answer.extension
    assert {name: (path.parent / name).read_bytes() for name in names[:2]} == {name: known[name] for name in names[:2]}
