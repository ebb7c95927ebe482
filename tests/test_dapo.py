"""A tiny DAPO run: its batches are full, and dropped groups feed the drafter."""

from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from tiny_run import DAPO, make_recipe, train

from srtrl.drafters.srt import Drafter as SrtDrafter
from srtrl.metrics import read_metrics
from srtrl.run.checkpoint import read_state
from srtrl.run.step_metrics import step_problems

NUM_PROMPTS = 4


def test_a_batch_is_the_shortest_prefix_that_fills_it_and_all_of_it_feeds_drafts(
    finished: Callable[..., Path],
) -> None:
    plain = finished(**DAPO)
    rows = [row for row in read_metrics(plain / "metrics.jsonl") if row["step"] > 0]
    next_draw = 0
    for row in rows:
        table = pq.read_table(plain / "rollouts" / f"step_{row['step']:06.0f}.parquet").to_pylist()
        correct: dict[int, list[bool]] = {}
        for sample in table:
            correct.setdefault(sample["draw_index"], []).append(sample["outcome"] == "correct")
        mixed = [any(group) and not all(group) for group in correct.values()]
        assert list(correct) == list(range(next_draw, next_draw + len(mixed)))  # all draws, in data order
        assert sum(mixed) == NUM_PROMPTS
        assert mixed[-1]
        for sample in table:
            group = correct[sample["draw_index"]]
            is_learned = any(group) and not all(group) and sample["finish_reason"] == "stop"  # overlong filtering
            assert (sample["advantage"] is not None) == is_learned
        assert row["data/draws"] == len(mixed)
        assert (f"4 of {len(mixed)} groups kept" in step_problems(row)) == (len(mixed) > 4)
        assert (row["groups/kept"], row["groups/dropped"], row["groups/short"]) == (4, len(mixed) - 4, 0)
        assert row["groups/all_right"] == sum(map(all, correct.values()))
        assert row["groups/all_right"] + row["groups/all_wrong"] == row["groups/dropped"]
        assert row["accuracy"] == pytest.approx(sum(map(sum, correct.values())) / len(table))  # before the filters
        assert row["data/epoch"] == pytest.approx(next_draw / 10)
        assert row["grad_norm"] > 0
        next_draw += len(mixed)
    assert len(rows) == 4
    checkpoint = plain / "checkpoints" / "step_000004"
    assert read_state(checkpoint).num_draws == next_draw
    assert {row["groups/dropped"] for row in rows} != {0}
    assert sum(row["groups/all_right"] for row in rows) > 0
    assert sum(row["samples/overlong_dropped"] for row in rows) > 0
    drafter = SrtDrafter()
    drafter.load(checkpoint)
    dropped = [sample for sample in table if sample["advantage"] is None]
    assert dropped
    for sample in dropped:  # they feed the drafter
        kept = drafter.caches["train"].rollouts(tuple(sample["prompt_token_ids"]))
        assert sample["token_ids"] in [one.tokens.tolist() for one in kept]


def test_where_max_draws_do_not_suffice_the_step_says_so_and_goes_on(policy: Path, tmp_path: Path) -> None:
    recipe = make_recipe(policy, tmp_path, **DAPO, rollout__max_draws=5, train__num_steps=3)
    folder = train(recipe).folder
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if row["step"] > 0]
    assert any(row["groups/short"] > 0 for row in rows)
    for row in rows:
        assert row["groups/kept"] == NUM_PROMPTS - row["groups/short"]
        if row["groups/short"]:
            assert row["data/draws"] == 5
            assert f"{row['groups/short']:.0f} groups too few: rollout.max_draws reached" in step_problems(row)
        if row["groups/kept"]:
            assert row["grad_norm"] > 0
