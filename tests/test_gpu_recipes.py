"""Two training steps of a recipe at its own sizes, with random weights of its model's shape: what needs no download.

    pytest -m "gpu and slow" tests/test_gpu_recipes.py -s

prints a column per step: compare `peak_gib` with the table of docs/performance.md. Lengths of responses are geometric,
with a mean that the end tokens decide: random weights sample nearly uniformly.
"""

import json
from pathlib import Path

import pytest
import torch
from test_recipe_memory import ROOT
from tiny_run import train

from srtrl.metrics import read_metrics
from srtrl.model.folders import load_tokenizer
from srtrl.model.hf_config import config_from_hf
from srtrl.model.shapes import SHAPES
from srtrl.model.weights import init_model
from srtrl.planner import DEFAULT_GPU_GIB, MAX_SHARE, find_config
from srtrl.recipe.file import load_recipe
from srtrl.run.checkpoint import save_policy


def two_steps(
    folder: Path, recipe_name: str, mean_tokens: int, *changes: str, shape: str | None = None
) -> list[dict[str, float]]:
    """The metrics of two steps, printed; of a model of the recipe's own shape, or of another one."""
    file = ROOT / "recipes" / f"{recipe_name}.yaml"
    path = load_recipe(file).model.path
    tokenizer = load_tokenizer("bundled:tiny")
    config = config_from_hf(SHAPES[shape]) if shape else find_config(path)[0]
    ends = torch.arange(0, config.vocab_size, mean_tokens).tolist()  # one token in `mean_tokens` ends a response
    save_policy(folder / "model", model=init_model(config, 0, torch.bfloat16, "cpu"), tokenizer=tokenizer, end_ids=ends)
    rows = [json.dumps({"prompt": f"{number} + {number * number} = " * 6}) for number in range(1000)]
    (folder / "prompts.jsonl").write_text("\n".join(rows))
    task = f"task={{name: prompts, options: {{train: {{files: [{folder / 'prompts.jsonl'}]}}}}}}"
    places = [f"output_dir={folder}", f"model.path={folder / 'model'}", task, "rewards=[{name: 'tiny_run:digits'}]"]
    short = ["log.trackers=[]", "eval={before_and_after: false}", "train.num_steps=2", "train.warmup_steps=0"]
    train(load_recipe(file, [*places, *short, *changes]))
    steps = read_metrics(folder / recipe_name / "metrics.jsonl")[-2:]
    print(f"\n{recipe_name}, {shape or path}, {torch.cuda.get_device_name() if torch.cuda.is_available() else 'CPU'}")
    for name in steps[-1]:
        if name.startswith(("tokens/", "time/", "memory/", "logprob_difference/")):
            print(f"{name:32}", *(f"{step[name]:12.5g}" for step in steps if name in step))
    return steps


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize(("name", "mean_tokens"), [("grpo_gsm8k", 300), ("grpo_math", 700)])
def test_two_steps_of_a_recipe_fit_and_agree_with_the_decoder(tmp_path: Path, name: str, mean_tokens: int) -> None:
    for step in two_steps(tmp_path, name, mean_tokens):
        assert step["logprob_difference/mean"] <= 0.01
        assert step["logprob_difference/kl"] <= 1e-3
        assert step["memory/peak_gib"] < MAX_SHARE * DEFAULT_GPU_GIB


def test_the_same_steps_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tiny, in float32: whether what a GPU would run is in order."""
    sizes = ["rollout.num_prompts=4", "rollout.num_samples=2", "rollout.max_new_tokens=30", "model.dtype=float32"]
    steps = two_steps(tmp_path, "grpo_gsm8k", 10, *sizes, "device=cpu", "num_threads=1", shape="tiny")
    assert [step["step"] for step in steps] == [1, 2]
    assert all(3 < step["tokens/response"] / 8 < 20 for step in steps)
    assert steps[0]["logprob_difference/max"] < 1e-4
    assert "logprob_difference/mean" in capsys.readouterr().out
