"""The machine that trains, for the readers of a run: a line of `machine.txt` each time that training starts."""

from __future__ import annotations

import datetime
import os
import platform
import re
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from srtrl import __version__
from srtrl.model.cpu_threads import num_cores

if TYPE_CHECKING:
    import torch

    from srtrl.recipe.schema import Recipe

MACHINE_FILE = "machine.txt"
CPU_PART = re.compile(r", \d+ cores?(?:, MKL_CBWR=(\S*))?, torch ")
"""End of a line about a processor, with the variable that decides how torch's products are rounded."""


def choose_device(recipe: Recipe) -> torch.device:
    """The recipe's device; `auto` is CUDA where present, of several ranks each has its own.

    Raises:
        ValueError: a device that this machine lacks, or an AMD GPU.
    """
    import torch

    if recipe.device != "cpu" and torch.version.hip is not None and torch.cuda.is_available():
        raise ValueError(
            f"device: {recipe.device}: this PyTorch is for AMD GPUs (ROCm), and srtrl's kernels are for NVIDIA's, of "
            "compute capability 8.0 or newer; use device=cpu"
        )
    if recipe.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if recipe.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device: cuda, but torch sees no CUDA device here; use device=cpu or device=auto")
    return torch.device(recipe.device)


def cpu_name(cpu_info: Path = Path("/proc/cpuinfo")) -> str:
    """Model name of the processor: that of Linux where there is one, else what Python knows."""
    name = re.search(r"^model name\s*: (.+)$", cpu_info.read_text(), re.MULTILINE) if cpu_info.is_file() else None
    return name[1] if name else platform.processor() or platform.machine()


def describe_machine(device: torch.device, dtype: str = "float32") -> str:
    """Processor (or GPU), versions and date, in one line.

    Args:
        device: Of the models.
        dtype: Of the update; on a GPU one in bfloat16 has its FlashAttention named (`train.attention`).
    """
    import torch

    cores = num_cores()
    name = f"{cpu_name()}, {cores} core{'s' if cores > 1 else ''}, MKL_CBWR={os.environ.get('MKL_CBWR', '')}"
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        if dtype != "float32":
            name += f", attention {torch.nn.attention.current_flash_attention_impl() or 'FA2'}"
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    return f"{name}, torch {torch.__version__}, srtrl {__version__}, {date}"


def add_machine(folder: Path, machine: str) -> list[str]:
    """Add a line to the run's file; returns one for the console where products may be rounded in another way now."""
    lines = (*_read_lines(folder)[-1:], machine)
    with (folder / MACHINE_FILE).open("a", encoding="utf-8") as file:
        file.write(f"{machine}\n")
    values = [part[1] or "nothing" for part in map(CPU_PART.search, lines) if part]
    changes = [(old, new) for old, new in pairwise(values) if old != new]
    return [f"MKL_CBWR: the run has {old}, now {new}: float32 may be rounded differently" for old, new in changes]


def read_machines(folder: Path) -> list[str]:
    """The different lines of the run's file; none of a run of an earlier version."""
    return list(dict.fromkeys(_read_lines(folder)))


def _read_lines(folder: Path) -> list[str]:
    file = folder / MACHINE_FILE
    return file.read_text(encoding="utf-8", errors="replace").splitlines() if file.is_file() else []
