"""Writes the tables of results.md between its marks: short runs of four recipes with each drafter.

    python docs/results.py

One thread, some minutes. Each run takes four steps over two epochs: every prompt is sampled twice. The drafts are
budgeted by the stated cost of a decode step (`H200_CURVE` in h200.py) instead of measured times, so that all
counts are the same in every run of this script (but with a tool, whose answers take their own time).
"""

import hashlib
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from h200 import H200_CURVE
from rich.console import Console

from srtrl.build import build_parts
from srtrl.engine.draft_budget import StepCost
from srtrl.metrics import read_metrics
from srtrl.model.cpu_threads import set_cpu_threads
from srtrl.recipe.file import load_recipe
from srtrl.trainer.trainer import Trainer

PAGE = Path(__file__).with_name("results.md")
RECIPES = PAGE.parent.parent / "recipes"
BEGIN, END = "<!-- written by results.py -->\n", "<!-- end -->\n"
NUM_STEPS, NUM_PROMPTS = 4, {"quickstart": 32, "ppo_tiny": 64, "dapo_tiny": 32, "tools_tiny": 32}
EXTRA = {"quickstart": ["train.learning_rate=1e-4"], "ppo_tiny": ["critic.warmup_steps=1"]}
TITLES = {"quickstart": "GRPO", "ppo_tiny": "PPO", "dapo_tiny": "DAPO", "tools_tiny": "GRPO with a tool"}
DRAFTERS = ("none", "suffix:Drafter", "srt")
sys.path.append(str(PAGE.parent / "examples"))


def train(name: str, drafter: str, folder: str) -> dict[str, Any]:
    """One run: counts of its two halves, the price of its decode steps, the hash of its last weights."""
    settings = [f"train.num_steps={NUM_STEPS}", f"train.checkpoint_every={NUM_STEPS}", "eval.before_and_after=false"]
    settings += ["eval.every_steps=null", "log.trackers=[]", f"output_dir={folder}", f"rollout.drafter={drafter}"]
    settings += [f"task.options.num_train={NUM_STEPS // 2 * NUM_PROMPTS[name]}", *EXTRA.get(name, [])]
    cost = StepCost(points=H200_CURVE)
    parts = build_parts(load_recipe(RECIPES / f"{name}.yaml", settings))
    with Trainer(parts, console=Console(quiet=True)) as trainer:
        engine, prices = parts.context.engine, []
        record = engine._record

        def priced(step: Any, trees: Any, *others: Any, **options: Any) -> None:
            prices.append(cost.seconds(len(step.slots) + trees.num_nodes + step.num_prompt_rows))
            record(step, trees, *others, **options)

        engine.control.cost, engine._record = cost, priced  # type: ignore[method-assign]
        engine.warm_up()
        for step in range(1, NUM_STEPS + 1):
            trainer.train_step(step)
        digest = hashlib.sha256()
        for key, tensor in sorted(parts.policy.model.state_dict().items()):
            digest.update(key.encode() + tensor.detach().contiguous().cpu().numpy().tobytes())
        rows = read_metrics(trainer.run.path / "metrics.jsonl")
    halves = [rows[: NUM_STEPS // 2], rows[NUM_STEPS // 2 :]]
    decodes = [[row["engine/tokens"] / row["engine/tokens_per_decode_step"] for row in half] for half in halves]
    tokens = [sum(row["engine/tokens"] for row in half) for half in halves]
    return {
        "steps": [sum(row["engine/decode_steps"] for row in half) for half in halves],
        "rate": [num / sum(each) for num, each in zip(tokens, decodes, strict=True)],
        "price": sum(prices),
        "hash": digest.hexdigest()[:12],
    }


def table_of(name: str, runs: Mapping[str, Mapping[str, Any]]) -> str:
    """A section of the page.

    Raises:
        ValueError: Two runs ended with different weights.
    """
    if len({run["hash"] for run in runs.values()}) > 1:
        raise ValueError(f"{name}: drafters changed the weights: { {key: run['hash'] for key, run in runs.items()} }")
    lines = [f"### {TITLES[name]}: [{name}.yaml](../recipes/{name}.yaml)\n"]
    lines += ["| drafter | decode steps: first, second visit | tokens per decode step: first, second visit |"]
    lines[-1] += " price of the rollouts | sha256 of the weights |"
    lines += ["| --- | --: | --: | --: | --- |"]
    for drafter, run in runs.items():
        price = f"{1000 * run['price']:,.0f} ms ({runs['none']['price'] / run['price']:.2f}x)"
        (first, second), (rate, later) = run["steps"], run["rate"]
        cells = [f"`{drafter.partition(':')[0]}`", f"{first:,.0f}, {second:,.0f}", f"{rate:.2f}, {later:.2f}", price]
        cells.append(f"`{run['hash']}`")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run everything and write the page."""
    started, sections = time.perf_counter(), []
    set_cpu_threads(1)
    for name in NUM_PROMPTS:
        runs = {}
        for drafter in DRAFTERS:
            with tempfile.TemporaryDirectory() as folder:
                runs[drafter] = train(name, drafter, folder)
            print(f"{time.perf_counter() - started:.0f} s", name, drafter, runs[drafter], file=sys.stderr, flush=True)
        sections.append(table_of(name, runs))
    note = (
        f"{datetime.now(UTC):%Y-%m-%d}, `python docs/results.py`, one thread of {os.cpu_count()} cores, "
        f"{(time.perf_counter() - started) / 60:.0f} minutes.\n"
    )
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    _, after = rest.split(END)
    PAGE.write_text(before + BEGIN + "\n" + "\n".join([note, *sections]) + "\n" + END + after, encoding="utf-8")


if __name__ == "__main__":
    main()
