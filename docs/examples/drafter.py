"""A drafter in plain Python by SRT's published rule: a node's score is the product of the shares along its path.

A share says how often a token followed the longest known context, in all texts of the prompt so far. It saves steps of
recorded rollouts (no model is needed), and a run with it learns what every run learns:

    cd docs/examples
    srtrl replay RUN --drafter drafter:Drafter
    srtrl train quickstart rollout.drafter=drafter:Drafter
"""

import heapq
from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np

from srtrl.drafters.base import DrafterBase, Int32Array, Int64Array
from srtrl.drafters.draft_tree import ROOT, DraftTree, DraftTrees
from srtrl.recipe.schema import Section
from srtrl.types import Completion, Request

MAX_CONTEXT = 32
Prompt = tuple[str, tuple[int, ...]]


class Drafter(DrafterBase):
    """Guesses what followed the longest known context in all texts of the prompt so far."""

    def __init__(self, options: Section | None = None) -> None:
        super().__init__(options)
        self.counts: dict[tuple[Prompt, tuple[int, ...]], Counter[int]] = defaultdict(Counter)
        self.live: dict[int, tuple[Prompt, list[int]]] = {}

    def start(self, slots: Int64Array, requests: Sequence[Request]) -> None:
        """Note the prompt of each new sample."""
        for slot, request in zip(slots.tolist(), requests, strict=True):
            self.live[slot] = (request.purpose, request.prompt_token_ids), []

    def observe(self, slots: Int64Array, token_ids: Int32Array, offsets: Int64Array) -> None:
        """Count each new token after every context that ends before it."""
        for index, slot in enumerate(slots.tolist()):
            prompt, text = self.live[slot]
            for token in token_ids[offsets[index] : offsets[index + 1]].tolist():
                for start in range(max(0, len(text) - MAX_CONTEXT), len(text)):
                    self.counts[prompt, tuple(text[start:])][token] += 1
                text.append(token)

    def finish(self, slots: Sequence[int], completions: Sequence[Completion | None]) -> None:
        """Forget samples that have ended; their counts stay."""
        for slot in slots:
            del self.live[slot]

    def propose(self, slots: Int64Array, max_nodes: Int64Array, min_score: float) -> DraftTrees:
        """Draft for all slots."""
        return DraftTrees.of(
            self.tree(*self.live[slot], most) for slot, most in zip(slots.tolist(), max_nodes, strict=True)
        )

    def tree(self, prompt: Prompt, text: list[int], most: int) -> DraftTree:
        """The `most` likeliest continuations of a text, as a tree: the best path is extended first."""
        nodes: list[tuple[float, int, int]] = []  # score (chance of the whole path), parent, token
        queue = [(-1.0, ROOT, text)]  # paths, the most likely first; each is extended once
        candidates: list[tuple[float, int, int, list[int]]] = []
        while len(nodes) < most:
            if queue:
                score, parent, path = queue.pop()
                for token, chance in self.continuations(prompt, path):
                    heapq.heappush(candidates, (score * chance, parent, token, path))
            if not candidates:
                break
            score, parent, token, path = heapq.heappop(candidates)
            queue.append((score, len(nodes), [*path, token]))
            nodes.append((-score, parent, token))
        scores, parents, tokens = zip(*nodes, strict=True) if nodes else ((), (), ())
        return DraftTree(
            token_ids=np.array(tokens, np.int32),
            parents=np.array(parents, np.int32),
            scores=np.array(scores, np.float32),
        )

    def continuations(self, prompt: Prompt, path: list[int]) -> list[tuple[int, float]]:
        """Tokens that followed the longest known context, with their shares; none if no context is known."""
        for start in range(max(0, len(path) - MAX_CONTEXT), len(path)):  # the longest context first
            if followed := self.counts.get((prompt, tuple(path[start:]))):
                return [(token, count / followed.total()) for token, count in followed.items()]
        return []
