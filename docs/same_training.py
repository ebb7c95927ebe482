"""Says whether two checkouts of srtrl train alike: four steps of eight small recipes, and of one on two ranks.

    git worktree add ../before HEAD~1 && python docs/same_training.py ../before

Compared with `==`: the weights of the last checkpoint, and all metrics but those of the decoder, of times and of
memory. Exit code 1 where something differs. Five minutes on two cores.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from srtrl.metrics import read_metrics

HERE = Path(__file__).resolve().parent.parent
COMMON = "train.num_steps=4 train.checkpoint_every=4 num_threads=1 task.options.num_train=64 eval.num_problems=16"
RUNS = {
    "quickstart": "eval.every_steps=2 rollout.num_prompts=16",
    "ppo_tiny": "critic.warmup_steps=1 rollout.num_prompts=32",
    "dapo_tiny": "rollout.num_prompts=16",
    "tools_tiny": "rollout.num_prompts=16",
    "lora_tiny": "rollout.num_prompts=16",
    "partial_tiny": "rollout.num_prompts=16",
    "spec_rl_tiny": "rollout.num_prompts=16",
    "draft_head_tiny": "rollout.num_prompts=16",
    "two ranks": "rollout.num_prompts=16",
}
"""Recipe -> options; two ranks train `quickstart`."""
MEASURED = ("engine/", "time/", "memory/", "environment/tool_seconds")
"""Beginnings of the metrics that no seed decides."""


def train(checkout: Path, name: str, folder: Path) -> tuple[str, list[dict[str, float]]]:
    """Run a recipe by the code of a checkout; SHA-256 of its last weights, and its rows."""
    recipe, launch = name, [sys.executable, "-m", "srtrl"]
    if name == "two ranks":
        launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "srtrl"]
        recipe = "quickstart"
    options = [*COMMON.split(), *RUNS[name].split(), f"output_dir={folder}", "name=run"]
    command = [*launch, "train", str(checkout / "recipes" / f"{recipe}.yaml"), *options]
    environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{checkout}, {name}: exit code {done.returncode}\n{done.stderr}")
    [weights] = folder.glob("run/checkpoints/step_000004/model*.safetensors")
    rows = [dict(row) for row in read_metrics(folder / "run" / "metrics.jsonl")]
    return hashlib.sha256(weights.read_bytes()).hexdigest(), rows


def differences(one: list[dict[str, float]], other: list[dict[str, float]]) -> list[str]:
    """Metrics that are not in both or have another value, with the step."""
    found = [] if len(one) == len(other) else [f"{len(one)} rows against {len(other)}"]
    for first, second in zip(one, other, strict=False):
        names = [name for name in sorted(first.keys() | second.keys()) if not name.startswith(MEASURED)]
        found += [
            f"step {first['step']:.0f} {name}: {first.get(name)} against {second.get(name)}"
            for name in names
            if first.get(name) != second.get(name)
        ]
    return found


def main(*arguments: Any) -> int:
    """Compare this checkout with another, on all runs or on those that are named."""
    other, *names = arguments
    failed = 0
    for name in names or RUNS:
        with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
            (weights, rows), (weights_there, rows_there) = (
                train(checkout, name, Path(folder))
                for checkout, folder in ((HERE, first), (Path(other).resolve(), second))
            )
        found = differences(rows, rows_there) + (["the weights"] if weights != weights_there else [])
        failed += bool(found)
        print(f"{name:<16} {'equal' if not found else f'{len(found)} differ: ' + '; '.join(found[:5])}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
