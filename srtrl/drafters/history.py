"""Tries of rollouts that were completed in earlier steps, and of nothing newer.

What RhymeRL (He et al. 2025, "History Rhymes: Accelerating LLM Reinforcement Learning with RhymeRL") drafts from;
beside `srt` it shows what online insertion brings.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from pydantic import Field

from srtrl.drafters.base import DrafterBase
from srtrl.drafters.draft_tree import DraftTrees
from srtrl.drafters.prompt_tries import PromptKey, PromptTries, key_of
from srtrl.drafters.rollout_cache import RolloutCache, RolloutCaches
from srtrl.drafters.token_trie import DraftRule, propose_batch
from srtrl.recipe_base import Section
from srtrl.types import Completion, Request


class HistoryOptions(Section):
    """Options of the drafter `history`."""

    min_score: float = Field(default=0.01, ge=0, lt=1)
    """Nodes that are less likely to be accepted are not proposed; of the others the draft budget takes what pays."""
    max_rollouts: int = Field(default=16, ge=1)
    """Rollouts kept for each prompt; the newest stay."""
    cache_memory_gib: float = Field(default=1.0, ge=0)
    """Most memory of kept rollouts (training and evaluation have a cache each)."""
    max_trie_tokens: int = Field(default=262_144, ge=64)
    """Most tokens in one prompt's trie (some 150 bytes each): it is built from as many of the newest rollouts."""


class Drafter(DrafterBase):
    """See `srtrl.drafters.base.DrafterBase`."""

    Options = HistoryOptions
    options: HistoryOptions
    has_kernels = True

    def __init__(self, options: Section | None = None) -> None:
        super().__init__(options)
        max_bytes = int(self.options.cache_memory_gib * 2**30)
        self._caches = RolloutCaches(max_rollouts=self.options.max_rollouts, max_bytes=max_bytes)
        self._tries = PromptTries(
            self._history,
            online=False,
            max_trie_tokens=2 * self.options.max_trie_tokens,  # a trie that is built begins half full at most
            max_bytes=max_bytes,
        )
        self._rule = DraftRule(name="blend", min_score=self.options.min_score)
        self._completed: list[Completion] = []  # since the policy update: not history yet

    def cache(self, purpose: str) -> RolloutCache:
        """Return the rollouts of earlier steps: to start from some, or to look at them."""
        return self._caches.of(purpose)

    def start(self, sequence_id: int, request: Request) -> None:
        """Register a sample."""
        self._tries.start(sequence_id, request, key_of(request))

    def propose(self, sequence_ids: Sequence[int], max_nodes: Sequence[int]) -> DraftTrees:
        """Draft from the prompts' tries."""
        tries, cursors = self._tries.cursors(sequence_ids)
        return propose_batch(tries, cursors, max_nodes, self._rule, least_score=self.least_score)

    def observe(self, sequence_ids: Sequence[int], token_ids: Sequence[Sequence[int]]) -> None:
        """Follow the committed tokens in the tries; nothing enters them."""
        self._tries.extend(sequence_ids, token_ids)

    def finish(self, sequence_id: int, completion: Completion | None) -> None:
        """Set a completed rollout aside, until the policy is updated."""
        self._tries.finish(sequence_id, completion)
        if completion is not None and not completion.request.is_run_ahead:
            self._completed.append(completion)

    def expected_tokens(self, request: Request) -> float | None:
        """Mean length of the prompt's earlier rollouts."""
        return self._caches.of(request.purpose).mean_tokens(request.prompt_token_ids)

    def set_next_uses(self, prompts: Sequence[tuple[int, ...]]) -> None:
        """Prompts of training in the order in which they come."""
        self._caches.of("train").set_next_uses(prompts)

    def on_policy_update(self) -> None:
        """What was completed before is history now."""
        for completion in self._completed:
            request = completion.request
            self._caches.of(request.purpose).add(request.prompt_token_ids, completion.token_ids)
        self._completed = []

    def take_metrics(self) -> dict[str, float]:
        """Sizes of the cache and what it dropped."""
        metrics = self._caches.take_metrics()
        metrics["engine/cache_bytes"] += self._tries.num_bytes
        return metrics

    def save(self, folder: Path) -> None:
        """Write all rollouts; those of the last step count as history, for the step ends where a checkpoint is made."""
        self.on_policy_update()
        self._caches.save(folder)

    def load(self, folder: Path) -> None:
        """Read the rollouts; raises ValueError naming a damaged file."""
        self._completed = []
        self._caches.load(folder)

    def _history(self, key: PromptKey) -> list[npt.NDArray[np.int32]]:
        purpose, prompt = key
        return self._caches.of(purpose).rollouts(prompt)
