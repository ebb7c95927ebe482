"""Supervised fine-tuning: the tokenizer it trains, what its loss is on, solutions with tool output, what it writes."""

import json
import math
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tiny_run
import torch
from environment_cases import END, TOKENIZER, OneTool, ask, completion_of, encode, section_of
from hypothesis import example, given
from hypothesis import strategies as st
from rank_cases import FORKED, run_ranks
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from srtrl import build_models, ranks
from srtrl.environments.base import Messages, ToolCall
from srtrl.environments.calculator import Environment
from srtrl.environments.formats import CodeTags, Hermes, MalformedCallError
from srtrl.environments.turns import EnvironmentTurns
from srtrl.metrics import read_metrics
from srtrl.model.folders import load_tokenizer
from srtrl.model.weights import load_model
from srtrl.recipe.file import load_recipe
from srtrl.recipe.schema import EnvironmentSection, Recipe, Section
from srtrl.rollout.one_turn import OneTurn
from srtrl.rollout.packing import pack
from srtrl.tasks.arithmetic import ArithmeticOptions
from srtrl.tasks.arithmetic import Task as ArithmeticTask
from srtrl.tasks.base import TaskBase, load_task
from srtrl.trainer.passes import UpdateContext
from srtrl.types import Prompt, TrainSequence
from srtrl.warm_start import training as warm_start
from srtrl.warm_start.training import (
    SupervisedLearner,
    run_warm_start,
    solution_batches,
    solution_sequence,
    train_tokenizer,
    update_plan,
)

RECIPES = Path(__file__).resolve().parent.parent / "recipes"
END_OF_TEXT = "<|endoftext|>"
TEXTS = [f"Compute {a}+{b}.\n{a}+{b}={a + b}\nAnswer: {a + b}" for a in range(20) for b in range(20)]
TRAINED = train_tokenizer(TEXTS, 290)
EMOJI = "👩‍👩‍👧 naïve \x00\x7f \r\n\t  double  spaces don't 12345 ½ ²"
TUNED: dict[str, Any] = {"architecture": None, "train_tokenizer_vocab_size": None}
"""Options of a warm start from a model, with its tokenizer."""


OUTPUTS = ["7" * 90, "", "\n", " 12\n\n", "<|endoftext|>", "<interpreter>\nx", "Traceback:\n  <code>", "é👩"]
"""A long one, of which the middle is left out; empty ones; special tokens and tags as text."""
LAST = "\nAnswer: 1"
PROMPT = Prompt(prompt_id="p", text="Compute 1+1.\n", token_ids=tuple(encode("Compute 1+1.\n")), answer="2")


class Prints(OneTool):
    """Says what `OUTPUTS` has at the number in the call."""

    def call(self, call: ToolCall) -> tuple[str, str]:
        return OUTPUTS[int(call.arguments["text"])], "ok"


class Unopened(Environment):
    """A calculator that cannot be opened here, as a sandbox on many machines."""

    @classmethod
    def open(cls, options: Section) -> AbstractContextManager[Any]:
        raise ValueError("no sandbox")


class Greets(Environment):
    """A calculator that begins with what it has opened."""

    @classmethod
    def open(cls, options: Section) -> AbstractContextManager[Any]:
        return nullcontext("Hello. ")

    def start(self, prompt: Prompt) -> Messages:
        return [{"role": "user", "content": self.shared}]


class OneSolution(TaskBase):
    """A task as far as a warm start reads it."""

    def __init__(self, text: str, number: int = 1) -> None:
        self.text = text
        self.train_prompts = [PROMPT] * number

    def solution(self, prompt: Prompt) -> str:
        return self.text


CALLS: dict[str, Any] = {
    "task__options__tool_share": 0.5,
    "rollout__environment": {"name": "calculator", "format": "code_tags", "max_turns": 3},
}
"""Solutions that call the calculator."""


def make_recipe(output: Path, *, changes: dict[str, Any] | None = None, **warm_start: Any) -> Recipe:
    """Twelve steps of a model and tokenizer from scratch; `warm_start` are values of its section."""
    return tiny_run.make_recipe(
        warm_start.pop("path", Path("unused")),
        output.parent,
        rollout__max_prompt_tokens=30,
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
        **{"rollout__max_new_tokens": 40, **(changes or {})},
    )


# --- The tokenizer ----------------------------------------------------------------------------------------------------


@given(st.text())
@example(EMOJI)
@example(f"a{END_OF_TEXT}b")
def test_any_text_comes_back(text: str) -> None:
    assert TRAINED.decode(TRAINED.encode(text, add_special_tokens=False)) == text


def test_every_digit_is_a_token_and_words_are_merged() -> None:
    tokens = TRAINED.tokenize("Compute 1234+56.")
    assert [token for token in tokens if any(character.isdigit() for character in token)] == list("123456")
    assert len(TRAINED.encode("Answer: ")) < len(b"Answer: ")
    assert len(TRAINED) <= 290
    assert (TRAINED.eos_token, TRAINED.pad_token, TRAINED.bos_token) == (END_OF_TEXT, END_OF_TEXT, None)


# --- The loss ---------------------------------------------------------------------------------------------------------


def test_loss_is_the_mean_over_answer_and_end_tokens(policy: Path, tmp_path: Path) -> None:
    """Sequences are as RL will see them: prompt tokens by the task, the solution encoded alone, an end token.

    Loss and gradient norm are those of the peer in `transformers`.
    """
    recipe = make_recipe(tmp_path)
    tokenizer = load_tokenizer(str(policy))
    task = load_task(recipe, tokenizer)
    peer = AutoModelForCausalLM.from_pretrained(policy).double()
    sequences, logprobs = [], []
    for prompt in task.train_prompts[:5]:
        solution = tokenizer.encode(task.solution(prompt), add_special_tokens=False)
        sequences.append(solution_sequence(task, OneTurn(tokenizer), prompt))
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
    optimizer = build_models.make_optimizer(model, recipe, learning_rate=1e-3, weight_decay=0.0)
    context = UpdateContext(recipe=recipe, step=1)
    assert recipe.warm_start is not None
    updates = update_plan(recipe.warm_start)
    found = SupervisedLearner(model, optimizer, updates).learn(sequences, context)
    assert found["loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert found["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)


# --- The same tokens as in a rollout ----------------------------------------------------------------------------------


def test_tokens_and_targets_are_those_of_a_rollout() -> None:
    """A policy that says the turns of a solution has the solution's tokens in the end, and the same ones as targets."""
    section = section_of(Prints, format="code_tags", max_turns=5, max_observation_tokens=60)
    for numbers in ([], [0], [1, 2], [3, 4, 5], [6, 7, 0, 1]):
        with EnvironmentTurns(section, TOKENIZER) as conversations:
            completion, text, said = None, "", []
            extension: list[int] = []
            for turn, number in [*((f"I try\n<code>{number}</code>", number) for number in numbers), (LAST, None)]:
                spoken = encode(turn) if number is not None else [*encode(turn), END]
                completion = completion_of(spoken, completion, extension)
                said += spoken
                answer = ask(conversations, completion)
                extension = answer.extension
                text += turn
                if number is not None:
                    text += f"\n<interpreter>\n{OUTPUTS[number]}\n</interpreter>\n"
            assert completion is not None
            assert answer.conversation is not None
            sequence = solution_sequence(OneSolution(text), conversations, PROMPT)
        num_prompt = len(PROMPT.token_ids)
        assert sequence.token_ids.tolist() == [*PROMPT.token_ids, *completion.response.token_ids.tolist()]
        is_model = [kind == "model" for kind, length in answer.conversation.segments for _ in range(length)]
        assert (sequence.targets == num_prompt + np.flatnonzero(is_model)).all()
        assert sequence.token_ids[sequence.targets].tolist() == said
        assert len(sequence.rollout_logprobs) == len(sequence.advantages) == len(said)
        assert sequence.num_prompt_tokens == num_prompt


@given(st.lists(st.tuples(st.text(), st.text().filter(lambda text: "</interpreter>" not in text)), max_size=3))
def test_split_is_the_inverse_of_parts(turns: list[tuple[str, str]]) -> None:
    code_tags = CodeTags(TOKENIZER, OneTool.tools)
    expected = [(f"{said.replace('<', '')}<code></code>", [output]) for said, output in turns]
    text = "".join(said + "".join(part for part, _ in code_tags.parts(outputs)) for said, outputs in expected)
    assert code_tags.split_solution(text + "end") == [*expected, ("end", [])]


def test_other_ways_to_write_a_solution() -> None:
    """Published traces, as the rows of ReTool-SFT: a line break before the tag, a blank line after the output."""
    code_tags = CodeTags(TOKENIZER, OneTool.tools)
    code = "<code>\n```python\nprint(1)\n```\n</code>"
    text = f"First.\n{code}\n<interpreter>\n1\n</interpreter>\n\nSo.\n{code}<interpreter>1</interpreter>"
    assert code_tags.split_solution(text) == [(f"First.\n{code}", ["1"]), (f"\nSo.\n{code}", ["1"]), ("", [])]
    hermes = object.__new__(Hermes)
    assert hermes.split_solution("Answer: 1") == [("Answer: 1", [])]
    with pytest.raises(MalformedCallError, match="needs the format code_tags; hermes is not supported"):
        hermes.split_solution('<tool_call>{"name": "x"}</tool_call>')


def test_what_no_rollout_could_say_is_left_out(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path / "out")
    assert recipe.warm_start is not None
    section = section_of(Prints, format="code_tags", max_turns=3)
    for text, reason in UNSAID.items():
        with EnvironmentTurns(section, TOKENIZER) as conversations:
            task: Any = OneSolution(text, number=2)
            batches = solution_batches(recipe, recipe.warm_start, task, conversations)
            with pytest.raises(ValueError, match=r"no rollout could produce any .*: that of p has ") as caught:
                next(batches)
            assert reason in str(caught.value)
            texts = iter([text, *["Answer: 1"] * 100])
            task.solution = lambda _, texts=texts: next(texts)
            batch, num_left_out = next(solution_batches(recipe, recipe.warm_start, task, conversations))
            assert num_left_out == 1, text
            assert all(TOKENIZER.decode(one.token_ids[one.targets][:-1]) == "Answer: 1" for one in batch)


UNSAID = {
    "<code>1</code>": "a </code> without <interpreter> tags after it",
    "<code>1</code> so <code>2</code>\n<interpreter>\n2\n</interpreter>\n": "a </code> without <interpreter>",
    "1\n<interpreter>\n1\n</interpreter>\n": "<interpreter> tags that do not follow a </code>",
    "<code>1</code>\n<interpreter>\n1\n": "<interpreter> tags that do not follow a </code>",
    "<code>0</code>\n<interpreter>\n0\n</interpreter>\n" * 3 + "so": "4 turns; rollout.environment.max_turns is",
    "x" * 50: "51 tokens; rollout.max_new_tokens is 40",
}
"""A solution, and why it is left out."""


# --- The run ----------------------------------------------------------------------------------------------------------


def test_from_scratch_learns_and_writes_a_model_for_transformers(tmp_path: Path) -> None:
    output = tmp_path / "out"
    recipe = make_recipe(output, changes=CALLS)
    summary = run_warm_start(recipe)
    assert summary.losses[0] == pytest.approx(math.log(280), rel=0.1)  # an untrained model knows nothing
    assert summary.losses[-1] < 0.85 * summary.losses[0]
    assert summary.held_out is not None  # with the calculator
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(output)
    model = AutoModelForCausalLM.from_pretrained(output)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == model.config.eos_token_id
    assert model.config.vocab_size == len(tokenizer)
    assert tokenizer.decode(tokenizer.encode(EMOJI)) == EMOJI
    task = load_task(recipe, TRAINED)
    texts = [prompt.text + task.solution(prompt) for prompt in task.train_prompts]  # a tokenizer is trained on both
    assert tokenizer.get_vocab() == train_tokenizer(texts, 280).get_vocab()
    record = json.loads((output / "warm_start.json").read_text())
    assert record["held_out"]["eval/num_problems"] == summary.held_out.metrics["eval/num_problems"] == 6
    assert record["final_loss"] == summary.losses[-1]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]  # nothing unfinished is left beside it

    again = run_warm_start(make_recipe(tmp_path / "again", changes=CALLS))
    assert again.losses == summary.losses
    for name in ("model.safetensors", "tokenizer.json", "config.json", "generation_config.json"):
        assert (again.output / name).read_bytes() == (output / name).read_bytes(), name
    other = make_recipe(tmp_path / "other", changes=CALLS | {"seed": 1}, num_steps=1)
    assert run_warm_start(other).losses != summary.losses[:1]


def test_noise_makes_slips_of_the_models_tokens_and_never_of_what_a_tool_says(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path, changes=CALLS | {"rollout__max_new_tokens": 90})
    assert recipe.warm_start is not None
    assert recipe.rollout.environment is not None
    task = load_task(recipe, TRAINED)
    conversations = EnvironmentTurns(recipe.rollout.environment, TRAINED)
    (noisy_batch, _), (clean_batch, _) = (
        next(solution_batches(recipe, recipe.warm_start.model_copy(update={"noise": noise}), task, conversations))
        for noise in (0.5, 0.0)
    )
    num_observed = 0
    for noisy, clean in zip(noisy_batch, clean_batch, strict=True):
        is_target = np.isin(np.arange(len(clean.token_ids)), clean.targets)
        assert (noisy.token_ids[~is_target] == clean.token_ids[~is_target]).all()
        is_noise = noisy.token_ids != clean.token_ids
        assert 0.2 < is_noise[is_target].mean() < 0.8
        assert all(str(TRAINED.decode([token])).isprintable() for token in noisy.token_ids[is_noise])
        num_observed += (~is_target).sum() - clean.num_prompt_tokens
    assert num_observed > 0


def test_a_model_is_tuned_with_its_own_tokenizer_and_saved_as_its_float32_masters(policy: Path, tmp_path: Path) -> None:
    """With `save_dtype: float32`; what RL loads in bfloat16 is what was trained."""
    bfloat16 = {"model__dtype": "bfloat16"}
    losses = []
    for name, dtype in (("wide", "float32"), ("narrow", "bfloat16")):
        recipe = make_recipe(tmp_path / name, changes=bfloat16, path=policy, save_dtype=dtype, **TUNED)
        losses.append(run_warm_start(recipe).losses)
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0]
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


def test_overwrite_renames_what_is_in_the_way(tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.mkdir()
    (output / ".lock").touch()
    recipe = make_recipe(output, changes={"rollout__max_new_tokens": 20}, num_steps=1)
    for number in (1, 2):
        run_warm_start(recipe, overwrite=True)
        assert (tmp_path / f"out.{number}").is_dir()
        load_model(output, dtype=torch.float32, device="cpu")
    assert (tmp_path / "out.1" / ".lock").is_file()
    assert json.loads((output / "warm_start.json").read_text())["num_left_out"] > 0  # solutions have 17 to 26 tokens


def test_an_environment_is_opened_where_prompts_need_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def spy(task: Any, conversations: EnvironmentTurns, prompt: Prompt) -> TrainSequence:
        seen.append(prompt.text)
        return solution_sequence(task, conversations, prompt)

    monkeypatch.setattr(warm_start, "solution_sequence", spy)
    for environment in (Unopened, Greets):
        changes = {**CALLS, "rollout__environment": section_of(environment, format="code_tags").model_dump()}
        changes["eval__before_and_after"] = False
        run_warm_start(make_recipe(tmp_path / environment.__name__, changes=changes, num_steps=2))
        assert {text.endswith("Hello. ") for text in seen} == {environment is Greets}
        seen.clear()


def test_a_share_of_the_problems_calls_the_calculator() -> None:
    options = ArithmeticOptions(num_train=300, num_eval=1, max_operand=999, max_value=10**9, tool_share=0.3)
    task = ArithmeticTask(options, tokenizer=TOKENIZER, max_prompt_tokens=100)
    called = 0
    with EnvironmentTurns(EnvironmentSection(name="calculator", format="code_tags"), TOKENIZER) as conversations:
        for prompt in task.train_prompts:
            (said, outputs), *_ = conversations.format.split_solution(task.solution(prompt))
            if outputs:
                called += 1
                assert conversations.format.parse(said)[0].arguments["expression"] == prompt.metadata["problem"]
                assert outputs == [prompt.answer]
            assert task.verifier(task.solution(prompt), prompt.answer)
    assert 0.2 < called / 300 < 0.4


def test_the_cold_start_of_retool_on_rows_of_its_form(tmp_path: Path) -> None:
    tokenizer = load_tokenizer("bundled:tiny")
    tokenizer.chat_template = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}<AI>"
    rows = [conversation(number) for number in range(8)]
    rows.append({"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "no box"}]})
    rows.append(conversation(9, tag="</code>\nno output\n"))
    file = tmp_path / "retool.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    changes = [f"task.options.train={{files: [{file}]}}", "rollout.environment.name=calculator"]  # it opens no sandbox
    recipe = load_recipe(RECIPES / "warm_start_retool.yaml", changes)
    assert recipe.warm_start is not None
    assert recipe.rollout.environment is not None
    task: Any = load_task(recipe, tokenizer)
    assert task.load_report["train/malformed"] == 1
    prompt = task.train_prompts[3]
    assert (prompt.text, prompt.answer) == ("<user>*user question:*\nWhat is 3 + 3?<AI>", "6")
    conversations = EnvironmentTurns(recipe.rollout.environment, tokenizer)
    sequence = solution_sequence(task, conversations, prompt)
    assert tokenizer.decode(sequence.token_ids[sequence.targets]) == (
        "I run code.\n<code>\n```python\nprint(3 + 3)\n```\n</code>"
        "\nThat is it.\n<answer>\n\\boxed{6}\n</answer><|endoftext|>"
    )
    batch, num_left_out = next(solution_batches(recipe, recipe.warm_start, task, conversations))
    assert abs(len(batch) - 8 * num_left_out) < 8, "the one without output, in each epoch"


def conversation(number: int, tag: str = "</code>\n<interpreter>\n{}\n</interpreter>\n\n") -> dict[str, Any]:
    """A row of the data set's form."""
    said = f"I run code.\n<code>\n```python\nprint({number} + {number})\n```\n{tag.format(2 * number)}That is it.\n"
    question = f"*user question:*\nWhat is {number} + {number}?"
    answer = f"{said}<answer>\n\\boxed{{{2 * number}}}\n</answer>"
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


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
    section: dict[str, Any] = {**TUNED, "path": policy, "num_steps": 3}
    changes = {"model__dtype": dtype}
    plain, shared = (make_recipe(tmp_path / name, changes=changes, **section) for name in ("one", "two"))
    losses, same = run_ranks(2, warm_start_rank, shared)
    assert losses == same
    assert losses == pytest.approx(run_warm_start(plain).losses, abs=1e-6)
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys()
    for name, weight in one.items():
        assert weight.dtype == two[name].dtype == torch.float32
        torch.testing.assert_close(two[name], weight, rtol=0, atol=1e-6, msg=name)


# --- What comes of it -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_tools_tiny_learns_to_call_the_calculator(tmp_path: Path) -> None:
    """Eight steps of the recipe, with the bundled policy: half a minute."""
    changes = ["train.num_steps=8", "eval.before_and_after=false", "eval.every_steps=null", f"output_dir={tmp_path}"]
    result = tiny_run.train(load_recipe(RECIPES / "tools_tiny.yaml", changes))
    rows = read_metrics(result.folder / "metrics.jsonl")
    for name in ("environment/outcome_ok", "accuracy"):
        values = [row[name] for row in rows]
        assert sum(values[-2:]) > 1.3 * sum(values[:2]), name
