"""The default drafter: a trie a prompt, of its earlier rollouts, of its running ones, and of what was decoded ahead."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from srtrl.drafters.base import DrafterBase
from srtrl.drafters.coupled import RunAheads
from srtrl.drafters.draft_tree import DraftTrees
from srtrl.drafters.prompt_tries import PromptKey, PromptTries, key_of
from srtrl.drafters.rollout_cache import RolloutCache, RolloutCaches
from srtrl.drafters.shared_ngrams import SharedNgrams
from srtrl.drafters.token_trie import DraftRule, propose_batch
from srtrl.recipe_base import Section
from srtrl.types import Completion, Request


class SrtOptions(Section):
    """Options of the drafter `srt`."""

    rule: Literal["blend", "paper", "authors"] = "blend"
    """How a trie's counts become a draft: `blend` mixes contexts of several lengths; `paper` trusts the longest one, as
    the SRT paper does; `authors` drafts one line, as the code of that paper's authors does."""
    min_score: float | None = Field(default=None, ge=0, lt=1)
    """Nodes that are less likely to be accepted are not proposed; of the others the draft budget takes what pays.

    By default 0.01 with `blend`, and the published 0.1 with the other rules.
    """
    online: bool = True
    """Running rollouts enter their prompt's trie with each token; else when they are complete."""
    coupled: bool = True
    """A sample that was decoded ahead follows that text first; else the text is in the trie only."""
    other_prompts: bool = True
    """With `blend`: where the prompt's own texts know nothing, guess from what the last two tokens are followed by in
    completed rollouts of all prompts."""
    max_rollouts: int = Field(default=16, ge=1)
    """Rollouts kept for each prompt; the newest stay."""
    cache_memory_gib: float = Field(default=1.0, ge=0)
    """Most memory of kept rollouts (training and evaluation have a cache each).

    When it is short, prompts are trimmed to fewer rollouts before one is dropped. Tries that no sample drafts from are
    freed where all tries take more than this, too.
    """
    max_trie_tokens: int = Field(default=262_144, ge=64)
    """Most tokens in one prompt's trie (some 150 bytes each); a larger one is rebuilt from its newest texts."""

    def draft_rule(self) -> DraftRule:
        """The rule with its threshold."""
        min_score = self.min_score
        if min_score is None:
            min_score = 0.01 if self.rule == "blend" else 0.1
        return DraftRule(name=self.rule, min_score=min_score)


class Drafter(DrafterBase):
    """See `srtrl.drafters.base.DrafterBase`."""

    Options = SrtOptions
    options: SrtOptions
    has_kernels = True
    uses_run_aheads = True

    def __init__(self, options: Section | None = None) -> None:
        super().__init__(options)
        max_bytes = int(self.options.cache_memory_gib * 2**30)
        self._caches = RolloutCaches(max_rollouts=self.options.max_rollouts, max_bytes=max_bytes)
        self._tries = PromptTries(
            self._history,
            online=self.options.online,
            max_trie_tokens=self.options.max_trie_tokens,
            max_bytes=max_bytes,
        )
        self._run_aheads = RunAheads()
        self._shared: dict[str, SharedNgrams] = {}
        """For each purpose: evaluation never learns from training."""
        self._rule = self.options.draft_rule()
        self._num_samples = 0
        self._num_with_history = 0

    def cache(self, purpose: str) -> RolloutCache:
        """Return the completed rollouts of samples of one purpose: to start from some, or to look at them."""
        return self._caches.of(purpose)

    def start(self, sequence_id: int, request: Request) -> None:
        """Register a sample; a primary follows the run-ahead of its RNG key, if there is one."""
        key = key_of(request)
        self._tries.start(sequence_id, request, key)
        if request.is_run_ahead:
            return
        if self.options.coupled:
            self._run_aheads.start(sequence_id, key, request.rng_key)

    def propose(self, sequence_ids: Sequence[int], max_nodes: Sequence[int]) -> DraftTrees:
        """Draft from the prompts' tries, and along what was decoded ahead."""
        tries, cursors = self._tries.cursors(sequence_ids)
        purpose = self._tries.samples[sequence_ids[0]].prompt.key[0] if sequence_ids else "train"
        trees = propose_batch(tries, cursors, max_nodes, self._rule, self._shared_of(purpose), self.least_score)
        return self._run_aheads.add_chains(trees, sequence_ids, max_nodes)

    def observe(self, sequence_ids: Sequence[int], token_ids: Sequence[Sequence[int]]) -> None:
        """Committed tokens; they enter the tries when drafts are wanted next."""
        self._tries.extend(sequence_ids, token_ids)
        if self._run_aheads.has_followers:
            for sequence_id, tokens in zip(sequence_ids, token_ids, strict=True):
                self._run_aheads.observe(sequence_id, tokens, self._tries.samples[sequence_id].tokens)

    def finish(self, sequence_id: int, completion: Completion | None) -> None:
        """Keep a completed rollout; what a run-ahead decoded is kept apart, until its step has passed."""
        sample = self._tries.finish(sequence_id, completion)
        request, key = sample.request, sample.prompt.key
        if request.is_run_ahead:
            self._run_aheads.keep(key, request.rng_key, sample.tokens)
        else:
            response = None if completion is None else completion.token_ids
            self._run_aheads.finish(sequence_id, key, request.rng_key, response)
            if response is not None:
                self._keep(key, [np.array(response, np.int32)])
        if not self.options.online and sample.tokens:
            self._tries.insert(key, [sample.tokens])

    def learn(self, completions: Sequence[Completion]) -> None:
        """Keep completed rollouts; siblings that draft have them in their trie."""
        # Prompt by prompt, for hundreds end together: one by one they take a third longer.
        by_prompt: dict[PromptKey, list[Completion]] = {}
        for completion in completions:
            by_prompt.setdefault(key_of(completion.request), []).append(completion)
        for key, siblings in by_prompt.items():
            texts = [np.array(completion.token_ids, np.int32) for completion in siblings]
            self._run_aheads.forget(key, [completion.request.rng_key for completion in siblings])
            self._keep(key, texts)
            self._tries.insert(key, texts)

    def expected_tokens(self, request: Request) -> float | None:
        """Mean length of the prompt's rollouts, those of finished siblings included."""
        mean_tokens = self._caches.of(request.purpose).mean_tokens(request.prompt_token_ids)
        self._num_samples += 1
        self._num_with_history += mean_tokens is not None
        return mean_tokens

    def set_next_uses(self, prompts: Sequence[tuple[int, ...]]) -> None:
        """Prompts of training in the order in which they come."""
        self._caches.of("train").set_next_uses(prompts)

    def on_policy_update(self) -> None:
        """Rollouts stay; run-aheads of the step before last go."""
        self._run_aheads.on_policy_update()

    def take_metrics(self) -> dict[str, float]:
        """See docs/speculation.md for each metric."""
        metrics = self._caches.take_metrics() | self._run_aheads.take_metrics()
        metrics["engine/cache_bytes"] += self._tries.num_bytes
        metrics["engine/cache_bytes"] += sum(shared.num_bytes for shared in self._shared.values())
        if self._num_samples:
            metrics["engine/cache_hit_rate"] = self._num_with_history / self._num_samples
        self._num_samples = self._num_with_history = 0
        return metrics

    def save(self, folder: Path) -> None:
        """Write the completed rollouts; what was decoded ahead is not kept, nor rollouts that left the cache."""
        self._caches.save(folder)

    def load(self, folder: Path) -> None:
        """Read the completed rollouts; raises ValueError naming a damaged file."""
        self._caches.load(folder)
        self._shared = {}
        for purpose in self._caches.purposes:
            cache = self._caches.of(purpose)
            for prompt in cache.prompts():
                self._shared_of(purpose).extend(cache.rollouts(prompt))

    def _keep(self, key: PromptKey, texts: Sequence[npt.NDArray[np.int32]]) -> None:
        """A prompt's responses become history."""
        purpose, prompt = key
        self._caches.of(purpose).extend(prompt, texts)
        self._shared_of(purpose).extend(texts)

    def _shared_of(self, purpose: str) -> SharedNgrams:
        """The table of one purpose; one that stays empty where the options want none."""
        if purpose not in self._shared:
            is_wanted = self.options.other_prompts and self.options.rule == "blend"
            self._shared[purpose] = SharedNgrams() if is_wanted else SharedNgrams.none()
        return self._shared[purpose]

    def _history(self, key: PromptKey) -> list[npt.NDArray[np.int32]]:
        """What a prompt's trie is built from: its rollouts, and behind them the newer texts that were decoded ahead."""
        purpose, prompt = key
        return self._caches.of(purpose).rollouts(prompt) + self._run_aheads.texts(key)
