"""srtrl: reinforcement learning of language models with rollouts that are fast and exact."""

import os

__version__ = "0.1.0"

# OpenMP's threads wait for each other by spinning, by default for milliseconds: one more busy process on a machine of
# two cores made decode steps of a tiny policy 30 times slower. A short wait costs nothing where the machine is quiet
# (docs/LOG.md). libgomp reads this when torch is loaded; what the user has set stays.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
