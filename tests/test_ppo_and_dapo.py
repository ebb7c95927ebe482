"""Tiny runs of DAPO, whose batches are full, and of PPO, whose critic warms up; optimizer states that do not fit."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load, save
from tiny_run import DAPO, PPO, make_recipe, train

from srtrl.drafters.srt import Drafter as SrtDrafter
from srtrl.metrics import read_metrics
from srtrl.model.weights import load_model
from srtrl.run.checkpoint import OPTIMIZER, read_state
from srtrl.run.step_metrics import step_problems
from srtrl.trainer.optimizer import build_optimizer

NUM_PROMPTS = 4


def test_a_batch_is_the_shortest_prefix_that_fills_it_and_all_of_it_feeds_drafts(
    finished: Callable[..., Path],
) -> None:
    plain = finished(**DAPO)
    rows = [row for row in read_metrics(plain / "metrics.jsonl") if row["step"] > 0]
    next_draw = 0
    for row in rows:
        table = pq.read_table(plain / "rollouts" / f"step_{row['step']:06.0f}.parquet").to_pylist()
        correct: dict[int, list[bool]] = {}
        for sample in table:
            correct.setdefault(sample["draw_index"], []).append(sample["outcome"] == "correct")
        mixed = [any(group) and not all(group) for group in correct.values()]
        assert list(correct) == list(range(next_draw, next_draw + len(mixed)))  # all draws, in data order
        assert sum(mixed) == NUM_PROMPTS
        assert mixed[-1]
        for sample in table:
            group = correct[sample["draw_index"]]
            is_learned = any(group) and not all(group) and sample["finish_reason"] == "stop"  # overlong filtering
            assert (sample["advantage"] is not None) == is_learned
        assert row["data/draws"] == len(mixed)
        assert (f"4 of {len(mixed)} groups kept" in step_problems(row)) == (len(mixed) > 4)
        assert (row["groups/kept"], row["groups/dropped"], row["groups/short"]) == (4, len(mixed) - 4, 0)
        assert row["groups/all_right"] == sum(map(all, correct.values()))
        assert row["groups/all_right"] + row["groups/all_wrong"] == row["groups/dropped"]
        assert row["accuracy"] == pytest.approx(sum(map(sum, correct.values())) / len(table))  # before the filters
        assert row["data/epoch"] == pytest.approx(next_draw / 10)
        assert row["grad_norm"] > 0
        next_draw += len(mixed)
    assert len(rows) == 4
    checkpoint = plain / "checkpoints" / "step_000004"
    assert read_state(checkpoint).num_draws == next_draw
    assert {row["groups/dropped"] for row in rows} != {0}
    assert sum(row["groups/all_right"] for row in rows) > 0
    assert sum(row["samples/overlong_dropped"] for row in rows) > 0
    drafter = SrtDrafter()
    drafter.load(checkpoint)
    dropped = [sample for sample in table if sample["advantage"] is None]
    assert dropped
    for sample in dropped:  # they feed the drafter
        kept = drafter.caches["train"].rollouts(tuple(sample["prompt_token_ids"]))
        assert sample["token_ids"] in [one.tokens.tolist() for one in kept]


def test_where_max_draws_do_not_suffice_the_step_says_so_and_goes_on(policy: Path, tmp_path: Path) -> None:
    recipe = make_recipe(policy, tmp_path, **DAPO, rollout__max_draws=5, train__num_steps=3)
    folder = train(recipe).folder
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if row["step"] > 0]
    assert any(row["groups/short"] > 0 for row in rows)
    for row in rows:
        assert row["groups/kept"] == NUM_PROMPTS - row["groups/short"]
        if row["groups/short"]:
            assert row["data/draws"] == 5
            assert f"{row['groups/short']:.0f} groups too few: rollout.max_draws reached" in step_problems(row)
        if row["groups/kept"]:
            assert row["grad_norm"] > 0


# --- PPO --------------------------------------------------------------------------------------------------------------


BFLOAT16 = PPO | {"model__dtype": "bfloat16"}


def weights_of(folder: Path) -> list[torch.Tensor]:
    return list(load_model(folder, dtype=torch.bfloat16, device="cpu").parameters())


def test_the_warm_up_leaves_the_policy_alone(policy: Path, tmp_path: Path) -> None:
    """Two steps of critic alone, then one of both; the policy's schedule begins with the third step."""
    critic = PPO["critic"] | {"warmup_steps": 2}
    changes = BFLOAT16 | {"critic": critic, "train__num_steps": 3, "train__schedule": "linear"}
    changes |= {"train__checkpoint_every": 1, "train__keep_checkpoints": 3}
    folder = train(make_recipe(policy, tmp_path, **changes)).folder
    rows = {int(row["step"]): row for row in read_metrics(folder / "metrics.jsonl")}
    checkpoints = {step: folder / "checkpoints" / f"step_{step:06d}" for step in (1, 2, 3)}
    versions = [read_state(checkpoint).policy_version for checkpoint in checkpoints.values()]
    assert versions == [0, 0, 1]
    before = weights_of(policy)
    for step in (1, 2):
        assert all(map(torch.equal, weights_of(checkpoints[step]), before))
        assert "loss" not in rows[step]
        assert "critic/loss" in rows[step]
        assert step_problems(rows[step]).endswith("critic warm-up: no update of the policy")
    assert not any(map(torch.equal, weights_of(checkpoints[3]), before))
    assert rows[3]["learning_rate"] == pytest.approx(0.01)  # the peak: its first 3 of 4 optimizer steps were warm-up


def test_an_optimizer_state_of_another_model_is_refused_with_its_folder(
    finished: Callable[..., Path], tmp_path: Path
) -> None:
    saved = shutil.copytree(finished(**BFLOAT16) / "checkpoints" / "step_000004", tmp_path / "saved")
    [file] = (saved / "optimizer").iterdir()
    with safe_open(file, framework="pt") as opened:
        metadata = opened.metadata()
    tensors = load(file.read_bytes())
    without = {name: tensor for name, tensor in tensors.items() if not name.endswith(".master")}
    narrow = tensors | {"final_norm.master": torch.ones(1)}
    for num_layers, changed, message in (
        (2, without, r"it has no embedding\.master: it is of another model, or of another model\.dtype"),
        (2, narrow, r"its final_norm\.master has shape \[1\], this model's \[32\]"),
        (1, tensors, r"this model has no layers\.1\.\S+: it is of another model, or of another model\.dtype"),
    ):
        file.write_bytes(save(changed, metadata))
        model = load_model(saved, dtype=torch.bfloat16, device="cpu")
        model.layers = model.layers[:num_layers]
        optimizer = build_optimizer(model, learning_rate=1e-3, weight_decay=0.1, betas=(0.9, 0.99))
        with pytest.raises(ValueError, match=rf"saved/optimizer: {message}; .*name=OTHER model\.path=.*saved$"):
            optimizer.load(torch.bfloat16, saved, OPTIMIZER)
