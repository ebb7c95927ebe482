"""The report of a run: one HTML page with curves, readable with no network."""
