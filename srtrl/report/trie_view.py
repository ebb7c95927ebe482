"""One prompt's trie as people look at it: its most travelled branches, and how a later rollout went through it."""

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from srtrl.bench.recorded import Extensions, find_extensions
from srtrl.bench.replay_loop import count_accepted
from srtrl.drafters.srt import SrtOptions
from srtrl.drafters.suffix_automaton import START_TOKEN
from srtrl.drafters.token_trie import TokenTrie, TrieCursors
from srtrl.drafters.trie_draft import BLEND, draft_trees
from srtrl.report.runs import Run, read_rollouts, saved_rollouts, steps_by_prompt, steps_of_prompt

DRAFT_NODES = 16
"""Nodes of a draft in the replay of the later rollout."""

Decode = Callable[[Sequence[int]], str]
"""Token ids -> text."""


@dataclass(kw_only=True, slots=True, frozen=True)
class PastRollout:
    """One sample of a prompt."""

    step: int
    sample_index: int
    token_ids: list[int]
    """Response tokens."""
    extensions: Extensions = ()
    """What tools said, and the format around it: read, not decoded."""

    @property
    def texts(self) -> list[list[int]]:
        """What is read before a turn and the turn itself, for each turn: a text of its own in the trie."""
        starts = [0, *(start for start, _ in self.extensions), len(self.token_ids)]
        return [self.token_ids[start:end] for start, end in itertools.pairwise(starts)]


@dataclass(kw_only=True, slots=True, frozen=True)
class PromptHistory:
    """Rollouts of one prompt, and a later one."""

    prompt_id: str
    prompt: str
    earlier: list[PastRollout]
    """By step, draw and sample; empty where the prompt has only one rollout."""
    later: PastRollout
    """Sampled after all of `earlier`: in a later step, or else their sibling."""


@dataclass(kw_only=True, slots=True)
class Branch:
    """Tokens in a row after which rollouts part, or end."""

    token_ids: list[int]
    text: str
    count: int
    """Earlier rollouts that have these tokens here; 0 for what only the later rollout has."""
    is_taken: bool
    """Whether the later rollout went this way."""
    num_hidden: int = 0
    """Earlier rollouts that continue in a way that is not shown."""
    children: list["Branch"] = field(default_factory=list)
    """The one that the later rollout took, then the most travelled first."""


@dataclass(kw_only=True, slots=True, frozen=True)
class DecodedStep:
    """What one decode step would have given of the later rollout."""

    token_ids: list[int]
    """The accepted tokens of the draft, and the bonus token."""
    text: str
    num_drafted: int


@dataclass(kw_only=True, slots=True, frozen=True)
class TrieView:
    """A prompt's trie and a later rollout's way through it."""

    trie: dict[str, int]
    """`num_tokens`, `num_states` and `num_bytes` before the later rollout."""
    root: Branch
    """No tokens: the start of the response."""
    steps: list[DecodedStep]

    @property
    def tokens_per_step(self) -> float:
        """Tokens of the later rollout for each decode step."""
        return sum(len(step.token_ids) for step in self.steps) / max(1, len(self.steps))

    @property
    def verified_per_step(self) -> float:
        """Verified tokens, the root included, for each decode step."""
        return 1 + sum(step.num_drafted for step in self.steps) / max(1, len(self.steps))


def read_history(run: Run, prompt_id: str | None = None, step: int | None = None) -> PromptHistory:
    """Read a prompt's rollouts up to `step`.

    Args:
        run: The run.
        prompt_id: The prompt; by default the one with the most rollouts (in the steps that include `step`).
        step: Whose first sample is the later rollout; by default the last step that sampled the prompt. If no step
            before it did, its last sample is the later rollout and the others are the earlier ones.

    Raises:
        ValueError: The run has no rollouts, or none of the prompt (in the step): says what there is.
    """
    files = saved_rollouts(run, step)
    steps_of = steps_by_prompt(files)
    if prompt_id is None:
        candidates = [name for name, steps in steps_of.items() if step is None or step in steps]
        prompt_id = max(candidates, key=lambda name: (len(steps_of[name]), steps_of[name][-1]))
    steps = steps_of_prompt(run, steps_of, prompt_id, step)
    step = steps[-1] if step is None else step
    rows = []
    for number in (one for one in steps if one <= step):
        table = read_rollouts(files[number], prompt_id=prompt_id)
        order = [("draw_index", "ascending"), ("sample_index", "ascending")]
        rows += [{**row, "step": number} for row in table.sort_by(order).to_pylist()]
    rollouts = [
        PastRollout(
            **{name: row[name] for name in ("step", "sample_index", "token_ids")},
            extensions=find_extensions(row.get("segment_kinds") or (), row.get("segment_lengths") or ()),
        )
        for row in rows
    ]
    num_earlier = sum(rollout.step < step for rollout in rollouts) or len(rollouts) - 1
    return PromptHistory(
        prompt_id=prompt_id,
        prompt=rows[0]["prompt"],
        earlier=rollouts[:num_earlier],
        later=rollouts[num_earlier],
    )


def view_trie(history: PromptHistory, decode: Decode, *, num_branches: int, max_depth: int) -> TrieView:
    """Build the trie of the earlier rollouts, look at it, then replay the later rollout with it.

    Args:
        history: The rollouts.
        decode: How their tokens read.
        num_branches: Maximum number of branches: those on the later rollout's way first, up to half of them, then those
            that most rollouts took.
        max_depth: Longest way from the start of the response, in tokens.
    """
    trie = TokenTrie()
    for rollout in history.earlier:
        for text in rollout.texts:
            trie.insert(text)
    size = {"num_tokens": trie.num_tokens, "num_states": trie.num_states, "num_bytes": trie.num_bytes}
    root = _grow(history, decode, num_branches, max_depth)
    return TrieView(trie=size, root=root, steps=_replay(trie, history.later, decode))


def _grow(history: PromptHistory, decode: Decode, num_branches: int, max_depth: int) -> Branch:
    """The root of the branches to show, found by a best-first search; new text of the later rollout always is shown."""
    way = list(history.later.token_ids)
    root = Branch(token_ids=[], text="", count=len(history.earlier), is_taken=True)
    waiting: list[tuple[bool, int, int, Branch, list[list[int]], int, int]] = []
    order = itertools.count()

    def add_candidates(branch: Branch, rollouts: list[list[int]], depth: int, num_forks: int) -> None:
        """Queue the ways in which the rollouts of a branch that ends at `depth` continue."""
        following: dict[int, list[list[int]]] = {}
        for rollout in rollouts:
            if len(rollout) > depth:
                following.setdefault(rollout[depth], []).append(rollout)
        for group in following.values():
            is_taken = way in group
            count = len(group) - is_taken
            comes_first = is_taken and (count == 0 or num_forks < num_branches // 2)
            heapq.heappush(waiting, (not comes_first, -count, next(order), branch, group, depth, num_forks + 1))

    add_candidates(root, [*(rollout.token_ids for rollout in history.earlier), way], 0, 0)
    num_shown = 0
    while waiting:
        _, negative_count, _, parent, group, depth, num_forks = heapq.heappop(waiting)
        count = -negative_count
        if count and (num_shown == num_branches or depth >= max_depth):
            parent.num_hidden += count
            continue
        num_shown += count > 0
        first, end, limit = group[0], depth + 1, max_depth if count else len(way)
        while end < limit and all(rollout[end : end + 1] == first[end : end + 1] != [] for rollout in group):
            end += 1
        child = Branch(token_ids=first[depth:end], text=decode(first[depth:end]), count=count, is_taken=way in group)
        parent.children.append(child)
        add_candidates(child, group, end, num_forks)
    return root


def _replay(trie: TokenTrie, rollout: PastRollout, decode: Decode) -> list[DecodedStep]:
    """Decode steps that would have given its turns, each token inserted at once as the drafter `srt` does."""
    steps = []
    slots = np.zeros(1, np.int64)
    cursors = TrieCursors()
    cursors.start(slots, [trie], inserts=True)
    num_read = [0, *(stop - start for start, stop in rollout.extensions)]
    for text, size in zip(rollout.texts, num_read, strict=True):
        read, following = np.split(np.array([START_TOKEN, *text], np.int32), [1 + size])
        cursors.extend(slots, read, np.array([0, len(read)]))
        while len(following):
            trees = draft_trees(cursors.arrays, slots, np.full(1, DRAFT_NODES), BLEND, SrtOptions().min_score)
            ends = np.array([0, len(following)])
            [num_accepted] = count_accepted(trees.token_ids, trees.parents, trees.offsets, following, ends)
            given, following = np.split(following, [num_accepted + 1])
            cursors.extend(slots, given, np.array([0, len(given)]))
            tokens = given.tolist()
            steps.append(DecodedStep(token_ids=tokens, text=decode(tokens), num_drafted=trees.num_nodes))
    return steps
