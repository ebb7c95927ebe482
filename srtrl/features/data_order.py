"""Orders of the training prompts that depend on how earlier samples fared (`data.order`, docs/data.md).

An order is a pure function `(seed, epoch, statistics) -> prompt indices`: which prompts an epoch has, in this order. It
is asked again in each step, and the run draws the first prompts of its answer that this epoch has not had; where none
is left, the next epoch begins. Draws that are not opened yet (run-aheads decode them early) get an answer by what is
known now, which may change until they are opened: then a run-ahead was for nothing, or is a draft of a later draw.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file
from safetensors.numpy import save as to_safetensors

from srtrl.files import write_atomic
from srtrl.resolve import Caught, describe_error, describe_value, resolve_part
from srtrl.tasks.order import Order
from srtrl.types import RolloutGroup

Numbers = npt.NDArray[np.float64]
FILE = "data_order.safetensors"
"""File of a checkpoint."""
FIRST_SHARE = 0.5
"""`skip_silent` at first: share of prompts without a signal at their last visit that are visited again."""
SHARE_STEP, MIN_SHARE, MAX_SHARE = 0.01, 0.05, 0.95
"""Change of this share per step, and its limits."""
MIN_PROBABILITY = 0.01
"""Minimum probability of a visit, after any number of visits without a signal."""
TARGETS = {"right": 0.25 / 3, "wrong": 0.5 / 3}
"""Share of a step's groups that may be all right, or all wrong; with more of them fewer are visited."""


@dataclass(kw_only=True, slots=True)
class PromptStatistics:
    """Statistics of the samples so far. Arrays have an entry for each prompt; an order must not change them.

    A group has no signal where its graded samples have equal rewards: it is *all right* if all are correct, else *all
    wrong*. Groups without a graded sample do not count.
    """

    num_visits: npt.NDArray[np.int64]
    """Groups so far."""
    mean_reward: npt.NDArray[np.float64]
    """Mean reward of the last group; NaN before the first."""
    num_right: npt.NDArray[np.int64]
    """Number of the last consecutive groups that were all right."""
    num_wrong: npt.NDArray[np.int64]
    """Number of the last consecutive groups that were all wrong."""
    right_shares: npt.NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    """Share of groups that were all right, in each step that began after the first epoch."""
    wrong_shares: npt.NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    """Share of groups that were all wrong, in the same steps."""


OrderFunction = Callable[[int, int, PromptStatistics], Sequence[int] | npt.NDArray[np.int64]]


def shuffled(seed: int, epoch: int, statistics: PromptStatistics) -> npt.NDArray[np.int64]:
    """All prompts, shuffled anew in each epoch."""
    return np.random.default_rng((seed, epoch)).permutation(len(statistics.num_visits))


def as_is(seed: int, epoch: int, statistics: PromptStatistics) -> npt.NDArray[np.int64]:
    """All prompts, as the task has them."""
    return np.arange(len(statistics.num_visits))


def skip_silent(seed: int, epoch: int, statistics: PromptStatistics) -> npt.NDArray[np.int64]:
    """As `shuffled`, without most prompts whose last visits gave no signal: GRESO (arXiv 2506.02177, section 4).

    After z visits without a signal a prompt is visited with probability max(p^z, 0.01). There is a p for all right and
    one for all wrong; a step with more such groups than its target lowers it by 0.01, another one raises it (as GRESO's
    code has it, from the second epoch on).
    """
    right = _probability(statistics.num_right, statistics.right_shares, TARGETS["right"])
    wrong = _probability(statistics.num_wrong, statistics.wrong_shares, TARGETS["wrong"])
    is_visited = np.random.default_rng((seed, epoch, 1)).random(len(right)) < right * wrong
    order = shuffled(seed, epoch, statistics)
    return order[is_visited[order]] if is_visited.any() else order


def _probability(num_silent: npt.NDArray[np.int64], shares: Numbers, target: float) -> Numbers:
    """The probability of each prompt to be visited, by one of its two counts."""
    p = FIRST_SHARE
    for share in shares:
        p = min(MAX_SHARE, max(MIN_SHARE, p - SHARE_STEP if share >= target else p + SHARE_STEP))
    return np.maximum(np.power(p, num_silent), MIN_PROBABILITY)


class StatisticsOrder(Order):
    """The draws of an order by name; see the module.

    Args:
        name: `data.order`.
        num_prompts: Of the task.
        seed: The recipe's.

    Raises:
        ValueError: there is no such order, or it returns what is no order.
    """

    def __init__(self, name: str, num_prompts: int, seed: int) -> None:
        self.num_prompts = num_prompts
        self._name, self._seed = name, seed
        self._function: OrderFunction = resolve_part("data.order", name)
        self._drawn: list[tuple[int, int]] = []  # (epoch, prompt) of each draw of the steps so far
        self._ahead: list[tuple[int, int]] = []  # of those after them, by what is known now
        zeros = np.zeros(num_prompts, np.int64)
        self.statistics = PromptStatistics(
            num_visits=zeros, mean_reward=np.full(num_prompts, np.nan), num_right=zeros.copy(), num_wrong=zeros.copy()
        )
        self.prompt_of(0)  # raises what a run would raise later

    def prompt_of(self, draw: int) -> int:
        """See `Order`; of a draw of a later step by what is known now."""
        while draw >= len(self._drawn) + len(self._ahead):
            self._look_ahead()
        later = draw - len(self._drawn)
        return (self._drawn[draw] if later < 0 else self._ahead[later])[1]

    def epochs(self, num_draws: int) -> dict[str, float]:
        """`data/epoch` after all draws so far, and the share of the prompts that this epoch leaves out."""
        self.prompt_of(num_draws)
        epoch = self._ahead[0][0]
        num_drawn, num_ahead = (sum(one == epoch for one, _ in some) for some in (self._drawn, self._ahead))
        num_all = num_drawn + num_ahead
        return {"data/epoch": epoch + num_drawn / num_all, "data/left_out": 1 - num_all / self.num_prompts}

    def observe(self, groups: Sequence[RolloutGroup], num_draws: int) -> None:
        """See `Order`."""
        self.prompt_of(num_draws)  # other ranks may have opened the last draws
        is_later = self._ahead[0][0] > 0
        self._drawn += self._ahead[: num_draws - len(self._drawn)]
        self._ahead.clear()
        known, num_right, num_wrong = self.statistics, 0, 0
        for group in groups:
            if not (graded := group.graded):
                continue
            prompt, rewards = self._drawn[group.draw_index][1], [rollout.grade.reward for rollout in graded]
            is_silent = len(set(rewards)) == 1
            is_right = is_silent and all(rollout.grade.outcome == "correct" for rollout in graded)
            is_wrong = is_silent and not is_right
            known.num_visits[prompt] += 1
            known.mean_reward[prompt] = np.mean(rewards)
            known.num_right[prompt] = (known.num_right[prompt] + 1) * is_right
            known.num_wrong[prompt] = (known.num_wrong[prompt] + 1) * is_wrong
            num_right, num_wrong = num_right + is_right, num_wrong + is_wrong
        if is_later:
            known.right_shares = np.append(known.right_shares, num_right / len(groups))
            known.wrong_shares = np.append(known.wrong_shares, num_wrong / len(groups))

    def save(self, folder: Path) -> None:
        """Write the draws so far and the statistics."""
        statistics = {item.name: getattr(self.statistics, item.name) for item in fields(PromptStatistics)}
        drawn = np.array(self._drawn, np.int64).reshape(-1, 2)
        write_atomic(folder / FILE, to_safetensors({"drawn": drawn, **statistics}))

    def load(self, folder: Path) -> None:
        """Read what `save` has written (a resume has compared the file with its checksum)."""
        arrays = load_file(folder / FILE)
        self._drawn = [(epoch, prompt) for epoch, prompt in arrays.pop("drawn").tolist()]
        self._ahead.clear()
        self.statistics = PromptStatistics(**arrays)

    def _look_ahead(self) -> None:
        """Append the rest of the epoch, or the next epoch where nothing is left of it."""
        epoch = self._ahead[-1][0] + 1 if self._ahead else self._drawn[-1][0] if self._drawn else 0
        drawn = set[int]()
        for number, prompt in reversed(self._drawn):
            if number != epoch:
                break
            drawn.add(prompt)
        rest = [prompt for prompt in self._ask(epoch) if prompt not in drawn]
        if not rest:
            epoch, rest = epoch + 1, self._ask(epoch + 1)
        self._ahead += [(epoch, prompt) for prompt in rest]

    def _ask(self, epoch: int) -> list[int]:
        """The function's answer for an epoch; ValueError if it is no order."""
        with Caught() as caught:
            given = list(self._function(self._seed, epoch, self.statistics))
            prompts: list[int] = np.array(given).tolist()
        where = f"data.order: {self._name}"
        if caught.error is not None:
            raise ValueError(f"{where} raised {describe_error(caught.error)}") from caught.error
        if not prompts:
            raise ValueError(f"{where} returned no prompt for epoch {epoch}")
        known = set[int]()
        for prompt in prompts:
            if type(prompt) is not int or not 0 <= prompt < self.num_prompts or prompt in known:
                expected = f"expected each prompt once, as a whole number from 0 to {self.num_prompts - 1}"
                twice = " again" if type(prompt) is int and prompt in known else ""
                raise ValueError(f"{where} returned {describe_value(prompt)}{twice} for epoch {epoch}: {expected}")
            known.add(prompt)
        return prompts
