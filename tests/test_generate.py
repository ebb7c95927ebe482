"""`srtrl generate`: order, reproducibility, and prompts that cannot be served beside those that can."""

import json
import os
import re
import shutil
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_cases import write_rows
from rank_cases import CONTEXT, free_port
from tiny_run import VOCAB_SIZE, make_checkpoint, make_policy
from typer.testing import CliRunner, Result

from srtrl import generate
from srtrl.bench.recorded import read_recorded
from srtrl.cli import app
from srtrl.model.weights import load_tokenizer


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_policy(tmp_path_factory.mktemp("models") / "tiny")


def run(policy: Path, *arguments: object) -> tuple[Result, list[dict[str, Any]]]:
    """Exit and rows of `srtrl generate --json`."""
    result = CliRunner().invoke(app, ["generate", str(policy), *(str(argument) for argument in arguments), "--json"])
    return result, [json.loads(line) for line in result.stdout.splitlines()]


def test_rows_are_in_order_whole_and_the_same_at_any_number_of_slots(policy: Path, tmp_path: Path) -> None:
    rows = [{"id": f"p{index}", "prompt": "1+" * index + "1="} for index in (5, 1, 3)]
    prompts = write_rows(tmp_path / "prompts.jsonl", *rows)
    flags = ("--prompts", prompts, "--samples", 3, "--max-new-tokens", 12, "--seed", 4)
    result, found = run(policy, *flags, "--slots", 9)
    assert result.exit_code == 0
    expected = list(product(("p5", "p1", "p3"), range(3)))
    assert [(row["prompt_id"], row["sample_index"]) for row in found] == expected
    for row in found:
        assert set(row) == {
            *("prompt_id", "sample_index", "prompt_token_ids", "token_ids", "text", "logprobs", "finish_reason")
        }
        assert len(row["token_ids"]) == len(row["logprobs"]) <= 12
        assert all(value < 0 for value in row["logprobs"])
        assert row["finish_reason"] == ("length" if len(row["token_ids"]) == 12 else "stop")
    assert len({tuple(row["token_ids"]) for row in found}) > 5
    assert run(policy, *flags, "--slots", 2)[1] == found
    assert run(policy, *flags[:-1], 5)[1] != found


def on_rank(queue: Any, variables: dict[str, str], arguments: list[str]) -> None:
    """`srtrl ARGUMENTS` as one of several processes."""
    torch.set_num_threads(1)
    os.environ |= variables
    result = CliRunner().invoke(app, arguments)
    queue.put((int(variables["RANK"]), (result.exit_code, result.stdout, result.stderr)))


def test_ranks_share_the_prompts_and_one_prints_what_one_process_does(policy: Path, tmp_path: Path) -> None:
    rows = [{"id": f"p{index}", "prompt": "1+" * index + "1="} for index in (5, 1, 3)] + [{"id": "none", "prompt": ""}]
    prompts = write_rows(tmp_path / "prompts.jsonl", *rows)
    arguments = ["generate", str(policy), "--prompts", str(prompts), "--samples", "3", "--max-new-tokens", "12"]
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    queue = CONTEXT.Queue()
    processes = [CONTEXT.Process(target=on_rank, args=(queue, common | {"RANK": rank}, arguments)) for rank in "01"]
    for process in processes:
        process.start()
    found = dict(queue.get(timeout=120) for _ in processes)
    one = CliRunner().invoke(app, arguments)
    assert found[0][:2] == (one.exit_code, one.stdout)
    assert found[0][2].splitlines()[0] == one.stderr.splitlines()[0]
    assert found[1] == (0, "", "")


def test_a_line_separator_inside_a_text_ends_no_row(policy: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"id": "p", "prompt": "1+1=\u2028"}\n', encoding="utf-8")
    result, rows = run(policy, "--prompts", prompts, "--max-new-tokens", 1)
    assert (result.exit_code, [row["prompt_id"] for row in rows]) == (0, ["p"])


def test_greedy_samples_are_equal_and_text_is_cut_before_a_stop_string(policy: Path) -> None:
    flags = ("--prompt", "12+30=", "--temperature", 0, "--max-new-tokens", 20)
    _, (first, second) = run(policy, *flags, "--samples", 2)
    assert first["token_ids"] == second["token_ids"]
    encoded = ",".join(str(token) for token in load_tokenizer(policy).encode("12+30="))
    assert run(policy, "--prompt-ids", encoded, *flags[2:], "--samples", 2)[1] == [first, second]
    stop = first["text"][4:6]
    _, (stopped,) = run(policy, *flags, "--stop", stop)
    assert stopped["text"] == first["text"][: first["text"].index(stop)]
    assert stopped["finish_reason"] == "stop"


def test_prompts_that_cannot_be_served_are_named_and_the_others_go_on(policy: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    expected = 'expected {"prompt": TEXT} or {"token_ids": [INTEGER, ...]}, found '
    rows = [
        ('{"prompt": "1+1="}', None),
        ('{"prompt": "1+1=', "not JSON"),
        ("[1, 2]", "expected an object with fields, found list"),
        ('{"prompt": ""}', "the prompt is empty"),
        ('{"token_ids": [1, "2"]}', expected),
        ('{"text": "2+2="}', expected + '{"text": "2+2="}'),
        ('{"prompt": "1", "token_ids": [1]}', expected),
        (f'{{"token_ids": [1, {VOCAB_SIZE}]}}', f"token id {VOCAB_SIZE} is not in the vocabulary of {VOCAB_SIZE}"),
        (json.dumps({"prompt": "1+" * 200}), "exceed the limit of 128 tokens"),
        ('{"prompt": "\\ud800"}', "half of a surrogate pair"),
        ('{"token_ids": [' + "9" * 5000 + "]}", "not JSON: Exceeds the limit"),
        ("[" * 100_000, "not JSON: maximum recursion depth"),
        ('{"token_ids": [-1]}', "token id -1 is not in the vocabulary"),
        ("", None),
        ('{"id": 7, "token_ids": [1, 2]}', None),
    ]
    prompts.write_text("\n".join(row for row, _ in rows))
    result, served = run(
        policy, "--prompts", prompts, "--prompt", "2+2=", "--prompt-ids", "1,,2", "--max-new-tokens", 4
    )
    assert result.exit_code == 2
    assert [row["prompt_id"] for row in served] == ["0", "7", "14"]
    errors = {line.split(": ")[1]: line for line in result.stderr.splitlines() if line.startswith("error: ")}
    wrong = {f"{prompts}:{number}": error for number, (_, error) in enumerate(rows, start=1) if error}
    assert set(errors) == {*wrong, "--prompt-ids 1,,2"}
    for where, message in wrong.items():
        assert message in errors[where]


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        ((), "no prompts: give --prompts FILE.jsonl, --prompt TEXT or --prompt-ids 1,2,3"),
        (("--prompts", "/nowhere.jsonl"), "cannot read /nowhere.jsonl: No such file or directory"),
        (("--prompts", "/"), "cannot read /: Is a directory"),
        pytest.param(
            ("--prompt", "1", "--device", "cuda"),
            "--device: cuda, but torch sees no CUDA device here",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without CUDA"),
        ),
        (
            ("--prompt", "1", "--top-p", 0),
            "expected temperature >= 0, top_k >= 0 and 0 < top_p <= 1, found 1.0, 0",
        ),
        (("--prompt", "1", "--kv-memory-gib", 1e-6), "kv_memory_gib (1e-06) holds 0 pages, but one sequence of 128 t"),
        (("--prompt", "1", "--chat"), "--chat: the tokenizer has no chat template"),
        (("--prompt", "1", "--cache", "/nowhere.jsonl"), "error: /nowhere.jsonl: no such file or folder"),
    ],
)
def test_what_stops_the_whole_command(policy: Path, flags: tuple[object, ...], error: str) -> None:
    result, rows = run(policy, *flags)
    assert (result.exit_code, rows) == (2, [])
    assert error in result.stderr


def test_a_cache_of_another_models_rollouts_is_refused(policy: Path, tmp_path: Path) -> None:
    row = {"prompt_token_ids": [5, 6], "samples": [{"token_ids": [1, VOCAB_SIZE]}]}
    cache = write_rows(tmp_path / "rollouts.jsonl", row)
    result, rows = run(policy, "--prompt-ids", "5,6", "--cache", cache, "--drafter", "suffix")
    assert (result.exit_code, rows) == (2, [])
    assert f"token id {VOCAB_SIZE} is not in the model's vocabulary of {VOCAB_SIZE}" in result.stderr


def test_rows_of_a_run_are_what_python_returns_and_what_cache_and_replay_read(policy: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    make_checkpoint(policy, folder, 3)
    shutil.copy(policy / "config.json", folder / "recipe.yaml")  # there; what it says is not read
    flags = ("--prompt", "12+30=", "--prompt-ids", "5,6,7", "--samples", 2, "--max-new-tokens", 12)
    _, rows = run(folder, *flags)
    assert rows == run(policy, *flags)[1]
    found = generate(str(folder), ["12+30=", [5, 6, 7]], num_samples=2, max_new_tokens=12)
    kept = ("text", "token_ids", "logprobs", "finish_reason")
    assert [{name: row[name] for name in kept} for row in rows] == [
        {name: asdict(one)[name] for name in kept} for group in found for one in group
    ]
    recorded = write_rows(tmp_path / "rows.jsonl", *rows)
    prompts = read_recorded(recorded, tokenizer=None, max_tokens=100).prompts()
    assert [prompt.prompt_token_ids for prompt in prompts] == [tuple(rows[0]["prompt_token_ids"]), (5, 6, 7)]
    assert [sample.tolist() for prompt in prompts for sample in prompt.samples] == [row["token_ids"] for row in rows]
    result, again = run(policy, *flags, "--cache", recorded)
    assert (again, "rollouts of 2 of the 2 prompts" in result.stderr) == (rows, True)
    for prompts_given, message in (([""], "prompts[0]: the prompt is empty"), ([], "prompts: there is none")):
        with pytest.raises(ValueError, match=re.escape(message)):
            generate(str(policy), prompts_given)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"prompts": "1+1="}, "prompts: expected a list of texts, found one text"),
        ({"num_samples": 0}, "num_samples: expected 1 to 65536, found 0"),
        ({"slots": 10**9}, "slots: expected 1 to 65536, found 1000000000"),
        ({"top_k": 2**31}, "expected temperature >= 0, top_k >= 0"),
        ({"drafter": "os:system"}, "--drafter: `os:system` is no drafter"),
        ({"dtype": "float16"}, "dtype: expected float32 or bfloat16, found 'float16'"),
    ]
    for changes, message in wrong:
        with pytest.raises(ValueError, match=message):
            generate(**{"model": str(policy), "prompts": ["1+1="]} | changes)
