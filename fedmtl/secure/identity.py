"""Identity keys in files and as text: by them clients know each other in secure sums, and need not
trust the carrier of their messages."""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path

from ..errors import ConfigError, DataError
from .masks import KEY, Identity

PREFIX = "ed25519:"
"""Prefix of a public key as text."""
PUBLIC = re.compile(rf"{PREFIX}[0-9a-f]{{{2 * KEY}}}")
_PRIVATE = re.compile(rf"[0-9a-f]{{{2 * KEY}}}\s*")


def new_identity(path: Path) -> str:
    """Makes the identity key of a client.

    Args:
        path: of a new file for the private key, which stays on the node of the client. Only its
            owner may read it.

    Returns:
        The public key, ``"ed25519:..."``, for the settings of all nodes and the server.

    Raises:
        ConfigError: there is a file already, or it cannot be written.
    """
    secret = secrets.token_bytes(KEY)
    try:
        # another key in its place would end the client's part in all runs with the old one
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise ConfigError(
            f"the key file {path} cannot be made: {error.strerror}. Give a new file in a folder "
            "that exists."
        ) from error
    with os.fdopen(file, "w", encoding="ascii") as stream:
        stream.write(f"{secret.hex()}\n")
    return PREFIX + Identity(secret).public.hex()


def read_identity(path: Path) -> Identity:
    """Returns the identity in a key file of :func:`new_identity`.

    Args:
        path: of the file.

    Raises:
        DataError: it cannot be read, or is no key file. Nothing of its content is in the message.
    """
    try:
        text = path.read_text(encoding="ascii")
    except OSError as error:
        raise DataError(f"the key file {path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError:
        text = ""
    if not _PRIVATE.fullmatch(text):
        raise DataError(f"{path} is no key file; make one with fedmtl identity NAME.")
    return Identity(bytes.fromhex(text.strip()))
