"""The stated time of a decode step on one H200, by which the scripts of this folder price rollouts."""

H200_CURVE = ((1, 0.0020), (129, 0.0020), (2048, 0.0139))
"""(rows, seconds of a decode step), stated, and measured since: 0.9 to 1.14 times that with up to 64 sequences, up to
1.4 times with 256 of 512 tokens (docs/benchmarks.md). Memory-bound and level, then compute-bound and linear.
These are 1.54 thousand million parameters in bfloat16 on one H200, by its data sheet: 1.2 ms + max(0.8 ms, 6.2 us
per row). The fixed 1.2 ms are launches, attention and sampling; reading 3.1 GB at 80% of 4.8 TB/s takes 0.8 ms;
2 x 1.54e9 operations per row at half of the peak of 989 TFLOP/s take 6.2 us, which is more from 129 rows on."""
