"""What the engine counts of a step's walks, against counting them one by one."""

import random

import numpy as np
import pytest

from srtrl.drafters.draft_tree import ROOT, DraftTree, DraftTrees
from srtrl.engine.stats import MAX_DEPTH, EngineStats
from srtrl.engine.verify import Walk


def random_walk(rng: random.Random, tree: DraftTree) -> list[int]:
    """A path from the root down, ended anywhere."""
    path: list[int] = []
    while True:
        last = path[-1] if path else ROOT
        children = [node for node, parent in enumerate(tree.parents.tolist()) if parent == last]
        if not children or rng.random() < 0.3:
            return path
        path.append(rng.choice(children))


def random_tree(rng: random.Random, num_nodes: int) -> DraftTree:
    parents = [rng.randint(max(ROOT, node - 3), node - 1) for node in range(num_nodes)]
    return DraftTree(
        token_ids=np.arange(num_nodes, dtype=np.int32),
        parents=np.array(parents, np.int32),
        scores=np.ones(num_nodes, np.float32),
    )


@pytest.mark.parametrize("most_nodes", [0, 1, 30])
def test_walks_are_counted_as_one_by_one(most_nodes: int) -> None:
    rng = random.Random(most_nodes)
    stats = EngineStats()
    tries, accepted = np.zeros(MAX_DEPTH, np.int64), np.zeros(MAX_DEPTH, np.int64)
    num_tokens = num_hits = num_drafts = num_nodes = num_decodes = 0
    for _ in range(20):
        trees = [random_tree(rng, rng.randint(0, most_nodes)) for _ in range(6)]
        paths = [random_walk(rng, tree) for tree in trees]
        num_primaries = rng.randint(0, 6)
        walks = [Walk(None, path) for path in paths]  # type: ignore[arg-type]
        found = stats.add_walks(walks, DraftTrees.of(trees), num_primaries)
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
    assert (stats.num_drafts, stats.num_draft_nodes, stats.num_accepted) == (
        num_drafts,
        num_nodes,
        num_tokens - num_decodes,
    )
    assert stats.tries_by_depth.tolist() == tries.tolist()
    assert stats.accepted_by_depth.tolist() == accepted.tolist()
    assert (accepted.sum() > 0) == (most_nodes > 0)
