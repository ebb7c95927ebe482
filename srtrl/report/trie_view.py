"""One prompt's trie as people look at it: its most travelled branches, and how a later rollout went through it."""

import heapq
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from srtrl.drafters.srt import SrtOptions
from srtrl.drafters.suffix_automaton import START_TOKEN, TokenTrie, TrieCursors
from srtrl.drafters.trie_draft import BLEND, draft_trees
from srtrl.recipe import Recipe
from srtrl.report.prompt_history import PromptHistory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DRAFT_NODES = 16
"""Nodes of a draft in the replay of the later rollout."""

Decode = Callable[[Sequence[int]], str]
"""Token ids -> text."""

END_SIGN = "∎"
"""Stands for special tokens where people read: mostly the end of a response."""


@dataclass(slots=True)
class Branch:
    """Tokens in a row after which rollouts part, or end."""

    token_ids: list[int]
    count: int
    """Earlier rollouts that have these tokens here; 0 of what only the later rollout has."""
    is_taken: bool
    """Whether the later rollout went this way."""
    children: list["Branch"] = field(default_factory=list)
    """The one that the later rollout took, then the most travelled first."""
    num_hidden: int = 0
    """Earlier rollouts that go on in a way that is not shown."""


@dataclass(kw_only=True, slots=True, frozen=True)
class DecodedStep:
    """What one decode step would have given of the later rollout."""

    token_ids: list[int]
    """The accepted tokens of the draft, and the bonus token."""
    num_drafted: int


@dataclass(kw_only=True, slots=True, frozen=True)
class TrieView:
    """A prompt's trie and a later rollout's way through it."""

    history: PromptHistory
    num_tokens: int
    """In the trie, before the later rollout."""
    num_states: int
    num_bytes: int
    root: Branch
    """No tokens: the start of the response."""
    steps: list[DecodedStep]

    @property
    def tokens_per_step(self) -> float:
        """Tokens of the later rollout for each decode step."""
        return len(self.history.later.token_ids) / max(1, len(self.steps))

    @property
    def verified_per_step(self) -> float:
        """Verified tokens, the root included, for each decode step."""
        return 1 + sum(step.num_drafted for step in self.steps) / max(1, len(self.steps))


def view_trie(
    history: PromptHistory,
    *,
    min_score: float,
    num_branches: int,
    max_depth: int,
) -> TrieView:
    """Build the trie of the earlier rollouts; look at it, then replay the later rollout with it.

    Args:
        history: The rollouts.
        min_score: Smallest score of a drafted node.
        num_branches: Most branches shown: those on the later rollout's way first, as far as half of them, then those
            that most rollouts took.
        max_depth: Longest way from the start of the response, in tokens.
    """
    trie = TokenTrie()
    for rollout in history.earlier:
        trie.insert(rollout.token_ids)
    size = {"num_tokens": trie.num_tokens, "num_states": trie.num_states, "num_bytes": trie.num_bytes}
    root = _Growth(trie, history, max_depth).grow(num_branches)
    return TrieView(history=history, root=root, steps=_replay(trie, history.later.token_ids, min_score), **size)


def min_score_of(recipe: Recipe) -> float:
    """Smallest score of the run's drafter `srt`; that of its defaults where the run has another drafter."""
    section = recipe.rollout
    return SrtOptions.model_validate(section.drafter_options if section.drafter == "srt" else {}).min_score


def text_decoder(tokenizer: "PreTrainedTokenizerBase | None", *, special: str | None = None) -> Decode:
    """Text of tokens, special ones too, or `special` in their place; numbers where there is no tokenizer."""
    if tokenizer is None:
        return lambda token_ids: "".join(f"<{token}>" for token in token_ids)
    replaced = [] if special is None else sorted(tokenizer.all_special_tokens, key=len, reverse=True)

    def decode(token_ids: Sequence[int]) -> str:
        text = str(tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))
        for token in replaced:
            text = text.replace(token, special or "")
        return text

    return decode


def describe_history(history: PromptHistory) -> str:
    """How many rollouts the trie is built from, and of which steps."""
    counts: dict[int, int] = {}
    for rollout in history.earlier:
        counts[rollout.step] = counts.get(rollout.step, 0) + 1
    if not counts:
        return "no earlier rollout"
    steps = ", ".join(map(str, counts))
    num = len(history.earlier)
    return f"{num} rollout{'s' if num > 1 else ''} of step{'s' if len(counts) > 1 else ''} {steps}"


def one_line(text: str, most: int) -> str:
    """The text on one line, line ends shown, its middle left out where it is longer than `most`."""
    line = "".join("⏎" if character == "\n" else character if character.isprintable() else "·" for character in text)
    if len(line) <= most:
        return line
    tail = most // 3
    return f"{line[: most - tail - 1]}…{line[-tail:]}"


class _Growth:
    """Finds the branches to show, the most wanted first."""

    def __init__(self, trie: TokenTrie, history: PromptHistory, max_depth: int) -> None:
        self._trie = trie
        self._way = history.later.token_ids
        self._max_depth = max_depth
        self._num_rollouts = len(history.earlier)
        self._wanted: list[tuple[bool, int, int, Branch, list[int], int]] = []
        self._order = itertools.count()

    def grow(self, num_branches: int) -> Branch:
        """Return the root of the branches."""
        root = Branch([], self._num_rollouts, is_taken=True)
        self._add_candidates(root, [], 1, num_branches)
        num_shown = 0
        while self._wanted and num_shown < num_branches:
            _, _, _, parent, before, forks = heapq.heappop(self._wanted)
            branch, path = self._follow(before)
            parent.children.append(branch)
            self._add_candidates(branch, path, forks + 1, num_branches)
            num_shown += 1
        for _, negative_count, _, parent, _, _ in self._wanted:
            parent.num_hidden -= negative_count
        self._add_new_text(root)
        return root

    def _follow(self, path: list[int]) -> tuple[Branch, list[int]]:
        """The branch that begins with the last token of `path`, and the path to its end."""
        path = list(path)
        begin = len(path) - 1
        count = self._continuations(path[:-1])[path[-1]]
        is_taken = self._is_taken(path)
        while len(path) < self._max_depth:
            following = self._continuations(path)
            if list(following.values()) != [count]:
                break
            (token,) = following
            if is_taken and not self._is_taken([*path, token]):
                break
            path.append(token)
        return Branch(path[begin:], count, is_taken), path

    def _add_candidates(self, branch: Branch, path: list[int], forks: int, num_branches: int) -> None:
        """Queue the ways that go on from `path`, where they may be shown."""
        following = self._continuations(path)
        if len(path) >= self._max_depth:
            branch.num_hidden = sum(following.values())
            return
        for token, count in following.items():
            onward = [*path, token]
            comes_first = self._is_taken(onward) and forks <= num_branches // 2
            heapq.heappush(self._wanted, (not comes_first, -count, next(self._order), branch, onward, forks))

    def _add_new_text(self, root: Branch) -> None:
        """What the later rollout alone has, where it leaves the trie and that place is shown."""
        branch, depth = root, 0
        while taken := next((child for child in branch.children if child.is_taken), None):
            branch, depth = taken, depth + len(taken.token_ids)
        rest = self._way[depth:]
        if rest and rest[0] not in self._continuations(self._way[:depth]):
            branch.children.insert(0, Branch(rest, 0, is_taken=True))

    def _is_taken(self, path: Sequence[int]) -> bool:
        return self._way[: len(path)] == path

    def _continuations(self, path: Iterable[int]) -> dict[int, int]:
        return self._trie.continuations([START_TOKEN, *path])


def _replay(trie: TokenTrie, token_ids: list[int], min_score: float) -> list[DecodedStep]:
    """Decode steps that would have given these tokens, each of them inserted at once as the drafter does."""
    steps = []
    slots = np.zeros(1, np.int64)
    cursors = TrieCursors()
    cursors.start(slots, [trie], inserts=True)
    cursors.extend(slots, np.array([START_TOKEN], np.int32), np.array([0, 1]))
    done = 0
    while done < len(token_ids):
        tree = draft_trees(cursors.arrays, slots, np.full(1, DRAFT_NODES), BLEND, min_score)[0]
        children = {
            (parent, token): node
            for node, (parent, token) in enumerate(zip(tree.parents.tolist(), tree.token_ids.tolist(), strict=True))
        }
        end, node = done, -1
        while end < len(token_ids):
            node = children.get((node, token_ids[end]), len(children))
            end += 1
            if node == len(children):  # not drafted: the bonus token
                break
        step = DecodedStep(token_ids=token_ids[done:end], num_drafted=tree.num_nodes)
        cursors.extend(slots, np.array(step.token_ids, np.int32), np.array([0, end - done]))
        steps.append(step)
        done = end
    return steps
