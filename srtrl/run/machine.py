"""The machine that trains, for the readers of a run: a line of `machine.txt` each time that training starts."""

from __future__ import annotations

import datetime
import os
import platform
import re
from pathlib import Path
from typing import TYPE_CHECKING

from srtrl import __version__
from srtrl.model.cpu_threads import num_cores

if TYPE_CHECKING:
    import torch

    from srtrl.recipe.schema import Recipe

MACHINE_FILE = "machine.txt"


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


def add_machine(folder: Path, machine: str) -> None:
    """Add a line to the run's file."""
    with (folder / MACHINE_FILE).open("a", encoding="utf-8") as file:
        file.write(f"{machine}\n")


def read_machines(folder: Path) -> list[str]:
    """The different lines of the run's file; none where it is not there."""
    file = folder / MACHINE_FILE
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines() if file.is_file() else []
    return list(dict.fromkeys(lines))
