"""The primaries that wait for a slot, and which of them is next. No tensors here."""

from srtrl.engine.batch import Batch, Sample
from srtrl.types import Request

CHANGES_PER_SORT = 1 / 16
"""The waiting samples are sorted again once this share of them has finished since: the order is a guess anyway."""


class WaitingLine:
    """Primaries without a slot: those that had one, in the order of their last admission, then the others in waves."""

    def __init__(self) -> None:
        self._line: list[Sample] = []
        """Sorted, the next sample last, unless `_is_sorted` says otherwise."""
        self._is_sorted = True
        self._num_changes = 0
        self._lengths: dict[tuple[int, ...], tuple[float, int]] = {}
        """Prompt -> (sum, count) of the lengths it is expected by."""

    def __len__(self) -> int:
        return len(self._line)

    def add(self, sample: Sample) -> None:
        """A new or preempted sample waits."""
        self._line.append(sample)
        self._is_sorted = False

    def expect(self, prompt_token_ids: tuple[int, ...], num_tokens: float) -> None:
        """Take one more length, of a finished sample or from elsewhere, into the prompt's mean."""
        total, count = self._lengths.get(prompt_token_ids, (0.0, 0))
        self._lengths[prompt_token_ids] = (total + num_tokens, count + 1)
        self._num_changes += 1

    def first(self, running: list[Sample], batch: Batch) -> Sample:
        """The sample to be admitted next; one must wait. How far the `running` ones are counts as a length, too."""
        if not self._is_sorted or self._num_changes > CHANGES_PER_SORT * len(self._line):
            self._sort(running, batch)
        return self._line[-1]

    def pop(self) -> None:
        """Take `first` out of the line."""
        self._line.pop()

    def clear(self) -> None:
        """Forget all samples and lengths."""
        self._line.clear()
        self._lengths.clear()
        self._is_sorted, self._num_changes = True, 0

    def _sort(self, running: list[Sample], batch: Batch) -> None:
        """A prompt of which nothing is known is taken for an average one."""
        expected = {prompt: total / count for prompt, (total, count) in self._lengths.items()}
        average = sum(expected.values()) / max(1, len(expected))
        # Scouts that still run say more than none: without them the long prompts would pass for average ones.
        for sample in running:
            prompt = sample.request.prompt_token_ids
            expected[prompt] = max(expected.get(prompt, average), float(len(batch.generated(sample.slot))))

        def order(sample: Sample) -> tuple[float, float, int]:
            request = sample.request
            if sample.admission >= 0:
                return -1, sample.admission, 0
            return admission_order(request, expected.get(request.prompt_token_ids, average))

        self._line.sort(key=order)
        self._line.reverse()
        self._is_sorted, self._num_changes = True, 0


def admission_order(request: Request, expected_tokens: float) -> tuple[float, float, int]:
    """Sort key of samples that were never admitted: breadth-first, and in such a wave the long ones first."""
    return request.sample_index, -expected_tokens, request.draw_index
