"""PPO of a bfloat16 policy and critic from end to end, bit by bit: killed, speculating, and with a warm-up."""

import copy
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_resume import die_at_call, finish, start
from tiny_run import assert_same_run, make_recipe

from srtrl.metrics import read_metrics
from srtrl.model.value_model import load_value_model
from srtrl.model.weights import load_model
from srtrl.recipe.schema import Recipe
from srtrl.run import checkpoint
from srtrl.run.checkpoint import OPTIMIZER, read_state
from srtrl.run.metrics import describe_step
from srtrl.trainer.optimizer import build_optimizer, load_state
from srtrl.trainer.trainer import run_training

PPO: dict[str, Any] = {
    "model__dtype": "bfloat16",
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


def make_ppo_recipe(policy: Path, output_dir: Path, **changes: Any) -> Recipe:
    return make_recipe(policy, output_dir, **copy.deepcopy(PPO), **changes)


KILLS: dict[str, Callable[[], None]] = {
    # in step 3: the critic has learned, the policy is half-way
    "in the policy's update": lambda: die_at_call(torch.optim.AdamW, "step", 2 + (2 + 4) + 2 + 2, after=True),
    # in step 3, after the first of the critic's two optimizer steps
    "in the critic's update": lambda: die_at_call(torch.optim.AdamW, "step", 2 + (2 + 4) + 1, after=True),
    # the second checkpoint has the policy and its optimizer, but no critic yet
    "while the critic is saved": lambda: die_at_call(checkpoint, "save_value_model", 2),
    # there is no checkpoint yet
    "in the warm-up": lambda: die_at_call(torch.optim.AdamW, "step", 1, after=True),
}
FIRST_KILL, *OTHER_KILLS = KILLS


def kill_at(place: str) -> None:
    """Let the process be killed at one of these."""
    KILLS[place]()


@pytest.fixture(scope="module")
def uninterrupted(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without speculation."""
    return run_training(make_ppo_recipe(policy, tmp_path_factory.mktemp("plain"), rollout__drafter="none")).folder


def test_critic_and_policy_learn_something(policy: Path, uninterrupted: Path) -> None:
    """Otherwise equality would be cheap."""
    rows = {int(row["step"]): row for row in read_metrics(uninterrupted / "metrics.jsonl")}
    assert all(rows[step]["critic/grad_norm"] > 0 for step in range(1, 5))
    assert rows[1]["critic/value_mean"] == 0  # of a head that is zero
    assert len({rows[step]["critic/value_mean"] for step in range(1, 5)}) == 4
    assert rows[4]["critic/explained_variance"] < 1
    assert rows[1]["critic/explained_variance"] == pytest.approx(0, abs=1e-12)
    assert all(rows[step]["grad_norm"] > 0 for step in range(2, 5))
    assert rows[4]["kl/ref"] > 1e-4
    folder = uninterrupted / "checkpoints" / "step_000004"
    assert {weight.dtype for weight in load_file(folder / "model.safetensors").values()} == {torch.bfloat16}
    [file] = (folder / "optimizer").iterdir()
    masters = [one for name, one in load_file(file).items() if name.endswith(".master")]
    assert not all(torch.equal(master, master.bfloat16().float()) for master in masters), "they hold no more"
    assert {"time/values", "time/critic", "time/update"} <= rows[4].keys()
    first = load_value_model(policy, dtype=torch.bfloat16, device="cpu")
    last = load_value_model(
        uninterrupted / "checkpoints" / "step_000004" / "critic", dtype=torch.bfloat16, device="cpu"
    )
    assert all(not torch.equal(a, b) for a, b in zip(first.parameters(), last.parameters(), strict=True))


@pytest.mark.parametrize(
    "kill", [pytest.param(kill, marks=[pytest.mark.slow] * bool(n)) for n, kill in enumerate(KILLS)]
)
def test_killed_and_resumed_with_speculation_equals_uninterrupted_without(
    kill: str, policy: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    recipe = make_ppo_recipe(policy, tmp_path, rollout__draft_budget=8)
    assert finish(start(recipe, prepare=partial(kill_at, kill))) == -signal.SIGKILL
    assert finish(start(recipe, resume=True)) == 0
    assert_same_run(tmp_path / "run", uninterrupted)
    row = read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]
    assert row["engine/verified_per_decode_step"] > 1  # 10 prompts, 4 in a step: the last has rollouts to draft from


def test_the_warm_up_leaves_the_policy_alone(policy: Path, tmp_path: Path) -> None:
    """Two steps of critic alone, then one of both; the policy's schedule begins with the third step."""
    recipe = make_ppo_recipe(
        policy,
        tmp_path,
        critic__warmup_steps=2,
        train__num_steps=3,
        train__checkpoint_every=1,
        train__keep_checkpoints=3,
        train__schedule="linear",
    )
    folder = run_training(recipe).folder
    rows = {int(row["step"]): row for row in read_metrics(folder / "metrics.jsonl")}
    states = {step: read_state(folder / "checkpoints" / f"step_{step:06d}") for step in (1, 2, 3)}
    weights = {
        step: list(
            load_model(folder / "checkpoints" / f"step_{step:06d}", dtype=torch.bfloat16, device="cpu").parameters()
        )
        for step in (1, 2, 3)
    }
    before = list(load_model(policy, dtype=torch.bfloat16, device="cpu").parameters())
    for step in (1, 2):
        assert states[step].policy_version == 0
        assert all(torch.equal(a, b) for a, b in zip(weights[step], before, strict=True))
        assert "loss" not in rows[step]
        assert "critic/loss" in rows[step]
        assert describe_step(rows[step]).endswith("critic warm-up: no update of the policy")
    assert states[3].policy_version == 1
    assert not any(torch.equal(a, b) for a, b in zip(weights[3], before, strict=True))
    assert rows[3]["learning_rate"] == pytest.approx(0.01)  # the peak: its first 3 of 4 optimizer steps were warm-up


# --- Checkpoints that do not fit --------------------------------------------------------------------------


def test_a_checkpoint_without_its_critic_cannot_be_resumed(policy: Path, uninterrupted: Path, tmp_path: Path) -> None:
    shutil.copytree(uninterrupted, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_000004" / "critic")
    longer = make_ppo_recipe(policy, tmp_path, rollout__drafter="none", train__num_steps=5)
    with pytest.raises(ValueError, match=r"step_000004/critic/.* is missing"):
        run_training(longer, resume=True)


def test_an_optimizer_state_of_another_model_is_refused_with_its_folder(uninterrupted: Path, tmp_path: Path) -> None:
    shutil.copytree(uninterrupted / "checkpoints" / "step_000004", tmp_path / "saved")
    model = load_model(tmp_path / "saved", dtype=torch.bfloat16, device="cpu")
    optimizer = build_optimizer(model, learning_rate=1e-3, weight_decay=0.1, betas=(0.9, 0.99))
    [file] = (tmp_path / "saved" / "optimizer").iterdir()
    with safe_open(file, framework="pt") as opened:
        # Copies: what safetensors gives may be the mapped file itself, which is written over below.
        tensors = {name: opened.get_tensor(name).clone() for name in opened.keys()}  # noqa: SIM118
        metadata = opened.metadata()

    def refuse(tensors: dict[str, torch.Tensor], message: str) -> None:
        save_file(tensors, file, metadata)
        with pytest.raises(ValueError, match=rf"saved/optimizer: {message}; .*name=OTHER model\.path=.*saved$"):
            load_state(optimizer, torch.bfloat16, tmp_path / "saved", OPTIMIZER)

    without = {name: one for name, one in tensors.items() if not name.endswith(".master")}
    refuse(without, r"it has no embedding\.master: it is of another model, or of another model\.dtype")
    refuse(
        tensors | {"final_norm.master": torch.ones(1)}, r"its final_norm\.master has shape \[1\], this model's \[32\]"
    )
    model.layers = model.layers[:1]
    optimizer = build_optimizer(model, learning_rate=1e-3, weight_decay=0.1, betas=(0.9, 0.99))
    refuse(tensors, r"this model has no layers\.1\.\S+: it is of another model, or of another model\.dtype")
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"saved/optimizer: .*name=OTHER"):
        load_state(optimizer, torch.bfloat16, tmp_path / "saved", OPTIMIZER)
