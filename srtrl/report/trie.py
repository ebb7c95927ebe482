"""`srtrl trie`: one prompt's trie, and how a later rollout went through it, in text."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.text import Text
    from rich.tree import Tree

    from srtrl.report.runs import Run
    from srtrl.report.trie_view import Branch, PromptHistory

LABEL_CHARACTERS = 72
"""Longest text of a branch; of a longer one the middle is left out."""
END_SIGN = "∎"
"""Stands for special tokens: mostly the end of a response."""

Decode = Callable[[Sequence[int]], str]
"""Token ids -> text."""


def command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    *,
    prompt: Annotated[
        str | None, typer.Option(metavar="ID", help="The prompt. [default: the one with the most rollouts]")
    ] = None,
    step: Annotated[
        int | None, typer.Option(min=1, help="Step of the later rollout. [default: the last that sampled the prompt]")
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, help="Maximum number of branches to show.")] = 40,
) -> None:
    """Show the trie of a prompt, and how well it drafts a later rollout.

    The trie is built from the prompt's rollouts of all steps before STEP (if there are none, from the other samples of
    STEP). Shown are its most frequent branches from the start of the response, and the path of the first rollout of
    STEP. Then this rollout is decoded again with drafts from the trie.
    """
    from srtrl.report.runs import read_run
    from srtrl.report.trie_view import read_history

    read = read_run(run)
    print_history(read_history(read, prompt, step), text_decoder(read), nodes)


def text_decoder(run: "Run") -> Decode:
    """A function from tokens to their text, with `END_SIGN` for special tokens.

    The tokenizer is that of the run's newest checkpoint, else of its recipe's model.

    Raises:
        ValueError: It cannot be loaded.
    """
    from srtrl.model.weights import load_tokenizer
    from srtrl.run.checkpoint import latest_checkpoint

    of_run = latest_checkpoint(run.folder / "checkpoints") or run.recipe.model.tokenizer or run.recipe.model.path
    tokenizer = load_tokenizer(str(of_run))
    special = sorted(tokenizer.all_special_tokens, key=len, reverse=True)

    def decode(token_ids: Sequence[int]) -> str:
        text = str(tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))
        for token in special:
            text = text.replace(token, END_SIGN)
        return text

    return decode


def print_history(history: "PromptHistory", decode: Decode, num_branches: int) -> None:
    """Print the prompt, the branches and the decode steps."""
    from rich.console import Console
    from rich.text import Text

    from srtrl.report.trie_view import grow_branches, replay_later

    console = Console(soft_wrap=True, highlight=False)
    earlier, [later] = history.earlier.samples, history.later.samples
    console.print(Text(f"prompt {history.earlier.prompt_id}", "bold"))
    console.print(Text(history.text.rstrip("\n")))
    steps = ", ".join(map(str, dict.fromkeys(history.earlier_steps))) or "(none)"
    num_tokens = sum(map(len, earlier))
    console.print(
        f"\ntrie of the earlier rollouts, {len(earlier)} of steps {steps}: {num_tokens:,} tokens", style="bold"
    )
    console.print(f"Each branch with its number of rollouts; * is the path of {history.later_name}.")
    console.print(_tree(grow_branches(history, num_branches), decode))
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


def _tree(root: "Branch", decode: Decode) -> "Tree":
    """The branches as rich draws a tree."""
    from rich.tree import Tree

    tree = Tree(f"{root.count}  (start of the response)")
    waiting = [(tree, root)]
    while waiting:
        parent, branch = waiting.pop()
        waiting += [(parent.add(_label(child, decode)), child) for child in branch.children]
        if branch.num_hidden:
            parent.add(f"[dim]{branch.num_hidden} more[/dim]")
    return tree


def _label(branch: "Branch", decode: Decode) -> "Text":
    from rich.text import Text

    line = on_one_line(decode(branch.token_ids), LABEL_CHARACTERS)
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
