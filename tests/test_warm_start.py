"""Supervised fine-tuning: the tokenizer it trains, what its loss is on, and the policy it writes."""

import json
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import tiny_run
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rank_cases import FORKED, run_ranks
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from srtrl import build, ranks
from srtrl.model.folders import load_tokenizer
from srtrl.model.weights import load_model
from srtrl.recipe.schema import Recipe
from srtrl.rollout.packing import pack
from srtrl.rollout.turns import Turns
from srtrl.tasks.base import load_task
from srtrl.trainer.passes import UpdateContext
from srtrl.warm_start.training import (
    SupervisedLearner,
    run_warm_start,
    solution_sequence,
    train_tokenizer,
    update_plan,
)

END_OF_TEXT = "<|endoftext|>"
TEXTS = [f"Compute {a}+{b}.\n{a}+{b}={a + b}\nAnswer: {a + b}" for a in range(20) for b in range(20)]
TOKENIZER = train_tokenizer(TEXTS, 290)
EMOJI = "👩‍👩‍👧 naïve \x00\x7f \r\n\t  double  spaces don't 12345 ½ ²"


# --- The tokenizer ----------------------------------------------------------------------------------------------------


@given(st.text())
@example(EMOJI)
@example(f"a{END_OF_TEXT}b")
@settings(deadline=None)
def test_any_text_comes_back(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text, add_special_tokens=False)) == text


def test_every_digit_is_a_token_and_words_are_merged() -> None:
    tokens = TOKENIZER.tokenize("Compute 1234+56.")
    assert [token for token in tokens if any(character.isdigit() for character in token)] == list("123456")
    assert len(TOKENIZER.encode("Answer: ")) < len(b"Answer: ")
    assert len(TOKENIZER) <= 290
    assert (TOKENIZER.eos_token, TOKENIZER.pad_token, TOKENIZER.bos_token) == (END_OF_TEXT, END_OF_TEXT, None)


# --- The loss ---------------------------------------------------------------------------------------------------------


def make_recipe(output: Path, **warm_start: Any) -> Recipe:
    """Twelve steps of a model and tokenizer from scratch; `warm_start` are values of its section."""
    return tiny_run.make_recipe(
        warm_start.pop("path", Path("unused")),
        output.parent,
        rollout__max_prompt_tokens=30,
        rollout__max_new_tokens=warm_start.pop("max_new_tokens", 40),
        train__micro_batch_tokens=100,
        warm_start={
            "architecture": {
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "max_position_embeddings": 96,
            },
            "train_tokenizer_vocab_size": 280,
            "num_steps": 12,
            "batch_tokens": 300,
            "learning_rate": 0.01,
            "warmup_steps": 2,
            "output": str(output),
            **warm_start,
        },
    )


def test_loss_is_the_mean_over_answer_and_end_tokens(policy: Path, tmp_path: Path) -> None:
    """Of sequences as RL will see them: prompt tokens as the task gives them, the solution encoded alone, an end token.

    Loss and gradient norm are those of the peer in `transformers`.
    """
    recipe = make_recipe(tmp_path)
    tokenizer = load_tokenizer(str(policy))
    task = load_task(recipe, tokenizer)
    peer = AutoModelForCausalLM.from_pretrained(policy).double()
    sequences, logprobs = [], []
    for prompt in task.train_prompts[:5]:
        solution = tokenizer.encode(task.solution(prompt), add_special_tokens=False)
        sequences.append(solution_sequence(task, Turns(tokenizer), prompt))
        assert sequences[-1].token_ids.tolist() == [*prompt.token_ids, *solution, tokenizer.eos_token_id]
        token_ids = torch.from_numpy(sequences[-1].token_ids)
        rows = peer(token_ids[None]).logits[0].log_softmax(-1)  # [L, V]
        positions = torch.arange(len(prompt.token_ids), len(token_ids))
        logprobs.append(rows[positions - 1, token_ids[positions]])
    loss = -torch.cat(logprobs).mean()
    loss.backward()  # type: ignore[no-untyped-call]
    norm = torch.nn.utils.get_total_norm([one.grad for one in peer.parameters() if one.grad is not None])

    assert len(list(pack(sequences, 100, "cpu"))) > 1  # several micro-batches
    model = load_model(str(policy), dtype=torch.float64, device="cpu")
    optimizer = build.make_optimizer(model, recipe, learning_rate=1e-3, weight_decay=0.0)
    context = UpdateContext(recipe=recipe, step=1)
    assert recipe.warm_start is not None
    updates = update_plan(recipe.warm_start)
    found = SupervisedLearner(model, optimizer, updates).learn(sequences, context)
    assert found["loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert found["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)


# --- The run ----------------------------------------------------------------------------------------------------------


def test_from_scratch_learns_and_writes_a_model_for_transformers(tmp_path: Path) -> None:
    output = tmp_path / "out"
    recipe = make_recipe(output)
    summary = run_warm_start(recipe)
    assert summary.losses[0] == pytest.approx(math.log(280), rel=0.1)  # an untrained model knows nothing
    assert summary.losses[-1] < 0.85 * summary.losses[0]
    assert summary.held_out is not None
    assert summary.held_out.metrics["eval/num_problems"] == 6
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(output)
    model = AutoModelForCausalLM.from_pretrained(output)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == model.config.eos_token_id
    assert model.config.vocab_size == len(tokenizer)
    assert tokenizer.decode(tokenizer.encode(EMOJI)) == EMOJI
    task = load_task(recipe, TOKENIZER)
    texts = [prompt.text + task.solution(prompt) for prompt in task.train_prompts]  # a tokenizer is trained on both
    assert tokenizer.get_vocab() == train_tokenizer(texts, 280).get_vocab()
    record = json.loads((output / "warm_start.json").read_text())
    assert record["held_out"]["eval/num_problems"] == 6
    assert record["final_loss"] == summary.losses[-1]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]  # nothing unfinished is left beside it

    again = run_warm_start(make_recipe(tmp_path / "again"))
    assert again.losses == summary.losses
    for name in ("model.safetensors", "tokenizer.json", "config.json", "generation_config.json"):
        assert (again.output / name).read_bytes() == (output / name).read_bytes(), name
    other = make_recipe(tmp_path / "other", num_steps=1).model_copy(update={"seed": 1})
    assert run_warm_start(other).losses != summary.losses[:1]


def with_model(recipe: Recipe, **changes: Any) -> Recipe:
    return recipe.model_copy(update={"model": recipe.model.model_copy(update=changes)})


def test_a_model_is_tuned_with_its_own_tokenizer_and_saved_as_its_float32_masters(policy: Path, tmp_path: Path) -> None:
    """With `save_dtype: float32`; what RL loads in bfloat16 is what was trained."""
    changes: dict[str, Any] = {"path": policy, "architecture": None, "train_tokenizer_vocab_size": None}
    summary = run_warm_start(with_model(make_recipe(tmp_path / "wide", **changes), dtype="bfloat16"))
    assert summary.losses[-1] < summary.losses[0]
    changes["save_dtype"] = "bfloat16"
    assert (
        run_warm_start(with_model(make_recipe(tmp_path / "narrow", **changes), dtype="bfloat16")).losses
        == summary.losses
    )
    start, wide, rounded, trained, narrow = (
        load_model(path, dtype=dtype, device="cpu").embedding.detach()
        for path, dtype in (
            *((policy, torch.float32), (tmp_path / "wide", torch.float32), (tmp_path / "wide", torch.bfloat16)),
            *((tmp_path / "narrow", torch.bfloat16), (tmp_path / "narrow", torch.float32)),
        )
    )
    assert not torch.equal(wide, start)
    assert not torch.equal(wide, wide.bfloat16().float())
    assert torch.equal(rounded, trained)
    assert torch.equal(narrow, trained.float())
    assert (tmp_path / "wide" / "tokenizer.json").read_text() == (policy / "tokenizer.json").read_text()


# --- Several ranks ----------------------------------------------------------------------------------------------------


def warm_start_rank(recipe: Recipe) -> list[float]:
    """Losses of a run on each rank, whose connection the warm start finds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "open_ranks", nullcontext)
        return run_warm_start(recipe).losses


@FORKED
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_ranks_write_the_weights_of_one_process(policy: Path, tmp_path: Path, dtype: str) -> None:
    """To the last bits of float32, masters of a bfloat16 model included."""
    changes: dict[str, Any] = {"path": policy, "architecture": None, "train_tokenizer_vocab_size": None, "num_steps": 3}
    plain, shared = (with_model(make_recipe(tmp_path / name, **changes), dtype=dtype) for name in ("one", "two"))
    losses, same = run_ranks(2, warm_start_rank, shared)
    assert losses == same
    assert losses == pytest.approx(run_warm_start(plain).losses, abs=1e-6)
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys()
    for name, weight in one.items():
        assert weight.dtype == two[name].dtype == torch.float32
        torch.testing.assert_close(two[name], weight, rtol=0, atol=1e-6, msg=name)


# --- Errors -----------------------------------------------------------------------------------------------------------


def test_overwrite_renames_what_is_in_the_way(tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.mkdir()
    (output / ".lock").touch()
    for number in (1, 2):
        run_warm_start(make_recipe(output, num_steps=1, max_new_tokens=20), overwrite=True)
        assert (tmp_path / f"out.{number}").is_dir()
        load_model(output, dtype=torch.float32, device="cpu")
    assert (tmp_path / "out.1" / ".lock").is_file()
    assert json.loads((output / "warm_start.json").read_text())["num_left_out"] > 0  # solutions have 17 to 26 tokens
