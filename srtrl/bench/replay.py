"""`srtrl replay`: what would a drafter have brought to these recorded rollouts?"""

from pathlib import Path
from typing import Annotated, Literal

import typer

from srtrl.recipe.schema import MAX_WIDTH

DEFAULT_BUDGET = 16
"""Nodes of a draft tree where neither `--draft-budget` nor `--min-score` is given."""
MAX_NODES = 128
"""Nodes of a draft tree where only `--min-score` bounds it."""


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
    draft_budget: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=MAX_WIDTH,
            help=f"Maximum nodes of a draft. [default: {DEFAULT_BUDGET}; {MAX_NODES} with --min-score]",
        ),
    ] = None,
    min_score: Annotated[
        float | None,
        typer.Option(min=0, max=1, metavar="P", help="Verify only nodes whose score is at least this."),
    ] = None,
    history: Annotated[
        float, typer.Option(metavar="SHARE", help="Share of each prompt's samples that the drafter knows.")
    ] = 0.0,
    history_as: Annotated[
        Literal["complete", "run-ahead", "none"],
        typer.Option(
            help="What is known of the history: all of it beforehand; what idle slots decoded of it during the step "
            "before (texts on RNG keys of their own); nothing."
        ),
    ] = "complete",
    step_prompts: Annotated[
        int | None, typer.Option(min=1, help="Prompts of a training step. [default: as recorded; JSONL is one step]")
    ] = None,
    slots: Annotated[
        int | None, typer.Option(min=1, max=MAX_WIDTH, help="Sequences decoded at a time. [default: all of one prompt]")
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Maximum number of tokens of a sample; the rest is dropped.")
    ] = 4000,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Count the decode steps that speculation would save on recorded rollouts.

    No model is needed: the tokens are known, and drafts are compared with them. The first token of each sample is not
    drafted. What tools said between the turns of a sample is read and not counted. The steps of a run are replayed in
    order, so each is history for the next; every FILE begins with an empty drafter.
    """
    from srtrl.bench.replay_loop import ReplaySettings, replay_files

    if not 0 <= history < 1:
        raise ValueError(f"--history: expected a share of at least 0 and below 1, found {history}")
    if history_as == "run-ahead" and slots is None:
        raise ValueError("--history-as: run-ahead needs --slots, for it takes slots that are idle")
    if draft_budget is None:
        draft_budget = DEFAULT_BUDGET if min_score is None else MAX_NODES
    settings = ReplaySettings(
        drafter=drafter,
        drafter_options=drafter_options or (),
        draft_budget=draft_budget,
        min_score=min_score,
        history=history,
        history_as=history_as,
        slots=slots,
        step_prompts=step_prompts,
        tokenizer=tokenizer,
        max_tokens=max_tokens,
    )
    replay_files(files, settings, as_json=as_json)
