"""`srtrl replay`: the decode steps that a drafter would have saved on recorded rollouts."""

import json
from pathlib import Path
from typing import Annotated

import typer

from srtrl.recipe.schema import MAX_WIDTH


def replay(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A run's folder, or JSONL or Parquet of any trainer or engine.")
    ],
    *,
    tokenizer: Annotated[
        str | None, typer.Option(metavar="DIR", help="Folder or hub name of the tokenizer, if the rollouts are texts.")
    ] = None,
    drafter: Annotated[str, typer.Option(metavar="NAME", help="The drafter, as in rollout.drafter.")] = "srt",
    drafter_options: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="An option of the drafter; may be given more than once."),
    ] = None,
    draft_budget: Annotated[int, typer.Option(min=0, max=MAX_WIDTH, help="Maximum nodes of a draft.")] = 16,
    history: Annotated[
        float,
        typer.Option(metavar="SHARE", help="Share of each prompt's samples that the drafter has seen before, below 1."),
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
    sample is read and not counted. The steps of a run are replayed in order, so each is history for the next.
    Rollouts do not contain what else the policy took to be likely: in the run itself, drafts knew it.

    A row of another trainer or engine has a prompt (prompt, messages, input or prompt_token_ids) and its completion
    (text, completion, response, output or token_ids) or several (samples, outputs or choices: a list of texts or of
    such rows). So have the results of vLLM, of OpenAI's interface and of lm-eval (--log_samples), and the logs of
    verl (rollout_data_dir) and TRL (log_completions). docs/data.md shows the shapes. Rows with a field `step` are
    replayed in its order; rows of a step with the same prompt are one group.
    """
    check_history(history)
    from srtrl.bench.recorded import read_recorded
    from srtrl.bench.replay_loop import Replay, build_drafter
    from srtrl.engine.warm_up import compile_kernels

    built = build_drafter(drafter, drafter_options or ())
    recording = read_recorded(file, tokenizer=tokenizer, max_tokens=max_tokens)
    compile_kernels()
    counts = Replay(built, draft_budget=draft_budget, history=history, noise=noise).run(recording)
    if counts.num_sequence_steps == 0:
        raise ValueError(f"{file}: nothing to decode: each sample has one token, and the first one is given")
    row = counts.to_row()
    if as_json:
        settings = {"drafter": drafter, "drafter_options": built.options.model_dump(), "draft_budget": draft_budget}
        settings |= {"history": history, "max_tokens": max_tokens, "noise": noise}
        print(json.dumps(settings | row | {"drafter_metrics": built.take_metrics()}))
        return
    known = f"a share of {history:g} of each prompt's samples" if history else "no sample"
    nodes = f"{draft_budget} node{'s' * (draft_budget != 1)}"
    print(f"{file} with {drafter}, at most {nodes} per draft, {known} known before\n")
    figures = {
        "samples decoded": counts.num_samples,
        "decode steps, one prompt at a time": counts.steps,
        "decode steps without drafts": counts.steps_without_drafts,
        "tokens per sample and decode step": row["tokens_per_step"],
        "tokens verified per sample and decode step": row["verified_per_step"],
        "microseconds of drafting per sample and step": row["draft_us"],
    }
    print(f"| {'figure':<44} | {'value':>9} |\n| {'-' * 44} | {'-' * 8}: |")
    for name, value in figures.items():
        print(f"| {name:<44} | {format_cell(value):>9} |")
    if counts.num_cut:
        print(f"\n{counts.num_cut:,} samples were truncated to {max_tokens:,} tokens (--max-tokens).")
    if tokenizer is not None:
        print("\nTexts were tokenised again: an approximation of the tokens that were sampled.")


def check_history(history: float) -> None:
    """Raise ValueError unless it is a share of samples that leaves some."""
    if not 0 <= history < 1:
        raise ValueError(f"--history: expected a share of at least 0 and below 1, found {history}")


def format_cell(value: object) -> str:
    """Three significant digits, but no figure before the point is lost; nothing for None."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
