"""`srtrl bench trie` measures what it says, on small input."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from srtrl.bench import trie_run
from srtrl.cli import app


def test_the_trie_benchmark_has_a_row_for_each_question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trie_run, "LEAST_TOKENS", 300)
    rows = [
        {
            "id": number,
            "prompt_token_ids": [number + 1],
            "samples": [{"token_ids": [(number + i * j) % 7 for i in range(50)]} for j in range(4)],
        }
        for number in range(3)
    ]
    file = tmp_path / "rollouts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    output = tmp_path / "figures.json"
    arguments = ["bench", "trie", str(file), "--repeats", "2", "--threads", "1", "--json", str(output)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    found = json.loads(output.read_text())["rows"]
    assert len(found) == 5
    assert found[0][1] == "300"  # the first two prompts' 400 tokens are one trie, the third's 200 another
    for row in found:
        assert [float(cell) > 0 for cell in row[2:4] if cell] == [True]


def test_the_trie_benchmark_names_a_file_that_is_not_there(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["bench", "trie", str(tmp_path / "none.jsonl")])
    assert result.exit_code == 2
    assert "none.jsonl: no such file" in result.output
