"""Completed rollouts by prompt, in bounded memory: what the drafters' tries are built from.

Rollouts are plain int32 arrays (checkpoints hold these); tries are built from them for the prompts that decode.
"""

import functools
import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as to_safetensors

from srtrl.metrics import write_atomic

Tokens = npt.NDArray[np.int32]

TOKEN_BYTES = 4
ROLLOUT_BYTES = 128
"""What a rollout costs beside its tokens: the array object and its place in a list."""
PROMPT_BYTES = 512
"""What a prompt costs beside its tokens and rollouts: its record, its place in the tables, its entries in the heap."""
FORMAT = "srtrl rollout cache 1"
"""Written into each file; raised when the layout changes."""
ARRAYS = ("prompt_tokens", "prompt_lengths", "rollout_counts", "rollout_tokens", "rollout_lengths")
"""The arrays of a file: prompts and rollouts laid end to end, their lengths, and the rollouts of each prompt."""
NEVER = 1 << 62
"""Next use of a prompt that is not known to come again."""


@dataclass(slots=True)
class _Entry:
    """What the cache holds of one prompt."""

    key: bytes
    """The prompt's token ids, as the bytes of an int32 array."""
    added: int
    """When its last rollout was added, counted in rollouts."""
    next_use: int = NEVER
    """Its place in the order in which prompts come next."""
    rollouts: list[Tokens] = field(default_factory=list)
    """Newest last."""
    num_tokens: int = 0

    @property
    def order(self) -> tuple[int, int, int, bytes]:
        """The least one loses its oldest rollout first.

        Most rollouts first, so that all prompts are trimmed to k rollouts, k falling, before one is dropped; then
        the farthest next use; then the least recently added.
        """
        return -len(self.rollouts), -self.next_use, self.added, self.key


class RolloutCache:
    """The newest rollouts of each prompt, at most `max_rollouts` a prompt and `max_bytes` in all.

    The key is the prompt's whole token ids. When memory is short, each prompt loses its oldest rollouts before any
    prompt is dropped; then the one goes whose next use is farthest (`set_next_uses`): the order of the data is known,
    and dropping the least recently used would drop each prompt just before its turn when an epoch does not fit.
    """

    def __init__(self, *, max_rollouts: int, max_bytes: int) -> None:
        assert max_rollouts >= 1
        assert max_bytes >= 0
        self.max_rollouts = max_rollouts
        self.max_bytes = max_bytes
        self.num_tokens = 0
        """Tokens of all rollouts, prompts not counted."""
        self.num_rollouts = 0
        self.num_bytes = 0
        """Memory by the constants above: 4 bytes a token, of prompts too, and an overhead a rollout and a prompt."""
        self.num_dropped_rollouts = 0
        """Rollouts forgotten for want of memory (not those that newer ones of their prompt replaced)."""
        self.num_dropped_prompts = 0
        self.num_dropped_tokens = 0
        """Tokens of the dropped rollouts."""
        self._entries: dict[bytes, _Entry] = {}
        self._coming: list[Sequence[int]] = []
        """Prompts that come next, in order."""
        self._next_uses: dict[bytes, int] = {}
        """The same as ranks; read from `_coming` with the heap."""
        self._num_added = 0
        self._heap: list[tuple[int, int, int, bytes]] | None = None
        """Entries by what goes first; None until memory is short, for until then nobody asks."""

    @property
    def num_prompts(self) -> int:
        """Prompts that have at least one rollout."""
        return len(self._entries)

    def __contains__(self, prompt: Sequence[int]) -> bool:
        return _key(prompt) in self._entries

    def add(self, prompt: Sequence[int], token_ids: Sequence[int] | Tokens) -> None:
        """Append a completed rollout of a prompt; older ones go where a bound asks for it. An empty one is nothing.

        An int32 array is kept as it is, and must not change any more.
        """
        self.extend(prompt, [np.asarray(token_ids, dtype=np.int32)])

    def extend(self, prompt: Sequence[int], rollouts: Sequence[Tokens]) -> None:
        """Add several rollouts of one prompt, in order."""
        key = _key(prompt)
        for rollout in rollouts:
            if len(rollout):
                self._add(key, rollout)

    def rollouts(self, prompt: Sequence[int]) -> list[Tokens]:
        """Return the prompt's rollouts, newest last; an empty list if there are none."""
        entry = self._entries.get(_key(prompt))
        return list(entry.rollouts) if entry else []

    def mean_tokens(self, prompt: Sequence[int]) -> float | None:
        """Mean length of the prompt's rollouts; None if there are none."""
        entry = self._entries.get(_key(prompt))
        return entry.num_tokens / len(entry.rollouts) if entry else None

    def prompts(self) -> list[tuple[int, ...]]:
        """Token ids of all prompts, the least recently added first."""
        return [tuple(_tokens(entry.key).tolist()) for entry in self._by_age()]

    def set_next_uses(self, prompts: Sequence[Sequence[int]]) -> None:
        """Prompts that come next, in order; those not named are the first to be dropped."""
        self._coming = list(prompts)
        self._heap = None

    def save(self, path: Path) -> None:
        """Write all rollouts into one file, whole or not at all. Equal contents give equal bytes."""
        entries = self._by_age()
        rollouts = [rollout for entry in entries for rollout in entry.rollouts]
        keys = [_tokens(entry.key) for entry in entries]
        arrays: dict[str, npt.NDArray[Any]] = {
            "prompt_tokens": _joined(keys),
            "prompt_lengths": np.array([len(key) for key in keys], np.int64),
            "rollout_counts": np.array([len(entry.rollouts) for entry in entries], np.int64),
            "rollout_tokens": _joined(rollouts),
            "rollout_lengths": np.array([len(rollout) for rollout in rollouts], np.int64),
        }
        write_atomic(path, to_safetensors(arrays, metadata={"format": FORMAT}))

    def load(self, path: Path) -> None:
        """Add the rollouts of a file that `save` wrote, within this cache's bounds.

        Raises:
            ValueError: The file is no such file, or damaged; the message names it.
            FileNotFoundError: There is no such file.
        """
        arrays = _read(path)
        ends = np.cumsum(arrays["prompt_lengths"])
        keys = np.split(arrays["prompt_tokens"], ends[:-1])
        rollouts = iter(np.split(arrays["rollout_tokens"], np.cumsum(arrays["rollout_lengths"])[:-1]))
        for key, count in zip(keys, arrays["rollout_counts"].tolist(), strict=False):  # of no prompts: one empty part
            for _ in range(count):
                self._add(key.tobytes(), next(rollouts).copy())

    def _add(self, key: bytes, rollout: Tokens) -> None:
        if PROMPT_BYTES + len(key) + ROLLOUT_BYTES + TOKEN_BYTES * len(rollout) > self.max_bytes:
            self.num_dropped_rollouts += 1  # nothing else need go for one that cannot stay
            self.num_dropped_tokens += len(rollout)
            return
        self._num_added += 1
        entry = self._entries.get(key)
        if entry is None:
            entry = _Entry(key, self._num_added, self._next_uses.get(key, NEVER))
            self._entries[key] = entry
            self.num_bytes += PROMPT_BYTES + len(key)
        entry.added = self._num_added
        # Without `_drop_oldest`: most rollouts take the place of one, and hundreds end together.
        rollouts = entry.rollouts
        rollouts.append(rollout)
        num_tokens = len(rollout)
        if len(rollouts) > self.max_rollouts:
            num_tokens -= len(rollouts.pop(0))
        else:
            self.num_rollouts += 1
            self.num_bytes += ROLLOUT_BYTES
        entry.num_tokens += num_tokens
        self.num_tokens += num_tokens
        self.num_bytes += TOKEN_BYTES * num_tokens
        if self._heap is not None:
            heapq.heappush(self._heap, entry.order)
        while self.num_bytes > self.max_bytes:
            self._make_room()
        if self._heap is not None and len(self._heap) > 2 * len(self._entries) + 64:
            self._heap = self._make_heap()

    def _drop_oldest(self, entry: _Entry) -> int:
        """Forget a prompt's oldest rollout; returns the rollout's length."""
        num_tokens = len(entry.rollouts.pop(0))
        entry.num_tokens -= num_tokens
        self.num_rollouts -= 1
        self.num_tokens -= num_tokens
        self.num_bytes -= ROLLOUT_BYTES + TOKEN_BYTES * num_tokens
        return num_tokens

    def _make_room(self) -> None:
        """Forget one rollout, and its prompt if that was the last one."""
        if self._heap is None:
            self._rank_next_uses()
            self._heap = self._make_heap()
        order = heapq.heappop(self._heap)
        entry = self._entries.get(order[-1])
        if entry is None or entry.order != order:  # it has changed since: its present order is in the heap too
            return
        self.num_dropped_tokens += self._drop_oldest(entry)
        self.num_dropped_rollouts += 1
        if entry.rollouts:
            heapq.heappush(self._heap, entry.order)
        else:
            del self._entries[entry.key]
            self.num_dropped_prompts += 1
            self.num_bytes -= PROMPT_BYTES + len(entry.key)

    def _rank_next_uses(self) -> None:
        """Tell the entries their places among the prompts that come next."""
        self._next_uses = {}
        for rank, prompt in enumerate(self._coming):
            self._next_uses.setdefault(_key(prompt), rank)
        for entry in self._entries.values():
            entry.next_use = self._next_uses.get(entry.key, NEVER)

    def _make_heap(self) -> list[tuple[int, int, int, bytes]]:
        heap = [entry.order for entry in self._entries.values()]
        heapq.heapify(heap)
        return heap

    def _by_age(self) -> list[_Entry]:
        return sorted(self._entries.values(), key=lambda entry: entry.added)


class RolloutCaches:
    """One cache for each purpose of a sample, with equal bounds: evaluation never learns from training."""

    def __init__(self, *, max_rollouts: int, max_bytes: int, file_stem: str = "rollouts") -> None:
        """`file_stem` begins the names of the files: caches with other keys have another one."""
        self.max_rollouts = max_rollouts
        self.max_bytes = max_bytes
        self._file_stem = file_stem
        self._caches: dict[str, RolloutCache] = {}

    def of(self, purpose: str) -> RolloutCache:
        """Return the cache of samples of one purpose (`train`, `eval`, `generate`)."""
        if purpose not in self._caches:
            self._caches[purpose] = RolloutCache(max_rollouts=self.max_rollouts, max_bytes=self.max_bytes)
        return self._caches[purpose]

    @property
    def purposes(self) -> list[str]:
        """Those that have a cache."""
        return list(self._caches)

    def save(self, folder: Path) -> None:
        """Write `<file_stem>_<purpose>.safetensors` for each purpose that has been seen."""
        for purpose, cache in self._caches.items():
            cache.save(folder / f"{self._file_stem}_{purpose}.safetensors")

    def load(self, folder: Path) -> None:
        """Read what `save` wrote in place of what is there; raises ValueError naming a damaged file."""
        self._caches = {}
        for path in sorted(folder.glob(f"{self._file_stem}_*.safetensors")):
            self.of(path.stem.removeprefix(f"{self._file_stem}_")).load(path)

    def take_metrics(self) -> dict[str, float]:
        """Sizes of all caches, and what was dropped since the last call."""
        caches = self._caches.values()
        metrics: dict[str, float] = {
            "engine/cache_tokens": sum(cache.num_tokens for cache in caches),
            "engine/cache_bytes": sum(cache.num_bytes for cache in caches),
            "engine/cache_prompts": sum(cache.num_prompts for cache in caches),
            "engine/cache_dropped_rollouts": sum(cache.num_dropped_rollouts for cache in caches),
            "engine/cache_dropped_prompts": sum(cache.num_dropped_prompts for cache in caches),
            "engine/cache_dropped_tokens": sum(cache.num_dropped_tokens for cache in caches),
        }
        for cache in caches:
            cache.num_dropped_rollouts = cache.num_dropped_prompts = cache.num_dropped_tokens = 0
        return metrics


def _key(prompt: Sequence[int]) -> bytes:
    return _key_of_tuple(prompt) if isinstance(prompt, tuple) else np.asarray(prompt, dtype=np.int32).tobytes()


@functools.lru_cache(maxsize=8192)
def _key_of_tuple(prompt: tuple[int, ...]) -> bytes:
    """Kept, for the look-ahead names thousands of prompts at every training step."""
    return np.asarray(prompt, dtype=np.int32).tobytes()


def _tokens(key: bytes) -> Tokens:
    return np.frombuffer(key, dtype=np.int32)


def _joined(parts: list[Tokens]) -> Tokens:
    return np.concatenate([np.empty(0, np.int32), *parts])


def _read(path: Path) -> dict[str, npt.NDArray[Any]]:
    """The five arrays of a file, checked against each other."""
    try:
        with safe_open(path, framework="numpy") as file:
            found = (file.metadata() or {}).get("format")
            if found != FORMAT:
                raise ValueError(f"{path}: expected a file of the format {FORMAT!r}, found {found!r}")
            arrays = {name: file.get_tensor(name) for name in ARRAYS}
    except SafetensorError as error:
        raise ValueError(f"{path}: not a rollout cache, or damaged ({error})") from error
    lengths = {name: arrays[name] for name in ("prompt_lengths", "rollout_lengths", "rollout_counts")}
    agree = (
        len(lengths["prompt_lengths"]) == len(lengths["rollout_counts"])
        and int(lengths["prompt_lengths"].sum()) == len(arrays["prompt_tokens"])
        and int(lengths["rollout_lengths"].sum()) == len(arrays["rollout_tokens"])
        and int(lengths["rollout_counts"].sum()) == len(lengths["rollout_lengths"])
        and all(length.min(initial=0) >= 0 for length in lengths.values())
    )
    if not agree:
        raise ValueError(f"{path}: damaged: the lengths of prompts and rollouts do not match their tokens")
    return arrays
