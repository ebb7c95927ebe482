"""What the engine counts of a step's accepted paths, against counting them one by one."""

import random

import numpy as np
import pytest
from step_cases import random_trees

from srtrl.drafters.draft_tree import ROOT, DraftTree
from srtrl.engine.stats import MAX_DEPTH, EngineStats
from srtrl.engine.verify import Verified


def random_path(rng: random.Random, tree: DraftTree) -> list[int]:
    """A path from the root down, ended anywhere."""
    path: list[int] = []
    while True:
        last = path[-1] if path else ROOT
        children = [node for node, parent in enumerate(tree.parents.tolist()) if parent == last]
        if not children or rng.random() < 0.3:
            return path
        path.append(rng.choice(children))


def verified_of(paths: list[list[int]]) -> Verified:
    """The paths with one more token each."""
    num_new = np.array([len(path) + 1 for path in paths])
    return Verified(
        slots=np.arange(len(paths)),
        token_ids=np.zeros(num_new.sum(), np.int32),
        offsets=np.append(0, num_new.cumsum()),
        nodes=np.array([node for path in paths for node in [*path, ROOT]], np.int32),
        last_nodes=np.array([path[-1] if path else ROOT for path in paths], np.int32),
        finish=np.zeros(len(paths), np.int8),
    )


@pytest.mark.parametrize("most_nodes", [0, 1, 30])
def test_paths_are_counted_as_one_by_one(most_nodes: int) -> None:
    rng, generator = random.Random(most_nodes), np.random.default_rng(most_nodes)
    stats = EngineStats()
    tries, accepted = np.zeros(MAX_DEPTH, np.int64), np.zeros(MAX_DEPTH, np.int64)
    num_tokens = num_hits = num_drafts = num_nodes = num_decodes = 0
    for _ in range(20):
        trees = random_trees(generator, generator.integers(0, most_nodes + 1, 6))
        paths = [random_path(rng, tree) for tree in trees]
        num_primaries = rng.randint(0, 6)
        found = stats.add_verified(verified_of(paths), trees, num_primaries)
        assert found == num_primaries + sum(map(len, paths[:num_primaries]))
        for tree, path in list(zip(trees, paths, strict=True))[:num_primaries]:
            num_decodes += 1
            num_tokens += 1 + len(path)
            num_hits += bool(path)
            num_drafts += tree.num_nodes > 0
            num_nodes += tree.num_nodes
            for depth in range(1, MAX_DEPTH + 1):
                stood_at = ROOT if depth == 1 else path[depth - 2] if len(path) >= depth - 1 else None
                if stood_at is not None and stood_at in tree.parents.tolist():
                    tries[depth - 1] += 1
                    accepted[depth - 1] += len(path) >= depth
    assert (stats.num_decodes, stats.num_tokens, stats.num_hits) == (num_decodes, num_tokens, num_hits)
    assert (stats.num_drafts, stats.num_draft_nodes) == (num_drafts, num_nodes)
    assert stats.num_accepted == num_tokens - num_decodes
    assert stats.tries_by_depth.tolist() == tries.tolist()
    assert stats.accepted_by_depth.tolist() == accepted.tolist()
    assert (accepted.sum() > 0) == (most_nodes > 0)
