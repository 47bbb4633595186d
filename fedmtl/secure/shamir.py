"""Shamir's scheme: a secret is divided into shares, of which a threshold gives it back and fewer
say nothing (Shamir, "How to share a secret", CACM 1979).

The secret is the value at 0 of a polynomial over the whole numbers modulo 2**255 - 19, whose other
coefficients are drawn by the operating system; a share is its value at a client's point.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

PRIME = 2**255 - 19
SECRET = 31
"""Bytes of a secret, all of which are whole numbers below the prime."""
SHARE = 32
"""Bytes of a share."""


def split(secret: bytes, points: Sequence[int], threshold: int) -> list[int]:
    """Divides a secret into shares.

    Args:
        secret: 31 bytes.
        points: of the clients, distinct and from 1 to 2**32.
        threshold: T, shares that give the secret back; from 1 to the number of points.

    Returns:
        The share of every point, from 0 to 2**255 - 20.
    """
    coefficients = [secrets.randbelow(PRIME) for _ in range(threshold - 1)]
    coefficients.append(int.from_bytes(secret, "little"))
    shares = []
    for point in points:
        value = 0
        # Horner's rule, from the highest coefficient to the secret.
        for coefficient in coefficients:
            value = (value * point + coefficient) % PRIME
        shares.append(value)
    return shares


def weights(points: Sequence[int]) -> list[int]:
    """Returns Lagrange's weights of the value at 0: the secret is the sum of the shares times them.

    Args:
        points: of as many shares as the threshold, distinct and from 1 to 2**32.
    """
    found = []
    for point in points:
        above = 1
        below = 1
        for other in points:
            if other != point:
                above = above * other % PRIME
                below = below * (other - point) % PRIME
        found.append(above * pow(below, -1, PRIME) % PRIME)
    return found


def joined(shares: Sequence[int], weighted: Sequence[int]) -> bytes | None:
    """Returns the secret of shares, 31 bytes; None if they are of no secret of that length.

    Args:
        shares: of the points of which the weights are.
        weighted: of :func:`weights`.
    """
    products = [share * weight for share, weight in zip(shares, weighted, strict=True)]
    value = sum(products) % PRIME
    # Wrong shares give any number of the field, nearly all of which are too large.
    if value >> (8 * SECRET):
        return None
    return value.to_bytes(SECRET, "little")
