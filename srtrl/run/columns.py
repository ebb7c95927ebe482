"""The columns of the rollouts of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow

ROLLOUT_COLUMNS = {
    "step": "int32",
    "prompt_id": "string",
    "draw_index": "int32",
    "sample_index": "int32",
    "prompt": "string",
    "prompt_token_ids": "list<int32>",
    "token_ids": "list<int32>",
    "text": "string",
    "answer": "string",
    "rollout_logprobs": "list<float>",
    "advantage": "float",
    "reward": "float",
    "outcome": "string",
    "finish_reason": "string",
    "policy_version": "int32",
}
"""Columns of `rollouts/step_000001.parquet`, one row a sample; beside them a `reward_<name>` (unweighted) for each
reward of the recipe. `text` is the response, `answer` the reference answer; runs from before the first hour have
neither `step` nor `answer`."""

TURN_COLUMNS = {
    "segment_kinds": "list<string>",
    "segment_lengths": "list<int32>",
    "segment_texts": "list<string>",
    "num_turns": "int32",
    "stop_reason": "string",
}
"""Further columns where samples have several turns: see `Conversation` in `srtrl/types.py`."""

TOKEN_COLUMNS = {"token_rewards": "list<float>"}
"""Further column if rewards have a number for each token: their weighted sum on each token of the response, 0 on
what was not sampled; null for a sample whose rewards are single numbers, which stand on the last sampled token."""

VERSION_COLUMNS = {"policy_versions": "list<int32>"}
"""Further column where earlier policies sampled tokens: the version of each token; null where all are of the last."""


def column_type(name: str) -> pyarrow.DataType:
    """The type of a column of the rollouts."""
    import pyarrow

    columns = ROLLOUT_COLUMNS | TURN_COLUMNS | TOKEN_COLUMNS | VERSION_COLUMNS
    kind = columns.get(name, "float")  # a reward
    if kind.startswith("list<"):
        return pyarrow.list_(pyarrow.type_for_alias(kind[len("list<") : -1]))
    return pyarrow.type_for_alias(kind)
