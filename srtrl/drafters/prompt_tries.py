"""The tries of the prompts that are being decoded: built when a sample first drafts, freed when none is left."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from srtrl.drafters.token_trie import TokenTrie, end_to_end, extend_batch
from srtrl.types import Completion, Request

Tokens = npt.NDArray[np.int32]
PromptKey = tuple[str, tuple[int, ...]]
"""Purpose and token ids of a prompt: samples with the same key share a trie."""


def key_of(request: Request) -> PromptKey:
    """Return what the request's trie is found by; run-ahead on an RNG key of its own serves the training samples."""
    return "train" if request.purpose == "run_ahead" else request.purpose, request.prompt_token_ids


@dataclass(slots=True, eq=False)
class PromptTrie:
    """One prompt that has samples, waiting or decoding."""

    key: PromptKey
    trie: TokenTrie | None = None
    num_started: int = 0
    """Samples that have not finished."""
    drafting: dict[int, "LiveSample"] = field(default_factory=dict)
    """Those of them that have a cursor in the trie, by sequence id."""
    ended: list["LiveSample"] = field(default_factory=list)
    """Finished ones with tokens that the trie has yet to take in."""


@dataclass(slots=True, eq=False)
class LiveSample:
    """One sample that has not finished."""

    request: Request
    prompt: PromptTrie
    tokens: list[int] = field(default_factory=list)
    """Response so far."""
    cursor: int | None = None
    """Its place in the trie; None until it first drafts."""
    num_passed: int = 0
    """Tokens that the cursor has passed: it is moved on when drafts are wanted."""


class PromptTries:
    """Tries and cursors of all live samples; a trie has its prompt's history and, `online`, the live samples' text."""

    def __init__(
        self,
        history: Callable[[PromptKey], list[Tokens]],
        *,
        online: bool,
        max_trie_tokens: int,
        max_bytes: int,
    ) -> None:
        """Make an empty collection.

        Args:
            history: Gives the texts that a prompt's trie is built from, the most useful last.
            online: Whether live samples insert what they decode; else they only follow.
            max_trie_tokens: A trie with more is rebuilt from the last texts of its history and of its live samples.
            max_bytes: Where all tries take more, those that no sample drafts from (the rest of their samples wait) are
                freed; they are rebuilt when needed.
        """
        self._history = history
        self._online = online
        self._max_trie_tokens = max_trie_tokens
        self._max_bytes = max_bytes
        self._prompts: dict[PromptKey, PromptTrie] = {}
        self._idle: dict[PromptKey, PromptTrie] = {}
        """Prompts with a trie and no drafting sample, the longest idle first."""
        self.samples: dict[int, LiveSample] = {}
        """All live samples by sequence id."""

    @property
    def num_bytes(self) -> int:
        """Memory of all tries."""
        return sum(prompt.trie.num_bytes for prompt in self._prompts.values() if prompt.trie)

    @property
    def num_tries(self) -> int:
        """Prompts that have a trie."""
        return sum(prompt.trie is not None for prompt in self._prompts.values())

    def keep(self, key: PromptKey) -> None:
        """Never free the trie of `key`, once it is built, for want of samples."""
        self._prompts.setdefault(key, PromptTrie(key)).num_started += 1

    def start(self, sequence_id: int, request: Request, key: PromptKey) -> LiveSample:
        """Register a sample of the trie `key`, which is built no sooner than it drafts."""
        prompt = self._prompts.get(key)
        if prompt is None:
            prompt = self._prompts[key] = PromptTrie(key)
        prompt.num_started += 1
        sample = LiveSample(request, prompt)
        self.samples[sequence_id] = sample
        return sample

    def cursors(self, sequence_ids: Iterable[int]) -> tuple[list[TokenTrie], list[int]]:
        """Trie and cursor of each sample, made where there are none yet, with all tokens of their prompts' samples."""
        samples = [self.samples[sequence_id] for sequence_id in sequence_ids]
        new = {
            sequence_id: sample
            for sequence_id, sample in zip(sequence_ids, samples, strict=True)
            if sample.cursor is None
        }
        if new:
            self._admit(new)
        self._catch_up({id(sample.prompt): sample.prompt for sample in samples}.values())
        return _tries_and_cursors(samples)

    def extend(self, sequence_ids: Sequence[int], token_ids: Sequence[Sequence[int]]) -> None:
        """Tokens that were committed to the samples; the tries take them in when drafts are wanted next."""
        for sequence_id, tokens in zip(sequence_ids, token_ids, strict=True):
            self.samples[sequence_id].tokens.extend(tokens)

    def finish(self, sequence_id: int, completion: Completion | None) -> LiveSample:
        """Take a sample out, with all tokens if it is complete; with its prompt's last one the trie goes."""
        sample = self.samples.pop(sequence_id)
        if completion is not None:
            sample.tokens = completion.token_ids
        prompt = sample.prompt
        prompt.num_started -= 1
        if sample.cursor is not None:
            del prompt.drafting[sequence_id]
            if not prompt.drafting:
                self._idle[prompt.key] = prompt
        if not prompt.num_started:
            del self._prompts[prompt.key]
            self._idle.pop(prompt.key, None)
        elif prompt.trie is not None and self._online and len(sample.tokens) > sample.num_passed:
            prompt.ended.append(sample)
        elif sample.cursor is not None:
            assert prompt.trie is not None
            prompt.trie.stop(sample.cursor)
        return sample

    def insert(self, key: PromptKey, texts: Iterable[Sequence[int] | Tokens]) -> None:
        """Add finished texts to the prompt's trie, if it has one."""
        prompt = self._prompts.get(key)
        if prompt and prompt.trie:
            for text in texts:
                prompt.trie.insert(text)

    def clear(self) -> None:
        """Drop all tries, kept ones too; no sample may be live."""
        assert not self.samples
        self._prompts.clear()
        self._idle.clear()

    def _admit(self, samples: dict[int, LiveSample]) -> None:
        """Give cursors to samples that have none."""
        prompts = {id(sample.prompt): sample.prompt for sample in samples.values()}.values()
        for prompt in prompts:
            self._idle.pop(prompt.key, None)
        without = [prompt for prompt in prompts if prompt.trie is None]
        if without:
            self._build(without)
            self._free_idle()
        for sequence_id, sample in samples.items():
            trie = sample.prompt.trie
            assert trie is not None
            sample.cursor = trie.start() if self._online else trie.follow()
            sample.prompt.drafting[sequence_id] = sample

    def _catch_up(self, prompts: Iterable[PromptTrie]) -> None:
        """Move all cursors to the ends of their texts; a trie that becomes too large is rebuilt."""
        behind: list[LiveSample] = []
        ended: list[LiveSample] = []
        for prompt in prompts:
            assert prompt.trie is not None
            for sample in prompt.ended:
                if sample.cursor is None:
                    sample.cursor = prompt.trie.start(drafts=False)
            behind += [sample for sample in prompt.drafting.values() if len(sample.tokens) > sample.num_passed]
            ended += prompt.ended
            prompt.ended = []
        if not behind and not ended:
            return
        behind += ended
        tries, cursors = _tries_and_cursors(behind)
        extend_batch(tries, cursors, [sample.tokens[sample.num_passed :] for sample in behind])
        for sample in behind:
            sample.num_passed = len(sample.tokens)
        for trie, cursor in zip(*_tries_and_cursors(ended), strict=True):
            trie.stop(cursor)
        touched = {id(sample.prompt): sample.prompt for sample in behind}.values()
        too_large = [prompt for prompt in touched if prompt.trie and prompt.trie.num_tokens > self._max_trie_tokens]
        if too_large:
            self._build(too_large)

    def _build(self, prompts: Sequence[PromptTrie]) -> None:
        """Make the prompts' tries (anew), each from its history, then from the texts of the samples that draft from it.

        A trie begins half full at most, so that it is rebuilt once in a good while, however long the samples are; and
        at least half of that is history.
        """
        tries: list[TokenTrie] = []
        cursors: list[int] = []
        texts: list[Sequence[int] | Tokens] = []
        finished: list[tuple[TokenTrie, int]] = []
        for prompt in prompts:
            room = self._max_trie_tokens // 2
            share = max(1, room // max(2, 2 * len(prompt.drafting)))
            live = [sample.tokens[-share:] for sample in prompt.drafting.values()]
            history = _newest(self._history(prompt.key), room - sum(map(len, live)) if self._online else room)
            trie = TokenTrie(expected_tokens=sum(map(len, history)) + sum(map(len, live)))
            prompt.trie = trie
            prompt.ended = []  # those that are complete are history
            starts: list[int] = []
            if history:
                starts.append(trie.start(drafts=False))
                texts.append(end_to_end(history))
                finished.append((trie, starts[0]))
            for sample in prompt.drafting.values():
                sample.cursor = trie.start() if self._online else trie.follow()
                sample.num_passed = len(sample.tokens)
                starts.append(sample.cursor)
            tries += [trie] * len(starts)
            cursors += starts
            texts += live
        extend_batch(tries, cursors, texts)
        for trie, cursor in finished:
            trie.stop(cursor)

    def _free_idle(self) -> None:
        num_bytes = self.num_bytes
        while num_bytes > self._max_bytes and self._idle:
            prompt = self._idle.pop(next(iter(self._idle)))
            assert prompt.trie is not None
            num_bytes -= prompt.trie.num_bytes
            prompt.trie = None
            prompt.ended = []


def _tries_and_cursors(samples: Iterable[LiveSample]) -> tuple[list[TokenTrie], list[int]]:
    """Of samples that draft."""
    samples = list(samples)
    tries = [sample.prompt.trie for sample in samples if sample.prompt.trie is not None]
    cursors = [sample.cursor for sample in samples if sample.cursor is not None]
    assert len(tries) == len(cursors) == len(samples), "each has a cursor in its prompt's trie"
    return tries, cursors


def _newest(texts: Sequence[Tokens], max_tokens: int) -> list[Tokens]:
    """The last texts that fit in `max_tokens` together, in order; of the last one alone its end, if it does not fit."""
    kept: list[Tokens] = []
    for text in reversed(texts):
        if len(text) > max_tokens:
            break
        kept.append(text)
        max_tokens -= len(text)
    if texts and not kept and max_tokens > 0:
        kept.append(texts[-1][-max_tokens:])
    return kept[::-1]
