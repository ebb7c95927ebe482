"""One prompt's rollouts as a tree of branches, and the decode steps of a later rollout with drafts from them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from srtrl.bench.recorded import RecordedPrompt, Recording, feed_drafter, find_extensions
from srtrl.bench.replay_loop import LiveSample, Replay, ReplayCounts, ReplaySettings
from srtrl.drafters.srt import Drafter
from srtrl.report.runs import Run, find_rollouts, read_rollouts, steps_by_prompt


@dataclass(kw_only=True, slots=True, frozen=True)
class PromptHistory:
    """Rollouts of one prompt, and a later one."""

    text: str
    """Of the prompt."""
    earlier: RecordedPrompt
    """By step, draw and sample; no sample where the prompt has only one rollout."""
    earlier_steps: Sequence[int]
    """The training step of each."""
    later: RecordedPrompt
    """One sample, after all of `earlier`: of a later step, or else their sibling."""
    later_name: str


@dataclass(kw_only=True, slots=True, eq=False)
class Branch:
    """Tokens in a row after which rollouts part, or end."""

    token_ids: list[int]
    end: int
    """Tokens from the start of the response to the end of the branch."""
    count: int
    """Earlier rollouts that have these tokens here; 0 for a text that only the later rollout has."""
    is_taken: bool
    """Whether the later rollout has them, too."""
    num_hidden: int = 0
    """Earlier rollouts that continue in a way that is not shown."""
    children: list["Branch"] = field(default_factory=list)
    """The one that the later rollout took, then those with the largest counts."""


def read_history(run: Run, prompt_id: str | None = None, step: int | None = None) -> PromptHistory:
    """Read a prompt's rollouts up to `step`.

    Args:
        run: The run.
        prompt_id: The prompt; by default the one with the most rollouts (in the steps that include `step`).
        step: Its first sample is the later rollout; by default the last step that sampled the prompt. If no step
            before it did, its last sample is the later rollout and the others are the earlier ones.

    Raises:
        ValueError: The run has no rollouts, or none of the prompt (in the step): the message lists those that exist.
    """
    files = find_rollouts(run, step, prompt_id)
    if prompt_id is None:
        steps_of = steps_by_prompt(files)
        candidates = [name for name, steps in steps_of.items() if step is None or step in steps]
        prompt_id = max(candidates, key=lambda name: (len(steps_of[name]), steps_of[name][-1]))
        files = {number: files[number] for number in steps_of[prompt_id]}
    step = list(files)[-1] if step is None else step
    rows = []
    for number in (number for number in files if number <= step):
        table = read_rollouts(files[number], prompt_id=prompt_id)
        order = [("draw_index", "ascending"), ("sample_index", "ascending")]
        rows += [{**row, "step": number} for row in table.sort_by(order).to_pylist()]
    num_earlier = sum(row["step"] < step for row in rows) or len(rows) - 1
    parts = [find_extensions(row.get("segment_kinds") or (), row.get("segment_lengths") or ()) for row in rows]
    samples = [np.array(row["token_ids"], np.int32) for row in rows]
    earlier = RecordedPrompt(
        prompt_id=prompt_id,
        prompt_token_ids=tuple(rows[0]["prompt_token_ids"]),
        samples=samples[:num_earlier],
        extensions=dict(enumerate(parts[:num_earlier])),
    )
    return PromptHistory(
        text=rows[0]["prompt"],
        earlier=earlier,
        earlier_steps=[row["step"] for row in rows[:num_earlier]],
        later=replace(earlier, samples=[samples[num_earlier]], extensions={0: parts[num_earlier]}),
        later_name=f"step {step}, sample {rows[num_earlier]['sample_index']}",
    )


def grow_branches(history: PromptHistory, num_branches: int) -> Branch:
    """The tree of the rollouts; its root has no tokens.

    Args:
        history: The rollouts.
        num_branches: Maximum number of branches with earlier rollouts: those of the later rollout first, up to half of
            them, then those with the largest counts.
    """
    later = history.later.samples[0].tolist()
    root = Branch(token_ids=[], end=0, count=len(history.earlier.samples), is_taken=True)
    waiting = [(root, [*(sample.tolist() for sample in history.earlier.samples), later])]
    while waiting:
        parent, texts = waiting.pop()
        following: dict[int, list[list[int]]] = {}
        for text in texts:
            if len(text) > parent.end:
                following.setdefault(text[parent.end], []).append(text)
        for group in following.values():
            first, end, is_taken = group[0], parent.end + 1, any(text is later for text in group)
            while all(text[end : end + 1] == first[end : end + 1] != [] for text in group):
                end += 1
            child = Branch(token_ids=first[parent.end : end], end=end, count=len(group) - is_taken, is_taken=is_taken)
            parent.children.append(child)
            waiting.append((child, group))
    known = sorted((branch for branch in _below(root) if branch.count), key=lambda branch: -branch.count)
    taken = sorted((branch for branch in known if branch.is_taken), key=lambda branch: branch.end)[: num_branches // 2]
    shown = set([*taken, *(branch for branch in known if branch not in taken)][:num_branches])
    for branch in [root, *_below(root)]:
        hidden = [child for child in branch.children if child.count and child not in shown]
        branch.num_hidden = sum(child.count for child in hidden)
        branch.children = [child for child in branch.children if child not in hidden]
        branch.children.sort(key=lambda child: (not child.is_taken, -child.count))
    return root


def _below(root: Branch) -> Iterator[Branch]:
    """All branches, parents first."""
    waiting = [*root.children]
    while waiting:
        branch = waiting.pop()
        waiting += branch.children
        yield branch


class _LoggedReplay(Replay):
    """A replay of one sample that keeps the tokens of each decode step."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__(drafter, ReplaySettings())
        self.steps: list[list[int]] = []

    def _decode_step(self, live: Sequence[LiveSample]) -> None:
        [sample] = live
        start, num_tokens = sample.num_committed, self.counts.num_tokens
        super()._decode_step(live)
        self.steps.append(sample.tokens[start : start + self.counts.num_tokens - num_tokens].tolist())


def replay_later(history: PromptHistory) -> tuple[list[list[int]], ReplayCounts]:
    """The tokens of each decode step of the later rollout, and the counts; its first token is given."""
    drafter = Drafter()
    feed_drafter(drafter, [history.earlier], "train")
    replay = _LoggedReplay(drafter)
    replay.run(Recording(path=Path(), steps=[[history.later]], is_retokenised=False, num_cut=0))
    return replay.steps, replay.counts
