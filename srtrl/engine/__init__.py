"""The decoder: pages, continuous batching, one forward pass, sampling, verification."""
