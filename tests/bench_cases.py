"""A simple drafter, and the command under test, for tests of the benchmark of drafters."""

from collections.abc import Sequence

import numpy as np
from typer.testing import CliRunner, Result

from srtrl.cli import app
from srtrl.drafters.base import DrafterBase
from srtrl.drafters.draft_tree import EMPTY_TREE, DraftTree, DraftTrees
from srtrl.tasks.reward_input import RewardInput

REPEATER = "bench_cases:Repeater"


def digit_share(sample: RewardInput) -> float:
    """Share of digits in the response."""
    return sum(character.isdigit() for character in sample.text) / max(1, len(sample.text))


class Repeater(DrafterBase):
    """Guesses that a sample says the same token again, three times."""

    def __init__(self, options: object = None) -> None:
        super().__init__()
        self.last: dict[int, int] = {}

    def propose(self, sequence_ids: Sequence[int], max_nodes: Sequence[int]) -> DraftTrees:
        return DraftTrees.of(
            self._tree(self.last[sequence_id], min(3, most)) if sequence_id in self.last else EMPTY_TREE
            for sequence_id, most in zip(sequence_ids, max_nodes, strict=True)
        )

    def observe(self, sequence_ids: Sequence[int], token_ids: Sequence[Sequence[int]]) -> None:
        for sequence_id, tokens in zip(sequence_ids, token_ids, strict=True):
            self.last[sequence_id] = tokens[-1]

    @staticmethod
    def _tree(token: int, num_nodes: int) -> DraftTree:
        return DraftTree(
            token_ids=np.full(num_nodes, token, np.int32),
            parents=np.arange(-1, num_nodes - 1, dtype=np.int32),
            scores=np.float32(0.9) ** np.arange(1, num_nodes + 1, dtype=np.float32),
        )


def bench(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["bench", "rollout", *(str(argument) for argument in arguments)])
