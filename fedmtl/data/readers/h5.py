"""HDF5 files of TensorFlow Federated: ``examples/<client>/<field>``, one row an example."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ..._extras import h5py
from ...errors import DataError
from .folders import listed_files
from .images import with_progress

H5 = (".h5", ".hdf5")
Stored = TypeVar("Stored")
Fields = dict[str, Any]
"""A client's fields, arrays of the same length."""


def divided(root: Path, suffixes: Sequence[str]) -> tuple[list[Path], list[Path]]:
    """Returns the files for training and for test, which have ``test`` in their names: ``root``
    itself or those in its folder, with one of ``suffixes``. Files for test only are the data."""
    if root.is_dir():
        files = listed_files(root, suffixes)
    else:
        files = [root]
    files = [file for file in files if file.suffix.lower() in suffixes]
    # the files of TensorFlow Federated are called fed_emnist_train.h5 and fed_emnist_test.h5
    test = [file for file in files if "test" in file.name]
    train = [file for file in files if file not in test]
    if train:
        return (train, test)
    return (test, [])


def read_h5(
    files: Sequence[Path], fields: Sequence[str], store: Callable[[Fields, str], Stored]
) -> dict[str, Stored]:
    """Returns the values that ``store`` makes of every client with examples, in the order of the
    file.

    Args:
        files: one, HDF5 with a group ``examples``, in it a group for each client, in it a dataset
            for each field.
        fields: the fields that every client must have.
        store: is given a client's fields and their place, for messages.

    Raises:
        DataError: several files, h5py is not installed, the file is not HDF5, a group or a field is
            missing, lengths disagree, or there is no client.
    """
    file, *others = files
    if others:
        raise DataError(
            f"{file.parent} holds {len(files)} .h5 files; give one, or a train and a test file."
        )
    # one after the other, since the raw fields of all clients may not fit in memory
    clients = with_progress(_clients(file, fields), f"reading {file.name}")
    # a client without examples has nothing to train or test on
    stored = {
        client: store(values, f"{file}: client {client!r}")
        for client, values in clients
        if len(values[fields[0]])
    }
    if not stored:
        raise DataError(
            f"{file}: there are no clients in the group 'examples'; at least one is needed."
        )
    return stored


def _clients(file: Path, fields: Sequence[str]) -> Iterator[tuple[str, Fields]]:
    if not file.is_file():
        raise DataError(f"{file} does not exist or is not a file.")
    try:
        with h5py.File(file, "r") as content:
            clients = content.get("examples")
            if not isinstance(clients, h5py.Group):
                raise DataError(
                    f"{file}: group 'examples' is missing; accepted: the HDF5 of "
                    "TensorFlow Federated."
                )
            for client in clients:
                where = f"{file}: client {client!r}"
                group = clients[client]
                for field in fields:
                    if not isinstance(group, h5py.Group) or not isinstance(
                        group.get(field), h5py.Dataset
                    ):
                        raise DataError(
                            f"{where}: field {field!r} is missing; it must be a dataset."
                        )
                columns = {field: _values(group[field]) for field in fields}
                # a scalar has no rows to count
                lengths = {
                    field: values.shape[0] if values.ndim else -1
                    for field, values in columns.items()
                }
                if len(set(lengths.values())) > 1 or -1 in lengths.values():
                    each = ", ".join(f"{field!r} {length}" for field, length in lengths.items())
                    raise DataError(
                        f"{where}: fields have different numbers of examples ({each}); "
                        "they must agree."
                    )
                yield client, columns
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file} cannot be read as HDF5 ({error}); it may be truncated.") from error


def _values(dataset: Any) -> np.ndarray:
    """Returns the values of a field, texts decoded."""
    return np.asarray(
        (dataset if h5py.check_string_dtype(dataset.dtype) is None else dataset.asstr())[()]
    )
