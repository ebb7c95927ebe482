"""Warm start on solutions with tool output: the same tokens as in a rollout, and a loss on the model's turns only."""

import json
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import test_warm_start
import tiny_run
from environment_cases import END, TOKENIZER, OneTool, ask, completion_of, encode, section_of
from hypothesis import given
from hypothesis import strategies as st

from srtrl.environments.base import Messages, ToolCall
from srtrl.environments.calculator import Environment
from srtrl.environments.formats import CodeTags, Hermes, MalformedCallError
from srtrl.environments.turns import EnvironmentTurns
from srtrl.metrics import read_metrics
from srtrl.model.folders import load_tokenizer
from srtrl.recipe.file import load_recipe
from srtrl.recipe.schema import EnvironmentSection, Recipe, Section
from srtrl.tasks.arithmetic import ArithmeticOptions
from srtrl.tasks.arithmetic import Task as ArithmeticTask
from srtrl.tasks.base import load_task
from srtrl.types import Prompt, TrainSequence
from srtrl.warm_start import training as warm_start
from srtrl.warm_start.training import run_warm_start, solution_batches, solution_sequence

RECIPES = Path(__file__).resolve().parent.parent / "recipes"
CHAT_TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}<assistant>"
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


class OneSolution:
    """A task as far as a warm start reads it."""

    def __init__(self, text: str, number: int = 1) -> None:
        self.text = text
        self.train_prompts = [PROMPT] * number

    def solution(self, prompt: Prompt) -> str:
        return self.text


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
            sequence = solution_sequence(OneSolution(text), conversations, PROMPT)  # type: ignore[arg-type]
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


def make_recipe(output: Path, **changes: Any) -> Recipe:
    """A model and tokenizer from scratch, on arithmetic with calls of the calculator."""
    recipe = test_warm_start.make_recipe(output, **{"num_steps": 30, "batch_tokens": 400, **changes})
    values = recipe.model_dump(exclude_unset=True)
    values["task"]["options"]["tool_share"] = 0.5
    values["rollout"]["environment"] = {"name": "calculator", "format": "code_tags", "max_turns": 3}
    return Recipe.model_validate(values)


def test_a_run_learns_calls_and_leaves_outputs_as_they_are(tmp_path: Path) -> None:
    """Noise makes slips of the model's tokens and never of what a tool says."""
    recipe = make_recipe(tmp_path / "out")
    summary = run_warm_start(recipe)
    assert summary.losses[-1] < 0.8 * summary.losses[0]
    assert summary.held_out is not None  # with the calculator
    tokenizer = load_tokenizer(str(tmp_path / "out"))
    task = load_task(recipe, tokenizer)
    assert recipe.warm_start is not None
    assert recipe.rollout.environment is not None
    conversations = EnvironmentTurns(recipe.rollout.environment, tokenizer)
    noise = recipe.warm_start.model_copy(update={"noise": 0.5})
    noisy_batch, _ = next(solution_batches(recipe, noise, task, conversations))
    clean_batch, _ = next(solution_batches(recipe, recipe.warm_start, task, conversations))
    num_observed = 0
    for noisy, clean in zip(noisy_batch, clean_batch, strict=True):
        is_target = np.isin(np.arange(len(clean.token_ids)), clean.targets)
        assert (noisy.token_ids[~is_target] == clean.token_ids[~is_target]).all()
        is_noise = noisy.token_ids != clean.token_ids
        assert 0.2 < is_noise[is_target].mean() < 0.8
        assert all(str(tokenizer.decode([token])).isprintable() for token in noisy.token_ids[is_noise])
        num_observed += (~is_target).sum() - clean.num_prompt_tokens
    assert num_observed > 0


def test_an_environment_is_opened_where_prompts_need_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def spy(task: Any, conversations: EnvironmentTurns, prompt: Prompt) -> TrainSequence:
        seen.append(prompt.text)
        return solution_sequence(task, conversations, prompt)

    monkeypatch.setattr(warm_start, "solution_sequence", spy)
    for environment, output in ((Unopened, "unopened"), (Greets, "greets")):
        recipe = make_recipe(tmp_path / output, num_steps=2)
        section = section_of(environment, format="code_tags")
        rollout = recipe.rollout.model_copy(update={"environment": section})
        without_eval = recipe.eval.model_copy(update={"before_and_after": False})
        run_warm_start(recipe.model_copy(update={"rollout": rollout, "eval": without_eval}))
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
    policy = tiny_run.make_policy(tmp_path / "policy")
    tokenizer = load_tokenizer(str(policy))
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(policy)
    rows = [conversation(number) for number in range(8)]
    rows.append({"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "no box"}]})
    rows.append(conversation(9, tag="</code>\nno output\n"))
    file = tmp_path / "retool.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    recipe = load_recipe(
        RECIPES / "warm_start_retool.yaml",
        [
            f"model.path={policy}",
            "device=cpu",
            "model.dtype=float32",
            f"task.options.train={{files: [{file}]}}",
            "rollout.environment.name=calculator",  # the form of its calls is all that a warm start reads
            "rollout.max_new_tokens=200",
            "warm_start.num_steps=8",
            "warm_start.batch_tokens=500",
            "warm_start.learning_rate=0.01",
            "warm_start.warmup_steps=0",
            f"warm_start.output={tmp_path / 'out'}",
        ],
    )
    summary = run_warm_start(recipe)
    assert summary.losses[-1] < summary.losses[0]
    assert json.loads((tmp_path / "out" / "warm_start.json").read_text())["num_left_out"] > 0
    task: Any = load_task(recipe, tokenizer)
    assert task.load_report["train/malformed"] == 1
    prompt = task.train_prompts[3]
    assert (prompt.text, prompt.answer) == ("<user>*user question:*\nWhat is 3 + 3?<assistant>", "6")
    assert recipe.rollout.environment is not None
    conversations = EnvironmentTurns(recipe.rollout.environment, tokenizer)
    sequence = solution_sequence(task, conversations, prompt)
    assert tokenizer.decode(sequence.token_ids[sequence.targets]) == (
        "I run code.\n<code>\n```python\nprint(3 + 3)\n```\n</code>"
        "\nThat is it.\n<answer>\n\\boxed{6}\n</answer><|endoftext|>"
    )


def conversation(number: int, tag: str = "</code>\n<interpreter>\n{}\n</interpreter>\n\n") -> dict[str, Any]:
    """A row of the data set's form."""
    said = f"I run code.\n<code>\n```python\nprint({number} + {number})\n```\n{tag.format(2 * number)}That is it.\n"
    question = f"*user question:*\nWhat is {number} + {number}?"
    answer = f"{said}<answer>\n\\boxed{{{2 * number}}}\n</answer>"
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


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
