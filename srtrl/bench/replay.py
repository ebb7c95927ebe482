"""`srtrl replay`: the decode steps that a drafter would have saved on recorded rollouts."""

from pathlib import Path
from typing import Annotated

import typer

from srtrl.recipe.schema import MAX_WIDTH


def replay(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="Rollouts: JSONL, a run's folder, or a Parquet file of its rollouts/."),
    ],
    *,
    tokenizer: Annotated[
        str | None, typer.Option(metavar="DIR", help="Folder or hub name of the tokenizer, if FILE has texts.")
    ] = None,
    drafter: Annotated[str, typer.Option(metavar="NAME", help="The drafter, as in rollout.drafter.")] = "srt",
    drafter_options: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="An option of the drafter; may be given more than once."),
    ] = None,
    draft_budget: Annotated[int, typer.Option(min=0, max=MAX_WIDTH, help="Maximum nodes of a draft.")] = 16,
    history: Annotated[
        float, typer.Option(metavar="SHARE", help="Share of each prompt's samples that the drafter knows.")
    ] = 0.0,
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Maximum number of tokens of a sample; the rest is dropped.")
    ] = 4000,
    noise: Annotated[
        bool, typer.Option(help="Draft with the noise of the samples, which is known where FILE is of a run of ours.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Count the decode steps that drafts would save.

    Recorded rollouts are decoded again, step by step. No model is needed: the tokens are known, and drafts are
    compared with them. The first token of each sample is not drafted. The output of tools between the turns of a
    sample is read and not counted. The steps of a run are replayed in order, so each is history for the next; every
    FILE begins with an empty drafter.
    """
    from srtrl.bench.replay_loop import ReplaySettings, replay_files

    if not 0 <= history < 1:
        raise ValueError(f"--history: expected a share of at least 0 and below 1, found {history}")
    settings = ReplaySettings(
        drafter=drafter,
        drafter_options=drafter_options or (),
        draft_budget=draft_budget,
        history=history,
        tokenizer=tokenizer,
        max_tokens=max_tokens,
        noise=noise,
    )
    replay_files(files, settings, as_json=as_json)
