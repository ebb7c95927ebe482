"""When drafts are asked for: looks of several asks, pauses between them, and what a new rollout changes."""

from dataclasses import dataclass

import pytest

from srtrl.engine.asking import (
    FIRST_PAUSE,
    LEAST_LOOK,
    LONG_WAIT,
    LONGEST_LOOK,
    LOOK_SHARE,
    WASTE,
    WORTH_ASKING,
    YOUNG_STEPS,
    Asking,
)

PLAIN = 1.0
DRAFT = 0.05
"""Seconds of a step without drafts, and of an ask: where drafts bring nothing, it loses 5%."""


@dataclass(slots=True)
class Steps:
    """Steps of an engine whose drafts bring what it is told."""

    asking: Asking
    num_sequences: int = 64
    one_in: int = 1
    """Only one in so many sequences is asked for."""

    def ask(self, more_tokens: float, *, catch_up: float = DRAFT) -> bool:
        """One step; returns whether it asked."""
        was_asking = self.asking.asks_now
        self.asking.pay(PLAIN)
        if not self.asking.is_due(self.num_sequences):
            return False
        self.asking.asked()
        num_asked = self.num_sequences // self.one_in
        self.asking.learn(self.num_sequences, num_asked, more_tokens, PLAIN, PLAIN)
        seconds = DRAFT if was_asking else catch_up
        self.asking.record_seconds(self.num_sequences, seconds, seconds / self.one_in)
        return True

    def asks(self, num_steps: int, more_tokens: float = 0.0) -> int:
        """So many steps; returns how many asked."""
        return sum(self.ask(more_tokens) for _ in range(num_steps))

    def until_paused(self, more_tokens: float) -> int:
        """Steps until one does not ask; how many did."""
        count = 0
        while self.ask(more_tokens):
            count += 1
            assert count < 1000, "it never pauses"
        return count


def test_a_look_is_several_asks_and_one_to_catch_up() -> None:
    assert Steps(Asking(), num_sequences=16).until_paused(0.0) == LONGEST_LOOK + 1
    assert Steps(Asking(), num_sequences=256).until_paused(0.0) == LEAST_LOOK + 1


def test_the_first_asks_of_a_look_do_not_decide() -> None:
    """As when more is known than before: the chances were learned without a history; the first outcomes raise them."""
    steps = Steps(Asking(), num_sequences=16)
    assert all(steps.ask(more_tokens) for more_tokens in [0.0, 0.0, 0.02, 0.05, *[0.3] * (LONGEST_LOOK - 3)])
    assert steps.asks(100, 0.3) == 100


def test_a_clear_loss_ends_a_look_at_its_second_ask() -> None:
    assert Steps(Asking()).until_paused(-0.3) == 3


def test_looks_take_a_small_share_of_the_time() -> None:
    steps = Steps(Asking())
    steps.asks(2000)
    assert 0 < steps.asks(20_000) * DRAFT < 1.2 * WASTE * 20_000 * PLAIN


def test_a_look_at_some_of_the_sequences_has_more_asks_and_is_repeated_sooner() -> None:
    whole, part = Steps(Asking(), num_sequences=256), Steps(Asking(), num_sequences=256, one_in=8)
    assert part.until_paused(0.0) > whole.until_paused(0.0)
    for steps in (whole, part):
        steps.asks(20_000)
    num_whole, num_part = whole.asks(100_000), part.asks(100_000)
    assert 0.8 < num_part / 8 / num_whole < 1.2, "they take the same share of the time"


def test_what_comes_to_pay_is_found() -> None:
    steps = Steps(Asking())
    steps.asks(2000)
    pause = (LONGEST_LOOK + 1) * DRAFT / (WASTE * PLAIN)
    steps.asks(round(pause) + LONGEST_LOOK + 1, 0.5)
    assert steps.asks(100, 0.5) == 100


def test_catching_up_does_not_count_in_a_look_and_does_where_drafts_are_always_asked_for() -> None:
    """A tail comes once a rollout, and begins with catching up: if that costs more than it gains, it does not pay."""
    steps = Steps(Asking(), num_sequences=4)

    def tail() -> int:
        steps.asking.is_due(64)  # the class of a full batch, which does not ask
        return sum(steps.ask(0.2, catch_up=1.0) for _ in range(3))

    full = Steps(steps.asking)
    full.asks(4000)
    num_asks = [tail() for _ in range(60)]
    assert 3 in num_asks, "looks do not see what catching up costs"
    assert sum(num_asks[-20:]) < 40


def test_a_new_rollout_must_show_again_that_drafts_pay() -> None:
    """Without a history they pay at the end of a rollout, when siblings have spoken, and not at its beginning."""
    steps = Steps(Asking())
    assert steps.asks(50, 1.0) == 50
    steps.asking.begin_rollout(0.0)
    assert 1 < steps.until_paused(-0.1) <= 4
    again = Steps(Asking())
    assert again.asks(50, 1.0) == 50
    again.asking.begin_rollout(0.0)
    assert again.asks(50, 1.0) == 50


@pytest.mark.parametrize(("share", "looks"), [(0.1, False), (0.9, True)])
def test_better_known_samples_are_a_reason_to_look_at_once(share: float, looks: bool) -> None:
    steps = Steps(Asking())
    steps.asking.begin_rollout(0.0)
    steps.asks(2000)
    while not steps.ask(0.0):
        pass
    steps.until_paused(0.0)
    steps.asking.begin_rollout(share)
    assert (steps.asks(FIRST_PAUSE) > 1) == looks


def test_what_an_ask_takes_is_neither_that_of_a_compilation_nor_the_least_one() -> None:
    asking = Asking()
    seconds = [5.0, *[0.08, 0.12] * 20]
    for step in range(len(seconds) + 1):
        asking.is_due(1)
        asking.asked()
        if step:
            asking.record_seconds(1, seconds[step - 1], 0.0)
        if step == 2:
            assert asking.draft_seconds(1) == 0.08, "5 seconds were no measure of it"
    assert 0.095 < asking.draft_seconds(1) < 0.105
    assert asking.draft_seconds(64) == 0, "other numbers of sequences are not known"


def test_with_known_samples_no_look_begins_while_all_are_at_their_first_tokens() -> None:
    steps = Steps(Asking())
    steps.asking.begin_rollout(0.9)
    assert [steps.ask(0.3) for _ in range(YOUNG_STEPS + 1)] == [False] * YOUNG_STEPS + [True]
    new = Steps(Asking())
    new.asking.begin_rollout(0.0)
    assert new.asks(FIRST_PAUSE - 1) == 0
    assert new.ask(0.3), "where nothing is known, first tokens are not worse than others"


def test_first_tokens_do_not_end_asking() -> None:
    """What they show is not what asking brings: a rollout of many steps would do without drafts for their sake."""
    steps = Steps(Asking())
    for _ in range(20):
        steps.asking.begin_rollout(0.9)
        steps.asks(YOUNG_STEPS, -0.5)
        steps.asks(20, 0.3)
    steps.asking.begin_rollout(0.9)
    assert steps.asks(YOUNG_STEPS, -0.5) == YOUNG_STEPS
    assert steps.until_paused(-0.5) < 5, "the tokens behind them do"


def test_a_look_goes_on_while_its_last_ask_shows_that_it_pays() -> None:
    rising = [0.0, -0.04, 0.05, 0.15, 0.25, 0.25, 0.25]
    steps = Steps(Asking())
    assert all(steps.ask(more_tokens) for more_tokens in rising)
    assert sum(rising[1 : LEAST_LOOK + 1]) / LEAST_LOOK - DRAFT < WORTH_ASKING, "three asks do not show it"
    assert steps.asks(100, 0.25) == 100


def test_looks_of_all_classes_take_a_small_share_of_the_time_together() -> None:
    """A rollout passes through many numbers of sequences, a few steps each; each may have a look, not all at once."""
    asking = Asking()
    classes = [Steps(asking, num_sequences=1 << power) for power in range(8, -1, -1)]

    def rollout() -> list[int]:
        asking.begin_rollout(0.9)
        return [steps.asks(6) for steps in classes]

    first = rollout()
    assert 0 < sum(first) <= LONGEST_LOOK + 1, "those of nine classes would be many more"
    num_asks = [rollout() for _ in range(60)]
    assert all(sum(of_class) >= LEAST_LOOK for of_class in zip(first, *num_asks, strict=True)), "each has its own"
    later = sum(sum(rollout()) for _ in range(60))
    assert later * DRAFT < 2 * LOOK_SHARE * 60 * 9 * 6 * PLAIN


def test_a_class_that_lasts_has_a_look_soon_whatever_others_have_cost() -> None:
    """A few stragglers of many sequences decode for a long time: there drafts pay most."""
    asking = Asking()
    asking.begin_rollout(0.9)
    many = Steps(asking, num_sequences=256)
    many.asks(YOUNG_STEPS)
    many.until_paused(-0.5)
    assert Steps(asking, num_sequences=4).asks(LONG_WAIT + LONGEST_LOOK + 8, 0.5) > 8
