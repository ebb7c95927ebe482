"""Which prompt is drawn when: a pure function of (seed, place in the run), so that one can look ahead."""

import numpy as np
import numpy.typing as npt


class DataOrder:
    """A seeded permutation of the prompts for each epoch, laid end to end.

    Draw number `d` of a run is place `d % num_prompts` of the permutation of epoch `d // num_prompts`. A step takes the
    next draws, with dynamic sampling as many as it needs, and may cross an epoch's end, so no prompt is left over.
    """

    def __init__(self, num_prompts: int, seed: int) -> None:
        if num_prompts < 1:
            raise ValueError("the task has no training prompts: check task.options (and what was dropped at load)")
        self.num_prompts = num_prompts
        self.seed = seed
        self._epoch = -1
        self._permutation: npt.NDArray[np.int64] = np.empty(0, np.int64)

    def draws(self, first: int, count: int) -> list[int]:
        """Prompt indices of the draws `first`, ..., `first + count - 1` of the run (0-based)."""
        return [self._prompt_of(draw) for draw in range(first, first + count)]

    def _prompt_of(self, draw: int) -> int:
        epoch, place = divmod(draw, self.num_prompts)
        if epoch != self._epoch:
            self._permutation = np.random.default_rng((self.seed, epoch)).permutation(self.num_prompts)
            self._epoch = epoch
        return int(self._permutation[place])
