"""The response that a report decodes again, step by step."""

import json
from pathlib import Path

import bench_cases
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recipe_cases import recipe_text

from srtrl.report.decoded_response import decoded_response, last_rollout
from srtrl.report.runs import read_run
from srtrl.warm_start.training import train_tokenizer

TEXTS = {
    1: {"sum": ["one plus two is three", "one plus one is two"], "odd": ["alone here", "not alone"]},
    3: {"sum": ["one plus two is three", "two"]},
    4: {"sum": ["one plus two is four", "never looked at"]},
}
"""Step -> prompt -> the texts of its samples."""
END = "<|endoftext|>"
COLUMNS = ("prompt_id", "prompt", "prompt_token_ids", "draw_index", "sample_index", "token_ids")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run whose tokenizer has a token a byte."""
    folder = tmp_path / "fake"
    (folder / "rollouts").mkdir(parents=True)
    tokenizer = train_tokenizer([], 257)
    tokenizer.save_pretrained(folder / "model")
    (folder / "recipe.yaml").write_text(recipe_text("seed: 4\n", path=folder / "model"))
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    for step, prompts in TEXTS.items():
        samples = [
            (name, f"[{name}]\n", [draw], draw, index, [*tokenizer.encode(text), tokenizer.eos_token_id])
            for draw, (name, texts) in enumerate(prompts.items())
            for index, text in enumerate(texts)
        ]
        columns = map(list, zip(*samples[::-1], strict=True))
        table = pa.table(dict(zip(COLUMNS, columns, strict=True)))
        pq.write_table(table, folder / "rollouts" / f"step_{step:06d}.parquet")
    return folder


def test_the_last_rollout_is_the_later_one_and_a_first_step_has_its_samples_in_turn(run: Path) -> None:
    name, prompt, num_earlier = last_rollout(read_run(run))  # of the prompt with the most rollouts
    assert (name, prompt.prompt_id, len(prompt.samples), num_earlier) == ("step 4, sample 0", "sum", 6, 4)
    for step in (3, 4):
        (run / "rollouts" / f"step_{step:06d}.parquet").unlink()
    name, _, num_earlier = last_rollout(read_run(run))
    assert (name, num_earlier) == ("step 1, sample 1", 1)


# --- Decoded again ----------------------------------------------------------------------------------------------------

texts = st.lists(st.integers(0, 3), min_size=1, max_size=12)


@given(st.lists(texts, max_size=6), texts)
@settings(max_examples=25)
def test_the_steps_give_the_rollout(earlier: list[list[int]], later: list[int]) -> None:
    prompt = bench_cases.recorded("x", [1], [*earlier, later], ())
    pieces = decoded_response("", prompt, len(earlier), str).pieces
    assert [token for texts in pieces for text in texts for token in json.loads(text)] == later


def test_turns_are_texts_of_their_own() -> None:
    """The policy says 5 5 5, reads 9 9, and says 9 9 9 7: no draft leads into a tool's output."""
    sample = [5, 5, 5, 9, 9, 9, 9, 9, 7]
    pieces = decoded_response("", bench_cases.recorded("x", [1], [sample, sample], ((3, 5),)), 1, str).pieces
    assert pieces == [["[5]"], ["[5]", "[5]"], ["[9]", "[9]", "[9]", "[7]"]]
