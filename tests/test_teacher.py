"""On-policy distillation: a teacher's scores against `transformers` and against a program of a user's own."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from rank_cases import FORKED
from rank_runs import assert_close_runs, train_on_ranks
from tiny_run import make_policy, make_recipe, train
from transformers import AutoModelForCausalLM

from srtrl.features.teacher import check_vocabulary
from srtrl.metrics import read_metrics
from srtrl.model.files import read_tensors
from srtrl.model.folders import load_tokenizer
from srtrl.run.steps import latest_checkpoint

ALONE = [{"name": "correct", "weight": 0.0}]
QUICK: dict[str, Any] = {"eval": {"before_and_after": False}, "train__num_steps": 2, "rollout__temperature": 0.7}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another policy with the same tokenizer."""
    return make_policy(tmp_path_factory.mktemp("teacher") / "policy", seed=5)


@pytest.mark.parametrize(
    ("clip", "changes"), [(None, {}), (None, {"model__lora": {"rank": 4}}), (0.5, {"rewards": ALONE})], ids=str
)
def test_advantages_and_gaps_by_transformers(
    clip: float | None, changes: dict[str, Any], policy: Path, teacher: Path, tmp_path: Path
) -> None:
    """Scored at the rollout's temperature, added after whitening; in the first step, whose policy is known."""
    algorithm = {"whiten_advantages": True, "teacher": {"path": str(teacher), "coefficient": 0.3, "clip": clip}}
    folder = train(make_recipe(policy, tmp_path / "it", algorithm=algorithm, **QUICK | changes)).folder
    plain = train(make_recipe(policy, tmp_path / "plain", algorithm={"whiten_advantages": True}, **QUICK | changes))
    model = AutoModelForCausalLM.from_pretrained(teacher).double()
    files = [run / "rollouts" / "step_000001.parquet" for run in (folder, plain.folder)]
    rows, tasks = (pq.read_table(file).to_pylist() for file in files)
    gaps = []
    for row, task in zip(rows, tasks, strict=True):
        tokens = row["prompt_token_ids"] + row["token_ids"]
        logits = model(torch.tensor([tokens])).logits[0, len(row["prompt_token_ids"]) - 1 : -1] / 0.7
        scores = logits.log_softmax(-1).detach().numpy()[np.arange(len(row["token_ids"])), row["token_ids"]]
        gaps.append(scores - row["rollout_logprobs"])
        pull = 0.3 * gaps[-1].clip(-(clip or np.inf), clip or np.inf).mean()
        assert row["advantage"] == pytest.approx(task["advantage"] + pull, abs=1e-5)
        assert row["token_ids"] == task["token_ids"]
    assert any(row["advantage"] for row in tasks) == (changes.get("rewards") is not ALONE)
    metrics = read_metrics(folder / "metrics.jsonl")[0]
    assert metrics["teacher/gap"] == pytest.approx(-np.concatenate(gaps).mean(), abs=1e-5)
    assert metrics["teacher/gap_per_sample"] == pytest.approx(-np.mean([gap.sum() for gap in gaps]), abs=1e-4)


@FORKED
@pytest.mark.parametrize("sharding", ["fsdp2", pytest.param("ddp", marks=pytest.mark.slow)])
def test_a_larger_teacher_on_two_ranks(sharding: str, policy: Path, tmp_path: Path) -> None:
    """Of another depth and width than the policy."""
    larger = make_policy(tmp_path / "larger", seed=6, num_hidden_layers=3, hidden_size=64)
    changes = {**QUICK, "rewards": ALONE, "algorithm": {"teacher": {"path": str(larger)}}, "train__learning_rate": 1e-4}
    one = train(make_recipe(policy, tmp_path / "one", **changes)).folder
    recipe = make_recipe(policy, tmp_path, **changes, train__sharding=sharding)
    assert [process.exitcode for process in train_on_ranks(recipe, 2)] == [0, 0]
    assert_close_runs(tmp_path / "run", one, tolerance=1e-5)
    assert read_metrics(one / "metrics.jsonl")[0]["teacher/gap"] > 0.01


def test_a_teacher_that_is_the_policy_teaches_nothing(policy: Path, tmp_path: Path) -> None:
    """Groups of one sample; the optimizer's step is zero as well, without weight decay."""
    algorithm = {"teacher": {"path": str(policy)}, "old_logprobs": "recompute"}
    changes = {**QUICK, "rollout__num_samples": 1, "rewards": ALONE, "train__learning_rate": 0.1}
    folder = train(make_recipe(policy, tmp_path, algorithm=algorithm, **changes)).folder
    for row in read_metrics(folder / "metrics.jsonl"):
        assert row["teacher/gap"] == row["teacher/gap_per_sample"] == row["loss"] == 0.0
    last = latest_checkpoint(folder / "checkpoints")
    assert last is not None
    before, after = (dict(read_tensors(path / "model.safetensors")) for path in (policy, last))
    assert all(torch.equal(before[name], tensor) for name, tensor in after.items())


def test_vocabularies_are_compared_by_ids_and_texts(policy: Path) -> None:
    """Tokens that only the teacher has do not matter."""
    ours, theirs = load_tokenizer(policy), load_tokenizer(policy)
    theirs.add_tokens(["<think>"])
    check_vocabulary(ours, theirs)
    with pytest.raises(ValueError, match=r"algorithm.teacher.path: .*'<think>' of the policy and None of the teacher"):
        check_vocabulary(theirs, ours)
    ours.add_tokens(["<other>"])
    with pytest.raises(ValueError, match=r"is '<other>' of the policy and '<think>' of the teacher"):
        check_vocabulary(ours, theirs)


def test_a_resume_needs_the_teacher_that_the_run_has_had(policy: Path, teacher: Path, tmp_path: Path) -> None:
    """Wherever it is now; one that is new may begin."""
    moved = shutil.copytree(teacher, tmp_path / "moved")

    def resume(num_steps: int, path: Path | None) -> None:
        algorithm = {} if path is None else {"teacher": {"path": str(path)}}
        steps = {"train__num_steps": num_steps, "train__checkpoint_every": 1}
        train(make_recipe(policy, tmp_path, algorithm=algorithm, **QUICK | steps), resume=num_steps > 1)

    resume(1, None)
    resume(2, teacher)
    resume(3, moved)
    shutil.copy(policy / "model.safetensors", moved)
    with pytest.raises(
        ValueError, match=rf"algorithm.teacher.path has changed: .*{moved}, are not those that .*000003"
    ):
        resume(4, moved)
    resume(4, None)
