"""Benchmarks: what is measured, alternating, in one run on one machine."""
