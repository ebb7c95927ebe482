"""The training step, the update, checkpoints, evaluation and the supervised warm start."""
