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
from rank_cases import run_ranks
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from srtrl.model.weights import load_model, load_tokenizer
from srtrl.ranks.processes import Ranks
from srtrl.recipe.schema import Recipe
from srtrl.rollout.packing import pack
from srtrl.run.interrupt import UpdateMemoryError
from srtrl.run.progress import RunProgress
from srtrl.tasks.base import load_task
from srtrl.trainer import build
from srtrl.trainer.passes import UpdateContext
from srtrl.warm_start import training as warm_start
from srtrl.warm_start.training import (
    SupervisedObjective,
    WarmStartSummary,
    run_warm_start,
    solution_sequence,
    supervised_step,
    train_tokenizer,
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


def run(recipe: Recipe, **options: Any) -> WarmStartSummary:
    return run_warm_start(recipe, progress=RunProgress(12), **options)


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
        sequences.append(solution_sequence(task, tokenizer, prompt))
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
    found = supervised_step(SupervisedObjective(model), optimizer, sequences, context)
    assert found["loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert found["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)


# --- The run ----------------------------------------------------------------------------------------------------------


def test_from_scratch_learns_and_writes_a_model_for_transformers(tmp_path: Path) -> None:
    output = tmp_path / "out"
    summary = run(make_recipe(output, num_steps=30))
    assert summary.losses[0] == pytest.approx(math.log(280), rel=0.1)  # an untrained model knows nothing
    assert summary.losses[-1] < 0.7 * summary.losses[0]
    assert summary.held_out is not None
    assert summary.held_out.metrics["eval/num_problems"] == 6
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(output)
    model = AutoModelForCausalLM.from_pretrained(output)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == model.config.eos_token_id
    assert model.config.vocab_size == len(tokenizer)
    assert tokenizer.decode(tokenizer.encode(EMOJI)) == EMOJI
    record = json.loads((output / "warm_start.json").read_text())
    assert record["held_out"]["eval/num_problems"] == 6
    assert record["final_loss"] == summary.losses[-1]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]  # nothing unfinished is left beside it

    again = run(make_recipe(tmp_path / "again", num_steps=30))
    assert again.losses == summary.losses
    for name in ("model.safetensors", "tokenizer.json", "config.json", "generation_config.json"):
        assert (again.output / name).read_bytes() == (output / name).read_bytes(), name
    assert run(make_recipe(tmp_path / "other").model_copy(update={"seed": 1})).losses != summary.losses[:12]


def test_fine_tunes_a_model_with_its_own_tokenizer(policy: Path, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"architecture": None, "train_tokenizer_vocab_size": None, "save_dtype": "bfloat16"}
    summary = run(make_recipe(tmp_path / "out", path=policy, **changes))
    assert summary.losses[-1] < summary.losses[0]
    tuned = load_model(tmp_path / "out", dtype=torch.float32, device="cpu")
    start = load_model(str(policy), dtype=torch.float32, device="cpu")
    assert not torch.equal(tuned.embedding, start.embedding)
    assert torch.equal(tuned.embedding, tuned.embedding.bfloat16().float())
    assert (tmp_path / "out" / "tokenizer.json").read_text() == (policy / "tokenizer.json").read_text()


def test_a_bfloat16_model_is_saved_as_its_float32_masters(tmp_path: Path) -> None:
    """With `save_dtype: float32`; what RL loads in bfloat16 is what was trained."""
    summary = run(with_model(make_recipe(tmp_path / "wide"), dtype="bfloat16"))
    narrow = run(with_model(make_recipe(tmp_path / "narrow", save_dtype="bfloat16"), dtype="bfloat16"))
    assert summary.losses == narrow.losses
    wide, rounded, trained = (
        load_model(tmp_path / name, dtype=dtype, device="cpu").embedding.detach()
        for name, dtype in (("wide", torch.float32), ("wide", torch.bfloat16), ("narrow", torch.bfloat16))
    )
    assert not torch.equal(wide, wide.bfloat16().float())
    assert torch.equal(rounded, trained)


def with_model(recipe: Recipe, **changes: Any) -> Recipe:
    return recipe.model_copy(update={"model": recipe.model.model_copy(update=changes)})


# --- Several ranks ----------------------------------------------------------------------------------------------------


def warm_start_rank(ranks: Ranks, recipes: list[Recipe]) -> list[list[float]]:
    """Runs on each rank, whose connection the warm start finds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warm_start, "open_ranks", lambda: nullcontext(ranks))
        return [run(recipe).losses for recipe in recipes]


def test_sharded_ranks_write_the_weights_of_one_process(tmp_path: Path) -> None:
    """To the last bits of float32, masters of a bfloat16 model included.

    Embeddings are not tied: a bfloat16 matrix that is used twice has a sum of two gradients, which `fully_shard` rounds
    to bfloat16 in some versions of torch (2.13) and not in others (2.15).
    """
    path = tiny_run.make_policy(tmp_path / "untied", tie_word_embeddings=False)
    changes: dict[str, Any] = {"path": path, "architecture": None, "train_tokenizer_vocab_size": None, "num_steps": 4}
    dtypes = ("float32", "bfloat16")
    plain, sharded = (
        [with_model(make_recipe(tmp_path / name / dtype, **changes), dtype=dtype) for dtype in dtypes]
        for name in ("plain", "sharded")
    )
    sharded = [one.model_copy(update={"train": one.train.model_copy(update={"sharding": "fsdp2"})}) for one in sharded]
    found, same = run_ranks(2, warm_start_rank, sharded)
    assert found == same
    for recipe, losses, dtype in zip(plain, found, dtypes, strict=True):
        assert losses == pytest.approx(run(recipe).losses, abs=1e-6)
        one, two = (load_file(tmp_path / name / dtype / "model.safetensors") for name in ("plain", "sharded"))
        assert one.keys() == two.keys()
        for name, weight in one.items():
            assert weight.dtype == two[name].dtype == torch.float32
            torch.testing.assert_close(two[name], weight, rtol=0, atol=1e-6, msg=name)
    with pytest.raises(ValueError, match=r"train\.sharding: fsdp2 .* found one: start with torchrun"):
        run(sharded[0], overwrite=True)


# --- Errors -----------------------------------------------------------------------------------------------------------


def test_a_device_that_is_too_small_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_out(*_: Any, **__: Any) -> float:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(warm_start, "run_optimizer_steps", run_out)
    with pytest.raises(UpdateMemoryError) as caught:
        run(make_recipe(tmp_path / "out"))
    text = str(caught.value)
    assert text.startswith("warm start step 1: the device's memory is too small. CUDA out of memory.")
    assert "model.gradient_checkpointing=true" in text
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_is_trained_on_prompts_with_their_solutions(policy: Path, tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path / "out", num_steps=1)
    task = load_task(recipe, load_tokenizer(str(policy)))
    texts = [prompt.text + task.solution(prompt) for prompt in task.train_prompts]
    run(recipe)
    assert load_tokenizer(str(tmp_path / "out")).get_vocab() == train_tokenizer(texts, 280).get_vocab()


def test_overwrite_renames_what_is_in_the_way(tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.mkdir()
    (output / ".lock").touch()
    for number in (1, 2):
        run(make_recipe(output, num_steps=1, max_new_tokens=20), overwrite=True)
        assert (tmp_path / f"out.{number}").is_dir()
        load_model(output, dtype=torch.float32, device="cpu")
    assert (tmp_path / "out.1" / ".lock").is_file()
    assert json.loads((output / "warm_start.json").read_text())["num_left_out"] > 0  # solutions have 17 to 26 tokens
