"""What the choice among other libraries' attention says of them; goes with it (`attention_backends.py`)."""

import torch


def unsupported(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why FlashAttention is not for such values on `device`, whoever packages it, as a clause; None: it may be."""
    if device.type != "cuda":
        return f"the device is {device.type}, and the kernel is for cuda"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"keys and values are {dtype}, and the kernel takes bfloat16 and float16"
    if head_dim > 256 or head_dim % 8 != 0:
        return f"heads are {head_dim} wide, and the kernel takes multiples of 8 up to 256"
    return None


def too_old(device: torch.device) -> str | None:
    """The same of a CUDA device that no FlashAttention runs on."""
    capability = torch.cuda.get_device_capability(device)
    if capability >= (8, 0):
        return None
    found = "{}.{}".format(*capability)
    return f"{torch.cuda.get_device_name(device)} has compute capability {found}, and the kernel needs 8.0"


def first_line(error: BaseException) -> str:
    """What a library says went wrong, without the stack that C++ adds."""
    return (str(error).splitlines() or [type(error).__name__])[0]
