"""srtrl: reinforcement learning of language models with rollouts that are fast and exact."""

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from srtrl.api import generate, load_recipe, train
    from srtrl.tasks.reward_input import batched, isolated

__all__ = ["__version__", "batched", "generate", "isolated", "load_recipe", "train"]
__version__ = "0.1.0"

if sys.platform == "win32":
    raise ImportError("srtrl needs Linux or macOS; on Windows it runs in WSL2")

from srtrl.caches import cache_folders

os.environ.update(cache_folders())
if "numba" in sys.modules:  # imported before
    importlib.import_module("numba.core.config").reload_config()

# Products of Intel's library then have the same bits with any number of rows and threads, where the processor's kernels
# allow it (docs/exactness.md). It is read at the first product.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")

# OpenMP's threads wait for each other by spinning, by default for milliseconds: one more busy process on a machine of
# two cores made decode steps of a tiny policy 30 times slower. A short wait costs nothing where the machine is quiet
# (docs/LOG.md). libgomp reads this when torch is loaded; what the user has set stays.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
# Read when torch is loaded, too. Less memory is lost to fragmentation on CUDA.
if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
    os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def __getattr__(name: str) -> Any:
    """Import a name of `__all__` when it is used, so that `srtrl --help` does not wait for torch."""
    if name in ("generate", "load_recipe", "train"):
        return getattr(importlib.import_module("srtrl.api"), name)
    if name in ("batched", "isolated"):
        return getattr(importlib.import_module("srtrl.tasks.reward_input"), name)
    raise AttributeError(f"module `srtrl` has no attribute `{name}`")
