"""The benchmark of drafters on a trace, stated prices, and mistakes on the command line."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from bench_cases import REPEATER, Repeater, bench
from tiny_run import make_policy

from srtrl.bench.pricing import CURVES, parse_curve
from srtrl.bench.trace_run import TracedDecoder
from srtrl.bench.trace_workload import feed_history, share_out
from srtrl.bench.workload import Workload
from srtrl.drafters.base import NOBODY, DrafterBase
from srtrl.engine.engine import EngineOptions
from srtrl.model.transformer import Transformer
from srtrl.model.weights import load_model
from srtrl.rollout.recorded import RecordedPrompt
from srtrl.types import Completion, Request


class Diary(DrafterBase):
    """Notes what it was told."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[object] = []

    def start(self, sequence_id: int, request: Request) -> None:
        self.entries.append(("start", sequence_id, request.prompt_token_ids))

    def observe(self, sequence_ids: Sequence[int], token_ids: Sequence[Sequence[int]]) -> None:
        self.entries.append(("observe", list(sequence_ids), [list(tokens) for tokens in token_ids]))

    def finish(self, sequence_id: int, completion: Completion | None) -> None:
        self.entries.append(("finish", sequence_id, completion.token_ids if completion else None))

    def on_policy_update(self) -> None:
        self.entries.append("update")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_policy(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def policy(folder: Path) -> Transformer:
    return load_model(folder, dtype=torch.float32, device="cpu")


def recorded(prompt_id: str, *samples: list[int]) -> RecordedPrompt:
    return RecordedPrompt(
        prompt_id=prompt_id,
        prompt_token_ids=(int(prompt_id), 7),
        samples=[np.array(sample, np.int32) for sample in samples],
    )


def write_trace(path: Path, num_prompts: int, *, num_samples: int = 4, length: int = 12) -> Path:
    """Samples that say one token all the time, another for each."""
    rows = [
        {
            "id": str(prompt),
            "prompt_token_ids": [1, 2, prompt],
            "samples": [{"token_ids": [10 * prompt + sample] * length} for sample in range(num_samples)],
        }
        for prompt in range(num_prompts)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# --- The trace --------------------------------------------------------------------------------------------------------


def test_the_first_samples_are_history_and_the_others_are_decoded_on_streams_of_their_own() -> None:
    prompts = [recorded("3", [1], [2, 2], [3, 3, 3], [4]), recorded("5", [5, 5], [6])]
    trace = share_out(prompts, history=0.5, seed=1)
    assert {prompt: [s.tolist() for s in samples] for prompt, samples in trace.history.items()} == {
        (3, 7): [[1], [2, 2]],
        (5, 7): [[5, 5]],
    }
    found = [
        (
            r.draw_index,
            r.sample_index,
            r.prompt_token_ids,
            trace.responses[r.rng_key].tolist(),
            r.sampling.max_new_tokens,
        )
        for r in trace.requests
    ]
    assert found == [(0, 0, (3, 7), [3, 3, 3], 3), (0, 1, (3, 7), [4], 1), (1, 0, (5, 7), [6], 1)]
    assert share_out(prompts, history=0.0, seed=1).history == {(3, 7): [], (5, 7): []}
    with pytest.raises(ValueError, match="--history: 1 of the samples leaves none to decode"):
        share_out(prompts, history=1.0, seed=1)


def test_history_is_fed_as_an_epoch_that_is_over_and_only_of_the_prompts_that_are_decoded() -> None:
    trace = share_out([recorded("3", [1], [2, 2], [3]), recorded("5", [5, 5], [6])], history=0.5, seed=1)
    diary = Diary()
    feed_history(diary, trace, [request for request in trace.requests if request.draw_index == 0])
    assert diary.entries == [
        ("start", NOBODY, (3, 7)),
        ("finish", NOBODY, [1]),
        ("start", NOBODY, (3, 7)),
        ("finish", NOBODY, [2, 2]),
        "update",
    ]


def test_a_traced_decoder_samples_the_trace_with_a_new_drafter_in_each_run(policy: Transformer) -> None:
    trace = share_out([recorded("3", [9, 9, 9, 9, 9, 9], [8, 8, 1, 2])], history=0.0, seed=1)
    made: list[Repeater] = []

    def make() -> Repeater:
        made.append(Repeater())
        return made[-1]

    options = EngineOptions(slots=0, kv_memory_gib=0.1, draft_budget=4)
    decoder = TracedDecoder("x", policy, options, make_drafter=make, trace=trace)
    workload = Workload(lengths="recorded", requests=trace.requests, slots=2)
    for _ in range(2):
        run = decoder.run(workload)
        assert run.num_tokens == 10
        assert run.metrics["engine/tokens"] == 10
        assert run.metrics["engine/tokens_per_decode_step"] > 1
    assert len(made) == 2
    assert decoder.engine is not None
    assert decoder.engine.drafter is made[1]


def test_a_decoder_that_does_not_sample_the_trace_is_caught(policy: Transformer) -> None:
    trace = share_out([recorded("3", [9, 9])], history=0.0, seed=1)
    decoder = TracedDecoder("x", policy, EngineOptions(), make_drafter=Repeater, trace=trace)
    wrong = Completion(
        request=trace.requests[0], token_ids=[9, 8], rollout_logprobs=[0, 0], finish_reason="length", policy_version=0
    )
    with pytest.raises(AssertionError, match="x did not sample the trace"):
        decoder.check([wrong])


def test_the_command_compares_drafters_on_a_trace(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "trace.jsonl", 3)
    files = ("--json", tmp_path / "bench.json", "--write-docs", tmp_path / "docs.md")
    settings = ("--slots", "1,4", "--prompts-used", "1,3", "--history", 0.5, "--max-tokens", 9, "--repeats", 2)
    result = bench(
        *("--trace", path, "--drafters", f"none,{REPEATER}", "--model-shape", "tiny", "--threads", 1),
        *("--trace-note", "made up", *settings, *files),
    )
    assert result.exit_code == 0, result.stderr
    values = json.loads((tmp_path / "bench.json").read_text())
    assert values["baseline"] == "none"
    found = [(row["labels"], row["num_sequences"], row["num_tokens"]) for row in values["comparisons"]]
    assert found == [({"slots": "1", "sequences": "2"}, 2, 18), ({"slots": "4", "sequences": "6"}, 6, 54)]
    for row in values["comparisons"]:
        assert {name: len(runs) for name, runs in row["seconds"].items()} == {"none": 2, REPEATER: 2}
        assert row["ratios"].keys() == {REPEATER}
        for metrics in row["metrics"]["none"]:
            assert metrics["engine/tokens_per_decode_step"] == 1
            assert metrics["engine/verified_per_decode_step"] == 1
        for metrics in row["metrics"][REPEATER]:
            assert metrics["engine/tokens"] == row["num_tokens"]
    text = result.stdout
    assert text.startswith(
        "## Drafters on a trace: trace.jsonl, 0.5 as history, tiny, float32, cpu, 1 thread, 1, 4 slots"
    )
    assert "What it is: made up. The drafter has seen 6 rollouts" in text
    assert "Decoded are 6 samples of 9 tokens in the median and 9 at most" in text
    assert (tmp_path / "docs.md").read_text().endswith(text)


def test_steps_are_priced_where_a_cost_is_stated(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "trace.jsonl", 1, num_samples=2, length=5)
    result = bench(
        *("--trace", path, "--drafters", "none", "--model-shape", "tiny", "--threads", 1, "--repeats", 2),
        *("--price-as", "1:0.5,1024:0.5", "--json", tmp_path / "bench.json"),
    )
    assert result.exit_code == 0, result.stderr
    (row,) = json.loads((tmp_path / "bench.json").read_text())["comparisons"]
    num_steps = row["metrics"]["none"][0]["engine/decode_steps"]
    assert row["seconds"]["none"] == [pytest.approx(num_steps / 2)] * 2
    assert "Seconds are priced, not measured" in result.stdout
    assert "priced as 1:0.5,1024:0.5\n" in result.stdout


# --- Prices and mistakes ----------------------------------------------------------------------------------------------


def test_curves_are_named_or_given() -> None:
    assert parse_curve("8:0.25, 64:1").points == ((8, 0.25), (64, 1.0))
    for name, curve in CURVES.items():
        assert parse_curve(name) is curve
        costs = [seconds for _, seconds in curve.points]
        assert costs == sorted(costs)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("h200-1.5", "no curve 'h200-1.5', did you mean `h200-1.5b`"),
        ("8:x", "expected ROWS:SECONDS like 64:0.002, found '8:x'"),
        ("8:1,8:2", "8:2.0 follows 8:1.0"),
        ("8:2,16:1", "16:1.0 follows 8:2.0"),
        ("0:1", "expected at least 1 row"),
        ("1:0", "seconds above 0"),
    ],
)
def test_a_curve_that_cannot_be_used_is_named(text: str, error: str) -> None:
    with pytest.raises(ValueError, match=r"--price-as: ") as caught:
        parse_curve(text)
    assert error in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("--drafters", "none", "--peer", "hf"), "--peer and --drafters exclude each other"),
        (("--trace", "TRACE", "--peer", "hf"), "--peer and --trace exclude each other"),
        (("--drafters", "none"), "--drafters: give recorded rollouts with --trace FILE, or a policy"),
        (("--epochs", 2), "--epochs has no meaning here: it is for --drafters on a live policy"),
        (("--trace", "TRACE", "--epochs", 2), "--epochs has no meaning here"),
        (("--trace", "TRACE", "--sequences", 2), "--sequences has no meaning here: it is for comparing srtrl with"),
        (
            ("--drafters", "none", "--model", "MODEL", "--history", 0.5),
            "--history has no meaning here: it is for --trace",
        ),
        (("--drafters", "none", "--model", "MODEL", "--tokenizer", "x"), "--tokenizer has no meaning here"),
        (("--trace", "TRACE", "--drafters", "none,none"), "--drafters: expected names, each once"),
        (("--trace", "TRACE", "--drafters", "nome"), "--drafters: `nome` is not in srtrl/drafters/, did you mean"),
        (("--trace", "TRACE", "--drafters", "none", "--prompts-used", "1,2"), "--prompts-used: expected one number"),
        (("--trace", "TRACE", "--drafters", "none", "--prompts-used", 9), "--prompts-used: 9, but "),
        (
            ("--trace", "TRACE", "--drafters", "none", "--draft-budget", "x"),
            "--draft-budget: expected auto or a number",
        ),
        (("--trace", "TEXTS", "--drafters", "none"), "the row has texts; give --tokenizer DIR"),
        (("--trace", "LARGE", "--drafters", "none"), "--trace: token id 9999 is not in the model's vocabulary of 320"),
        (
            ("--drafters", "none", "--model", "MODEL", "--prompts-used", 3, "--step-prompts", 2),
            "--step-prompts: 2 does not divide the 3 prompts of an epoch",
        ),
        (
            ("--drafters", "none", "--model", "MODEL", "--run-ahead", "on"),
            "--run-ahead: 'on' is none of off, uncoupled",
        ),
        (("--trace", "TEXTS", "--tokenizer", "./nowhere"), "--tokenizer: ./nowhere: "),
        (("--trace", "TRACE", "--json", "nowhere/x.json"), "--json: there is no folder nowhere to write x.json into"),
        (("--trace", "TRACE", "--write-docs", "."), "--write-docs: . is a folder; expected a file to write"),
    ],
)
def test_mistakes_are_named(folder: Path, tmp_path: Path, arguments: tuple[object, ...], error: str) -> None:
    texts, large = tmp_path / "texts.jsonl", tmp_path / "large.jsonl"
    texts.write_text('{"id": "0", "prompt": "a", "samples": [{"text": "b"}]}\n')
    large.write_text('{"id": "0", "prompt_token_ids": [1], "samples": [{"token_ids": [9999]}]}\n')
    paths = {"TRACE": write_trace(tmp_path / "trace.jsonl", 2), "TEXTS": texts, "LARGE": large, "MODEL": folder}
    shape = ("--model-shape", "tiny") if "--trace" in arguments else ()
    result = bench(*shape, *(paths.get(str(argument), argument) for argument in arguments))
    assert result.exit_code == 2, result.stdout
    assert error in result.stderr
