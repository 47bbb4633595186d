"""Objects and errors as messages between the processes of a run."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch import Tensor

from .errors import TrainingError

SHORT = 4096  # bytes that travel at once; the rest of a longer message follows


class _Pickler(pickle.Pickler):
    """Writes tensors as arrays of NumPy, which takes a tenth of the time."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not Tensor or value.dtype is torch.bfloat16:
            return NotImplemented
        return torch.from_numpy, (value.detach().cpu().numpy(),)


def packed(value: Any) -> Tensor:
    """Returns an object as bytes, uint8 (N,): their number, its pickle, and zeros up to
    :data:`SHORT` bytes."""
    file = io.BytesIO(bytes(8))
    file.seek(8)
    _Pickler(file, protocol=5).dump(value)
    message = torch.zeros(max(SHORT, file.tell()), dtype=torch.uint8)
    message[: file.tell()] = torch.frombuffer(file.getbuffer(), dtype=torch.uint8)
    message[:8].view(torch.int64)[0] = file.tell()
    return message


def size_of(message: Tensor) -> int:
    """Returns the number of bytes of a message that count, from its first 8 bytes."""
    return int(message[:8].view(torch.int64))


def unpacked(message: Tensor) -> Any:
    """Returns the object of a message from another rank of this run."""
    return pickle.loads(message[8 : size_of(message)].numpy().data)


def portable(error: Exception) -> Exception:
    """Returns the error; one with its text if it cannot be pickled for other ranks."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return TrainingError(f"{type(error).__name__}: {error}")
    return error


def agreed(error: Exception) -> Exception:
    """Returns an error that every rank has, marked as such (pickling loses the mark): only the
    first rank prints it."""
    error.agreed = True  # type: ignore[attr-defined]
    return error
