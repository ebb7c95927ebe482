"""`srtrl bench train`: the drafters in whole training steps of a recipe, update included."""

from pathlib import Path
from typing import Annotated

import typer


def command(
    *,
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="The recipe, a YAML file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="Changes to the recipe.")
    ] = None,
    drafters: Annotated[
        str, typer.Option(metavar="NAME,NAME,...", help="Compare these drafters with the first of them.")
    ] = "none,srt",
    slots: Annotated[
        str | None, typer.Option(metavar="N[,N...]", help="Decode slots; one comparison each. [default: the recipe's]")
    ] = None,
    control: Annotated[
        bool, typer.Option("--control", help="Compare the first drafter with itself, too: the interval should cover 1.")
    ] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write every step's seconds here, too.")] = None,
    write_docs: Annotated[
        Path | None, typer.Option(help="Put the result into this Markdown file, in place of an older one.")
    ] = None,
) -> None:
    """Train the recipe once with each drafter and number of slots, step by step in turns, and compare the times.

    All runs must learn the same: on a CPU that is checked after every step. What they write is thrown away, and nothing
    is evaluated. Epochs are told apart, for a drafter learns from the epochs before.
    """
    from srtrl.bench.rollout_options import check_output, parse_counts, parse_names

    names = parse_names("--drafters", drafters)
    counts = parse_counts("--slots", slots) if slots is not None else None
    check_output("--json", json_file)
    check_output("--write-docs", write_docs)

    from srtrl.bench.tables import print_document, put_section
    from srtrl.bench.train_run import measure
    from srtrl.metrics import write_atomic

    document = measure(recipe, overrides or (), drafters=names, slots=counts, control=control)
    print_document(document)
    if json_file is not None:
        write_atomic(json_file, document.to_json())
    if write_docs is not None:
        put_section(write_docs, document.to_markdown())
