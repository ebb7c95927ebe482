"""The commands of README.md and docs/README.md: its program and `replay` run as they stand, the others exist."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from bench_cases import run

from srtrl.cli import app
from srtrl.metrics import read_metrics

REPOSITORY = Path(__file__).resolve().parent.parent
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
BENCHMARKS = (REPOSITORY / "docs" / "benchmarks.md").read_text(encoding="utf-8")
INDEX = (REPOSITORY / "docs" / "README.md").read_text(encoding="utf-8")


def test_own_rows_of_the_readme_train_as_they_stand(tmp_path: Path) -> None:
    [program] = re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    assert 'num_steps": 20' in program
    (tmp_path / "my_run.py").write_text(program.replace('num_steps": 20', 'num_steps": 2'), encoding="utf-8")
    subprocess.run([sys.executable, "my_run.py"], cwd=tmp_path, check=True, capture_output=True, timeout=100)
    rows = list(read_metrics(tmp_path / "runs" / "my_run" / "metrics.jsonl"))
    assert [row["step"] for row in rows] == [1, 2]
    assert 0 < rows[0]["reward/is_right"] < 1


def test_recorded_rollouts_of_the_readme_are_replayed_without_a_tokenizer() -> None:
    [command] = re.findall(r"`srtrl (replay docs/recorded/\S+ [^`]*)`", README)
    with_drafts, without = re.findall(r"([\d,]+) decode steps instead of ([\d,]+)", README)[0]
    shown = run(*command.split(), "--json").stdout
    assert f'"steps": {with_drafts.replace(",", "")},' in shown
    assert f'"steps_without_drafts": {without.replace(",", "")},' in shown


@pytest.mark.slow
def test_the_benchmark_of_the_repository_s_recordings_runs() -> None:
    [command] = re.findall(r"`python (docs/bench_rollout.py --trace docs/recorded/[^`]*)`", BENCHMARKS)
    shorter = "--history 0.5 --slots 1 --max-tokens 8 --repeats 1 --prompts-used 1"
    words = command.replace("--history H --slots N --repeats R", shorter)
    assert words != command
    program = [sys.executable, *words.split()]
    result = subprocess.run(program, cwd=REPOSITORY, check=True, stdout=subprocess.PIPE, text=True)
    assert "times as fast" in result.stdout


def test_commands_of_the_readme_and_of_the_index_exist() -> None:
    names = {
        command.name or command.callback.__name__.replace("_", "-")
        for command in app.registered_commands
        if command.callback
    }
    names -= {"bench"}  # hidden: it says where its script is
    names |= {group.name for group in app.registered_groups if group.name}
    used = set(re.findall(r"(?:`|^ +)srtrl ([a-z-]+)", README + INDEX, re.MULTILINE))
    assert used - names == set()
    assert names - used == set(), "without a line in the table of docs/README.md"
