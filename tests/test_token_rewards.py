"""Rewards of tokens and turns: from what a reward returns to the update, to the files of a run and their readers."""

import asyncio
import json
import re
from collections.abc import Callable
from dataclasses import replace
from math import fsum
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from bench_cases import printed
from environment_cases import TOKENIZER, ask, completion_of, encode, section_of
from rollout_cases import make_group
from task_cases import Rows, byte_tokenizer, prompt_of, to_grade
from tiny_run import PPO
from tokenizers import Tokenizer, decoders, models
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from update_cases import make_recipe as make_credit_recipe

from srtrl.algorithms.advantages import token_level
from srtrl.engine.stopping import token_texts
from srtrl.environments.base import EnvironmentBase, Step, Turn
from srtrl.environments.turns import EnvironmentTurns
from srtrl.recipe.schema import GradingSection, RewardSection
from srtrl.report.page import write_report
from srtrl.rollout.one_turn import OneTurn
from srtrl.tasks.grading import Grader, check_not_all_failed
from srtrl.tasks.reward_input import RewardInput, batched, isolated
from srtrl.trainer.credit import CreditAssigner, train_sequences
from srtrl.types import Grade

TEXT = "ab\ncd\n"
TOKEN_IDS = encode(TEXT)
VALUES: dict[str, Callable[[int], Any]] = {
    "numbers": lambda n: [0.1] * n,
    "tuple of integers": lambda n: tuple(range(n)),
    "array": lambda n: np.arange(n, dtype=np.float32),
    "tensor": lambda n: torch.arange(n) / 4,
}
FITS = "one number, or one for each of the {n} sampled tokens of a sample of prompt `{p}`; it returned {m} numbers"
AT_LAST = "` at index {m} of {n} sampled tokens of a sample of prompt `{p}`: .* a finite number"
WRONG: dict[str, tuple[Callable[[int], Any], str]] = {
    "short": (lambda n: [0.5] * (n - 1), FITS),
    "nan": (lambda n: [0.0] * (n - 1) + [float("nan")], AT_LAST + ".* nan"),
    "none": (lambda n: [0.5] * (n - 1) + [None], AT_LAST + r" \(0.0 where .* None"),
    "text": (lambda n: [0.5] * (n - 1) + ["1"], AT_LAST + ", it returned '1'"),
    "matrix": (lambda n: np.zeros((2, 1)), "must return a finite number, it returned array"),
    "mapping": (lambda n: {0: 1.0}, "must return a finite number, it returned {{0: 1.0}}"),
}


def here(sample: RewardInput) -> Any:
    """What the prompt's answer names."""
    kind = sample.prompt.answer
    return (VALUES[kind] if kind in VALUES else WRONG[kind][0])(sample.num_tokens)


@isolated
def apart(sample: RewardInput) -> Any:
    return here(sample)


@batched
def together(samples: list[RewardInput]) -> Any:
    return [here(sample) for sample in samples]


async def awaited(sample: RewardInput) -> Any:
    await asyncio.sleep(0)
    return here(sample)


def quarter(sample: RewardInput) -> float:
    return 0.25


def lines(sample: RewardInput) -> list[float]:
    """1 on each token that ends a line."""
    return [float("\n" in text) for text in sample.token_texts]


@isolated
def lines_apart(sample: RewardInput) -> list[float]:
    """The same, asked twice."""
    return [min(pair) for pair in zip(lines(sample), lines(sample), strict=True)]


def section(name: str, weight: float = 1.0) -> RewardSection:
    return RewardSection(name=f"{__name__}:{name}", weight=weight)


def grader_of(*rewards: RewardSection) -> Grader:
    return Grader(Rows(None), rewards, GradingSection(num_workers=1))


def grades_of(grader: Grader, *lengths: int, kind: str = "") -> list[Grade]:
    """Of samples with so many of the tokens of `TEXT`."""
    with OneTurn(TOKENIZER) as turns:
        others: dict[str, Any] = {"texts_of": turns.texts_of, "max_new_tokens": 100}
        tickets = [
            grader.submit(to_grade(prompt_of(kind, index), TEXT, "stop", n, token_ids=TOKEN_IDS[:n], **others))
            for index, n in enumerate(lengths)
        ]
        return grader.collect(tickets)


# --- What a reward returns --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", ["here", "apart", "together", "awaited"])
def test_a_list_has_a_number_for_each_token_or_is_an_error(function: str, caplog: pytest.LogCaptureFixture) -> None:
    """An error names the reward and both lengths, the log the prompt. A single number stands on the last token."""
    lengths = [len(TOKEN_IDS), 2]
    with grader_of(section(function, weight=-2.0), section("quarter")) as grader:
        given = {kind: grades_of(grader, *lengths, kind=kind) for kind in VALUES}
        failed, logged = {}, []
        for kind in WRONG:
            caplog.clear()
            failed[kind] = grades_of(grader, *lengths, kind=kind)
            logged += [line.partition(" grading")[0] for line in caplog.messages]
    for kind, grades in given.items():
        for grade, n in zip(grades, lengths, strict=True):
            values = [float(value) for value in VALUES[kind](n)]
            assert grade.parts == {function: fsum(values), "quarter": 0.25}
            assert grade.reward == -2.0 * grade.parts[function] + 0.25
            weighted = [-2.0 * value for value in values]
            assert grade.token_rewards == (*weighted[:-1], weighted[-1] + 0.25)
    for kind, grades in failed.items():
        for index, grade in enumerate(grades):
            assert (grade.outcome, grade.reward, grade.token_rewards) == ("error", 0.0, None)
            at_fault = index * int(function != "together")  # a call for all samples fails for all
            n = lengths[at_fault]
            pattern = f"reward `{function}.*" + WRONG[kind][1].format(n=n, m=n - 1, p=f"p{at_fault}")
            assert re.search(pattern, grade.detail), grade.detail
        group = make_group(0, ["wrong"] * 2)
        samples = [replace(it, grade=grade) for it, grade in zip(group.rollouts, grades, strict=True)]
        with pytest.raises(ValueError, match=r"^step 3: none of the 2 samples could be graded, all for the same"):
            check_not_all_failed([replace(group, rollouts=samples)], "step 3")
    assert logged == ["prompt p0:"] * len(WRONG), "each reason once"


def test_a_reward_reads_the_texts_of_tokens_also_in_a_worker() -> None:
    with grader_of(section("lines"), section("lines_apart", weight=2.0)) as grader:
        grades = grades_of(grader, len(TOKEN_IDS), len(TOKEN_IDS))
    for grade in grades:
        assert grade.token_rewards == tuple(3.0 * ("\n" in TOKENIZER.decode([token])) for token in TOKEN_IDS)
        assert grade.reward == 3.0 * TEXT.count("\n")


def words_tokenizer() -> PreTrainedTokenizerBase:
    """As of Llama 2: a text loses its first space when it is decoded, and rare characters come as bytes."""
    tokens = ["<unk>", "\u2581a", "\u2581b", "c", *(f"<0x{byte:02X}>" for byte in range(256))]
    model = models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[], byte_fallback=True)
    tokenizer = Tokenizer(model)
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)  # type: ignore[no-untyped-call]


def test_texts_of_tokens_join_to_the_text() -> None:
    """Also where characters come in pieces, where the text of a token depends on the one before, and of noise."""
    of_bytes, of_words = byte_tokenizer("$A"), words_tokenizer()
    euro = of_bytes("a€\n")["input_ids"]
    assert token_texts(of_bytes, [0, *euro, 1]) == ["", "a", "", "", "€", "\n", ""]
    assert token_texts(of_bytes, euro[:-2]) == ["a", "", "�"]
    as_bytes = [4 + byte for byte in "€".encode()]
    assert token_texts(of_words, [1, 2, 3, 1, *as_bytes, 2]) == ["a", " b", "c", " a", "", "", "€", " b"]
    rng = np.random.default_rng(0)
    for tokenizer, size in ((of_bytes, 258), (of_words, 4 + 128), (TOKENIZER, 257)):
        for _ in range(20):
            token_ids = rng.integers(1, size, 30).tolist()
            texts = token_texts(tokenizer, token_ids)
            assert (len(texts), "".join(texts)) == (30, tokenizer.decode(token_ids, skip_special_tokens=True))


# --- Turns ------------------------------------------------------------------------------------------------------------


class Paid(EnvironmentBase):
    """Pays 0.5, 1, 1.5, ... for the turns, and says something after each."""

    def step(self, turn: Turn) -> Step:
        return Step(observation=f"after {turn.index}", reward=(turn.index + 1) / 2)


def last_turn_paid(sample: RewardInput) -> list[float]:
    return sample.on_turns([0.0] * (sample.num_turns - 1) + [1.0])


def test_a_reward_of_each_step_stands_on_the_last_token_of_its_turn() -> None:
    """Observations have no numbers; the reward of an environment is a single number where its last step alone pays."""
    said = [encode("first"), encode("in two"), encode("x")]
    with EnvironmentTurns(section_of(Paid, max_turns=3), TOKENIZER) as turns:
        completion = completion_of(said[0])
        for later in said[1:]:
            completion = completion_of(later, completion, ask(turns, completion).extension)
        conversation = ask(turns, completion).conversation
        assert conversation is not None
        token_ids = [token for part in said for token in part]
        assert [token_ids[turn.tokens] for turn in conversation.turns] == said
        shown = [(turn.text, "".join(turn.observations).strip(), turn.reward) for turn in conversation.turns]
        assert shown == [("first", "after 0", 0.5), ("in two", "after 1", 1.0), ("x", "", 1.5)]
        of_turns: dict[str, Any] = {"token_ids": token_ids, "turns": conversation.turns, "texts_of": turns.texts_of}
        of_turns["num_tokens"] = len(token_ids)
        sections = [RewardSection(name="environment", weight=2.0), section("last_turn_paid")]
        with grader_of(*sections) as grader:
            ticket = grader.submit(to_grade(prompt_of("a"), conversation.policy_text, **of_turns))
            [grade] = grader.collect([ticket])
        assert "".join(ticket.sample.token_texts) == "firstin twox"
    expected = np.zeros(len(token_ids))
    expected[np.cumsum([len(part) for part in said]) - 1] = [1.0, 2.0, 3.0 + 1.0]
    assert grade.token_rewards == tuple(expected)
    assert (grade.reward, grade.parts) == (7.0, {"environment": 3.0, "last_turn_paid": 1.0})
    last_alone = [replace(turn, reward=turn.reward * (turn.text == "x")) for turn in conversation.turns]
    with grader_of(*sections[:1]) as grader:
        ticket = grader.submit(to_grade(prompt_of("a"), "", **of_turns | {"turns": last_alone}))
        assert grader.collect([ticket]) == [Grade(reward=3.0, parts={"environment": 1.5}, outcome="graded")]


# --- What is learned --------------------------------------------------------------------------------------------------


@token_level
def immediate(token_rewards: Tensor, values: Tensor, mask: Tensor, **_: Any) -> Tensor:
    return token_rewards


def total(rewards: Tensor) -> Tensor:
    return rewards


def test_token_level_advantages_read_each_token_and_others_the_sum() -> None:
    """The sum is that of the grade: 0.1 + 0.2 + 0.3 in any order is the same. A truncated sample has its own too."""
    values = [(0.1, 0.2, 0.3), (0.3, 0.2, 0.1, 0.0), (0.0, 0.6)]
    group = make_group(5, ["wrong"] * 4, lengths=[3, 4, 2, 3], rewards=[0.6, 0.6, 0.6, 1.0], cut=[1])
    grades = [replace(one.grade, token_rewards=own) for one, own in zip(group.rollouts, [*values, None], strict=True)]
    group.rollouts[:] = [replace(one, grade=grade) for one, grade in zip(group.rollouts, grades, strict=True)]
    expected = {"immediate": [*values, (0.0, 0.0, 1.0)], "total": [(0.6,) * 3, (0.6,) * 4, (0.6,) * 2, (1.0,) * 3]}
    for name, rows in expected.items():
        recipe = make_credit_recipe(algorithm={"advantage": f"{__name__}:{name}"})
        credit = CreditAssigner(recipe).assign_credit([group], train_sequences([group]))
        found = [sequence.advantages.tolist() for sequence in credit.sequences]
        assert found == [np.array(row, np.float32).tolist() for row in rows], name
    assert list(credit.advantages.values()) == [0.6, 0.6, 0.6, 1.0], "of `total`, in float64"


@batched
def by_text(samples: list[RewardInput]) -> list[list[float]]:
    """Of the texts of tokens, which the first rank makes for all."""
    return [[sum(text.encode()) % 4 / 4 for text in sample.token_texts] for sample in samples]


@pytest.fixture
def run(finished: Callable[..., Path]) -> Path:
    """A PPO run with a number for each token."""
    rewards = [{"name": f"{__name__}:by_text"}, {"name": "correct", "weight": 0.5}]
    return finished(rewards=rewards, **PPO)


# --- What is written and shown ----------------------------------------------------------------------------------------


def test_rewards_of_tokens_are_saved_and_shown(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = pq.read_table(run / "rollouts" / "step_000004.parquet").to_pylist()
    for row in rows:
        assert len(row["token_rewards"]) == len(row["token_ids"])
        assert row["reward_by_text"] == fsum(row["token_rewards"]) == row["reward"]
    shown = [json.loads(line) for line in printed("rollouts", run, "--limit", 100, "--json").splitlines()]
    expected = [{str(i): value for i, value in enumerate(row["token_rewards"]) if value} for row in rows]
    assert sorted(map(str, (row["token_rewards"] for row in shown))) == sorted(map(str, expected))
    text = printed("rollouts", run, "--limit", 100, "--sort", "-reward")
    first = max(rows, key=lambda row: row["reward"])
    numbers = [f"{index}: {value:.3g}" for index, value in enumerate(first["token_rewards"]) if value]
    assert f"correct 0; on tokens {', '.join(numbers[:8])}{', ...' * (len(numbers) > 8)}), advantage" in text
    monkeypatch.setattr("srtrl.report.charts.to_svg", lambda figure: "<svg></svg>")  # drawing takes seconds
    assert re.search(r'<span class="tag">on tokens \d+: 0\.\d', write_report(run).read_text(encoding="utf-8"))
