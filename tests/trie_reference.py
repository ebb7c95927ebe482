"""The slow twin of `TokenTrie` in plain Python: no automaton, every string is looked for in every text."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from srtrl.drafters.draft_tree import DraftTree
from srtrl.drafters.token_trie import DraftRule

START = -1
Text = tuple[int, ...]
Aligned = tuple[Text, int] | None
"""An aligned context, and the run for which it has held."""
Candidate = tuple[int, int, Text]
"""Token, its count, and the context behind it."""


class ReferenceTrie:
    """As `TokenTrie`; the state of a string is the set of places where it ends, so equal counts mean one state."""

    def __init__(self) -> None:
        self.texts: list[list[int]] = []
        self.cursors: list[tuple[list[int], bool]] = []
        """The text that matches, and whether it is inserted."""
        self.aligned: list[Aligned] = []
        """The aligned context of each cursor."""
        self.last: list[Text] = []
        """The last two tokens of each cursor."""
        self.rollouts: list[list[int]] = []
        """Completed ones of all prompts: what `SharedNgrams` knows as long as nothing is full."""

    def start(self) -> int:
        self.texts.append([START])
        return self._add_cursor(self.texts[-1], is_inserted=True)

    def follow(self) -> int:
        return self._add_cursor([START], is_inserted=False)

    def _add_cursor(self, text: list[int], *, is_inserted: bool) -> int:
        self.cursors.append((text, is_inserted))
        self.aligned.append(None)
        self.last.append((START, START))
        return len(self.cursors) - 1

    def extend(self, cursor: int, token_ids: Sequence[int]) -> None:
        text, is_inserted = self.cursors[cursor]
        for token in token_ids:
            self.aligned[cursor] = self.align(tuple(text), self.aligned[cursor], token)
            self.last[cursor] = (self.last[cursor][1], token)
            text.append(token)
            while not is_inserted and text and not self.count(text):
                del text[0]

    def insert(self, token_ids: Sequence[int]) -> None:
        self.texts.append([START, *token_ids])

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

    def align(self, string: Text, aligned: Aligned, token: int) -> Aligned:
        """The aligned context behind a token, from the context `string` and the aligned one before it."""
        longest, following = next(self.contexts(string), ((), {}))
        if aligned:
            context, run = aligned
            continuations = self.continuations(context)
            if token in continuations:
                return (*context, token), run + 1
            if len(longest) <= run:
                return ((*context, next(iter(continuations))), run // 4) if continuations else None
        if not longest or token in following:
            return None
        return (*longest, next(iter(following))), 0

    def shared(self, context: Text) -> dict[int, int]:
        """What follows one or two tokens in the completed rollouts, each of which has two STARTs before it."""
        counts: dict[int, int] = {}
        for rollout in self.rollouts:
            text = [START, START, *rollout]
            for i in range(2, len(text)):
                if tuple(text[i - len(context) : i]) == context:
                    counts[text[i]] = counts.get(text[i], 0) + 1
        return counts

    def propose(self, cursor: int, max_nodes: int, rule: DraftRule) -> DraftTree:
        context = tuple(self.cursors[cursor][0])
        contexts = [string for string, _ in self.contexts(context)]
        if rule.name == "blend":
            return self.blended(cursor, max_nodes, rule)
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

    def blended(self, cursor: int, max_nodes: int, rule: DraftRule) -> DraftTree:
        """The tree of the rule `blend`; a candidate's context stands for the path to it: its parent's and its token."""
        start = (tuple(self.cursors[cursor][0]), self.aligned[cursor], self.last[cursor])
        behind: dict[int, tuple[Text, Aligned, Text]] = {-1: start}
        tokens: list[int] = []
        parents: list[int] = []
        scores: list[float] = []
        frontier: list[tuple[float, int, int, int, Text, int]] = []
        score, node, depth = 1.0, -1, 0
        while len(tokens) < max_nodes:
            if depth < rule.max_depth:
                for child_score, (token, count, string) in self.blend(*behind[node], score, rule):
                    if child_score >= rule.min_score:
                        frontier.append((-child_score, -count, token, node, string, depth + 1))
            if not frontier:
                break
            best = min(frontier)
            frontier.remove(best)
            negative, _, token, parent, string, depth = best
            score, node = -negative, node + 1
            above, aligned, last = behind[parent]
            behind[node] = (string, self.align(above, aligned, token), (last[1], token))
            tokens.append(token)
            parents.append(parent)
            scores.append(score)
        return tree_of(tokens, parents, scores)

    def blend(
        self, string: Text, aligned: Aligned, last: Text, score: float, rule: DraftRule
    ) -> list[tuple[float, Candidate]]:
        aligned_following: dict[int, int] = self.continuations(aligned[0]) if aligned else {}
        aligned_mass = 0.0
        if aligned and aligned_following:
            run, before = aligned[1], len(aligned[0]) - aligned[1]
            trust = min((run + rule.first_run) / (run + rule.run_weight), 1.0)
            aligned_mass = trust * (before / (before + rule.match_weight))
        levels, mass = self.levels(string, 1.0 - aligned_mass, rule)
        shares: dict[int, float] = {}
        behind: dict[int, tuple[int, Text]] = {}
        for factor, context, following in reversed(levels):
            for token, count in following.items():
                shares[token] = shares.get(token, 0.0) + factor * count
                behind[token] = (count, (*context, token))
        if aligned_mass > 0:
            for token, count in aligned_following.items():
                shares[token] = shares.get(token, 0.0) + aligned_mass * count / sum(aligned_following.values())
        if score * mass >= rule.min_score:
            for length in (2, 1):
                following = self.shared(last[2 - length :])
                total = sum(following.values())
                if total:
                    trust = total / (total + rule.distinct_weight * len(following))
                    trust *= length / (length + rule.match_weight)
                    for token, count in following.items():
                        shares[token] = shares.get(token, 0.0) + mass * trust * count / total
                    mass *= 1.0 - trust
        for token in shares.keys() - behind.keys():
            behind[token] = self.longest_behind(string, token)
        return [(score * min(share, 1.0), (token, *behind[token])) for token, share in shares.items()]

    def levels(
        self, string: Text, mass: float, rule: DraftRule
    ) -> tuple[list[tuple[float, Text, dict[int, int]]], float]:
        """The contexts that are blended, the longest first, with what an occurrence is worth; and what mass is left."""
        levels: list[tuple[float, Text, dict[int, int]]] = []
        before = 0
        for context, following in self.contexts(string):
            if len(levels) == rule.max_contexts or mass < rule.tail:
                break
            total, match = sum(following.values()), len(context)
            more = total - before
            if not more:
                continue
            trust = more / (more + rule.distinct_weight * len(following)) * (match / (match + rule.match_weight))
            factor = mass * trust / more
            if levels:
                longer = levels[-1]
                levels[-1] = (longer[0] - factor, *longer[1:])
            levels.append((factor, context, following))
            mass *= 1.0 - trust
            before = total
        return levels, mass

    def longest_behind(self, string: Text, token: int) -> tuple[int, Text]:
        """Longest suffix of the string and the token that occurs, with its count; nothing if the token is unknown."""
        for context, following in self.contexts(string):
            if token in following:
                return following[token], (*context, token)
        count = self.count((token,))
        return count, (token,) if count else ()

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
