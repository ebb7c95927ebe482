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
from tiny_run import VOCAB_SIZE, assert_same_run, make_recipe

from srtrl.metrics import read_metrics
from srtrl.model.hf_config import config_from_hf
from srtrl.model.value_model import ValueModel, load_value_model, save_value_model
from srtrl.model.weights import init_model, load_model, read_config
from srtrl.recipe.schema import Recipe
from srtrl.run import checkpoint
from srtrl.run.checkpoint import load_training_state, read_state
from srtrl.run.metrics import describe_step
from srtrl.trainer.optimizer import build_optimizer
from srtrl.trainer.trainer import run_training
from srtrl.warm_start.training import train_tokenizer

PPO: dict[str, Any] = {
    "model__dtype": "bfloat16",
    "algorithm": {
        "advantage": "gae",
        "gamma": 0.99,
        "lam": 0.9,
        "whiten_advantages": True,
        "reduction": "token_mean",
        "kl": {"coefficient": 0.05, "estimator": "k1", "placement": "reward", "target": 0.02, "horizon": 40},
    },
    "critic": {"learning_rate": 0.02, "mini_batch_prompts": 4, "num_epochs": 3, "warmup_steps": 1},
}
"""Three optimizer steps of the critic a step, four of the policy, and none of the policy in the first step."""


def make_ppo_recipe(policy: Path, output_dir: Path, **changes: Any) -> Recipe:
    return make_recipe(policy, output_dir, **copy.deepcopy(PPO), **changes)


KILLS: dict[str, Callable[[], None]] = {
    # in step 3, after the second of the critic's three optimizer steps
    "in the critic's update": lambda: die_at_call(torch.optim.AdamW, "step", 3 + (3 + 4) + 2, after=True),
    # in step 3: the critic has learned, the policy is half-way
    "in the policy's update": lambda: die_at_call(torch.optim.AdamW, "step", 3 + (3 + 4) + 3 + 2, after=True),
}
MORE_KILLS: dict[str, Callable[[], None]] = {
    # the second checkpoint has the policy and its optimizer, but no critic yet
    "while the critic is saved": lambda: die_at_call(checkpoint, "save_value_model", 2),
    # there is no checkpoint yet
    "in the warm-up": lambda: die_at_call(torch.optim.AdamW, "step", 2, after=True),
}


def kill_at(place: str) -> None:
    """Let the process be killed at one of these."""
    (KILLS | MORE_KILLS)[place]()


@pytest.fixture(scope="module")
def uninterrupted(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without speculation."""
    return run_training(make_ppo_recipe(policy, tmp_path_factory.mktemp("plain"), rollout__drafter="none")).folder


def test_critic_policy_and_coefficient_learn_something(policy: Path, uninterrupted: Path) -> None:
    """Otherwise equality would be cheap."""
    rows = {int(row["step"]): row for row in read_metrics(uninterrupted / "metrics.jsonl")}
    assert all(rows[step]["critic/grad_norm"] > 0 for step in range(1, 5))
    assert rows[1]["critic/value_mean"] == 0  # of a head that is zero
    assert len({rows[step]["critic/value_mean"] for step in range(1, 5)}) == 4
    assert rows[4]["critic/explained_variance"] < 1
    assert rows[1]["critic/explained_variance"] == pytest.approx(0, abs=1e-12)
    assert all(rows[step]["grad_norm"] > 0 for step in range(2, 5))
    assert rows[4]["kl/ref"] > 1e-4
    coefficient = 0.05
    for step in range(2, 5):
        assert rows[step]["kl/coefficient"] == pytest.approx(coefficient, rel=1e-12)
        # no filters: the mean over samples of the sum, by the mean length; 16 samples of a horizon of 40
        kl = rows[step]["reward/kl_penalty"] / coefficient / rows[step]["length/mean"]
        coefficient *= 1 + min(max(kl / 0.02 - 1, -0.2), 0.2) * 16 / 40
    assert coefficient != 0.05
    assert read_state(uninterrupted / "checkpoints" / "step_000004").kl_coefficient == pytest.approx(coefficient)
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


@pytest.mark.parametrize("kill", [*KILLS, *(pytest.param(kill, marks=pytest.mark.slow) for kill in MORE_KILLS)])
def test_killed_and_resumed_with_speculation_equals_uninterrupted_without(
    kill: str, policy: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    recipe = make_ppo_recipe(policy, tmp_path, rollout__draft_budget=8)
    assert finish(start(recipe, prepare=partial(kill_at, kill))) == -signal.SIGKILL
    assert not (tmp_path / "run" / "summary.json").exists()
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
        assert states[step].kl_coefficient == 0.05
        assert all(torch.equal(a, b) for a, b in zip(weights[step], before, strict=True))
        assert "loss" not in rows[step]
        assert "critic/loss" in rows[step]
        assert describe_step(rows[step]).endswith("critic warm-up: no update of the policy")
    assert states[3].policy_version == 1
    assert not any(torch.equal(a, b) for a, b in zip(weights[3], before, strict=True))
    assert rows[3]["learning_rate"] == pytest.approx(0.01)  # the peak: its first 3 of 4 optimizer steps were warm-up


# --- Critics and checkpoints that do not fit --------------------------------------------------------------------------


def test_a_saved_critic_continues_in_another_run(policy: Path, uninterrupted: Path, tmp_path: Path) -> None:
    """Also where its vocabulary is padded to another size: models of one family share a tokenizer."""
    saved = uninterrupted / "checkpoints" / "step_000004" / "critic"
    padded = save_critic(tmp_path / "padded", policy, vocab_size=VOCAB_SIZE + 7)
    train_tokenizer([], VOCAB_SIZE).save_pretrained(padded)
    for critic, is_zero in ((saved, False), (padded, True)):
        recipe = make_ppo_recipe(policy, tmp_path, critic__path=str(critic), train__num_steps=2)
        rows = read_metrics(run_training(recipe, overwrite=True).folder / "metrics.jsonl")
        assert [row["critic/value_mean"] == 0 for row in rows if row["step"] == 1] == [is_zero]


def save_critic(folder: Path, policy: Path, **changes: int) -> Path:
    """A critic of the policy's shape but for `changes`, without a tokenizer."""
    fields = dict(read_config(policy).hf_config) | changes
    save_value_model(ValueModel(init_model(config_from_hf(fields), 3, torch.float32, "cpu")), folder)
    return folder


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (None, "no local folder"),
        ({"vocab_size": 250}, "a vocabulary of 250 tokens, the policy one of 257"),
        ({"vocab_size": 264}, "a vocabulary of 264 tokens"),  # whose tokens, it does not say
        ({"vocab_size": 264, "tokenizer": 260}, "gives other ids than the policy's"),
        ({"max_position_embeddings": 50}, "has 50 positions"),
    ],
)
def test_a_critic_that_does_not_fit_the_policy_is_refused(
    changes: dict[str, int] | None, message: str, policy: Path, tmp_path: Path
) -> None:
    critic = tmp_path / "critic"
    if changes is not None:
        tokenizer_size = changes.pop("tokenizer", None)
        save_critic(critic, policy, **changes)
        if tokenizer_size:
            train_tokenizer(["another language"] * 9, tokenizer_size).save_pretrained(critic)
    with pytest.raises(ValueError, match=rf"^critic\.path: .*{message}"):
        run_training(make_ppo_recipe(policy, tmp_path, critic__path=str(critic)))
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_without_its_critic_cannot_be_resumed(policy: Path, uninterrupted: Path, tmp_path: Path) -> None:
    shutil.copytree(uninterrupted, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_000004" / "critic")
    longer = make_ppo_recipe(policy, tmp_path, rollout__drafter="none", train__num_steps=5)
    with pytest.raises(ValueError, match=r"step_000004/critic/.* is missing"):
        run_training(longer, resume=True)


def test_an_optimizer_state_of_another_model_is_refused_with_its_folder(uninterrupted: Path, tmp_path: Path) -> None:
    shutil.copytree(uninterrupted / "checkpoints" / "step_000004", tmp_path / "saved")
    model = load_model(tmp_path / "saved", dtype=torch.bfloat16, device="cpu")
    optimizer = build_optimizer(model, learning_rate=1e-3, weight_decay=0.1, betas=(0.9, 0.99), eps=1e-8)
    [file] = (tmp_path / "saved" / "optimizer").iterdir()
    with safe_open(file, framework="pt") as opened:
        # Copies: what safetensors gives may be the mapped file itself, which is written over below.
        tensors = {name: opened.get_tensor(name).clone() for name in opened.keys()}  # noqa: SIM118
        metadata = opened.metadata()

    def refuse(tensors: dict[str, torch.Tensor], message: str) -> None:
        save_file(tensors, file, metadata)
        with pytest.raises(ValueError, match=rf"saved/optimizer: {message}; .*name=OTHER model\.path=.*saved$"):
            load_training_state(tmp_path / "saved", model, optimizer)

    without = {name: one for name, one in tensors.items() if not name.endswith(".master")}
    refuse(without, r"it has no embedding\.master: it is of another model, or of another model\.dtype")
    refuse(
        tensors | {"final_norm.master": torch.ones(1)}, r"its final_norm\.master has shape \[1\], this model's \[32\]"
    )
    model.layers = model.layers[:1]
    optimizer = build_optimizer(model, learning_rate=1e-3, weight_decay=0.1, betas=(0.9, 0.99), eps=1e-8)
    refuse(tensors, r"this model has no layers\.1\.\S+: it is of another model, or of another model\.dtype")
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"saved/optimizer: .*name=OTHER"):
        load_training_state(tmp_path / "saved", model, optimizer)
