"""The public parameters of one attempt at a secure sum; all sides have them before it begins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from .._check import Checked, Count, Whole
from ..errors import ConfigError
from .masks import KEY
from .roster import accepted, least_roster
from .wire import digest, number


@dataclass(frozen=True, kw_only=True)
class PublicParameters(Checked):
    """The public parameters of one attempt to add up the rows of one round.

    All of them are in the digest that every message begins with and every signature is of, so that
    no message of another attempt, or of other settings, is taken for one of this.

    Args:
        identities: the public identity key of every client of the population, 32 bytes by name.
            Clients are numbered in this order. The keys come from the settings, never from the
            server.
        run: name of the run.
        round: its number, from 0.
        attempt: number of the attempt at the round, from 0.
        settings: digest of all other settings.
        length: D, numbers of a row.
        colluding: t, clients of a roster that may tell the server all they have.
        missing: d, clients of a roster that may be lost after it is fixed.
        bits: of a word of a sum; sums are modulo 2**bits.

    Raises:
        ConfigError: a value out of range, a key of another length, two clients with one key, or a
            population that is too small for any roster.
    """

    identities: Mapping[str, bytes]
    run: str
    round: Whole
    attempt: Whole
    settings: str
    length: Count
    colluding: Whole
    missing: Whole
    bits: Literal[32, 64] = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, key in self.identities.items():
            if not isinstance(key, bytes) or len(key) != KEY:
                raise ConfigError(f"The identity key of client {name!r} is not 32 bytes.")
        if len(set(self.identities.values())) < len(self.identities):
            raise ConfigError("Two clients have one identity key; each has a key of its own.")
        if len(self.identities) < self.min_roster:
            raise ConfigError(
                f"A secure sum of {len(self.identities):,} clients, of which {self.colluding:,} "
                f"may collude and {self.missing:,} may be missing, protects none of them; it takes "
                f"{self.min_roster:,} clients."
            )

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Returns the names of the population, in the order of their numbers."""
        return tuple(self.identities)

    @cached_property
    def places(self) -> Mapping[str, int]:
        """Returns the number of every client, from 0, by name."""
        return {name: place for place, name in enumerate(self.names)}

    @cached_property
    def digest(self) -> bytes:
        """Returns the digest of the parameters, 32 bytes."""
        numbers = (
            self.round,
            self.attempt,
            self.length,
            self.colluding,
            self.missing,
            self.bits,
        )
        parts = [b"fedmtl secure sum", self.run.encode(), self.settings.encode()]
        parts += [str(value).encode() for value in numbers]
        for name, key in self.identities.items():
            parts += [name.encode("utf-8", "surrogatepass"), key]
        return digest(*parts)

    def place(self, name: str) -> int:
        """Returns the number of a client.

        Raises:
            ConfigError: it is not in the population.
        """
        if name not in self.places:
            raise ConfigError(f"Client {name!r} is not in the population of the secure sum.")
        return self.places[name]

    def threshold(self, roster: int) -> int:
        """Returns T, the clients of a roster of n that are needed from the roster to the end."""
        return roster - self.missing

    @property
    def min_roster(self) -> int:
        """Returns the size of the smallest roster that protects its clients."""
        return least_roster(self.colluding, self.missing)

    def accepts(self, roster: int) -> bool:
        """Returns True if a roster of n clients protects each of them."""
        return accepted(roster, self.colluding, self.missing)

    def statement(self, place: int, keys: bytes) -> bytes:
        """Returns the text that a client signs: its keys in this attempt."""
        return b"fedmtl keys of a secure sum" + self.digest + number(place) + keys
