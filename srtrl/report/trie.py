"""`srtrl trie`: one prompt's trie, and how a later rollout went through it, in text."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.text import Text
    from rich.tree import Tree

    from srtrl.report.trie_view import Branch, Decode, TrieView

LABEL_CHARACTERS = 72
"""Longest text of a branch; of a longer one the middle is left out."""
TAKEN, NEW = "bold green", "bold magenta"
STEP_STYLES = ("", "cyan")


def command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    *,
    prompt: Annotated[
        str | None, typer.Option(metavar="ID", help="The prompt. [default: the one with the most rollouts]")
    ] = None,
    step: Annotated[
        int | None, typer.Option(min=1, help="Step of the later rollout. [default: the last that sampled the prompt]")
    ] = None,
    depth: Annotated[int, typer.Option(min=1, help="How far to look, in tokens from the response's start.")] = 128,
    nodes: Annotated[int, typer.Option(min=1, help="Most branches to show.")] = 40,
    tokenizer: Annotated[
        str | None, typer.Option(metavar="DIR", help="Folder or hub name of the tokenizer. [default: the run's]")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Show the trie of a prompt and what it brings.

    The trie is built from the prompt's rollouts of all steps before STEP (where there is none, from the later rollout's
    siblings). Its most travelled branches from the start of the response are shown, and the way that the first rollout
    of STEP took; then that rollout is decoded again with drafts from the trie.
    """
    from srtrl.recipe_file import load_recipe
    from srtrl.report.prompt_history import open_tokenizer, require_history
    from srtrl.report.trie_view import END_SIGN, min_score_of, text_decoder, view_trie

    history = require_history(run, prompt, step)
    opened = open_tokenizer(run, tokenizer)
    min_score = min_score_of(load_recipe(run / "recipe.yaml"))
    view = view_trie(history, min_score=min_score, num_branches=nodes, max_depth=depth)
    if as_json:
        print(json.dumps(as_record(view, text_decoder(opened))))
    else:
        _print(view, text_decoder(opened, special=END_SIGN))


def as_record(view: "TrieView", decode: "Decode") -> dict[str, Any]:
    """What `--json` prints."""
    history = view.history
    return {
        "prompt_id": history.prompt_id,
        "prompt": history.prompt,
        "history": [{"step": one.step, "sample_index": one.sample_index} for one in history.earlier],
        "trie": {"num_tokens": view.num_tokens, "num_states": view.num_states, "num_bytes": view.num_bytes},
        "root": _branch_record(view.root, decode),
        "later": {
            "step": history.later.step,
            "sample_index": history.later.sample_index,
            "token_ids": history.later.token_ids,
            "text": decode(history.later.token_ids),
        },
        "decode_steps": [
            {"token_ids": step.token_ids, "text": decode(step.token_ids), "num_drafted": step.num_drafted}
            for step in view.steps
        ],
        "tokens_per_step": view.tokens_per_step,
        "verified_per_step": view.verified_per_step,
    }


def _branch_record(branch: "Branch", decode: "Decode") -> dict[str, Any]:
    return {
        "token_ids": branch.token_ids,
        "text": decode(branch.token_ids),
        "count": branch.count,
        "is_taken": branch.is_taken,
        "num_hidden": branch.num_hidden,
        "children": [_branch_record(child, decode) for child in branch.children],
    }


def _print(view: "TrieView", decode: "Decode") -> None:
    from rich.console import Console
    from rich.text import Text

    from srtrl.report.trie_view import DRAFT_NODES, describe_history

    console = Console(soft_wrap=True)
    later = view.history.later
    name = f"step {later.step}, sample {later.sample_index}"
    console.print(Text(f"prompt {view.history.prompt_id}"), style="bold")
    console.print(Text(view.history.prompt.rstrip("\n")))
    console.print(
        f"\ntrie of {describe_history(view.history)}: {view.num_tokens:,} tokens, {view.num_states:,} states, "
        f"{view.num_bytes:,} bytes",
        style="bold",
        highlight=False,
    )
    console.print(f"Each branch with its number of rollouts; * is the way of {name}.", highlight=False)
    console.print(_tree(view.root, decode))
    console.print(f"\n{name}, decoded with drafts of up to {DRAFT_NODES} nodes", style="bold", highlight=False)
    console.print(_steps_text(view, decode))
    console.print(
        f"{len(later.token_ids)} tokens in {len(view.steps)} decode steps: {view.tokens_per_step:.2f} a step, "
        f"{view.verified_per_step:.1f} verified",
        highlight=False,
    )


def _tree(root: "Branch", decode: "Decode") -> "Tree":
    """The branches as rich draws a tree."""
    from rich.tree import Tree

    def add(parent: Tree, branch: "Branch") -> None:
        for child in branch.children:
            add(parent.add(_label(child, decode)), child)
        if branch.num_hidden:
            parent.add(f"[dim]{branch.num_hidden} more[/dim]", highlight=False)

    tree = Tree(f"{root.count}  (start of the response)", highlight=False)
    add(tree, root)
    return tree


def _label(branch: "Branch", decode: "Decode") -> "Text":
    from rich.text import Text

    from srtrl.report.trie_view import one_line

    line = one_line(decode(branch.token_ids), LABEL_CHARACTERS)
    if branch.count == 0:
        return Text(f"* new: {line}", NEW)
    label = f"{branch.count}  {line}"
    return Text(f"* {label}", TAKEN) if branch.is_taken else Text(label)


def _steps_text(view: "TrieView", decode: "Decode") -> "Text":
    """`[7] First, we add 12 and 5 | [3] ...`: the tokens of each decode step."""
    from rich.text import Text

    from srtrl.report.trie_view import one_line

    text = Text()
    for number, step in enumerate(view.steps):
        if number:
            text.append(" | ", "dim")
        text.append(f"[{len(step.token_ids)}] ", "dim")
        shown = decode(step.token_ids)
        text.append(one_line(shown, len(shown)), STEP_STYLES[number % 2])
    return text
