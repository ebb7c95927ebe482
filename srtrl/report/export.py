"""`srtrl export`: a checkpoint's policy as a Hugging Face folder of its own, with a model card."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from srtrl.report.runs import Run

MODEL_FILES = ("config.json", "generation_config.json", "model*.safetensors", "model.safetensors.index.json")
"""Of a checkpoint, beside the tokenizer's; the rest is for `--resume`."""


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

    It has the layout of Hugging Face, with tokenizer and model card. The card, README.md, has the recipe (without
    `output_dir` and `log`) and the held-out figures: read it before you publish it. `hf upload USER/MODEL DIR`
    uploads the folder.
    """
    from srtrl.evaluation.policy import resolve_eval_source
    from srtrl.metrics import new_folder
    from srtrl.model.weights import load_tokenizer
    from srtrl.report.runs import read_run
    from srtrl.run.checkpoint import ADAPTER_FOLDER, step_of

    if folder.is_symlink() or (folder.exists() and (not folder.is_dir() or any(folder.iterdir()))):
        raise ValueError(f"{folder} exists and is not an empty folder: delete it, or export to another one")
    if not str(folder).isprintable():
        raise ValueError(f"{str(folder)!r}: expected a name of printable characters")
    read = read_run(run)
    checkpoint = Path(resolve_eval_source(str(run), step=step)[0])
    if adapter and not (checkpoint / ADAPTER_FOLDER).is_dir():
        raise ValueError(f"--adapter: {run} has none, for its recipe has no model.lora: leave the option out")
    patterns, library = ((f"{ADAPTER_FOLDER}/*",), "peft") if adapter else (MODEL_FILES, "transformers")
    with new_folder(folder.resolve()) as written:
        for path in (path for pattern in patterns for path in checkpoint.glob(pattern)):
            shutil.copy(path, written)
        load_tokenizer(str(checkpoint)).save_pretrained(written)
        (written / "README.md").write_text(model_card(read, step_of(checkpoint), library), encoding="utf-8")
    print(f"the model is in {folder}; to upload it: hf upload USER/MODEL {folder}")


def model_card(run: "Run", step: int, library: str) -> str:
    """Markdown for a model's page: its origin, the held-out figures up to `step`, and the recipe."""
    from srtrl import __version__
    from srtrl.recipe.file import dump_recipe
    from srtrl.recipe.schema import LogSection
    from srtrl.run.metrics import describe_held_out

    recipe = run.recipe
    rows = [row for row in run.rows if "eval/reward" in row and row["step"] <= step]
    figures = "\n".join(f"- step {row['step']}: {describe_held_out(row)}" for row in rows)
    shown = dump_recipe(recipe.model_copy(update={"output_dir": "runs", "log": LogSection()}))
    return (
        f"---\nlibrary_name: {library}\npipeline_tag: text-generation\ntags: [reinforcement-learning]\n---\n\n"
        f"# {recipe.name}\n\n`{recipe.model.path}` after {step} of {recipe.train.num_steps} steps of reinforcement "
        f"learning on the task `{recipe.task.name}` (advantage `{recipe.algorithm.advantage}`, loss "
        f"`{recipe.algorithm.loss}`), trained with srtrl {__version__}.\n\n## Held-out problems\n\n{figures}\n\n"
        f"Step 0 is the policy before training.\n\n## Recipe\n\n```yaml\n{shown}```\n"
    )
