"""Tries of the prompts that are being decoded, and what the drafters that use them share."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from pydantic import Field

from srtrl.drafters.base import DrafterBase, Int32Array, Int64Array, end_to_end
from srtrl.drafters.rollout_cache import RolloutCache
from srtrl.drafters.suffix_automaton import INSERTS, START_TOKEN
from srtrl.drafters.token_trie import TokenTrie, TrieCursors
from srtrl.recipe.schema import Section
from srtrl.types import Completion, Request, SamplingParams

PromptKey = tuple[str, tuple[int, ...]]
"""Purpose and token ids of a prompt: samples with the same key share a trie."""


class TrieOptions(Section):
    """Options of the drafters that have a trie for each prompt."""

    min_score: float = Field(default=0.01, ge=0, lt=1)
    """Nodes that are less likely to be accepted are not proposed; the draft budget chooses among the others."""
    max_rollouts: int = Field(default=16, ge=1)
    """Rollouts kept for each prompt; the newest stay."""
    cache_memory_gib: float = Field(default=1.0, ge=0)
    """Maximum memory of kept rollouts (training and evaluation have a cache each).

    When it is full, prompts lose their oldest rollouts before a whole prompt is dropped. It also bounds the memory of
    the tries: above it, tries that no sample drafts from are freed.
    """
    max_trie_tokens: int = Field(default=262_144, ge=64)
    """Maximum number of tokens in one prompt's trie (about 100 bytes each). The newest rollouts fill at most half of
    it; when it is full, running samples still draft from it, but add no more tokens."""


class TrieDrafter(DrafterBase):
    """Drafts from a trie for each prompt: built when its first sample starts, freed at the end of a step."""

    Options = TrieOptions
    options: TrieOptions
    inserts: bool
    """Whether running samples enter their tokens."""
    file_stem = "rollouts"
    """How the names of the files in a checkpoint begin; another one for caches with other keys."""

    def __init__(self, options: Section | None = None) -> None:
        super().__init__(options)
        self._max_bytes = int(self.options.cache_memory_gib * 2**30)
        self.cursors = TrieCursors()
        self.caches: dict[str, RolloutCache] = {}
        """Completed rollouts, for each purpose: evaluation never learns from training."""
        self._tries: dict[PromptKey, TokenTrie] = {}
        """The least recently started from first."""
        self._num_samples = self._num_with_history = 0

    def cache(self, purpose: str) -> RolloutCache:
        """Return the completed rollouts of samples of one purpose: to start from some, or to look at them."""
        if purpose not in self.caches:
            self.caches[purpose] = RolloutCache(max_rollouts=self.options.max_rollouts, max_bytes=self._max_bytes)
        return self.caches[purpose]

    def key_of(self, request: Request) -> PromptKey:
        """Return what the request's trie is found by."""
        return request.purpose, request.prompt_token_ids

    def history(self, key: PromptKey) -> list[npt.NDArray[np.int32]]:
        """Texts that a trie is built from, the most useful last."""
        purpose, prompt = key
        return self.cache(purpose).rollouts(prompt)

    def keep(self, key: PromptKey, text: npt.NDArray[np.int32]) -> None:
        """A response becomes history."""
        purpose, prompt = key
        self.cache(purpose).add(prompt, text)

    def start(self, slots: Int64Array, requests: Sequence[Request]) -> None:
        """Give the samples cursors in their tries; the first cursor in a new trie inserts the history before it."""
        start, max_tokens = np.array([START_TOKEN], np.int32), self.options.max_trie_tokens
        tries, texts = [], []
        for request in requests:
            key = self.key_of(request)
            trie, text = self._tries.pop(key, None), start
            if trie is None:
                history = newest(self.history(key), max_tokens // 2)
                trie = TokenTrie(expected_tokens=sum(map(len, history)), max_tokens=max_tokens)
                text = np.concatenate([*(part for own in history for part in (start, own)), start])
            self._tries[key] = trie
            tries.append(trie)
            texts.append(text)
        self.cursors.start(slots, tries, inserts=True)
        self.cursors.extend(slots, *end_to_end(texts))
        self.cursors.arrays.rows[slots, INSERTS] = self.inserts
        self._free_idle(self._max_bytes)

    def observe(self, slots: Int64Array, token_ids: Int32Array, offsets: Int64Array) -> None:
        """Insert or follow the committed tokens."""
        self.cursors.extend(slots, token_ids, offsets)

    def finish(self, slots: Sequence[int], completions: Sequence[Completion | None]) -> None:
        """Keep completed rollouts."""
        self.cursors.stop(slots)
        self.learn([one for one in completions if one is not None and not one.request.is_run_ahead])

    def learn(self, completions: Sequence[Completion]) -> None:
        """Keep completed rollouts, for the tries that are built from now on."""
        for completion in completions:
            text, starts = np.array(completion.token_ids, np.int32), [start for start, _ in completion.extensions]
            self.keep(self.key_of(completion.request), np.insert(text, starts, START_TOKEN) if starts else text)

    def expected_tokens(self, request: Request) -> float | None:
        """Mean length of the prompt's rollouts, those of finished siblings included."""
        mean_tokens = self.cache(request.purpose).mean_tokens(request.prompt_token_ids)
        self._num_samples += 1
        self._num_with_history += mean_tokens is not None
        return mean_tokens

    def set_next_uses(self, prompts: Sequence[tuple[int, ...]]) -> None:
        """Prompts of training in the order in which they come."""
        self.cache("train").set_next_uses(prompts)

    def end_step(self) -> None:
        """Free the tries that no sample uses: they are built again from the newest rollouts."""
        self._free_idle(0)

    def warm_up(self) -> None:
        """Compile the kernels, once: they are cached for other drafters."""
        _run_warm_up(type(self)(self.options))

    def take_metrics(self) -> dict[str, float]:
        """See docs/metrics.md for each metric."""
        metrics: dict[str, float] = {}
        for name in ("tokens", "bytes", "prompts", "dropped_rollouts", "dropped_prompts", "dropped_tokens"):
            metrics[f"engine/cache_{name}"] = sum(getattr(cache, f"num_{name}") for cache in self.caches.values())
        for cache in self.caches.values():
            cache.num_dropped_rollouts = cache.num_dropped_prompts = cache.num_dropped_tokens = 0
        metrics["engine/cache_bytes"] += self.num_trie_bytes
        if self._num_samples:
            metrics["engine/cache_hit_rate"] = self._num_with_history / self._num_samples
        self._num_samples = self._num_with_history = 0
        return metrics

    def save(self, folder: Path) -> None:
        """Write the completed rollouts: a file for each purpose that has been seen."""
        for purpose, cache in self.caches.items():
            cache.save(folder / f"{self.file_stem}_{purpose}.safetensors")

    def load(self, folder: Path) -> None:
        """Read the completed rollouts; raises ValueError naming a damaged file."""
        assert not any(self.cursors.tries), "no sample may be live"
        self._tries, self.caches = {}, {}
        for path in sorted(folder.glob(f"{self.file_stem}_*.safetensors")):
            self.cache(path.stem.removeprefix(f"{self.file_stem}_")).load(path)

    @property
    def num_trie_bytes(self) -> int:
        """Memory of all tries."""
        return sum(trie.num_bytes for trie in self._tries.values())

    def _free_idle(self, max_bytes: int) -> None:
        """Free tries that nobody uses, the longest idle first, until the others take no more than `max_bytes`."""
        num_bytes = self.num_trie_bytes
        if num_bytes <= max_bytes:
            return
        live = set(self.cursors.tries)
        for key, trie in list(self._tries.items()):
            if trie not in live and num_bytes > max_bytes:
                num_bytes -= trie.num_bytes
                del self._tries[key]


def newest(texts: Sequence[npt.NDArray[np.int32]], max_tokens: int) -> list[npt.NDArray[np.int32]]:
    """The last texts that have at most `max_tokens` together, in order; of the very last its end, if it is longer."""
    kept: list[npt.NDArray[np.int32]] = []
    for text in reversed(texts):
        if len(text) > max_tokens and kept:
            break
        kept.append(text[-max_tokens:])
        max_tokens -= len(kept[-1])
    return kept[::-1]


def _run_warm_up(drafter: TrieDrafter) -> None:
    """Run a short rollout with a drafter that is thrown away afterwards, so that all of its kernels are compiled."""
    slots, tokens = np.arange(1), np.array([4, 5, 6, 7], np.int32)
    for is_run_ahead in (True, False):  # the sample follows the run-ahead on its RNG key, and leaves it
        request = Request(
            prompt_id="warm-up",
            prompt_token_ids=(1, 2),
            draw_index=0,
            sample_index=0,
            rng_key=0,
            sampling=SamplingParams(max_new_tokens=8),
            purpose="train",
            is_run_ahead=is_run_ahead,
        )
        completion = Completion(
            request=request,
            token_ids=[4, 5, 6, 7, 8],
            rollout_logprobs=[0.0] * 5,
            finish_reason="stop",
            policy_version=0,
        )
        drafter.start(slots, [request])
        for some in (tokens[:2], tokens[2:], tokens[:1] + 4):
            drafter.propose(slots, np.full(1, 8))
            drafter.observe(slots, some, np.array([0, len(some)]))
        drafter.finish([0], [completion])
        drafter.end_step()
