"""Functions that run without Python's interpreter, so that several threads of them do not wait for one another."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., object])

_known: dict[Any, Any] = {}
_lock = threading.Lock()


def without_interpreter(function: Function) -> Function:
    """Return the function compiled by TorchScript; the function itself where that is not available.

    Every operation of PyTorch gives Python's interpreter lock back and takes it again, and a thread that finds it taken
    goes to sleep. Small operations in two threads then take as long as in one. A compiled function takes the lock
    once. It calls the same operations in the same order, so that results have the same bits.

    Args:
        function: of tensors, numbers and lists of these, within the part of Python that TorchScript knows.
    """
    with _lock:
        if function not in _known:
            _known[function] = _compiled(function)
    known: Function = _known[function]
    return known


def _compiled(function: Callable[..., object]) -> Callable[..., object]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # TorchScript is deprecated, in favour of compilers that need a C compiler
            compiled: Callable[..., object] = torch.jit.script(function)
    except (AttributeError, RuntimeError, OSError):  # no TorchScript in this PyTorch or Python; no source to read
        return function
    return compiled
