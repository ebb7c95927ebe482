"""The documentation against the code: metrics, links, names, code and commands are there; what is to run, runs."""

import ast
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from bench_cases import run
from environment_cases import HOSTILE
from recipe_cases import recipe_text
from tiny_run import make_recipe

from srtrl.build import run_training
from srtrl.checks import check_recipe
from srtrl.cli import app
from srtrl.metrics import read_metrics
from srtrl.recipe.fields import fields_of
from srtrl.recipe.file import FOREIGN_NAMES, build_recipe, read_source, read_yaml
from srtrl.recipe.schema import Recipe

REPOSITORY = Path(__file__).resolve().parent.parent
DOCS = REPOSITORY / "docs"
PAGES = [
    *(REPOSITORY / name for name in ("README.md", "tests/README.md", ".github/SECURITY.md")),
    *sorted(DOCS.rglob("*.md")),
]

README, BENCHMARKS, INDEX = (
    (REPOSITORY / name).read_text(encoding="utf-8") for name in ("README.md", "docs/benchmarks.md", "docs/README.md")
)
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)
CODE_NAME = re.compile(r"`([A-Za-z_][\w.]*)`")
REWARD_NAMES = ("digits", "correct")
"""Those of the tiny run: what `reward/<name>` stands for there."""
DEPTHS = tuple(str(depth) for depth in range(1, 9))
NUM_EVAL_SAMPLES = 2
OPEN_FAMILIES = {"environment/outcome_": "<how>", "environment/stop_": "<reason>", "environment/own/": "<name>"} | {
    "off_policy/age_": "<n>"
}
"""How the names of some metrics begin, and what stands for the rest in metrics.md."""
ONLY_ON_CUDA = {"engine/graphs_dropped", "engine/host_share", "memory/peak_gib"}
ONLY_ON_RANKS = {"engine/rank_seconds_max", "engine/ranks_idle_share", "engine/rank_claims"}
ONLY_WHERE_TOOLS_ARE_SLOW = {"time/tools"}


NO_EVAL: dict[str, Any] = {"before_and_after": False}
OFF_POLICY: dict[str, Any] = {
    "rollout__stop_strings": list("aeiouxyz012345"),
    "rollout__max_new_tokens": 40,
    "task__options__num_train": 4,
    "algorithm": {"old_logprobs": "recompute", "importance": {"mode": "token_truncate", "max": 2.0}},
    "eval": NO_EVAL,
}
RUNS: dict[str, dict[str, Any]] = {
    "drafts": {  # with the KL in the reward, and all that a drafter can do
        "algorithm__kl": {"coefficient": 0.01, "placement": "reward"},
        "train__num_steps": 3,
        "rollout__draft_budget": 8,
        "rollout__draft_head": {},
        "rollout__run_ahead_max_slowdown": 1e9,
        "rollout__slots": 13,
        "eval": NO_EVAL,
    },
    "ppo": {  # and the options that bring metrics of their own
        "algorithm": {"advantage": "gae", "loss": "dual_clip", "kl": {"coefficient": 0.01}}
        | {
            "old_logprobs": "recompute",
            "importance": {"mode": "token_truncate", "max": 2.0},
            "opsm": 0.1,
            "drift": 1e-3,
            "overlong_filtering": True,
        },
        "critic": {"learning_rate": 0.01},
        "eval__num_samples": NUM_EVAL_SAMPLES,
        "train__num_steps": 2,
    },
    "unverified": {"rewards": [{"name": "tiny_run:digits"}], "train__num_steps": 1, "model__lora": {"rank": 4}}
    | {"algorithm__teacher": {"coefficient": 0.5}},
    "turns": {
        "rollout__environment": HOSTILE,
        "rollout__max_new_tokens": 32,
        "train__num_steps": 1,
    },
    "partial": OFF_POLICY | {"rollout__mode": "partial", "train__num_steps": 2, "data__order": "skip_silent"},
    "spec_rl": OFF_POLICY | {"rollout__mode": "spec_rl", "train__num_steps": 3},
}


@pytest.fixture(scope="module")
def logged(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Every key of the rows of real runs, some with evaluation."""
    folder = tmp_path_factory.mktemp("docs")
    keys: set[str] = set()
    (folder / "rows.jsonl").write_text('{"prompt": "Hi?"}\n', encoding="utf-8")
    rows = {"files": [str(folder / "rows.jsonl")]}
    RUNS["unverified"]["task"] = {"name": "prompts", "options": {"train": rows, "eval": rows}}
    for name, changes in RUNS.items():
        recipe = make_recipe(policy, folder / "runs", name=name, **changes)
        assert {reward.name.rpartition(":")[2] for reward in recipe.rewards} <= set(REWARD_NAMES)
        result = run_training(recipe)
        keys |= {as_documented(key) for row in read_metrics(result.folder / "metrics.jsonl") for key in row}
    assert not keys & ONLY_ON_CUDA, "these runs are on the CPU"
    return keys - {"step"} | ONLY_ON_CUDA | ONLY_ON_RANKS | ONLY_WHERE_TOOLS_ARE_SLOW


def as_documented(name: str) -> str:
    """The name of a metric as metrics.md has it."""
    return next((start + place for start, place in OPEN_FAMILIES.items() if name.startswith(start)), name)


def documented_metrics() -> list[str]:
    """The first cell of every table row of metrics.md, with `<name>` filled in."""
    cells = re.findall(r"^\| `([^`]+)` \|", (DOCS / "metrics.md").read_text(encoding="utf-8"), re.MULTILINE)
    filled = []
    for cell in cells:
        if cell == as_documented(cell) and cell.startswith(tuple(OPEN_FAMILIES)):
            filled.append(cell)
            continue
        places = {"<name>": REWARD_NAMES, "<d>": DEPTHS, "<k>": (str(NUM_EVAL_SAMPLES),)}
        place, names = next(((place, names) for place, names in places.items() if place in cell), ("", ("",)))
        filled += [cell.replace(place, name) if place else cell for name in names]
    return filled


def links(page: Path) -> Iterator[tuple[str, str, Path]]:
    """(text, target as written, its path) of every relative link of a page, code blocks apart."""
    for text, target in LINK.findall(FENCED.sub("", page.read_text(encoding="utf-8"))):
        if not re.match(r"[a-z]+:", target):
            yield text, target, page.parent / target.partition("#")[0]


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page: lower case, no punctuation, hyphens for spaces."""
    found: dict[str, int] = {}
    names = set()
    for heading in HEADING.findall(FENCED.sub("", page.read_text(encoding="utf-8"))):
        shown = LINK.sub(r"\1", heading).lower()
        name = re.sub(r"[^\w\- ]", "", shown).replace(" ", "-")
        count = found.get(name, 0)
        found[name] = count + 1
        names.add(f"{name}-{count}" if count else name)
    return names


def test_metrics_page_names_what_a_run_logs_and_nothing_else(logged: set[str]) -> None:
    documented = documented_metrics()
    assert len(documented) == len(set(documented)), "a metric has two rows"
    assert logged - set(documented) == set(), "logged, but not in docs/metrics.md"
    assert set(documented) - logged == set(), "in docs/metrics.md, but not logged"


def test_metrics_in_the_prose_of_all_pages_exist(logged: set[str]) -> None:
    """`family/name` in backticks, where a run logs metrics of that family (a page may make up families of its own)."""
    families = {name.partition("/")[0] for name in logged if "/" in name}
    unknown = []
    for page in (page for page in PAGES if page.name != "CHANGELOG.md"):  # it names those that went
        names = re.findall(r"`([a-z_]+(?:/[a-z_]+)+)`", FENCED.sub("", page.read_text(encoding="utf-8")))
        unknown += [
            f"{page.name}: {n}" for n in names if n.partition("/")[0] in families and as_documented(n) not in logged
        ]
    assert unknown == []


def problems_of(page: Path) -> Iterator[str]:
    """Links to files, headings and names that are not there, and marks of a merge that was not finished.

    [`Trainer.train_step`](.../trainer.py) promises that `train_step` is defined there, inside `Trainer`'s file.
    """
    yield from re.findall(r"^(?:<<<<<<<|=======|>>>>>>>).*$", page.read_text(encoding="utf-8"), re.MULTILINE)
    for text, target, path in links(page):
        _, mark, anchor = target.partition("#")
        destination = page if target[0] == "#" else path
        if not destination.exists():
            yield f"no file: {target}"
            continue
        if mark and destination.suffix == ".md" and anchor not in anchors(destination):
            yield f"no heading: {target}"
        name = CODE_NAME.fullmatch(text)
        if re.fullmatch(r"\w+\.py", text) and text != destination.name:
            yield f"{text} is the text of a link to {target}"
        if name is None or path.suffix != ".py" or name[1].endswith(".py"):
            continue
        source = path.read_text(encoding="utf-8")
        for part in name[1].split("."):
            if not re.search(rf"^\s*(?:def|class) {part}\b|^{part}\b.*=", source, re.MULTILINE):
                yield f"no {part} in {target}"


def test_links_lead_to_files_headings_and_names_and_no_merge_is_unfinished() -> None:
    problems = {str(page.relative_to(REPOSITORY)): list(problems_of(page)) for page in PAGES}
    assert {page: found for page, found in problems.items() if found} == {}


def test_links_to_names_lead_to_their_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """After code has moved: `python docs/links.py`."""
    monkeypatch.syspath_prepend(DOCS)
    links = import_module("links")
    assert links.line_of("class A:\n    x: int = 1\n\n    def f(self): ...\n", "A.f") == 4
    behind = [page.name for page in links.pages() if links.with_lines(page) != page.read_text(encoding="utf-8")]
    assert behind == [], "run python docs/links.py"


def test_options_in_the_prose_of_all_pages_exist() -> None:
    fields = fields_of(Recipe)
    sections = "|".join({key.partition(".")[0] for key in fields if "." in key})
    free = re.compile(
        r"task\.N|(?:task|rollout\.environment|rewards\.N)\.options|rollout\.drafter_options|algorithm\.\w+_options"
    )
    unknown = []
    for page in PAGES:
        if page.name in ("CHANGELOG.md", "LOG.md", "from_trl.md"):  # they name options of the past, and of others
            continue
        text = FENCED.sub("", page.read_text(encoding="utf-8"))
        for name in re.findall(rf"`((?:{sections})\.[a-z_0-9.]*[a-z_0-9])[`=: ]", text):
            key = re.sub(r"\.\d+(?=\.|$)", ".N", name)
            if name.endswith(("_rat", ".json", ".safetensors")):  # an example of a mistake, and files
                continue
            if not (any(one == key or one.startswith(f"{key}.") for one in fields) or free.match(key)):
                unknown.append(f"{page.name}: {name}")
    assert unknown == []


def test_recipe_page_has_every_section_and_every_option_has_its_documentation() -> None:
    shown = run("show-config", "--help-fields").stdout.splitlines()
    assert "    " not in shown, "a field without documentation"
    for key, of in (("train.num_steps", "train"), ("rollout.environment.options.cpu_seconds", "environment python")):
        part = run("show-config", "--help-fields", key).stdout.splitlines()
        assert part[-2:] == shown[shown.index(part[-2]) :][:2]
        assert part[-2].startswith(f"{key}: integer")
        assert len(part) == 2 or of in part[0]
    assert run("show-config", "quickstart", "--help-fields", "critic").stdout.startswith("critic: PPO's value model")
    page = (DOCS / "recipe.md").read_text(encoding="utf-8")
    sections = {key.partition(".")[0] for key in fields_of(Recipe) if "." in key}
    assert {name for name in sections if f"`{name}`" not in page} == set()


def test_drawings_are_what_their_script_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(DOCS)
    drawings = import_module("drawings")
    committed = {path.name: path.read_text(encoding="utf-8") for path in drawings.FOLDER.glob("*.svg")}
    monkeypatch.setattr(drawings, "FOLDER", tmp_path)
    drawings.main()
    assert {path.name: path.read_text(encoding="utf-8") for path in tmp_path.glob("*.svg")} == committed


def test_the_recipe_lines_of_the_pages_pass_the_checks(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(recipe_text(num_steps=100))
    lines = tmp_path / "lines.yaml"
    for name in ("cispo", "dr_grpo", "gspo", "options", "ppo", "reinforce_plus_plus", "rloo"):
        page = (DOCS / "algorithms" / f"{name}.md").read_text(encoding="utf-8")
        blocks = re.findall(r"^```yaml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
        assert blocks, name
        for block in blocks:
            lines.write_text(block)
            overrides = [
                f"{section}.{option}={json.dumps(value)}"
                for section, options in read_source(lines).data.items()
                for option, value in options.items()
            ]
            assert overrides
            source = read_source(tmp_path / "recipe.yaml", overrides)
            check_recipe(build_recipe(source), source)


# --- Code and commands ----------------------------------------------------------------------------------------------


def test_files_and_recipes_that_commands_of_the_pages_name_are_there() -> None:
    named = {
        name
        for page in PAGES
        if page.name not in ("CHANGELOG.md", "LOG.md")
        for name in re.findall(
            r"(?<![\w./])((?:recipes|docs|srtrl|tests)/[\w/-]+\.(?:py|yaml|md|svg|ipynb|json))\b",
            page.read_text(encoding="utf-8"),
        )
    }
    assert len(named) > 20
    assert sorted(name for name in named if not (REPOSITORY / name).exists()) == []


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


# --- docs/from_trl.md: its script runs, its keys exist, and it has every name that a recipe recognises ----------------


FROM_TRL = (DOCS / "from_trl.md").read_text(encoding="utf-8")
NAMES = read_yaml(FOREIGN_NAMES.read_text(), "names")[0]
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"


def test_the_tables_have_all_names_and_only_keys_that_exist() -> None:
    rows = [line.split(" | ") for line in FROM_TRL.splitlines() if line.startswith("| `")]
    left = {name for row in rows for name in re.findall(r"`([\w.]+)`", row[0])}
    named = {part for name in left for part in name.split(".")} | set(re.findall(r"`(\w+)`", FROM_TRL))
    assert not NAMES.keys() - named
    fields = fields_of(Recipe)
    sections = "model|rollout|algorithm|train|eval|log"
    keys = {key for row in rows for key in re.findall(rf"`((?:{sections})\.[a-z_.]+)", row[1])}
    assert len(keys) > 40
    assert keys <= {*fields, "algorithm.loss_options.ratio_cap"}
    for row in rows:  # where a recipe says a key for a name, the page says the same one
        for name in re.findall(r"`([\w.]+)`", row[0]):
            meant = NAMES.get(name.rpartition(".")[2], "")
            if meant in fields:
                assert meant.partition(".")[0] in row[1], (name, meant)
                assert meant.rpartition(".")[2] in row[1] or meant.startswith("model.lora"), (name, meant)


def test_defaults_are_those_of_the_recipe() -> None:
    stated = re.findall(r"`((?:rollout|algorithm|train|eval|model)\.[a-z_.]+)` \(([\w.-]+)\)", FROM_TRL)
    assert len(stated) > 15
    fields = fields_of(Recipe)
    for key, default in stated:
        info = fields[key]
        if default == "required":
            assert info.is_required(), key
        else:
            shown = json.dumps(info.get_default(call_default_factory=True)).strip('"')
            assert shown == default or float(shown) == float(default), key


def test_the_ported_script_runs(policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trl, (script,) = (re.findall(rf"```{kind}\n(.*?)```", FROM_TRL, re.DOTALL) for kind in ("text", "python"))
    ast.parse(trl[0])
    monkeypatch.chdir(tmp_path)
    (Path(shutil.copytree(policy, "my_model")) / "chat_template.jinja").write_text(TEMPLATE)
    rows = [{"prompt": [{"role": "user", "content": f"{n}+1?"}], "answer": str(n % 10)} for n in range(12)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sizes = {'"num_steps": 100': '"num_steps": 2', '_new_tokens": 64': '_new_tokens": 8'}
    for text, smaller in (sizes | {'"max_prompt_tokens": 128': '"max_prompt_tokens": 64'}).items():
        assert text in script
        script = script.replace(text, smaller)
    exec(compile(script, "script", "exec"), {"__name__": "__main__"})
    rows_logged = read_metrics(Path("runs/answers/metrics.jsonl"))
    assert [row["step"] for row in rows_logged] == [1, 2]
    assert "reward/has_answer" in rows_logged[0]
