"""The token trie against its twin in plain Python: counts, matches, drafts, with samples inserted interleaved."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trie_reference import ReferenceTrie, Row, continuations, plain_row

from srtrl.drafters.base import Int32Array, end_to_end
from srtrl.drafters.distributions import NO_DISTRIBUTIONS, NUM_TOP, UNIT, UNKNOWN, pack
from srtrl.drafters.draft_tree import DraftTree
from srtrl.drafters.shared_ngrams import NO_TABLE, Table, learn_ngrams, make_table
from srtrl.drafters.suffix_automaton import MATCH, MAX_COUNTED, START_TOKEN
from srtrl.drafters.token_trie import TokenTrie, TrieCursors
from srtrl.drafters.trie_draft import BLEND, Basis, Noise, Rule, draft_trees
from srtrl.drafters.trust import DISTRIBUTION, MAX_POWER, NUM_CELLS, POWER, make_trust
from srtrl.engine.sampling import uniform_noise
from srtrl.types import TopTokens

VOCAB = 5
TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=8)
RUN = st.tuples(st.integers(0, VOCAB - 1), st.integers(1, 60)).map(lambda run: [run[0]] * run[1])
STEPS = st.lists(st.tuples(st.integers(0, 3), st.one_of(TOKENS, TOKENS, RUN)), min_size=1, max_size=12)
"""Which of four cursors goes on, with which tokens: the first three insert, the last one follows."""
RULES = st.builds(
    Rule,
    max_contexts=st.integers(1, 3),
    distinct_weight=st.sampled_from([0.0, 0.5, 1.0]),
    match_weight=st.sampled_from([0.0, 2.0]),
)


class Player:
    """Cursors in tries, by slot."""

    def __init__(self, tries: Sequence[TokenTrie], *, inserts: Sequence[bool]) -> None:
        self.cursors = TrieCursors()
        self.slots = np.arange(len(tries))
        for slot, (trie, is_inserting) in enumerate(zip(tries, inserts, strict=True)):
            self.cursors.start(np.array([slot]), [trie], inserts=is_inserting)
            self.extend({slot: [START_TOKEN]})

    def extend(self, tokens: Mapping[int, Sequence[int]], distributions: Int32Array = NO_DISTRIBUTIONS) -> None:
        self.cursors.extend(np.array(list(tokens), np.int64), *end_to_end(list(tokens.values())), distributions)

    def propose(
        self,
        max_nodes: Sequence[int],
        rule: Rule = BLEND,
        min_score: float = 0.01,
        shared: Table = NO_TABLE,
        *beside: Any,
    ) -> list[DraftTree]:
        basis = Basis(rule, shared, *beside)
        return list(draft_trees(self.cursors.arrays, self.slots, np.array(max_nodes), basis, min_score))


def table_of(rollouts: Sequence[Sequence[int]]) -> Table:
    table = make_table()
    for rollout in rollouts:
        learn_ngrams(table, np.array(rollout, np.int32))
    return table


def random_distributions(random: np.random.Generator, num: int) -> tuple[Int32Array, list[dict[int, float]]]:
    """Distributions of some places, for a trie and for its twin; a third of them is unknown."""
    token_ids = random.permuted(np.tile(np.arange(VOCAB, dtype=np.int32), (num, 1)), axis=1)
    logprobs = np.log(random.dirichlet(np.ones(VOCAB + 1), num)[:, :VOCAB]).astype(np.float32)
    packed = pack(TopTokens(token_ids=token_ids, logprobs=logprobs))
    known = random.random(num) < 2 / 3
    packed[~known, 0] = UNKNOWN
    units = packed[:, NUM_TOP:].view(np.uint16)
    chances = [
        {ids[number]: of_place[number] / UNIT for number in range(VOCAB) if is_known and of_place[number]}
        for ids, of_place, is_known in zip(token_ids.tolist(), units.tolist(), known, strict=True)
    ]
    return packed, chances


def with_twin(inserts: Sequence[bool], rollouts: list[list[int]]) -> tuple[TokenTrie, Player, ReferenceTrie]:
    """A trie with cursors, and its twin."""
    trie, twin = TokenTrie(), ReferenceTrie()
    twin.rollouts = rollouts
    for is_inserted in inserts:
        twin.start(inserts=is_inserted)
    return trie, Player([trie] * len(inserts), inserts=inserts), twin


def count(trie: TokenTrie, string: Sequence[int]) -> int:
    return continuations(trie, string[:-1]).get(string[-1], 0)


def assert_equal_trees(tree: DraftTree, expected: DraftTree) -> None:
    assert tree.token_ids.tolist() == expected.token_ids.tolist()
    assert tree.parents.tolist() == expected.parents.tolist()
    assert tree.scores.tolist() == expected.scores.tolist()


@given(
    steps=STEPS,
    max_nodes=st.sampled_from([0, 1, 3, 8, 40]),
    rule=RULES,
    min_score=st.sampled_from([0.0, 0.02, 0.1, 0.3]),
    rollouts=st.lists(TOKENS.filter(bool), max_size=4),
)
def test_counts_matches_and_drafts_are_those_of_the_twin(
    steps: list[tuple[int, list[int]]], max_nodes: int, rule: Rule, min_score: float, rollouts: list[list[int]]
) -> None:
    trie, player, twin = with_twin((True, True, True, False), rollouts)
    shared = table_of(rollouts)
    for step, (moved, tokens) in enumerate(steps):
        player.extend({moved: tokens})
        twin.extend(moved, tokens)
        if step % 3 and step < len(steps) - 1:
            continue
        for cursor, tree in enumerate(player.propose([max_nodes] * 4, rule, min_score, shared)):
            assert player.cursors.arrays.rows[cursor, MATCH] == len(twin.cursors[cursor][0])
            assert_equal_trees(tree, twin.propose(cursor, max_nodes, rule, min_score))
    strings = {
        tuple(text[i : i + size])
        for text in twin.texts
        for i in range(len(text))
        for size in (1, 2, 3, 7, 40)
        if i + size <= len(text)
    }
    for string in strings:
        for one in (string, (*string, 0)):
            assert one[-1] == START_TOKEN or count(trie, one) == twin.count(one)
            assert continuations(trie, one) == twin.continuations(one)
    assert trie.num_tokens == sum(len(text) - 1 for text in twin.texts)
    assert trie.num_states <= 2 * (trie.num_tokens + 4)


@given(
    steps=STEPS,
    max_nodes=st.sampled_from([1, 8, 40]),
    min_score=st.sampled_from([0.02, 0.1]),
    rollouts=st.lists(TOKENS.filter(bool), max_size=4),
    seed=st.integers(0, 2**32),
)
def test_known_noise_and_learned_trust_weigh_as_in_the_twin(
    steps: list[tuple[int, list[int]]], max_nodes: int, min_score: float, rollouts: list[list[int]], seed: int
) -> None:
    random, shared = np.random.default_rng(seed), table_of(rollouts)
    _, player, twin = with_twin([True] * 4, rollouts)
    for moved, tokens in steps:
        distributions, chances = random_distributions(random, len(tokens))
        player.extend({moved: tokens}, distributions)
        twin.extend(moved, tokens, chances)
    trust = make_trust()
    trust[:] = random.random((NUM_CELLS, 4)) * (20, 40, MAX_POWER, 1)
    trust[DISTRIBUTION:-2, POWER] *= 2
    noise = Noise(random.integers(0, 2**63, 4).astype(np.uint64), random.integers(0, 99, 4), np.arange(4) < 3)
    for cursor, tree in enumerate(player.propose([max_nodes] * 4, BLEND, min_score, shared, trust, noise)):
        keys, positions = torch.tensor([int(noise.rng_keys[cursor])] * 40), torch.arange(40) + noise.positions[cursor]
        length = sum(len(tokens) for moved, tokens in steps if moved == cursor)
        uniforms = uniform_noise(keys, positions, VOCAB).tolist()
        rows = [Row(uniforms[depth], trust, 1 + length + depth) for depth in range(40)]
        row = rows.__getitem__ if noise.is_known[cursor] else plain_row
        expected = twin.propose(cursor, max_nodes, BLEND, min_score, row)
        assert tree.token_ids.tolist() == expected.token_ids.tolist()
        assert tree.parents.tolist() == expected.parents.tolist()
        np.testing.assert_allclose(tree.scores, expected.scores, rtol=1e-5)


def test_distributions_of_a_text_are_those_of_the_newest_that_began_as_it() -> None:
    """Texts of two turns; the second one leaves the first in its second turn."""
    random = np.random.default_rng(0)
    player = Player([trie := TokenTrie()], inserts=[True])
    texts = [[0, 1, 2, START_TOKEN, 3, 3, 1], [0, 1, 2, START_TOKEN, 3, 2, 0]]
    newest: dict[tuple[int, ...], Int32Array] = {}
    contexts = [tuple(text[:i] if i < 4 else text[4:i]) for text in texts for i in range(7)]
    for number, text in enumerate(texts):
        distributions, _ = random_distributions(random, 7)
        distributions[3, 0] = UNKNOWN
        player.extend({0: text}, distributions)
        player.extend({0: [START_TOKEN]})
        known = zip(contexts[7 * number :], distributions, strict=False)
        newest |= {context: place for context, place in known if place[0] != UNKNOWN}
    found = trie.distributions(np.array(texts[0], np.int32))
    assert found[3, 0] == UNKNOWN
    for i in (0, 1, 2, 4, 5, 6):
        expected = newest.get(contexts[i])
        assert found[i].tolist() == expected.tolist() if expected is not None else found[i, 0] == UNKNOWN
    assert trie.distributions(np.array([4, 4], np.int32))[1:, 0].tolist() == [UNKNOWN]
    assert not len(TokenTrie().distributions(np.array([4, 4], np.int32)))


@pytest.mark.parametrize("threads", [2], indirect=True)
@pytest.mark.parametrize("expected_tokens", [0, 20_000])
def test_several_tries_at_once_are_one_by_one(expected_tokens: int, threads: int) -> None:
    """In parallel, and with tries that must grow."""
    rng = np.random.default_rng(5)
    owners, max_nodes = [0, 1, 2, 0, 1, 0] * 4, [0, 8, 2, 5, 1, 40] * 4
    texts = {slot: rng.geometric(0.1, 500).tolist() for slot in range(len(owners))}
    tries = [TokenTrie(expected_tokens=expected_tokens) for _ in range(6)]
    at_once, single = (Player([part[i] for i in owners], inserts=[True] * 24) for part in (tries[:3], tries[3:]))
    at_once.extend(texts)
    for slot, tokens in texts.items():
        single.extend({slot: tokens})
    for slot, tree in enumerate(at_once.propose(max_nodes)):
        single.slots = np.array([slot])
        assert_equal_trees(tree, single.propose([max_nodes[slot]])[0])
    sizes = [(trie.num_tokens, trie.num_states) for trie in tries]
    assert sizes[:3] == sizes[3:]


def test_many_distinct_tokens() -> None:
    """States with many edges keep them in hash tables, which grow and are cloned."""
    generator = np.random.default_rng(0)
    trie, twin = TokenTrie(), ReferenceTrie()
    for number in range(3):
        text = [token for tail in generator.permutation(200).tolist() for token in (7, 8, 1000 + tail)]
        trie.insert(text)
        twin.start(inserts=True)
        twin.extend(number, text)
    for context in [(8,), (7, 8), (1000,), (1017, 7), (1017, 7, 8)]:
        assert continuations(trie, context) == twin.continuations(context)
    player = Player([trie], inserts=[True])
    twin.start(inserts=True)
    player.extend({0: [7, 8]})
    twin.extend(3, [7, 8])
    assert_equal_trees(player.propose([12], min_score=0.001)[0], twin.propose(3, 12, BLEND, 0.001))


@pytest.mark.parametrize("step", [1, 3, 4000])
def test_repetition_is_counted_in_linear_time(step: int) -> None:
    """Each token is an occurrence of as many strings as there are tokens before it: the longest of them are counted."""
    trie = TokenTrie()
    player = Player([trie], inserts=[True])
    for begin in range(0, 4000, step):
        player.extend({0: [0] * min(step, 4000 - begin)})
        (tree,) = player.propose([4])
    assert tree.token_ids.tolist()[:2] == [0, 0]
    counts = [count(trie, [0] * size) for size in (1, 2, 100, 3999, 4000, 4001)]
    assert counts[-3:] == [2, 1, 0]
    assert all(MAX_COUNTED <= count <= 4000 for count in counts[:3])


def test_a_trie_that_is_full_names_the_drafter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("srtrl.drafters.token_trie.MAX_INTEGERS", 4096)
    with pytest.raises(ValueError, match=r"rollout\.drafter: no more fits in a trie of .* tokens"):
        TokenTrie().insert(range(4096))


def test_cursors_begin_a_new_text_or_only_follow() -> None:
    player = Player([TokenTrie()], inserts=[True])
    player.extend({0: [3, 4, 3, 5, 3, 6, START_TOKEN]})
    shared = table_of([[9]])
    assert player.propose([2])[0].token_ids.tolist() == [3, 4], "the beginning of a response is a context"
    assert 9 in player.propose([8], shared=shared)[0].token_ids.tolist()
    trie = TokenTrie()
    player = Player([trie] * 2, inserts=[True, False])
    player.extend({0: [1, 2, 3, 4], 1: [1, 2, 9, 9, 9]})
    assert (trie.num_tokens, count(trie, [9])) == (4, 0), "what follows inserts nothing"
    player.extend({1: [2]})
    assert player.propose([0, 2])[1].token_ids.tolist() == [3, 4]
