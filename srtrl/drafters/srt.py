"""The default drafter: a trie for each prompt, of its earlier rollouts, of its running ones, and of run-aheads."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from srtrl.drafters.base import Int32Array, Int64Array, TextsByKey
from srtrl.drafters.draft_tree import DraftTrees
from srtrl.drafters.prompt_tries import PromptKey, TrieDrafter, TrieOptions
from srtrl.drafters.run_ahead_texts import RunAheadTexts
from srtrl.drafters.shared_ngrams import NO_TABLE, Table, learn_ngrams, make_table
from srtrl.drafters.trie_draft import BLEND, draft_trees
from srtrl.recipe.schema import Section
from srtrl.types import Completion, Request


class SrtOptions(TrieOptions):
    """Options of the drafter `srt`."""

    other_prompts: bool = True
    """Where the prompt's own texts have no continuation, guess what followed the last two tokens in completed rollouts
    of any prompt."""


class Drafter(TrieDrafter):
    """See `srtrl.drafters.base.DrafterBase`."""

    Options = SrtOptions
    options: SrtOptions
    uses_run_aheads = True
    inserts = True

    def __init__(self, options: Section | None = None) -> None:
        super().__init__(options)
        self._run_aheads = RunAheadTexts()
        self._shared: dict[str, Table] = {}
        """For each purpose: evaluation never learns from training."""
        self._purpose = ""
        """Of the samples that started last, and so of all live ones."""

    def start(self, slots: Int64Array, requests: Sequence[Request]) -> None:
        """Give the samples cursors; a sample follows the run-ahead on its RNG key, if there is one."""
        super().start(slots, requests)
        for slot, request in zip(slots.tolist(), requests, strict=True):
            self._purpose = request.purpose
            self._run_aheads.start(slot, self.key_of(request), request)

    def propose(self, slots: Int64Array, max_nodes: Int64Array) -> DraftTrees:
        """Draft along the run-ahead that a slot follows, else from its prompt's trie."""
        min_score = max(self.options.min_score, self.min_score)
        followers = self._run_aheads.followers(slots)
        room = max_nodes
        if len(followers):
            room = max_nodes.copy()
            room[followers] = 0
        shared = self._shared.get(self._purpose, NO_TABLE)
        trees = draft_trees(self.cursors.arrays, slots, room, BLEND, min_score, shared)
        if not len(followers):
            return trees
        return trees.replace(followers, self._run_aheads.chains(slots[followers], max_nodes[followers], min_score))

    def observe(self, slots: Int64Array, token_ids: Int32Array, offsets: Int64Array) -> None:
        """Insert the committed tokens."""
        super().observe(slots, token_ids, offsets)
        self._run_aheads.observe(slots, token_ids, offsets)

    def finish(self, slots: Sequence[int], completions: Sequence[Completion | None]) -> None:
        """Keep completed rollouts; texts of run-aheads are kept apart."""
        super().finish(slots, completions)
        for completion in completions:
            if completion is not None:
                self._run_aheads.finish(self.key_of(completion.request), completion)

    def run_ahead_texts(self) -> TextsByKey:
        """Those of this step."""
        return self._run_aheads.newest

    def learn_run_aheads(self, texts: TextsByKey) -> None:
        """The samples follow them as if they were decoded here."""
        self._run_aheads.learn(texts)

    def end_step(self) -> None:
        """Rollouts stay; texts of run-aheads that were made for this step go."""
        super().end_step()
        self._run_aheads.end_step()

    def take_metrics(self) -> dict[str, float]:
        """See docs/metrics.md for each metric."""
        metrics = super().take_metrics() | self._run_aheads.take_metrics()
        metrics["engine/cache_bytes"] += sum(table.nbytes for table in self._shared.values())
        return metrics

    def load(self, folder: Path) -> None:
        """Read the completed rollouts; raises ValueError naming a damaged file."""
        super().load(folder)
        self._shared = {}
        for purpose, cache in self.caches.items():
            for prompt in cache.prompts():
                for text in cache.rollouts(prompt):
                    self._learn_ngrams(purpose, text)

    def history(self, key: PromptKey) -> list[npt.NDArray[np.int32]]:
        """The prompt's rollouts, then the newer texts that were decoded ahead."""
        return super().history(key) + self._run_aheads.texts(key)

    def keep(self, key: PromptKey, text: npt.NDArray[np.int32]) -> None:
        """A response becomes history, and its phrases serve all prompts."""
        super().keep(key, text)
        self._learn_ngrams(key[0], text)

    def _learn_ngrams(self, purpose: str, text: npt.NDArray[np.int32]) -> None:
        if self.options.other_prompts:
            if purpose not in self._shared:
                self._shared[purpose] = make_table()
            learn_ngrams(self._shared[purpose], text)
