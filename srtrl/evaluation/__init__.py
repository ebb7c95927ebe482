"""`srtrl eval`: benchmarks, their figures and the agreement of graders with reference solutions."""
