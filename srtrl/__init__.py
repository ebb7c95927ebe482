"""srtrl: reinforcement learning of language models with rollouts that are fast and exact."""

__version__ = "0.1.0"
