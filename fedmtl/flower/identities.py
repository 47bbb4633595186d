"""The identity keys of a run over nodes, as its settings have them."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import ConfigError
from ..secure.identity import PREFIX, PUBLIC
from ..secure.masks import KEY
from ..trainer import Trainer


def checked_identities(
    trainer: Trainer, identities: Mapping[str, str] | None
) -> dict[str, bytes] | None:
    """Returns the public identity keys of all clients, in the order of the population; None for a
    run without secure sums.

    Args:
        trainer: the settings.
        identities: ``"ed25519:..."`` by the name of the client.

    Raises:
        ConfigError: keys that are not needed, missing keys, keys of other clients than those of
            the population, texts that are no keys, or one key for two clients.
    """
    privacy = trainer.privacy
    secure = privacy is not None and privacy.aggregation is not None
    if not secure and identities is None:
        return None
    if not secure:
        raise ConfigError(
            "identities= are keys for secure sums, and the settings have none: leave them out, or "
            "set the aggregation of the privacy to SecureAggregation(...)."
        )
    if identities is None:
        raise ConfigError(
            "privacy.aggregation needs the public keys of all clients here: "
            "identities={NAME: 'ed25519:...'}, each made on its own node with fedmtl identity NAME."
        )
    names = trainer.data.ids
    for name in [*identities, *names]:
        if name not in names or name not in identities:
            raise ConfigError(
                f"identities= has the keys of the {len(names):,} clients of the population and of "
                f"nobody else; {name!r} is only in one of the two."
            )
    keys: dict[str, bytes] = {}
    owners: dict[str, str] = {}
    for name in names:
        text = identities[name]
        if not isinstance(text, str) or not PUBLIC.fullmatch(text):
            raise ConfigError(
                f"identities= of client {name!r} is no public key; fedmtl identity prints one, "
                f"'{PREFIX}' and {2 * KEY} hexadecimal digits."
            )
        owner = owners.setdefault(text, name)
        if owner != name:
            raise ConfigError(
                f"identities= has one key for clients {owner!r} and {name!r}; each makes a key of "
                "its own, with fedmtl identity NAME."
            )
        keys[name] = bytes.fromhex(text.removeprefix(PREFIX))
    return keys
