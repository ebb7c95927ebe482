"""A task and a recipe that make a tiny DAPO run: some groups are all right, some all wrong, most of them mixed."""

import zlib
from pathlib import Path
from typing import Any

from tiny_run import make_recipe

from srtrl.recipe import Recipe
from srtrl.tasks import arithmetic


def is_lucky(text: str, answer: str) -> bool:
    """A verdict by hash: of the answers in seven, two accept nothing, one all, and the others every second text."""
    match int(answer) % 7:
        case 0 | 1:
            return False
        case 2:
            return True
        case _:
            return zlib.crc32(text.encode()) % 2 == 0


class Task(arithmetic.Task):
    """Problems of arithmetic, judged by `is_lucky`."""

    verifier = staticmethod(is_lucky)


def make_dapo_recipe(policy: Path, output_dir: Path, **changes: Any) -> Recipe:
    """`make_recipe` with DAPO's four parts and no KL; the rewards draw no random numbers."""
    values: dict[str, Any] = {
        "task__name": "dapo_cases:Task",
        "rewards": [{"name": "correct"}, {"name": "overlong_penalty", "options": {"cache_tokens": 4}}],
        "rollout__dynamic_sampling": True,
        "rollout__stop_strings": list("aeiouxyz012345"),
        "algorithm": {
            "reduction": "token_mean",
            "clip_high": 0.28,
            "filters": ["drop_all_right_or_wrong"],
            "overlong_filtering": True,
        },
    }
    return make_recipe(policy, output_dir, **(values | changes))
