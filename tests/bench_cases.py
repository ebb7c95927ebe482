"""A simple drafter and reward, a trace, and the commands under test, for tests of the benchmarks."""

import json
from pathlib import Path

import numpy as np
from typer.testing import CliRunner, Result

from srtrl.cli import app
from srtrl.drafters.base import DrafterBase, Int32Array, Int64Array
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

    def propose(self, slots: Int64Array, max_nodes: Int64Array) -> DraftTrees:
        return DraftTrees.of(
            self._tree(self.last[slot], min(3, most)) if slot in self.last else EMPTY_TREE
            for slot, most in zip(slots.tolist(), max_nodes.tolist(), strict=True)
        )

    def observe(self, slots: Int64Array, token_ids: Int32Array, offsets: Int64Array) -> None:
        self.last |= dict(zip(slots.tolist(), token_ids[offsets[1:] - 1].tolist(), strict=True))

    @staticmethod
    def _tree(token: int, num_nodes: int) -> DraftTree:
        return DraftTree(
            token_ids=np.full(num_nodes, token, np.int32),
            parents=np.arange(-1, num_nodes - 1, dtype=np.int32),
            scores=np.float32(0.9) ** np.arange(1, num_nodes + 1, dtype=np.float32),
        )


def write_trace(path: Path, num_prompts: int, *, num_samples: int = 4, length: int = 12) -> Path:
    """Samples that say one token all the time, another for each."""
    rows = [
        {
            "id": str(prompt),
            "prompt_token_ids": [1, 2, prompt],
            "samples": [{"token_ids": [10 * prompt + sample] * length} for sample in range(num_samples)],
        }
        for prompt in range(num_prompts)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def bench(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["bench", *(str(argument) for argument in arguments)])
