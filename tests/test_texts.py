"""Places and drafts against a loop over all positions that counts how many tokens back each agrees."""

import math
from collections.abc import Mapping, Sequence
from itertools import groupby

import numba
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from plain_kernels import uniform_noise

from srtrl.drafters.base import Int32Array, end_to_end
from srtrl.drafters.children import NOISE_POWER
from srtrl.drafters.distributions import NO_DISTRIBUTIONS, NUM_TOP, UNIT, UNKNOWN, pack
from srtrl.drafters.draft_tree import DraftTree
from srtrl.drafters.shared_ngrams import NO_TABLE, learn_ngrams, make_table
from srtrl.drafters.texts import (
    INITIAL_PAGES,
    MAX_MATCH,
    MAX_PLACES,
    NO_PENDING,
    PAGE,
    START_TOKEN,
    Texts,
    TextStore,
    make_found,
    search,
    seek,
)
from srtrl.drafters.trie_draft import LIFT, MAX_BLENDED, NEGLIGIBLE, NO_NOISE, SMALLEST_SCORE, Basis, Noise, draft_trees
from srtrl.drafters.trust import DECIDED, DISTRIBUTION, FORMULA_WEIGHT, NUM_CELLS, REACHED, make_trust
from srtrl.types import TopTokens

VOCAB, SLOTS = 5, 4
PROMPTS = [7, 7, 3, 7]
"""Number of the prompt of each slot."""
TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=6)
STEPS = st.lists(st.tuples(st.integers(0, SLOTS - 1), TOKENS), min_size=1, max_size=9)
"""Which of the slots goes on, with which tokens: fewer than a search keeps places."""
Place = tuple[int, int, int]
"""Match, slot, position in its text."""


@numba.njit(nogil=True)
def find(texts: Texts, slot: int) -> tuple[Int32Array, Int32Array]:
    """Places that follow the last tokens of a slot's text, and their matches: the longest, then the newest first."""
    found = make_found(0)
    search(texts, seek(texts, NO_PENDING, slot, found), found, 0, 0, MAX_PLACES)
    return found.places[0, : found.nums[0]], found.matches[0, : found.nums[0]]


class Twin:
    """The texts of a store, in lists."""

    def __init__(self, rollouts: Sequence[list[int]] = ()) -> None:
        self.store, self.texts = TextStore(), [[START_TOKEN] for _ in range(SLOTS)]
        self.order: list[tuple[int, int]] = []
        """Slot and position of all places that drafts find, the newest last."""
        self.chances: dict[tuple[int, int], dict[int, float]] = {}
        """By slot and position, the known probabilities."""
        self.rollouts = rollouts
        self.store.start(np.arange(SLOTS), PROMPTS)
        self.store.extend(np.arange(SLOTS), *end_to_end(self.texts))

    def extend(self, slot: int, tokens: Sequence[int], known: Int32Array = NO_DISTRIBUTIONS) -> None:
        self.store.extend(np.array([slot]), *end_to_end([tokens]), known)
        for token in tokens:
            self.order.append((slot, len(self.texts[slot])))
            self.texts[slot].append(token)

    def places(self, slot: int, path: tuple[int, ...], shortest: int) -> list[Place]:
        """All positions that agree so far: the longest matches first, then the newest."""
        found = []
        for other, position in reversed(self.order):
            before, text = self.texts[other][:position], [*self.texts[slot], *path]
            match = next((n for n in range(min(len(before), len(text))) if before[-1 - n] != text[-1 - n]), None)
            match = min(len(before), len(text)) if match is None else match
            if PROMPTS[other] == PROMPTS[slot] and match >= shortest:
                found.append((match, other, position))
        return sorted(found, key=lambda place: -place[0])

    def places_of(self, slot: int, path: tuple[int, ...], above: list[Place]) -> list[Place]:
        """As `find_places`."""
        went_on = [one for one in above if self.texts[one[1]][one[2]] == path[-1]]  # of the root there is none above
        found = [(m + 1, other, i + 1) for m, other, i in went_on if i + 1 < len(self.texts[other])]
        if len({match for match, *_ in found}) >= 2 or len(found) >= 16:
            return found
        found = self.places(slot, path, 4)
        return found if len({match for match, *_ in found}) >= 2 else self.places(slot, path, 1)

    def children(
        self, slot: int, path: tuple[int, ...], places: list[Place], negligible: float, row: "Row"
    ) -> dict[int, float]:
        """Probability of each token."""
        weights: dict[int, float] = {}
        num_passed, mass = len(self.texts[slot]) + len(path), 1.0

        def column(match: int) -> int:
            return 5 if match == num_passed else min(int(math.log2(match)), 4)

        def spread(counts: Mapping[int, float], part: float, listed: float) -> None:
            shares = {
                token: count * (row.noise(token) ** NOISE_POWER if count < listed else 1.0)
                for token, count in counts.items()
            }
            total = sum(shares.values()) if row.trust is not None else listed
            for token, share in shares.items():
                weights[token] = weights.get(token, 0.0) + share * (part / total)

        known = next((place for place in places if place[1:] in self.chances), None)
        if known is not None and row.trust is not None:
            cell = DISTRIBUTION + column(known[0])
            chances = {one: p for one, p in self.chances[known[1:]].items() if p >= LIFT * negligible}
            if chances:
                part = min(sum(chances.values()), 1.0) * row.blend(known[0] / (known[0] + 2), cell)
                shares = {token: chance * row.noise(token) for token, chance in chances.items()}
                weights = {token: share * part / sum(shares.values()) for token, share in shares.items()}
                mass -= part
        distinct: set[int] = set()
        for match, group in [(m, list(g)) for m, g in groupby(places, lambda place: place[0])][:MAX_BLENDED]:
            if mass < negligible:
                break
            tokens = [self.texts[other][position] for _, other, position in group]
            distinct |= set(tokens)
            part = len(tokens) / (len(tokens) + 0.5 * len(distinct)) * (match / (match + 2.0))
            cell = min(int(math.log2(len(tokens))), 3) * 6 + column(match)
            part = mass * row.blend(part, cell)
            spread({token: tokens.count(token) for token in tokens}, part, len(tokens))
            mass -= part
        last = [START_TOKEN, *self.texts[slot], *path][-2:]
        for length in (2, 1) if self.rollouts and mass >= negligible else ():
            texts = [[START_TOKEN, START_TOKEN, *rollout] for rollout in self.rollouts]
            following = [
                one[i] for one in texts for i in range(2, len(one)) if one[i - length : i] == last[2 - length :]
            ]
            if following:
                total, cell = len(following), NUM_CELLS - length
                part = total / (total + 0.5 * len(set(following))) * (length / (length + 2.0))
                part = mass * row.blend(part, cell)
                counts = {token: following.count(token) for token in following}
                counts = {
                    one: count for one, count in counts.items() if one in weights or part * count >= negligible * total
                }
                if counts:
                    listed = sum(counts.values())
                    spread(counts, part * listed / total, listed)
                mass -= part
        return weights

    def propose(self, slot: int, max_nodes: int, min_score: float, rows: list["Row"]) -> DraftTree:
        min_score = max(min_score, SMALLEST_SCORE)
        nodes: list[tuple[int, int, float]] = []
        behind: list[tuple[tuple[int, ...], list[Place]]] = []
        path: tuple[int, ...] = ()
        places, score = self.places_of(slot, path, []), 1.0
        frontier: list[tuple[float, int, int]] = []
        while len(nodes) < max_nodes:
            behind.append((path, places))
            negligible = NEGLIGIBLE * min_score / score
            for token, weight in self.children(slot, path, places, negligible, rows[len(path)]).items():
                if score * min(weight, 1.0) >= min_score:
                    frontier.append((-score * min(weight, 1.0), token, len(nodes) - 1))
            if not frontier:
                break
            best = min(frontier)
            frontier.remove(best)
            score, (above_path, above_places) = -best[0], behind[best[2] + 1]
            path = (*above_path, best[1])
            places = self.places_of(slot, path, above_places)
            nodes.append((best[1], best[2], score))
        tokens, parents, scores = zip(*nodes, strict=True) if nodes else ((), (), ())
        return DraftTree(
            token_ids=np.array(tokens, np.int32),
            parents=np.array(parents, np.int32),
            scores=np.array(scores, np.float32),
        )


class Row:
    """Inputs that decide the next token beside the places; without `trust` the noise is unknown."""

    def __init__(self, uniforms: Sequence[float] = (), trust: np.ndarray | None = None) -> None:
        self.uniforms, self.trust = uniforms, trust

    def noise(self, token: int) -> float:
        return 1.0 if self.trust is None else float(-1 / np.log(self.uniforms[token]))

    def blend(self, formula: float, cell: int) -> float:
        if self.trust is None:
            return formula
        decided, reached = self.trust[cell, DECIDED], self.trust[cell, REACHED]
        return float((FORMULA_WEIGHT * formula + decided) / (FORMULA_WEIGHT + reached))


def table_of(rollouts: Sequence[list[int]]) -> Int32Array:
    table = make_table()
    for rollout in rollouts:
        learn_ngrams(table, np.array(rollout, np.int32))
    return table


def random_distributions(random: np.random.Generator, num: int) -> tuple[Int32Array, list[dict[int, float]]]:
    """Distributions of some places, for a store and for its twin; a third of them is unknown."""
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


@given(
    steps=STEPS,
    max_nodes=st.sampled_from([1, 3, 8, 40]),
    min_score=st.sampled_from([0.0, 0.02, 0.1, 0.3]),
    rollouts=st.lists(TOKENS.filter(bool), max_size=4),
    knows_noise=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_places_and_drafts_are_those_of_the_twin(
    steps: list[tuple[int, list[int]]],
    max_nodes: int,
    min_score: float,
    rollouts: list[list[int]],
    knows_noise: bool,
    seed: int,
) -> None:
    random, twin = np.random.default_rng(seed), Twin(rollouts)
    for slot, tokens in steps:
        known, chances = random_distributions(random, len(tokens))
        first = len(twin.texts[slot])
        twin.extend(slot, tokens, known)
        twin.chances |= {(slot, first + i): of_place for i, of_place in enumerate(chances) if of_place}
    trust = random.random((NUM_CELLS, 2)) * (20, 40)
    noise = Noise(random.integers(0, 2**63, SLOTS).astype(np.uint64), np.arange(SLOTS) + 5, np.full(SLOTS, knows_noise))
    basis, limits = Basis(table_of(rollouts), trust, noise), np.full(SLOTS, max_nodes)
    for slot, tree in enumerate(draft_trees(twin.store.arrays, np.arange(SLOTS), limits, basis, min_score)):
        _, matches = find(twin.store.arrays, slot)
        assert matches.tolist() == [match for match, *_ in twin.places(slot, (), 1)]
        keys, positions = torch.tensor([int(noise.rng_keys[slot])] * 41), torch.arange(41) + 5 + slot
        uniforms = uniform_noise(keys, positions, VOCAB).tolist()
        rows = [Row(uniforms[depth], trust) if knows_noise else Row() for depth in range(41)]
        expected = twin.propose(slot, max_nodes, min_score, rows)
        assert tree.token_ids.tolist() == expected.token_ids.tolist()
        assert tree.parents.tolist() == expected.parents.tolist()
        np.testing.assert_allclose(tree.scores, expected.scores, rtol=1e-5 if knows_noise else 0)


def test_many_texts_grow_at_once() -> None:
    """Over several times the pages that there are at first."""
    random, store = np.random.default_rng(5), TextStore()
    num = 3 * INITIAL_PAGES * PAGE // 24
    texts = random.geometric(0.2, (24, num))
    store.start(np.arange(24), [slot % 3 for slot in range(24)])
    store.extend(np.arange(24), *end_to_end([[START_TOKEN]] * 24))
    for begin in range(0, num, 50):
        parts = texts[:, begin : begin + 50]
        store.extend(np.arange(24), *end_to_end(list(parts)))
    assert store.arrays.tokens[store.positions(20)].tolist() == [START_TOKEN, *texts[20].tolist()]
    for slot in (0, 13):
        places, matches = find(store.arrays, slot)
        owners = {slot % 3: set(np.concatenate([store.positions(one) for one in range(slot % 3, 24, 3)]).tolist())}
        assert set(places.tolist()) <= owners[slot % 3]
        assert 1 < len(places) <= 64
        for place, match in zip(places.tolist(), matches.tolist(), strict=True):
            other = next(one for one in range(24) if place in store.positions(one))
            before = texts[other][: store.positions(other).tolist().index(place) - 1][-match:]
            assert before.tolist() == texts[slot][-match:].tolist()


@pytest.mark.parametrize("length", [MAX_MATCH - 1, MAX_MATCH, 200])
def test_a_match_has_the_beginning_of_the_text_in_it_and_has_an_end(length: int) -> None:
    twin, text = Twin(), np.random.default_rng(0).integers(0, 9, 250).tolist()
    twin.extend(0, text)
    twin.extend(2, text)
    twin.extend(1, text[:length])
    assert find(twin.store.arrays, 1)[1][0] == min(1 + length, MAX_MATCH)
    twin.store.start(np.array([3]), [7])
    twin.store.extend(np.array([3]), *end_to_end([[START_TOKEN, 9, *text[1:length]]]))
    assert find(twin.store.arrays, 3)[1][0] == min(length - 1, MAX_MATCH)


def test_repetition_is_searched_in_bounded_time() -> None:
    twin = Twin()
    for _ in range(4000):
        twin.extend(0, [0])
    places, matches = find(twin.store.arrays, 0)
    assert len(places) == len(matches) == 64
    basis = Basis(NO_TABLE, make_trust(), NO_NOISE)
    (tree,) = draft_trees(twin.store.arrays, np.array([0]), np.array([4]), basis, 0.01)
    assert tree.token_ids.tolist()[:2] == [0, 0]
