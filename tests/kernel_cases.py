"""What the tests of Triton kernels share: the device they run on."""

import torch

KERNEL_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""Without a CUDA device kernels run under Triton's interpreter (see `conftest.py`): keep shapes tiny."""
