"""One transformer for decode and update, its attention plans, log-probs and weights."""
