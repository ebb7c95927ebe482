"""The rollouts of one prompt over a run's steps: what a trie knew, and what was sampled then."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from srtrl.report.run_data import require_run
from srtrl.resolve import suggestion

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NUM_LISTED = 8
"""How many prompts or steps a message lists."""
_STEP_FILE = re.compile(r"step_(\d+)\.parquet")


@dataclass(kw_only=True, slots=True, frozen=True)
class PastRollout:
    """One sample of the prompt."""

    step: int
    sample_index: int
    token_ids: list[int]
    """Response tokens."""


@dataclass(kw_only=True, slots=True, frozen=True)
class PromptHistory:
    """Rollouts of one prompt, and a later one."""

    prompt_id: str
    prompt: str
    earlier: list[PastRollout]
    """By step, draw and sample; empty where the prompt has but one rollout."""
    later: PastRollout
    """Sampled after all of `earlier`: in a later step, or else a sibling of theirs."""


def find_rollouts(folder: Path) -> dict[int, Path]:
    """The files of a run's saved rollouts by step, in order; empty where there is none."""
    files = {}
    for path in (folder / "rollouts").glob("step_*.parquet"):
        match = _STEP_FILE.fullmatch(path.name)
        if match:
            files[int(match[1])] = path
    return dict(sorted(files.items()))


def most_sampled_prompt(files: Mapping[int, Path], *, min_steps: int) -> str | None:
    """The prompt with the most rollouts of those that occur in `min_steps` steps or more, None if there is none.

    Where several have as many, the one that was sampled last.
    """
    num_rollouts: Counter[str] = Counter()
    num_steps: Counter[str] = Counter()
    last: dict[str, int] = {}
    for step, path in files.items():
        of_step = Counter(row["prompt_id"] for row in _read_rows(path, ["prompt_id"]))
        num_rollouts += of_step
        num_steps.update(of_step.keys())
        last |= dict.fromkeys(of_step, step)
    return max(
        (prompt_id for prompt_id, count in num_steps.items() if count >= min_steps),
        key=lambda prompt_id: (num_rollouts[prompt_id], last[prompt_id]),
        default=None,
    )


def read_history(files: Mapping[int, Path], prompt_id: str, *, step: int | None = None) -> PromptHistory | None:
    """Read a prompt's rollouts up to `step`; None if it has none (in that step, where one is given).

    Args:
        files: The run's rollouts.
        prompt_id: The prompt.
        step: Whose first sample is the later rollout; by default the last step that sampled the prompt. If no step
            before it did, its last sample is the later rollout and the others are the earlier ones.
    """
    columns = ["prompt_id", "prompt", "draw_index", "sample_index", "token_ids"]
    found: list[PastRollout] = []
    prompt = ""
    for number, path in files.items():
        if step is not None and number > step:
            break
        rows = _read_rows(path, columns, prompt_id)
        for row in sorted(rows, key=lambda row: (row["draw_index"], row["sample_index"])):
            prompt = row["prompt"]
            found.append(PastRollout(step=number, sample_index=row["sample_index"], token_ids=row["token_ids"]))
    if not found or step not in {None, found[-1].step}:
        return None
    earlier = [rollout for rollout in found if rollout.step < found[-1].step]
    later = found[len(earlier)]
    if not earlier:
        *earlier, later = found
    return PromptHistory(prompt_id=prompt_id, prompt=prompt, earlier=earlier, later=later)


def require_history(folder: Path, prompt_id: str | None, step: int | None) -> PromptHistory:
    """Read a prompt's history of a run; without a name, of the prompt with the most rollouts.

    Raises:
        ValueError: Not a run, no rollouts in it, or none of the prompt (in the step): says what there is.
    """
    require_run(folder)
    files = find_rollouts(folder)
    if not files:
        raise ValueError(
            f"{folder / 'rollouts'} has no step_*.parquet: the run has not ended a step yet, or its recipe says "
            "log.save_rollouts: false"
        )
    if step is not None:
        if step not in files:
            raise ValueError(f"--step {step}: {folder} has rollouts of the steps {_listing(files)}")
        if prompt_id is None:
            files = {number: path for number, path in files.items() if number <= step}
            prompt_id = most_sampled_prompt({step: files[step]}, min_steps=1)
    prompt_id = prompt_id if prompt_id is not None else most_sampled_prompt(files, min_steps=1)
    history = read_history(files, prompt_id, step=step) if prompt_id is not None else None
    if history is not None:
        return history
    steps_of: dict[str, list[int]] = {}
    for number, path in files.items():
        for name in dict.fromkeys(row["prompt_id"] for row in _read_rows(path, ["prompt_id"])):
            steps_of.setdefault(name, []).append(number)
    if prompt_id in steps_of:
        raise ValueError(f"--step {step}: prompt {prompt_id} was sampled in the steps {_listing(steps_of[prompt_id])}")
    near = suggestion(prompt_id or "", steps_of)
    raise ValueError(f"--prompt: {folder} has no rollouts of `{prompt_id}`{near}; it has those of {_listing(steps_of)}")


def open_tokenizer(folder: Path, path: str | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer at `path`, else the run's: that of its newest checkpoint, or of its recipe's model.

    Raises:
        ValueError: It cannot be loaded.
    """
    from srtrl.model.weights import load_tokenizer
    from srtrl.recipe_file import load_recipe
    from srtrl.trainer.checkpoint import latest_checkpoint

    checkpoint = latest_checkpoint(folder / "checkpoints")
    if path is None and checkpoint is None:
        model = load_recipe(folder / "recipe.yaml").model
        path = model.tokenizer or model.path
    return load_tokenizer(path if path is not None else str(checkpoint))


def _read_rows(path: Path, columns: list[str], prompt_id: str | None = None) -> list[dict[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    filters = None if prompt_id is None else [("prompt_id", "=", prompt_id)]
    try:
        rows: list[dict[str, Any]] = pyarrow.parquet.read_table(path, columns=columns, filters=filters).to_pylist()
    except pyarrow.ArrowException as error:
        raise ValueError(f"{path}: cannot read these rollouts: {error}") from error
    return rows


def _listing(names: Mapping[Any, Any] | list[Any]) -> str:
    """The first few, and how many there are in all."""
    first = ", ".join(str(name) for name in list(names)[:NUM_LISTED])
    return first if len(names) <= NUM_LISTED else f"{first}, ... ({len(names)} in all)"
