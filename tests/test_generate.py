"""`srtrl generate` and `srtrl.generate`: order, reproducibility, rows that other commands read, and mistakes."""

import json
import re
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench_cases import write_rows
from tiny_run import VOCAB_SIZE, make_checkpoint, make_policy, make_recipe, train
from typer.testing import CliRunner, Result

from srtrl import generate
from srtrl.bench.recorded import read_recorded
from srtrl.cli import app
from srtrl.engine.stopping import UNKNOWN, count_unknown, decode
from srtrl.metrics import read_metrics
from srtrl.model.folders import load_tokenizer
from srtrl.recipe.file import load_recipe
from srtrl.recipe.schema import TaskSection
from srtrl.report.rollouts import read_samples
from srtrl.report.runs import read_run
from srtrl.run.step_metrics import step_problems
from srtrl.tasks.base import typed_prompts
from srtrl.tasks.rendering import apply_chat_template

SAMPLED = ("text", "token_ids", "logprobs", "finish_reason")


def run(policy: Path, *arguments: object) -> tuple[Result, list[dict[str, Any]]]:
    """Exit and rows of `srtrl generate --json`."""
    result = CliRunner().invoke(app, ["generate", str(policy), *(str(argument) for argument in arguments), "--json"])
    return result, [json.loads(line) for line in result.stdout.splitlines()]


def test_rows_are_in_order_whole_and_the_same_at_any_number_of_slots(policy: Path, tmp_path: Path) -> None:
    """A line separator inside a text ends no row."""
    rows = [{"id": f"p{index}", "prompt": "1+" * index + "1=\u2028"} for index in (5, 1, 3)]
    prompts = write_rows(tmp_path / "prompts.jsonl", *rows)
    flags = ("--prompts", prompts, "--prompt", "2+2=", "--samples", 3, "rollout.max_new_tokens=12", "seed=4")
    result, found = run(policy, *flags, "rollout.slots=9")
    assert result.exit_code == 0
    expected = list(product(("p5", "p1", "p3", "3"), range(3)))
    assert [(row["prompt_id"], row["sample_index"]) for row in found] == expected
    for row in found:
        assert list(row) == ["prompt_id", "prompt_token_ids", "sample_index", *SAMPLED]
        assert len(row["token_ids"]) == len(row["logprobs"]) <= 12
        assert all(value < 0 for value in row["logprobs"])
        assert row["finish_reason"] == ("length" if len(row["token_ids"]) == 12 else "stop")
    assert len({tuple(row["token_ids"]) for row in found}) > 5
    assert run(policy, *flags, "rollout.slots=2", "rollout.drafter=none")[1] == found
    assert run(policy, *flags[:-1], "seed=5")[1] != found
    [recorded] = read_recorded(write_rows(tmp_path / "rows.jsonl", *found), tokenizer=None, max_tokens=100)
    samples = [sample.tokens.tolist() for prompt in recorded for sample in prompt.samples]
    assert samples == [row["token_ids"] for row in found]


def test_greedy_samples_are_equal_and_text_is_truncated_before_a_stop_string(policy: Path) -> None:
    flags = ("--prompt", "12+30=", "eval.temperature=0", "rollout.max_new_tokens=20")
    _, (first, second) = run(policy, *flags, "--samples", 2)
    assert first["token_ids"] == second["token_ids"]
    stop = first["text"][4:6]
    drafter = "rollout.drafter=none"
    result, (stopped,) = run(policy, *flags, f"rollout.stop_strings=[{json.dumps(stop)}]", drafter)
    assert "imports" not in result.stderr, "of a model, names are the user's own"
    shown = CliRunner().invoke(app, ["generate", str(policy), *map(str, flags), "--samples", "2"]).stdout
    assert re.match(r"=== prompt 0\n12\+30=\n--- sample 0: \d+ tokens, \w+\n", shown)
    assert (shown.count("12+30="), shown.count("--- sample ")) == (1, 2)
    assert stopped["text"] == first["text"][: first["text"].index(stop)]
    assert stopped["finish_reason"] == "stop"


def test_a_run_is_completed_by_its_last_checkpoint_and_recipe_as_from_python(policy: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    make_checkpoint(policy, folder, 3)
    shutil.copy(Path(__file__).parent.parent / "recipes" / "dapo_tiny.yaml", folder / "recipe.yaml")
    limits = ["rollout.max_prompt_tokens=50", "rollout.max_new_tokens=12"]
    flags = ("--prompt", "Compute 12+30.", "--prompt", "5*6", "--samples", 2)
    _, rows = run(folder, *flags, *limits)
    groups = generate(str(folder), ["12+30", "5*6"], num_samples=2, overrides=limits)
    assert [row["token_ids"] for row in rows] == [one.token_ids for group in groups for one in group]
    assert [row["text"] for row in rows] == [one.text for group in groups for one in group]
    mapping = {"rollout.max_prompt_tokens": 50, "rollout.max_new_tokens": 12}
    assert generate(str(policy), ["5*6"], overrides=mapping) == generate(str(policy), ["5*6"], overrides=limits)
    temperature = load_recipe(folder / "recipe.yaml").eval.temperature
    limits.append(f"eval.temperature={temperature}")
    whole = ("--prompt", "Compute 12+30.\n", "--prompt", "Compute 5*6.\n", "--samples", 2)
    assert rows == run(policy, *whole, *limits)[1], "a text goes through the template of the run's task"
    assert run(folder, *flags, *limits, "--raw")[1] == run(policy, *flags, *limits)[1] != rows


CHAT = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "1+1?"}]
TYPED: list[tuple[str, dict[str, Any], Any, Any]] = [
    ("math", {"prompt_template": "Q: {problem}\nA:"}, "1+1?", ("Q: 1+1?\nA:", None)),
    (
        "prompts",
        {"chat_template": True, "system_prompt": "Be short."},
        "1+1?",
        ("1+1?", [{"role": "system", "content": "Be short."}, CHAT[1]]),
    ),
    (
        "prompts",
        {"prompt_template": "Q: {prompt}"},
        CHAT,
        ("Q: 1+1?", [CHAT[0], {"role": "user", "content": "Q: 1+1?"}]),
    ),
]
"""A task of rows, its options, a text or messages, and what the policy is asked."""


def test_what_is_typed_goes_through_the_templates_of_a_task_of_rows() -> None:
    for name, options, typed, expected in TYPED:
        task = TaskSection(name=name, options={**options, "train": {"files": ["absent.jsonl"]}})
        assert typed_prompts(task, [typed]) == [expected]
    with pytest.raises(ValueError, match="prompts of the task arithmetic are texts, not messages"):
        typed_prompts(TaskSection(name="arithmetic", options={"num_train": 9, "num_eval": 1}), [CHAT])


def test_the_bundled_policy_reads_messages_as_lines() -> None:
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Compute 1+2."}]
    (text,) = apply_chat_template(load_tokenizer("bundled:tiny"), [messages], {})
    assert text == "Be short.\nCompute 1+2.\n"


def test_messages_go_through_the_chat_template(policy: Path, tmp_path: Path) -> None:
    chatty = Path(shutil.copytree(policy, tmp_path / "chatty"))
    template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    (chatty / "chat_template.jinja").write_text(template)
    rows = write_rows(tmp_path / "rows.jsonl", {"messages": CHAT, "id": "a"}, {"messages": CHAT[1:]})
    given = ("--prompts", rows, "--prompt", "2+2=", "rollout.max_new_tokens=2", "--raw")
    result, found = run(chatty, *given, "--chat")
    assert result.exit_code == 0, result.output
    texts = ["<system>Be kind.<user>1+1?", "<user>1+1?", "<user>2+2="]
    tokenizer = load_tokenizer(str(chatty))
    assert [row["prompt_token_ids"] for row in found] == [tokenizer.encode(t, add_special_tokens=False) for t in texts]
    mixed, _ = run(chatty, *given)
    assert (mixed.exit_code, "some are messages, others texts: --chat" in mixed.stderr) == (2, True)


def test_mistakes_are_named_and_those_of_a_file_counted_after_the_third(policy: Path, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", {"prompt": "1+1="}, {"messages": CHAT[:1]}, *[{"text": "1+1="}] * 9)
    result, _ = run(policy, "--prompts", rows)
    first, second, third, more = result.stderr.splitlines()
    assert first == f"error: {rows}:2: the last message of `messages` must be the user's, it is of the role system"
    assert second == f"  {rows}:3: expected {{\"prompt\": TEXT}} or {{\"messages\": [...]}}, found {{'text': '1+1='}}"
    assert (third.startswith(f"  {rows}:4: "), more, result.exit_code) == (True, "  ... and 7 more", 2)
    mistakes: list[tuple[Any, str]] = [
        ("1+1=", "prompts: expected a list of texts"),
        ([], "prompts: expected at least one"),
        (["1+1=", ["2+2="]], "prompts.1.0: expected {.role"),
    ]
    for prompts, message in mistakes:
        with pytest.raises(ValueError, match=message) as caught:
            generate(str(policy), prompts)
        assert len(caught.traceback) == 2, "this function and the first of srtrl"


def test_tokens_that_the_tokenizer_lacks_are_said_counted_and_seen_in_texts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The tokenizer has 257 of the vocabulary's 300 tokens; stop strings may lie in their texts, or span them."""
    wide, said = make_policy(tmp_path / "wide", vocab_size=300), "the tokenizer lacks 43 of the model's tokens"
    flags = ("--prompt", "1+1=", "--samples", 6, "rollout.max_new_tokens=20", "rollout.drafter=none")
    _, rows = run(wide, *flags)
    assert [record.message for record in caplog.records] == [f"{said}; in texts they are <|unknown|>"]
    for row in rows:
        assert row["text"].count(UNKNOWN) == sum(token >= VOCAB_SIZE for token in row["token_ids"])
    text = next(row["text"] for row in rows if UNKNOWN in row["text"][1:])
    place = text.index(UNKNOWN, 1)
    for stop in (text[place - 1 : place + len(UNKNOWN)], UNKNOWN[-3:], UNKNOWN + UNKNOWN):
        stopping = f"rollout.stop_strings=[{json.dumps(stop)}]"
        _, stopped = run(wide, *flags, stopping)
        assert [row["text"] for row in stopped] == [row["text"].partition(stop)[0] for row in rows]
        assert [row["finish_reason"] == "stop" for row in stopped] == [
            stop in row["text"] or row["finish_reason"] == "stop" for row in rows
        ]
        assert run(wide, *flags[:-1], stopping)[1] == stopped, "speculation is exact"
    result_of_training = train(make_recipe(wide, tmp_path, train__num_steps=1, eval__every_steps=None))
    (row,) = (row for row in read_metrics(result_of_training.folder / "metrics.jsonl") if row["step"] == 1)
    samples = read_samples(read_run(result_of_training.folder), step=1)
    assert row["tokens/unknown"] == sum(sample["text"].count(UNKNOWN) for sample in samples) > 0
    assert f"{row['tokens/unknown']} tokens that the tokenizer does not have" in step_problems(row)


def test_known_tokens_are_decoded_as_the_tokenizer_does() -> None:
    tokenizer = load_tokenizer("bundled:tiny")
    end, text = tokenizer.eos_token_id, tokenizer.encode("Zürich: 12+30=")
    for token_ids in ([], text, [*text, end], text[1:2]):
        assert decode(tokenizer, token_ids) == tokenizer.decode(token_ids)
        assert decode(tokenizer, token_ids, skip_special_tokens=True) == tokenizer.decode(
            token_ids, skip_special_tokens=True
        )
    assert decode(tokenizer, [5000]) == UNKNOWN
    mixed = [5000, *text, 5001, 5002, *text, end]
    expected = f"{UNKNOWN}Zürich: 12+30={UNKNOWN}{UNKNOWN}Zürich: 12+30="
    assert decode(tokenizer, mixed, skip_special_tokens=True) == expected
    assert count_unknown(tokenizer, np.array([*mixed, 5002])) == 4
