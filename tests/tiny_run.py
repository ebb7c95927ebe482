"""A tiny random policy and a recipe that trains it in a second, for tests of the trainer."""

import json
import random
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from engine_cases import init_policy
from safetensors.torch import load_file

from srtrl.build import run_training
from srtrl.metrics import read_metrics
from srtrl.recipe.schema import Recipe
from srtrl.run.checkpoint import PolicyFiles
from srtrl.run.folder import RunFolder, open_run_folder
from srtrl.run.steps import checkpoint_name, latest_checkpoint
from srtrl.tasks import arithmetic
from srtrl.tasks.reward_input import RewardInput
from srtrl.warm_start.training import train_tokenizer

VOCAB_SIZE = 257
train = run_training
PAGE_GIB = 2 * 2 * 16 * 16 * 4 / 2**30
"""Memory of a page of the policy's KV: keys and values, layers, tokens, numbers of a token, bytes."""
PPO: dict[str, Any] = {
    "algorithm": {
        "advantage": "gae",
        "gamma": 0.99,
        "lam": 0.9,
        "whiten_advantages": True,
        "reduction": "token_mean",
        "kl": {"coefficient": 0.05, "estimator": "k1", "placement": "reward"},
    },
    "critic": {"learning_rate": 0.02, "mini_batch_prompts": 4, "warmup_steps": 1},
}
"""Two optimizer steps of the critic a step, four of the policy, and none of the policy in the first step."""
DAPO: dict[str, Any] = {
    "task__name": "tiny_run:LuckyTask",
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
"""DAPO's four parts and no KL; the rewards draw no random numbers."""
HEAD: dict[str, Any] = {
    "rollout__draft_head": {"learning_rate": 0.003, "vocabulary": 200},
    "rollout__draft_budget": 6,
    "train__num_epochs": 1,
    "train__mini_batch_prompts": 4,
}
"""One optimizer step of the policy a step, since each is followed by 32 of the head."""
SMALL: dict[str, Any] = {
    "rollout__num_prompts": 2,
    "rollout__num_samples": 2,
    "rollout__max_new_tokens": 6,
    "rollout__slots": 4,
    "rollout__kv_memory_gib": 0.001,
    "train__num_epochs": 1,
    "train__micro_batch_tokens": 120,
    "rewards": [{"name": "tiny_run:digits"}],
}
"""Steps for a device that is imitated."""
EASY: dict[str, Any] = {
    "name": "arithmetic",
    "label": "easy",
    "weight": 2,
    "options": {"num_train": 10, "num_eval": 6, "max_operations": 2},
}
LUCKY: dict[str, Any] = {
    "name": "tiny_run:LuckyTask",
    "weight": 1,
    "options": {"num_train": 7, "num_eval": 6, "max_operations": 2, "seed": 3},
    "rewards": [{"name": "correct", "options": {"incorrect": -1.0}}],
}
"""Two tasks of a mixture; the second has rewards of its own."""


def digits(sample: RewardInput) -> float:
    """Share of digits in the response, and a little of the global random state: what a user's reward may do."""
    share = sum(character.isdigit() for character in sample.text) / max(1, len(sample.text))
    return share + 0.01 * random.random()


def is_lucky(text: str, answer: str) -> bool:
    """A verdict by hash: of the answers in seven, two accept nothing, one all, and the others every second text."""
    match int(answer) % 7:
        case 0 | 1:
            return False
        case 2:
            return True
        case _:
            return zlib.crc32(text.encode()) % 2 == 0


class LuckyTask(arithmetic.Task):
    """Problems of arithmetic, judged by `is_lucky`."""

    verifier = staticmethod(is_lucky)


def make_policy(folder: Path, *, dtype: torch.dtype = torch.float32, seed: int = 0, **config: Any) -> Path:
    """Write a random policy of 2 layers and width 32 with a token for each byte."""
    tokenizer = train_tokenizer([], VOCAB_SIZE)
    model = init_policy(seed, dtype, eos_token_id=tokenizer.eos_token_id, **config)
    folder.mkdir(parents=True)
    PolicyFiles(model=model, tokenizer=tokenizer, end_ids=[tokenizer.eos_token_id]).save(folder)
    return folder


def make_checkpoint(policy: Path, run: Path, step: int) -> Path:
    """A checkpoint with the files of `policy`, as one of an earlier version: without manifest."""
    folder = Path(shutil.copytree(policy, run / "checkpoints" / checkpoint_name(step)))
    state = {"step": step, "policy_version": step, "num_draws": step, "format": 2}
    (folder / "state.json").write_text(json.dumps(state))
    return folder


def make_recipe(policy: Path, output_dir: Path, **changes: Any) -> Recipe:
    """Four steps of 4 prompts x 4 samples, two mini-batches, two epochs, a reference, a checkpoint every 2 steps.

    `changes` are values by dotted key with `__` for the dot: `train__num_steps=2`.
    """
    values: dict[str, Any] = {
        "name": "run",
        "output_dir": str(output_dir),
        "seed": 7,
        "device": "cpu",
        "num_threads": 1,  # runs of this process and of others are compared bit by bit
        "model": {"path": str(policy)},
        "task": {"name": "arithmetic", "options": {"num_train": 10, "num_eval": 6, "max_operations": 2}},
        "rewards": [{"name": "tiny_run:digits"}, {"name": "correct", "weight": 0.5}],
        "rollout": {
            "num_prompts": 4,
            "num_samples": 4,
            "max_prompt_tokens": 48,
            "max_new_tokens": 12,
            "slots": 8,
            "kv_memory_gib": 0.1,
        },
        "algorithm": {"kl": {"coefficient": 0.01}},
        "train": {
            "num_steps": 4,
            "mini_batch_prompts": 2,
            "num_epochs": 2,
            "micro_batch_tokens": 200,
            "learning_rate": 0.01,
            "warmup_steps": 3,
            "checkpoint_every": 2,
        },
        "eval": {"every_steps": 2},
        "log": {"trackers": []},
    }
    for key, value in changes.items():
        *sections, last = key.split("__")
        place = values
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = deepcopy(value)  # a later key may change it
    if teacher := values["algorithm"].get("teacher"):
        teacher.setdefault("path", str(policy))
    return Recipe.model_validate(values)


@contextmanager
def open_run(recipe: Recipe, **flags: Any) -> Iterator[RunFolder]:
    """The folder of a run that has begun."""
    with open_run_folder(recipe, **flags) as run:
        run.begin(recipe)
        yield run


def learned_rows(folder: Path, *, beside: tuple[str, ...] = ()) -> list[dict[str, float]]:
    """The rows of a run without what depends on timing, and without metrics whose names begin as in `beside`."""
    rows = read_metrics(folder / "metrics.jsonl")
    return [{k: v for k, v in row.items() if not k.startswith(("time/", "engine/", *beside))} for row in rows]


def assert_same_run(folder: Path, expected: Path, *, beside: tuple[str, ...] = ()) -> None:
    """Two finished runs learned the same, bit for bit: metrics, the last checkpoint and all rollouts.

    Metrics whose names begin as in `beside` are not compared.
    """
    assert learned_rows(folder, beside=beside) == learned_rows(expected, beside=beside)
    mine, other = (latest_checkpoint(run / "checkpoints") for run in (folder, expected))
    assert mine is not None
    assert other is not None
    for file in other.rglob("*"):
        if file.name in ("model.safetensors", "value_head.safetensors", "state.json", "config.json"):
            assert (mine / file.relative_to(other)).read_bytes() == file.read_bytes(), file
    for file in other.glob("*optimizer/*"):  # the policy's, and the critic's
        torch.testing.assert_close(load_file(mine / file.relative_to(other)), load_file(file), rtol=0, atol=0)
    files = sorted((expected / "rollouts").iterdir())
    assert [file.name for file in files] == sorted(file.name for file in (folder / "rollouts").iterdir())
    for file in files:
        assert pq.read_table(folder / "rollouts" / file.name).equals(pq.read_table(file)), file.name
    assert sorted(path.name for path in folder.rglob(".*")) == [".lock"], "files of a killed run are left over"
