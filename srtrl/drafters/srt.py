"""The default drafter: a trie for each prompt, of its earlier rollouts, of its running ones, and of run-aheads."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from pydantic import Field

from srtrl.drafters.base import DrafterBase, Int32Array, Int64Array, PromptKey, TextsByKey, end_to_end
from srtrl.drafters.draft_tree import DraftTrees
from srtrl.drafters.rollout_cache import RolloutCache
from srtrl.drafters.run_ahead_texts import RunAheadTexts
from srtrl.drafters.shared_ngrams import NO_TABLE, Table, learn_ngrams, make_table
from srtrl.drafters.suffix_automaton import INSERTS, START_TOKEN
from srtrl.drafters.token_trie import TokenTrie, TrieCursors
from srtrl.drafters.trie_draft import BLEND, Noise, draft_trees, learn_rows
from srtrl.drafters.trust import Trust, load_trust, make_trust, save_trust
from srtrl.recipe.schema import Section
from srtrl.types import Completion, Request

TRUST_FILE = "draft_trust.json"


class SrtOptions(Section):
    """Options of the drafters `srt` and `history`."""

    min_score: float = Field(default=0.01, ge=0, lt=1)
    """Nodes that are less likely to be accepted are not proposed; the draft budget chooses among the others."""
    max_rollouts: int = Field(default=16, ge=1)
    """Rollouts kept for each prompt; the newest stay."""
    cache_memory_gib: float = Field(default=1.0, ge=0)
    """Maximum memory of kept rollouts (training and evaluation have a cache each).

    When it is full, prompts lose their oldest rollouts before a whole prompt is dropped. It also bounds the memory of
    the tries: above it, tries that no sample drafts from are freed.
    """
    other_prompts: bool = True
    """Where the prompt's own texts have no continuation, guess what followed the last two tokens in completed rollouts
    of any prompt."""


class Drafter(DrafterBase):
    """See `srtrl.drafters.base.DrafterBase`. A trie is built when its prompt's first sample starts."""

    Options = SrtOptions
    options: SrtOptions
    uses_run_aheads = True
    summed_metrics = frozenset(f"engine/run_ahead_{name}" for name in ("tokens_made", "tokens_used", "followed"))
    inserts = True
    """Whether running samples enter their tokens into the tries."""

    def __init__(self, options: Section | None = None) -> None:
        super().__init__(options)
        self._max_bytes = int(self.options.cache_memory_gib * 2**30)
        self.cursors = TrieCursors()
        self.caches: dict[str, RolloutCache] = {}
        """Completed rollouts, for each purpose: evaluation never learns from training."""
        self._tries: dict[PromptKey, TokenTrie] = {}
        """The least recently started from first."""
        self._run_aheads = RunAheadTexts()
        self._ngrams: dict[str, Table] = {}
        """For each purpose, from texts of all prompts."""
        self._trust: dict[str, Trust] = {}
        """For each purpose, what was learned about contexts and the noise."""
        self._noise = Noise(np.zeros(0, np.uint64), np.zeros(0, np.int64), np.zeros(0, np.bool_))
        self._is_drafted = np.zeros(0, np.bool_)
        """[slots], whether what is observed next follows a draft, and so teaches trust."""
        self._purpose = ""
        """Of the samples that started last, and so of all live ones."""

    def cache(self, purpose: str) -> RolloutCache:
        """Return the completed rollouts of samples of one purpose."""
        if purpose not in self.caches:
            self.caches[purpose] = RolloutCache(max_rollouts=self.options.max_rollouts, max_bytes=self._max_bytes)
        return self.caches[purpose]

    def start(self, slots: Int64Array, requests: Sequence[Request]) -> None:
        """Give the samples cursors in their tries; the first cursor in a new trie inserts the history before it.

        A sample also follows the run-ahead on its RNG key, if there is one.
        """
        start = np.array([START_TOKEN], np.int32)
        tries, texts = [], []
        for slot, request in zip(slots.tolist(), requests, strict=True):
            key = key_of(request)
            self._purpose = request.purpose
            self._run_aheads.start(slot, key, request)
            rollouts = self.cache(request.purpose).rollouts(request.prompt_token_ids)
            trie, text = self._tries.pop(key, None), start
            if trie is None:
                history = rollouts + self._run_aheads.texts(key)  # the most useful last
                trie = TokenTrie(expected_tokens=sum(map(len, history)))
                text = np.concatenate([*(part for own in history for part in (start, own)), start])
            self._tries[key] = trie
            tries.append(trie)
            texts.append(text)
        self.cursors.start(slots, tries, inserts=True)
        self.cursors.extend(slots, *end_to_end(texts))
        self.cursors.arrays.rows[slots, INSERTS] = self.inserts
        more = len(self.cursors.tries) - len(self._noise.rng_keys)
        if more > 0:
            keys, positions, is_known = self._noise
            self._noise = Noise(np.pad(keys, (0, more)), np.pad(positions, (0, more)), np.pad(is_known, (0, more)))
            self._is_drafted = np.pad(self._is_drafted, (0, more))
        self._noise.rng_keys[slots] = [request.rng_key for request in requests]
        self._noise.positions[slots] = [request.text_start for request in requests]
        self._noise.is_known[slots] = [self.knows_noise and request.sampling.temperature > 0 for request in requests]
        self._is_drafted[slots] = False
        self._free_idle(self._max_bytes)

    def propose(self, slots: Int64Array, max_nodes: Int64Array, min_score: float) -> DraftTrees:
        """Draft along the run-ahead that a slot follows, else from its prompt's trie."""
        min_score = max(self.options.min_score, min_score)
        followers = self._run_aheads.followers(slots)
        room = max_nodes
        if len(followers):
            room = max_nodes.copy()
            room[followers] = 0
        ngrams = self._ngrams.get(self._purpose, NO_TABLE)
        trust = self._trust.setdefault(self._purpose, make_trust())
        trees = draft_trees(self.cursors.arrays, slots, room, BLEND, min_score, ngrams, trust, self._noise)
        self._is_drafted[slots] = True
        if not len(followers):
            return trees
        return trees.replace(followers, self._run_aheads.chains(slots[followers], max_nodes[followers], min_score))

    def observe(self, slots: Int64Array, token_ids: Int32Array, offsets: Int64Array) -> None:
        """Learn from what followed the drafts, and insert (or follow) the committed tokens."""
        teaches = self._is_drafted[slots] & self._noise.is_known[slots]
        if teaches.any():
            trust, ngrams = self._trust[self._purpose], self._ngrams.get(self._purpose, NO_TABLE)
            learn_rows(self.cursors.arrays, slots, teaches, token_ids, offsets, BLEND, trust, self._noise, ngrams)
        self._is_drafted[slots] = False
        self.cursors.extend(slots, token_ids, offsets)
        self._noise.positions[slots] += offsets[1:] - offsets[:-1]
        self._run_aheads.observe(slots, token_ids, offsets)

    def finish(self, slots: Sequence[int], completions: Sequence[Completion | None]) -> None:
        """Keep completed rollouts; texts of run-aheads are kept apart."""
        self.cursors.stop(slots)
        finished = [completion for completion in completions if completion is not None]
        for completion in finished:
            self._run_aheads.finish(key_of(completion.request), completion)
        self.learn([completion for completion in finished if not completion.request.is_run_ahead])

    def learn(self, completions: Sequence[Completion]) -> None:
        """Keep completed rollouts, for the tries that are built from now on; their phrases serve all prompts."""
        for completion in completions:
            text, starts = completion.response.token_ids, [start for start, _ in completion.response.extensions]
            text = np.insert(text, starts, START_TOKEN) if starts else text
            purpose, prompt = key_of(completion.request)
            self.cache(purpose).add(prompt, text)
            self._learn_ngrams(purpose, text)

    def run_ahead_texts(self) -> TextsByKey:
        """Those of this step."""
        return self._run_aheads.newest

    def learn_run_aheads(self, texts: TextsByKey) -> None:
        """The samples follow them as if they were decoded here."""
        self._run_aheads.learn(texts)

    def expected_tokens(self, request: Request) -> float | None:
        """Mean length of the prompt's rollouts, those of finished siblings included."""
        return self.cache(request.purpose).mean_tokens(request.prompt_token_ids)

    def end_step(self) -> None:
        """Free the tries that no sample uses: they are built again, from the newest rollouts."""
        self._free_idle(0)
        self._run_aheads.end_step()

    def take_metrics(self) -> dict[str, float]:
        """See docs/metrics.md for each metric."""
        caches = self.caches.values()
        metrics: dict[str, float] = {
            f"engine/cache_{name}": sum(getattr(cache, f"num_{name}") for cache in caches)
            for name in ("tokens", "bytes")
        }
        metrics["engine/cache_bytes"] += self.num_trie_bytes + sum(table.nbytes for table in self._ngrams.values())
        return metrics | self._run_aheads.take_metrics()

    def save(self, folder: Path) -> None:
        """Write the completed rollouts: a file for each purpose; and what was learned."""
        save_trust(folder / TRUST_FILE, self._trust)
        for purpose, cache in self.caches.items():
            cache.save(folder / f"rollouts_{purpose}.safetensors")

    def load(self, folder: Path) -> None:
        """Read the completed rollouts, and what was learned; raises ValueError naming a damaged file."""
        assert not any(self.cursors.tries), "no sample may be live"
        self._tries, self.caches, self._ngrams = {}, {}, {}
        self._trust = load_trust(folder / TRUST_FILE)
        for path in sorted(folder.glob("rollouts_*.safetensors")):
            purpose = path.stem.removeprefix("rollouts_")
            cache = self.cache(purpose)
            cache.load(path)
            for prompt in cache.prompts():
                for text in cache.rollouts(prompt):
                    self._learn_ngrams(purpose, text)

    @property
    def num_trie_bytes(self) -> int:
        """Memory of all tries."""
        return sum(trie.num_bytes for trie in self._tries.values())

    def _learn_ngrams(self, purpose: str, text: npt.NDArray[np.int32]) -> None:
        if self.options.other_prompts:
            if purpose not in self._ngrams:
                self._ngrams[purpose] = make_table()
            learn_ngrams(self._ngrams[purpose], text)

    def _free_idle(self, max_bytes: int) -> None:
        """Free tries that no sample uses, the longest idle first, until the others take no more than `max_bytes`."""
        num_bytes = self.num_trie_bytes
        if num_bytes <= max_bytes:
            return
        live = set(self.cursors.tries)
        for key, trie in list(self._tries.items()):
            if trie not in live and num_bytes > max_bytes:
                num_bytes -= trie.num_bytes
                del self._tries[key]


def key_of(request: Request) -> PromptKey:
    """Samples with the same key share a trie."""
    return request.purpose, request.prompt_token_ids
