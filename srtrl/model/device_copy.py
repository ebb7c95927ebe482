"""An old name of `attention.copy_to_device`, until the device runner imports it from there."""

from srtrl.model.attention import copy_to_device

__all__ = ["copy_to_device"]
