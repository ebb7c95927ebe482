"""The recipe of a run: its options, its file, combinations that cannot run."""
