"""The procedural arithmetic task: right solutions, disjoint splits, a verifier that nothing upsets."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from task_cases import byte_tokenizer, cases_in

from srtrl.tasks.arithmetic import ArithmeticOptions, Task, draw_expressions, is_correct, split_of
from srtrl.tasks.rendering import tokenise
from srtrl.types import Prompt


def test_solutions_are_right_steps_of_their_expressions() -> None:
    """Doing the steps in the text, one after another, leads to the answer: no step comes before what it needs."""
    options = ArithmeticOptions(num_train=1000, max_operations=6)
    for expression in draw_expressions(options, "train"):
        text = expression.text
        assert eval(text) == expression.value
        assert len(expression.steps) == len(re.findall(r"[-+*]", text)) in range(2, 7)
        for step in expression.steps:
            left, right = step.split("=")
            assert eval(left) == int(right) in range(1000)
            pattern = re.compile(rf"\({re.escape(left)}\)|(?<!\d){re.escape(left)}(?!\d)")
            text, num_replaced = pattern.subn(right, text, count=1)
            assert num_replaced == 1, (expression, step, text)
        assert text == str(expression.value)


def test_problems_have_bounds_are_seeded_and_splits_disjoint_whatever_the_seed() -> None:
    bounds = {"min_operations": 1, "max_operations": 2, "max_operand": 5, "max_value": 9}
    for expression in draw_expressions(ArithmeticOptions(**bounds, num_train=40, num_eval=5), "train"):
        assert all(1 <= int(operand) <= 5 for operand in re.findall(r"\d+", expression.text))
        assert expression.value <= 9
    options = [ArithmeticOptions(seed=seed, num_train=2000) for seed in range(3)]
    train = {expression.text for option in options for expression in draw_expressions(option, "train")}
    held_out = {expression.text for option in options for expression in draw_expressions(option, "eval")}
    assert not train & held_out
    assert len(held_out) > 1000
    assert 0.11 < sum(split_of(f"{i}+{i}") == "eval" for i in range(8000)) / 8000 < 0.14
    few, many, other = (
        [expression.text for expression in draw_expressions(ArithmeticOptions(num_train=num, seed=seed), "train")]
        for num, seed in ((200, 0), (400, 0), (200, 1))
    )
    assert few == many[:200] != other
    assert len(set(many)) == 400


def test_task_has_tokenised_prompts_and_right_solutions() -> None:
    tokenizer = byte_tokenizer()
    task = Task(ArithmeticOptions(num_train=50, num_eval=20), tokenizer=tokenizer, max_prompt_tokens=64)
    assert (len(task.train_prompts), len(task.eval_prompts)) == (50, 20)
    assert task.load_report == {"train/rows": 50, "eval/rows": 20}
    for prompt in [*task.train_prompts, *task.eval_prompts]:
        assert prompt.token_ids[0] == tokenizer.bos_token_id
        assert tokenizer.decode(list(prompt.token_ids[1:])) == prompt.text
        assert eval(prompt.text.removeprefix("Compute ").removesuffix(".\n")) == int(prompt.answer)
        assert task.verifier(task.solution(prompt), prompt.answer)
        assert not task.verifier(task.solution(prompt), prompt.answer + "1")
    assert len({prompt.prompt_id for prompt in [*task.train_prompts, *task.eval_prompts]}) == 70
    with pytest.raises(ValueError, match=r"tokens, rollout.max_prompt_tokens is 12; raise it, or lower"):
        Task(ArithmeticOptions(num_train=50, num_eval=20), tokenizer=tokenizer, max_prompt_tokens=12)


def test_tokenise_refuses_an_end_token_and_no_tokens() -> None:
    prompts = [Prompt(prompt_id="0", text=text, token_ids=(), answer="") for text in ("ab", "")]
    with pytest.raises(ValueError, match="ends every prompt with its end token '</s>'"):
        tokenise(byte_tokenizer("$A </s>"), prompts[:1])
    with pytest.raises(ValueError, match="no tokens for the prompt ''"):
        tokenise(byte_tokenizer("$A"), prompts)
    (plain,) = tokenise(byte_tokenizer(), prompts[:1], add_special_tokens=False)
    assert list(plain.token_ids) == byte_tokenizer("$A")("ab")["input_ids"]


def test_the_last_integer_that_is_marked_counts() -> None:
    for line in cases_in("integers.txt"):
        known, _, answer = line.partition(" => ")
        assert is_correct(known, answer.removeprefix("not ")) is not answer.startswith("not "), line


@given(st.text(), st.integers())
def test_verifier_takes_any_text(text: str, value: int) -> None:
    assert is_correct(f"{text}\nAnswer: {value}", str(value))
    assert not is_correct(f"{text}\nAnswer: {value}", str(value + 1))
    assert is_correct(text, str(value)) in (True, False)
