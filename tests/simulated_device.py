"""A device beside the host, simulated: its tensors lie in memory of the CPU and say that they are elsewhere.

Inside the block of :func:`simulated` the device ``meta`` has numbers. As with a GPU, its tensors meet those of the
host only by copies, and every operation for which a GPU's queue must run empty before the host goes on is recorded.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

NAME = "meta"
WAITS = {
    "_local_scalar_dense",  # item(), bool(), int(), float()
    "equal",
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "bincount",
    "linalg_inv_ex",
    "linalg_cholesky",
}
"""Operations whose result, or its size, a GPU gives to the host."""
_COPIES = ("_to_copy", "copy_")


class Remote(Tensor):
    """A tensor of the device; ``inner`` has its numbers, and shares memory as a view does."""

    inner: Tensor
    is_meta = False  # the package refuses tensors without numbers

    @staticmethod
    def __new__(cls, inner: Tensor) -> Remote:
        return Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=torch.device(NAME),
        )

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        raise AssertionError(f"{function} of a tensor of the device, outside of the block")


class Device(TorchDispatchMode):
    """Computes what is asked of the device.

    Attributes:
        waits: how often the host waited, by operation and line of the package.
        operations: number of operations on the device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[tuple[str, str]] = Counter()
        self.operations = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        options = dict(options or {})
        given = [t for t in tree_leaves((arguments, options)) if isinstance(t, Tensor)]
        remote = [t for t in given if isinstance(t, Remote)]
        name = function.__name__.split(".")[0]
        on_device = bool(remote)
        if name == "copy_":
            on_device = isinstance(arguments[0], Remote)
        elif options.get("device") is not None:
            on_device = options["device"].type == NAME
            options["device"] = torch.device("cpu")
        if remote or on_device:
            self.operations += 1
            self._look(name, function, arguments, options, on_device)
        options.pop("pin_memory", None)
        known = {id(t.inner): t for t in remote}
        out = function(*tree_map(_inner, arguments), **tree_map(_inner, options))
        if name == "copy_":
            return arguments[0]

        def wrapped(value: Any) -> Any:
            if not isinstance(value, Tensor) or not on_device:
                return value
            if id(value) in known:
                return known[id(value)]
            return Remote(value)

        return tree_map(wrapped, out)

    def _look(
        self, name: str, function: Any, arguments: Any, options: dict[str, Any], on_device: bool
    ) -> None:
        """Counts a wait, and refuses what a GPU would."""
        host = [
            t
            for t in tree_leaves((arguments, options))
            if isinstance(t, Tensor) and not isinstance(t, Remote)
        ]
        if name in _COPIES:
            crosses = isinstance(arguments[name == "copy_"], Remote) != on_device
            later = options.get("non_blocking", len(arguments) > 2 and arguments[2])
            if crosses and (not later or not on_device):  # a copy to the host is read at once
                self._wait(name)
            return
        if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
            numbers = [t for t in arguments[1] if isinstance(t, Tensor)]
            if any(t.dtype in (torch.bool, torch.uint8) for t in numbers) or any(
                not isinstance(t, Remote) for t in numbers
            ):
                self._wait(f"{name} by a mask or by numbers on the host")
            host = [t for t in host if all(t is not n for n in numbers)]
        sized = name == "repeat_interleave" and options.get("output_size") is None
        checked = name == "segment_reduce" and not options.get("unsafe", False)
        if name in WAITS or sized or checked:
            self._wait(name)
        if any(t.dim() for t in host):
            raise RuntimeError(
                f"Expected all tensors to be on the same device: {function} of "
                f"{[tuple(t.shape) for t in host]} on the host"
            )

    def _wait(self, name: str) -> None:
        own = [f for f in traceback.extract_stack() if "/fedmtl/" in f.filename]
        place = "outside"
        if own:
            place = f"{own[-1].filename.rsplit('/fedmtl/', 1)[1]}:{own[-1].name}"
        self.waits[name, place] += 1


def _inner(value: Any) -> Any:
    if isinstance(value, Remote):
        return value.inner
    return value


@contextmanager
def simulated() -> Iterator[Device]:
    """Gives the device ``meta`` numbers inside the block."""
    before = torch.__future__.get_overwrite_module_params_on_conversion()
    # parameters of a module that moves become tensors of the device themselves
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        with Device() as device:
            yield device
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(before)
