"""`rollouts/step_000001.parquet`: every sample of a step, one row each, as it was learned from."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from srtrl.metrics import write_atomic
from srtrl.types import Rollout, RolloutGroup

COLUMNS = pa.schema(
    [
        ("prompt_id", pa.string()),
        ("draw_index", pa.int32()),
        ("sample_index", pa.int32()),
        ("prompt", pa.string()),
        ("prompt_token_ids", pa.list_(pa.int32())),
        ("token_ids", pa.list_(pa.int32())),
        ("text", pa.string()),
        ("rollout_logprobs", pa.list_(pa.float32())),
        ("advantage", pa.float32()),
        ("reward", pa.float32()),
        ("outcome", pa.string()),
        ("finish_reason", pa.string()),
        ("policy_version", pa.int32()),
    ]
)
"""The columns of every file; beside them a `reward_<name>` (float32, unweighted) for each reward of the recipe."""


def rollout_file_name(step: int) -> str:
    """File name of the rollouts of `step`."""
    return f"step_{step:06d}.parquet"


def write_rollouts(path: Path, groups: Sequence[RolloutGroup], advantages: Mapping[tuple[int, int], float]) -> None:
    """Write all samples of a step; the file is whole or not there.

    Args:
        path: The file.
        groups: All groups of the step, those that a filter dropped too.
        advantages: Advantage of (draw, sample); a sample without one was dropped by a filter and gets a null.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    parts = list(rollouts[0].grade.parts) if rollouts else []
    schema = COLUMNS
    for part in parts:
        schema = schema.append(pa.field(f"reward_{part}", pa.float32()))
    rows = [_row(rollout, advantages.get((rollout.draw_index, rollout.sample_index))) for rollout in rollouts]
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), sink, compression="zstd")
    write_atomic(path, sink.getvalue().to_pybytes())


def _row(rollout: Rollout, advantage: float | None) -> dict[str, object]:
    row: dict[str, object] = {
        "prompt_id": rollout.prompt.prompt_id,
        "draw_index": rollout.draw_index,
        "sample_index": rollout.sample_index,
        "prompt": rollout.prompt.text,
        "prompt_token_ids": rollout.prompt.token_ids,
        "token_ids": rollout.token_ids,
        "text": rollout.text,
        "rollout_logprobs": rollout.rollout_logprobs,
        "advantage": advantage,
        "reward": rollout.grade.reward,
        "outcome": rollout.grade.outcome,
        "finish_reason": rollout.finish_reason,
        "policy_version": rollout.policy_version,
    }
    return row | {f"reward_{name}": value for name, value in rollout.grade.parts.items()}
