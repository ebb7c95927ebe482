"""How often to ask for drafts: with each number of sequences always where they pay, else now and then.

Asking costs time even where no draft is worth verifying, and where many sequences decode at once none may be. What it
brings depends on how many sequences share a step, and little on which rollout it is: with 256 of them the fifth rollout
finds what the fourth has found, and so do the last ten of each. So what was learned is kept apart for classes of the
number of sequences, across rollouts, until there is a reason to try again. A class that is new begins where the next
larger one has come to: a row is the dearer the more sequences there are, and what a few more cannot use it will hardly.

Where drafts do not pay, now and then a look shows whether they do again: several asks in a row, for the estimates
were made for other samples or with fewer nodes, and the first outcomes change them.

The first ask after steps without has to tell the drafter all that was decoded meanwhile, and tries may have to be
built: it catches up, which costs several asks. So looks of several classes follow upon each other, and a tail of a few
sequences is asked for only if it is likely to last until that is repaid: as long as the last one did, or as it has
lasted already.
"""

from itertools import accumulate

NUM_CLASSES = 32
"""Each is a factor of 2 wide."""
LEAST_LOOK, LONGEST_LOOK = 3, 6
OUTCOMES_OF_LOOK = 192
"""A look goes on until so many drafts have been made, and takes so many asks at least and at most; those with which the
drafter catches up are not counted."""
LONGEST_PAUSE = 4096
WASTE = 0.001
"""Where drafts do not pay, looking whether they do again takes about this share of the time."""
WORTH_ASKING, NOT_WORTH_ASKING = 0.06, 0.03
"""Gain that a look must show for asking always, and below which that ends. With 0, quickstart's first epoch was 8%
slower: the estimates promised a gain that the clock did not show (docs/LOG.md)."""
CLEAR_LOSS = -0.1
"""With such a gain a look ends at its second ask, and the next one is as late as may be."""
LONGER = 8
"""Each other pause is so many times longer than the one before, up to what `WASTE` allows."""
SHORTER = 0.5
"""A pause is so much shorter where the last step has asked: all that was decoded meanwhile is told to the drafter."""
FAR_BEHIND = 8
"""After so many steps without an ask, catching up is something to think of where drafts are always asked for."""
GAIN_STEP, GAIN_STEP_OF_LOOK = 0.1, 0.25
FIRST_PAUSE = 16
"""Steps without a look where drafts have ceased to pay, and before the first look where prompts are new."""
LONGEST_PUT_OFF = 256
"""Steps after which a look that was put off is thought of again, at most: costs change."""
OTHER_SHARE = 0.2
"""Where so many more (or fewer) of the samples have a history than before, all is tried again."""
SOONER = 4
"""A new class pauses so many times shorter than the next larger one, for each class that it is smaller by."""


class Asking:
    """Whether to ask in a step, and what asking has brought; no clock is read here."""

    def __init__(self) -> None:
        # Lists, for a step reads and writes a few single numbers: of an array, that takes ten times as long.
        self._gains = [0.0] * NUM_CLASSES
        """Mean of what asking brought, as a share of the tokens per second without."""
        self._asks_always = [False] * NUM_CLASSES
        self._pauses = [0] * NUM_CLASSES
        """Steps between two looks; 0 where there was no step yet."""
        self._waited = [0] * NUM_CLASSES
        """Steps since the last look, and those in it."""
        self._has_looked = [False] * NUM_CLASSES
        """Whether a look has ended since there was reason to try again."""
        self._num_steps = [0] * NUM_CLASSES
        """Steps since a rollout began or more sequences decoded."""
        self._num_left = [0] * NUM_CLASSES
        """Steps there were the last time in this class and in smaller ones; 0 where there was none."""
        self._last_size = 0
        """Class of the last step."""
        self._is_looking = [False] * NUM_CLASSES
        self._num_asks = [0] * NUM_CLASSES
        """Asks of the present look that counted."""
        self._look_seconds = [0.0] * NUM_CLASSES
        """What drafting has taken in the present look."""
        self._draft_seconds = [0.0] * NUM_CLASSES
        """Time that drafting takes from step to step; 0 where it is not known."""
        self._catch_up_seconds = [0.0] * NUM_CLASSES
        """Time of the first ask after a pause, with all that was decoded meanwhile; 0 where it is not known."""
        self._plain_seconds = [0.0] * NUM_CLASSES
        """Time of a step without drafts, as it was last known."""
        self._asked_before = False
        """Whether the last step asked, so that the drafter is up to date."""
        self._num_unasked = FAR_BEHIND
        """Steps without an ask since the last one."""
        self.asks_now = False
        """Whether this step asks."""
        self.begins_look = False
        """Whether an ask in this step would be the first one of a look."""
        self._known_share: float | None = None

    def begin_rollout(self, known_share: float) -> None:
        """Samples with other prompts or of another policy come; `known_share` of them have rollouts to draft from.

        What was learned stays good if they are as well known as those before. But where asking pays once siblings have
        spoken, it may not before: it soon stops if the first asks do not show that it does.
        """
        self.asks_now = False
        self._num_unasked = FAR_BEHIND
        self._gains = [min(gain, WORTH_ASKING) for gain in self._gains]
        self._forget_steps(NUM_CLASSES)
        for size, is_looking in enumerate(self._is_looking):
            if is_looking:  # too few steps for a look: in another rollout it would begin by catching up again
                self._put_off(size, LONGEST_PAUSE, times=LONGER)
        if self._known_share is None or abs(known_share - self._known_share) > OTHER_SHARE:
            self._known_share = known_share
            self._pauses = [int(asks_always) for asks_always in self._asks_always]
            self._has_looked = [False] * NUM_CLASSES

    def is_due(self, num_sequences: int) -> bool:
        """Whether to ask in the coming step; called once a step."""
        size = class_of(num_sequences)
        if not self._pauses[size]:
            self._pauses[size] = self._first_pause(size)
        if size > self._last_size:
            self._forget_steps(size)
        self._last_size = size
        self._waited[size] += 1
        self._num_steps[size] += 1
        self._asked_before, self.asks_now = self.asks_now, False
        self.begins_look = False
        self._num_unasked = 0 if self._asked_before else self._num_unasked + 1
        if self._asks_always[size]:
            return self._num_unasked < FAR_BEHIND or self._repays_catching_up(size)
        pause = self._pauses[size]
        if self._asked_before:  # the drafter has caught up, so a look costs less than it will later
            pause = int(SHORTER * pause) if self._has_looked[size] else 0
        if self._waited[size] < pause:
            return False
        if not self._is_looking[size]:
            self._is_looking[size] = self.begins_look = True
            self._num_asks[size], self._look_seconds[size] = 0, 0.0
        return True

    def _forget_steps(self, num_classes: int) -> None:
        """Those of the smallest classes are over."""
        numbers = accumulate(self._num_steps[:num_classes])
        self._num_left[:num_classes] = [now or before for now, before in zip(numbers, self._num_left, strict=False)]
        self._num_steps[:num_classes] = [0] * num_classes

    def _repays_catching_up(self, size: int) -> bool:
        """Whether as many steps as there were the last time, or as there have been by now, bring what that takes."""
        num_steps = max(self._num_left[size], self._num_steps[size])
        return self._gains[size] * self._plain_seconds[size] * num_steps >= self._catch_up_seconds[size]

    def put_off(self, num_sequences: int) -> None:
        """Do not look in the coming step after all, nor in those that follow."""
        self._put_off(class_of(num_sequences), LONGEST_PUT_OFF, times=2)

    def _put_off(self, size: int, longest: int, *, times: int) -> None:
        """Break off a look, and make the pause so many times longer, up to the longest."""
        self._is_looking[size] = False
        pause = self._pauses[size]
        self._pauses[size] = max(pause, min(times * pause, longest), FIRST_PAUSE)
        self._waited[size] = 0

    def only_looks(self, num_sequences: int) -> bool:
        """Whether an ask in the coming step would be one of a look."""
        return not self._asks_always[class_of(num_sequences)]

    def _first_pause(self, size: int) -> int:
        """How long a class waits for its first look: by what the next larger one that has had steps has learned.

        The first class of all looks at once, but where nothing is known of the prompts: then samples shall speak first.
        """
        for larger in range(size + 1, NUM_CLASSES):
            if self._pauses[larger]:
                times_sooner: int = SOONER ** (larger - size)
                return max(self._pauses[larger] // times_sooner, 1)
        return 1 if self._known_share is None or self._known_share > OTHER_SHARE else FIRST_PAUSE

    def asked(self) -> None:
        """Drafts are asked for in this step."""
        self.asks_now = True

    def gain(self, num_sequences: int) -> float:
        """What asking has brought with so many sequences, as a share of the tokens per second without."""
        return self._gains[class_of(num_sequences)]

    def draft_seconds(self, num_sequences: int) -> float:
        """What drafting takes in a step of so many sequences; 0 where it is not known."""
        return self._draft_seconds[class_of(num_sequences)]

    def record_seconds(self, num_sequences: int, draft_seconds: float, spent_seconds: float) -> None:
        """Learn what drafting took: proposing, choosing and learning, in one step.

        Args:
            num_sequences: Of that step.
            draft_seconds: For all of them.
            spent_seconds: For those that were asked for.
        """
        seconds = self._draft_seconds if self._asked_before else self._catch_up_seconds
        size = class_of(num_sequences)
        self._look_seconds[size] += spent_seconds
        known = seconds[size] or draft_seconds
        if draft_seconds < 0.5 * known:  # a kernel had to be compiled before
            seconds[size] = draft_seconds
        else:
            seconds[size] = known + 0.2 * (min(draft_seconds, 2 * known) - known)

    def learn(self, num_sequences: int, num_asked: int, more_tokens: float, plain: float, drafted: float) -> None:
        """Follow what asking brings, drafting time included, and decide whether to go on.

        The first ask after a pause does not show what asking brings in the long run, for the drafter has to catch up:
        it does not count. Whether there will be steps enough to repay it is another question.

        Args:
            num_sequences: Of the step in which drafts were asked for.
            num_asked: For how many of them. The rest is as if they had been asked for all.
            more_tokens: Expected tokens of the drafts, as a share of those without.
            plain: Seconds of the step without drafts.
            drafted: Seconds of the step with the chosen ones, drafting not included.
        """
        size = class_of(num_sequences)
        self._plain_seconds[size] = plain
        if not self._asked_before:
            return
        gain = (1 + more_tokens) * plain / (drafted + self._draft_seconds[size]) - 1
        if self._is_looking[size]:
            self._num_asks[size] += 1
            self._gains[size] += max(1 / self._num_asks[size], GAIN_STEP_OF_LOOK) * (gain - self._gains[size])
            num_asks = min(max(OUTCOMES_OF_LOOK // num_asked, LEAST_LOOK), LONGEST_LOOK)
            net_gain = self._net_gain(size)
            is_clear = self._num_asks[size] > 1 and net_gain < CLEAR_LOSS
            if is_clear or self._num_asks[size] >= num_asks:
                self._end_look(size, net_gain)
        else:
            self._gains[size] += GAIN_STEP * (gain - self._gains[size])
            if self._gains[size] < NOT_WORTH_ASKING:
                self._asks_always[size] = False
                self._pauses[size], self._waited[size] = FIRST_PAUSE, 0

    def _net_gain(self, size: int) -> float:
        """The gain, less what it takes to catch up, spread over as many steps as there were the last time."""
        is_up_to_date = size + 1 < NUM_CLASSES and self._asks_always[size + 1]
        if is_up_to_date or not self._num_left[size]:
            return self._gains[size]
        return self._gains[size] - self._catch_up_seconds[size] / (self._num_left[size] * self._plain_seconds[size])

    def _end_look(self, size: int, net_gain: float) -> None:
        """Ask always from now on, or say when to look again."""
        self._is_looking[size] = False
        self._has_looked[size] = True
        self._asks_always[size] = net_gain > WORTH_ASKING
        self._waited[size] = 0
        if self._asks_always[size]:
            self._pauses[size] = 1
            return
        num_asks = self._num_asks[size]
        look_seconds = self._look_seconds[size] * (num_asks + 1) / num_asks  # the last ask is not over
        longest = int(min(max(look_seconds / self._plain_seconds[size] / WASTE, 1), LONGEST_PAUSE))
        first = max(longest // LONGER**2, 1)
        is_clear = net_gain < CLEAR_LOSS
        self._pauses[size] = longest if is_clear else min(LONGER * max(self._pauses[size], first), longest)


def class_of(num_sequences: int) -> int:
    """The class of a number of sequences, from 0 to `NUM_CLASSES` - 1."""
    return min(max(num_sequences, 1).bit_length(), NUM_CLASSES) - 1
