"""`srtrl export`: a checkpoint's policy as a folder of its own, with a model card, and on the Hugging Face hub."""

import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from srtrl.metrics import MetricRow
    from srtrl.recipe.schema import Recipe

MODEL_FILES = ("config.json", "generation_config.json", "model*.safetensors", "model.safetensors.index.json")
"""Of a checkpoint, beside the tokenizer's; the rest is for `--resume`."""
CARD_METRICS = ("reward/mean", "accuracy", "eval/accuracy", "eval/reward", "length/mean", "entropy", "kl/ref")
"""Columns of the model card's table, as far as the run logged them."""
NUM_CARD_ROWS = 12
"""About how many rows the table has."""


def command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write; must be new or empty.")],
    *,
    step: Annotated[int | None, typer.Option(min=1, help="The checkpoint's step. [default: the last]")] = None,
    push_to_hub: Annotated[
        str | None, typer.Option(metavar="NAME", help="Also upload it as USER/MODEL; `hf auth login` comes first.")
    ] = None,
) -> None:
    """Write the policy of a checkpoint as a Hugging Face folder, with tokenizer and model card.

    The card, README.md, has the recipe (without `output_dir` and `log`) and a table of metrics: read it before you
    publish it. With --push-to-hub, a repository that does not exist is created with the visibility that is the
    account's default.
    """
    export(run, folder, step=step)
    print(f"the model is in {folder}")
    if push_to_hub is not None:
        print(f"uploaded: {push(folder, push_to_hub)}")


def export(run_folder: Path, folder: Path, *, step: int | None = None) -> None:
    """Copy weights and configs of a checkpoint into `folder`, and write tokenizer and model card; whole or not there.

    Raises:
        ValueError: `folder` is not empty, `run_folder` is not a run's, or there is no checkpoint (of `step`).
    """
    from srtrl.evaluation.policy import resolve_eval_source
    from srtrl.model.weights import load_tokenizer
    from srtrl.report.runs import read_run
    from srtrl.run.checkpoint import step_of, written_beside

    if folder.is_symlink():
        raise ValueError(f"{folder} is a link: export to the folder itself")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists and is not an empty folder: delete it, or export to another one")
    run = read_run(run_folder)
    checkpoint = Path(resolve_eval_source(str(run_folder), step=step)[0])
    rows = [row for row in run.rows if row["step"] <= step_of(checkpoint)]
    with written_beside(folder.resolve()) as written:
        for path in (path for pattern in MODEL_FILES for path in checkpoint.glob(pattern)):
            shutil.copy(path, written)
        load_tokenizer(str(checkpoint)).save_pretrained(written)
        (written / "README.md").write_text(model_card(run.recipe, rows, step_of(checkpoint)), encoding="utf-8")


def model_card(recipe: "Recipe", rows: Sequence["MetricRow"], step: int) -> str:
    """What the hub shows of the model, as Markdown: its origin, a table of some of the rows, and the recipe."""
    from srtrl import __version__
    from srtrl.recipe.file import dump_recipe, dump_yaml
    from srtrl.recipe.schema import LogSection

    front = {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["reinforcement-learning"]}
    if re.fullmatch(r"[\w.-]+/[\w.-]+", recipe.model.path) and not Path(recipe.model.path).exists():
        front["base_model"] = recipe.model.path
    every = max(1, -(-len(rows) // NUM_CARD_ROWS))
    last_evaluation = max((index for index, row in enumerate(rows) if "eval/reward" in row), default=0)
    always = {last_evaluation, len(rows) - 1}
    chosen = [row for index, row in enumerate(rows) if index % every == 0 or index in always]
    columns = [name for name in CARD_METRICS if any(name in row for row in chosen)]
    lines = [["step", *columns], ["---:"] * (1 + len(columns))]
    lines += [[str(row["step"]), *(f"{row[name]:.4g}" if name in row else "" for name in columns)] for row in chosen]
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    shown = dump_recipe(recipe.model_copy(update={"output_dir": "runs", "log": LogSection()}))
    return (
        f"---\n{dump_yaml(front)}---\n\n# {recipe.name}\n\n"
        f"`{recipe.model.path}` after {step} of {recipe.train.num_steps} steps of reinforcement learning on the task "
        f"`{recipe.task.name}` (advantage `{recipe.algorithm.advantage}`, loss `{recipe.algorithm.loss}`), "
        f"trained with srtrl {__version__}.\n\n## Metrics\n\n{table}\n\n"
        "`eval/` is of held-out problems; step 0 is the policy before training.\n\n"
        f"## Recipe\n\n```yaml\n{shown}```\n"
    )


def push(folder: Path, name: str) -> str:
    """Upload a folder as the model `name`; returns the address.

    Raises:
        ValueError: the hub refuses: no such name, not logged in, no permission, no network.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    transport_error: type[Exception] = HfHubHTTPError.__mro__[
        1
    ]  # that of the HTTP client in use, which is no OSError everywhere

    try:
        HfApi().create_repo(name, exist_ok=True)
        HfApi().upload_folder(repo_id=name, folder_path=folder, commit_message="Export of srtrl")
    except (HFValidationError, transport_error, OSError) as error:
        raise ValueError(f"--push-to-hub {name}: {error}\nThe model is in {folder}; `hf upload` can retry") from error
    return f"https://huggingface.co/{name}"
