"""`srtrl export`: a checkpoint's policy as a Hugging Face folder of its own, with a model card."""

import shutil
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from srtrl.report.runs import Run

MODEL_FILES = ("config.json", "generation_config.json", "model*.safetensors", "model.safetensors.index.json")
"""Exported files of a checkpoint, beside the tokenizer's; the rest is for `--resume`."""
CARD = Path(__file__).with_name("model_card.md")
"""The text of a model card, with names in place of what differs."""


def command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write; must be new or empty.")],
    *,
    step: Annotated[int | None, typer.Option(min=1, help="The checkpoint's step. [default: the last]")] = None,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Of a run with LoRA: the adapter, as PEFT loads it.")
    ] = False,
) -> None:
    """Write a checkpoint's policy as a model folder.

    It has the layout of Hugging Face, with tokenizer and model card. The card, README.md, has Python that loads the
    model and continues a prompt of the training data, the held-out figures, and the options of the recipe that are not
    the defaults (without `output_dir` and `log`): read it before you publish it. `hf upload USER/MODEL DIR` uploads the
    folder.
    """
    from srtrl.checks import check_folder
    from srtrl.evaluation.policy import resolve_eval_source
    from srtrl.features.adapters import ADAPTER_FOLDER
    from srtrl.files import is_free, new_folder
    from srtrl.model.folders import load_tokenizer
    from srtrl.report.runs import read_run
    from srtrl.run.steps import step_of

    if not is_free(folder):
        raise ValueError(f"{folder} exists and is not an empty folder: delete it, or export to another one")
    if not str(folder).isprintable():
        raise ValueError(f"{str(folder)!r}: expected a name of printable characters")
    check_folder(str(folder))
    read = read_run(run)
    checkpoint = Path(resolve_eval_source(str(run), step=step)[0])
    if adapter and not (checkpoint / ADAPTER_FOLDER).is_dir():
        raise ValueError(f"--adapter: {run} has none, for its recipe has no model.lora: leave the option out")
    patterns, library = ((f"{ADAPTER_FOLDER}/*",), "peft") if adapter else (MODEL_FILES, "transformers")
    with new_folder(folder.resolve()) as written:
        for path in (path for pattern in patterns for path in checkpoint.glob(pattern)):
            shutil.copy(path, written)
        tokenizer = load_tokenizer(str(checkpoint))
        tokenizer.save_pretrained(written)
        card = model_card(read, step_of(checkpoint), library, tokenizer)
        (written / "README.md").write_text(card, encoding="utf-8")
    print(f"the model is in {folder}; to upload it: hf upload USER/MODEL {folder}")


def model_card(run: "Run", step: int, library: str, tokenizer: Any) -> str:
    """Markdown for a model's page: how to load it, the held-out figures up to `step`, and what the recipe sets."""
    from srtrl import __version__
    from srtrl.recipe.file import dump_yaml
    from srtrl.run.step_metrics import held_out_figures, main_figure, with_interval

    recipe = run.recipe
    rows = [held_out_figures(row) for row in run.rows if "eval/reward" in row and row["step"] <= step]
    figures = "No problems were held out, or none were evaluated."
    if rows:
        lines = [f"- step {row['step']:.0f}: {with_interval(row)}" for row in (rows[0], *rows[1:][-1:])]
        figures = "\n".join([f"Held-out {main_figure(rows[-1])} (step 0 is before training):\n", *lines])
    prompt, token_ids = _shortest_prompt(run) or ("Hello", tokenizer("Hello")["input_ids"])
    return Template(CARD.read_text(encoding="utf-8")).substitute(
        library=library,
        model_class="AutoPeftModelForCausalLM" if library == "peft" else "AutoModelForCausalLM",
        name=recipe.name,
        policy=recipe.model.path,
        step=step,
        num_steps=recipe.train.num_steps,
        task=recipe.task.name,
        advantage=recipe.algorithm.advantage,
        loss=recipe.algorithm.loss,
        version=__version__,
        prompt=repr(prompt),
        special_tokens=tokenizer(prompt)["input_ids"] == token_ids,
        max_new_tokens=recipe.rollout.max_new_tokens,
        figures=figures,
        options=dump_yaml(recipe.model_dump(exclude_defaults=True, exclude={"output_dir", "log"})),
    )


def _shortest_prompt(run: "Run") -> tuple[str, list[int]] | None:
    """A prompt of the newest rollouts with its tokens; None where they were deleted, or are damaged."""
    from srtrl.report.runs import read_rollouts

    try:
        rows = read_rollouts(list(run.rollout_files.values())[-1], ["prompt", "prompt_token_ids"]).to_pylist()
        return min(((row["prompt"], row["prompt_token_ids"]) for row in rows), key=lambda row: len(row[0]))
    except (IndexError, ValueError):
        return None
