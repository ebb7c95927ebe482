"""`srtrl bench gpu`: its sections on a CPU, tiny; its clock, its files and its table."""

import contextlib
import json
import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import REPOSITORY
from srtrl.bench.peer_continuous import ContinuousBatching, NotAvailableError
from typer.testing import CliRunner, Result

from srtrl.bench.cuda import run as gpu_run
from srtrl.bench.cuda.decode import StepTime, by_part, step_limits
from srtrl.bench.cuda.limits import kv_bytes, step_flops, weight_bytes
from srtrl.bench.cuda.plan import RESERVE_SECONDS, SMOKE, GpuBench, Limits, OutOfTimeError, time_limit
from srtrl.bench.cuda.report import SectionReport, summary_grid
from srtrl.bench.cuda.run import GpuRun, Section
from srtrl.bench.cuda.trace import trace_workload
from srtrl.bench.environment import driver_version
from srtrl.bench.gpu import SECTIONS
from srtrl.bench.shapes import write_random_model
from srtrl.bench.workload import make_workload
from srtrl.cli import app
from srtrl.rollout.recorded import RecordedPrompt

CPU = torch.device("cpu")
interpreted = pytest.mark.skipif(
    torch.cuda.is_available(), reason="this process compiles its kernels: see test_gpu_bench"
)


def bench(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["bench", "gpu", *(str(argument) for argument in arguments)])


@pytest.fixture
def tiny(tmp_path: Path) -> GpuBench:
    return GpuBench(device=CPU, sizes=SMOKE, smoke=True, trace=None, tokenizer=None, folder=tmp_path)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Three prompts of four samples that share most of their tokens; ids beyond the tiny vocabulary."""
    random = np.random.default_rng(0)
    path = tmp_path / "trace.jsonl"
    with path.open("w") as file:
        for number in range(3):
            text = random.integers(3, 900, size=9)
            samples = [np.where(random.random(9) < 0.2, random.integers(3, 900, size=9), text) for _ in range(4)]
            row = {
                "id": str(number),
                "prompt_token_ids": random.integers(3, 900, size=4).tolist(),
                "samples": [{"token_ids": sample.tolist()} for sample in samples],
            }
            file.write(json.dumps(row) + "\n")
    return path


def report() -> SectionReport:
    return SectionReport(name="x", title="X")


# --- The command ------------------------------------------------------------------------------------------------------


@interpreted
def test_some_sections_of_the_smoke_test(tmp_path: Path, trace: Path) -> None:
    files = ("--json", tmp_path / "bench.json", "--write-docs", tmp_path / "docs.md")
    result = bench("--smoke", "--only", "trace,logprobs,limits", "--trace", trace, *files)
    assert result.exit_code == 0, result.output
    lines = [line for line in result.stdout.splitlines() if line.startswith("| ")]
    assert {line.split(" | ")[0] for line in lines[2:]} == {"| limits", "| trace", "| logprobs"}
    assert "| trace | 4 sequences, half as history: srt to none | " in result.stdout
    assert "reached" not in "".join(lines[1:])
    values = json.loads((tmp_path / "bench.json").read_text())
    by_name = {section["name"]: section["values"] for section in values["sections"]}
    assert by_name["limits"]["limits"]["matmul_rate"] > 0
    assert by_name["limits"]["limits"]["graph_node_seconds"] is None
    comparisons = by_name["trace"]["comparisons"]
    assert [(one["num_sequences"], one["labels"]["history"]) for one in comparisons] == [
        (4, "0.5"),
        (6, "0.5"),
        (4, "0"),
    ]
    assert comparisons[0]["metrics"]["srt"][0]["engine/tokens_per_decode_step"] > 1
    assert 0 < by_name["logprobs"]["difference"]["mean"] < 0.1
    docs = (tmp_path / "docs.md").read_text()
    assert "## The CUDA path: smoke test on a CPU" in docs
    assert "Drafters on the trace:\n\n| history | sequences | drafter | seconds |" in docs


@pytest.mark.slow
@interpreted
def test_every_section_of_the_smoke_test(trace: Path, tmp_path: Path) -> None:
    result = bench("--smoke", "--trace", trace, "--json", tmp_path / "bench.json")
    assert result.exit_code == 0, result.output
    values = json.loads((tmp_path / "bench.json").read_text())
    assert tuple(section["name"] for section in values["sections"]) == SECTIONS
    assert all(section["rows"] and not section["problem"] for section in values["sections"])
    by_name = {section["name"]: section["values"] for section in values["sections"]}
    assert [step["num_sequences"] for step in by_name["decode"]["steps"]] == [1, 3, 2, 1, 3]
    assert all(step["parts"]["matmuls"] > 0 for step in by_name["decode"]["steps"])
    table = result.stdout[result.stdout.index("| section") :]
    assert "not available" not in table
    assert len(table) < 10_000


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_cuda_device_it_says_what_to_do() -> None:
    result = bench()
    assert result.exit_code == 2
    assert "error: srtrl bench gpu measures a CUDA device" in result.stderr
    assert "--smoke" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("--only", "decode,nothing"), "--only: 'nothing' is none of limits, checks"),
        (("--max-minutes", 0), "--max-minutes: expected a number above 0, found 0"),
        (("--trace", "nowhere.jsonl"), "--trace: there is no file nowhere.jsonl"),
        (("--json", "no/such/folder.json"), "--json: there is no folder no/such"),
    ],
)
def test_mistakes_are_found_before_anything_is_measured(arguments: tuple[object, ...], error: str) -> None:
    result = bench("--smoke", *arguments)
    assert result.exit_code == 2
    assert error in result.stderr


def test_make_has_a_target_that_runs_it() -> None:
    text = (REPOSITORY / "Makefile").read_text()
    assert "bench-gpu: $(STAMP) ## " in text
    assert "srtrl bench gpu " in text


# --- Sections, one after the other ------------------------------------------------------------------------------------


def run_of(monkeypatch: pytest.MonkeyPatch, folder: Path, sections: dict[str, Section], seconds: float) -> GpuRun:
    monkeypatch.setattr(gpu_run, "PLAN", sections)
    return GpuRun(
        sections=tuple(sections),
        ends=time.perf_counter() + RESERVE_SECONDS + seconds,
        smoke=True,
        trace=None,
        tokenizer=None,
        json_file=folder / "bench.json",
        write_docs=None,
    )


def section(measure: Callable[[GpuBench, SectionReport], None], share: float = 1) -> Section:
    return Section(title="", share=share, measure=measure)


def add_row(_: GpuBench, report: SectionReport) -> None:
    report.add("row", "1")


def test_a_section_that_fails_keeps_its_rows_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written: list[list[str]] = []

    def fail(bench: GpuBench, report: SectionReport) -> None:
        report.add("before", "2")
        raise RuntimeError("CUDA error:\nout | of luck")

    def look(bench: GpuBench, report: SectionReport) -> None:
        values = json.loads((tmp_path / "bench.json").read_text())
        written.append([section["name"] for section in values["sections"]])

    run = run_of(monkeypatch, tmp_path, {"a": section(fail), "b": section(look), "c": section(add_row)}, 60)
    assert run.measure() is True
    assert written == [["a"]]
    captured = capsys.readouterr()
    table = captured.out[captured.out.index("| section") :].splitlines()
    assert table[2:] == [
        "| a | before | 2 |  |  |",
        "| a | the rest | RuntimeError: CUDA error: out / of luck |  | FAILED |",
        "| c | row | 1 |  |  |",
    ]
    assert "Traceback" in captured.err


def test_a_mistake_of_another_kind_is_not_hidden(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def stop(bench: GpuBench, report: SectionReport) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_of(monkeypatch, tmp_path, {"a": section(stop)}, 60).measure()


def test_time_is_shared_out_and_what_is_left_goes_to_the_later_sections(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    left: list[float] = []

    def note(bench: GpuBench, report: SectionReport) -> None:
        left.append(bench.time_left())

    sections = {"a": section(note, 1), "b": section(note, 2), "c": section(note, 3)}
    assert run_of(monkeypatch, tmp_path, sections, 60).measure() is False
    assert left == pytest.approx([10, 24, 60], abs=2)


def test_what_does_not_fit_is_not_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = run_of(monkeypatch, tmp_path, {"a": section(add_row)}, -1)
    assert run.measure() is False
    assert [report.problem for report in run.reports] == ["not run: time"]


def test_a_device_that_is_broken_costs_no_figures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An illegal access is raised again by whatever is called next, be it only to free memory."""

    def free_memory(bench: GpuBench) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(GpuBench, "free_memory", free_memory)
    run = run_of(monkeypatch, tmp_path, {"a": section(add_row), "b": section(add_row)}, 60)
    assert run.measure() is True
    values = json.loads((tmp_path / "bench.json").read_text())
    assert [one["name"] for one in values["sections"]] == ["a", "b"]
    assert all(report.rows and "illegal" in report.problem for report in run.reports)


def test_a_section_that_heeds_no_clock_is_broken_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def sleep(bench: GpuBench, report: SectionReport) -> None:
        report.add("begun", "1")
        with contextlib.suppress(Exception):  # as a library does that tries something else then
            time.sleep(20)
        report.add("went on", "1")

    monkeypatch.setattr(gpu_run, "HARD_SECONDS", 0.1)
    run = run_of(monkeypatch, tmp_path, {"a": section(sleep), "b": section(add_row)}, 0.4)
    started = time.perf_counter()
    assert run.measure() is False
    assert time.perf_counter() - started < 5
    assert run.reports[0].problem.startswith("not finished: broken off after 0 s")
    assert [row.what for row in run.reports[0].rows] == ["begun"]


def test_the_alarm_is_off_behind_its_block() -> None:
    with pytest.raises(OutOfTimeError), time_limit(0.01):
        time.sleep(5)
    with time_limit(0.05):
        pass
    time.sleep(0.1)


# --- The table --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("error", "verdict"), [(0.1, "ok"), (0.2, "ok"), (0.3, "FAILED"), (math.nan, "FAILED")])
def test_a_check_holds_up_to_its_bound_and_never_for_nan(error: float, verdict: str) -> None:
    found = report()
    found.check("sum", error, 0.2)
    assert found.rows[0].verdict == verdict
    assert found.has_failed is (verdict == "FAILED")


def test_a_missed_goal_is_no_failure_and_a_missing_trace_neither(tiny: GpuBench) -> None:
    found = report()
    full = replace(tiny, smoke=False)
    found.add("speed", "1.2x", "at least 2x", full.judge(False))
    found.skip("no trace")
    assert found.rows[0].verdict == "missed"
    assert full.judge(True) == "reached"
    assert tiny.judge(True) == ""
    assert not found.has_failed
    assert summary_grid([found]).rows[-1] == ("x", "the rest", "not run: no trace", "", "")


def test_long_messages_are_cut_in_the_table_and_whole_for_programs() -> None:
    found = report()
    found.fail("kernel", "x" * 300)
    assert max(map(len, summary_grid([found]).rows[0])) == 100
    assert found.values["checks"][0]["note"] == "x" * 300


def test_kernels_are_told_apart_by_their_names() -> None:
    names = [
        "attend_positions",
        "nvjet_tst_192x192",
        "sm90_xmma_gemm_bf16",
        "_rank_blocks",
        "Memcpy DtoH",
        "add_rms_norm",
    ]
    parts = by_part([(name, float(10**i)) for i, name in enumerate(names)])
    assert parts == {"attention": 1, "matmuls": 110, "sampling": 1000, "rest": 110_000}


# --- Limits -----------------------------------------------------------------------------------------------------------


def test_the_limits_of_a_step(tiny: GpuBench) -> None:
    policy, config = tiny.policy, tiny.policy.config
    assert weight_bytes(policy) == 2 * sum(parameter.numel() for parameter in policy.parameters())
    untied = replace(config, tie_word_embeddings=False)
    model = type(policy)(untied, torch.bfloat16, "meta")
    assert weight_bytes(model) == weight_bytes(policy)  # the head in place of the embedding
    assert kv_bytes(config, 10, torch.bfloat16) == 10 * 2 * 4 * 2 * 32 * 2
    matrices = sum(parameter.numel() for parameter in policy.parameters() if parameter.ndim == 2)
    assert step_flops(config, 3, 300) == 2 * 3 * matrices + 4 * 4 * 128 * 300
    limits = Limits(
        copy_bandwidth=1e6,
        read_bandwidth=2e6,
        matmul_rate=1e9,
        launch_seconds=0,
        graph_node_seconds=0,
        graph_launch_seconds=0,
    )
    step = StepTime(num_sequences=3, context=100, seconds=1, host_seconds=0, parts={"rest": 0.25, "attention": 0.5})
    found = step_limits(tiny, limits, step)
    assert found.bandwidth == (weight_bytes(policy) + kv_bytes(config, 300, torch.bfloat16)) / 2e6
    assert found.matmul == step_flops(config, 3, 300) / 1e9
    assert step.idle_seconds == 0.25


def test_the_driver_is_asked_of_nvidia_smi(tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 580.12.3\necho 580.12.3\n")
    program.chmod(0o755)
    assert driver_version(str(program)) == "580.12.3"
    program.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'\nexit 9\n")
    assert driver_version(str(program)) == "unknown"


# --- The trace --------------------------------------------------------------------------------------------------------


def prompts_of(num_prompts: int, num_samples: int) -> list[RecordedPrompt]:
    return [
        RecordedPrompt(
            prompt_id=str(number),
            prompt_token_ids=(number + 1, 7),
            samples=[np.array([10 * number + sample], np.int32) for sample in range(num_samples)],
        )
        for number in range(num_prompts)
    ]


def test_a_trace_gives_as_many_sequences_as_are_asked_for() -> None:
    trace, workload = trace_workload(prompts_of(3, 4), 5, 0.5)
    assert len(workload.requests) == 5
    assert [request.draw_index for request in workload.requests] == [0, 0, 1, 1, 2]
    assert [samples[0].tolist() for samples in trace.history.values()] == [[0], [10], [20]]
    assert [trace.responses[request.rng_key].tolist() for request in workload.requests[:3]] == [[2], [3], [12]]


def test_where_a_trace_is_too_short_prompts_come_again_as_others_with_their_history() -> None:
    trace, workload = trace_workload(prompts_of(2, 4), 11, 0.5)
    keys = {request.prompt_token_ids for request in workload.requests}
    assert keys == {(1, 7), (2, 7), (1, 1, 7), (2, 2, 7), (1, 1, 1, 7), (2, 2, 2, 7)}
    assert len(workload.requests) == len({request.rng_key for request in workload.requests}) == 11
    assert {len(trace.history[key]) for key in keys} == {2}
    assert len({request.prompt_id for request in workload.requests}) == 6


# --- Peers ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_continuous_batching_makes_each_sequence_as_long_as_it_should_be(tmp_path: Path) -> None:
    folder = write_random_model("tiny", tmp_path / "model", torch.float32)
    peer = ContinuousBatching(folder, dtype=torch.float32, device=CPU, num_blocks=8, max_batch_tokens=32)
    try:
        for new_tokens in ([3, 7, 1], [2, 5]):
            workload = make_workload("equal", new_tokens, [(5, 6, 7), (8,), (9, 10)], num_samples=1, seed=0)
            assert peer.run(workload).num_tokens == sum(new_tokens)
        peer._manager.stop(block=True)
        with pytest.raises(NotAvailableError, match="thread has ended"):
            peer.run(workload)
    finally:
        peer.close()
