"""The slow twin of `TokenTrie` in plain Python: no automaton, every string is looked for in every text."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from srtrl.drafters.draft_tree import DraftTree
from srtrl.drafters.token_trie import DraftRule

START = -1
Text = tuple[int, ...]
Candidate = tuple[int, int, Text]
"""Token, its count, and the context behind it."""


class ReferenceTrie:
    """As `TokenTrie`; the state of a string is the set of places where it ends, so equal counts mean one state."""

    def __init__(self) -> None:
        self.texts: list[list[int]] = []
        self.cursors: list[tuple[list[int], bool]] = []
        """The text that matches, and whether it is inserted."""

    def start(self) -> int:
        self.texts.append([START])
        self.cursors.append((self.texts[-1], True))
        return len(self.cursors) - 1

    def follow(self) -> int:
        self.cursors.append(([START], False))
        return len(self.cursors) - 1

    def extend(self, cursor: int, token_ids: Sequence[int]) -> None:
        text, is_inserted = self.cursors[cursor]
        for token in token_ids:
            text.append(token)
            while not is_inserted and text and not self.count(text):
                del text[0]

    def insert(self, token_ids: Sequence[int]) -> None:
        self.extend(self.start(), token_ids)

    def match_length(self, cursor: int) -> int:
        return len(self.cursors[cursor][0])

    def count(self, string: Sequence[int]) -> int:
        wanted, size = list(string), len(string)
        return sum(text[i : i + size] == wanted for text in self.texts for i in range(len(text) - size + 1))

    def continuations(self, string: Sequence[int]) -> dict[int, int]:
        counts: dict[int, int] = {}
        wanted, size = list(string), len(string)
        for text in self.texts:
            for i in range(len(text) - size):
                if text[i : i + size] == wanted and text[i + size] != START:
                    counts[text[i + size]] = counts.get(text[i + size], 0) + 1
        return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))

    def contexts(self, string: Text) -> Iterator[tuple[Text, dict[int, int]]]:
        """The longest string of each state along the suffixes, with what follows it where something does."""
        last = None
        while string:
            count = self.count(string)
            if count != last and (following := self.continuations(string)):
                yield string, following
            last, string = count, string[1:]

    def propose(self, cursor: int, max_nodes: int, rule: DraftRule) -> DraftTree:
        context = tuple(self.cursors[cursor][0])
        contexts = [string for string, _ in self.contexts(context)]
        if rule.name == "blend":
            return best_first(context, max_nodes, rule, lambda string, score: self.blend(string, score, rule))[0]
        if rule.name == "suffix":
            trees = [
                best_first(
                    string, min(max_nodes, rule.max_tree, int(rule.nodes_per_match * len(string))), rule, self.share
                )
                for string, _ in self.contexts(context[-rule.max_match :])
            ]
            return max(trees, key=lambda tree: tree[1], default=best_first(context, 0, rule, self.share))[0]
        if rule.name == "paper":
            return best_first(contexts[0] if contexts else (), max_nodes, rule, self.share)[0]
        return self.line(contexts[0] if contexts else (), min(max_nodes, rule.max_tokens), rule)

    def share(self, string: Text, score: float) -> list[tuple[float, Candidate]]:
        following = self.continuations(string) if string else {}
        total = sum(following.values())
        return [(score * (count / total), (token, count, (*string, token))) for token, count in following.items()]

    def blend(self, string: Text, score: float, rule: DraftRule) -> list[tuple[float, Candidate]]:
        mass = 1.0
        levels: list[tuple[float, Text, dict[int, int]]] = []
        for context, following in self.contexts(string):
            if len(levels) == rule.max_contexts or mass < rule.tail:
                break
            total, match = sum(following.values()), len(context)
            trust = total / (total + rule.distinct_weight * len(following)) * (match / (match + rule.match_weight))
            levels.append((mass * trust / total, context, following))
            mass *= 1.0 - trust
        shares: dict[int, float] = {}
        behind: dict[int, tuple[int, Text]] = {}
        for factor, context, following in reversed(levels):
            for token, count in following.items():
                shares[token] = shares.get(token, 0.0) + factor * count
                behind[token] = (count, (*context, token))
        return [(score * min(share, 1.0), (token, *behind[token])) for token, share in shares.items()]

    def line(self, string: Text, max_nodes: int, rule: DraftRule) -> DraftTree:
        tokens: list[int] = []
        scores: list[float] = []
        score, limit = 1.0, min(max_nodes, len(string))
        while len(tokens) < limit and (candidates := self.share(string, score)):
            score, (token, _, string) = candidates[0]
            if score < rule.min_score:
                break
            tokens.append(token)
            scores.append(score)
        return tree_of(tokens, list(range(-1, len(tokens) - 1)), scores)


def best_first(
    context: Text, max_nodes: int, rule: DraftRule, expand: Callable[[Text, float], list[tuple[float, Candidate]]]
) -> tuple[DraftTree, float]:
    """The tree, and the sum of its scores, added up in order before they are rounded to 32 bits."""
    tokens: list[int] = []
    parents: list[int] = []
    scores: list[float] = []
    frontier: list[tuple[float, int, int, int, Text, int]] = []
    score, total, node, depth = 1.0, 0.0, -1, 0
    while len(tokens) < max_nodes:
        if depth < rule.max_depth:
            for child_score, (token, count, string) in expand(context, score):
                if child_score >= rule.min_score:
                    frontier.append((-child_score, -count, token, node, string, depth + 1))
        if not frontier:
            break
        best = min(frontier)
        frontier.remove(best)
        negative, _, token, parent, context, depth = best
        score = -negative
        tokens.append(token)
        parents.append(parent)
        scores.append(score)
        node += 1
        total += score
    return tree_of(tokens, parents, scores), total


def tree_of(tokens: list[int], parents: list[int], scores: list[float]) -> DraftTree:
    return DraftTree(
        token_ids=np.array(tokens, np.int32), parents=np.array(parents, np.int32), scores=np.array(scores, np.float32)
    )
