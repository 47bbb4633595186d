"""The things on which clients and server agree in an attempt: keys and digests."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .masks import KEY, SIGNATURE, TAG, derived, is_signed
from .parameters import PublicParameters
from .shamir import SHARE
from .wire import DIGEST, Reader, digest, number, table

ENTRY = 2 * KEY + DIGEST + SIGNATURE
"""Bytes of the keys of one client in a roster."""
BOX = 2 * SHARE + TAG
"""Bytes of a box."""


@dataclass(frozen=True)
class Keys:
    """The keys of one client in an attempt.

    Attributes:
        mask, box: public, 32 bytes each.
        own: digest of the seed of its own mask.
    """

    mask: bytes
    box: bytes
    own: bytes


def checked_keys(public: PublicParameters, place: int, entry: bytes, reader: Reader) -> Keys:
    """Returns the keys of an entry of a roster, if their client has signed them."""
    if place >= len(public.names):
        raise reader.refused("it names a client that is not in the population")
    name = public.names[place]
    keys = entry[:-SIGNATURE]
    text = public.statement(place, keys)
    if not is_signed(public.identities[name], entry[-SIGNATURE:], text):
        raise reader.refused(f"the keys of client {name!r} are not signed by it for this attempt")
    return Keys(keys[:KEY], keys[KEY : 2 * KEY], keys[2 * KEY :])


def box_key(agreed: bytes, roster: bytes, sender: int, receiver: int) -> bytes:
    """Returns the key of the one box that a client sends another under one roster."""
    # The direction: two boxes under one key would have one nonce.
    return derived(agreed, b"fedmtl box", roster, number(sender), number(receiver))


def mask_key(agreed: bytes, views: bytes, one: int, other: int) -> bytes:
    """Returns the key of the mask that two clients share if their views are the same."""
    # Their numbers: a client that repeats the public key of another has other masks all the same.
    ends = number(min(one, other)) + number(max(one, other))
    return derived(agreed, b"fedmtl mask", views, ends)


def own_key(seed: bytes, views: bytes, place: int) -> bytes:
    """Returns the key of a client's own mask."""
    return derived(seed, b"fedmtl own mask", views, number(place))


def views_digest(roster: bytes, sent: Iterable[int]) -> bytes:
    """Returns the digest of the facts on which two clients must agree for their masks to cancel:
    the roster, and the clients whose boxes came."""
    return digest(b"fedmtl views", roster, table(dict.fromkeys(sent, b"")))


def roster_digest(public: PublicParameters, entries: bytes) -> bytes:
    """Returns the digest of a roster, to which boxes are bound.

    Args:
        public: parameters of the attempt.
        entries: its table.
    """
    return digest(b"fedmtl roster", public.digest, entries)


def list_digest(came: Iterable[int]) -> bytes:
    """Returns the digest of a list of clients whose rows came."""
    return digest(b"fedmtl names", table(dict.fromkeys(came, b"")))
