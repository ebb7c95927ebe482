"""The draft budget: the chosen nodes against brute force, and whole runs in a world whose chances and costs are known."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from srtrl.drafters.draft_tree import ROOT, DraftTree, DraftTrees
from srtrl.engine.budget import MIN_GAIN, SLACK, DraftBudget, descending_order
from srtrl.engine.calibration import Calibration
from srtrl.engine.step_cost import StepCost

FloatArray = npt.NDArray[np.float64]


def random_trees(random: np.random.Generator, num_trees: int, most_nodes: int, levels: int = 0) -> DraftTrees:
    """Trees whose scores fall along each path; with `levels`, conditional scores of which many are equal or 1."""
    trees = []
    for _ in range(num_trees):
        parents: list[int] = []
        scores: list[float] = []
        for node in range(int(random.integers(0, most_nodes + 1))):
            parent = int(random.integers(ROOT, node))
            conditional = random.integers(1, levels + 1) / levels if levels else random.random()
            parents.append(parent)
            scores.append((1.0 if parent == ROOT else scores[parent]) * conditional)
        trees.append(
            DraftTree(
                token_ids=np.arange(len(parents), dtype=np.int32),
                parents=np.array(parents, np.int32),
                scores=np.array(scores, np.float32),
            )
        )
    return DraftTrees.of(trees)


def kept_nodes(trees: DraftTrees, chosen: DraftTrees) -> list[list[int]]:
    """Indices of the chosen nodes of each tree, which carry their index as token; asserts that they are trees."""
    kept = []
    for tree, part in zip(trees, chosen, strict=True):
        part.check(vocab_size=1000)
        nodes = part.token_ids.tolist()
        assert nodes == sorted(nodes)
        old_parents = [ROOT if parent == ROOT else nodes[parent] for parent in part.parents.tolist()]
        assert old_parents == tree.parents[nodes].tolist()
        assert part.scores.tolist() == tree.scores[nodes].tolist()
        kept.append(nodes)
    return kept


@st.composite
def costs(draw: st.DrawFn) -> StepCost:
    """Level stretches and risers."""
    steps = draw(st.lists(st.tuples(st.integers(1, 12), st.floats(0, 1)), min_size=1, max_size=8))
    rows, seconds, points = 0, draw(st.floats(0.1, 2)), []
    for more_rows, riser in steps:
        points.append((rows + 1, seconds + riser))
        rows, seconds = rows + 1 + more_rows, seconds + riser
        points.append((rows, seconds))
    return StepCost.from_points(points)


@settings(deadline=None, max_examples=80)
@given(st.integers(0, 2**32), st.integers(1, 5), st.sampled_from([0, 1, 2]), costs(), st.integers(0, 4), st.booleans())
def test_the_choice_is_the_best_prefix_of_the_queue(
    seed: int, num_trees: int, levels: int, cost: StepCost, num_other_rows: int, is_weighted: bool
) -> None:
    random = np.random.default_rng(seed)
    trees = random_trees(random, num_trees, 8, levels)
    weights = random.choice([0.0, 0.5, 1.0, 4.0], num_trees) if is_weighted else np.ones(num_trees)
    budget = DraftBudget(cost)
    chosen = budget.select(
        trees, context_tokens=10, num_other_rows=num_other_rows, weights=weights if is_weighted else None
    )
    kept = kept_nodes(trees, chosen)

    chances = budget.calibration.calibrated(trees)
    worths = np.repeat(weights, trees.sizes).astype(np.float32) * chances
    queue = sorted(range(trees.num_nodes), key=lambda node: (-worths[node], node))
    rates = [
        (weights.sum() + sum(float(worths[node]) for node in queue[:count]))
        / cost.seconds(num_trees + num_other_rows + count)
        for count in range(len(queue) + 1)
    ]
    flat = {int(trees.offsets[b]) + node for b, nodes in enumerate(kept) for node in nodes}
    assert flat == set(queue[: len(flat)])
    if flat:
        assert max(rates) > rates[0] * (1 + MIN_GAIN)
        assert rates[len(flat)] >= max(rates) * (1 - SLACK) * (1 - 1e-9)
        assert all(rate < max(rates) * (1 - SLACK) * (1 + 1e-9) for rate in rates[: len(flat)])
    else:
        assert max(rates) <= rates[0] * (1 + MIN_GAIN) * (1 + 1e-9)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(0, 2**100, width=32), max_size=300))
def test_the_order_is_that_of_a_stable_sort(values: list[float]) -> None:
    array = np.abs(np.array(values, np.float32))
    assert descending_order(array).tolist() == np.argsort(-array, kind="stable").tolist()


def test_a_later_edge_pays_though_the_first_riser_does_not() -> None:
    # One more row costs 60% more than none, but then 15 more are free.
    cost = StepCost.from_points([(1, 1.0), (2, 1.6), (16, 1.6), (17, 9.0), (64, 9.0)])
    chain = DraftTrees.of(
        [
            DraftTree(
                token_ids=np.arange(30, dtype=np.int32),
                parents=np.arange(-1, 29, dtype=np.int32),
                scores=np.full(30, 0.5, np.float32) * np.linspace(1, 0.9, 30, dtype=np.float32),
            )
        ]
    )
    assert DraftBudget(cost).select(chain, context_tokens=0).num_nodes == 15


def test_a_straggler_gets_many_nodes_and_a_full_batch_few() -> None:
    cost = StepCost.from_points([(1, 1.0), (128, 1.0), (256, 2.0), (1024, 8.0)])
    num_kept = [
        DraftBudget(cost).select(chain_trees(np.full((batch, 32), 0.8)), context_tokens=0).num_nodes / batch
        for batch in (1, 8, 64, 256)
    ]
    assert num_kept == sorted(num_kept, reverse=True)
    assert num_kept[0] > 15
    assert num_kept[3] < 0.5


def test_prompt_rows_take_room_from_drafts() -> None:
    cost = StepCost.from_points([(1, 1.0), (16, 1.0), (17, 3.0), (64, 12.0)])
    trees = chain_trees(np.full((4, 8), 0.5))
    assert DraftBudget(cost).select(trees, context_tokens=0).num_nodes == 12
    assert DraftBudget(cost).select(trees, context_tokens=0, num_other_rows=10).num_nodes == 2


def test_weights_move_nodes_to_those_that_will_be_last() -> None:
    cost = StepCost.from_points([(1, 1.0), (16, 1.0), (17, 30.0), (64, 30.0)])
    trees = chain_trees(np.full((4, 8), 0.7))
    even = DraftBudget(cost).select(trees, context_tokens=0)
    uneven = DraftBudget(cost).select(trees, context_tokens=0, weights=np.array([0.0, 1.0, 1.0, 8.0]))
    assert even.sizes.tolist() == [3, 3, 3, 3]
    assert uneven.sizes[0] == 0
    assert uneven.sizes[3] == 8


def test_a_long_context_makes_rows_dearer() -> None:
    cost = StepCost.padded_to(8, 128)
    cost.probe(lambda rows, context, _: 1e-3 + 1e-7 * rows * context)
    trees = chain_trees(np.full((4, 8), 0.4))
    num_nodes = [DraftBudget(cost).select(trees, context_tokens=4 * n).num_nodes for n in (10, 1000, 100_000)]
    assert num_nodes[0] > num_nodes[1] > num_nodes[2] == 0


@pytest.mark.parametrize("fixed", [0, 1, 3, 100])
def test_a_fixed_budget_is_the_first_nodes_of_each_tree_whatever_they_cost(fixed: int) -> None:
    trees = random_trees(np.random.default_rng(fixed), 12, 10)
    budget = DraftBudget(StepCost.padded_to(8, 64), fixed=fixed, most_nodes=64)  # a cost that is not known
    assert budget.max_nodes(12) == min(fixed, 64)
    chosen = budget.select(trees, context_tokens=0)
    assert kept_nodes(trees, chosen) == [list(range(min(fixed, size))) for size in trees.sizes.tolist()]


def test_without_drafts_nothing_is_chosen() -> None:
    budget = DraftBudget(StepCost.from_points([(1, 1.0), (64, 2.0)]))
    assert budget.max_nodes(3) > 0
    chosen = budget.select(DraftTrees.empty(3), context_tokens=5)
    assert len(chosen) == 3
    assert chosen.num_nodes == 0
    none = budget.select(DraftTrees.empty(0), context_tokens=0)
    budget.observe(none, np.zeros(1, np.int64), np.empty(0, np.int64))
    budget.record(none, context_tokens=0, seconds=1.0)
    assert len(none) == 0


def chain_trees(conditionals: FloatArray) -> DraftTrees:
    """Chains of [B, D] conditional scores; the second node is a sibling of the first, with a third of what it leaves."""
    batch, depth = conditionals.shape
    siblings = (1 - conditionals[:, :1]) / 3
    paths = np.cumprod(conditionals, axis=1)
    scores = np.concatenate([paths[:, :1], siblings, paths[:, 1:]], axis=1)
    parents = np.array([ROOT, ROOT, 0, *range(2, depth)], np.int32)
    assert scores.shape == (batch, len(parents))
    return DraftTrees(
        token_ids=np.tile(np.arange(scores.shape[1], dtype=np.int32), batch),
        parents=np.tile(parents, batch),
        scores=scores.astype(np.float32).ravel(),
        offsets=np.arange(batch + 1, dtype=np.int64) * scores.shape[1],
    )


@dataclass(slots=True)
class World:
    """A drafter whose scores are off in a known way, and steps of a known cost.

    In each step a sequence's draft has a quality of its own; a node is accepted with 0.75 times its conditional score.
    """

    batch: int
    seconds: Callable[[int], float]
    """True cost of a step by its rows."""
    draft_seconds: float = 0.0
    quality: float = 1.0
    """Factor of the conditional scores."""
    noise: float = 0.0
    """Standard deviation of a measured step's seconds, as a share."""
    depth: int = 12
    num_steps: int = 0
    spent: float = 0.0
    tokens: float = 0.0
    """Expected ones, by the true chances of what was verified: less noisy than those emitted."""

    def propose(self, random: np.random.Generator, most: int) -> DraftTrees:
        """Draft of at most so many nodes a sequence."""
        means = random.beta(2, 1, (self.batch, 1))
        noise = random.uniform(-0.2, 0.2, (self.batch, self.depth))
        trees = chain_trees(self.quality * np.clip(means + noise, 0.02, 0.98))
        return DraftTrees.of(tree.first(most) for tree in trees)

    def truth(self, trees: DraftTrees) -> FloatArray:
        """[num_nodes], true chances of the paths."""
        true_chances = np.empty(trees.num_nodes)
        for first, tree in zip(trees.offsets.tolist(), trees, strict=False):
            for node, parent in enumerate(tree.parents.tolist()):
                above, true_above = (tree.scores[parent], true_chances[first + parent]) if parent >= 0 else (1, 1)
                true_chances[first + node] = 0.75 * tree.scores[node] / above * true_above
        return true_chances

    def step(self, budget: DraftBudget, random: np.random.Generator) -> None:
        """One step of an engine: ask, choose, emit, learn."""
        most = budget.max_nodes(self.batch)
        trees = self.propose(random, most) if most else DraftTrees.empty(self.batch)
        chosen = budget.select(trees, context_tokens=100 * self.batch)
        emitted = [self.emit(tree, part, random) for tree, part in zip(trees, chosen, strict=True)]
        offsets = np.cumsum([0, *map(len, emitted)], dtype=np.int64)
        budget.observe(trees, offsets, np.concatenate(emitted))
        seconds = self.seconds(self.batch + chosen.num_nodes)
        draft_seconds = self.draft_seconds if most else 0.0
        measured = seconds * max(1 + self.noise * random.standard_normal(), 0.2)
        budget.record(chosen, context_tokens=100 * self.batch, seconds=measured, draft_seconds=draft_seconds)
        self.num_steps += 1
        self.spent += seconds + draft_seconds
        self.tokens += self.batch + float(self.truth(chosen).sum())

    def emit(self, tree: DraftTree, part: DraftTree, random: np.random.Generator) -> npt.NDArray[np.int64]:
        """Tokens that verifying `part` of the proposed tree gives; a node's token is its index."""
        verified = set(part.token_ids.tolist())
        tokens, node = [], ROOT
        while node == ROOT or node in verified:
            chance = random.random()
            above = 1.0 if node == ROOT else float(tree.scores[node])
            following = -1
            for child in np.flatnonzero(tree.parents == node).tolist():
                chance -= 0.75 * float(tree.scores[child]) / above
                if chance < 0:
                    following = child
                    break
            tokens.append(following if following >= 0 else 999)
            if following < 0:
                break
            node = following
        return np.array(tokens, np.int64)

    def best_fixed_rate(self) -> float:
        """Tokens a second of the best fixed number of nodes a sequence; none at all costs no drafting either."""
        random = np.random.default_rng(1)
        wide = World(batch=400, seconds=self.seconds, quality=self.quality, depth=self.depth)
        trees = wide.propose(random, self.depth + 1)
        gains = wide.truth(trees).reshape(400, -1).mean(axis=0).cumsum()
        rates = [self.batch / self.seconds(self.batch)]
        for num_nodes, gain in enumerate(gains.tolist(), 1):
            seconds = self.seconds(self.batch * (1 + num_nodes)) + self.draft_seconds
            rates.append(self.batch * (1 + gain) / seconds)
        return max(rates)

    @property
    def rate(self) -> float:
        return self.tokens / self.spent


def padded(rows: int) -> int:
    return -(-rows // 8) * 8


COSTS: dict[str, Callable[[int], float]] = {
    "a small CPU: dear rows": lambda rows: 1e-3 + 1e-4 * padded(rows),
    "a CPU": lambda rows: 20e-3 + 5e-4 * padded(rows),
    "level, then linear": lambda rows: 2e-3 * max(1.0, rows / 256),
    "stairs": lambda rows: 1e-3 * (1 + -(-rows // 64)),
}


def run(world: World, budget: DraftBudget, num_steps: int) -> None:
    random = np.random.default_rng(world.batch)
    for _ in range(num_steps):
        world.step(budget, random)


def learned_cost(world: World) -> StepCost:
    """As an engine learns it: forward passes are timed, but a step has host work as well."""
    cost = StepCost.padded_to(8, 2048)
    cost.probe(lambda rows, _, __: 0.6 * world.seconds(rows))
    return cost
