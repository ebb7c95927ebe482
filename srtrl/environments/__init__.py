"""Environments that answer a policy between its turns, and the sandbox for its Python code."""
