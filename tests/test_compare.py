"""`srtrl compare`: which runs belong together, what is computed of them, and the picture."""

from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import pytest
from bench_cases import run
from recipe_cases import recipe_text
from typer.testing import CliRunner

from srtrl.cli import app
from srtrl.metrics import MetricLog

compare = partial(run, "compare")


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def make_run(name: str, *, seed: int = 0, loss: str = "ppo_clip", steps: int = 4, gain: float = 0.1) -> str:
    """A run folder with made-up figures: accuracy 0.3 before, and `gain` more with each step."""
    folder = Path(name)
    folder.mkdir()
    text = recipe_text(f"seed: {seed}\nalgorithm: {{loss: {loss}}}\n", name=name, num_steps=4)
    (folder / "recipe.yaml").write_text(text)
    trained = {"time/rollout": 2.0, "time/update": 1.0, "time/step": 3.0, "tokens/prompt": 10, "tokens/response": 100}
    with MetricLog(folder / "metrics.jsonl") as log:
        for step in range(steps + 1):
            evaluated = {"eval/accuracy": 0.3 + gain * step, "time/eval": 0.5} if step % 2 == 0 else {}
            log.write(step, evaluated | (trained | {"reward/mean": 0.5 * step} if step else {}))
    return name


def rows_of(shown: str) -> list[list[str]]:
    """Label and figures of each group; the further lines of a cell follow after a space."""
    rows: list[list[str]] = []
    for line in shown.splitlines():
        cells = [cell.strip() for cell in line.split("│")[1:-1]]
        if cells and cells[2]:
            rows.append(cells)
        elif cells:
            rows[-1] = [f"{cell} {more}".strip() for cell, more in zip(rows[-1], cells, strict=True)]
    return rows


def test_runs_that_differ_in_the_seed_are_one_row_and_its_picture_shows_each() -> None:
    gains = (0.1, 0.12, 0.05)
    ours = [make_run(f"ppo_s{seed}", seed=seed, gain=gain) for seed, gain in enumerate(gains)]
    folders, out = [ours[2], make_run("gspo", loss="gspo", gain=0.08), ours[0], ours[1]], Path("curve.svg")
    shown = compare(*folders, "--out", out).stdout
    assert rows_of(shown) == [
        ["ppo_s0", "0, 1, 2", "0 to 4", "30.0%", "66.0% 50.0% to 78.0%", "13.5"],
        ["gspo", "0", "0 to 4", "30.0%", "62.0%", "13.5"],
    ]
    # Variance of three seeds 0.0208 of two degrees of freedom; 4.30 x 0.144 x sqrt(1 / 3 + 1 / 1).
    assert shown.replace("\n", " ").endswith(
        "Seeds differ by 14.4 points (standard deviation): between rows of 1 and 3 runs, differences of less than 71.6 "
        "points after training cannot be told from noise (95%). the picture is in curve.svg "
    )
    assert "Each row is one run: train each recipe with several seeds" in compare("gspo").stdout
    assert "between rows of 3 and 3 runs, differences of less than 50.6" in compare(*ours).stdout.replace("\n", " ")
    text = out.read_text(encoding="utf-8")
    assert len(text) < 30_000
    assert compare(*folders, "--out", out).exit_code == 0, "a picture may be drawn again"
    assert out.read_text(encoding="utf-8") == text, "the same for the same runs"
    picture = list(ElementTree.fromstring(text).iter())
    assert {"ppo_s0 (mean of 3)", "gspo", "step"} <= {element.text for element in picture}
    points = [element.get("d", "").count("L") for element in picture]
    assert points.count(2) >= 5, "three seeds and two means, of three points each"


def test_a_metric_that_no_run_has_is_answered_with_names() -> None:
    make_run("a")
    for metric in ("reward/mean", "reward"):  # begins where it is logged
        assert rows_of(compare("a", "--metric", metric).stdout)[0][2:5] == ["1 to 4", "0.5", "2"]
    for metric, names in (
        ("speed", "eval/..., reward/..., time/..., tokens/..."),
        ("tokens/x", "tokens/prompt, tokens/response"),
    ):
        assert compare("a", "--metric", metric).stderr.endswith(f" there: {names}\n")
    Path(make_run("late", seed=1), "metrics.jsonl").write_text('{"step": 3, "eval/accuracy": 0.5}\n')
    assert "have `eval/accuracy` at no common step" in compare("a", "late").stderr


def test_an_interrupted_run_holds_its_group_back_and_is_named() -> None:
    make_run("whole")
    make_run("part", seed=1, steps=3, gain=0.2)
    shown = compare("whole", "part").stdout
    assert rows_of(shown) == [["whole", "0, 1", "0 to 2", "30.0%", "60.0% 50.0% to 70.0%", "7.0"]]
    assert "part has done 3 steps and is not finished" in shown
    assert ("mean over" in shown, "mean over" in compare("whole").stdout) == (True, False)


def test_a_narrow_terminal_has_all_columns() -> None:
    name = make_run("quickstart_without_kl_variant_a")
    many = [make_run(f"{name}_{seed}", seed=seed, gain=0.1 + 0.001 * seed) for seed in range(1, 9)]
    shown = CliRunner().invoke(app, ["compare", name, *many], env={"COLUMNS": "80"}).stdout
    assert max(map(len, shown.splitlines())) <= 80
    [[label, seeds, *figures]] = rows_of(shown)
    assert (label.replace(" ", ""), seeds.replace(" ", "")) == (name, "0,1,2,3,4,5,6,7,8")
    assert figures == ["0 to 4", "30.0%", "71.6% 70.0% to 73.2%", "13.5"]
