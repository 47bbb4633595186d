"""Messages of the secure sum as bytes, read strictly.

A message is a head, fixed fields and at last a table or a row. The head is the name of the format,
its version, the kind of the message, and the digest of the attempt's parameters. A table is a
number of entries, and each entry the number of a client and bytes of one length, in ascending order
of the numbers. All numbers are little-endian. A message that is not exactly so is refused in a
sentence that has nothing of the message.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from enum import IntEnum

from ..errors import SecureSumError

_NAME = b"fmsa"
_VERSION = 1
_HEAD = struct.Struct("<4sBB32s")
_NUMBER = struct.Struct("<I")
DIGEST = 32
"""Bytes of a digest."""


class Kind(IntEnum):
    """The kinds of messages, in the order of a round."""

    KEYS = 1
    ROSTER = 2
    SHARES = 3
    BOXES = 4
    ROW = 5
    NAMES = 6
    OPENING = 7


def refused(kind: Kind, why: str) -> SecureSumError:
    """Returns the refusal of a message of one kind; ``why`` ends its sentence."""
    return SecureSumError(f"A message of the secure sum ({kind.name.lower()}) is refused: {why}.")


def digest(*parts: bytes) -> bytes:
    """Returns SHA-256 of the parts with their lengths, so that no two lists of parts have one
    digest."""
    found = hashlib.sha256()
    for part in parts:
        found.update(struct.pack("<Q", len(part)))
        found.update(part)
    return found.digest()


def number(value: int) -> bytes:
    """Returns a whole number from 0 to 2**32 - 1 as 4 bytes."""
    return _NUMBER.pack(value)


def table(entries: Mapping[int, bytes]) -> bytes:
    """Returns a table of entries by the numbers of clients."""
    rows = [number(place) + entries[place] for place in sorted(entries)]
    return number(len(entries)) + b"".join(rows)


def packed(kind: Kind, attempt: bytes, *parts: bytes) -> bytes:
    """Returns a message.

    Args:
        kind: of the message.
        attempt: digest of the attempt's parameters.
        parts: fixed fields, and a table or a row.
    """
    return b"".join((_HEAD.pack(_NAME, _VERSION, kind, attempt), *parts))


class Reader:
    """Reads one message from its beginning to its end.

    Args:
        message: the bytes, from anybody.
        kind: that is expected.
        attempt: digest of the attempt's parameters.

    Raises:
        SecureSumError: it is another kind of message, of another version, or of another attempt.
    """

    def __init__(self, message: bytes, kind: Kind, attempt: bytes) -> None:
        self._kind = kind
        if not isinstance(message, bytes):
            raise self.refused("it is not bytes")
        self._message = message
        self._place = 0
        # The settings of the two sides are compared here, before anything of the message is used.
        name, version, found, of = _HEAD.unpack(self.take(_HEAD.size))
        if name != _NAME:
            raise self.refused("it does not begin as a message of the secure sum does")
        if version != _VERSION:
            raise self.refused(f"its version is another one than {_VERSION}")
        if found != kind:
            raise self.refused("it is a message of another kind")
        if of != attempt:
            raise self.refused("it is of another run, round or attempt, or of other settings")

    def refused(self, why: str) -> SecureSumError:
        """Returns the refusal of this message; ``why`` ends its sentence."""
        return refused(self._kind, why)

    def take(self, size: int) -> bytes:
        """Returns the next ``size`` bytes.

        Raises:
            SecureSumError: there are fewer.
        """
        end = self._place + size
        if end > len(self._message):
            raise self.refused("it is too short")
        part = self._message[self._place : end]
        self._place = end
        return part

    def number(self) -> int:
        """Returns the next number, from 0 to 2**32 - 1.

        Raises:
            SecureSumError: the message ends before.
        """
        found: int = _NUMBER.unpack(self.take(_NUMBER.size))[0]
        return found

    def expect(self, value: bytes, why: str) -> None:
        """Refuses the message with the sentence's end ``why`` unless ``value`` comes next."""
        if self.take(len(value)) != value:
            raise self.refused(why)

    def rest(self, size: int) -> memoryview:
        """Returns the last ``size`` bytes.

        Raises:
            SecureSumError: there are more, or fewer.
        """
        if len(self._message) - self._place != size:
            raise self.refused("it has another length than such a message has")
        part = memoryview(self._message)[self._place :]
        self._place += size
        return part

    def table(self, size: int) -> dict[int, bytes]:
        """Returns the table at the end of the message: entries of ``size`` bytes by the numbers of
        clients.

        Raises:
            SecureSumError: the message ends before or after the table, or a client is named twice
                or out of order.
        """
        count = self.number()
        # The length is checked before anything is made of a number that anybody may have written.
        self.rest(count * (_NUMBER.size + size))
        self._place -= count * (_NUMBER.size + size)
        entries: dict[int, bytes] = {}
        last = -1
        for _ in range(count):
            place = self.number()
            if place <= last:
                raise self.refused("it names a client twice, or clients out of order")
            entries[place] = self.take(size)
            last = place
        return entries
