"""The default drafter: a trie for each prompt, of its earlier rollouts, of its running ones, and of texts to come."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
from pydantic import Field

from srtrl.drafters.base import DrafterBase, Int32Array, Int64Array, PromptKey, TextsByKey, end_to_end, key_of
from srtrl.drafters.distributions import NO_DISTRIBUTIONS, NUM_TOP, UNKNOWN, pack, unknown
from srtrl.drafters.draft_tree import DraftTrees
from srtrl.drafters.foresight import NOTHING, combine, find_taken, foresee
from srtrl.drafters.rollout_cache import CachedRollout, RolloutCache
from srtrl.drafters.shared_ngrams import NO_TABLE, Table, learn_distributions, learn_ngrams, make_table
from srtrl.drafters.texts import NO_PENDING, NONE, START_TOKEN, Pending, TextStore
from srtrl.drafters.trie_draft import NO_NOISE, Basis, Noise, draft_trees, learn_rows
from srtrl.drafters.trust import Trust, make_trust
from srtrl.recipe.schema import Section
from srtrl.types import Completion, Request, TopTokens, num_equal

NO_TEXT: Int32Array = np.empty(0, np.int32)


class SrtOptions(Section):
    """Options of this drafter."""

    min_score: float = Field(default=0.01, ge=0, lt=1)
    """Nodes that are less likely to be accepted are not proposed; the draft budget chooses among the others."""
    max_rollouts: int = Field(default=16, ge=1)
    """Rollouts kept for each prompt; the newest stay."""
    cache_memory_gib: float = Field(default=1.0, ge=0)
    """Maximum memory of kept rollouts (training and evaluation have a cache each).

    When it is full, distributions are dropped first, then prompts lose their oldest rollouts before
    a whole prompt is dropped. It also bounds the memory of the tries: above it, only those of prompts that decode now
    are kept.
    """
    other_prompts: bool = True
    """If the prompt's own texts have no continuation, guess what followed the last two tokens in completed rollouts
    of any prompt."""


class Drafter(DrafterBase):
    """See `srtrl.drafters.base.DrafterBase`. A prompt's history is inserted when its first sample of a step starts."""

    Options = SrtOptions
    options: SrtOptions
    uses_texts = True
    num_top = NUM_TOP

    def __init__(self, options: Section | None = None) -> None:
        super().__init__(options)
        self._max_bytes = int(self.options.cache_memory_gib * 2**30)
        self.store = TextStore()
        self._kept_bytes = 0
        """Memory of the store after it was last made smaller."""
        self.caches = defaultdict[str, RolloutCache](self._make_cache)
        """Completed rollouts, for each purpose: evaluation never learns from training."""
        self._prompts: dict[PromptKey, int] = {}
        """Numbers of the prompts whose texts are in the store."""
        self._live: dict[int, Request] = {}
        """By slot."""
        self._known: dict[int, dict[int, Int32Array]] = {}
        """Distributions of the samples that have left their slots in this step: by RNG key and `text_start`."""
        self._texts: list[dict[PromptKey, dict[int, Int32Array]]] = [{}, {}]
        """Texts of samples to come, by prompt and RNG key: those learned in the last step, and in this one."""
        self._num_repeated = 0
        self._ngrams = defaultdict[str, Table](make_table)
        """For each purpose, from texts of all prompts."""
        self._taught: set[int] = set()
        """RNG keys of this step's samples whose distributions these were learned from."""
        self._queue: list[Callable[[], None]] = []
        """The work of `learn_deferred`, in order."""
        self._pending = NO_PENDING
        """The tokens that the queue appends to texts: drafts follow them already."""
        self._trust = defaultdict[str, Trust](make_trust)
        """The learned trust in contexts, for each purpose."""
        self._noise = NO_NOISE
        self._foreseen = NOTHING
        self._last_limits = np.zeros(0, np.int64), 0.0
        """`max_nodes` and `min_score` of the last `propose`."""
        self._is_drafted = np.zeros(0, np.bool_)
        """[slots], whether the next observed tokens follow a draft, and so teach trust."""
        self._is_begun = np.zeros(0, np.bool_)
        """[slots], whether the sample's text has begun: there is no draft before."""
        self._purpose = ""
        """Purpose of the samples that started last, and so of all live ones."""

    def _make_cache(self) -> RolloutCache:
        return RolloutCache(max_rollouts=self.options.max_rollouts, max_bytes=self._max_bytes)

    def start(self, slots: Int64Array, requests: Sequence[Request]) -> None:
        """Begin the samples' texts."""
        self._purpose = requests[0].purpose if requests else self._purpose
        if (more := int(slots.max(initial=-1)) + 1 - len(self._is_begun)) > 0:
            keys, positions, is_known = self._noise
            self._noise = Noise(np.pad(keys, (0, more)), np.pad(positions, (0, more)), np.pad(is_known, (0, more)))
            self._pending = self._pending._replace(spans=np.pad(self._pending.spans, ((0, more), (0, 0))))
            self._is_drafted, self._is_begun = np.pad(self._is_drafted, (0, more)), np.pad(self._is_begun, (0, more))
        self._noise.rng_keys[slots] = [request.rng_key for request in requests]
        self._noise.positions[slots] = [request.text_start for request in requests]
        self._noise.is_known[slots] = [self.knows_noise and request.sampling.temperature > 0 for request in requests]
        self._is_drafted[slots] = self._is_begun[slots] = False
        self._defer(partial(self._begin, slots, requests))

    def _begin(self, slots: Int64Array, requests: Sequence[Request]) -> None:
        """Begin texts of samples that have started, and forget those of prompts that no sample uses if need be."""
        self._live |= zip(slots.tolist(), requests, strict=True)
        self._begin_texts(slots, requests)
        self._is_begun[slots] = True
        if self.store.num_bytes > max(self._max_bytes, 2 * self._kept_bytes):
            self._keep_live()

    def _begin_texts(self, slots: Int64Array, requests: Sequence[Request]) -> None:
        """Begin texts of some slots; before a prompt's first one its history is inserted, the most useful last."""
        start = CachedRollout(np.array([START_TOKEN], np.int32), unknown(1))
        texts, distributions, numbers = [], [NO_DISTRIBUTIONS], []
        for request in requests:
            key, history = key_of(request), list[CachedRollout]()
            if key not in self._prompts:
                self._prompts[key] = len(self._prompts)
                early = [text for by_key in self._texts for text in by_key.get(key, {}).values()]
                history = self.caches[request.purpose].rollouts(request.prompt_token_ids)
                history += [CachedRollout(text, NO_DISTRIBUTIONS) for text in early]
            numbers.append(self._prompts[key])
            parts = [*(part for rollout in history for part in (start, rollout)), start]
            texts.append(np.concatenate([part.tokens for part in parts]))
            distributions += [packed if len(packed) else unknown(len(tokens)) for tokens, packed in parts]
        self.store.start(slots, numbers)
        self.store.extend(slots, *end_to_end(texts), np.concatenate(distributions))

    def _keep_live(self) -> None:
        """Forget the texts of prompts that no sample uses: those of the others are inserted anew."""
        slots, texts = np.array(list(self._live)), self.store.arrays
        positions = [self.store.positions(slot)[1:] for slot in self._live]
        tokens = end_to_end([texts.tokens[positions_of_slot] for positions_of_slot in positions])
        known = texts.known[np.concatenate(positions)]
        self.store.clear()
        self._prompts = {}
        self._begin_texts(slots, list(self._live.values()))
        self.store.extend(slots, *tokens, known)
        self._kept_bytes = self.store.num_bytes

    def propose(self, slots: Int64Array, max_nodes: Int64Array, min_score: float) -> DraftTrees:
        """Draft from the texts of the slots' prompts."""
        min_score, max_nodes = max(self.options.min_score, min_score), max_nodes * self._is_begun[slots]
        self._is_drafted[slots] = True
        foreseen, self._foreseen = self._foreseen, NOTHING
        taken = find_taken(foreseen.slots, foreseen.after, slots, self._pending)
        to_draft = np.where(taken == NONE, max_nodes, 0)
        trees = draft_trees(self.store.arrays, slots, to_draft, self._basis(), min_score, self._pending)
        self._last_limits = max_nodes, min_score
        return combine(trees, foreseen.trees, taken, max_nodes) if len(foreseen.slots) else trees

    def foresee(self, slots: Int64Array, trees: DraftTrees) -> None:
        """Draft ahead, with the limits of the last `propose`."""
        max_nodes, min_score = self._last_limits
        self._foreseen = foresee(self.store.arrays, slots, trees, max_nodes, self._basis(), min_score)

    def observe(self, slots: Int64Array, token_ids: Int32Array, offsets: Int64Array) -> None:
        """Learn from the tokens that followed the drafts, and insert the committed tokens."""
        self._observe(slots, token_ids, offsets, None)

    def observe_top(self, slots: Int64Array, token_ids: Int32Array, offsets: Int64Array, top: TopTokens) -> None:
        """As `observe`; if the tokens are drawn from them, keep the policy's distributions and learn phrases."""
        self._observe(slots, token_ids, offsets, top)

    def _observe(self, slots: Int64Array, token_ids: Int32Array, offsets: Int64Array, top: TopTokens | None) -> None:
        """Let drafts follow tokens, and learn from them if there is time for it."""
        noise = Noise(self._noise.rng_keys.copy(), self._noise.positions.copy(), self._noise.is_known.copy())
        teaches = self._is_drafted[slots] & noise.is_known[slots]
        self._is_drafted[slots] = False
        self._noise.positions[slots] += offsets[1:] - offsets[:-1]
        begin, spans = len(self._pending.token_ids), self._pending.spans
        spans[slots, 0], spans[slots, 1] = begin + offsets[:-1], begin + offsets[1:]
        self._pending = Pending(np.concatenate([self._pending.token_ids, token_ids]), spans)
        self._defer(partial(self._learn_tokens, slots, token_ids, offsets, top, noise, teaches))

    def _learn_tokens(
        self,
        slots: Int64Array,
        token_ids: Int32Array,
        offsets: Int64Array,
        top: TopTokens | None,
        noise: Noise,
        teaches: npt.NDArray[np.bool_],
    ) -> None:
        """Learn trust from tokens, then phrases, then the tokens; `noise`: of their positions."""
        if teaches.any():
            learn_rows(self.store.arrays, slots, teaches, token_ids, offsets, self._basis()._replace(noise=noise))
        distributions = NO_DISTRIBUTIONS
        if top is not None:
            is_drawn, distributions = noise.is_known[slots], pack(top)
            distributions[np.repeat(~is_drawn, offsets[1:] - offsets[:-1]), 0] = UNKNOWN
            if self.options.other_prompts:
                last_two = self.store.last_two(slots)
                learn_distributions(self._ngrams[self._purpose], last_two, token_ids, offsets, distributions)
                self._taught.update(noise.rng_keys[slots[is_drawn]].tolist())
        self.store.extend(slots, token_ids, offsets, distributions)

    def _defer(self, work: Callable[[], None]) -> None:
        """Do something in its turn: with `learn_deferred`, or at once."""
        self._queue.append(work)
        if not self.defers:
            self.learn_deferred()

    def learn_deferred(self) -> None:
        """Learn what was observed, begun and finished since the last call; drafts of one step do without."""
        queue, self._queue = self._queue, []
        for work in queue:
            work()
        if queue:
            self._pending.spans[:] = 0
            self._pending = self._pending._replace(token_ids=NO_TEXT)

    def _basis(self) -> Basis:
        table = self._ngrams.get(self._purpose, NO_TABLE)
        return Basis(table, self._trust[self._purpose], self._noise)

    def finish(self, slots: Sequence[int], completions: Sequence[Completion | None]) -> None:
        """Keep completed rollouts, and the known turns of others; a preempted sample's are known already."""
        self._defer(partial(self._finish, slots, completions))

    def _finish(self, slots: Sequence[int], completions: Sequence[Completion | None]) -> None:
        for slot in slots:
            request = self._live.pop(slot)
            known = self.store.arrays.known[self.store.positions(slot)[1:]]
            of_turns = self._known.setdefault(request.rng_key, {})
            before = of_turns.get(request.text_start, NO_DISTRIBUTIONS)[: len(known)]
            is_new = known[: len(before), 0] == UNKNOWN
            known[: len(before)][is_new] = before[is_new]
            of_turns[request.text_start] = known
        self._learn([completion for completion in completions if completion is not None])

    def learn(self, completions: Sequence[Completion]) -> None:
        """Keep completed rollouts, for the tries that are built from now on; their phrases serve all prompts.

        A sample replaces the text that was learned for its RNG key.
        """
        self._defer(partial(self._learn, completions))

    def _learn(self, completions: Sequence[Completion]) -> None:
        for completion in completions:
            request, text = completion.request, completion.response.token_ids
            starts = [start for start, _ in completion.response.extensions]
            for by_key in self._texts:
                early = by_key.get(key_of(request), {}).pop(request.rng_key, NO_TEXT)
                self._num_repeated += max(0, num_equal(early, text) - request.num_reused)
            text = np.insert(text, starts, START_TOKEN) if starts else text
            self.caches[request.purpose].add(request.prompt_token_ids, text, self._distributions(request.rng_key, text))
            if request.rng_key not in self._taught:
                self._learn_ngrams(request.purpose, text)

    def _distributions(self, rng_key: int, text: Int32Array) -> Int32Array:
        """The known distributions of a sample's tokens: [tokens, SIZE], or [0, SIZE]."""
        found = unknown(len(text))
        for turn, (start, known) in enumerate(sorted(self._known.pop(rng_key, {}).items())):
            of_turn = found[start + turn :][: len(known)]
            of_turn[:] = known[: len(of_turn)]
        return found if (found[:, 0] != UNKNOWN).any() else NO_DISTRIBUTIONS

    def learn_texts(self, texts: TextsByKey) -> None:
        """Keep them for the tries that are built in this step and the next; of two texts of a sample the longer one."""
        for key, by_rng_key in texts.items():
            known = self._texts[1].setdefault(key, {})
            known |= {
                rng_key: text for rng_key, text in by_rng_key.items() if len(text) > len(known.get(rng_key, NO_TEXT))
            }

    def new_texts(self) -> TextsByKey:
        """See `DrafterBase`."""
        self.learn_deferred()
        return self._texts[1]

    def expected_tokens(self, request: Request) -> float | None:
        """Mean length of the prompt's rollouts, those of finished siblings included."""
        return self.caches[request.purpose].mean_tokens(request.prompt_token_ids)

    def end_step(self) -> None:
        """Forget all texts: they are inserted again, from the newest rollouts. No sample is live."""
        self.learn_deferred()
        self.store.clear()
        self._prompts, self._known, self._kept_bytes = {}, {}, 0
        self._texts = [self._texts[1], {}]
        self._taught = set()

    def take_metrics(self) -> dict[str, float]:
        """See docs/metrics.md for each metric."""
        self.learn_deferred()
        caches = self.caches.values()
        metrics: dict[str, float] = {
            f"engine/cache_{name}": sum(getattr(cache, f"num_{name}") for cache in caches)
            for name in ("tokens", "bytes")
        }
        metrics["engine/cache_bytes"] += self.store.num_bytes + sum(table.nbytes for table in self._ngrams.values())
        metrics["engine/text_tokens_repeated"], self._num_repeated = self._num_repeated, 0
        return metrics

    def save(self, folder: Path) -> None:
        """Write the completed rollouts: a file for each purpose. Trust is learned again within a step."""
        self.learn_deferred()
        for purpose, cache in self.caches.items():
            cache.save(folder / f"rollouts_{purpose}.safetensors")

    def load(self, folder: Path) -> None:
        """Read the completed rollouts."""
        self.learn_deferred()
        assert not self._live, "no sample may be live"
        self.store.clear()
        self._prompts = {}
        for by_purpose in (self.caches, self._ngrams, self._trust):
            by_purpose.clear()
        for path in sorted(folder.glob("rollouts_*.safetensors")):
            purpose = path.stem.removeprefix("rollouts_")
            cache = self.caches[purpose]
            cache.load(path)
            for prompt in cache.prompts():
                for rollout in cache.rollouts(prompt):
                    self._learn_ngrams(purpose, rollout.tokens)

    def _learn_ngrams(self, purpose: str, text: npt.NDArray[np.int32]) -> None:
        if self.options.other_prompts:
            learn_ngrams(self._ngrams[purpose], text)
