"""What a figure depends on besides the code: machine, versions, threads, and the command that was run."""

import datetime
import os
import platform
import shlex
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch

from srtrl import __version__


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
    """CPU threads of torch and of our kernels."""
    load: float
    """Load average of the last minute at the start: on a quiet machine well below 1."""
    versions: dict[str, str]

    def __str__(self) -> str:
        versions = ", ".join(f"{name} {number}" for name, number in self.versions.items())
        return (
            f"{self.processor}, {self.num_cores} cores, {self.threads}; load {self.load:.1f} at the start; "
            f"{versions}; {self.date}"
        )

    @property
    def threads(self) -> str:
        """The CPU threads, in words."""
        return f"{self.num_threads} thread{'s' if self.num_threads > 1 else ''}"


def read_environment(device: torch.device) -> Environment:
    """The present process, on this machine."""
    processor = cpu_name()
    if device.type == "cuda":
        processor += f" and {torch.cuda.get_device_name(device)}"
    libraries = ("transformers", "numba", *(("triton",) if device.type == "cuda" else ()))
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
            **{name: version(name) for name in libraries},
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
