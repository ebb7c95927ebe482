"""`srtrl trie`: a rollout, decoded again with drafts from its prompt's trie, in text."""

from pathlib import Path
from typing import Annotated

import typer


def command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    *,
    prompt: Annotated[
        str | None, typer.Option(metavar="ID", help="The prompt. [default: the one with the most rollouts]")
    ] = None,
) -> None:
    """Show how well a prompt's trie drafts.

    The trie is built from the prompt's rollouts of all steps but the last (if there is one, from its other samples).
    The first rollout of the last step is decoded again with drafts from it. At a fork on this rollout's path you see
    what the drafter knows of each next token.
    """
    from srtrl.report.runs import read_run
    from srtrl.report.trie_view import print_history, read_history, text_decoder

    read = read_run(run)
    print_history(read_history(read, prompt), text_decoder(read))
