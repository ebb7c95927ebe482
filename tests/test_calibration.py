"""Calibrated chances of acceptance: against a plain count, against a known truth, and never above the parent's."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from srtrl.drafters.draft_tree import ROOT, DraftTree, DraftTrees
from srtrl.engine.calibration import LEAST_TRUST, MOST_TRUST, Calibration, Trust


def random_trees(random: np.random.Generator, num_trees: int) -> DraftTrees:
    """Trees of up to 12 nodes; tokens are distinct among siblings."""
    trees = []
    for _ in range(num_trees):
        parents: list[int] = []
        scores: list[float] = []
        for node in range(int(random.integers(0, 13))):
            parent = int(random.integers(ROOT, node))
            parents.append(parent)
            scores.append((1.0 if parent == ROOT else scores[parent]) * random.choice([0.0, 0.1, random.random(), 1.0]))
        trees.append(
            DraftTree(
                token_ids=np.arange(len(parents), dtype=np.int32),
                parents=np.array(parents, np.int32),
                scores=np.array(scores, np.float32),
            )
        )
    return DraftTrees.of(trees)


def random_path(random: np.random.Generator, tree: DraftTree) -> list[int]:
    """Tokens that a step might give: some of the tree's nodes downwards, then possibly another token."""
    path: list[int] = []
    node = ROOT
    while True:
        children = np.flatnonzero(tree.parents == node).tolist()
        if not children or random.random() < 0.3:
            return [*path, 999] if random.random() < 0.8 or not path else path
        node = int(random.choice(children))
        path.append(node)


def flat(paths: list[list[int]]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    offsets = np.cumsum([0, *map(len, paths)], dtype=np.int64)
    return offsets, np.array([token for path in paths for token in path], np.int64)


def observe_chains(
    calibration: Calibration,
    truth: Callable[[float, int], float],
    random: np.random.Generator,
    num_steps: int,
    depth: int = 4,
) -> None:
    """Steps of 32 chains with random conditional scores, each node accepted with the chance that `truth` says."""
    for _ in range(num_steps):
        conditionals = random.uniform(0.02, 0.98, (32, depth))
        chances = np.array([[truth(q, d) for d, q in enumerate(row)] for row in conditionals.tolist()])
        num_accepted = np.cumprod(random.random((32, depth)) < chances, axis=1).sum(axis=1).tolist()
        trees = DraftTrees.of(
            DraftTree(
                token_ids=np.arange(depth, dtype=np.int32),
                parents=np.arange(-1, depth - 1, dtype=np.int32),
                scores=np.cumprod(row).astype(np.float32),
            )
            for row in conditionals
        )
        calibration.observe(trees, *flat([[*range(count), 999] for count in num_accepted]))


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32))
def test_the_outcome_is_known_of_the_nodes_below_the_emitted_path(seed: int) -> None:
    random = np.random.default_rng(seed)
    trees = random_trees(random, 6)
    paths = [random_path(random, tree) for tree in trees]
    num_known = num_accepted = 0
    for tree, path in zip(trees, paths, strict=True):
        ancestors: list[list[int]] = []
        for node, parent in enumerate(tree.parents.tolist()):
            above = [] if parent == ROOT else ancestors[parent]
            ancestors.append([*above, node])
            is_known = path[: len(above)] == above and len(path) > len(above)
            num_known += is_known
            num_accepted += is_known and path[len(above)] == node
    calibration = Calibration()
    calibration.observe(trees, *flat(paths))
    assert calibration._counts.sum() == pytest.approx(num_known)
    assert calibration._errors[:, 0].sum() == num_known
    assert calibration._errors[:, 2].sum() == num_accepted


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32))
def test_a_child_is_never_more_likely_than_its_parent(seed: int) -> None:
    random = np.random.default_rng(seed)
    calibration = Calibration()
    for _ in range(5):
        trees = random_trees(random, 20)
        calibration.observe(trees, *flat([random_path(random, tree) for tree in trees]))
    trees = random_trees(random, 20)
    chances = calibration.calibrated(trees)
    assert ((chances >= 0) & (chances <= 1)).all()
    for first, tree in zip(trees.offsets.tolist(), trees, strict=False):
        for node, parent in enumerate(tree.parents.tolist()):
            assert parent == ROOT or chances[first + node] <= chances[first + parent]


def test_before_any_outcome_scores_are_believed() -> None:
    trees = random_trees(np.random.default_rng(0), 10)
    np.testing.assert_allclose(Calibration().calibrated(trees), trees.scores, rtol=1e-5)


@pytest.mark.parametrize("kind", ["too sure", "too shy", "only deep ones are wrong"])
def test_chances_become_the_true_ones(kind: str) -> None:
    truths: dict[str, Callable[[float, int], float]] = {
        "too sure": lambda q, _: q**2,
        "too shy": lambda q, _: q**0.4,
        "only deep ones are wrong": lambda q, depth: q if depth == 0 else 0.5 * q,
    }
    truth = truths[kind]
    calibration = Calibration()
    random = np.random.default_rng(0)
    observe_chains(calibration, truth, random, 20)
    before = calibration.error
    observe_chains(calibration, truth, random, 250)
    calibration.reset_error()
    assert calibration.error == 0
    observe_chains(calibration, truth, random, 50)
    assert calibration.error < 0.04
    assert before > calibration.error
    for conditional in (0.1, 0.3, 0.5, 0.7, 0.9):
        chain = DraftTree(
            token_ids=np.arange(2, dtype=np.int32),
            parents=np.array([-1, 0], np.int32),
            scores=np.array([0.8, 0.8 * conditional], np.float32),
        )
        first, second = calibration.calibrated(DraftTrees.of([chain])).tolist()
        assert first == pytest.approx(truth(0.8, 0), abs=0.06)
        assert second / first == pytest.approx(truth(conditional, 1), abs=0.09)


def test_deep_nodes_are_corrected_as_shallow_ones_until_their_own_outcomes_are_known() -> None:
    """While nothing is verified a step gives one token, and says nothing of deeper nodes; these would stay unlikely."""
    conditionals = np.full(4, 0.3, np.float32)
    chain = DraftTree(
        token_ids=np.arange(4, dtype=np.int32),
        parents=np.arange(-1, 3, dtype=np.int32),
        scores=np.cumprod(conditionals),
    )
    trees = DraftTrees.of([chain] * 64)
    calibration = Calibration()
    calibration.observe(trees, *flat([[0]] * 64))
    first, *deeper = calibration.calibrated(trees)[:4].tolist()
    assert first > 0.8
    np.testing.assert_allclose(deeper, [first**2, first**3, first**4], rtol=1e-4)
    for _ in range(8):
        calibration.observe(trees, *flat([[0, 999]] * 64))
    second = calibration.calibrated(trees)[1]
    assert second < 0.1, "their own outcomes outvote that"


def test_what_was_true_long_ago_is_forgotten() -> None:
    calibration = Calibration()
    random = np.random.default_rng(0)
    observe_chains(calibration, lambda _, __: 0.95, random, 300, depth=1)
    observe_chains(calibration, lambda _, __: 0.05, random, 1500, depth=1)
    chain = DraftTree(
        token_ids=np.zeros(1, np.int32), parents=np.array([-1], np.int32), scores=np.array([0.5], np.float32)
    )
    assert calibration.calibrated(DraftTrees.of([chain]))[0] < 0.2


def test_steps_without_drafts_are_no_matter() -> None:
    calibration = Calibration()
    calibration.observe(DraftTrees.empty(3), *flat([[1], [2], [3]]))
    assert calibration.error == 0
    assert calibration.calibrated(DraftTrees.empty(3)).shape == (0,)


def test_trust_is_what_was_accepted_by_what_was_expected_class_by_class() -> None:
    trust = Trust(3)
    assert [trust.of(index) for index in range(3)] == [1, 1, 1]
    for _ in range(500):
        trust.observe(0, 10.0, 6)
        trust.observe(1, 1.0, 5)
    assert trust.of(0) == pytest.approx(0.6, abs=0.01)
    assert trust.of(1) == MOST_TRUST
    assert trust.of(2) == 1
    for _ in range(500):
        trust.observe(0, 10.0, 0)
    assert trust.of(0) == LEAST_TRUST
    for _ in range(500):
        trust.observe(0, 0.0, 0)
    assert trust.of(0) > 0.9, "where nothing is verified, an old distrust fades"
