"""Between the host and a device whose work is queued: what may be asked without waiting, and copies that nobody waits
for.

A kernel is queued and the program goes on. Whoever asks a tensor of the device for a number waits until everything
before it is computed, and the device then waits for the program. So a round asks once, for the sum that it releases.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def waits(device: torch.device) -> bool:
    """Return whether reading a number of this device means to wait for it: everywhere but on the CPU."""
    return device.type != "cpu"


def known(condition: Tensor) -> bool:
    """Return whether all entries of a boolean tensor are true, as far as that is known without waiting: False off the
    CPU. A caller does then what is right in either case."""
    return not waits(condition.device) and bool(condition.all())


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the host on a device; the copy is queued, nothing waits for it."""
    return tensor.to(device, non_blocking=True)


def sent_together(tensors: list[Tensor], device: torch.device) -> list[Tensor]:
    """Return int64 tensors of the host on a device, in a single queued copy from pinned memory; on a CPU themselves."""
    if not waits(device):
        return tensors
    sizes = [t.numel() for t in tensors]
    joined = torch.empty(sum(sizes), dtype=torch.int64, pin_memory=device.type == "cuda")
    torch.cat([t.reshape(-1) for t in tensors], out=joined)
    parts = sent(joined, device).split(sizes)
    return [part.view(t.shape) for part, t in zip(parts, tensors, strict=True)]


@contextmanager
def float32_products(device: torch.device, *, tf32: bool) -> Iterator[None]:
    """Inside the block, float32 products and convolutions on a GPU may round their factors to TF32 (10 bits of a
    fraction), or must not. Sums in float64 know nothing of it, and the setting of before comes back."""
    if device.type == "cpu":
        yield
        return
    backends: list[Any] = [torch.backends.cuda.matmul, torch.backends.cudnn]
    name: str = "allow_tf32"
    value: bool | str = tf32
    if hasattr(backends[0], "fp32_precision"):  # since PyTorch 2.9
        backends[1] = backends[1].conv
        name, value = "fp32_precision", "tf32" if tf32 else "ieee"
    before = [getattr(backend, name) for backend in backends]
    for backend in backends:
        setattr(backend, name, value)
    try:
        yield
    finally:
        for backend, earlier in zip(backends, before, strict=True):
            setattr(backend, name, earlier)
