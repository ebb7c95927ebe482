"""How often to ask for drafts: with each number of sequences as often as they have paid there.

Asking costs time even where no draft is worth verifying, and where many sequences decode at once none may be. What it
brings depends on how many sequences share a step, and little on which rollout it is: with 256 of them the fifth rollout
finds what the fourth has found, and so do the last ten of each. So what was learned is kept apart for classes of the
number of sequences, across rollouts, until there is a reason to try again. A class that is new begins where the next
larger one has come to: a row is the dearer the more sequences there are, and what a few more cannot use it will hardly.
"""

import math

import numpy as np

NUM_CLASSES = 64
"""Each is a factor of sqrt(2) wide: up to 2**32 sequences."""
MAX_INTERVAL = 1024
WASTE = 0.002
"""Where drafts do not pay, looking whether they do again takes about this share of the time."""
WORTH_ASKING = 0.06
"""Least gain for which to go on asking. With 0, quickstart's first epoch was 8% slower: the estimates promised a gain
that the clock did not show (docs/LOG.md)."""
CLEAR_LOSS = -0.1
"""With such a gain drafts are asked for the sooner the more seldom."""
FIRST_GAIN = 0.05
GAIN_STEP, GAIN_STEP_WHEN_RARE = 0.1, 0.5
OTHER_SHARE = 0.2
"""Where so many more (or fewer) of the samples have a history than before, all is tried again."""
RETRY_INTERVAL = 8
"""Drafts are then asked for in one of so many steps at least, until they are seen to pay or not to."""
SOONER = 4
"""A new class asks so many times as often as the next larger one, for each class that it is smaller by."""


class Asking:
    """Whether to ask in a step, and what asking has brought; no clock is read here."""

    def __init__(self) -> None:
        self._gains = np.full(NUM_CLASSES, FIRST_GAIN)
        """Mean of what asking brought, as a share of the tokens per second without."""
        self._intervals = np.zeros(NUM_CLASSES, np.int64)
        """Drafts are asked for in one of so many steps; 0 where there was no step yet."""
        self._waited = np.zeros(NUM_CLASSES, np.int64)
        """Steps since the last ask."""
        self._draft_seconds = np.zeros(NUM_CLASSES)
        """Time that drafting takes from step to step; 0 where it is not known."""
        self._catch_up_seconds = np.zeros(NUM_CLASSES)
        """Time of the first ask after a pause, with all that was decoded meanwhile; 0 where it is not known."""
        self._asked_before = False
        """Whether the last step asked, so that the drafter is up to date."""
        self.asks_now = False
        """Whether this step asks."""
        self._known_share: float | None = None

    def begin_rollout(self, known_share: float) -> None:
        """Samples with other prompts or of another policy come; `known_share` of them have rollouts to draft from.

        What was learned stays good if they are as well known as those before.
        """
        if self._known_share is None or abs(known_share - self._known_share) > OTHER_SHARE:
            self._known_share = known_share
            self._intervals = np.minimum(self._intervals, RETRY_INTERVAL)
            self._gains = np.maximum(self._gains, FIRST_GAIN)

    def is_due(self, num_sequences: int) -> bool:
        """Whether to ask in the coming step; called once a step.

        The first ask after a pause does not show what asking costs, for the drafter has to catch up. A second follows.
        """
        size = _class_of(num_sequences)
        if not self._intervals[size]:
            self._intervals[size] = self._first_interval(size)
        self._waited[size] += 1
        is_second = self.asks_now and not self._asked_before
        self._asked_before, self.asks_now = self.asks_now, False
        return bool(is_second or self._waited[size] >= self._intervals[size])

    def _first_interval(self, size: int) -> int:
        """How often a class begins to ask: by what the next larger one that has had steps has learned."""
        larger = np.flatnonzero(self._intervals[size:])
        if not len(larger):
            return 1
        distance = int(larger[0])
        times_sooner: int = SOONER**distance
        return max(int(self._intervals[size + distance]) // times_sooner, 1)

    def asked(self, num_sequences: int) -> None:
        """Drafts are asked for in this step."""
        self.asks_now = True
        if self._asked_before:
            self._waited[_class_of(num_sequences)] = 0

    def gain(self, num_sequences: int) -> float:
        """What asking has brought with so many sequences, as a share of the tokens per second without."""
        return float(self._gains[_class_of(num_sequences)])

    def record_seconds(self, num_sequences: int, draft_seconds: float) -> None:
        """Learn what drafting took: proposing, choosing and learning, in one step."""
        seconds = self._draft_seconds if self._asked_before else self._catch_up_seconds
        size = _class_of(num_sequences)
        known = seconds[size] or draft_seconds
        # Down at once, up slowly: a kernel that had to be compiled first, or a busy machine, is soon forgotten.
        seconds[size] = min(draft_seconds, known + 0.2 * (min(draft_seconds, 3 * known) - known))

    def learn(self, num_sequences: int, more_tokens: float, plain: float, drafted: float) -> None:
        """Follow what asking brings, drafting time included, and set how often to ask.

        Args:
            num_sequences: Of the step in which drafts were asked for.
            more_tokens: Expected tokens of the drafts, as a share of those without.
            plain: Seconds of the step without drafts.
            drafted: Seconds of the step with the chosen ones, drafting not included.
        """
        if not self._asked_before:
            return
        size = _class_of(num_sequences)
        draft_seconds = self._draft_seconds[size]
        gain = (1 + more_tokens) * plain / (drafted + draft_seconds) - 1
        step = GAIN_STEP if self._intervals[size] == 1 else GAIN_STEP_WHEN_RARE
        self._gains[size] += step * (gain - self._gains[size])
        if self._gains[size] > WORTH_ASKING:
            self._intervals[size] = max(1, self._intervals[size] // 4)
        else:
            wasted = draft_seconds + self._catch_up_seconds[size]
            longest = int(min(max(wasted / plain / WASTE, 1), MAX_INTERVAL))
            rarer = 4 if self._gains[size] < CLEAR_LOSS else 2
            self._intervals[size] = min(rarer * self._intervals[size], longest)


def _class_of(num_sequences: int) -> int:
    return min(int(2 * math.log2(max(num_sequences, 1))), NUM_CLASSES - 1)
