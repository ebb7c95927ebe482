"""Host to device without a wait."""

import torch
from torch import Tensor


def copy_to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """`tensor`, of the host, on `device`; on CUDA the host does not wait for the work queued there.

    A plain copy waits for all of it, so that the device idles while the host prepares the next micro-batch. The pinned
    memory in between is reused once the copy is done.
    """
    if torch.device(device).type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
