"""One prompt's rollouts as a tree of branches, and the decode steps of a later rollout with drafts from them."""

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from srtrl.bench.recorded import RecordedPrompt, Recording, feed_drafter, make_request, read_recorded
from srtrl.bench.replay_loop import LiveSample, Replay, ReplayCounts, ReplaySettings
from srtrl.drafters.draft_tree import ROOT
from srtrl.drafters.srt import Drafter, SrtOptions
from srtrl.engine.stopping import decode
from srtrl.model.noise import hash_row, uniform_of
from srtrl.model.weights import load_tokenizer
from srtrl.recipe.schema import MAX_WIDTH
from srtrl.report.runs import Run, find_rollouts, steps_by_prompt
from srtrl.run.checkpoint import latest_checkpoint

MAX_FORK = 6
"""Tokens shown of a draft's first ones."""
LABEL_CHARACTERS = 72
"""Longest text of a branch; of a longer one the middle is left out."""
END_SIGN = "∎"
"""Stands for special tokens: mostly the end of a response."""

Decode = Callable[[Sequence[int]], str]
"""Token ids -> text."""


@dataclass(kw_only=True, slots=True, frozen=True)
class PromptHistory:
    """Rollouts of one prompt, and a later one."""

    earlier: RecordedPrompt
    """By step, draw and sample; no sample where the prompt has only one rollout."""
    earlier_steps: Sequence[int]
    """The training steps of these."""
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
    steps = [number for number in files if number <= step]
    recordings = [read_recorded(files[number], tokenizer=None, max_tokens=sys.maxsize) for number in steps]
    found = [next(prompt for prompt in one.prompts() if prompt.prompt_id == prompt_id) for one in recordings]
    [whole] = Recording(steps=[[prompt] for prompt in found], is_retokenised=False, num_cut=0).prompts()
    num_earlier = sum(len(prompt.samples) for prompt in found[:-1]) or len(whole.samples) - 1
    return PromptHistory(
        earlier=replace(whole, samples=whole.samples[:num_earlier]),
        earlier_steps=(steps[:-1] or steps) if num_earlier else [],
        later=replace(
            whole,
            samples=[whole.samples[num_earlier]],
            rng_keys=whole.rng_keys[num_earlier : num_earlier + 1],
            extensions={0: whole.extensions.get(num_earlier, ())},
        ),
        later_name=f"step {step}, sample {0 if len(steps) > 1 else num_earlier}",
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
    feed_drafter(drafter, [history.earlier])
    replay = _LoggedReplay(drafter)
    replay.run(Recording(steps=[[history.later]], is_retokenised=False, num_cut=0))
    return replay.steps, replay.counts


def draft_at_fork(history: PromptHistory) -> tuple[int, list[tuple[int, int, float, float]]]:
    """The draft where the most even fork of earlier rollouts is on the later one's path.

    Returns:
        The number of tokens before the fork, and of each proposed next token: the token, the number of earlier rollouts
        that continued with it, the later rollout's noise of it, and its score. Nothing without a fork or a known noise.
    """
    later = history.later.samples[0].tolist()
    forks = []
    for start in range(1, len(later)):
        same = (one for one in history.earlier.samples if one[:start].tolist() == later[:start] and len(one) > start)
        counts = Counter(int(one[start]) for one in same)
        if len(counts) > 1:
            forks.append((counts.most_common(2)[1][1], -start, counts))
    if not forks or not history.later.rng_keys:
        return 0, []
    _, before, counts = max(forks, key=lambda fork: fork[:2])
    start, [key] = -before, history.later.rng_keys
    drafter, slot = Drafter(SrtOptions(min_score=0)), np.zeros(1, np.int64)
    feed_drafter(drafter, [history.earlier])
    request = replace(make_request(history.later.prompt_token_ids, 0, 0, len(later)), rng_key=key)
    drafter.start(slot, [request])
    drafter.observe(slot, history.later.samples[0][:start], np.array([0, start]))
    [tree] = drafter.propose(slot, slot + MAX_WIDTH)
    row_key = hash_row(np.uint64(key), start)
    return start, [
        (token, counts[token], -math.log(-math.log(uniform_of(row_key, token))), score)
        for token, parent, score in zip(tree.token_ids.tolist(), tree.parents, tree.scores.tolist(), strict=True)
        if parent == ROOT
    ]


@dataclass(kw_only=True, slots=True, frozen=True)
class DecodedResponse:
    """A response in the decode steps that it takes with drafts from the prompt's earlier rollouts."""

    name: str
    prompt_id: str
    num_earlier: int
    """Rollouts that the drafts came from."""
    pieces: list[tuple[str, int]]
    """Text and number of tokens of each step; the first token is of the prompt's forward pass, a step of its own."""

    @property
    def num_tokens(self) -> int:
        """Of the response; observations of an environment are read, not decoded, and do not count."""
        return sum(num_tokens for _, num_tokens in self.pieces)


def decoded_response(run: Run, decode: Decode) -> DecodedResponse:
    """The response that `srtrl trie` shows by default; raises as `read_history` does."""
    history = read_history(run)
    steps = [history.later.samples[0][:1].tolist(), *replay_later(history)[0]]
    return DecodedResponse(
        name=history.later_name,
        prompt_id=history.later.prompt_id,
        num_earlier=len(history.earlier.samples),
        pieces=[(decode(token_ids), len(token_ids)) for token_ids in steps],
    )


# --- Text -------------------------------------------------------------------------------------------------------------


def text_decoder(run: Run) -> Decode:
    """A function from tokens to their text, with `END_SIGN` for special tokens.

    The tokenizer is that of the run's newest checkpoint, else of its recipe's model.

    Raises:
        ValueError: It cannot be loaded.
    """
    of_run = latest_checkpoint(run.folder / "checkpoints") or run.recipe.model.tokenizer or run.recipe.model.path
    tokenizer = load_tokenizer(str(of_run))
    special = sorted(tokenizer.all_special_tokens, key=len, reverse=True)

    def spell(token_ids: Sequence[int]) -> str:
        text = decode(tokenizer, token_ids, clean_up_tokenization_spaces=False)
        for token in special:
            text = text.replace(token, END_SIGN)
        return text

    return spell


def print_history(history: PromptHistory, decode: Decode, num_branches: int) -> None:
    """Print the prompt, the branches and the decode steps."""
    console = Console(soft_wrap=True, highlight=False)
    earlier, [later] = history.earlier.samples, history.later.samples
    console.print(Text(f"prompt {history.earlier.prompt_id}", "bold"))
    console.print(Text(decode(history.earlier.prompt_token_ids).rstrip("\n")))
    steps = ", ".join(map(str, history.earlier_steps)) or "(none)"
    num_tokens = sum(map(len, earlier))
    console.print(
        f"\ntrie of the earlier rollouts, {len(earlier)} of steps {steps}: {num_tokens:,} tokens", style="bold"
    )
    console.print(f"Each branch with its number of rollouts; * is the path of {history.later_name}.")
    console.print(_tree(grow_branches(history, num_branches), decode))
    start, children = draft_at_fork(history)
    if children:
        console.print(f"\nnext token after {start} tokens of {history.later_name}, as drafted", style="bold")
        console.print("rollouts   noise   score")
    for token, count, noise, score in children[:MAX_FORK]:
        text = on_one_line(decode([token]))
        taken = "bold green" if token == later[start] else ""
        console.print(Text(f"{count:8}  {noise:+6.2f}  {score:6.3f}  {text}", taken))
    decoded, counts = replay_later(history)
    console.print(
        f"\n{history.later_name}, decoded with drafts from this trie; each step gave these tokens", style="bold"
    )
    pieces = [Text(on_one_line(decode(later[:1].tolist())), "dim")]  # of the prompt's forward pass
    for number, token_ids in enumerate(decoded):
        shade = "cyan" if number % 2 else ""
        pieces.append(Text.assemble((f"[{len(token_ids)}] ", "dim"), (on_one_line(decode(token_ids)), shade)))
    console.print(Text(" | ", "dim").join(pieces))
    if num_read := sum(stop - start for start, stop in history.later.extensions[0]):
        console.print(f"(the output of tools between the turns, {num_read} tokens, is read and not decoded)")
    num_steps = max(len(decoded), 1)
    console.print(
        f"{counts.num_tokens} tokens in {len(decoded)} decode steps after the first token: "
        f"{counts.num_tokens / num_steps:.2f} per step, {(len(decoded) + counts.num_nodes) / num_steps:.1f} verified"
    )


def _tree(root: Branch, decode: Decode) -> Tree:
    """The branches as rich draws a tree."""
    tree = Tree(f"{root.count}  (start of the response)")
    waiting = [(tree, root)]
    while waiting:
        parent, branch = waiting.pop()
        waiting += [(parent.add(_label(child, decode)), child) for child in branch.children]
        if branch.num_hidden:
            parent.add(f"[dim]{branch.num_hidden} more[/dim]")
    return tree


def _label(branch: Branch, decode: Decode) -> Text:
    line = on_one_line(decode(branch.token_ids))
    if len(line) > LABEL_CHARACTERS:
        line = f"{line[: LABEL_CHARACTERS * 2 // 3]}…{line[-LABEL_CHARACTERS // 3 + 1 :]}"
    if branch.count == 0:
        return Text(f"* new: {line}", "bold magenta")
    return Text(f"* {branch.count}  {line}", "bold green") if branch.is_taken else Text(f"{branch.count}  {line}")


def on_one_line(text: str) -> str:
    """The text on one line, line ends shown."""
    return "".join("⏎" if character == "\n" else character if character.isprintable() else "·" for character in text)
