"""A draft head that learns beside the policy, which does not notice (`test_promises.py`): a resumed head goes on."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import update_cases
from safetensors.torch import load_file
from tiny_run import HEAD, assert_same_run, learned_rows, make_recipe, train
from torch.nn import functional

from srtrl.build import build_draft_head
from srtrl.features.draft_head import length_of
from srtrl.features.draft_head_learner import Texts
from srtrl.features.head_drafter import FILE
from srtrl.metrics import read_metrics
from srtrl.model.attention import PackedPlan
from srtrl.rollout.packing import pack, sharing_order
from srtrl.run.steps import latest_checkpoint
from srtrl.trainer.trainer import TrainingStoppedError

NO_EVALUATION = {"before_and_after": False}


def last_checkpoint(run: Path) -> Path:
    checkpoint = latest_checkpoint(run / "checkpoints")
    assert checkpoint is not None
    return checkpoint


def test_a_resumed_head_learns_what_it_would_have(policy: Path, finished: Callable[..., Path], tmp_path: Path) -> None:
    settings = {**HEAD, "rollout__drafter": "none"}  # its own drafts would decide where the head drafts
    whole = finished(**settings)
    rows = read_metrics(whole / "metrics.jsonl")
    losses = [row["draft_head/loss"] for row in rows if "draft_head/loss" in row]
    assert losses[-1] < losses[0]
    assert rows[-1]["engine/head_acceptance_depth_1"] > 0.2
    train(make_recipe(policy, tmp_path / "again", **settings, train__num_steps=2))
    resumed = train(make_recipe(policy, tmp_path / "again", **settings), resume=True).folder
    assert learned_rows(resumed)[-2:] == learned_rows(whole)[-2:]
    [state] = (last_checkpoint(whole) / "draft_head").iterdir()
    assert load_file(state).keys() >= {"counts", "fc.weight", "fc.exp_avg", "norm.step"}
    for file, name in ((state.relative_to(last_checkpoint(whole)), "counts"), (Path(FILE), "train")):
        found, expected = (load_file(last_checkpoint(run) / file) for run in (resumed, whole))
        assert found[name].sum() > 1000
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    shutil.rmtree(tmp_path / "again")
    without = HEAD | {"rollout__draft_head": None}
    train(make_recipe(policy, tmp_path / "again", **without, train__num_steps=2))  # the head comes later
    added = train(make_recipe(policy, tmp_path / "again", **HEAD), resume=True).folder
    assert_same_run(added, whole, beside=("draft_head/",))


def test_a_head_that_diverges_stops_the_run_and_names_its_options(policy: Path, tmp_path: Path) -> None:
    changes = {**HEAD, "rollout__draft_head": {"learning_rate": 1e9}, "eval": NO_EVALUATION}
    with pytest.raises(TrainingStoppedError, match=r"loss of the draft head is nan: lower rollout.draft_head.learning"):
        train(make_recipe(policy, tmp_path, **changes))


def test_gradient_is_that_of_plain_cross_entropy() -> None:
    """Of each second token, to the next tokens of the same turn; and none of the policy's weights."""
    policy = update_cases.make_policy()
    recipe = update_cases.make_recipe(rollout__draft_head={"k": 3})
    learner = build_draft_head(recipe, policy)
    assert learner is not None
    assert learner.weights == pytest.approx([1 / 1.96, 0.6 / 1.96, 0.36 / 1.96])
    head = learner.head.double()
    torch.nn.init.normal_(head.down)
    head.refresh(policy)
    sequences = update_cases.make_sequences(policy)
    sequences = [sequences[index] for index in sharing_order(sequences)]
    states, tokens, places = [], [], []  # of each sequence alone: none of its tokens is shared
    for number, one in enumerate(sequences):
        alone = policy(torch.from_numpy(one.token_ids), PackedPlan([len(one.token_ids)], "cpu"))
        states.append(alone[one.targets - 1].detach())
        tokens.append(torch.from_numpy(one.token_ids[one.targets]))
        places += [100 * number + target for target in one.targets.tolist()]
    hidden, target_ids = torch.cat(states), torch.cat(tokens)
    for first in (0, 3):  # two micro-batches
        part = next(pack(sequences[first : first + 3], 1000, "cpu"))
        assert len(part.token_ids) < sum(part.plan.lengths)
        learner.see(policy(part.token_ids, part.plan)[part.hidden_index], part)
    texts = Texts(*map(torch.cat, zip(*learner._texts, strict=True)))
    learner.loss(texts, torch.arange(0, len(hidden), 2)).backward()  # type: ignore[no-untyped-call]
    found = [parameter.grad for parameter in head.parameters()]
    assert all(parameter.grad is None for parameter in policy.parameters())
    head.zero_grad()
    targets = torch.softmax(policy.logits(hidden) / update_cases.TEMPERATURE, -1).detach()
    loss, num = torch.zeros((), dtype=torch.float64), 0
    for row in range(0, len(hidden), 2):
        length = length_of(hidden[row : row + 1])
        state = hidden[row : row + 1] / length
        for depth, weight in enumerate(learner.weights, 1):
            if row + depth >= len(hidden) or places[row + depth] != places[row] + depth:
                break
            state = head(state, head.embed(target_ids[row + depth - 1 : row + depth]))
            logits = functional.linear(state * length, policy.head_weight.detach())[0] / update_cases.TEMPERATURE
            loss, num = loss + weight * functional.cross_entropy(logits, targets[row + depth]), num + 1
    loss.backward()  # type: ignore[no-untyped-call]
    assert num > 20
    expected = [parameter.grad for parameter in head.parameters()]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
