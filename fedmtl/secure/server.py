"""The server of one attempt at a secure sum: bytes in, bytes out, and at last the sum."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import numpy as np

from ..errors import SecureSumError
from .agreement import (
    BOX,
    ENTRY,
    Keys,
    checked_keys,
    list_digest,
    mask_key,
    own_key,
    roster_digest,
    views_digest,
)
from .masks import KEY, Pair, Words
from .parameters import PublicParameters
from .shamir import SHARE, joined, weights
from .wire import Kind, Reader, digest, number, packed, table

_SEARCHED = 200
"""Answers among which a wrong one is looked for: the time grows with their number to the third
power, and a client that lies must not keep the server busy."""


class SecureSumServer:
    """The server of one attempt: it delivers messages, and unmasks the sum of the rows.

    Messages of clients are taken one by one, in any order within a step. A method that makes the
    next messages ends the step; a later message is refused, and its client is missing.

    Args:
        public: parameters of the attempt.
    """

    def __init__(self, public: PublicParameters) -> None:
        self._public = public
        self._probe = Pair(secrets.token_bytes(KEY))
        self._expected: Kind | None = Kind.KEYS
        self._came: set[int] = set()  # whose messages of this step have come
        self._entries: dict[int, bytes] = {}
        self._roster: dict[int, Keys] = {}
        self._roster_digest = b""
        self._boxes: dict[int, dict[int, bytes]] = {}
        self._views = b""
        self._sent: frozenset[int] = frozenset()  # whose boxes came
        self._words = Words(public.length, public.bits)
        self._rows: frozenset[int] = frozenset()  # whose rows came
        self._shares: dict[int, dict[int, int]] = {}

    def take(self, name: str, message: bytes) -> None:
        """Takes a message of a client.

        Args:
            name: of the client that the message comes from.
            message: its answer in the step that is open.

        Raises:
            SecureSumError: it is refused, and the client is as if it had not answered.
        """
        # A message after the end could only be of use to somebody else.
        if self._expected is None:
            raise SecureSumError("A message of the secure sum is refused: the sum has ended.")
        kind = self._expected
        reader = Reader(message, kind, self._public.digest)
        place = self._public.place(name)
        # The network says whose node it comes from; nobody answers for another client.
        reader.expect(number(place), "it is of another client than the one that sent it")
        if place in self._came:
            raise reader.refused("the client has answered this step already")
        if kind != Kind.KEYS and place not in self._open_to():
            raise reader.refused("the client was missing before")
        takers = {
            Kind.KEYS: self._take_keys,
            Kind.SHARES: self._take_boxes,
            Kind.ROW: self._take_row,
            Kind.OPENING: self._take_shares,
        }
        takers[kind](place, reader)
        self._came.add(place)

    @property
    def waiting(self) -> tuple[str, ...]:
        """Returns the clients whose answers in the step that is open have not come."""
        left = sorted(self._open_to() - self._came)
        return tuple(self._public.names[place] for place in left)

    def _open_to(self) -> set[int] | frozenset[int]:
        """Returns the clients that have answered every step before."""
        if self._expected == Kind.KEYS:
            return set(range(len(self._public.names)))
        if self._expected == Kind.SHARES:
            return set(self._roster)
        if self._expected == Kind.ROW:
            return self._sent
        return self._rows

    def _take_keys(self, place: int, reader: Reader) -> None:
        entry = bytes(reader.rest(ENTRY))
        keys = checked_keys(self._public, place, entry, reader)
        # Every client would refuse a roster with such a key.
        if self._probe.agreed(keys.mask) is None or self._probe.agreed(keys.box) is None:
            raise reader.refused("it has a key with which nothing is secret")
        self._roster[place] = keys
        self._entries[place] = entry

    def _take_boxes(self, place: int, reader: Reader) -> None:
        reader.expect(self._roster_digest, "it is of another roster")
        boxes = reader.table(BOX)
        # A box that is left out would make its receiver refuse those of all others.
        if boxes.keys() != self._roster.keys() - {place}:
            raise reader.refused("it does not have a box for every other client of the roster")
        self._boxes[place] = boxes

    def _take_row(self, place: int, reader: Reader) -> None:
        # Its masks would not cancel, and spoil the sum.
        reader.expect(self._views, "its client has seen other boxes")
        size = self._public.bits // 8
        row = reader.rest(self._public.length * size)
        self._words.add(np.frombuffer(row, dtype=f"<u{size}"))

    def _take_shares(self, place: int, reader: Reader) -> None:
        reader.expect(list_digest(self._rows), "it answers another list of names")
        shares = reader.table(SHARE)
        if shares.keys() != self._sent:
            raise reader.refused("it does not have one share of every client that sent boxes")
        # Any numbers: a client passes on the shares of others, and is not to blame for them.
        values = {of: int.from_bytes(share, "little") for of, share in shares.items()}
        self._shares[place] = values

    def _end(self, kind: Kind, after: Kind | None, least: int) -> frozenset[int]:
        """Ends a step; returns the clients that answered it."""
        if self._expected != kind:
            raise SecureSumError(f"The step of {kind.name.lower()} is not the one that is open.")
        came = frozenset(self._came)
        if len(came) < least:
            self._expected = None
            raise SecureSumError(
                f"{len(came):,} clients are left in the step of {kind.name.lower()}, and the "
                f"secure sum takes {least:,}; nothing is released."
            )
        self._expected = after
        self._came = set()
        return came

    def roster(self) -> bytes:
        """Ends the first step; returns the message to all clients whose keys came.

        Raises:
            SecureSumError: too few clients for a roster, or another step is open.
        """
        public = self._public
        self._end(Kind.KEYS, Kind.SHARES, public.min_roster)
        entries = table(self._entries)
        self._roster_digest = roster_digest(public, entries)
        return packed(Kind.ROSTER, public.digest, entries)

    def boxes(self) -> dict[str, bytes]:
        """Ends the second step; returns the message to each client whose boxes came, by name.

        Raises:
            SecureSumError: more clients are missing than may be, or another step is open.
        """
        public = self._public
        self._sent = self._end(Kind.SHARES, Kind.ROW, public.threshold(len(self._roster)))
        self._views = views_digest(self._roster_digest, self._sent)
        messages = {}
        for place in sorted(self._sent):
            for_it = {of: boxes[place] for of, boxes in self._boxes.items() if of != place}
            parts = (self._roster_digest, table(for_it))
            messages[public.names[place]] = packed(Kind.BOXES, public.digest, *parts)
        return messages

    def names(self) -> bytes:
        """Ends the third step; returns the message to all clients whose rows came.

        Raises:
            SecureSumError: more clients are missing than may be, or another step is open.
        """
        public = self._public
        self._rows = self._end(Kind.ROW, Kind.OPENING, public.threshold(len(self._roster)))
        names = table(dict.fromkeys(self._rows, b""))
        return packed(Kind.NAMES, public.digest, self._views, names)

    @property
    def counted(self) -> tuple[str, ...]:
        """Returns the clients whose rows are in the sum, once the third step has ended."""
        return tuple(self._public.names[place] for place in sorted(self._rows))

    def total(self) -> np.ndarray:
        """Ends the last step; returns the sum of the rows that came: int64 (D,), from
        -2**(bits - 1) to below 2**(bits - 1).

        Raises:
            SecureSumError: more clients are missing than may be, a share is wrong, or another step
                is open. Nothing is known of the sum then.
        """
        threshold = self._public.threshold(len(self._roster))
        answered = sorted(self._end(Kind.OPENING, None, threshold))
        # One set of weights is enough for all secrets.
        responders = answered[:threshold]
        weighted = weights([place + 1 for place in responders])
        # All secrets are checked before the first mask is taken out: no sum is half open.
        seeds = {}
        for place in sorted(self._sent):
            seed = self._secret(place, responders, weighted)
            if seed is None:
                raise self._wrong(place, answered, threshold)
            seeds[place] = seed
        for place, seed in seeds.items():
            if place in self._rows:
                self._words.subtract_mask(own_key(seed, self._views, place))
            else:
                self._unmask(place, Pair(seed))
        return self._words.signed()

    def _secret(
        self, place: int, responders: Sequence[int], weighted: Sequence[int]
    ) -> bytes | None:
        """Returns the seed that responders' shares of one client give; None if it is not the
        client's."""
        shares = [self._shares[responder][place] for responder in responders]
        seed = joined(shares, weighted)
        if seed is None:
            return None
        keys = self._roster[place]
        # The digest or key that the client signed in the first step tells a wrong share.
        if place in self._rows:
            right = digest(seed) == keys.own
        else:
            right = Pair(seed).public == keys.mask
        if right:
            return seed
        return None

    def _unmask(self, lost: int, pair: Pair) -> None:
        """Takes the masks that the rows share with a client that was lost out of the sum."""
        for place in sorted(self._rows):
            agreed = pair.agreed(self._roster[place].mask)
            assert agreed is not None  # the client itself has found it secret
            key = mask_key(agreed, self._views, place, lost)
            if place < lost:
                self._words.subtract_mask(key)
            else:
                self._words.add_mask(key)

    def _wrong(self, place: int, answered: Sequence[int], threshold: int) -> SecureSumError:
        """Returns the error of wrong shares of one client; it names the sender if a single answer
        is wrong and there are enough others."""
        names = self._public.names
        why = "too few others answered to find whose"
        if len(answered) > threshold:
            why = "more than one answer, or the shares themselves, are wrong"
        suspects = answered
        if len(answered) > _SEARCHED:
            why = "too many answered to find whose"
            suspects = []
        for suspect in suspects:
            others = [one for one in answered if one != suspect][:threshold]
            if len(others) < threshold:
                break
            weighted = weights([one + 1 for one in others])
            if self._secret(place, others, weighted) is not None:
                why = f"that of {names[suspect]!r} is wrong"
                break
        return SecureSumError(
            f"The shares of client {names[place]!r} do not give its secret back ({why}); nothing "
            "is released."
        )
