"""The response that a report decodes again: its steps, and the fork it shows."""

import json
from pathlib import Path

import bench_cases
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_kernels import uniform_noise
from recipe_cases import recipe_text

from srtrl.model.noise import make_rng_key
from srtrl.report.runs import read_run
from srtrl.report.trie_view import PromptHistory, decoded_response, find_fork, read_history
from srtrl.warm_start.training import train_tokenizer

TEXTS = {
    1: {"sum": ["one plus two is three", "one plus one is two"], "odd": ["alone here", "not alone"]},
    3: {"sum": ["one plus two is three", "two"]},
    4: {"sum": ["one plus two is four", "never looked at"]},
}
"""Step -> prompt -> the texts of its samples."""
END = "<|endoftext|>"
SEED = 4
"""The hash of the fork below is less than 2**63: read as a signed number it would give another noise."""
COLUMNS = ("prompt_id", "prompt", "prompt_token_ids", "draw_index", "sample_index", "token_ids")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run whose tokenizer has a token a byte."""
    folder = tmp_path / "fake"
    (folder / "rollouts").mkdir(parents=True)
    tokenizer = train_tokenizer([], 257)
    tokenizer.save_pretrained(folder / "model")
    (folder / "recipe.yaml").write_text(recipe_text(f"seed: {SEED}\n", path=folder / "model"))
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


def test_a_fork_has_the_rollouts_and_the_noise_of_each_guess(run: Path) -> None:
    """Earlier ones part after `one plus `: two go on with `two`, one with `one`."""
    guesses = find_fork(read_history(read_run(run)), lambda token_ids: str(token_ids[0]))
    assert {guess.place for guess in guesses} == {len("one plus ")}
    byte = {text: str(token) for text, token in zip("to", train_tokenizer([], 257).encode("to"), strict=True)}
    known = {guess.text: (guess.num_rollouts, guess.is_sampled) for guess in guesses if guess.num_rollouts}
    assert known == {byte["t"]: (2, True), byte["o"]: (1, False)}
    assert len(guesses) > 2, "shorter contexts know more"
    key = np.array([make_rng_key(SEED, "train", 0, 0)], np.uint64).view(np.int64)
    uniform = uniform_noise(torch.from_numpy(key), torch.tensor([len("one plus ")]), 257)[0].numpy()
    for guess in guesses:
        assert guess.noise == pytest.approx(-np.log(-np.log(uniform[int(guess.text)])))
    scores = [guess.score for guess in guesses]
    assert scores == sorted(scores, reverse=True)


def test_without_a_fork_or_the_noise_there_are_no_guesses() -> None:
    assert find_fork(history_of([[1, 2]], [1, 2, 3]), str) == [], "one earlier rollout"
    assert find_fork(history_of([[1, 2, 3], [1, 4, 3]], [1, 2, 3]), str) == [], "not of a run"


def test_the_last_rollout_is_the_later_one_and_a_first_step_has_its_samples_in_turn(run: Path) -> None:
    history = read_history(read_run(run))  # of the prompt with the most rollouts
    assert (history.earlier.prompt_id, len(history.earlier.samples)) == ("sum", 4)
    assert history.later_name == "step 4, sample 0"
    for step in (3, 4):
        (run / "rollouts" / f"step_{step:06d}.parquet").unlink()
    history = read_history(read_run(run))
    assert (len(history.earlier.samples), history.later_name) == (1, "step 1, sample 1")


# --- Decoded again ----------------------------------------------------------------------------------------------------

texts = st.lists(st.integers(0, 3), min_size=1, max_size=12)


def history_of(earlier: list[list[int]], later: list[int], *parts: tuple[int, int]) -> PromptHistory:
    first, last = (bench_cases.recorded("x", [1], texts, parts) for texts in (earlier, [later]))
    return PromptHistory(earlier=first, later=last, later_name="")


@given(st.lists(texts, max_size=6), texts)
@settings(max_examples=25)
def test_the_steps_give_the_rollout(earlier: list[list[int]], later: list[int]) -> None:
    pieces = decoded_response(history_of(earlier, later), str).pieces
    assert [token for texts in pieces for text in texts for token in json.loads(text)] == later


def test_turns_are_texts_of_their_own() -> None:
    """The policy says 5 5 5, reads 9 9, and says 9 9 9 7: no draft leads into a tool's output."""
    sample = [5, 5, 5, 9, 9, 9, 9, 9, 7]
    pieces = decoded_response(history_of([sample], sample, (3, 5)), str).pieces
    assert pieces == [["[5]"], ["[5]", "[5]"], ["[9]", "[9]", "[9]", "[7]"]]
