"""docs/from_trl.md: its script runs, its keys exist, and it has every name that a recipe recognises."""

import ast
import json
import re
import shutil
from pathlib import Path

import pytest

from srtrl.metrics import read_metrics
from srtrl.recipe.fields import fields_of
from srtrl.recipe.file import FOREIGN_NAMES, read_yaml
from srtrl.recipe.schema import Recipe

TEXT = (Path(__file__).resolve().parent.parent / "docs" / "from_trl.md").read_text(encoding="utf-8")
NAMES = read_yaml(FOREIGN_NAMES.read_text(), "names")[0]
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"


def test_the_tables_have_all_names_and_only_keys_that_exist() -> None:
    rows = [line.split(" | ") for line in TEXT.splitlines() if line.startswith("| `")]
    left = {name for row in rows for name in re.findall(r"`([\w.]+)`", row[0])}
    named = {part for name in left for part in name.split(".")} | set(re.findall(r"`(\w+)`", TEXT))
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
    stated = re.findall(r"`((?:rollout|algorithm|train|eval|model)\.[a-z_.]+)` \(([\w.-]+)\)", TEXT)
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
    trl, (script,) = (re.findall(rf"```{kind}\n(.*?)```", TEXT, re.DOTALL) for kind in ("text", "python"))
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
