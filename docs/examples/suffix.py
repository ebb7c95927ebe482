"""SuffixDecoding, a baseline in plain Python: all responses and each sample's own text; the best of many guesses.

After G. Oliaro et al. 2024, "SuffixDecoding: Extreme Speculative Decoding for Emerging AI Applications". Each suffix of
the sample's text that has occurred, in the responses of any prompt or in its own prompt and text, gives a tree whose
scores are products of shares of the occurrences. The tree with the largest sum of scores is drafted. Texts are counted
as in drafter.py, so contexts have at most its `MAX_CONTEXT` tokens:

    cd docs/examples
    srtrl replay RUN --drafter suffix:Drafter
"""

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np
from drafter import MAX_CONTEXT, Prompt
from drafter import Drafter as SrtRule

from srtrl.drafters.base import Int64Array, end_to_end
from srtrl.drafters.draft_tree import DraftTrees
from srtrl.types import Completion, Request

MIN_SCORE = 0.1
"""Nodes that are less likely to be accepted are not proposed (the authors' setting, as the next two)."""
MAX_TREE, NODES_PER_TOKEN = 48, 4
"""Largest draft, and nodes of a draft for each token of its suffix."""


class Drafter(SrtRule):
    """Drafts after one of the suffixes of a text."""

    num_texts = 0

    def start(self, slots: Int64Array, requests: Sequence[Request]) -> None:
        """Begin a text of each sample with its prompt; no other one has the same name."""
        for slot, request in zip(slots.tolist(), requests, strict=True):
            self.num_texts += 1
            self.live[slot] = (request.purpose, (self.num_texts, len(request.prompt_token_ids))), []
        self.observe(slots, *end_to_end([request.prompt_token_ids for request in requests]))

    def finish(self, slots: Sequence[int], completions: Sequence[Completion | None]) -> None:
        """Count completed responses."""
        super().finish(slots, completions)
        self.learn([completion for completion in completions if completion is not None])

    def learn(self, completions: Sequence[Completion]) -> None:
        """Count responses; those of one purpose are together."""
        for completion in completions:
            self.live[-1] = (completion.request.purpose, ()), []
            self.observe(np.array([-1]), *end_to_end([completion.response.token_ids]))
            del self.live[-1]

    def end_step(self) -> None:
        """Forget each sample's own text."""
        self.counts = defaultdict(Counter, {key: counts for key, counts in self.counts.items() if key[0][1] == ()})

    def propose(self, slots: Int64Array, max_nodes: Int64Array, min_score: float) -> DraftTrees:
        """Draft for all slots."""
        best = []
        for slot, most in zip(slots.tolist(), max_nodes.tolist(), strict=True):
            (purpose, own), text = self.live[slot]
            texts = [((purpose, own), text), ((purpose, ()), text[own[1] :])]
            suffixes = [(key, part[-n:]) for key, part in texts for n in range(min(len(part), MAX_CONTEXT) + 1)]
            trees = DraftTrees.of(
                self.tree(key, suffix, min(most, MAX_TREE, NODES_PER_TOKEN * len(suffix))) for key, suffix in suffixes
            )
            sizes = np.array([(tree.scores >= MIN_SCORE).sum() for tree in trees])
            best.append(max(trees.pick(trees.offsets[:-1], sizes), key=lambda tree: tree.scores.sum()))
        return DraftTrees.of(best)

    def continuations(self, prompt: Prompt, path: list[int]) -> list[tuple[int, float]]:
        """Tokens that followed the whole path, with their shares."""
        followed = self.counts.get((prompt, tuple(path)))
        return [(token, count / followed.total()) for token, count in followed.items()] if followed else []
