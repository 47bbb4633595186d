"""The honest rows of a sum: how many a server that is not honest cannot go below.

In a roster of n clients, t tell the server all they have, and N = n - t are honest. At most d may
be missing after the roster is fixed, so T = n - d shares give a secret back. An honest client takes
part in one roster. It accepts boxes of all names but d, and answers one list of names that came: at
least n - d, its own among them, all with a box. It gives a share of the own mask's seed of each
name on the list, and a share of the mask key of each name that is not. Let S be honest clients
whose sum the server learns.

1. The own mask of a client of S is known, so its mask key is not: T - t = N - d honest answers are
   needed for each of the two, an answer gives one of them, and 2 (N - d) > N if N > 2 d.
2. Keys of masks are made of the roster and of the names whose boxes came. A mask between two
   clients that saw different ones therefore cancels with nothing, and only clients that saw the
   same are in a sum that is not a sum of smaller ones.
3. An honest client v outside of S shares a mask with each of S unless all of S left out its box.
   Let l clients be left out. The mask keys of the y others must be known.
4. That takes N - d honest answers in which v is missing although its box came. An answer has at
   most d missing, among them those whose box was left out, and never its own client. With the
   N - l - y clients of S,

       y (N - d) <= (N - l - y) min(d - l, y) + l min(d, y) + y min(d, y - 1).

So S has at least h = N - max(l + y) clients, over the l and y for which that holds. A server that
follows the protocol has d missing: l + y >= d. Two sums are impossible if h > d: a client of one
that is outside of the other is among its l, so the other sum would have at most d clients.

The argument is tested by exhaustive search for small rosters and by attacks for larger ones. It is
no theorem of a paper: documents promise protection from a server that is honest but curious.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np


@lru_cache(maxsize=4096)
def honest_rows(roster: int, colluding: int, missing: int) -> int:
    """Returns h, the least number of honest clients in a sum that the server can learn; 0 if
    nothing bounds it.

    Args:
        roster: n, clients.
        colluding: t of them, at least 0.
        missing: d of them, at least 0.
    """
    honest = roster - colluding
    # Both kinds of shares of one client could be had.
    if honest <= 2 * missing:
        return 0
    left_out = np.arange(missing + 1)[:, None]
    known = np.arange(honest)[None, :]
    inside = honest - left_out - known
    answers = inside * np.minimum(missing - left_out, known)
    answers = answers + left_out * np.minimum(missing, known)
    answers = answers + known * np.minimum(missing, np.maximum(known - 1, 0))
    possible = (inside >= 1) & (known * (honest - missing) <= answers)
    return int(inside[possible].min())


def accepted(roster: int, colluding: int, missing: int) -> bool:
    """Returns True if a roster is large enough: its sum has the rows of at least two honest
    clients, and of more than 2 d.

    Args:
        roster: n, clients.
        colluding: t of them.
        missing: d of them.
    """
    return honest_rows(roster, colluding, missing) >= max(2, 2 * missing + 1)


@lru_cache(maxsize=256)
def least_roster(colluding: int, missing: int) -> int:
    """Returns the size of the smallest roster that is large enough, about t + 3.5 d.

    Args:
        colluding: t, at least 0.
        missing: d, at least 0.
    """
    size = colluding + 2 * missing + 2
    while not accepted(size, colluding, missing):
        size += 1
    return size
