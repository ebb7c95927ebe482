"""A run's folder: metrics, checkpoints, trackers, interrupts."""
