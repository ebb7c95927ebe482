"""The rollout benchmark, from its options to its document."""

import tempfile
from pathlib import Path

import torch

from srtrl.bench.environment import read_environment
from srtrl.bench.live_run import measure_live
from srtrl.bench.peers_run import measure_peers
from srtrl.bench.rollout_options import RolloutBench
from srtrl.bench.shapes import write_random_model
from srtrl.bench.tables import Document
from srtrl.bench.trace_run import measure_trace
from srtrl.model.cpu_threads import set_cpu_threads
from srtrl.model.weights import locate

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_MEASURES = {"peers": measure_peers, "trace": measure_trace, "live": measure_live}


def choose_device(name: str) -> torch.device:
    """`cpu`, `cuda`, or `auto`, which is CUDA where present.

    Raises:
        ValueError: CUDA is asked for and there is none.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device: cuda, but torch sees no CUDA device here; use cpu or auto")
    return torch.device(name if name != "auto" else "cuda" if torch.cuda.is_available() else "cpu")


def measure(bench: RolloutBench) -> Document:
    """Run the benchmark; what it is doing goes to standard error.

    Raises:
        ValueError: Model, prompts, lengths and memory do not fit each other.
    """
    device = choose_device(bench.device)
    set_cpu_threads(bench.num_threads)
    environment = read_environment(device)
    dtype = _DTYPES[bench.dtype]
    with tempfile.TemporaryDirectory() as temporary:
        folder = locate(bench.model) if bench.model else write_random_model(bench.shape, Path(temporary), dtype)
        return _MEASURES[bench.mode](bench, folder, dtype, device, environment)
