"""`srtrl bench trie`: how fast tokens enter a token trie and how fast drafts come out."""

from pathlib import Path
from typing import Annotated

import typer


def command(
    *,
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Recorded rollouts: .jsonl, .parquet, a run.")],
    tokenizer: Annotated[str | None, typer.Option(help="Folder or hub name, where FILE holds texts.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each row; medians are shown.")] = 7,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 2,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file, too.")] = None,
    write_docs: Annotated[
        Path | None, typer.Option(help="Put the result into this Markdown file, in place of an older one.")
    ] = None,
) -> None:
    """Measure the token trie on recorded rollouts: insertion, batches of drafts, memory."""
    from srtrl.bench.tables import publish
    from srtrl.bench.trie_run import measure

    publish(measure(files, tokenizer=tokenizer, repeats=repeats, num_threads=threads), json_file, write_docs)
