"""PPO from end to end: a killed run, a speculating run and a run with a warm-up against a plain one, bit by bit."""

import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_resume import die_at_call, finish, start
from tiny_run import VOCAB_SIZE, assert_same_run, make_policy, make_recipe

from srtrl.metrics import read_metrics
from srtrl.model.hf_config import config_from_hf
from srtrl.model.value_model import ValueModel, load_value_model, save_value_model
from srtrl.model.weights import init_model, load_model, read_config
from srtrl.recipe import Recipe
from srtrl.trainer import checkpoint
from srtrl.trainer.checkpoint import read_state
from srtrl.trainer.trainer import run_training
from srtrl.trainer.warm_start import train_tokenizer

PPO: dict[str, Any] = {
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
    return make_recipe(policy, output_dir, **{key: dict(value) for key, value in PPO.items()}, **changes)


def kill_in_the_critics_update() -> None:
    """In step 3, after the second of the critic's three optimizer steps."""
    die_at_call(torch.optim.AdamW, "step", 3 + (3 + 4) + 2, after=True)


def kill_in_the_policys_update() -> None:
    """In step 3: the critic has learned, the policy is half-way."""
    die_at_call(torch.optim.AdamW, "step", 3 + (3 + 4) + 3 + 2, after=True)


def kill_while_the_critic_is_saved() -> None:
    """The second checkpoint has the policy and its optimizer, but no critic yet."""
    die_at_call(checkpoint, "save_value_model", 2)


def kill_in_the_warm_up() -> None:
    """There is no checkpoint yet."""
    die_at_call(torch.optim.AdamW, "step", 2, after=True)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_policy(tmp_path_factory.mktemp("model") / "policy")


@pytest.fixture(scope="module")
def uninterrupted(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output_dir = tmp_path_factory.mktemp("uninterrupted")
    assert finish(start(make_ppo_recipe(policy, output_dir))) == 0
    return output_dir / "run"


def assert_same_critic(folder: Path, expected: Path) -> None:
    checkpoints = [run / "checkpoints" / "step_000004" for run in (folder, expected)]
    for name in ("model.safetensors", "value_head.safetensors", "config.json"):
        mine, other = ((path / "critic" / name).read_bytes() for path in checkpoints)
        assert mine == other, name
    states = [torch.load(path / "critic_optimizer.pt") for path in checkpoints]
    torch.testing.assert_close(states[0], states[1], rtol=0, atol=0)


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
    state = read_state(uninterrupted / "checkpoints" / "step_000004")
    assert state.kl_coefficient != 0.05
    assert {"time/values", "time/critic", "time/update", "reward/kl_penalty", "kl/coefficient"} <= rows[4].keys()
    first = load_value_model(policy, dtype=torch.float32, device="cpu")
    last = load_value_model(uninterrupted / "checkpoints" / "step_000004" / "critic", dtype=torch.float32, device="cpu")
    assert all(not torch.equal(a, b) for a, b in zip(first.parameters(), last.parameters(), strict=True))


@pytest.mark.parametrize(
    "kill",
    [
        kill_in_the_critics_update,
        kill_in_the_policys_update,
        pytest.param(kill_while_the_critic_is_saved, marks=pytest.mark.slow),
        pytest.param(kill_in_the_warm_up, marks=pytest.mark.slow),
    ],
    ids=lambda kill: str(kill.__name__),
)
def test_killed_and_resumed_equals_uninterrupted(
    kill: Callable[[], None], policy: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    recipe = make_ppo_recipe(policy, tmp_path)
    assert finish(start(recipe, prepare=kill)) == -signal.SIGKILL
    assert not (tmp_path / "run" / "summary.json").exists()
    assert finish(start(recipe, resume=True)) == 0
    assert_same_run(tmp_path / "run", uninterrupted)
    assert_same_critic(tmp_path / "run", uninterrupted)


def test_speculation_learns_the_same(policy: Path, tmp_path: Path) -> None:
    """10 prompts, 4 a step: from the third step on there are rollouts to draft from."""
    changes = {"train__num_steps": 6, "rollout__draft_budget": 8}
    folders = [
        run_training(make_ppo_recipe(policy, tmp_path / drafter, rollout__drafter=drafter, **changes)).folder
        for drafter in ("none", "srt")
    ]
    assert_same_run(*folders)
    later = [row for row in read_metrics(folders[1] / "metrics.jsonl") if row["step"] >= 4]
    assert sum(row["engine/verified_per_decode_step"] for row in later) > 1.05 * len(later)


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
            load_model(folder / "checkpoints" / f"step_{step:06d}", dtype=torch.float32, device="cpu").parameters()
        )
        for step in (1, 2, 3)
    }
    before = list(load_model(policy, dtype=torch.float32, device="cpu").parameters())
    for step in (1, 2):
        assert states[step].policy_version == 0
        assert states[step].kl_coefficient == 0.05
        assert all(torch.equal(a, b) for a, b in zip(weights[step], before, strict=True))
        assert "loss" not in rows[step]
        assert "critic/loss" in rows[step]
    assert states[3].policy_version == 1
    assert not any(torch.equal(a, b) for a, b in zip(weights[3], before, strict=True))
    assert rows[3]["learning_rate"] == pytest.approx(0.01)  # the peak: its first 3 of 4 optimizer steps were warm-up


def test_a_filter_that_drops_every_group_leaves_the_critic_alone(policy: Path, tmp_path: Path) -> None:
    recipe = make_ppo_recipe(
        policy,
        tmp_path,
        rewards=[{"name": "correct"}],  # never: all groups are uniform
        algorithm__filters=["drop_uniform"],
        train__num_steps=2,
    )
    folder = run_training(recipe).folder
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if row["step"] > 0]
    assert [row["groups/kept"] for row in rows] == [0, 0]
    assert not any(name.startswith("critic/") for row in rows for name in row)
    critic = load_value_model(folder / "checkpoints" / "step_000002" / "critic", dtype=torch.float32, device="cpu")
    assert not critic.value_head.any()


# --- critic.path ------------------------------------------------------------------------------------------------------


def test_a_saved_critic_goes_on_in_another_run(policy: Path, uninterrupted: Path, tmp_path: Path) -> None:
    saved = uninterrupted / "checkpoints" / "step_000004"
    recipe = make_ppo_recipe(saved, tmp_path, critic__path=str(saved / "critic"), train__num_steps=2)
    folder = run_training(recipe).folder
    first = next(row for row in read_metrics(folder / "metrics.jsonl") if row["step"] == 1)
    assert abs(first["critic/value_mean"]) > 1e-3


def refused_critic(policy: Path, output_dir: Path, critic: Path, **changes: Any) -> str:
    """The message that a recipe with this `critic.path` is refused with; no run folder is left behind."""
    recipe = make_ppo_recipe(policy, output_dir, critic__path=str(critic), **changes)
    with pytest.raises(ValueError, match=r"^critic\.path: ") as caught:
        run_training(recipe)
    assert not (output_dir / "run").exists()
    return str(caught.value)


def test_a_critic_that_does_not_fit_the_policy_is_refused(policy: Path, tmp_path: Path) -> None:
    assert "no local folder" in refused_critic(policy, tmp_path, tmp_path / "nowhere" / "at" / "all")

    smaller = save_critic(tmp_path / "smaller", policy, vocab_size=VOCAB_SIZE - 7)
    message = refused_critic(policy, tmp_path, smaller)
    assert f"a vocabulary of {VOCAB_SIZE - 7} tokens, the policy one of {VOCAB_SIZE}" in message
    larger = save_critic(tmp_path / "larger", policy, vocab_size=VOCAB_SIZE + 7)
    assert "a vocabulary of 264 tokens" in refused_critic(policy, tmp_path, larger)  # whose tokens, it does not say
    short = save_critic(tmp_path / "short", policy, max_position_embeddings=50)
    assert "has 50 positions" in refused_critic(policy, tmp_path, short)

    train_tokenizer(["another language"] * 9, VOCAB_SIZE + 3).save_pretrained(larger)
    assert "gives other ids than the policy's" in refused_critic(policy, tmp_path, larger)


def test_a_critic_with_a_padded_vocabulary_is_accepted(policy: Path, tmp_path: Path) -> None:
    """Models of one family share a tokenizer and pad their vocabularies to different sizes."""
    larger = save_critic(tmp_path / "larger", policy, vocab_size=VOCAB_SIZE + 7)
    train_tokenizer([], VOCAB_SIZE).save_pretrained(larger)
    recipe = make_ppo_recipe(policy, tmp_path, critic__path=str(larger), train__num_steps=2)
    assert not run_training(recipe).interrupted


def save_critic(folder: Path, policy: Path, **changes: int) -> Path:
    """A critic of the policy's shape but for `changes`, without a tokenizer."""
    fields = dict(read_config(policy).hf_config) | changes
    save_value_model(ValueModel(init_model(config_from_hf(fields), 3, torch.float32, "cpu")), folder)
    return folder


def test_a_checkpoint_without_its_critic_is_no_place_to_go_on_from(policy: Path, tmp_path: Path) -> None:
    folder = run_training(make_ppo_recipe(policy, tmp_path, train__num_steps=2)).folder
    shutil.rmtree(folder / "checkpoints" / "step_000002" / "critic")
    with pytest.raises(ValueError, match="step_000002/critic: no local folder"):
        run_training(make_ppo_recipe(policy, tmp_path, train__num_steps=3), resume=True)
