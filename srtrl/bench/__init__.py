"""Recorded rollouts, read and replayed: `srtrl replay`."""
