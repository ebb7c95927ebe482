"""Faults that a fast test must see: each of `mutations.yaml` is put into a copy of the package, where a test must fail.

`python tests/mutations.py` prints each fault with the first test that fails; with words it takes the faults that have
one of them in their names. A slow test in `test_imports.py` has them all.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ruamel.yaml import YAML

TESTS = Path(__file__).resolve().parent
PACKAGE = TESTS.parent / "srtrl"
MUTATIONS: dict[str, dict[str, str]] = YAML(typ="safe").load(TESTS / "mutations.yaml")
PYTEST = (
    "import sys, pytest, srtrl.engine.warm_up as warm_up; warm_up.compile_kernels = lambda *_, **__: None; "
    "sys.exit(pytest.main(['-x', '-q', '-p', 'no:cacheprovider', '--hypothesis-seed=0', *sys.argv[1:]]))"
)
"""Kernels are compiled where a test calls one: most need few."""


def failing_test(folder: Path, *tests: str) -> str:
    """The first of the tests that fails with the package in `folder`; "" where all pass."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}  # no runs of others
    environment = own | {"PYTHONPATH": str(folder), "NUMBA_CACHE_DIR": str(folder / "kernels")}
    command = [sys.executable, "-c", PYTEST, *(str(TESTS / test) for test in tests)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    failed = re.search(r"^FAILED \S*?(test_\w+\.py\S*)", done.stdout, re.M)
    assert done.returncode == (1 if failed else 0), f"no test has run: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    return failed[1] if failed else ""


def unseen_faults(words: Sequence[str] = ()) -> list[str]:
    """The faults that no test sees, of those that have one of the words in their name (or of all)."""
    chosen = {name: row for name, row in MUTATIONS.items() if not words or any(word in name for word in words)}
    unseen = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        shutil.copytree(PACKAGE, folder / "srtrl", ignore=shutil.ignore_patterns("__pycache__"))
        failed = failing_test(folder, *{row["test"]: None for row in chosen.values()})
        assert not failed, f"fails without a fault: {failed}"
        for name, row in chosen.items():
            source, file = PACKAGE / row["file"], folder / "srtrl" / row["file"]
            text = source.read_text(encoding="utf-8")
            assert text.count(row["old"]) == 1, f"{name}: not once in {row['file']}"
            file.write_text(text.replace(row["old"], row["new"]), encoding="utf-8")
            failed = failing_test(folder, row["test"])
            shutil.copy2(source, file)  # with its time: Numba compiles again what is newer
            print(f"{name}: srtrl/{row['file']} -> {failed or 'no test fails'}", flush=True)
            unseen += [] if failed else [name]
    return unseen


if __name__ == "__main__":
    sys.exit(", ".join(unseen_faults(sys.argv[1:])) or 0)
