"""The default drafter: a trie for each prompt, of its earlier rollouts, of its running ones, and of run-aheads."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from srtrl.drafters.base import Int32Array, Int64Array
from srtrl.drafters.draft_tree import DraftTrees
from srtrl.drafters.prompt_tries import PromptKey, TrieDrafter, TrieOptions, key_of
from srtrl.drafters.run_aheads import RunAheads
from srtrl.drafters.shared_ngrams import NO_TABLE, SharedNgrams, Table
from srtrl.recipe import Section
from srtrl.types import Completion, Request


class SrtOptions(TrieOptions):
    """Options of the drafter `srt`."""

    other_prompts: bool = True
    """Where the prompt's own texts know nothing, guess from what the last two tokens are followed by in completed
    rollouts of all prompts."""


class Drafter(TrieDrafter):
    """See `srtrl.drafters.base.DrafterBase`."""

    Options = SrtOptions
    options: SrtOptions
    uses_run_aheads = True
    inserts = True

    def __init__(self, options: Section | None = None) -> None:
        super().__init__(options)
        self._run_aheads = RunAheads()
        self._shared: dict[str, SharedNgrams] = {}
        """For each purpose: evaluation never learns from training."""
        self._requests: dict[int, Request] = {}
        """Of the live slots."""
        self._num_samples = self._num_with_history = 0

    def start(self, slots: Int64Array, requests: Sequence[Request]) -> None:
        """Give the samples cursors; a sample follows the run-ahead on its RNG key, if there is one."""
        super().start(slots, requests)
        for slot, request in zip(slots.tolist(), requests, strict=True):
            self._requests[slot] = request
            self._run_aheads.start(slot, key_of(request), request.rng_key, is_run_ahead=request.is_run_ahead)

    def propose(self, slots: Int64Array, max_nodes: Int64Array) -> DraftTrees:
        """Draft along the run-ahead that a slot follows, else from its prompt's trie."""
        followers = self._run_aheads.followers(slots)
        if not len(followers):
            return super().propose(slots, max_nodes)
        min_score = max(self.options.min_score, self.min_score)
        chains = self._run_aheads.chains(slots[followers], max_nodes[followers], min_score)
        room = max_nodes.copy()
        room[followers] = 0
        return super().propose(slots, room).replace(followers, chains)

    def observe(self, slots: Int64Array, token_ids: Int32Array, offsets: Int64Array) -> None:
        """Insert the committed tokens."""
        super().observe(slots, token_ids, offsets)
        self._run_aheads.observe(slots, token_ids, offsets)

    def finish(self, slots: Sequence[int], completions: Sequence[Completion | None]) -> None:
        """Keep completed rollouts, whose tokens are in their tries; what a run-ahead decoded is kept apart."""
        for slot, key, completion in zip(slots, self.stop(slots), completions, strict=True):
            request = self._requests.pop(slot)
            is_complete = completion is not None
            self._run_aheads.finish(
                slot, key, request.rng_key, is_run_ahead=request.is_run_ahead, is_complete=is_complete
            )
            if completion is not None:
                self._keep(key, np.array(completion.token_ids, np.int32))

    def learn(self, completions: Sequence[Completion]) -> None:
        """Keep completed rollouts; samples that decode have them in their trie."""
        for completion in completions:
            key, text = key_of(completion.request), np.array(completion.token_ids, np.int32)
            self._keep(key, text)
            self.insert(key, text)

    def expected_tokens(self, request: Request) -> float | None:
        """Mean length of the prompt's rollouts, those of finished siblings included."""
        mean_tokens = super().expected_tokens(request)
        self._num_samples += 1
        self._num_with_history += mean_tokens is not None
        return mean_tokens

    def on_policy_update(self) -> None:
        """Rollouts stay; run-aheads of the step before last go."""
        super().on_policy_update()
        self._run_aheads.on_policy_update()

    def take_metrics(self) -> dict[str, float]:
        """See docs/speculation.md for each metric."""
        metrics = super().take_metrics() | self._run_aheads.take_metrics()
        metrics["engine/cache_bytes"] += sum(shared.table.nbytes for shared in self._shared.values())
        if self._num_samples:
            metrics["engine/cache_hit_rate"] = self._num_with_history / self._num_samples
        self._num_samples = self._num_with_history = 0
        return metrics

    def load(self, folder: Path) -> None:
        """Read the completed rollouts; raises ValueError naming a damaged file."""
        super().load(folder)
        self._shared = {}
        for purpose, cache in self.caches.by_purpose.items():
            for prompt in cache.prompts():
                for text in cache.rollouts(prompt):
                    self._learn_ngrams(purpose, text)

    def shared_table(self, purpose: str) -> Table:
        """What two tokens are followed by in rollouts of all prompts."""
        return self._shared[purpose].table if purpose in self._shared else NO_TABLE

    def history(self, key: PromptKey) -> list[npt.NDArray[np.int32]]:
        """The prompt's rollouts, then the newer texts that were decoded ahead."""
        return super().history(key) + self._run_aheads.texts(key)

    def _keep(self, key: PromptKey, text: npt.NDArray[np.int32]) -> None:
        """A response becomes history."""
        purpose, prompt = key
        self.caches.of(purpose).add(prompt, text)
        self._learn_ngrams(purpose, text)

    def _learn_ngrams(self, purpose: str, text: npt.NDArray[np.int32]) -> None:
        if self.options.other_prompts:
            self._shared.setdefault(purpose, SharedNgrams()).learn(text)
