"""Which training prompt is drawn when (`data.order`)."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from srtrl.types import RolloutGroup


class Order:
    """Which training prompt is drawn when."""

    num_prompts: int

    def prompt_of(self, draw: int) -> int:
        """Prompt index of draw `draw` of the run (0-based)."""
        raise NotImplementedError

    def epochs(self, num_draws: int) -> dict[str, float]:
        """The metrics `data/epoch...` after `num_draws` draws."""
        raise NotImplementedError

    def observe(self, groups: Sequence[RolloutGroup], num_draws: int) -> None:
        """A step has these groups, and the run has had `num_draws` draws; called on all ranks."""

    def save(self, folder: Path) -> None:
        """Write into a checkpoint what does not follow from the number of draws."""

    def load(self, folder: Path) -> None:
        """Read what `save` has written."""


class DataOrder(Order):
    """The prompts in each epoch in a seeded permutation (or as they are), laid end to end.

    A pure function of (seed, place in the run), so later draws are known in advance.

    Draw number `d` of a run is place `d % num_prompts` of the permutation of epoch `d // num_prompts`. A step takes the
    next draws, with dynamic sampling as many as it needs, and may cross an epoch's end, so no prompt is left over.
    """

    def __init__(self, num_prompts: int, *seeds: int, is_shuffled: bool = True) -> None:
        if num_prompts < 1:
            raise ValueError("the task has no training prompts: check task.options (and what was dropped at load)")
        self.num_prompts = num_prompts
        self.seeds = seeds
        self.is_shuffled = is_shuffled
        self._epoch = -1
        self._permutation: npt.NDArray[np.int64] = np.arange(num_prompts)

    def prompt_of(self, draw: int) -> int:
        """Prompt index of draw `draw` of the run (0-based)."""
        epoch, place = divmod(draw, self.num_prompts)
        if epoch != self._epoch and self.is_shuffled:
            self._permutation = np.random.default_rng((*self.seeds, epoch)).permutation(self.num_prompts)
            self._epoch = epoch
        return int(self._permutation[place])

    def epochs(self, num_draws: int) -> dict[str, float]:
        """The metric `data/epoch` after `num_draws` draws."""
        return {"data/epoch": num_draws / self.num_prompts}
