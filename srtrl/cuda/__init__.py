"""Decoder and update on a CUDA device: the runner, its graphs and shapes, and the Triton kernels."""
