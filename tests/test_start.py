"""Quick starts: what is read without the large modules of `transformers`, what is said first, and the installation."""

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numba
import pytest
import torch
from test_weights import FIELDS
from transformers import AutoTokenizer
from typer.testing import CliRunner

from srtrl.build import number_of_slots
from srtrl.cli import app
from srtrl.engine.kv_memory import CPU_SLOTS
from srtrl.generation import generate
from srtrl.model import cpu_threads, hf_config
from srtrl.model.cpu_threads import set_cpu_threads
from srtrl.model.folders import _has_plain_tokenizer, load_tokenizer, locate
from srtrl.model.hf_config import config_from_hf
from srtrl.recipe.file import build_recipe, read_source

REPOSITORY = Path(__file__).resolve().parent.parent
PLAIN: dict[str, Any] = FIELDS | {"rms_norm_eps": 1e-5}
CONFIGS: list[dict[str, Any]] = [
    {},
    {"rope_theta": 500.0, "eos_token_id": [0, 1], "dtype": "float32"},
    {"vocab_size": 7},
    {"model_type": "qwen3"},
    {"attention_bias": True},
    {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}},
    {"head_dim": 8},
    {"layer_types": None},
    {"hidden_size": 20},  # an odd head
    {"hidden_size": 26},
    {"num_key_value_heads": 3},
    {"tie_word_embeddings": None},
    {"tie_word_embeddings": 1},
    {"hidden_act": "gelu"},
]
"""Only the first three are plain: read without `transformers`."""


def meaning(fields: dict[str, Any]) -> Any:
    """Meaning of a config, or the reason why there is none."""
    try:
        return config_from_hf(fields)
    except ValueError as error:
        return str(error)


def test_a_config_means_what_transformers_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [PLAIN | changes for changes in CONFIGS]
    cases += [{key: value for key, value in PLAIN.items() if key != name} for name in PLAIN]
    found = [meaning(fields) for fields in cases]
    assert [hf_config._read_plain(fields) is not None for fields in cases[:4]] == [True, True, True, False]
    monkeypatch.setattr(hf_config, "_read_plain", lambda fields: None)
    for fields, config in zip(cases, found, strict=True):
        assert meaning(fields) == config
    assert [config.hf_config for config in found[:3]] == cases[:3]


def test_a_tokenizer_is_that_of_auto_tokenizer(policy: Path, tmp_path: Path) -> None:
    for folder in (locate("bundled:tiny"), locate("bundled:tools"), policy):
        assert _has_plain_tokenizer(folder), folder
        quick, auto = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
        assert type(quick) is type(auto)
        assert quick.init_kwargs == auto.init_kwargs
        assert quick.get_vocab() == auto.get_vocab()
        assert quick.chat_template == auto.chat_template
    for number, (file, text) in enumerate(
        (
            ("config.json", '{"model_type": "qwen2"}'),
            ("tokenizer_config.json", '{"tokenizer_class": "LlamaTokenizer"}'),
            ("tokenizer_config.json", '{"tokenizer_class": "TokenizersBackend", "auto_map": {}}'),
            ("config.json", None),
            ("tokenizer.json", None),
        )
    ):
        other = Path(shutil.copytree(policy, tmp_path / str(number)))
        (other / file).unlink()
        if text is not None:
            (other / file).write_text(text)
        assert not _has_plain_tokenizer(other), (file, text)


def test_no_more_slots_than_samples() -> None:
    recipe = build_recipe(read_source(Path("quickstart")))
    auto = build_recipe(read_source(Path("quickstart"), ["rollout.slots=auto"]))
    for samples, slots in ((None, CPU_SLOTS), (3, 3), (1000, CPU_SLOTS)):
        for given in (recipe, auto):
            assert number_of_slots(given, Mock(), None, num_samples=samples) == slots


def test_sizes_that_cannot_be_meant_are_cut_with_a_line(caplog: pytest.LogCaptureFixture) -> None:
    """512 samples of a step and its run-ahead; 200 or 800 of an evaluation, or an unknown number."""
    for override, slots in (("eval.num_samples=4", 800), ("eval.num_samples=1", 512), ("eval.num_problems=null", 900)):
        caplog.clear()
        recipe = build_recipe(read_source(Path("quickstart"), ["rollout.slots=900", override]))
        assert number_of_slots(recipe, Mock(), None) == slots
        assert (f"rollout.slots: 900 are more than there are samples; {slots} are used" in caplog.text) == (slots < 900)
    num_threads, num_cores = torch.get_num_threads(), len(os.sched_getaffinity(0))
    set_cpu_threads(num_cores + 7)
    assert torch.get_num_threads() == num_cores
    assert f"num_threads: {num_cores + 7} is more than the cores of this process; {num_cores} are used" in caplog.text
    set_cpu_threads(num_threads)


@pytest.mark.parametrize(
    ("device", "quota", "given", "expected"),
    [
        ("cpu", "200000 100000", None, 12),
        ("cuda", None, None, 8),
        ("cuda", "max 100000", None, 8),
        ("cuda", "350000 100000", None, 3),
        ("cuda", "50000 100000", None, 1),
        ("cuda", "200000 100000", 11, 11),
    ],
)
def test_threads_beside_a_gpu_are_few_and_within_the_containers_quota(
    device: str, quota: str | None, given: int | None, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rented machine of 192 cores, of which torch would use 12."""
    if quota is not None:
        (tmp_path / "cpu.max").write_text(f"{quota}\n")
    set_threads = Mock()
    monkeypatch.setattr(cpu_threads, "CPU_QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(cpu_threads, "num_cores", lambda: 192)
    monkeypatch.setattr(numba, "set_num_threads", Mock())
    monkeypatch.setattr(torch, "get_num_threads", lambda: 12)
    monkeypatch.setattr(torch, "set_num_threads", set_threads)
    set_cpu_threads(given, device=device)
    set_threads.assert_called_once_with(expected)


@pytest.mark.parametrize(
    ("num_samples", "overrides", "drafter"),
    [
        (1, [], "none"),
        (2, [], "srt"),
        (1, ["rollout.max_new_tokens=9"], "srt"),
        (1, ["rollout.drafter=srt"], "srt"),
    ],
)
def test_a_single_completion_loads_no_drafter(
    num_samples: int, overrides: list[str], drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_evals = Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr("srtrl.evaluation.policy.run_evals", run_evals)
    with pytest.raises(KeyboardInterrupt):
        generate("bundled:tiny", ["1+2"], num_samples=num_samples, overrides=overrides)
    assert run_evals.call_args.args[1]["generate"].rollout.drafter == drafter


def test_train_says_what_it_does_before_torch_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("srtrl.cli.check_recipe", Mock(side_effect=KeyboardInterrupt))
    result = CliRunner().invoke(app, ["train", "quickstart", "name=first", "train.num_steps=3"])
    assert "quickstart: 3 steps into runs/first; loading torch" in result.stdout


# --- Installation -----------------------------------------------------------------------------------------------------

STUB = """#!/bin/sh
case "$*" in
  *"sys.exit(sys.version_info"*) exit {old} ;;
  --version) echo Python 3.10.12 ;;
  "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  "-m pip --version") exit 0 ;;
  "-m pip install"*) echo "$*" >> pip.log; echo '{output}' >&2; exit {failed} ;;
esac
"""
"""Stands in for Python and for pip."""
RETRIES = """WARNING: Retrying (Retry(total=0)) after connection broken by NewConnectionError(...): /simple/setuptools/
      ERROR: Could not find a version that satisfies the requirement setuptools>=77 (from versions: none)
      ERROR: No matching distribution found for setuptools>=77"""


def make(
    folder: Path, target: str, *, old: int = 0, output: str = "", failed: int = 1
) -> subprocess.CompletedProcess[str]:
    """Run make with a stand-in for Python, in a folder with what installation reads."""
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(REPOSITORY / name, folder / name)
    (folder / ".ci").mkdir(exist_ok=True)
    shutil.copy(REPOSITORY / ".ci" / "constraints.txt", folder / ".ci")
    stub = folder / "python"
    stub.write_text(STUB.format(old=old, output=output, failed=failed))
    stub.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(
        ["make", target, f"PYTHON={stub}"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ({"old": 1}, "srtrl needs Python 3.11 or newer; .* is Python 3.10.12. Try: make PYTHON=python3.11 quickstart"),
        ({"output": "ERROR: [Errno 28] No space left on device"}, "no space left: .* GB in .venv.*"),
        (
            {"output": RETRIES},
            "no packages: .* needs a network .* pip says: ERROR: No matching distribution found for s.*",
        ),
        ({"output": "something\nnew"}, "something\nnew"),
    ],
    ids=["old Python", "no space", "no network", "unknown"],
)
def test_what_stops_an_installation_is_one_line(case: dict[str, Any], message: str, tmp_path: Path) -> None:
    done = make(tmp_path, "quickstart", **case)
    assert done.returncode != 0
    assert re.match(rf"{message}\nmake: \*\*\*[^\n]*\n$", done.stderr), done.stderr
    assert not (tmp_path / ".venv" / ".installed").exists()


def test_quickstart_installs_no_packages_of_tests(tmp_path: Path) -> None:
    done = make(tmp_path, "setup", failed=0)
    assert done.returncode == 0, done.stderr
    runtime, dev = (tmp_path / "pip.log").read_text().splitlines()
    assert runtime.endswith("--editable .")
    assert dev.endswith("--editable .[dev]")
    planned = subprocess.run(
        ["make", "--dry-run", "quickstart"], cwd=REPOSITORY, capture_output=True, text=True, check=True, timeout=60
    )
    assert "[dev]" not in planned.stdout
