"""Requirements of Triton on a machine besides a device."""

import os
import sysconfig
from importlib.util import find_spec
from pathlib import Path
from shutil import which


def check_triton() -> None:
    """Refuse a machine where Triton cannot build what launches its kernels; it would say so in the first rollout.

    Raises:
        ValueError: Triton is not installed, there is no C compiler for it, or Python's headers are missing.
    """
    if find_spec("triton") is None:
        raise ValueError(
            "a CUDA device needs Triton, which PyTorch's CUDA builds for Linux include and this installation lacks: "
            "`pip install triton`, or run with device=cpu"
        )
    has_compiler = "CC" in os.environ or which("gcc") is not None or which("clang") is not None
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not (has_compiler and header.is_file()):
        missing = f"{header}, which is" if has_compiler else "a C compiler, which is"
        raise ValueError(
            f"a CUDA device needs {missing} not there; Triton builds with it what launches its kernels: "
            "`apt-get install gcc python3-dev`, or run with device=cpu"
        )
