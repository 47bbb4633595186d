"""Identities: the keys by which clients know each other in secure sums, whoever delivers their
messages."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path

from ..errors import ConfigError, DataError
from ..privacy import ClientPrivacy
from ..secure.masks import KEY, Identity
from ..trainer import Trainer

_PREFIX = "ed25519:"
_PUBLIC = re.compile(rf"{_PREFIX}[0-9a-f]{{{2 * KEY}}}")
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
    return _PREFIX + Identity(secret).public.hex()


def read_identity(path: Path) -> Identity:
    """Returns the identity in a key file of :func:`new_identity`.

    Args:
        path: of the file.

    Raises:
        DataError: it cannot be read, or is no key file. Nothing of its content is in the message.
    """
    try:
        text = path.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"the key file {path} cannot be read.") from error
    if not _PRIVATE.fullmatch(text):
        raise DataError(f"{path} is no key file; make one with fedmtl identity NAME.")
    return Identity(bytes.fromhex(text.strip()))


def checked_identities(
    trainer: Trainer, identities: Mapping[str, str] | None
) -> dict[str, bytes] | None:
    """Returns the public identity keys of all clients, in the order of the population; None for a
    run without secure sums.

    Args:
        trainer: the settings.
        identities: ``"ed25519:..."`` by the name of the client.

    Raises:
        ConfigError: keys where none are needed, none where they are, of other clients than those of
            the population, or texts that are no keys.
    """
    privacy = trainer.privacy
    secure = isinstance(privacy, ClientPrivacy) and privacy.aggregation is not None
    if not secure and identities is None:
        return None
    if not secure:
        raise ConfigError(
            "identities= are keys for secure sums, and the settings have none: leave them out, or "
            "set ClientPrivacy(aggregation=SecureAggregation(...))."
        )
    if identities is None:
        raise ConfigError(
            "ClientPrivacy.aggregation needs the public keys of all clients here: "
            "identities={NAME: 'ed25519:...'}, each made on its own node with fedmtl identity NAME."
        )
    names = trainer.data.ids
    for name in [*identities, *names]:
        if name not in names or name not in identities:
            raise ConfigError(
                f"identities= has the keys of the {len(names):,} clients of the population and of "
                f"nobody else; {name!r} is only in one of the two."
            )
    keys = {}
    for name in names:
        text = identities[name]
        if not isinstance(text, str) or not _PUBLIC.fullmatch(text):
            raise ConfigError(
                f"identities= of client {name!r} is no public key; fedmtl identity prints one, "
                f"'{_PREFIX}' and {2 * KEY} hexadecimal digits."
            )
        keys[name] = bytes.fromhex(text.removeprefix(_PREFIX))
    return keys
