"""The slow twin of the token trie in plain Python: no automaton, every string is looked for in every text."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from srtrl.drafters.draft_tree import DraftTree
from srtrl.drafters.suffix import MAX_MATCH, MAX_TREE, NODES_PER_MATCH, SUFFIX
from srtrl.drafters.suffix_automaton import BLOCK, EDGE, NONE, ROOT, TARGET, edges_end, find_edge
from srtrl.drafters.token_trie import TokenTrie
from srtrl.drafters.trie_draft import LIFT, NEGLIGIBLE, SMALLEST_SCORE, Rule
from srtrl.drafters.trust import DECIDED, DISTRIBUTION, FORMULA_WEIGHT, NUM_CELLS, POWER, REACHED, Trust

START = -1
Text = tuple[int, ...]


@dataclass
class Row:
    """What decides the next token beside the contexts; without `trust` the noise is unknown."""

    uniforms: Sequence[float] = ()
    """By token."""
    trust: Trust | None = None
    num_passed: int = 0
    """Tokens of the text before it, START included."""

    def noise(self, token: int, cell: int) -> float:
        return 1.0 if self.trust is None else float((-np.log(self.uniforms[token])) ** -self.trust[cell, POWER])

    def blend(self, formula: float, cell: int) -> float:
        if self.trust is None:
            return formula
        decided, reached = self.trust[cell, DECIDED], self.trust[cell, REACHED]
        return float((FORMULA_WEIGHT * formula + decided) / (FORMULA_WEIGHT + reached))


def plain_row(depth: int) -> Row:
    return Row()


def continuations(trie: TokenTrie, token_ids: Sequence[int]) -> dict[int, int]:
    """Tokens that follow the given ones somewhere in a trie, with the number of times, the most frequent first."""
    state = ROOT
    for token in token_ids:
        edge = find_edge(trie.memory, state, token)
        if edge == NONE:
            return {}
        state = int(trie.memory[edge + TARGET])
    edges = trie.memory[trie.memory[state + BLOCK] : edges_end(trie.memory, state)].reshape(-1, EDGE).tolist()
    counts = {token: count for token, _, count in edges if token >= 0}
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


class ReferenceTrie:
    """Texts and cursors. The state of a string is the set of positions where it ends: equal counts mean one state."""

    def __init__(self) -> None:
        self.texts: list[list[int]] = []
        self.cursors: list[tuple[list[int], bool]] = []
        """The text that matches, and whether it is inserted."""
        self.last: list[Text] = []
        """The last two tokens of each cursor."""
        self.distributions: list[tuple[list[int], int, dict[int, float]]] = []
        """The newest last: a text, a position in it, and the probabilities of the token there."""
        self.rollouts: list[list[int]] = []
        """Completed ones of all prompts: what the table of shared n-grams knows as long as nothing is full."""

    def start(self, *, inserts: bool) -> None:
        text = [START]
        if inserts:
            self.texts.append(text)
        elif not self.count(text):
            text = []
        self.cursors.append((text, inserts))
        self.last.append((START, START))

    def extend(self, cursor: int, token_ids: Sequence[int], distributions: Sequence[dict[int, float]] = ()) -> None:
        text, is_inserted = self.cursors[cursor]
        for number, token in enumerate(token_ids):
            if distributions and distributions[number]:
                self.distributions.append((text, len(text), distributions[number]))
            self.last[cursor] = (self.last[cursor][1], token)
            text.append(token)
            while not is_inserted and text and not self.count(text):
                del text[0]

    def count(self, string: Sequence[int]) -> int:
        wanted, size = list(string), len(string)
        return sum(text[i : i + size] == wanted for text in self.texts for i in range(len(text) - size + 1))

    def continuations(self, string: Sequence[int]) -> dict[int, int]:
        counts: dict[int, int] = {}
        wanted, size = list(string), len(string)
        for text in self.texts:
            for i in range(len(text) - size):
                if text[i : i + size] == wanted:
                    counts[text[i + size]] = counts.get(text[i + size], 0) + 1
        return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))

    def contexts(self, string: Text) -> Iterator[Text]:
        """The longest string of each state along the suffixes."""
        last = None
        while string:
            count = self.count(string)
            if count != last:
                yield string
            last, string = count, string[1:]

    def newest(self, context: Text) -> dict[int, float]:
        """What the policy took to be likely after the newest occurrence of a context, as far as it is known."""
        for text, position, chances in reversed(self.distributions):
            if len(context) <= position and tuple(text[position - len(context) : position]) == context:
                return chances
        return {}

    def shared(self, context: Text) -> dict[int, int]:
        """What follows one or two tokens in the completed rollouts, each of which has two STARTs before it."""
        counts: dict[int, int] = {}
        for rollout in self.rollouts:
            text = [START, START, *rollout]
            for i in range(2, len(text)):
                if tuple(text[i - len(context) : i]) == context:
                    counts[text[i]] = counts.get(text[i], 0) + 1
        return counts

    def propose(
        self, cursor: int, max_nodes: int, rule: Rule, min_score: float, row: Callable[[int], Row] = plain_row
    ) -> DraftTree:
        return self.grow(tuple(self.cursors[cursor][0]), self.last[cursor], max_nodes, rule, min_score, row)

    def propose_for_suffixes(self, cursor: int, max_nodes: int, min_score: float) -> Iterator[DraftTree]:
        """A tree for each suffix of the match, as SuffixDecoding wants it."""
        for string in self.contexts(tuple(self.cursors[cursor][0])[-MAX_MATCH:]):
            room = min(max_nodes, MAX_TREE, NODES_PER_MATCH * len(string))
            yield self.grow(string, self.last[cursor], room, SUFFIX, min_score)

    def grow(
        self,
        context: Text,
        last: Text,
        max_nodes: int,
        rule: Rule,
        min_score: float,
        row: Callable[[int], Row] = plain_row,
    ) -> DraftTree:
        """`row`: depth of a node -> what decides its children beside the contexts."""
        min_score = max(min_score, SMALLEST_SCORE)
        behind: dict[int, tuple[Text, Text]] = {-1: (context, last)}
        depths = {-1: 0}
        nodes: list[tuple[int, int, float]] = []
        frontier: list[tuple[float, int, int, Text]] = []
        score = 1.0
        while len(nodes) < max_nodes:
            parent = len(nodes) - 1
            below = row(depths[parent])
            negligible = NEGLIGIBLE * min_score / score
            for token, (weight, string) in self.children(*behind[parent], rule, negligible, below).items():
                if score * min(weight, 1.0) >= min_score:
                    frontier.append((-score * min(weight, 1.0), token, parent, string))
            if not frontier:
                break
            best = min(frontier)
            frontier.remove(best)
            score, token, parent, string = -best[0], *best[1:]
            behind[len(nodes)] = (string, (behind[parent][1][1], token))
            depths[len(nodes)] = depths[parent] + 1
            nodes.append((token, parent, score))
        tokens, parents, scores = zip(*nodes, strict=True) if nodes else ((), (), ())
        return DraftTree(
            token_ids=np.array(tokens, np.int32),
            parents=np.array(parents, np.int32),
            scores=np.array(scores, np.float32),
        )

    def column(self, context: Text, row: Row) -> int:
        return 5 if len(context) == row.num_passed else min(int(np.log2(len(context))), 4)

    def children(
        self, string: Text, last: Text, rule: Rule, negligible: float, row: Row
    ) -> dict[int, tuple[float, Text]]:
        """Probability of each token, and the context after it."""
        weights: dict[int, float] = {}
        behind: dict[int, Text] = {}

        def spread(part: float, cell: int, counts: dict[int, int], total: int, ends: dict[int, Text]) -> None:
            """Share a context's part of the mass by count and noise; a new token is listed if it is not negligible."""
            listed = {
                token: count
                for token, count in counts.items()
                if token in weights or (count and not part * count < negligible * total)
            }
            shares = {token: count * row.noise(token, cell) for token, count in listed.items()}
            for token in listed:
                weights.setdefault(token, 0.0)
                behind.setdefault(token, ends[token])
                if any(listed.values()):
                    factor = part * sum(listed.values()) / total / sum(shares.values())
                    weights[token] += shares[token] * factor

        mass, before = 1.0, dict[int, int]()
        source = next((context for context in self.contexts(string) if self.newest(context)), ())
        if source and row.trust is not None:
            cell = DISTRIBUTION + self.column(source, row)
            power = row.trust[cell, POWER]
            chances = {token: chance for token, chance in self.newest(source).items() if chance >= LIFT * negligible}
            part = min(sum(chances.values()), 1.0) * row.blend(len(source) / (len(source) + rule.match_weight), cell)
            weights = {token: chance ** max(power, 1.0) * row.noise(token, cell) for token, chance in chances.items()}
            weights = {token: weight * part / sum(weights.values()) for token, weight in weights.items()}
            for token in chances:
                afters = ((*context, token) for context in (*self.contexts(string), ()))
                behind[token] = next((after for after in afters if self.count(after)), ())
            mass -= part
        for context in itertools.islice(self.contexts(string), rule.max_contexts):
            if mass < negligible:
                break
            following, match = self.continuations(context), len(context)
            more = sum(following.values()) - sum(before.values())
            if more > 0:
                trust = more / (more + rule.distinct_weight * len(following))
                trust *= match / (match + rule.match_weight)
                cell = min(int(np.log2(more)), 3) * 6 + self.column(context, row)
                part = mass * row.blend(trust, cell)
                counts = {
                    token: count - before.get(token, 0) * (token in weights) for token, count in following.items()
                }
                spread(part, cell, counts, more, {token: (*context, token) for token in following})
                mass -= part
                before = following
        if self.rollouts and mass >= negligible:
            for length in (2, 1):
                following = self.shared(last[2 - length :])
                total = sum(following.values())
                if not total:
                    continue
                trust = (
                    total / (total + rule.distinct_weight * len(following)) * (length / (length + rule.match_weight))
                )
                part = mass * row.blend(trust, NUM_CELLS - length)
                ends = {token: (token,) * (self.count((token,)) > 0) for token in following}
                spread(part, NUM_CELLS - length, following, total, ends)
                mass -= part
        return {token: (weight, behind[token]) for token, weight in weights.items()}
