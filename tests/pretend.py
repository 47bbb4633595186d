"""A device without a machine: its tensors are tensors of the host that say they are elsewhere, so that code for a GPU
runs, with the right numbers, where there is none, and whatever would wait for a GPU is found.

``PRETEND`` is the device. Inside ``with Pretending() as device:`` its operations are computed on the host. What waits,
on a GPU, until all that was queued is computed (a number that is read, a copy to or from the host that is not queued,
an operation whose result's shape depends on values) is kept in ``device.waits`` by name, and in ``device.crossings``
all that goes to the host or comes from it, also without waiting.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_setup_privateuseone_for_python_backend("pretend")
PRETEND = torch.device("pretend:0")
SHAPED_BY_VALUES = {
    "_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "bincount", "equal", "is_nonzero",
    "_linalg_eigh", "_linalg_svd", "linalg_eig", "histc", "segment_reduce", "linalg_lstsq",
}  # fmt: skip


class Away(Tensor):
    """A tensor of the pretended device; ``here`` is where its numbers are."""

    here: Tensor

    @staticmethod
    def __new__(cls, here: Tensor) -> Away:
        return Tensor._make_wrapper_subclass(
            cls, here.size(), here.stride(), here.storage_offset(), dtype=here.dtype, device=PRETEND
        )

    def __init__(self, here: Tensor) -> None:
        self.here = here

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Away({self.here})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} on the pretended device, outside of Pretending()")


class Pretending(TorchDispatchMode):
    """Computes the pretended device's operations, and notes what waits."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        self.crossings: list[str] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        given = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor)]
        away = [t for t in given if isinstance(t, Away)]
        name, target = func.overloadpacket.__name__, kwargs.get("device")
        moves = target is not None and torch.device(target).type == PRETEND.type
        if not away and not moves:
            return func(*args, **kwargs)
        if target is not None:
            kwargs["device"] = torch.device("cpu")
        leaves = bool(away) and target is not None and not moves
        comes = moves and bool(given) and not away
        if name == "copy_":
            leaves, comes = not isinstance(args[0], Away), not isinstance(args[1], Away)
        queued = kwargs.get("non_blocking", False) or (name == "copy_" and args[2:3] == (True,))
        if leaves or comes:
            self.crossings.append(name)
        if leaves or (comes and not queued):
            self.waits.append(f"{name} {'to' if leaves else 'from'} the host")
        elif self._waits(name, args, kwargs, given, away):
            self.waits.append(name)
        if away and len(away) < len(given) and name != "copy_":  # of a GPU's operations few take numbers of the host
            assert all(t.dim() == 0 for t in given if not isinstance(t, Away)), f"{func} takes tensors of two devices"
        inner = {id(t.here): t for t in away}
        found = func(*tree_map(_here, args), **tree_map(_here, kwargs))
        if leaves and name == "_to_copy":
            return found
        return tree_map(lambda t: inner[id(t)] if id(t) in inner else Away(t) if isinstance(t, Tensor) else t, found)

    @staticmethod
    def _waits(name: str, args: Any, kwargs: Any, given: list[Tensor], away: list[Tensor]) -> bool:
        if name in ("index", "index_put", "index_put_"):
            return any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1])
        if name == "repeat_interleave":
            return kwargs.get("output_size") is None
        return name in SHAPED_BY_VALUES or (name == "where" and len(away) < len(given))


def _here(value: Any) -> Any:
    return value.here if isinstance(value, Away) else value
