"""How privacy figures are written: an epsilon or a delta that is shown is never below the one that was spent."""

from __future__ import annotations

import math
from decimal import ROUND_CEILING, Context, Decimal


def rounded_up(value: float, digits: int = 4) -> str:
    """Return ``value`` with at most ``digits`` significant digits, rounded up.

    The number is read as Python prints it (``1e-5`` is written ``1e-05``, not ``1.0001e-05``), and the text read back
    as a float is at least ``value``.

    Args:
        value: an epsilon or a delta; infinity and NaN are written as ``"inf"`` and ``"nan"``.
        digits: significant digits, at least 1.
    """
    value = float(value)
    if not math.isfinite(value):
        return f"{value:g}"
    up = Context(prec=digits, rounding=ROUND_CEILING).plus(Decimal(repr(value)))
    return f"{float(up):.{digits}g}"
