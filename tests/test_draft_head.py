"""A draft head changes no token, whatever it guesses, and learns beside the policy, which does not notice.

The latter, and that no trained head changes a run, is in `test_promises.py`.
"""

import shutil
from collections.abc import Callable
from itertools import cycle, product
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
import update_cases
from attention_head_cases import SPECULATORS, make_folder
from drafter_cases import random_draft
from engine_cases import Completions, Letters, decode, options, outputs, tiny_policy
from hypothesis import given
from hypothesis import strategies as st
from plain_kernels import uniform_noise
from safetensors.torch import load_file
from test_engine_property import varied_requests
from test_turns import converse, turn_requests
from tiny_run import HEAD, assert_same_run, learned_rows, make_recipe, train
from torch.nn import functional

from srtrl.build_models import build_draft_head
from srtrl.drafters.base import DrafterBase
from srtrl.drafters.draft_tree import ROOT, DraftTree, DraftTrees, check_trees
from srtrl.drafters.none import Drafter as NoDrafter
from srtrl.drafters.srt import Drafter as SrtDrafter
from srtrl.engine.cpu_runner import CpuRunner
from srtrl.engine.engine import Engine
from srtrl.engine.runner import EngineOptions, Runner
from srtrl.features import draft_head_learner
from srtrl.features.draft_head import REFUSED, DraftHead, draft_chains, length_of, merge_chains
from srtrl.features.draft_head_learner import Texts
from srtrl.features.head_drafter import FILE, HeadDrafter
from srtrl.metrics import read_metrics
from srtrl.model.attention import PackedPlan
from srtrl.model.noise import make_rng_key
from srtrl.model.transformer import Transformer
from srtrl.model.weights import load_model
from srtrl.rollout.packing import pack, sharing_order
from srtrl.run.steps import latest_checkpoint
from srtrl.trainer.trainer import TrainingStoppedError


def make_head(policy: Transformer, kind: str) -> DraftHead:
    """An untrained head, or one with weights that no training gives; it lists 50 of 61 tokens."""
    head = DraftHead(policy, policy.dtype, vocabulary=50, seed=0)
    with torch.no_grad():
        if kind == "random":
            head.down.copy_(torch.randn(head.down.shape, generator=torch.Generator().manual_seed(1)))
        if kind == "garbage":
            head.norm[3] = torch.nan
        if kind == "infinite":
            head.fc.fill_(1e38)
            head.down.fill_(1e38)
    return head


def head_engine(
    policy: Transformer,
    chosen: EngineOptions,
    head: DraftHead,
    *,
    drafter: DrafterBase | None = None,
    runner: Runner | None = None,
    k: int = 3,
) -> Engine:
    """An engine whose drafter has a head, which always runs."""
    runner = runner or CpuRunner(policy, chosen)
    headed = cast(DrafterBase, HeadDrafter(drafter or NoDrafter(), head, runner, k=k, slots=chosen.slots))
    return Engine(policy, chosen, tokenizer=Letters(), drafter=headed, runner=runner)


@pytest.fixture(scope="module")
def plain() -> tuple[Transformer, Completions]:
    policy = tiny_policy()
    return policy, decode(Engine(policy, options(slots=1), tokenizer=Letters()), varied_requests())


@pytest.mark.parametrize(
    ("kind", "drafter"),
    [("untrained", NoDrafter), ("random", SrtDrafter), ("garbage", SrtDrafter), ("infinite", NoDrafter)],
)
def test_tokens_are_those_without_drafts(
    kind: str, drafter: type[DrafterBase], plain: tuple[Transformer, Completions]
) -> None:
    policy, truth = plain
    accepted = 0.0
    for slots, num_pages in ((5, 10), (16, 70)):  # with few pages samples are preempted
        chosen = options(slots=slots, num_pages=num_pages, draft_budget=8)
        engine = head_engine(policy, chosen, make_head(policy, kind), drafter=drafter())
        for _ in range(2 if slots == 16 else 1):
            assert outputs(decode(engine, varied_requests())) == outputs(truth)
        metrics = engine.take_metrics()
        assert metrics["engine/head_steps_share"] > 0.1
        accepted += metrics["engine/head_acceptance_depth_1"]
        assert (metrics["engine/preemptions"] > 0) == (num_pages == 10)
    assert (accepted > 0) == (kind in ("untrained", "random"))


def test_guesses_are_for_the_next_step_or_none(
    plain: tuple[Transformer, Completions], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, truth = plain
    engine = head_engine(policy, options(draft_budget=8), make_head(policy, "random"))
    rooms = cycle((8, 0))  # every second step has no room for the guesses that were made for it
    monkeypatch.setattr(engine.control, "max_nodes", lambda *_: next(rooms))
    assert outputs(decode(engine, varied_requests())) == outputs(truth)
    assert 0.2 < engine.take_metrics()["engine/head_steps_share"] < 0.6


def test_turns_are_those_without_drafts(plain: tuple[Transformer, Completions]) -> None:
    policy, _ = plain
    asked = turn_requests(num_samples=2, max_new_tokens=36)
    truth = converse(Engine(policy, options(slots=1), tokenizer=Letters()), asked)
    chosen = options(slots=5, num_pages=70, draft_budget=8, max_draft_nodes=8)
    engine = head_engine(policy, chosen, make_head(policy, "random"), drafter=SrtDrafter())
    assert outputs(converse(engine, asked, np.random.default_rng(0))) == outputs(truth)
    assert engine.take_metrics()["engine/head_acceptance_depth_1"] > 0


def test_what_margins_were_worth_is_saved_and_read_for_any_k(
    tmp_path: Path, plain: tuple[Transformer, Completions]
) -> None:
    policy, truth = plain

    def with_head(k: int) -> tuple[Engine, HeadDrafter]:
        engine = head_engine(policy, options(draft_budget=4), make_head(policy, "random"), k=k)
        assert isinstance(engine.drafter, HeadDrafter)
        return engine, engine.drafter

    engine, saved = with_head(3)
    saved.load(tmp_path)  # of a run that had no head
    decode(engine, varied_requests())
    saved.save(tmp_path)
    [[purpose, rows]] = saved.tables.items()
    assert (rows[:, 0].sum((1, 2)) > 0).all()
    for k in (2, 3, 5):
        engine, loaded = with_head(k)
        loaded.load(tmp_path)
        table = loaded.tables[purpose]
        assert (table[:3] == rows[:k]).all()
        assert len(table) == k
        assert not table[3:].any()
        assert outputs(decode(engine, varied_requests())) == outputs(truth)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_guesses_are_the_two_best_listed_tokens_under_the_noise(temperature: float) -> None:
    policy, num = tiny_policy(), 7
    head = make_head(policy, "random")
    head.count(np.repeat(np.arange(61), np.arange(61) % 7))
    head.refresh(policy)
    hidden = torch.randn(num, policy.config.hidden_size, generator=torch.Generator().manual_seed(0))
    tokens = np.arange(num, dtype=np.int32)
    keys = np.array([make_rng_key(0, "train", 0, index) for index in range(num)], np.uint64)
    temperatures, positions = np.full(num, temperature, np.float32), np.arange(num)
    found, margins = draft_chains(head, hidden, tokens, temperatures, keys, positions, k=3)
    length = length_of(hidden)
    state, last = hidden / length, torch.from_numpy(tokens).long()
    for depth in range(3):
        state = head(state, head.embed(last))
        logits = torch.full((num, 61), -torch.inf).index_copy(1, head.token_ids, head.logits(state, length))
        logits = logits.detach().double() / (temperature or 1.0)
        if temperature:
            signed = torch.from_numpy(keys.view(np.int64))
            noise = uniform_noise(signed, torch.from_numpy(positions + depth), 61)
            logits = logits - torch.log(-torch.log(noise))
        top = logits.topk(2)
        assert found[:, depth].tolist() == top.indices.tolist()
        np.testing.assert_allclose(margins[:, depth], top.values[:, 0] - top.values[:, 1], rtol=1e-4, atol=1e-4)
        last = top.indices[:, 0]
    unlisted = {token for token in range(61) if token % 7 == 0}
    assert len(unlisted & set(head.token_ids.tolist())) == 0


def paths_of(tree: DraftTree) -> dict[tuple[int, ...], float]:
    """The tokens from the root to each node, and its score."""
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tree.token_ids.tolist(), tree.parents.tolist(), strict=True):
        paths.append((*paths[parent], token) if parent != ROOT else (token,))
    return dict(zip(paths, tree.scores.tolist(), strict=True))


@given(seed=st.integers(0, 10**6))
def test_merged_trees_have_the_paths_of_both(seed: int) -> None:
    random, num_trees = np.random.default_rng(seed), 5
    trees = [random_draft(random, 8) for _ in range(num_trees)]
    owners = np.flatnonzero(random.random(num_trees) < 0.7)
    tokens = random.permuted(np.tile(np.arange(4, dtype=np.int32), (len(owners), 3, 1)), axis=-1)[..., :2].copy()
    tokens[random.random(len(owners)) < 0.2, 1:] = REFUSED
    steps = random.choice([0.2, 0.5, 1.0], (len(owners), 3, 2)).astype(np.float32)
    paths = np.concatenate([np.ones((len(owners), 1)), steps[:, :-1, 0].cumprod(1)], 1)
    chances = (steps * paths[..., None]).astype(np.float32) * (tokens != REFUSED)
    rooms = random.integers(8, 16, num_trees)
    merged = merge_chains(DraftTrees.of(trees), owners, tokens, chances, rooms, 0.0)
    check_trees(merged, rooms, 4, "the merge")
    for b in range(num_trees):
        assert (np.diff(merged[b].scores) <= 0).all()
        expected = paths_of(trees[b])
        for c in np.flatnonzero(owners == b):
            for depth, kind in product(range(3), range(2)):
                if tokens[c, depth, kind] != REFUSED:
                    path = (*tokens[c, :depth, 0].tolist(), int(tokens[c, depth, kind]))
                    chance = float(chances[c, depth, kind])
                    expected[path] = 1 - (1 - expected.get(path, 0.0)) * (1 - chance)
        found = paths_of(merged[b])
        assert found == pytest.approx({path: expected[path] for path in found}, abs=1e-6)
        left_out = sorted(score for path, score in expected.items() if path not in found)
        assert len(found) == min(len(expected), rooms[b])
        assert not left_out or left_out[-1] <= min(found.values()) + 1e-6


# --- Training --------------------------------------------------------------------------------------------------------


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


def test_a_pretrained_head_changes_no_run_and_no_resume(
    policy: Path, finished: Callable[..., Path], tmp_path: Path
) -> None:
    folder = make_folder(
        tmp_path / "head",
        load_model(policy, dtype=torch.float32, device="cpu"),
        SPECULATORS,
        eagle_aux_hidden_state_layer_ids=[0, 1, 2],
    )
    settings = HEAD | {"rollout__draft_head": {"kind": "eagle3", "path": str(folder)}}
    train(make_recipe(policy, tmp_path, **settings, train__num_steps=2))
    resumed = train(make_recipe(policy, tmp_path, **settings), resume=True).folder
    assert_same_run(resumed, finished(**HEAD | {"rollout__draft_head": None}))
    assert read_metrics(resumed / "metrics.jsonl")[-1]["engine/head_acceptance_depth_1"] > 0
    shutil.rmtree(folder)
    with pytest.raises(ValueError, match="head: there is no such folder"):
        train(make_recipe(policy, tmp_path / "again", **settings))


def test_a_head_that_diverges_stops_the_run_and_names_its_options(policy: Path, tmp_path: Path) -> None:
    changes = {**HEAD, "rollout__draft_head": {"learning_rate": 1e9}, "eval": {"before_and_after": False}}
    with pytest.raises(TrainingStoppedError, match=r"loss of the draft head is nan: lower rollout.draft_head.learning"):
        train(make_recipe(policy, tmp_path, **changes))


@pytest.mark.parametrize(("vocabulary", "num_targets"), [(19, 256), (8, 3)])
def test_loss_and_gradient_are_those_written_out(
    vocabulary: int, num_targets: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each second token learns the next tokens of the same turn; the policy's weights get no gradient."""
    monkeypatch.setattr(draft_head_learner, "NUM_TARGETS", num_targets)
    policy = update_cases.make_policy()
    recipe = update_cases.make_recipe(rollout__draft_head={"k": 3, "vocabulary": vocabulary})
    learner = build_draft_head(recipe, policy)
    assert learner is not None
    assert learner.weights == pytest.approx([1 / 1.96, 0.6 / 1.96, 0.36 / 1.96])
    head = learner.head.double()
    torch.nn.init.normal_(head.down)
    head.count(np.arange(19).repeat(np.arange(19)))  # the list has the last ones
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
    found_loss = learner.loss(texts, torch.arange(0, len(hidden), 2))
    found_loss.backward()  # type: ignore[no-untyped-call]
    found = [parameter.grad for parameter in head.parameters()]
    assert all(parameter.grad is None for parameter in policy.parameters())
    head.zero_grad()
    listed = policy.head_weight.detach()[head.token_ids]
    loss, num = torch.zeros((), dtype=torch.float64), 0
    for row in range(0, len(hidden), 2):
        length = length_of(hidden[row : row + 1])
        state = hidden[row : row + 1] / length
        for depth, weight in enumerate(learner.weights, 1):
            if row + depth >= len(hidden) or places[row + depth] != places[row] + depth:
                break
            state = head(state, head.embed(target_ids[row + depth - 1 : row + depth]))
            target = functional.linear(hidden[row + depth], listed) / update_cases.TEMPERATURE
            target[target < target.sort().values[-num_targets:][0]] = -torch.inf  # the head has its share of the rest
            target = target.softmax(-1)
            guess = (functional.linear(state * length, listed)[0] / update_cases.TEMPERATURE).softmax(-1)
            entropy, variation = -(target * guess.log()).sum(), (target - guess).abs().sum() / 2
            loss, num = loss + weight * (0.25 * entropy + 0.75 * variation), num + 1
    loss.backward()  # type: ignore[no-untyped-call]
    assert num > 20
    assert found_loss.item() == pytest.approx(loss.item(), rel=1e-12)
    expected = [parameter.grad for parameter in head.parameters()]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
