"""The interface of drafters to the engine. A drafter is one file here, or a class of your own package."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from srtrl.drafters.draft_tree import DraftTrees
from srtrl.recipe.schema import Section
from srtrl.resolve import resolve_class
from srtrl.types import Completion, Purpose, Request, TopTokens

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


PromptKey = tuple[str, tuple[int, ...]]
"""Purpose and token ids of a prompt."""
TextsByKey = Mapping[PromptKey, Mapping[int, Int32Array]]
"""Prompt -> RNG key -> tokens."""


class DrafterBase:
    """Guesses tokens. It may be incorrect: verification keeps the sampled tokens the same for any proposal.

    A subclass named `Drafter` in `srtrl/drafters/<name>.py` is the drafter `<name>`. Its `Options` document and check
    `rollout.drafter_options`. `propose` must be written; the rest does nothing unless it is. A decoding sample is known
    by its slot, a small integer that another sample has after `finish`. A sample that was preempted starts again, and
    all of its tokens are observed again. So does a sample of several turns at each turn, with the turns before it as
    `request.prefix`: what is observed begins at `request.text_start` with what was put in after the turn before.
    """

    Options: type[Section] = Section
    drafts: bool = True
    """Whether it ever drafts."""
    uses_texts: bool = False
    """Whether it drafts from the texts of `learn_texts`."""
    num_top: int = 0
    """Number of the policy's most likely tokens in place of each sampled one for `observe_top`; 0: it is not called."""
    summed_metrics: frozenset[str] = frozenset()
    """Metrics of its own of which the values of several ranks are added up."""
    reads_states: bool = False
    """Whether `computed` is called: it reads states of the rows that the engine's runner has computed."""
    knows_noise: bool = True
    """Whether the tokens are those that the noise of their samples decides; not where recorded ones replace them."""

    defers: bool = False
    """Whether an engine calls `learn_deferred` in each step: what decides no draft of the next step can wait for it."""

    def __init__(self, options: Section | None = None) -> None:
        """Make a drafter; without options, with their defaults."""
        self.options = options if options is not None else self.Options()

    def __str__(self) -> str:
        """As errors name it."""
        return f"the drafter {type(self).__module__}.{type(self).__qualname__}"

    def begin_rollout(self, purpose: Purpose) -> None:
        """The samples that start next are of a new rollout, maybe of a policy with new weights."""

    def start(self, slots: Int64Array, requests: Sequence[Request]) -> None:
        """Samples have got their slots [B]."""

    def propose(self, slots: Int64Array, max_nodes: Int64Array, min_score: float) -> DraftTrees:
        """Return one tree for each of `slots` [B], of at most `max_nodes` [B] nodes; it may be empty.

        Nodes come in order of falling score, so that the first n of a tree are its best n. Those with a score below
        `min_score` are not worth a row of the coming step, and need not be made.
        """
        raise NotImplementedError(f"{self} has no `propose`")

    def computed(self, rows: Int64Array, next_tokens: Int32Array) -> None:
        """A step was verified: `rows` of it stay, each with the token after it; the others were rejected drafts.

        They are all rows of prompts, and of each sequence the root and the accepted nodes. `prepare` comes next.
        """

    def prepare(self, slots: Int64Array, token_ids: Int32Array, offsets: Int64Array, rows: Int64Array) -> None:
        """A step was verified: begin work for the next `propose` that can run while the host does the rest.

        `rows` [B]: the step's row that gave the last token of each slot, -1 where the sample has ended. For the others
        see `observe`, which gets them too, later in the step.
        """

    def observe(self, slots: Int64Array, token_ids: Int32Array, offsets: Int64Array) -> None:
        """Tokens that were committed since the last call: `token_ids[offsets[b] : offsets[b + 1]]` to `slots[b]`."""

    def observe_top(self, slots: Int64Array, token_ids: Int32Array, offsets: Int64Array, top: TopTokens) -> None:
        """In place of `observe` where the tokens were sampled now: row i of `top` is likely in place of token i.

        Called where `num_top` is not 0 and the engine's runner offers it.
        """
        self.observe(slots, token_ids, offsets)

    def learn_deferred(self) -> None:
        """The next step was launched: learn the rest that its `propose` did not wait for. A GPU computes meanwhile."""

    def foresee(self, slots: Int64Array, trees: DraftTrees) -> None:
        """A GPU verifies these trees of the slots of the last `propose`: there is time to draft ahead for the next."""

    def finish(self, slots: Sequence[int], completions: Sequence[Completion | None]) -> None:
        """Samples leave their slots; None: given up (preempted, or an interrupted rollout), or a run-ahead."""

    def learn(self, completions: Sequence[Completion]) -> None:
        """Completed samples from elsewhere (recorded rollouts), which had no slot."""

    def learn_texts(self, texts: TextsByKey) -> None:
        """Texts that samples of this step or the next may repeat: they were decoded early, on the same RNG keys."""

    def new_texts(self) -> TextsByKey:
        """The texts that were learned in this step, for the drafters of other ranks."""
        return {}

    def expected_tokens(self, request: Request) -> float | None:
        """Expected number of tokens of a sample's response, None if unknown: long ones are admitted early."""
        return None

    def end_step(self) -> None:
        """A training step has ended, with or without a policy update; texts that were learned stay valid."""

    def take_metrics(self) -> dict[str, float]:
        """Metrics of the drafter's own since the last call, all under `engine/`.

        With several ranks they are means over the ranks, but for the sums that `summed_metrics` names.
        """
        return {}

    def save(self, folder: Path) -> None:
        """Write what shall survive into files in the folder (a checkpoint's), no sample being live."""

    def load(self, folder: Path) -> None:
        """Read what `save` wrote; a folder without it (of another drafter) leaves the drafter empty.

        Raises:
            ValueError: It cannot be used; the resume is refused.
        """


def key_of(request: Request) -> PromptKey:
    """Samples with the same key have the same prompt and purpose."""
    return request.purpose, request.prompt_token_ids


def resolve_drafter(option: str, name: str) -> type[DrafterBase]:
    """The class of the drafter `name`, ours or `package.module:Class`; ValueError, naming `option`, if it is none."""
    try:
        drafter_class = resolve_class("srtrl.drafters", name, "Drafter")
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from error
    if not (isinstance(drafter_class, type) and issubclass(drafter_class, DrafterBase)):
        raise ValueError(f"{option}: `{name}` is no drafter; expected a subclass of {__name__}:DrafterBase")
    return drafter_class


def end_to_end(texts: Sequence[Sequence[int] | Int32Array]) -> tuple[Int32Array, Int64Array]:
    """Texts end to end, and where each begins and the last one ends, as `DrafterBase.observe` takes them."""
    parts = [np.array(text, np.int32) for text in texts]
    return np.concatenate([np.zeros(0, np.int32), *parts]), np.cumsum([0, *map(len, parts)], dtype=np.int64)
