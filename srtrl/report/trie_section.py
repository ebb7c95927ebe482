"""The part of a report about one prompt: the picture of its trie, and a later rollout decode step by decode step."""

from dataclasses import dataclass

from srtrl.report.drawing import Chart
from srtrl.report.prompt_history import find_rollouts, most_sampled_prompt, open_tokenizer, read_history
from srtrl.report.run_data import RunData
from srtrl.report.trie_picture import NUM_BRANCHES, draw_trie
from srtrl.report.trie_view import DRAFT_NODES, END_SIGN, TrieView, min_score_of, text_decoder, view_trie

MAX_DEPTH = 2048
"""Tokens from the start of the response up to which branches are looked at."""
MIN_STEPS = 2
"""Of the steps that sampled the prompt: those before the last are the history."""


@dataclass(frozen=True, slots=True)
class TrieSection:
    """What the page shows of a prompt's trie."""

    picture: Chart
    title: str
    note: str
    parts: list[tuple[int, str]]
    """Number of tokens and text of each decode step of the later rollout."""


def look_at_trie(run: RunData) -> TrieSection | None:
    """The trie of the prompt with the most rollouts; None where no prompt was sampled in two steps yet."""
    files = find_rollouts(run.folder)
    prompt_id = most_sampled_prompt(files, min_steps=MIN_STEPS)
    history = read_history(files, prompt_id) if prompt_id is not None else None
    if history is None:
        return None
    view = view_trie(history, min_score=min_score_of(run.recipe), num_branches=NUM_BRANCHES, max_depth=MAX_DEPTH)
    try:
        tokenizer = open_tokenizer(run.folder)
    except ValueError:  # the report must not fail because a model was moved: it shows token ids instead
        tokenizer = None
    decode = text_decoder(tokenizer, special=END_SIGN)
    return TrieSection(
        picture=draw_trie(view, decode),
        title=f"Step {history.later.step}, sample {history.later.sample_index}, in decode steps",
        note=_note(view),
        parts=[(len(step.token_ids), decode(step.token_ids)) for step in view.steps],
    )


def _note(view: TrieView) -> str:
    return (
        f"The same rollout decoded again with drafts of up to {DRAFT_NODES} nodes from that trie: each number is the "
        f"tokens of one decode step. {len(view.history.later.token_ids)} tokens in {len(view.steps)} steps, "
        f"{view.tokens_per_step:.2f} a step, with {view.verified_per_step:.1f} verified."
    )
