"""The draft budget: the chosen nodes against brute force, and whole runs against the best fixed budget."""

from typing import Any

import numpy as np
import pytest
from budget_cases import COSTS, World, chain_trees, learned_cost, run
from hypothesis import given, settings
from hypothesis import strategies as st

from srtrl.drafters.draft_tree import ROOT, DraftTree, DraftTrees
from srtrl.engine.asking import LONG_WAIT, YOUNG_STEPS
from srtrl.engine.budget import FIRST_ASK, PLAIN_STEPS, DraftBudget
from srtrl.engine.budget_kernel import MIN_GAIN, SLACK, descending_order
from srtrl.engine.step_cost import StepCost


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
@given(st.integers(0, 2**32), st.integers(1, 40), st.floats(1e-4, 0.2))
def test_what_is_not_proposed_would_not_be_chosen(seed: int, num_trees: int, row_seconds: float) -> None:
    random = np.random.default_rng(seed)
    num_run_aheads = int(random.integers(0, 20))
    num_roots = num_trees + num_run_aheads
    trees = DraftTrees.of([*random_trees(random, num_trees, 8), *DraftTrees.empty(num_run_aheads)])
    budget = DraftBudget(StepCost.from_points([(1, 1.0), (1000, 1.0 + 999 * row_seconds)]))
    least = budget.least_score(num_trees, num_roots, context_per_row=10.0)
    assert 0 < least <= 0.5
    weights = np.array([1.0] * num_trees + [0.0] * num_run_aheads)
    chosen = budget.select(trees, context_tokens=10.0 * num_roots, weights=weights)
    assert (chosen.scores >= least).all()


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("reset_after", [0, 1, 2, 3])
def test_the_cost_of_steps_that_do_without_drafts_on_purpose_is_learned(
    monkeypatch: pytest.MonkeyPatch, is_late: bool, reset_after: int
) -> None:
    """Whenever metrics are taken, and also where a step is booked when the next one has begun, as on CUDA."""
    budget = DraftBudget(StepCost.from_points([(1, 1.0), (64, 1.0)]))
    learned: list[int] = []
    monkeypatch.setattr(budget.cost, "record", lambda num_rows, *_, **__: learned.append(num_rows))
    plain = 0
    unbooked: dict[str, Any] | None = None
    for step in range(400):
        was_asked = budget.max_nodes(2) > 0
        plain += not was_asked
        chosen = budget.select(
            chain_trees(np.full((2, 4), 0.9)) if was_asked else DraftTrees.empty(2), context_tokens=0
        )
        booking: dict[str, Any] = {"trees": chosen, "context_tokens": 0, "seconds": 1.0, "was_asked": was_asked}
        booked = unbooked if is_late else booking
        if booked is not None:
            budget.record(**booked)
        unbooked = booking
        if step == reset_after:
            budget.take_metrics()
    assert plain >= 5
    assert plain % PLAIN_STEPS == 0
    assert learned.count(2) == plain // PLAIN_STEPS, "the first of each pair follows one with drafts"


def test_of_many_steps_without_drafts_one_in_four_is_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = DraftBudget(StepCost.from_points([(1, 1.0), (64, 1.0)]))
    learned: list[int] = []
    monkeypatch.setattr(budget.cost, "record", lambda num_rows, *_, **__: learned.append(num_rows))
    for _ in range(40):
        budget.record(DraftTrees.empty(3), context_tokens=0, seconds=1.0, was_asked=False)
    assert len(learned) == 10


def test_free_rows_and_a_fixed_budget_ask_for_every_node() -> None:
    free = DraftBudget(StepCost.from_points([(1, 1.0), (1000, 1.0)]))
    assert free.least_score(4, 4, context_per_row=10.0) == 0
    fixed = DraftBudget(StepCost.from_points([(1, 1.0), (2, 9.0)]), fixed=3)
    assert fixed.least_score(4, 4, context_per_row=10.0) == 0


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
    tokens = [weights.sum() + sum(float(worths[node]) for node in queue[:count]) for count in range(len(queue) + 1)]
    rates = [tokens[count] / cost.seconds(num_trees + count) for count in range(len(queue) + 1)]
    values = [
        tokens[count] - max(rates) * cost.seconds(num_trees + num_other_rows + count) for count in range(len(queue) + 1)
    ]
    flat = {int(trees.offsets[b]) + node for b, nodes in enumerate(kept) for node in nodes}
    assert flat == set(queue[: len(flat)])
    total, little = float(weights.sum()), 1e-6 * float(weights.sum()) + 1e-9
    if flat:
        assert max(rates) > rates[0] * (1 + MIN_GAIN) - little
        assert max(values) > values[0] + MIN_GAIN * total - little
        assert values[len(flat)] >= max(values) - SLACK * total - little
        assert all(value < max(values) - SLACK * total + little for value in values[: len(flat)])
    else:
        pays = max(rates) > rates[0] * (1 + MIN_GAIN) * (1 + 1e-6) + little
        assert not (pays and max(values) > values[0] + MIN_GAIN * total + little)


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
    budget.record(none, context_tokens=0, seconds=1.0, was_asked=False)
    assert len(none) == 0


@pytest.mark.parametrize("name", COSTS)
@pytest.mark.parametrize("batch", [1, 2, 4, 8, 16, 32, 64, 128, 256])
def test_no_fixed_budget_is_much_better_and_none_is_hardly_better(name: str, batch: int) -> None:
    world = World(batch=batch, seconds=COSTS[name], draft_seconds=0.005 * COSTS[name](batch), noise=0.03)
    budget = DraftBudget(learned_cost(world))
    run(world, budget, 40)  # costs and chances are learned
    world.forget_totals()
    run(world, budget, 80)
    assert world.rate > 0.95 * world.best_fixed_rate()
    assert world.rate > 0.99 * world.rate_without_drafts


@pytest.mark.parametrize("batch", [1, 16, 128])
def test_learning_itself_is_cheap(batch: int) -> None:
    """From the first step on, with drafts that are nearly always wrong and slow to make."""
    cost = COSTS["a small CPU: dear rows"]
    world = World(batch=batch, seconds=cost, draft_seconds=0.05 * cost(batch), quality=0.1, noise=0.03)
    budget = DraftBudget(learned_cost(world))
    run(world, budget, 200)
    assert world.rate > 0.99 * world.rate_without_drafts


def test_drafts_that_do_not_pay_are_asked_for_now_and_then_and_come_back_when_they_do() -> None:
    cost = COSTS["a CPU"]
    world = World(batch=4, seconds=cost, draft_seconds=0.05 * cost(4), quality=0.02)
    budget = DraftBudget(learned_cost(world))
    run(world, budget, 100)
    budget.take_metrics()
    run(world, budget, 500)
    assert 0 < budget.take_metrics()["engine/draft_asked_share"] < 0.1
    world.quality = 1.0
    run(world, budget, 300)
    budget.take_metrics()
    run(world, budget, 50)
    assert budget.take_metrics()["engine/draft_asked_share"] > 0.9


@pytest.mark.parametrize("event", ["known prompts", "fewer sequences"])
def test_asking_begins_anew_with_known_prompts_and_with_fewer_sequences(event: str) -> None:
    cost = COSTS["a small CPU: dear rows"]
    world = World(batch=64, seconds=cost, draft_seconds=0.05 * cost(64), quality=0.02)
    budget = DraftBudget(learned_cost(world))
    budget.begin_rollout(0.0)
    run(world, budget, 120)
    while budget.max_nodes(64):  # a look may be under way
        budget.select(DraftTrees.empty(64), context_tokens=6400)
    budget.begin_rollout(0.1)
    assert [budget.max_nodes(64) for _ in range(3)] == [0, 0, 0], "a rollout like the last one: nothing to try again"
    if event == "known prompts":
        budget.begin_rollout(0.9)
        asks = [budget.max_nodes(64) > 0 for _ in range(YOUNG_STEPS + 1)]
        assert asks == [False] * YOUNG_STEPS + [True]
    else:
        assert any(budget.max_nodes(8) > 0 for _ in range(LONG_WAIT))


def test_chances_are_learned_anew_when_samples_have_a_history() -> None:
    """Those of samples without one are too low: the first outcomes would be needed to outvote them."""
    cost = COSTS["level, then linear"]
    world = World(batch=64, seconds=cost, quality=0.5)
    budget = DraftBudget(learned_cost(world))
    budget.begin_rollout(0.0)
    run(world, budget, 120)
    assert budget.calibration.corrections.any()
    assert budget.trust < 1
    budget.begin_rollout(0.1)
    assert budget.calibration.corrections.any(), "a rollout like the last one"
    budget.begin_rollout(0.9)
    assert not budget.calibration.corrections.any()
    assert budget.trust == 1
    num_nodes = [budget.max_nodes(64) for _ in range(YOUNG_STEPS + 1)]
    assert num_nodes[-1] == FIRST_ASK


def test_what_drafts_bring_is_remembered_for_each_number_of_sequences() -> None:
    """A rollout goes through all of them, and the next one again: what 64 cannot use, 4 can."""
    cost = COSTS["a small CPU: dear rows"]
    world = World(batch=64, seconds=cost, draft_seconds=0.05 * cost(64), quality=0.02)
    budget = DraftBudget(learned_cost(world))
    asked = []
    for _ in range(40):
        budget.begin_rollout(0.0)
        for batch in (64, 32, 16):
            world.batch = batch
            run(world, budget, 10)
        asked.append(budget.take_metrics()["engine/draft_asked_share"])
    assert asked[0] > 0.1, "nothing is known yet"
    assert np.mean(asked[20:]) < 0.1, "and not all is tried again because a new rollout begins"


def test_a_number_of_sequences_that_is_new_begins_where_the_next_larger_one_has_come_to() -> None:
    cost = COSTS["a small CPU: dear rows"]
    world = World(batch=256, seconds=cost, draft_seconds=0.05 * cost(256), quality=0.02)
    budget = DraftBudget(learned_cost(world))
    run(world, budget, 200)
    assert [budget.max_nodes(220) for _ in range(3)] == [0, 0, 0], "what 256 cannot use, 220 will hardly"
    assert any(budget.max_nodes(8) > 0 for _ in range(LONG_WAIT)), "but 8 may"


def test_who_is_left_at_the_end_does_not_count_for_the_others_nor_they_for_them() -> None:
    """Samples that have strayed from what their siblings said are the longest ones, and their drafts fail."""
    cost = COSTS["level, then linear"]
    world = World(batch=32, seconds=cost, noise=0.03)
    budget = DraftBudget(learned_cost(world))
    trusts = {}
    for _ in range(30):
        for world.batch, world.acceptance, num_steps in ((32, 0.75, 10), (2, 0.1, 4)):
            run(world, budget, num_steps)
            trusts[world.batch] = budget.trust
    assert trusts[2] < 0.4
    assert 0.8 < trusts[32] < 1.25


def test_a_step_that_took_long_to_draft_verifies_more() -> None:
    """Its rate of tokens is lower, and so is what a second is worth."""
    cost = StepCost.from_points([(1, 1.0), (65, 2.0)])
    trees = chain_trees(np.full((1, 32), 0.9))
    chosen = []
    for draft_seconds in (0.0, 1.0):
        budget = DraftBudget(cost)
        for _ in range(3):
            assert budget.max_nodes(1)
            num_nodes = budget.select(trees, context_tokens=0).num_nodes
            budget.record_drafting(draft_seconds)
        chosen.append(num_nodes)
    assert chosen[0] < chosen[1] < trees.num_nodes


def test_what_verifying_adds_is_no_cost_of_steps_without_drafts() -> None:
    """Rows below those of any step with drafts: their cost is known by steps without alone."""

    def seconds(rows: int) -> float:
        return 2e-3 + 5e-5 * rows

    cost = StepCost.padded_to(8, 256)
    cost.probe(lambda rows, _, __: 0.7 * seconds(rows))
    budget = DraftBudget(cost)
    for step in range(300):
        is_plain = step % 20 >= 18
        trees = DraftTrees.empty(2) if is_plain else chain_trees(np.full((2, 8), 0.5))
        rows = len(trees) + trees.num_nodes
        took = seconds(rows) + (0 if is_plain else 8e-4)
        budget.record(trees, context_tokens=0, seconds=took, was_asked=not is_plain)
    assert cost.seconds(2) == pytest.approx(seconds(2), rel=0.04)
    assert cost.seconds(20) + cost.verify_seconds == pytest.approx(seconds(20) + 8e-4, rel=0.04)
    assert cost.verify_seconds > 3e-4


def test_what_is_asked_for_follows_what_is_used() -> None:
    budget = DraftBudget(StepCost.from_points([(1, 1.0), (512, 1.0)]), most_nodes=48)
    for _ in range(4):
        most = budget.max_nodes(1) or budget.max_nodes(1) or budget.max_nodes(1)
        budget.select(chain_trees(np.full((1, most - 1), 0.99)), context_tokens=0)
    assert budget.max_nodes(1) == 48
    for _ in range(150):
        if budget.max_nodes(1):
            budget.select(chain_trees(np.full((1, 2), 0.9)), context_tokens=0)
    assert budget.max_nodes(1) < 10
    assert budget.max_nodes(500) <= 4, "the largest step that is known holds no more"


def test_a_budget_does_not_depend_on_anything_but_its_calls() -> None:
    def rates() -> list[float]:
        world = World(batch=8, seconds=COSTS["a CPU"], draft_seconds=1e-4, noise=0.1)
        run(world, DraftBudget(learned_cost(world)), 50)
        return [world.spent, world.tokens]

    assert rates() == rates()


def test_sequences_that_nobody_waits_for_do_not_hide_what_drafts_bring() -> None:
    # Two samples that pay, beside 30 run-aheads: 3% more tokens in all, but several times as many that count.
    budget = DraftBudget(StepCost.from_points([(1, 1.0), (64, 1.0)]))
    weights = np.array([1.0] * 2 + [0.0] * 30)
    trees = DraftTrees.of([*chain_trees(np.full((2, 6), 0.5)), *DraftTrees.empty(30)])
    asks = []
    for _ in range(60):
        asks.append(budget.max_nodes(2) > 0)
        proposed = trees if asks[-1] else DraftTrees.empty(32)
        chosen = budget.select(proposed, context_tokens=0, weights=weights)
        if asks[-1]:
            budget.record_drafting(0.1)
        budget.record(chosen, context_tokens=0, seconds=1.0, was_asked=asks[-1])
    assert sum(asks) > 50


def test_run_aheads_beside_the_samples_do_not_make_it_ask_again() -> None:
    budget = DraftBudget(StepCost.from_points([(1, 1.0), (64, 64.0)]))
    asks = []
    for _ in range(400):
        asks.append(budget.max_nodes(2) > 0)
        chosen = budget.select(DraftTrees.empty(32), context_tokens=0, weights=np.array([1.0] * 2 + [0.0] * 30))
        if asks[-1]:
            budget.record_drafting(2.0)
        budget.record(chosen, context_tokens=0, seconds=32.0, was_asked=asks[-1])
    assert sum(asks[200:]) < 20


@pytest.mark.parametrize(("batch", "is_draining", "pays"), [(8, False, True), (8, True, False), (1, True, True)])
def test_while_a_rollout_drains_drafts_for_all_must_bring_more(batch: int, is_draining: bool, pays: bool) -> None:
    budget = DraftBudget(StepCost.from_points([(1, 1.0), (64, 1.0)]))
    trees = chain_trees(np.full((batch, 2), 0.4))  # three quarters of a token more for each sequence
    asks = []
    for _ in range(200):
        asks.append(budget.max_nodes(batch) > 0)
        proposed = trees if asks[-1] else DraftTrees.empty(batch)
        budget.select(proposed, context_tokens=0, is_draining=is_draining)
        if asks[-1]:
            budget.record_drafting(0.5)
    assert (sum(asks) > 150) == pays
    assert (sum(asks) < 50) != pays


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32), st.integers(1, 6), st.sampled_from([2, 4, 8]), st.floats(1e-3, 0.1), st.integers(0, 4))
def test_drafts_for_some_sequences_are_chosen_and_judged_as_those_of_all(
    seed: int, num_asked: int, one_in: int, row_seconds: float, num_other_rows: int
) -> None:
    """All sequences have such trees as those that are asked for: what is chosen, and what it brings, is the same."""
    cost = StepCost.from_points([(1, 1.0), (1000, 1.0 + 999 * row_seconds)])
    trees = random_trees(np.random.default_rng(seed), num_asked, 8)
    everywhere = DraftTrees.of(tree for tree in trees for _ in range(one_in))
    some = trees.spread(np.arange(num_asked) * one_in, num_asked * one_in)
    gains, counts = [], []
    for proposed, share in ((everywhere, 1.0), (some, 1 / one_in)):
        budget = DraftBudget(cost)
        for _ in range(3):
            budget.max_nodes(num_asked * one_in)
            chosen = budget.select(proposed, context_tokens=10, num_other_rows=num_other_rows, asked_share=share)
            budget.record_drafting(0.0, share)
        gains.append(budget.gain)
        counts.append(chosen.num_nodes / share)
    assert gains[1] == pytest.approx(gains[0], abs=0.02)
    if min(counts) > 0:  # else they are hardly worth it
        assert abs(counts[0] - counts[1]) < one_in, "of equal nodes the choice among all may take a part"


def test_what_a_look_at_some_sequences_took_says_what_all_would_take() -> None:
    budget = DraftBudget(StepCost.from_points([(1, 1.0), (1000, 2.0)]))
    for _ in range(2):
        assert budget.max_nodes(64)
        budget.select(DraftTrees.empty(64), context_tokens=64, asked_share=0.25)
        budget.record_drafting(0.01, 0.25)
    assert 0.01 < budget.draft_seconds < 0.04
