"""A client's part in one attempt of a secure sum: bytes in, bytes out."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from functools import partial
from threading import Lock

import numpy as np

from ..errors import ConfigError
from .agreement import (
    BOX,
    ENTRY,
    Keys,
    box_key,
    checked_keys,
    list_digest,
    mask_key,
    own_key,
    roster_digest,
    views_digest,
)
from .masks import KEY, Identity, Pair, Words, sealed, unsealed
from .parameters import PublicParameters
from .shamir import SECRET, SHARE, split
from .wire import Kind, Reader, digest, number, packed, refused, table

Contribute = Callable[[int], np.ndarray]
"""The size of the roster -> the words that a client contributes, (D,), charged before they exist.
It is called once an attempt, after all checks."""

# the questions to a client, in order
_QUESTIONS = (Kind.ROSTER, Kind.BOXES, Kind.NAMES)


class Member:
    """One client's part in one attempt. All its secrets are new, and in memory only.

    Args:
        public: parameters of the attempt.
        name: of the client.
        identity: its identity key.
        seeds: the secrets of this client in this attempt, if another process began it; None for
            new ones.

    Attributes:
        keys: the message of the first step.

    Raises:
        ConfigError: the client is not in the population, or has another key there.
    """

    def __init__(
        self, public: PublicParameters, name: str, identity: Identity, seeds: bytes | None = None
    ) -> None:
        self._public = public
        self._place = public.place(name)
        if public.identities[name] != identity.public:
            raise ConfigError(
                f"The identity key of client {name!r} on this node is not that of the settings."
            )
        if seeds is None:
            seeds = secrets.token_bytes(2 * SECRET + KEY)
        self._seeds = seeds
        # Both are shared out: the server needs one of them, if the row came or if it did not.
        self._mask_seed = seeds[:SECRET]
        self._own_seed = seeds[SECRET : 2 * SECRET]
        self._mask = Pair(self._mask_seed)
        self._box = Pair(seeds[2 * SECRET :])
        keys = self._mask.public + self._box.public + digest(self._own_seed)
        self._entry = keys + identity.signed(public.statement(self._place, keys))
        self.keys = packed(Kind.KEYS, public.digest, number(self._place), self._entry)
        self._entries: dict[int, bytes] = {}
        self._roster: dict[int, Keys] = {}
        self._roster_digest = b""
        self._agreed: dict[int, bytes] = {}  # with the box keys of others
        # the shares that this client holds, of mask keys and of own masks, by client
        self._held: dict[int, tuple[bytes, bytes]] = {}
        self._views = b""
        # the digest of each question that was answered, and the answer
        self._answers: dict[Kind, tuple[bytes, bytes]] = {}
        self._over = False
        # Two questions at once could both find that none was answered.
        self._lock = Lock()

    def saved(self) -> dict[str, bytes]:
        """Returns all that the client has to know at the next message, for a node that computes
        each answer in a process of its own. It is secret, and stays in memory; at the end of the
        client's part it has nothing but its answers."""
        held = {place: mask + own for place, (mask, own) in self._held.items()}
        parts = {
            "seeds": self._seeds,
            "roster": table(self._entries),
            "held": table(held),
            "views": self._views,
            "over": bytes([self._over]),
        }
        for kind, (asked, answer) in self._answers.items():
            parts[f"asked {kind.name}"] = asked
            parts[f"answer {kind.name}"] = answer
        return parts

    @classmethod
    def restored(
        cls, public: PublicParameters, name: str, identity: Identity, saved: Mapping[str, bytes]
    ) -> Member:
        """Returns the client as :meth:`saved` left it.

        Args:
            public: parameters of the attempt, the same.
            name: of the client.
            identity: its identity key.
            saved: the client's own, from nobody else.

        Raises:
            SecureSumError: it is not of this attempt.
        """
        over = saved["over"] == b"\x01"
        ended = f"answer {Kind.NAMES.name}" in saved
        seeds = saved["seeds"]
        if ended:
            seeds = bytes(2 * SECRET + KEY)  # forgotten, and of no more use
        member = cls(public, name, identity, seeds)
        roster = Reader(
            packed(Kind.ROSTER, public.digest, saved["roster"]), Kind.ROSTER, public.digest
        )
        entries = roster.table(ENTRY)
        if entries and not ended:
            member._agree(entries, roster)
        held = Reader(packed(Kind.BOXES, public.digest, saved["held"]), Kind.BOXES, public.digest)
        for place, both in held.table(2 * SHARE).items():
            member._held[place] = (both[:SHARE], both[SHARE:])
        member._views = saved["views"]
        member._over = over
        for kind in _QUESTIONS:
            if f"answer {kind.name}" in saved:
                member._answers[kind] = (saved[f"asked {kind.name}"], saved[f"answer {kind.name}"])
        return member

    def shares(self, roster: bytes) -> bytes:
        """Answers the roster with boxes for all other clients.

        Raises:
            SecureSumError: the message is refused; the client has not moved.
        """
        return self._answered(Kind.ROSTER, roster, self._divided)

    def row(self, boxes: bytes, contribute: Contribute) -> bytes:
        """Answers the boxes of the other clients with the masked row.

        Args:
            boxes: the message.
            contribute: charges the client, and returns its words with their noise.

        Raises:
            SecureSumError: the message is refused; the client has not moved.
            Exception: any that ``contribute`` raises. The client has no further answer then.
        """
        return self._answered(Kind.BOXES, boxes, partial(self._masked, contribute))

    def opening(self, names: bytes) -> bytes:
        """Answers the names of the rows that came with one share of every client.

        Raises:
            SecureSumError: the message is refused; the client has not moved.
        """
        return self._answered(Kind.NAMES, names, self._opened)

    def _answered(self, kind: Kind, message: bytes, act: Callable[[Reader], bytes]) -> bytes:
        """Returns the one answer of a step."""
        with self._lock:
            if kind in self._answers:
                # A message that was lost may be repeated, and says nothing new.
                asked, answer = self._answers[kind]
                if asked != digest(message):
                    raise refused(kind, "another one was answered in this attempt")
                return answer
            if self._over:
                raise refused(kind, "the part of this client in the attempt has ended")
            if kind != _QUESTIONS[len(self._answers)]:
                raise refused(kind, "it is out of order")
            answer = act(Reader(message, kind, self._public.digest))
            self._answers[kind] = (digest(message), answer)
            if kind == Kind.NAMES:
                self._forget()
            return answer

    def _forget(self) -> None:
        """Ends the client's part; the answers stay, so that they can be repeated."""
        self._over = True
        self._held = {}
        self._seeds = b""
        self._mask_seed = b""
        self._own_seed = b""

    def _divided(self, reader: Reader) -> bytes:
        public = self._public
        entries = reader.table(ENTRY)
        # A process before this one may have signed other keys for the same attempt.
        if entries.get(self._place) != self._entry:
            raise reader.refused("it does not have the keys of this client")
        if not public.accepts(len(entries)):
            raise reader.refused("it has too few clients to protect this one")
        self._agree(entries, reader)
        whole = self._roster_digest
        points = [place + 1 for place in entries]
        threshold = public.threshold(len(entries))
        pairs = zip(
            split(self._mask_seed, points, threshold),
            split(self._own_seed, points, threshold),
            strict=True,
        )
        boxes = {}
        for place, (mask, own) in zip(entries, pairs, strict=True):
            held = (mask.to_bytes(SHARE, "little"), own.to_bytes(SHARE, "little"))
            if place == self._place:
                self._held[place] = held
            else:
                key = box_key(self._agreed[place], whole, self._place, place)
                boxes[place] = sealed(key, b"".join(held), whole)
        sender = number(self._place)
        return packed(Kind.SHARES, public.digest, sender, whole, table(boxes))

    def _agree(self, entries: dict[int, bytes], reader: Reader) -> None:
        """Takes the signed keys of a roster, and agrees on a secret with each of its clients."""
        roster = {}
        for place, entry in entries.items():
            roster[place] = checked_keys(self._public, place, entry, reader)
        agreed = {}
        for place, theirs in roster.items():
            common = self._box.agreed(theirs.box)
            if common is None:
                raise reader.refused("it has a key with which nothing is secret")
            agreed[place] = common
        self._entries = entries
        self._roster = roster
        self._agreed = agreed
        self._roster_digest = roster_digest(self._public, table(entries))

    def _masked(self, contribute: Contribute, reader: Reader) -> bytes:
        public = self._public
        whole = self._roster_digest
        reader.expect(whole, "it is of another roster")
        boxes = reader.table(BOX)
        # The noise is a share of that of the whole roster, whichever clients are lost after it.
        size = len(self._roster)
        if self._place in boxes or not boxes.keys() <= self._roster.keys():
            raise reader.refused("it has a box of a client that has none for this one")
        if len(boxes) + 1 < public.threshold(size):
            raise reader.refused("it lacks the boxes of more clients than may be missing")
        held = {}
        for place, box in boxes.items():
            held[place] = self._unboxed(place, box, reader)
        views = views_digest(whole, [*boxes, self._place])
        masks = {}
        for place in boxes:
            agreed = self._mask.agreed(self._roster[place].mask)
            if agreed is None:
                raise reader.refused("the roster has a key with which nothing is secret")
            masks[place] = mask_key(agreed, views, self._place, place)
        # From here on the client may be charged: whatever happens, there is no second row.
        self._over = True
        contributed = contribute(size)
        words = Words(public.length, public.bits)
        words.add(_row_of(contributed, public))
        words.add_mask(own_key(self._own_seed, views, self._place))
        for place, key in masks.items():
            # One of the two adds the mask that the other subtracts.
            if self._place < place:
                words.add_mask(key)
            else:
                words.subtract_mask(key)
        self._held.update(held)
        self._views = views
        self._over = False
        return packed(Kind.ROW, public.digest, number(self._place), views, words.to_bytes())

    def _unboxed(self, place: int, box: bytes, reader: Reader) -> tuple[bytes, bytes]:
        """Returns the two shares in a box of client ``place``."""
        key = box_key(self._agreed[place], self._roster_digest, place, self._place)
        content = unsealed(key, box, self._roster_digest)
        if content is None:
            name = self._public.names[place]
            raise reader.refused(f"the box of client {name!r} is not one that it made for this")
        return content[:SHARE], content[SHARE:]

    def _opened(self, reader: Reader) -> bytes:
        public = self._public
        reader.expect(self._views, "it is of another roster or of other boxes")
        came = reader.table(0).keys()
        if not came <= self._held.keys():
            raise reader.refused("it names a client whose box did not come here")
        # The key of its own masks would open the row that it has sent.
        if self._place not in came:
            raise reader.refused("it does not name this client, whose row was sent")
        if len(came) < public.threshold(len(self._roster)):
            raise reader.refused("more clients are missing than may be")
        shares = {}
        for place, (mask, own) in self._held.items():
            # Never both: together they would open the row of that client alone.
            if place in came:
                shares[place] = own
            else:
                shares[place] = mask
        sender = number(self._place)
        return packed(Kind.OPENING, public.digest, sender, list_digest(came), table(shares))


def _row_of(words: np.ndarray, public: PublicParameters) -> np.ndarray:
    """Returns the words that a client contributes, checked."""
    expected = np.dtype(f"<u{public.bits // 8}")
    if words.shape != (public.length,) or words.dtype != expected:
        raise ConfigError(
            f"A client contributes {words.dtype} of shape {words.shape} to a secure sum of "
            f"{public.length:,} words of {public.bits} bits; accepted: {expected.name} of shape "
            f"({public.length},)."
        )
    return words
