"""Copies of tensors between the host and a device."""

from __future__ import annotations

import torch
from torch import Tensor


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns a tensor on a device; a copy from the host does not wait for the GPU.

    Args:
        tensor: on any device; it is returned itself if it is on ``device``.
        device: the device of the result.

    Example:
        >>> import torch
        >>> from fedmtl._devices import on_device
        >>> on_device(torch.arange(3), torch.device("cpu")).tolist()
        [0, 1, 2]
    """
    # From pageable memory CUDA returns when it has read the numbers, so that the source may change.
    # A copy to the host is waited for: its numbers would be read before they have come.
    return tensor.to(device, non_blocking=tensor.device.type == "cpu")
