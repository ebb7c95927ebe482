"""The token trie against its twin in plain Python: counts, matches, drafts, with samples inserted interleaved."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trie_reference import ReferenceTrie

from srtrl.drafters import token_trie
from srtrl.drafters.draft_tree import DraftTree
from srtrl.drafters.shared_ngrams import SharedNgrams
from srtrl.drafters.token_trie import DraftRule, TokenTrie, end_to_end, extend_batch, propose_batch

VOCAB = 5
TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=8)
RUN = st.tuples(st.integers(0, VOCAB - 1), st.integers(1, 60)).map(lambda run: [run[0]] * run[1])
STEPS = st.lists(st.tuples(st.integers(0, 3), st.one_of(TOKENS, TOKENS, RUN)), min_size=1, max_size=12)
"""Which of four cursors goes on, with which tokens: the first three insert, the last one follows."""
RULES = st.builds(
    DraftRule,
    name=st.sampled_from(["blend", "paper", "authors", "suffix"]),
    min_score=st.sampled_from([0.0, 0.02, 0.1, 0.3]),
    max_depth=st.sampled_from([2, 1 << 20]),
    max_contexts=st.integers(1, 5),
    distinct_weight=st.sampled_from([0.0, 0.5, 1.0]),
    tail=st.sampled_from([0.0, 0.15, 1.0]),
    first_run=st.sampled_from([0.0, 0.1, 3.0]),
    run_weight=st.sampled_from([1.0, 2.5, float("inf")]),
    max_match=st.sampled_from([3, 64]),
)


def play(steps: Sequence[tuple[int, list[int]]]) -> tuple[TokenTrie, ReferenceTrie, list[int]]:
    """Both tries after the steps, and the cursors of the first (those of the twin are 0 to 3)."""
    trie, twin = TokenTrie(), ReferenceTrie()
    cursors = [trie.start(), trie.start(), trie.start(), trie.follow()]
    for cursor in [twin.start(), twin.start(), twin.start()]:
        assert cursor < 3
    twin.follow()
    for cursor, tokens in steps:
        trie.extend(cursors[cursor], tokens)
        twin.extend(cursor, tokens)
    return trie, twin, cursors


def assert_equal_trees(tree: DraftTree, expected: DraftTree) -> None:
    assert tree.token_ids.tolist() == expected.token_ids.tolist()
    assert tree.parents.tolist() == expected.parents.tolist()
    assert tree.scores.tolist() == expected.scores.tolist()


@settings(max_examples=100, deadline=None)
@given(steps=STEPS)
def test_counts_and_continuations_of_every_string(steps: list[tuple[int, list[int]]]) -> None:
    trie, twin, _ = play(steps)
    strings = {
        tuple(text[i : i + size])
        for text in twin.texts
        for i in range(1, len(text))
        for size in (1, 2, 3, 7, 40)
        if i + size <= len(text)
    }
    for string in strings:
        assert trie.count(string) == twin.count(string)
        assert trie.continuations(string) == twin.continuations(string)
        unseen = (*string, 0)
        assert trie.count(unseen) == twin.count(unseen)
    assert trie.continuations(()) == twin.continuations(())
    assert trie.num_tokens == sum(len(text) - 1 for text in twin.texts)
    assert trie.num_states <= 2 * (trie.num_tokens + 4)


@settings(max_examples=100, deadline=None)
@given(
    steps=STEPS,
    max_nodes=st.sampled_from([0, 1, 3, 8, 40]),
    rule=RULES,
    every=st.booleans(),
    rollouts=st.lists(TOKENS, max_size=4),
)
def test_drafts_and_matches(
    steps: list[tuple[int, list[int]]], max_nodes: int, rule: DraftRule, every: bool, rollouts: list[list[int]]
) -> None:
    trie, twin = TokenTrie(), ReferenceTrie()
    shared = SharedNgrams(1 << 14)
    for rollout in rollouts:
        shared.extend([np.array(rollout, np.int32)])
    twin.rollouts = rollouts
    cursors = [trie.start(), trie.start(), trie.start(), trie.follow()]
    assert [twin.start(), twin.start(), twin.start(), twin.follow()] == [0, 1, 2, 3]
    for step, (moved, tokens) in enumerate(steps):
        trie.extend(cursors[moved], tokens)
        twin.extend(moved, tokens)
        if not every and step < len(steps) - 1:
            continue
        trees = propose_batch([trie] * 4, cursors, [max_nodes] * 4, rule, shared)
        for cursor, tree in enumerate(trees):
            assert trie.match_length(cursors[cursor]) == twin.match_length(cursor)
            assert_equal_trees(tree, twin.propose(cursor, max_nodes, rule))
            tree.check(VOCAB)
            assert (np.diff(tree.scores) <= 0).all()


@settings(max_examples=60, deadline=None)
@given(
    texts=st.lists(st.one_of(TOKENS, RUN), min_size=1, max_size=8),
    sample=TOKENS,
    expected=st.sampled_from([0, 1, 5000]),
)
def test_texts_end_to_end_are_one_by_one(texts: list[list[int]], sample: list[int], expected: int) -> None:
    joined, single = TokenTrie(expected_tokens=expected), TokenTrie()
    joined.insert(end_to_end([np.array(text, np.int32) for text in texts]))
    for text in texts:
        single.insert(text)
    assert (joined.num_tokens, joined.num_states) == (single.num_tokens, single.num_states)
    trees = []
    for trie in joined, single:
        cursor = trie.start()
        trie.extend(cursor, sample)
        trees.append(propose_batch([trie], [cursor], [40], DraftRule(min_score=0.0))[0])
    assert_equal_trees(*trees)


@settings(max_examples=50, deadline=None)
@given(steps=st.lists(st.tuples(st.integers(0, 5), TOKENS), max_size=30), rule=RULES)
def test_a_batch_over_several_tries_is_one_by_one(steps: list[tuple[int, list[int]]], rule: DraftRule) -> None:
    batch, single = [TokenTrie() for _ in range(3)], [TokenTrie() for _ in range(3)]
    owners = [0, 1, 2, 0, 1, 0]
    batch_cursors = [batch[owner].start() for owner in owners]
    single_cursors = [single[owner].start() for owner in owners]
    sequences = [sequence for sequence, _ in steps]
    extend_batch(
        [batch[owners[i]] for i in sequences], [batch_cursors[i] for i in sequences], [ids for _, ids in steps]
    )
    for sequence, token_ids in steps:
        single[owners[sequence]].extend(single_cursors[sequence], token_ids)
    max_nodes = [0, 8, 2, 5, 1, 40]
    trees = propose_batch([batch[owner] for owner in owners], batch_cursors, max_nodes, rule)
    for i, owner in enumerate(owners):
        alone = propose_batch([single[owner]], [single_cursors[i]], [max_nodes[i]], rule)
        assert_equal_trees(trees[i], alone[0])


def test_threads_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(1)
    texts = [generator.integers(0, VOCAB, 500).tolist() for _ in range(12)]
    owners = [0, 1, 2, 0] * 3
    found = []
    for in_parallel in (False, True):
        monkeypatch.setattr(token_trie, "_pays_for_threads", lambda work, num_tries, answer=in_parallel: answer)
        tries = [TokenTrie() for _ in range(3)]
        batch = [tries[owner] for owner in owners]
        cursors = [trie.start() for trie in batch]
        extend_batch(batch, cursors, texts)
        found.append(propose_batch(batch, cursors, range(12), DraftRule(min_score=0.01)))
    assert found[0].num_nodes > 50
    for tree, expected in zip(*found, strict=True):
        assert_equal_trees(tree, expected)


def test_many_distinct_tokens() -> None:
    """States with many edges keep them in hash tables, which grow and are cloned."""
    generator = np.random.default_rng(0)
    trie, twin = TokenTrie(), ReferenceTrie()
    for _ in range(3):
        text = [token for tail in generator.permutation(200).tolist() for token in (7, 8, 1000 + tail)]
        trie.insert(text)
        twin.insert(text)
    for context in [(), (8,), (7, 8), (1000,), (1017, 7), (1017, 7, 8)]:
        assert trie.continuations(context) == twin.continuations(context)
    cursor, other = trie.start(), twin.start()
    trie.extend(cursor, [7, 8])
    twin.extend(other, [7, 8])
    rule = DraftRule(min_score=0.001)
    assert_equal_trees(propose_batch([trie], [cursor], [12], rule)[0], twin.propose(other, 12, rule))


@pytest.mark.parametrize("step", [1, 3, 4000])
def test_repetition(step: int) -> None:
    """Counts stay exact where each token is an occurrence of as many strings as there are tokens before it."""
    trie = TokenTrie()
    cursor = trie.start()
    for begin in range(0, 4000, step):
        trie.extend(cursor, [0] * min(step, 4000 - begin))
        tree = propose_batch([trie], [cursor], [4], DraftRule())[0]
    assert tree.token_ids.tolist()[:2] == [0, 0]
    assert [trie.count([0] * size) for size in (1, 2, 100, 3999, 4000, 4001)] == [4000, 3999, 3901, 2, 1, 0]


def test_a_match_is_kept_while_states_are_cloned() -> None:
    trie = TokenTrie()
    trie.insert([1, 2, 3, 4])
    follower = trie.follow()
    trie.extend(follower, [2, 3])
    trie.insert([5, 2, 3, 6])  # parts (2, 3) from (1, 2, 3)
    assert trie.match_length(follower) == 2
    tree = propose_batch([trie], [follower], [4], DraftRule(name="paper"))[0]
    assert sorted(tree.token_ids.tolist()) == [4, 6]


def test_behind_a_surprise_the_siblings_text_goes_on() -> None:
    trie = TokenTrie()
    trie.insert([1, 2, 3, 9, 4, 5, 6, 7, 8])
    cursor = trie.start()
    trie.extend(cursor, [1, 2, 3, 10])  # for the 9; nothing has ever followed a 10
    (surprised,) = propose_batch([trie], [cursor], [8], DraftRule(min_score=1e-4))
    assert surprised.token_ids.tolist()[:3] == [4, 5, 6]
    trie.extend(cursor, [4])  # it does go on like that
    (confirmed,) = propose_batch([trie], [cursor], [8], DraftRule(min_score=1e-4))
    assert confirmed.token_ids.tolist()[:3] == [5, 6, 7]
    assert confirmed.scores[0] > 2 * surprised.scores[0]
    without = DraftRule(min_score=1e-4, run_weight=float("inf"))
    assert propose_batch([trie], [cursor], [8], without)[0].scores[0] < confirmed.scores[0]


def test_a_match_that_has_grown_longer_than_the_aligned_context_knows_better() -> None:
    trie = TokenTrie()
    trie.insert([1, 2, 3, 9, 4, 5])
    trie.insert([10, 20, 21, 22, 23, 24])
    cursor = trie.start()
    trie.extend(cursor, [1, 2, 3, 10])
    assert propose_batch([trie], [cursor], [8], DraftRule(min_score=0.01))[0].token_ids.tolist()[:1] == [20]
    trie.extend(cursor, [20])
    with_it, without = (
        propose_batch([trie], [cursor], [8], DraftRule(min_score=0.01, run_weight=weight))[0]
        for weight in (2.5, float("inf"))
    )
    assert with_it.token_ids.tolist() == [21, 22, 23, 24]
    assert_equal_trees(with_it, without)


@pytest.mark.parametrize("name", ["blend", "paper"])
def test_other_prompts_fill_in_for_a_prompt_without_texts(name: Literal["blend", "paper"]) -> None:
    shared = SharedNgrams(1 << 10)
    shared.extend([np.array([5, 6, 7, 8], np.int32)])
    trie = TokenTrie()
    cursor = trie.start()
    rule = DraftRule(name=name, min_score=0.01)
    expected = [5, 6, 7, 8] if name == "blend" else []
    assert propose_batch([trie], [cursor], [8], rule, shared)[0].token_ids.tolist() == expected
    trie.extend(cursor, [1, 6])  # the last token alone is known
    assert propose_batch([trie], [cursor], [8], rule, shared)[0].token_ids.tolist() == expected[2:]
    assert propose_batch([trie], [cursor], [8], rule)[0].num_nodes == 0


def test_room_that_runs_out_changes_no_draft() -> None:
    """An insertion that waits for room is tried again; what its cursor has looked at is not looked at twice."""
    generator = np.random.default_rng(3)
    texts = [generator.integers(0, 3, 300).tolist() for _ in range(3)]
    found = []
    for roomy in (False, True):
        trie = TokenTrie()
        while roomy and trie.size < 1 << 18:
            trie.grow()
        cursors = [trie.start() for _ in texts]
        for begin in range(0, 300, 5):
            for cursor, text in zip(cursors, texts, strict=True):
                trie.extend(cursor, text[begin : begin + 5])
            found.append(propose_batch([trie] * 3, cursors, [10] * 3, DraftRule(min_score=0.001)))
    for tree, expected in zip(found[:60], found[60:], strict=True):
        assert tree.scores.tolist() == expected.scores.tolist()
        assert tree.token_ids.tolist() == expected.token_ids.tolist()


def test_the_beginning_of_a_response_is_a_context() -> None:
    trie = TokenTrie()
    trie.insert([3, 4, 3, 5, 3, 6])
    tree = propose_batch([trie], [trie.start()], [2], DraftRule(name="paper"))[0]
    assert tree.token_ids.tolist() == [3, 4]
    assert tree.scores.tolist() == [1.0, 1.0]


def test_cursors_are_used_again() -> None:
    trie = TokenTrie()
    for _ in range(100):
        trie.insert([1, 2])
        trie.stop(trie.follow())
    assert trie.num_states == 4
    assert trie.num_bytes == TokenTrie().num_bytes
    cursor = trie.start()
    trie.stop(cursor)
    with pytest.raises(AssertionError, match="was stopped"):
        trie.extend(cursor, [1])


def test_nothing_to_draft_from() -> None:
    trie = TokenTrie()
    cursor = trie.start()
    for name in ("blend", "paper", "authors", "suffix"):
        trees = propose_batch([trie, trie], [cursor, trie.follow()], [4, 4], DraftRule(name=name))
        assert trees.sizes.tolist() == [0, 0]
    assert len(propose_batch([], [], [], DraftRule())) == 0
    with pytest.raises(ValueError, match="token_ids is empty"):
        trie.count([])


def test_scores_do_not_depend_on_the_threshold() -> None:
    """A draft cut at a score is the draft made with that threshold: the budget may do the cutting."""
    generator = np.random.default_rng(0)
    trie = TokenTrie()
    for _ in range(6):
        trie.insert(generator.choice(VOCAB, 200, p=[0.6, 0.25, 0.1, 0.03, 0.02]).tolist())
    cursor = trie.start()
    trie.extend(cursor, generator.choice(VOCAB, 50, p=[0.6, 0.25, 0.1, 0.03, 0.02]).tolist())
    full = propose_batch([trie], [cursor], [1000], DraftRule(min_score=0.001))[0]
    for threshold in (0.3, 0.1, 0.01):
        cut = full.first(int((full.scores >= threshold).sum()))
        assert 0 < cut.num_nodes < full.num_nodes
        assert_equal_trees(propose_batch([trie], [cursor], [1000], DraftRule(min_score=threshold))[0], cut)
