"""What Triton needs of a machine besides a device."""

import os
import sysconfig
from pathlib import Path
from shutil import which


def check_compiler() -> None:
    """Refuse a machine where Triton cannot build what launches its kernels; it would say so in the first rollout.

    Raises:
        ValueError: there is no C compiler, or Python's headers are missing.
    """
    has_compiler = "CC" in os.environ or which("gcc") is not None or which("clang") is not None
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not (has_compiler and header.is_file()):
        missing = f"{header}, which is" if has_compiler else "a C compiler, which is"
        raise ValueError(
            f"decoding on a CUDA device needs {missing} not there; Triton builds with it what launches its kernels: "
            "`apt-get install gcc python3-dev`, or run with device=cpu"
        )
