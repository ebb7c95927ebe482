"""A world whose chances of acceptance and costs of a step are known, for the tests of the draft budget."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from srtrl.drafters.draft_tree import ROOT, DraftTree, DraftTrees
from srtrl.engine.budget import DraftBudget
from srtrl.engine.step_cost import StepCost

FloatArray = npt.NDArray[np.float64]


def chain_trees(conditionals: FloatArray, quality: float = 1.0) -> DraftTrees:
    """Chains of [B, D] conditional scores; the second node is a sibling of the first, with a third of the rest.

    All conditional scores are multiplied by `quality`.
    """
    batch, depth = conditionals.shape
    siblings = quality * (1 - conditionals[:, :1]) / 3
    paths = np.cumprod(quality * conditionals, axis=1)
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

    In each step a sequence's draft has a quality of its own; a node is accepted with `acceptance` times its conditional
    score.
    """

    batch: int
    seconds: Callable[[int], float]
    """True cost of a step by its rows."""
    draft_seconds: float = 0.0
    quality: float = 1.0
    """Factor of the conditional scores."""
    noise: float = 0.0
    """Standard deviation of a measured step's seconds, as a share."""
    acceptance: float = 0.75
    """True chance of a node, by its conditional score."""
    depth: int = 12
    num_steps: int = 0
    spent: float = 0.0
    tokens: float = 0.0
    """Expected ones, by the true chances of what was verified: less noisy than those emitted."""

    def propose(self, random: np.random.Generator, most: int) -> DraftTrees:
        """Draft of at most so many nodes a sequence."""
        means = random.beta(2, 1, (self.batch, 1))
        noise = random.uniform(-0.2, 0.2, (self.batch, self.depth))
        trees = chain_trees(np.clip(means + noise, 0.02, 0.98), self.quality)
        return DraftTrees.of(tree.first(most) for tree in trees)

    def truth(self, trees: DraftTrees) -> FloatArray:
        """[num_nodes], true chances of the paths."""
        true_chances = np.empty(trees.num_nodes)
        for first, tree in zip(trees.offsets.tolist(), trees, strict=False):
            for node, parent in enumerate(tree.parents.tolist()):
                above, true_above = (tree.scores[parent], true_chances[first + parent]) if parent >= 0 else (1, 1)
                true_chances[first + node] = self.acceptance * tree.scores[node] / above * true_above
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
        if most:
            budget.record_drafting(draft_seconds)
        budget.record(chosen, context_tokens=100 * self.batch, seconds=measured, was_asked=most > 0)
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
                chance -= self.acceptance * float(tree.scores[child]) / above
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
        wide.acceptance = self.acceptance
        trees = wide.propose(random, self.depth + 1)
        gains = wide.truth(trees).reshape(400, -1).mean(axis=0).cumsum()
        rates = [self.rate_without_drafts]
        for num_nodes, gain in enumerate(gains.tolist(), 1):
            seconds = self.seconds(self.batch * (1 + num_nodes)) + self.draft_seconds
            rates.append(self.batch * (1 + gain) / seconds)
        return max(rates)

    def forget_totals(self) -> None:
        """Count from here."""
        self.num_steps, self.spent, self.tokens = 0, 0.0, 0.0

    @property
    def rate_without_drafts(self) -> float:
        """Tokens a second of steps without drafts."""
        return self.batch / self.seconds(self.batch)

    @property
    def rate(self) -> float:
        """Expected tokens a second of what was done."""
        return self.tokens / self.spent


def padded(rows: int) -> int:
    """Rows up to the next multiple of 8."""
    return -(-rows // 8) * 8


COSTS: dict[str, Callable[[int], float]] = {
    "a small CPU: dear rows": lambda rows: 1e-3 + 1e-4 * padded(rows),
    "a CPU": lambda rows: 20e-3 + 5e-4 * padded(rows),
    "level, then linear": lambda rows: 2e-3 * max(1.0, rows / 256),
    "stairs": lambda rows: 1e-3 * (1 + -(-rows // 64)),
}


def run(world: World, budget: DraftBudget, num_steps: int) -> None:
    """Do so many steps."""
    random = np.random.default_rng(world.batch)
    for _ in range(num_steps):
        world.step(budget, random)


def learned_cost(world: World) -> StepCost:
    """As an engine learns it: forward passes are timed, but a step has host work as well."""
    cost = StepCost.padded_to(8, 2048)
    cost.probe(lambda rows, _, __: 0.6 * world.seconds(rows))
    return cost
