"""`srtrl compare`: which runs belong together, what is computed of them, and the picture."""

from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import pytest
from bench_cases import run
from recipe_cases import recipe_text
from typer.testing import CliRunner, Result

from srtrl.cli import app
from srtrl.metrics import MetricLog


def make_run(folder: Path, *, seed: int = 0, loss: str = "ppo_clip", steps: int = 4, gain: float = 0.1) -> Path:
    """A run folder with made-up figures: accuracy 0.3 before, and `gain` more with each step."""
    folder.mkdir(parents=True)
    text = recipe_text(f"seed: {seed}\nalgorithm: {{loss: {loss}}}\n", name=folder.name, num_steps=4)
    (folder / "recipe.yaml").write_text(text)
    with MetricLog(folder / "metrics.jsonl") as log:
        for step in range(steps + 1):
            row: dict[str, float] = {}
            if step > 0:
                row |= {"reward/mean": 0.5 * step, "time/rollout": 2.0, "time/update": 1.0, "time/step": 3.0}
                row |= {"tokens/prompt": 10, "tokens/response": 100, "groups/kept": 8}
            if step % 2 == 0:
                row |= {"eval/accuracy": 0.3 + gain * step, "time/eval": 0.5}
            log.write(step, row)
    return folder


compare = partial(run, "compare")
SVG = "{http://www.w3.org/2000/svg}"


def rows_of(result: Result) -> list[list[str]]:
    """Of each group its label and figures; a range, which is below its mean, follows it."""
    assert result.exit_code == 0, result.stderr
    rows: list[list[str]] = []
    for line in result.stdout.splitlines():
        if "│" in line:
            cells = [cell.strip() for cell in line.split("│")[1:-1]]
            if cells[2]:
                rows.append(cells)
            else:  # a folded path continues, and so do seeds
                rows[-1] = [
                    f"{a}{' ' if n > 1 and b else ''}{b}" for n, (a, b) in enumerate(zip(rows[-1], cells, strict=True))
                ]
    return rows


def test_runs_that_differ_in_the_seed_are_one_column_and_its_picture_shows_each(tmp_path: Path) -> None:
    gains = (0.1, 0.12, 0.05)
    ours = [make_run(tmp_path / f"ppo_s{seed}", seed=seed, gain=gain) for seed, gain in enumerate(gains)]
    folders = [ours[2], make_run(tmp_path / "gspo", loss="gspo", gain=0.08), ours[0], ours[1]]
    out = tmp_path / "curve.svg"
    result = compare(*folders, "--out", out)
    assert rows_of(result) == [
        [str(ours[0]), "0, 1, 2", "0 to 4", "30.0%", "66.0% 50.0% to 78.0%", "13.5"],
        [str(folders[1]), "0", "0 to 4", "30.0%", "62.0%", "13.5"],
    ]
    # Variance of three seeds 0.0208 of two degrees of freedom; 4.30 x 0.144 x sqrt(1 / 3 + 1 / 1).
    assert result.stdout.replace("\n", " ").endswith(
        "Seeds differ by 14.4 points (standard deviation): between rows of 1 and 3 runs, differences of less than 71.6 "
        f"points after training cannot be told from noise (95%). the picture is in {out} "
    )
    assert "Each row is one run: train each recipe with several seeds" in compare(folders[1]).stdout
    assert "between rows of 3 and 3 runs, differences of less than 50.6" in compare(*ours).stdout.replace("\n", " ")
    assert f"the picture is in {out}" in result.stdout
    text = out.read_text(encoding="utf-8")
    assert compare(*folders, "--out", out).exit_code == 0, "a picture may be drawn again"
    assert out.read_text(encoding="utf-8") == text, "the same for the same runs"
    out.write_text("mine")
    assert (compare(*folders, "--out", out).exit_code, out.read_text()) == (2, "mine")
    assert len(text) < 30_000
    texts, paths = (list(ElementTree.fromstring(text).iter(f"{SVG}{name}")) for name in ("text", "path"))
    assert {f"{ours[0]} (mean of 3)", str(folders[1]), "step"} <= {element.text for element in texts}
    points = [path.get("d", "").count("L") for path in paths]
    assert points.count(2) >= 5, "three seeds and two means, of three points each"


def test_a_metric_has_no_spread_in_a_single_run_and_is_answered_with_names_where_there_is_none(tmp_path: Path) -> None:
    run, late = make_run(tmp_path / "a_s0"), make_run(tmp_path / "a_s1", seed=1)
    for metric in ("reward/mean", "reward"):  # begins where it is logged
        assert rows_of(compare(run, "--metric", metric))[0][2:5] == ["1 to 4", "0.5", "2"]
    groups = "eval/..., groups/..., reward/..., time/..., tokens/..."
    for metric, names in (("speed", groups), ("tokens/x", "tokens/prompt, tokens/response")):
        assert compare(run, "--metric", metric).stderr.endswith(f" there: {names}\n")
    (late / "metrics.jsonl").write_text('{"step": 3, "eval/accuracy": 0.5}\n')
    result = compare(run, late)
    assert (result.exit_code, "have `eval/accuracy` at no common step" in result.stderr) == (2, True)


def test_an_interrupted_run_holds_its_group_back_and_is_named(tmp_path: Path) -> None:
    whole, part = make_run(tmp_path / "a_s0"), make_run(tmp_path / "a_s1", seed=1, steps=3, gain=0.2)
    with (part / "metrics.jsonl").open("a") as log:
        log.write('{"step": 4, "eval/acc')
    result = compare(whole, part)
    [row] = rows_of(result)
    assert row[1:5] == ["0, 1", "0 to 2", "30.0%", "60.0% 50.0% to 70.0%"]
    assert f"{part} has done 3 steps and is not finished" in result.stdout


def test_a_narrow_terminal_has_all_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = [f"quickstart_without_kl_variant_{letter}" for letter in "ab"]
    for name, loss in zip(names, ("ppo_clip", "gspo"), strict=True):
        make_run(Path(name), loss=loss)
    narrow = CliRunner().invoke(app, ["compare", *names], env={"COLUMNS": "80"})
    assert rows_of(narrow) == [[name, "0", "0 to 4", "30.0%", "70.0%", "13.5"] for name in names]
    for seed in range(1, 9):
        make_run(Path(f"{names[0]}_{seed}"), seed=seed, gain=0.1 + 0.001 * seed)
    many = CliRunner().invoke(app, ["compare", *map(str, Path().iterdir())], env={"COLUMNS": "80"})
    assert max(map(len, many.stdout.splitlines())) <= 80
    seeds = "0, 1, 2, 3, 4, 5, 6, 7, 8"
    row = next(row for row in rows_of(many) if row[1].replace(" ", "") == seeds.replace(" ", ""))
    assert row[2:] == ["0 to 4", "30.0%", "71.6% 70.0% to 73.2%", "13.5"]
