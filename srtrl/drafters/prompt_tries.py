"""Tries of the prompts that are being decoded, and what the drafters that use them share."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from pydantic import Field

from srtrl.drafters.base import DrafterBase, Int32Array, Int64Array, run_warm_up
from srtrl.drafters.draft_tree import DraftTrees
from srtrl.drafters.rollout_cache import RolloutCache, RolloutCaches
from srtrl.drafters.shared_ngrams import NO_TABLE, Table
from srtrl.drafters.suffix_automaton import START_TOKEN
from srtrl.drafters.token_trie import TokenTrie, TrieCursors, insert_texts
from srtrl.drafters.trie_draft import BLEND, TrieDrafts
from srtrl.recipe import Section
from srtrl.types import Request

PromptKey = tuple[str, tuple[int, ...]]
"""Purpose and token ids of a prompt: samples with the same key share a trie."""


def key_of(request: Request) -> PromptKey:
    """Return what the request's trie is found by."""
    return request.purpose, request.prompt_token_ids


class TrieOptions(Section):
    """Options of the drafters that have a trie for each prompt."""

    min_score: float = Field(default=0.01, ge=0, lt=1)
    """Nodes that are less likely to be accepted are not proposed; of the others the draft budget takes what pays."""
    max_rollouts: int = Field(default=16, ge=1)
    """Rollouts kept for each prompt; the newest stay."""
    cache_memory_gib: float = Field(default=1.0, ge=0)
    """Maximum memory of kept rollouts (training and evaluation have a cache each).

    When it is short, prompts are trimmed to fewer rollouts before one is dropped. Tries that no sample drafts from are
    freed where all tries take more than this, too.
    """
    max_trie_tokens: int = Field(default=262_144, ge=64)
    """Maximum number of tokens in one prompt's trie (some 100 bytes each). It is built from as many of the newest
    rollouts as fill half of it; when it is full, running samples follow it and enter no more tokens."""


@dataclass(slots=True)
class _PromptTrie:
    trie: TokenTrie
    num_live: int = 0
    """Slots that draft from it."""


class TrieDrafter(DrafterBase):
    """Drafts from a trie for each prompt, which is built when its first sample starts and freed after its last one."""

    Options = TrieOptions
    options: TrieOptions
    inserts: bool
    """Whether running samples enter their tokens."""

    def __init__(self, options: Section | None = None) -> None:
        super().__init__(options)
        self.cursors = TrieCursors()
        self.caches = RolloutCaches(max_rollouts=self.options.max_rollouts, max_bytes=self._max_bytes)
        self._tries: dict[PromptKey, _PromptTrie] = {}
        """Of the prompts with live slots, and of idle ones: the longest idle first."""
        self._keys: dict[int, PromptKey] = {}
        """Of the live slots."""
        self._drafts = TrieDrafts()

    def cache(self, purpose: str) -> RolloutCache:
        """Return the completed rollouts of samples of one purpose: to start from some, or to look at them."""
        return self.caches.of(purpose)

    def start(self, slots: Int64Array, requests: Sequence[Request]) -> None:
        """Give the samples cursors in their prompts' tries."""
        keys = [key_of(request) for request in requests]
        self._build({key for key in keys if key not in self._tries})
        for slot, key in zip(slots.tolist(), keys, strict=True):
            self._keys[slot] = key
            self._tries[key].num_live += 1
        self._free_idle(self._max_bytes)
        self.cursors.start(slots, [self._tries[key].trie for key in keys], inserts=self.inserts)
        self.cursors.extend(slots, np.full(len(slots), START_TOKEN, np.int32), np.arange(len(slots) + 1))

    def propose(self, slots: Int64Array, max_nodes: Int64Array) -> DraftTrees:
        """Draft from the prompts' tries."""
        min_score = max(self.options.min_score, self.min_score)
        shared = self.shared_table(self._keys[int(slots[0])][0]) if len(slots) else NO_TABLE
        return self._drafts.propose(self.cursors, slots, max_nodes, BLEND, min_score, shared)

    def observe(self, slots: Int64Array, token_ids: Int32Array, offsets: Int64Array) -> None:
        """Insert or follow the committed tokens."""
        self.cursors.extend(slots, token_ids, offsets)

    def expected_tokens(self, request: Request) -> float | None:
        """Mean length of the prompt's rollouts."""
        return self.caches.of(request.purpose).mean_tokens(request.prompt_token_ids)

    def set_next_uses(self, prompts: Sequence[tuple[int, ...]]) -> None:
        """Prompts of training in the order in which they come."""
        self.caches.of("train").set_next_uses(prompts)

    def on_policy_update(self) -> None:
        """Free the tries that nobody uses: they are built again from the newest rollouts."""
        self._free_idle(0)

    def warm_up(self) -> None:
        """Compile the kernels, once: they are cached for other drafters."""
        run_warm_up(type(self)(self.options))

    def take_metrics(self) -> dict[str, float]:
        """Sizes of the caches and tries, and what was dropped."""
        metrics = self.caches.take_metrics()
        metrics["engine/cache_bytes"] += self.num_trie_bytes
        return metrics

    def save(self, folder: Path) -> None:
        """Write the completed rollouts."""
        self.caches.save(folder)

    def load(self, folder: Path) -> None:
        """Read the completed rollouts; raises ValueError naming a damaged file."""
        assert not self._keys, "no sample may be live"
        self.caches.load(folder)
        self._tries = {}

    def shared_table(self, purpose: str) -> Table:
        """What is known of all prompts of a purpose."""
        return NO_TABLE

    def history(self, key: PromptKey) -> list[npt.NDArray[np.int32]]:
        """Texts that a prompt's trie is built from, the most useful last."""
        purpose, prompt = key
        return self.caches.of(purpose).rollouts(prompt)

    def stop(self, slots: Sequence[int]) -> list[PromptKey]:
        """Take samples out of their tries; returns their prompts."""
        self.cursors.stop(slots)
        keys = [self._keys.pop(slot) for slot in slots]
        for key in keys:
            prompt = self._tries.pop(key)
            prompt.num_live -= 1
            self._tries[key] = prompt  # last
        return keys

    def insert(self, key: PromptKey, text: npt.NDArray[np.int32]) -> None:
        """Add a text to a prompt's trie, if it has one."""
        prompt = self._tries.get(key)
        if prompt is not None:
            prompt.trie.insert(text)
            self.cursors.refresh(prompt.trie)

    @property
    def num_trie_bytes(self) -> int:
        """Memory of all tries."""
        return sum(prompt.trie.num_bytes for prompt in self._tries.values())

    @property
    def _max_bytes(self) -> int:
        return int(self.options.cache_memory_gib * 2**30)

    def _build(self, keys: Iterable[PromptKey]) -> None:
        """Make the prompts' tries from their histories, all in one call."""
        max_tokens = self.options.max_trie_tokens
        tries, texts = [], []
        for key in keys:
            text = newest(self.history(key), max_tokens // 2)
            trie = TokenTrie(expected_tokens=sum(map(len, text)), max_tokens=max_tokens)
            self._tries[key] = _PromptTrie(trie)
            if text:
                tries.append(trie)
                texts.append(text)
        if tries:
            insert_texts(tries, texts)

    def _free_idle(self, max_bytes: int) -> None:
        """Free tries that nobody uses, the longest idle first, until the others take no more than `max_bytes`."""
        num_bytes = self.num_trie_bytes
        for key, prompt in list(self._tries.items()):
            if num_bytes <= max_bytes:
                return
            if not prompt.num_live:
                num_bytes -= prompt.trie.num_bytes
                del self._tries[key]


def newest(texts: Sequence[npt.NDArray[np.int32]], max_tokens: int) -> list[npt.NDArray[np.int32]]:
    """The last texts that have at most `max_tokens` together, in order; of the very last its end, if it is longer."""
    kept: list[npt.NDArray[np.int32]] = []
    for text in reversed(texts):
        if len(text) > max_tokens and kept:
            break
        kept.append(text[-max_tokens:] if max_tokens else text[:0])
        max_tokens -= len(kept[-1])
    return kept[::-1]
