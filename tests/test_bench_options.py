"""The benchmarks' options: what they read, and what they say of mistakes: one line that names the option."""

from pathlib import Path

import pytest
import yaml
from bench_cases import bench, write_trace
from tiny_run import make_policy, make_recipe

from srtrl.bench.options import CURVES, parse_curve


def test_bench_lists_what_there_is() -> None:
    names = bench("--help").stdout.partition("names: ")[2].strip().split(", ")
    assert {"rollout", "host", "train", "gpu"} <= set(names)


def test_curves_are_named_or_given() -> None:
    assert parse_curve("--price-as", "8:0.25, 64:1").points == ((8, 0.25), (64, 1.0))
    for name, curve in CURVES.items():
        assert parse_curve("--price-as", name) is curve
        costs = [seconds for _, seconds in curve.points]
        assert costs == sorted(costs)


TRACE = ("rollout", "--model-shape", "tiny", "--trace", "TRACE")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("rollout", "--sequences", "8,0"), "--sequences: expected counts like 8,32,128, found '8,0'"),
        (("rollout", "--model", "./nowhere"), "./nowhere: no local folder"),
        (("rollout", "--model-shape", "smal"), "--model-shape: no shape 'smal', did you mean `small`"),
        (("rollout", "--drafters", "none"), "--drafters needs --trace FILE"),
        (("rollout", "--slots", "4"), "--slots needs --trace FILE"),
        ((*TRACE, "--sequences", 2), "--sequences has no meaning with --trace"),
        ((*TRACE, "--drafters", "none,none"), "--drafters: expected names, each once"),
        ((*TRACE, "--drafters", "nome"), "--drafters: `nome` is not in srtrl/drafters/, did you mean"),
        ((*TRACE, "--prompts-used", "1,2"), "--prompts-used: expected one number"),
        ((*TRACE, "--prompts-used", 9), "--prompts-used: 9, but the trace has 2 prompts"),
        ((*TRACE, "--history", 1), "--history: 1 of the samples leaves none to decode"),
        ((*TRACE, "--draft-budget", "x"), "--draft-budget: expected auto or a number"),
        ((*TRACE, "--tokenizer", "./nowhere"), "--tokenizer: ./nowhere: "),
        ((*TRACE, "--json", "nowhere/x.json"), "--json: there is no folder nowhere to write x.json into"),
        ((*TRACE, "--write-docs", "."), "--write-docs: . is a folder; expected a file to write"),
        ((*TRACE, "--price-as", "h200-1.5"), "--price-as: no curve 'h200-1.5', did you mean `h200-1.5b`"),
        ((*TRACE, "--price-as", "8:x"), "--price-as: expected ROWS:SECONDS like 64:0.002, found '8:x'"),
        ((*TRACE, "--price-as", "8:1,8:2"), "--price-as: 8:2.0 follows 8:1.0"),
        ((*TRACE, "--price-as", "8:2,16:1"), "--price-as: 16:1.0 follows 8:2.0"),
        ((*TRACE, "--price-as", "0:1"), "--price-as: expected at least 1 row"),
        ((*TRACE, "--price-as", "1:0"), "seconds above 0"),
        (("rollout", "--trace", "TEXTS"), "the row has texts; give --tokenizer DIR"),
        (("rollout", "--trace", "LARGE"), "--trace: token id 9999 is not in the model's vocabulary of 6400"),
        (("rollout", "--trace", "LONG", "--model-shape", "tiny"), "--max-tokens: the longest prompt and response"),
        (("host", "--slots", "0"), "--slots: expected counts like 8,32,128, found '0'"),
        (("host", "--slots", "9", "--trace", "TRACE"), "--slots: 9, but the trace has 4 samples to decode"),
        (("host", "--drafters", "nome"), "--drafters: `nome` is not in srtrl/drafters/"),
        (("host", "--device-ms", "fast"), "--device-ms: no curve 'fast'"),
        (("host", "--trace", "TEXTS"), "the row has texts; give --tokenizer DIR"),
        (("host", "--json", "."), "--json: . is a folder"),
        (("train", "RECIPE", "--drafters", "nome"), "--drafters: `nome` is not in srtrl/drafters/, did you mean"),
        (("train", "RECIPE", "--slots", "0"), "--slots: expected counts like 8,32,128, found '0'"),
        (("train", "RECIPE", "train.num_stpes=2"), "train.num_stpes"),
        (("train", "RECIPE", "train.num_steps=1", "train.checkpoint_every=1"), "override `train.checkpoint_every=1`"),
        (("train", "RECIPE", "rollout.drafter=ngram"), "override `rollout.drafter=ngram`: the drafters are those of"),
        (("train", "RECIPE", "rollout.slots=3", "--slots", "4"), "override `rollout.slots=3`: the slots are those"),
        (("train", "RECIPE", "eval.every_steps=2"), "override `eval.every_steps=2`: bench train sets that itself"),
        (("train", "RECIPE", "--json", "nowhere/x.json"), "--json: there is no folder nowhere"),
    ],
)
def test_mistakes_are_named(files: dict[str, Path], arguments: tuple[object, ...], error: str) -> None:
    result = bench(*(files.get(str(argument), argument) for argument in arguments))
    assert result.exit_code == 2, result.stdout
    assert error in result.stderr


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Name in the arguments above -> file."""
    folder = tmp_path_factory.mktemp("bench")
    paths = {name: folder / f"{name}.jsonl" for name in ("TRACE", "TEXTS", "LARGE", "LONG")}
    write_trace(paths["TRACE"], 2)
    write_trace(paths["LONG"], 1, length=5000)
    paths["TEXTS"].write_text('{"id": "0", "prompt": "a", "samples": [{"text": "b"}]}\n')
    paths["LARGE"].write_text('{"id": "0", "prompt_token_ids": [1], "samples": [{"token_ids": [9999]}]}\n')
    recipe = make_recipe(make_policy(folder / "policy"), folder / "runs").model_dump(mode="json")
    paths["RECIPE"] = folder / "recipe.yaml"
    paths["RECIPE"].write_text(yaml.safe_dump(recipe))
    return paths
