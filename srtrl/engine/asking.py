"""How often to ask for drafts: with each number of sequences always where they pay, else now and then.

Asking costs time even where no draft is worth verifying, and where many sequences decode at once none may be. What it
brings depends on how many sequences share a step, and little on which rollout it is: with 256 of them the fifth rollout
finds what the fourth has found, and so do the last ten of each. So what was learned is kept apart for classes of the
number of sequences, across rollouts, until there is a reason to try again. A class that is new begins where the next
larger one has come to: a row is the dearer the more sequences there are, and what a few more cannot use it will hardly.

Where drafts do not pay, now and then a look shows whether they do again: several asks in a row, for the estimates
were made for other samples or with fewer nodes, and the first outcomes change them. All looks that show nothing take a
small share of the time together, whichever class they are of.
"""

NUM_CLASSES = 32
"""Each is a factor of 2 wide."""
LEAST_LOOK, LONGEST_LOOK = 3, 6
OUTCOMES_OF_LOOK = 192
"""A look goes on until so many drafts have been made, and takes so many asks at least and at most; those with which the
drafter catches up are not counted."""
LONGEST_PAUSE = 4096
WASTE = 0.001
"""Where drafts do not pay, looking whether they do again takes about this share of the time."""
LOOK_SHARE, LONG_WAIT = 0.002, 128
"""A look begins when those that showed nothing, of all classes, have taken no more than this share of the time since
there was reason to try again, or when its class has waited so many steps: 256 sequences pass through nine classes as
they end, each is worth a look then, and together these were 3 ms in each of 16 rollouts of 500."""
WORTH_ASKING, NOT_WORTH_ASKING = 0.06, 0.03
"""Gain that a look must show for asking always, and below which that ends. With 0, quickstart's first epoch was 8%
slower: the estimates promised a gain that the clock did not show (docs/LOG.md)."""
CLEAR_LOSS = -0.1
"""With such a gain a look ends at its second ask, and the next one is as late as may be."""
LONGER = 8
"""Each other pause is so many times longer than the one before, up to what `WASTE` allows."""
GAIN_STEP, GAIN_STEP_OF_LOOK = 0.1, 0.25
FIRST_PAUSE = 16
"""Steps without a look where drafts have ceased to pay, and before the first look where prompts are new."""
YOUNG_STEPS = 2
"""In the first so many steps of a rollout no look begins, and no ask counts, where samples are known: all of them are
at their first tokens, which are the least certain ones. With 64 slots quickstart's first asks showed -0.2, 0 and 0.15,
the next ones 0.3, and a look of those three decided whether there were drafts in the next thousand steps."""
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
        self._is_looking = [False] * NUM_CLASSES
        self._num_asks = [0] * NUM_CLASSES
        """Asks of the present look that counted."""
        self._look_seconds = [0.0] * NUM_CLASSES
        """What drafting has taken in the present look."""
        self._draft_seconds = [0.0] * NUM_CLASSES
        """Time that drafting takes from step to step; 0 where it is not known."""
        self._catch_up_seconds = [0.0] * NUM_CLASSES
        """Time of the first ask after a pause, with all that was decoded meanwhile; 0 where it is not known."""
        self._unpaid_seconds = 0.0
        """What looks have taken that showed nothing, or nothing yet, less `LOOK_SHARE` of the time since then."""
        self._asked_before = False
        """Whether the last step asked, so that the drafter is up to date."""
        self.asks_now = False
        """Whether this step asks."""
        self._known_share: float | None = None
        self._num_steps = 0
        """Steps of this rollout, the present one included."""
        self._num_young = 0
        """Of them, those with which it begins."""

    def begin_rollout(self, known_share: float) -> bool:
        """Samples with other prompts or of another policy come; `known_share` of them have rollouts to draft from.

        What was learned stays good if they are as well known as those before. But where asking pays once siblings have
        spoken, it may not before: it soon stops if the first asks do not show that it does.

        Returns:
            Whether they are known better, or less, than those before, so that all is tried again.
        """
        self.asks_now = False
        self._num_steps, self._num_young = 0, YOUNG_STEPS if known_share > OTHER_SHARE else 0
        self._gains = [min(gain, WORTH_ASKING) for gain in self._gains]
        if self._known_share is not None and abs(known_share - self._known_share) <= OTHER_SHARE:
            return False
        self._known_share = known_share
        self._unpaid_seconds = 0.0
        self._pauses = [int(asks_always) for asks_always in self._asks_always]
        return True

    def is_due(self, num_sequences: int) -> bool:
        """Whether to ask in the coming step; called once a step."""
        size = class_of(num_sequences)
        if not self._pauses[size]:
            self._pauses[size] = self._first_pause(size)
        self._waited[size] += 1
        self._asked_before, self.asks_now = self.asks_now, False
        self._num_steps += 1
        if self._asks_always[size]:
            return True
        if self._waited[size] < self._pauses[size] or self._num_steps <= self._num_young:
            return False
        if not self._is_looking[size]:
            if self._unpaid_seconds > 0 and self._waited[size] < LONG_WAIT:
                return False
            self._is_looking[size] = True
            self._num_asks[size], self._look_seconds[size] = 0, 0.0
        return True

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
        if not self._asks_always[size]:
            self._look_seconds[size] += spent_seconds
            self._unpaid_seconds += spent_seconds
        known = seconds[size] or draft_seconds
        if draft_seconds < 0.5 * known:  # a kernel had to be compiled before
            seconds[size] = draft_seconds
        else:
            seconds[size] = known + 0.2 * (min(draft_seconds, 2 * known) - known)

    def pay(self, seconds: float) -> None:
        """A step has taken so long, drafting not included: a share of that is free for looks."""
        if self._unpaid_seconds:
            self._unpaid_seconds = max(self._unpaid_seconds - LOOK_SHARE * seconds, 0.0)

    def learn(self, num_sequences: int, num_asked: int, more_tokens: float, plain: float, drafted: float) -> None:
        """Follow what asking brings, drafting time included, and decide whether to go on.

        The first ask after a pause does not show what asking costs, for the drafter has to catch up: in a look it does
        not count. Where drafts are always asked for, it does: that class of steps comes with a pause before it.

        Args:
            num_sequences: Of the step in which drafts were asked for.
            num_asked: For how many of them. The rest is as if they had been asked for all.
            more_tokens: Expected tokens of the drafts, as a share of those without.
            plain: Seconds of the step without drafts.
            drafted: Seconds of the step with the chosen ones, drafting not included.
        """
        size = class_of(num_sequences)
        if self._num_steps <= self._num_young or (not self._asked_before and not self._asks_always[size]):
            return
        draft_seconds = self._draft_seconds if self._asked_before else self._catch_up_seconds
        gain = (1 + more_tokens) * plain / (drafted + draft_seconds[size]) - 1
        if self._is_looking[size]:
            self._num_asks[size] += 1
            self._gains[size] += max(1 / self._num_asks[size], GAIN_STEP_OF_LOOK) * (gain - self._gains[size])
            num_asks = min(max(OUTCOMES_OF_LOOK // num_asked, LEAST_LOOK), LONGEST_LOOK)
            if gain > WORTH_ASKING >= self._gains[size]:  # it has come to pay, what it showed before set aside
                num_asks = LONGEST_LOOK
            is_clear = self._num_asks[size] > 1 and self._gains[size] < CLEAR_LOSS
            if is_clear or self._num_asks[size] >= num_asks:
                self._end_look(size, plain)
        else:
            self._gains[size] += GAIN_STEP * (gain - self._gains[size])
            if self._gains[size] < NOT_WORTH_ASKING:
                self._asks_always[size] = False
                self._pauses[size], self._waited[size] = FIRST_PAUSE, 0

    def _end_look(self, size: int, plain: float) -> None:
        """Ask always from now on, or say when to look again; `plain`: seconds of a step without drafts."""
        self._is_looking[size] = False
        self._asks_always[size] = self._gains[size] > WORTH_ASKING
        self._waited[size] = 0
        if self._asks_always[size]:
            self._pauses[size] = 1
            self._unpaid_seconds = max(self._unpaid_seconds - self._look_seconds[size], 0.0)
            return
        num_asks = self._num_asks[size]
        look_seconds = self._look_seconds[size] * (num_asks + 1) / num_asks  # the last ask is not over
        longest = int(min(max(look_seconds / plain / WASTE, 1), LONGEST_PAUSE))
        first = max(longest // LONGER**2, 1)
        is_clear = self._gains[size] < CLEAR_LOSS
        self._pauses[size] = longest if is_clear else min(LONGER * max(self._pauses[size], first), longest)


def class_of(num_sequences: int) -> int:
    """The class of a number of sequences, from 0 to `NUM_CLASSES` - 1."""
    return min(max(num_sequences, 1).bit_length(), NUM_CLASSES) - 1
