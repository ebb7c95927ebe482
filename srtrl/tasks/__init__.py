"""Prompts and rewards, one file a task; grading in killable worker processes."""
