"""`srtrl export`: a checkpoint's policy as a Hugging Face folder of its own, with a model card."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from srtrl.report.runs import Run

MODEL_FILES = ("config.json", "generation_config.json", "model*.safetensors", "model.safetensors.index.json")
"""Of a checkpoint, beside the tokenizer's; the rest is for `--resume`."""
MAX_ROWS = 12
"""Evaluations in the table of a model card: the first, the last, and evenly spaced ones between."""


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
    from srtrl.metrics import new_folder
    from srtrl.model.folders import load_tokenizer
    from srtrl.report.runs import read_run
    from srtrl.run.steps import step_of

    if folder.is_symlink() or (folder.exists() and (not folder.is_dir() or any(folder.iterdir()))):
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
    from srtrl.run.metrics import held_out_figures, main_figure, with_interval

    recipe = run.recipe
    rows = [held_out_figures(row) for row in run.rows if "eval/reward" in row and row["step"] <= step]
    figures = "No problems were held out, or none were evaluated.\n"
    if rows:
        shown = sorted({round(index * (len(rows) - 1) / (MAX_ROWS - 1)) for index in range(MAX_ROWS)})
        table = [f"| {rows[index]['step']:.0f} | {with_interval(rows[index])} |" for index in shown]
        heading = [f"| step | held-out {main_figure(rows[-1])} |", "| --: | --- |"]
        figures = "\n".join([*heading, *table]) + "\n\nStep 0 is the policy before training.\n"
    options = dump_yaml(recipe.model_dump(exclude_defaults=True, exclude={"output_dir", "log"}))
    return (
        f"---\nlibrary_name: {library}\npipeline_tag: text-generation\ntags: [reinforcement-learning]\n---\n\n"
        f"# {recipe.name}\n\n`{recipe.model.path}` after {step} of {recipe.train.num_steps} steps of reinforcement "
        f"learning on the task `{recipe.task.name}` (advantage `{recipe.algorithm.advantage}`, loss "
        f"`{recipe.algorithm.loss}`), trained with srtrl {__version__}.\n\n```python\n"
        f"{_snippet(run, library, tokenizer)}```\n\n## Held-out problems\n\n{figures}\n"
        f"## Recipe\n\nWithout options that have their defaults:\n\n```yaml\n{options}```\n"
    )


def _snippet(run: "Run", library: str, tokenizer: Any) -> str:
    """Python that loads the model and continues a prompt that it was trained on, tokenised as in training."""
    from srtrl.report.runs import read_rollouts

    try:
        rows = read_rollouts(list(run.rollout_files.values())[-1], ["prompt", "prompt_token_ids"]).to_pylist()
        prompt, token_ids = min(((row["prompt"], row["prompt_token_ids"]) for row in rows), key=lambda row: len(row[0]))
    except (IndexError, ValueError):  # they were deleted, or are damaged
        prompt, token_ids = "Hello", tokenizer("Hello")["input_ids"]
    flag = "" if tokenizer(prompt)["input_ids"] == token_ids else "add_special_tokens=False, "
    model_class, imports = "AutoModelForCausalLM", "from transformers import AutoModelForCausalLM, AutoTokenizer"
    if library == "peft":
        model_class = "AutoPeftModelForCausalLM"
        imports = f"from peft import {model_class}\nfrom transformers import AutoTokenizer"
    return (
        f'{imports}\n\nname = "USER/MODEL"  # or the folder of this file\n'
        f"model, tokenizer = {model_class}.from_pretrained(name), AutoTokenizer.from_pretrained(name)\n"
        f"prompt = {prompt!r}  # as in training\n"
        f'inputs = tokenizer(prompt, {flag}return_tensors="pt")\n'
        f"options = dict(do_sample=True, top_k=0, max_new_tokens={run.recipe.rollout.max_new_tokens})\n"
        "print(tokenizer.decode(model.generate(**inputs, **options)[0]))\n"
    )
