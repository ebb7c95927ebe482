"""Fixtures and paths that several test files use."""

import os
from pathlib import Path

import pytest
import torch

from srtrl.model.cpu_threads import set_cpu_threads

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined: tests of kernels run them on the CPU
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # the default; unset, Triton 3.9 warns of it

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder of the real data; tests that need it are skipped where it is absent."""
    folder = Path(os.environ.get("SRTRL_SHARED_DATA", REPOSITORY.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no shared data at {folder}: set SRTRL_SHARED_DATA to its folder")
    return folder


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Tiny tensors gain nothing from threads, and lose much on a busy machine; tests of threads set their own."""
    set_cpu_threads(1)
