"""Coupled run-ahead: a sample follows the text that was decoded early on its rng_key."""

import numpy as np
import pytest
from drafter_cases import VOCAB, chain_of, completion, decode, propose, request, run, walk
from hypothesis import given, settings
from hypothesis import strategies as st

from srtrl.drafters.coupled_kernel import merge_chains
from srtrl.drafters.draft_tree import ROOT, DraftTree, DraftTrees
from srtrl.drafters.srt import Drafter, SrtOptions

RNG = np.random.default_rng(5)
TEXT = RNG.integers(0, VOCAB, 200).tolist()
OTHER = RNG.integers(0, VOCAB, 200).tolist()
STREAM = 77


def with_run_ahead(tokens: list[int], options: SrtOptions | None = None) -> Drafter:
    """A drafter after a step in which the given tokens were decoded ahead."""
    drafter = Drafter(options)
    run(drafter, 0, request(rng_key=STREAM, is_run_ahead=True), tokens)
    drafter.on_policy_update()
    return drafter


def metrics_after(drafter: Drafter) -> dict[str, float]:
    return {
        name.removeprefix("engine/run_ahead_"): value
        for name, value in drafter.take_metrics().items()
        if name.startswith("engine/run_ahead_")
    }


def test_a_sample_follows_its_run_ahead_from_the_first_token() -> None:
    drafter = with_run_ahead(TEXT)
    drafter.start(1, request(rng_key=STREAM))
    (tree,) = propose(drafter, [1], max_nodes=16)
    assert chain_of(tree) == TEXT[:16]
    np.testing.assert_allclose(tree.scores[:3], 0.9 ** np.arange(1, 4), rtol=1e-5)
    accepted = decode(drafter, 1, TEXT, max_nodes=16)
    assert accepted == [16] * 11 + [12], "whole chunks and a bonus token each, to the end"
    (tree,) = propose(drafter, [1])
    assert tree.num_nodes == 0 or tree.scores[0] < 0.5, "the text has ended"
    drafter.finish(1, completion(request(), TEXT))
    metrics = metrics_after(drafter)
    assert metrics["tokens_made"] == 200
    assert metrics["tokens_used"] == sum(accepted)
    assert metrics["first_mismatch"] == 200
    assert metrics["followed"] == 1
    assert 0.99 < metrics["confidence"] < 1


def test_after_a_mismatch_it_falls_back_on_the_trie() -> None:
    drafter = with_run_ahead(TEXT)
    drafter.start(1, request(rng_key=STREAM))
    decode(drafter, 1, [*TEXT[:30], OTHER[30]])
    assert drafter._run_aheads._followers[1].anchor is None
    decode(drafter, 1, [*OTHER[31:35], *TEXT[100:103]])
    (tree,) = propose(drafter, [1])
    assert chain_of(tree)[:3] == TEXT[103:106], "the run-ahead's text is in the trie"
    drafter.finish(1, None)
    metrics = metrics_after(drafter)
    assert metrics["first_mismatch"] == 30
    assert metrics["reanchored"] == 0


@pytest.mark.parametrize("num_other", [1, 5, 20])
@pytest.mark.parametrize("shift", [0, -3, 7])
def test_it_anchors_again_where_the_texts_meet(num_other: int, shift: int) -> None:
    drafter = with_run_ahead(TEXT)
    drafter.start(1, request(rng_key=STREAM))
    decode(drafter, 1, TEXT[:40])
    meeting = 40 + num_other + shift
    decode(drafter, 1, [(TEXT[40 + i] + 1) % VOCAB for i in range(num_other)])
    decode(drafter, 1, TEXT[meeting : meeting + 7])
    assert drafter._run_aheads._followers[1].anchor is None, "seven tokens are not enough"
    decode(drafter, 1, TEXT[meeting + 7 : meeting + 8])
    follower = drafter._run_aheads._followers[1]
    assert (follower.anchor, follower.shift) == (meeting + 8, shift)
    accepted = decode(drafter, 1, TEXT[meeting + 8 : meeting + 8 + 36])
    assert sum(accepted[:4]) >= 30, "chunks again"
    metrics = metrics_after(drafter)
    assert metrics["reanchored"] == 1
    assert metrics["first_mismatch"] == 40
    drafter.finish(1, None)


def test_it_does_not_anchor_far_away() -> None:
    drafter = with_run_ahead(TEXT)
    drafter.start(1, request(rng_key=STREAM))
    decode(drafter, 1, [OTHER[0], *TEXT[120:150]])
    assert drafter._run_aheads._followers[1].anchor is None
    drafter.finish(1, None)


def test_bytes_that_agree_across_tokens_are_no_meeting() -> None:
    """Tokens 0, 256, 256, ... hold the bytes of 1, 1, ... at an odd place."""
    drafter = with_run_ahead([7, *[256] * 30])
    drafter.start(1, request(rng_key=STREAM))
    drafter.observe([1], [[1] * 20])
    assert drafter._run_aheads._followers[1].anchor is None
    drafter.finish(1, None)


def test_run_ahead_is_no_rollout() -> None:
    drafter = with_run_ahead(TEXT)
    assert drafter.cache("train").num_rollouts == 0
    assert drafter.expected_tokens(request()) is None
    assert sum(run(drafter, 1, request(rng_key=5), TEXT)) > 150, "but it serves siblings, from the trie"
    assert drafter.take_metrics()["engine/cache_hit_rate"] == 0


def test_uncoupled_it_serves_through_the_trie_only() -> None:
    drafter = with_run_ahead(TEXT, SrtOptions(coupled=False))
    assert sum(run(drafter, 1, request(rng_key=STREAM), TEXT)) > 150
    assert metrics_after(drafter)["followed"] == 0


def test_a_run_ahead_lasts_for_one_step() -> None:
    for num_updates, is_followed in ((0, True), (1, True), (2, False)):
        drafter = Drafter()
        run(drafter, 0, request(rng_key=STREAM, is_run_ahead=True), TEXT)
        for _ in range(num_updates):
            drafter.on_policy_update()
        drafter.start(1, request(rng_key=STREAM))
        (tree,) = propose(drafter, [1])
        assert (tree.num_nodes > 0) == is_followed
        drafter.finish(1, None)


def test_a_run_ahead_is_forgotten_when_its_sample_has_finished() -> None:
    drafter = with_run_ahead(TEXT)
    drafter.start(1, request(rng_key=STREAM))
    drafter.finish(1, None)  # interrupted: it may be asked for again
    run(drafter, 2, request(rng_key=STREAM), OTHER)
    drafter.start(3, request(rng_key=STREAM))
    assert 3 not in drafter._run_aheads._followers
    assert not drafter._run_aheads._texts
    drafter.finish(3, None)


def test_the_stream_of_another_prompt_is_another() -> None:
    drafter = with_run_ahead(TEXT)
    drafter.start(1, request((9, 9), rng_key=STREAM))
    (tree,) = propose(drafter, [1])
    assert tree.num_nodes == 0
    drafter.finish(1, None)


def test_the_confidence_is_learned() -> None:
    drafter = Drafter()
    for step in range(8):
        run(drafter, 2 * step, request((step,), rng_key=step, is_run_ahead=True), TEXT)
        drafter.on_policy_update()
        run(drafter, 2 * step + 1, request((step,), rng_key=step), [*TEXT[:5], *OTHER])
    chance = metrics_after(drafter)["confidence"]
    assert 0.75 < chance < 0.9, "five tokens right, one wrong"


def tree_of(*nodes: tuple[int, int, float]) -> DraftTree:
    """A tree from (token, parent, score)."""
    token_ids, parents, scores = zip(*nodes, strict=True) if nodes else ((), (), ())
    return DraftTree(
        token_ids=np.array(token_ids, np.int32),
        parents=np.array(parents, np.int32),
        scores=np.array(scores, np.float32),
    )


def merge(tree: DraftTree, chain: list[int], chance: float, max_nodes: int) -> DraftTree:
    trees = DraftTrees.of([tree])
    token_ids, parents, scores, offsets = merge_chains(
        trees.token_ids,
        trees.parents,
        trees.scores,
        trees.offsets,
        np.array(chain, np.int32),
        np.array([0, len(chain)]),
        np.array([chance]),
        np.array([max_nodes]),
    )
    return DraftTrees(token_ids=token_ids, parents=parents, scores=scores, offsets=offsets)[0]


def test_merging_shares_nodes_and_gives_siblings_what_is_left() -> None:
    tree = tree_of((1, ROOT, 0.6), (2, ROOT, 0.3), (5, 0, 0.3), (6, 1, 0.15), (7, 0, 0.1))
    merged = merge(tree, [1, 7, 8], 0.9, 10)
    found = {
        (int(token), int(merged.token_ids[parent]) if parent != ROOT else ROOT): round(float(score), 4)
        for token, parent, score in zip(merged.token_ids, merged.parents, merged.scores, strict=True)
    }
    assert found == {
        (1, ROOT): 0.9,
        (7, 1): 0.81,
        (8, 7): 0.729,
        (2, ROOT): 0.075,  # of the tenth that is left, the share it had of the tree's 0.4
        (6, 2): 0.0375,
        (5, 1): 0.054,  # of 0.09, its share 0.3 of 0.5
    }
    assert chain_of(merged) == [1, 7, 8]
    assert merge(tree, [1, 7, 8], 0.9, 2).token_ids.tolist() == [1, 7]


def test_merging_takes_the_larger_score() -> None:
    merged = merge(tree_of((1, ROOT, 0.95), (2, 0, 0.9)), [1, 2, 3], 0.8, 10)
    assert merged.token_ids.tolist() == [1, 2, 3]
    np.testing.assert_allclose(merged.scores, [0.95, 0.9, 0.8**3], rtol=1e-6)


@st.composite
def trees(draw: st.DrawFn) -> DraftTree:
    """Trees whose siblings' scores may add up to more than their parent's."""
    nodes: list[tuple[int, int, float]] = []
    for _ in range(draw(st.integers(0, 10))):
        parent = draw(st.integers(-1, len(nodes) - 1))
        taken = {token for token, other, _ in nodes if other == parent}
        above = nodes[parent][2] if parent >= 0 else 1.0
        token = draw(st.sampled_from([token for token in range(15) if token not in taken]))
        nodes.append((token, parent, above * draw(st.floats(0, 1, width=32))))
    order = sorted(range(len(nodes)), key=lambda node: -nodes[node][2])
    place = {node: rank for rank, node in enumerate(order)} | {-1: -1}
    return tree_of(*((nodes[node][0], place[nodes[node][1]], nodes[node][2]) for node in order))


@settings(max_examples=100, deadline=None)
@given(trees(), st.lists(st.integers(0, 14), max_size=8), st.floats(0.01, 0.999), st.integers(0, 20))
def test_merged_trees_are_trees(tree: DraftTree, chain: list[int], chance: float, max_nodes: int) -> None:
    merged = merge(tree, chain, chance, max_nodes)
    merged.check(15)
    scores = merged.scores.tolist()
    assert scores == sorted(scores, reverse=True)
    assert all(scores[node] <= scores[parent] for node, parent in enumerate(merged.parents) if parent != ROOT)
    whole = merge(tree, chain, chance, 100)
    assert merged.token_ids.tolist() == whole.token_ids[:max_nodes].tolist(), "cut short, it is the best of its size"
    assert len(walk(whole, chain)) == len(chain)
    for node in range(tree.num_nodes):  # no path of the tree is lost
        path = []
        at = node
        while at != ROOT:
            path.append(int(tree.token_ids[at]))
            at = int(tree.parents[at])
        assert len(walk(whole, path[::-1])) == len(path)
