"""`srtrl eval`: a policy on held-out problems and benchmarks, and its figures."""
