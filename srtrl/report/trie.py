"""`srtrl trie`: one prompt's trie, and how a later rollout went through it, in text."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.text import Text
    from rich.tree import Tree

    from srtrl.report.runs import Run
    from srtrl.report.trie_view import Branch, Decode, PromptHistory, TrieView

LABEL_CHARACTERS = 72
"""Longest text of a branch; of a longer one the middle is left out."""
END_SIGN = "∎"
"""Stands for special tokens where people read: mostly the end of a response."""


def command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    *,
    prompt: Annotated[
        str | None, typer.Option(metavar="ID", help="The prompt. [default: the one with the most rollouts]")
    ] = None,
    step: Annotated[
        int | None, typer.Option(min=1, help="Step of the later rollout. [default: the last that sampled the prompt]")
    ] = None,
    depth: Annotated[int, typer.Option(min=1, help="Maximum depth, in tokens from the start of the response.")] = 128,
    nodes: Annotated[int, typer.Option(min=1, help="Maximum number of branches to show.")] = 40,
    tokenizer: Annotated[
        str | None, typer.Option(metavar="DIR", help="Folder or hub name of the tokenizer. [default: the run's]")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the trie of a prompt, and how well it drafts a later rollout.

    The trie is built from the prompt's rollouts of all steps before STEP (if there are none, from the other samples of
    STEP). Shown are its most frequent branches from the start of the response, and the path of the first rollout of
    STEP. Then this rollout is decoded again with drafts from the trie.
    """
    from srtrl.report.runs import read_run
    from srtrl.report.trie_view import read_history, view_trie

    read = read_run(run)
    history = read_history(read, prompt, step)
    decode = text_decoder(read, tokenizer, special=None if as_json else END_SIGN)
    view = view_trie(history, decode, num_branches=nodes, max_depth=depth)
    if as_json:
        print(json.dumps(as_record(history, view, decode)))
    else:
        print_view(history, view)


def text_decoder(run: "Run", tokenizer_path: str | None, *, special: str | None) -> "Decode":
    """How tokens read; special ones become `special`, or stay.

    The tokenizer is that at `tokenizer_path`, else the run's: that of its newest checkpoint, or of its recipe's model.

    Raises:
        ValueError: It cannot be loaded.
    """
    from srtrl.model.weights import load_tokenizer
    from srtrl.run.checkpoint import latest_checkpoint

    own = latest_checkpoint(run.folder / "checkpoints") or run.recipe.model.tokenizer or run.recipe.model.path
    tokenizer = load_tokenizer(str(own) if tokenizer_path is None else tokenizer_path)
    replaced = [] if special is None else sorted(tokenizer.all_special_tokens, key=len, reverse=True)

    def decode(token_ids: Sequence[int]) -> str:
        text = str(tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))
        for token in replaced:
            text = text.replace(token, special or "")
        return text

    return decode


def as_record(history: "PromptHistory", view: "TrieView", decode: "Decode") -> dict[str, Any]:
    """What `--json` prints."""
    return {
        "prompt_id": history.prompt_id,
        "prompt": history.prompt,
        "history": [{"step": one.step, "sample_index": one.sample_index} for one in history.earlier],
        "trie": view.trie,
        "root": asdict(view.root),
        "later": {**asdict(history.later), "text": decode(history.later.token_ids)},
        "decode_steps": [asdict(step) for step in view.steps],
        "tokens_per_step": view.tokens_per_step,
        "verified_per_step": view.verified_per_step,
    }


def print_view(history: "PromptHistory", view: "TrieView") -> None:
    """Print the prompt, the branches and the decode steps."""
    from rich.console import Console
    from rich.text import Text

    from srtrl.report.trie_view import DRAFT_NODES

    console = Console(soft_wrap=True, highlight=False)
    later = history.later
    name = f"step {later.step}, sample {later.sample_index}"
    console.print(Text(f"prompt {history.prompt_id}"), style="bold")
    console.print(Text(history.prompt.rstrip("\n")))
    size = ", ".join(f"{count:,} {what.removeprefix('num_')}" for what, count in view.trie.items())
    steps = ", ".join(dict.fromkeys(str(rollout.step) for rollout in history.earlier)) or "(none)"
    console.print(f"\ntrie of the earlier rollouts, {len(history.earlier)} of steps {steps}: {size}", style="bold")
    console.print(f"Each branch with its number of rollouts; * is the way of {name}.")
    console.print(_tree(view.root))
    console.print(f"\n{name}, decoded with drafts of up to {DRAFT_NODES} nodes", style="bold")
    decoded = [
        Text.assemble((f"[{len(step.token_ids)}] ", "dim"), (on_one_line(step.text), "cyan" if number % 2 else ""))
        for number, step in enumerate(view.steps)
    ]
    console.print(Text(" | ", "dim").join(decoded))
    num_tokens = sum(len(step.token_ids) for step in view.steps)
    if num_read := sum(stop - start for start, stop in later.extensions):
        console.print(f"(what tools said between the turns, {num_read} tokens, is read and not decoded)")
    console.print(
        f"{num_tokens} tokens in {len(view.steps)} decode steps: {view.tokens_per_step:.2f} per step, "
        f"{view.verified_per_step:.1f} verified"
    )


def _tree(root: "Branch") -> "Tree":
    """The branches as rich draws a tree."""
    from rich.tree import Tree

    def add(parent: Tree, branch: "Branch") -> None:
        for child in branch.children:
            add(parent.add(_label(child)), child)
        if branch.num_hidden:
            parent.add(f"[dim]{branch.num_hidden} more[/dim]")

    tree = Tree(f"{root.count}  (start of the response)")
    add(tree, root)
    return tree


def _label(branch: "Branch") -> "Text":
    from rich.text import Text

    line = on_one_line(branch.text, LABEL_CHARACTERS)
    if branch.count == 0:
        return Text(f"* new: {line}", "bold magenta")
    return Text(f"* {branch.count}  {line}", "bold green") if branch.is_taken else Text(f"{branch.count}  {line}")


def on_one_line(text: str, max_characters: int | None = None) -> str:
    """The text on one line, line ends shown, the middle left out where it is longer than `max_characters`."""
    line = "".join("⏎" if character == "\n" else character if character.isprintable() else "·" for character in text)
    if max_characters is None or len(line) <= max_characters:
        return line
    tail = max_characters // 3
    return f"{line[: max_characters - tail - 1]}…{line[-tail:]}"
