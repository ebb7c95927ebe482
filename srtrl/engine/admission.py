"""Who is admitted next: the samples that wait for a slot, and what is known of their lengths.

The order is breadth-first: the first sample of every prompt (the scout), then the second of every prompt, and so on, so
that later samples find drafts in what their siblings said. Within such a wave the samples that are expected to be long
go first: the step ends when the last sample does. Only the order of decoding depends on this, never a token.
"""

import heapq
from collections.abc import Iterable, Iterator
from typing import Literal

from srtrl.engine.sequence import Sequence

CHANGES_PER_SORT = 1 / 16
"""A wave is sorted anew once lengths have come that are so many by its samples: the order is a guess anyway."""

Admission = Literal["breadth_first", "depth_first"]
"""See `rollout.admission` of the recipe."""


class WaitingLine:
    """Primaries without a slot: preempted ones in the order of their first admission, then the others in waves."""

    def __init__(self, admission: Admission = "breadth_first", *, long_first: bool = True) -> None:
        self.admission = admission
        self.long_first = long_first
        self._preempted: list[tuple[int, Sequence]] = []
        """A heap by admission."""
        self._waves: dict[int, list[Sequence]] = {}
        """Sample index -> samples; depth-first: draw index -> samples. Never an empty list."""
        self._numbers: list[int] = []
        """Its keys, as a heap."""
        self._sorted_wave: int | None = None
        """The wave whose list is in order, the next sample last; None where a sample has come since."""
        self._num_changes = 0
        """Lengths that have come since it was sorted."""
        self._lengths: dict[tuple[int, ...], tuple[float, int]] = {}
        """Prompt -> (sum, count) of the lengths it is expected by."""

    def __len__(self) -> int:
        return len(self._preempted) + sum(map(len, self._waves.values()))

    def __bool__(self) -> bool:
        return bool(self._preempted or self._waves)

    def __iter__(self) -> Iterator[Sequence]:
        """All that wait, in no particular order."""
        yield from (sequence for _, sequence in self._preempted)
        for wave in self._waves.values():
            yield from wave

    def add(self, sequence: Sequence) -> None:
        """A new sample waits."""
        request = sequence.request
        number = request.sample_index if self.admission == "breadth_first" else request.draw_index
        if number not in self._waves:
            self._waves[number] = []
            heapq.heappush(self._numbers, number)
        self._waves[number].append(sequence)
        self._sorted_wave = None

    def put_back(self, sequence: Sequence) -> None:
        """A preempted sample waits before all new ones."""
        heapq.heappush(self._preempted, (sequence.admission, sequence))

    def expect(self, prompt_token_ids: tuple[int, ...], num_tokens: float) -> None:
        """Take one more length, of a finished sample or from elsewhere, into the prompt's mean."""
        total, count = self._lengths.get(prompt_token_ids, (0.0, 0))
        self._lengths[prompt_token_ids] = (total + num_tokens, count + 1)
        self._num_changes += self.long_first

    def first(self, running: Iterable[Sequence]) -> Sequence:
        """The sample to be admitted next; one must wait.

        Only the first wave is kept in order, and it is sorted here, at most once a step. Each finished sample changes
        what is expected, but thousands may wait: a long wave is sorted again when several have finished.

        Args:
            running: Primaries with a slot: how far they are already is the least that their siblings are expected by.
        """
        if self._preempted:
            return self._preempted[0][1]
        number = self._numbers[0]
        wave = self._waves[number]
        if self._sorted_wave != number or self._num_changes >= CHANGES_PER_SORT * len(wave):
            self._sort(wave, running)
            self._sorted_wave = number
            self._num_changes = 0
        return wave[-1]

    def pop_first(self, running: Iterable[Sequence]) -> Sequence:
        """Take `first` out of the line."""
        sequence = self.first(running)
        if self._preempted:
            heapq.heappop(self._preempted)
            return sequence
        number = self._numbers[0]
        self._waves[number].pop()
        if not self._waves[number]:
            del self._waves[heapq.heappop(self._numbers)]
        return sequence

    def clear(self) -> None:
        """Forget all samples and lengths."""
        self._preempted.clear()
        self._waves.clear()
        self._numbers.clear()
        self._lengths.clear()
        self._sorted_wave = None
        self._num_changes = 0

    def _sort(self, wave: list[Sequence], running: Iterable[Sequence]) -> None:
        """Put the next sample last. A prompt of which nothing is known is taken for an average one."""
        expected: dict[tuple[int, ...], float] = {}
        average = 0.0
        if self.long_first and self.admission == "breadth_first":
            expected = {prompt: total / count for prompt, (total, count) in self._lengths.items()}
            average = sum(expected.values()) / max(1, len(expected))
            # Scouts that still run say more than none: without them the long prompts would pass for average ones.
            for sequence in running:
                prompt = sequence.request.prompt_token_ids
                expected[prompt] = max(expected.get(prompt, average), sequence.num_generated)

        def place(sequence: Sequence) -> tuple[float, int, int, int]:
            request = sequence.request
            return (
                -expected.get(request.prompt_token_ids, average),
                request.draw_index,
                request.sample_index,
                sequence.sequence_id,
            )

        wave.sort(key=place, reverse=True)
