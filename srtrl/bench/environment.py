"""What a figure depends on besides the code: machine, versions, threads, and the command that was run."""

import datetime
import os
import platform
import shlex
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numba
import torch

from srtrl import __version__
from srtrl.model.cpu_threads import set_cpu_threads


@dataclass(kw_only=True, slots=True, frozen=True)
class Environment:
    """Stands beside every measurement."""

    command: str
    date: str
    """Day of the measurement, UTC."""
    processor: str
    """Name of the CPU, and of the GPU where one computed."""
    num_cores: int
    """Cores that this process may use."""
    num_threads: int
    """Of torch and of Numba's kernels."""
    load: float
    """Load average of the last minute at the start: on a quiet machine well below 1."""
    versions: dict[str, str]

    def __str__(self) -> str:
        versions = ", ".join(f"{name} {number}" for name, number in self.versions.items())
        return (
            f"{self.processor}, {self.num_cores} cores, {self.num_threads} threads; load {self.load:.1f} at the start; "
            f"{versions}; {self.date}"
        )


def use_threads(num_threads: int | None) -> None:
    """Give torch and Numba this many threads; None leaves them their own choice.

    Raises:
        ValueError: More than Numba has.
    """
    if num_threads is None:
        return
    most = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]
    if not 1 <= num_threads <= most:
        raise ValueError(f"--threads: expected 1 to {most} (the cores of this machine), found {num_threads}")
    set_cpu_threads(num_threads)


def read_environment(device: torch.device) -> Environment:
    """The present process, on this machine."""
    processor = cpu_name()
    if device.type == "cuda":
        processor += f" and {torch.cuda.get_device_name(device)}"
    return Environment(
        command=shlex.join(["srtrl", *sys.argv[1:]]),
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        processor=processor,
        num_cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        num_threads=torch.get_num_threads(),
        load=os.getloadavg()[0],
        versions={
            "srtrl": __version__,
            "torch": torch.__version__,
            "transformers": version("transformers"),
            "numba": numba.__version__,
            "python": platform.python_version(),
        },
    )


def cpu_name(cpu_info: Path = Path("/proc/cpuinfo")) -> str:
    """Model name of the processor: that of Linux where there is one, else what Python knows."""
    if cpu_info.is_file():
        for line in cpu_info.read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()
