"""The drafts of a decode step: proposed by the drafter, chosen by what they cost, and learned from.

Also how many rows run-aheads may have, for that is a question of the same measured cost.
"""

import time
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import chain
from typing import Literal

import numpy as np

from srtrl.drafters.base import DrafterBase
from srtrl.drafters.draft_tree import DraftTrees
from srtrl.drafters.none import Drafter as NoDrafter
from srtrl.drafters.rehearsal import rehearse_once
from srtrl.engine.budget import DraftBudget, rehearse_choice
from srtrl.engine.look_sample import LookSample
from srtrl.engine.runner import ModelRunner
from srtrl.engine.scheduler import Scheduler
from srtrl.engine.sequence import ScheduledStep, Sequence
from srtrl.engine.step_cost import StepCost
from srtrl.engine.verify import Walk, token_limits
from srtrl.types import Completion, Request

MAX_ROWS = 2048
"""Largest step whose cost is followed bucket by bucket; beyond, it is extrapolated."""
MORE_ROWS = np.unique(np.append(np.arange(64.0), np.geomspace(64, MAX_ROWS, 64).round()))
"""Rows of run-aheads that are tried, ascending from 0: pricing all of them would be a cost in each step."""
LEAST_RUN_AHEAD_ROWS = 16
"""Fewer, as padding leaves on a CPU, are not worth the requests: 256 of them took 2 ms of a rollout of quickstart."""
UNLIMITED = 1 << 30
AUTO_SLOWDOWN = 0.03
"""Most that run-aheads may slow a step down where nothing is said about it."""
USED_SHARE = 0.5
"""Tokens of run-aheads that are accepted later, roughly: 0.6 of them were with small policy changes."""


@dataclass(slots=True)
class Draft:
    """The drafts of one step."""

    proposed: DraftTrees
    verified: DraftTrees
    """What the budget and the free pages left of them."""
    num_primaries: int
    context_tokens: int
    """Committed tokens of all decoding sequences."""
    seconds: float
    """Spent on proposing, choosing and learning, and on what had been put off until the drafter was asked."""
    late_seconds: float
    """Of these, spent on what had been put off: it would have taken as long without drafts."""
    asked_share: float
    """For so many of the primaries the drafter was asked; 0 if it was not."""

    @property
    def was_asked(self) -> bool:
        """Whether the drafter was."""
        return self.asked_share > 0


class Speculation:
    """Drafter and budget of one engine. It changes what a step costs, never what is sampled."""

    def __init__(
        self,
        drafter: DrafterBase,
        *,
        vocab_size: int,
        draft_budget: Literal["auto"] | int,
        max_draft_nodes: int,
        run_ahead_max_slowdown: Literal["auto"] | float,
        num_slots: int,
        cost: StepCost,
    ) -> None:
        """See `EngineOptions` for the arguments; `cost` may still be unknown, `prepare` measures it then."""
        self.drafter = drafter
        self._vocab_size = vocab_size
        self.cost = cost
        fixed = None if draft_budget == "auto" else draft_budget
        self.budget = DraftBudget(self.cost, fixed=fixed, most_nodes=max_draft_nodes)
        self._run_ahead_pays_for_itself = run_ahead_max_slowdown == "auto"
        self._max_slowdown = AUTO_SLOWDOWN if run_ahead_max_slowdown == "auto" else run_ahead_max_slowdown
        self._num_slots = num_slots
        self._num_told: dict[int, int] = {}
        """Generated tokens that the drafter has been told of, by primary's sequence id."""
        self._unstarted: dict[int, Request] = {}
        """Samples that the drafter has not heard of yet, by sequence id."""
        self._ended: list[tuple[int, Completion | None]] = []
        """Samples of whose end it has not heard yet, in the order in which they ended."""
        self._untold: dict[int, list[int]] = {}
        """Committed tokens of run-aheads that the drafter has not been told of, by sequence id."""
        self._num_requests = self._num_known = 0
        """Primaries of the rollout that is about to begin, and those of them that have rollouts to draft from."""
        self._is_begun = False
        self._run_ahead_worth: float | None = None
        """Most seconds that a row of a run-ahead may take; None until the rollout asks."""
        self._num_rows = 0
        """Rows of the last step without those of run-aheads."""
        self._look_sample = LookSample()

    @property
    def is_off(self) -> bool:
        """Whether nothing is ever drafted."""
        return isinstance(self.drafter, NoDrafter) or self.budget.fixed == 0

    def use(self, drafter: DrafterBase) -> None:
        """Go on with another drafter, no sample being live: cost and calibration stay, for they are the machine's."""
        assert not self._num_told, "another drafter while samples are live"
        assert not self._unstarted, "another drafter while samples wait"
        assert not self._ended, "another drafter while this one has not heard of all ends"
        assert not self._untold, "another drafter while run-aheads are live"
        self.drafter = drafter

    def prepare(self, runner: ModelRunner, request: Request, *, max_context_tokens: int) -> None:
        """Make ready for a request while no page is in use: measure what steps cost, once, if it is asked for."""
        self._is_begun = False
        self._run_ahead_worth = None
        if self.is_off:
            return
        rehearse_once(self.drafter)
        rehearse_choice()
        is_asked = self.budget.fixed is None or (request.is_run_ahead and self._max_slowdown < float("inf"))
        if is_asked and not self.cost.is_known:
            self.cost.probe(runner.time_forward, max_context_tokens=max_context_tokens)

    def start(self, sequence_id: int, request: Request) -> float | None:
        """Begin a sample, or a run-ahead now that it has a slot.

        Returns:
            How many tokens the sample's response may have, None if nothing is known of its prompt.
        """
        if self._ended:
            self.report_ends()
        if request.is_run_ahead:
            self.drafter.start(sequence_id, request)
            return None
        expected_tokens = self.drafter.expected_tokens(request)
        self._unstarted[sequence_id] = request
        if not self._is_begun:
            self._num_requests += 1
            self._num_known += expected_tokens is not None
        return expected_tokens

    def wants_run_aheads(self) -> bool:
        """Whether run-aheads are of use in the next rollout: somebody drafts from them, and some steps have rows."""
        if self.is_off or not self.drafter.uses_run_aheads:
            return False
        if self._max_slowdown == float("inf") or not self.cost.is_known:
            return True
        self._run_ahead_worth = None
        sizes = [1 << power for power in range((self._num_slots - 1).bit_length())]
        return any(self._run_ahead_rows(size) >= LEAST_RUN_AHEAD_ROWS for size in sizes)

    def max_run_ahead_rows(self) -> int:
        """Rows that run-aheads may have in the coming step, if it is like the last one without them."""
        if self._max_slowdown == float("inf"):
            return UNLIMITED
        if not self.cost.is_known or self._num_rows == 0:
            return 0
        return self._run_ahead_rows(self._num_rows)

    def _run_ahead_rows(self, num_rows: int) -> int:
        """Rows that run-aheads may have beside `num_rows` others."""
        if self._run_ahead_worth is None:
            self._run_ahead_worth = self._worth_of_run_ahead() if self._run_ahead_pays_for_itself else float("inf")
        return self.cost.curve().rows_within(
            num_rows, MORE_ROWS, slowdown=self._max_slowdown, row_seconds=self._run_ahead_worth
        )

    def _worth_of_run_ahead(self) -> float:
        """Seconds that a token decoded ahead saves on the average.

        If it is accepted later, a full step need not decode it; but it must verify it, in a row more.
        """
        full, double = map(float, self.cost.seconds_at([self._num_slots, 2 * self._num_slots]))
        return USED_SHARE * max(2 * full - double, 0.0) / self._num_slots

    def draft(self, scheduled: ScheduledStep, scheduler: Scheduler) -> Draft:
        """Trees for the decoding sequences, as large as pays and as free pages allow; run-aheads get none."""
        started = time.perf_counter()
        sequences = scheduled.decodes
        context_tokens = sum(len(sequence.token_ids) for sequence in sequences)
        if not self._is_begun:
            self._is_begun = True
            self.budget.begin_rollout(self._num_known / max(self._num_requests, 1))
            self._num_requests = self._num_known = 0
        num_nodes = 0
        if scheduled.num_primaries and not self.is_off:
            num_nodes = self.budget.max_nodes(scheduled.num_primaries)
        if num_nodes == 0:
            empty = DraftTrees.empty(len(sequences))
            return Draft(empty, empty, scheduled.num_primaries, context_tokens, 0.0, 0.0, asked_share=0.0)
        primaries = sequences[: scheduled.num_primaries]
        places = self._look_sample.of(primaries) if self.budget.only_looks else list(range(len(primaries)))
        asked = [primaries[place] for place in places]
        asked_share = len(asked) / len(primaries)
        began = time.perf_counter()
        self.report_ends()
        self._report_beginnings(asked if asked_share < 1 else None)
        late_seconds = time.perf_counter() - began
        self._tell(asked)
        self.drafter.least_score = self.budget.least_score(
            scheduled.num_primaries, len(sequences), context_tokens / len(sequences)
        )
        if asked_share < 1:
            proposed = self._propose(asked, num_nodes, len(asked)).spread(np.array(places), len(sequences))
        else:  # run-aheads get no draft, but their text is to be known
            proposed = self._propose(sequences, num_nodes, len(primaries))
        chosen = self.budget.select(
            proposed,
            context_tokens=context_tokens,
            num_other_rows=scheduled.num_prefill_tokens,
            weights=(np.arange(len(sequences)) < scheduled.num_primaries).astype(np.float64),
            is_draining=not scheduler.num_waiting,
            asked_share=asked_share,
        )
        granted = scheduler.grow_for_drafts(sequences, chosen.sizes.tolist())
        verified = chosen
        if sum(granted) < chosen.num_nodes:
            verified = DraftTrees.of(tree.first(most) for tree, most in zip(chosen, granted, strict=True))
        seconds = time.perf_counter() - started
        return Draft(
            proposed, verified, scheduled.num_primaries, context_tokens, seconds, late_seconds, asked_share=asked_share
        )

    def observe(self, draft: Draft, walks: SequenceOf[Walk]) -> None:
        """Take note of the tokens of a step: compare the estimates with them.

        The drafter hears of them when it is asked next, so that steps without drafts are free.
        """
        for walk in walks[draft.num_primaries :]:
            self._untold.setdefault(walk.sequence.sequence_id, []).extend(walk.emitted)
        if draft.proposed.num_nodes:
            started = time.perf_counter()
            sizes = draft.proposed.sizes.tolist()
            emitted = [walk.emitted if size else [] for walk, size in zip(walks, sizes, strict=True)]
            offsets = np.cumsum([0, *map(len, emitted)], dtype=np.int64)
            self.budget.observe(draft.proposed, offsets, np.fromiter(chain.from_iterable(emitted), np.int64))
            draft.seconds += time.perf_counter() - started
        # Of a given cost, which is that of another machine, what drafting takes on this one says nothing.
        if draft.was_asked and not self.cost.is_fixed:
            self.budget.record_drafting(draft.seconds - draft.late_seconds, draft.asked_share)

    def finish(self, sequence_id: int, completion: Completion | None) -> None:
        """End of a sample, interrupted if there is no completion."""
        self._ended.append((sequence_id, completion))

    def report_ends(self) -> None:
        """Tell the drafter which samples have ended.

        That is due when it is asked, when others begin, and at the end of a rollout. Told of each end at once, in steps
        without drafts, 256 samples of quickstart took 3 ms of a rollout of 460: the caches were full of the policy.
        """
        ended, self._ended = self._ended, []
        never_begun: list[Completion] = []
        for sequence_id, completion in ended:
            if self._unstarted.pop(sequence_id, None) is not None:
                if completion is not None:
                    never_begun.append(completion)
                continue
            self._num_told.pop(sequence_id, None)
            tokens = self._untold.pop(sequence_id, None)
            if tokens:  # of a run-ahead: it has no completion to say them
                self.drafter.observe([sequence_id], [tokens])
            self.drafter.finish(sequence_id, completion)
        if never_begun:
            self.drafter.learn(never_begun)

    def _report_beginnings(self, asked: SequenceOf[Sequence] | None) -> None:
        """Tell the drafter of the samples `asked` for; None: which ones there are, those that wait included."""
        sequence_ids = list(self._unstarted) if asked is None else [sequence.sequence_id for sequence in asked]
        for sequence_id in sequence_ids:
            request = self._unstarted.pop(sequence_id, None)
            if request is not None:
                self.drafter.start(sequence_id, request)

    def _tell(self, primaries: SequenceOf[Sequence]) -> None:
        """Tell the drafter of all tokens that it has not heard of."""
        for sequence in primaries:
            sequence_id, num_generated = sequence.sequence_id, len(sequence.rollout_logprobs)
            num_untold = num_generated - self._num_told.get(sequence_id, 0)
            if num_untold:
                self._untold[sequence_id] = sequence.token_ids[-num_untold:]
                self._num_told[sequence_id] = num_generated
        if self._untold:
            self.drafter.observe(list(self._untold), list(self._untold.values()))
            self._untold = {}

    def _propose(self, sequences: SequenceOf[Sequence], num_nodes: int, num_primaries: int) -> DraftTrees:
        """Ask the drafter for trees of at most so many nodes, of none for those behind the primaries.

        Raises:
            ValueError: The drafter (of the user's own, say) does not keep its promises.
        """
        # A sample that ends with its next token, whatever is guessed, needs no draft.
        room = np.where(token_limits(sequences) > 1, num_nodes, 0)
        room[num_primaries:] = 0
        trees = self.drafter.propose([sequence.sequence_id for sequence in sequences], room.tolist())
        if len(trees) != len(room) or (trees.sizes > room).any():
            raise ValueError(f"{self._who()} proposed other trees than it was asked for: {trees.sizes} for {room}")
        if trees.num_nodes and not 0 <= trees.token_ids.min() <= trees.token_ids.max() < self._vocab_size:
            raise ValueError(
                f"{self._who()} proposed tokens from {trees.token_ids.min()} to {trees.token_ids.max()}, but the "
                f"vocabulary has {self._vocab_size}: are its rollouts those of another tokenizer?"
            )
        return trees

    def _who(self) -> str:
        """The drafter, for an error."""
        return f"the drafter {type(self.drafter).__module__}.{type(self.drafter).__qualname__}"

    def record(self, scheduled: ScheduledStep, draft: Draft, seconds: float) -> None:
        """Learn what the step cost; `seconds` is its wall time."""
        self._num_rows = scheduled.num_primaries + draft.verified.num_nodes
        if scheduled.prefills or not self.cost.is_known:
            return  # a prompt's rows have no logits, and are not like others
        self.budget.record(
            draft.verified,
            context_tokens=draft.context_tokens,
            seconds=seconds - draft.seconds,
            was_asked=draft.was_asked,
        )
